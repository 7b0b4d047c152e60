"""Pictures by URL: what is allowed arrives, and nothing else is as much as asked for."""

import contextlib
import http.server
import itertools
import socket
import threading
from collections.abc import Iterator
from typing import NoReturn

import pytest
import umbel as ul
from umbel.interpreter.media import MAX_MEDIA_BYTES
from umbel.interpreter.remote_images import Web, fetch_image

HOSTS = ["pictures.example.org", "mirror.example.org:8080"]
PUBLIC = "93.184.215.14"
PICTURE = b"\x89PNG\r\n\x1a\n and so on"


class Answers(http.server.BaseHTTPRequestHandler):
    """By path. `/length` promises more than it sends."""

    def do_GET(self) -> None:
        path = self.path
        self.server.asked.append((self.headers["Host"], path, self.headers["Cookie"]))  # type: ignore[attr-defined]
        if path.startswith("/to/"):
            self._send(302, b"", {"Location": path.removeprefix("/to/")})
        elif path == "/round":
            self._send(301, b"", {"Location": "/round"})
        elif path == "/gone":
            self._send(404, b"no such picture")
        elif path == "/zip":
            self._send(200, PICTURE, {"Content-Encoding": "gzip"})
        elif path == "/large":
            self._send(200, b"", {"Content-Length": str(MAX_MEDIA_BYTES + 1)})
        elif path == "/endless":
            self._send(200, bytes(MAX_MEDIA_BYTES + 2))
        elif path == "/length":
            self._send(200, PICTURE, {"Content-Length": "1000"})
        elif path == "/silent":
            self.server.over.wait(30)  # type: ignore[attr-defined]
        else:
            self._send(200, PICTURE)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # the other side has seen enough
            self.wfile.write(body)

    def log_message(self, *said: object) -> None:
        pass


class Host(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.asked: list[tuple[str, str, str | None]] = []
        self.connected: list[str] = []
        self.over = threading.Event()

    def web(self, *addresses: str, seconds: float = 30.0) -> Web:
        """Names lead to these addresses, and whoever connects to one comes here."""

        def connect(address: str, port: int) -> socket.socket:
            self.connected.append(f"{address} {port}")
            return socket.create_connection(self.server_address, 5)

        return Web(lambda host, port: list(addresses or (PUBLIC,)), connect, seconds=seconds)


@pytest.fixture
def host() -> Iterator[Host]:
    with Host() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def test_a_picture_of_an_allowed_host_arrives(host: Host) -> None:
    assert fetch_image("http://pictures.example.org/a.png?size=2#part", hosts=HOSTS, web=host.web()) == PICTURE
    assert fetch_image("http://mirror.example.org:8080/a.png", hosts=HOSTS, web=host.web()) == PICTURE
    assert host.asked == [
        ("pictures.example.org", "/a.png?size=2", None),
        ("mirror.example.org:8080", "/a.png", None),
    ]
    assert host.connected == [f"{PUBLIC} 80", f"{PUBLIC} 8080"]


def test_the_bytes_go_into_a_prompt(host: Host) -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += ul.image(ul.fetch_image("http://pictures.example.org/a.png", hosts=HOSTS, web=host.web()))
        s += ul.gen("x")

    assert program.run(backend=ul.Echo(["seen"]))["x"] == "seen"


def test_a_redirect_is_followed_where_it_leads_to_an_allowed_host(host: Host) -> None:
    url = "http://pictures.example.org/to/http://mirror.example.org:8080/to//a.png"
    assert fetch_image(url, hosts=HOSTS, web=host.web()) == PICTURE
    assert [asked[0] for asked in host.asked] == ["pictures.example.org", *["mirror.example.org:8080"] * 2]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("to/http://elsewhere.example.org/a.png", "elsewhere.example.org is not among"),
        ("to/http://127.0.0.1/a.png", "127.0.0.1 is not among"),
        ("to/file:///etc/passwd", "write 'http://' or 'https://'"),
        ("to/http://pictures.example.org@127.0.0.1/", "write 'http://' or 'https://'"),
        ("to/https://pictures.example.org:99999/", "is not among"),
        ("round", "redirected more than 3 times"),
        ("gone", "the host answers 404"),
        ("zip", "comes compressed"),
        ("large", "is larger than 20971520 bytes"),
        ("endless", "is larger than 20971520 bytes"),
    ],
)
def test_what_is_no_picture_of_an_allowed_host_is_refused(host: Host, path: str, problem: str) -> None:
    with pytest.raises(ul.ParameterError, match=problem):
        fetch_image(f"http://pictures.example.org/{path}", hosts=HOSTS, web=host.web())
    assert {asked[0] for asked in host.asked} == {"pictures.example.org"}


def test_an_answer_that_breaks_off_is_an_error(host: Host) -> None:
    with pytest.raises(ul.ConnectionLostError, match=r"pictures.example.org broke off"):
        fetch_image("http://pictures.example.org/length", hosts=HOSTS, web=host.web())


def test_an_answer_that_does_not_come_ends_at_the_deadline(host: Host) -> None:
    with pytest.raises(ul.DeadlineError, match="took too long"):
        fetch_image("http://pictures.example.org/silent", hosts=HOSTS, web=host.web(seconds=0.05))


def test_redirects_have_no_time_of_their_own(host: Host) -> None:
    times = itertools.chain([0.0, 1.0], itertools.repeat(31.0))
    web = Web(lambda name, port: [PUBLIC], host.web().connect, now=times.__next__)
    with pytest.raises(ul.DeadlineError, match="took too long"):
        fetch_image("http://pictures.example.org/to//a.png", hosts=HOSTS, web=web)
    assert len(host.asked) == 1


def test_a_host_that_cannot_be_found_is_an_error() -> None:
    def resolve(host: str, port: int) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    with pytest.raises(ul.ConnectionLostError, match="Name or service not known"):
        fetch_image("https://pictures.example.org/a.png", hosts=HOSTS, web=Web(resolve))


def test_redirects_do_not_leave_https() -> None:
    """The fake host speaks no TLS; a redirect is all that is asked of it, so its words are given to the check."""
    from umbel.interpreter import remote_images

    class Response:
        status = 302

        def getheader(self, name: str) -> str:
            return "http://pictures.example.org/a.png"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_images, "_answer", lambda *_: _entered(Response()))
        with pytest.raises(ul.ParameterError, match="leads from https to 'http:"):
            fetch_image("https://pictures.example.org/a.png", hosts=HOSTS)


class _entered:
    def __init__(self, value: object) -> None:
        self.value = value

    def __enter__(self) -> object:
        return self.value

    def __exit__(self, *raised: object) -> None:
        pass


@pytest.mark.parametrize(
    "hosts",
    [
        *("example.org", [], ["127.0.0.1"], ["localhost"], ["*.example.org"], ["a.b/c"], [b"x"]),
        *(["example.org:0"], ["example.org:65536"], [f"{'a' * 64}.org"]),
    ],
)
def test_hosts_are_full_names(hosts: list[str]) -> None:
    with pytest.raises(ul.ParameterError, match=r"hosts=|no host that may be allowed"):
        fetch_image("https://example.org/a.png", hosts=hosts)


# ------------------------------------------------------------------------------------------ the canary

LOOPBACK = [
    "127.0.0.1", "127.1", "127.0.1", "2130706433",
    "0x7f000001", "0x7f.0.0.1", "0177.0.0.1", "017700000001", "0", "0.0.0.0",
    "localhost", "localhost.localdomain", "LOCALHOST", "127.0.0.1.", "[::1]", "[::]",
    "[::ffff:127.0.0.1]", "[::ffff:7f00:1]",    "[0:0:0:0:0:ffff:127.0.0.1]", "[::127.0.0.1]", "[64:ff9b::7f00:1]",
    "[2002:7f00:1::]", "[fe80::1%25eth0]",
    "169.254.169.254",
    "127.0.0.1%00.example.org", "１２７.0.0.1", "127。0。0。1", "ⓛocalhost", "%31%32%37.0.0.1", "127.0.0.1%2f",
]  # fmt: skip
DISGUISES = [
    "http://{}/", "https://{}/a.png", "http://pictures.example.org@{}/", "http://pictures.example.org:80@{}/", "//{}/a",
    "http:\\\\{}\\a", "http://{}\\@pictures.example.org/", "http://{}#@pictures.example.org/", "http://{}?@pictures.example.org/",
    "http://pictures.example.org\\.{}/", "http:{}/", "http:///{}/", "HTTP://{}", "http://{} pictures.example.org/",
    "http://pictures.example.org\t@{}/", "http://\n{}/", "gopher://{}/", "ftp://{}/", "data://{}/", "jar:http://{}!/",
]  # fmt: skip
FILES = [
    "file:///etc/passwd", "file://localhost/etc/passwd", "file:/etc/passwd", "FILE:///etc/passwd", "/etc/passwd",
    "../../etc/passwd", "http://pictures.example.org/../../etc/passwd\\", "url:file:///etc/passwd", "\\\\host\\share",
    "",
]  # fmt: skip
FORMS = [*FILES, *(disguise.format(address) for disguise, address in itertools.product(DISGUISES[:4], LOOPBACK))]
FORMS += [disguise.format("127.0.0.1") for disguise in DISGUISES[4:]]
REBOUND = [
    ["127.0.0.1"], ["10.0.0.1"], ["172.16.3.4"], ["192.168.1.1"], ["169.254.169.254"], ["100.64.0.1"], ["0.0.0.0"],
    ["224.0.0.1"], ["240.0.0.1"], ["255.255.255.255"], ["::1"], ["::"], ["fe80::1"], ["fe80::1%eth0"], ["fc00::1"],
    ["::ffff:127.0.0.1"], ["::ffff:8.8.8.8"], ["2002:7f00:1::"], ["64:ff9b::7f00:1"], ["64:ff9b:1::1"], ["ff02::1"],
    ["fec0::1"], ["5f00::1"], ["2001::1"],
    ["2001:db8::1"], ["198.18.0.1"], ["192.0.2.1"], [PUBLIC, "127.0.0.1"], ["127.0.0.1", PUBLIC], ["not an address"],
]  # fmt: skip


@pytest.fixture
def canary() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield listening


def calls_at(canary: socket.socket) -> int:
    try:
        canary.accept()[0].close()
    except BlockingIOError:
        return 0
    return 1


def test_no_form_of_a_url_reaches_this_machine(canary: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name leads here, and every connection would be made here: what is not refused is seen."""

    def opened(*given: object, **also: object) -> NoReturn:
        raise AssertionError(f"a file was opened: {given}")

    web = Web(lambda host, port: ["127.0.0.1"], lambda address, port: socket.create_connection(canary.getsockname(), 1))
    monkeypatch.setattr("builtins.open", opened)
    assert len(set(FORMS)) >= 120
    for form in FORMS:
        with pytest.raises(ul.ParameterError):
            fetch_image(form, hosts=HOSTS, web=web)
    assert calls_at(canary) == 0


@pytest.mark.parametrize("addresses", REBOUND, ids=str)
def test_an_allowed_name_that_leads_to_no_public_address_is_refused(
    addresses: list[str], canary: socket.socket
) -> None:
    web = Web(lambda host, port: addresses, lambda address, port: socket.create_connection(canary.getsockname(), 1))
    with pytest.raises(ul.ParameterError, match="not a public address"):
        fetch_image("http://pictures.example.org/a.png", hosts=HOSTS, web=web)
    assert calls_at(canary) == 0
