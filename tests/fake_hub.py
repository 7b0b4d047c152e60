"""A Hugging Face hub on loopback: information of models, files with HEAD, Range and redirects, and wrong answers.

    GET /api/models/ORG/REPO[/revision/REV]     the commit and its files, with sizes and digests
    HEAD, GET /ORG/REPO/resolve/REV/PATH        small files at once; large ones by a redirect to /cdn/DIGEST
    GET /cdn/DIGEST                             their content, from a byte on (Range)

There is no Xet storage: no answer names a Xet hash.
"""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
LARGE = (".safetensors", ".gguf", ".bin")  # of Git LFS


@dataclass
class Answer:
    """One answer. `sent`: bytes of the body that are sent before the connection is cut; None: all."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    sent: int | None = None


@dataclass(frozen=True)
class HubRequest:
    method: str
    path: str
    headers: Mapping[str, str]


Change = Callable[[HubRequest, Answer], Answer | None]  # None: as it is


@dataclass
class FakeHub:
    """What the hub has, what was asked, and what it answers wrongly.

    Attributes:
        repositories: "org/repo" → path → content.
        change: gets every request with its right answer, and returns another one.
    """

    address: str = ""
    elsewhere: str = ""  # where large files are: another host, as a network for content is
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    requests: list[HubRequest] = field(default_factory=list)
    change: Change = lambda request, answer: None

    def paths(self, method: str) -> list[str]:
        return [request.path for request in self.requests if request.method == method]

    def answer(self, request: HubRequest) -> Answer:
        self.requests.append(request)
        right = self._right_answer(request)
        return self.change(request, right) or right

    def _right_answer(self, request: HubRequest) -> Answer:
        path = unquote(urlsplit(request.path).path)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self._information(found[1], found[2] or "main")
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(found[1], found[2], found[3], request)
        if found := re.fullmatch(r"/cdn/([0-9a-f]{64})", path):
            contents = (content for files in self.repositories.values() for content in files.values())
            content = next(content for content in contents if hashlib.sha256(content).hexdigest() == found[1])
            return _ranged(request, content, {"ETag": f'"{found[1]}"'})
        return Answer(404)

    def _information(self, repo: str, revision: str) -> Answer:
        files = self.repositories.get(repo)
        if files is None:
            return Answer(401, b'{"error":"Invalid username or password."}', {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", COMMIT):
            return Answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        siblings = []
        for path, content in files.items():
            entry: dict[str, object] = {"rfilename": path, "size": len(content), "blobId": git_sha1(content)}
            if path.endswith(LARGE):
                entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        body = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
        return Answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, repo: str, revision: str, path: str, request: HubRequest) -> Answer:
        content = self.repositories.get(repo, {}).get(path)
        if content is None or revision not in ("main", COMMIT):
            return Answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        headers = {"X-Repo-Commit": COMMIT}
        if not path.endswith(LARGE):
            return _ranged(request, content, {**headers, "ETag": f'"{git_sha1(content)}"'})
        digest = hashlib.sha256(content).hexdigest()
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        return Answer(302, b"", {**headers, "Location": f"{self.elsewhere}/cdn/{digest}"})


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _ranged(request: HubRequest, content: bytes, headers: dict[str, str]) -> Answer:
    found = re.fullmatch(r"bytes=(\d+)-", request.headers.get("range", ""))
    if found is None:
        return Answer(200, content, headers)
    start = int(found[1])
    return Answer(
        206, content[start:], {**headers, "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
    )


@contextmanager
def serve_hub(hub: FakeHub) -> Iterator[FakeHub]:
    """Serves a hub on a free port of 127.0.0.1 until the block ends, and sets its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            answer = hub.answer(HubRequest(self.command, self.path, headers))
            self.send_response(answer.status)
            for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body[: answer.sent])
            self.close_connection = answer.sent is not None

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        hub.elsewhere = f"http://localhost:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
