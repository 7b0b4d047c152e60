"""Downloads from a hub on loopback: what is asked for, what is kept, and what each wrong answer becomes."""

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from umbel.lang.errors import ModelError
from umbel.srt.weights import open_model
from umbel.srt.weights.catalog import download as module
from umbel.srt.weights.catalog.places import hub_models, model_places
from umbel.srt.weights.catalog.repository import HubName

from ....fake_hub import COMMIT, Answer, FakeHub, HubRequest, serve_hub
from ..tiny import BY_NAME, write_folder, write_gguf

LARGE = b"x" * 20_000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("source") / "tiny"
    write_folder(folder, BY_NAME["qwen3"])
    write_gguf(folder / "tiny-F32.gguf", BY_NAME["qwen3"])
    return {file.name: file.read_bytes() for file in folder.iterdir()}


class Machine(NamedTuple):
    """A user's machine with an empty cache, and the hub that it reaches."""

    hub: FakeHub
    folder: Path

    @property
    def repository(self) -> Path:
        return self.folder / "hf" / "hub" / "models--org--tiny"

    @property
    def left(self) -> list[str]:
        """Names of the files in the cache, but for the small ones that are whole."""
        found = (path for path in self.repository.rglob("*") if path.is_file() and not path.is_symlink())
        return sorted(path.name for path in found if path.stat().st_size >= len(LARGE) or "incomplete" in path.name)


@pytest.fixture
def machine(tmp_path: Path, tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("UMBEL_CACHE", str(tmp_path / "umbel"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # huggingface_hub waits between tries
    with serve_hub(FakeHub(repositories={"org/tiny": dict(tiny)})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield Machine(hub, tmp_path)


def refused(machine: Machine, name: str = "org/tiny") -> str:
    with pytest.raises(ModelError) as caught:
        open_model(name)
    return str(caught.value)


# ------------------------------------------------------------------------------------ what is right


def test_a_model_is_downloaded_once_and_then_opened_without_the_network(machine: Machine) -> None:
    machine.hub.repositories["org/tiny"] |= {"model.py": b"raise SystemExit", "pytorch_model.bin": LARGE}
    source = open_model("org/tiny")
    assert source.name == "org/tiny"
    assert source.tokenizer().encode("the", first=True)
    names = {path.rpartition("/")[2] for path in machine.hub.paths("GET") if "/resolve/" in path}
    assert not names & {"model.py", "pytorch_model.bin", "tiny-F32.gguf"}
    assert (machine.repository / "refs" / "main").read_text() == COMMIT
    asked = len(machine.hub.requests)
    assert open_model("org/tiny").path == source.path
    assert open_model(f"org/tiny@{COMMIT}").path == source.path
    assert len(machine.hub.requests) == asked


def test_a_tag_downloads_that_file_alone(machine: Machine) -> None:
    assert open_model("org/tiny:F32").config["model_type"] == "qwen3"
    assert [path.rpartition("/")[2] for path in machine.hub.paths("GET") if "/resolve/" in path] == []
    assert len([path for path in machine.hub.paths("GET") if path.startswith("/cdn/")]) == 1
    assert "no GGUF file 'Q4_0'; it has F32" in refused(machine, "org/tiny:Q4_0")


def test_the_progress_is_shown(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    open_model("org/tiny")
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("umbel: downloading org/tiny (")
    assert shown[-1].startswith("umbel: org/tiny: 100 % of ")


def test_a_cut_connection_is_resumed_where_it_was_cut(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 500)  # bytes that are written at once

    def cut_once(request: HubRequest, answer: Answer) -> Answer | None:
        if not request.path.startswith("/cdn/") or "range" in request.headers:
            return None
        return Answer(answer.status, answer.body, answer.headers, sent=1000)

    machine.hub.change = cut_once
    assert open_model("org/tiny").path.is_dir()
    ranges = [request.headers["range"] for request in machine.hub.requests if "range" in request.headers]
    assert ranges == ["bytes=1000-"]


def test_what_is_whole_is_not_fetched_again(machine: Machine) -> None:
    machine.hub.change = lambda request, answer: Answer(500) if request.path.startswith("/cdn/") else None
    assert "the hub fails (HTTP 500)" in refused(machine)
    assert "incomplete" not in "".join(machine.left)
    assert not (machine.repository / "refs").exists()
    begun = machine.repository / "blobs" / f"{machine_blob(machine)}.0123abcd.incomplete"
    begun.write_bytes(b"of a killed download")
    machine.hub.change = lambda request, answer: None
    machine.hub.requests.clear()
    open_model("org/tiny")
    assert [path.rpartition("/")[2] for path in machine.hub.paths("GET") if "/resolve/" in path] == []
    assert not begun.exists()


def test_an_interrupt_stops_a_download_and_leaves_nothing_that_looks_whole(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_SECONDS", 0.01)
    aborted: list[bool] = []
    monkeypatch.setattr("huggingface_hub.utils._xet.abort_xet_session", lambda: aborted.append(True))
    asked, goes_on = [], threading.Event()

    def interrupted(request: HubRequest, answer: Answer) -> None:
        if request.method == "GET" and request.path.startswith("/cdn/"):
            asked.append(request)
            os.kill(os.getpid(), signal.SIGINT)
            goes_on.wait(30)

    machine.hub.change = interrupted
    with pytest.raises(KeyboardInterrupt):
        open_model("org/tiny")
    assert not goes_on.is_set()
    assert aborted == [True]
    goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "download":
            thread.join()
    assert machine.left == []
    assert [model.gap for model in hub_models(model_places())] == ["its safetensors file"]
    machine.hub.change = lambda request, answer: None
    assert open_model("org/tiny").path.is_dir()
    assert len(asked) == 1


def machine_blob(machine: Machine) -> str:
    """Returns the name of the weights' blob."""
    plan = module.plan_download(HubName("org/tiny"), model_places())
    return plan.weights[0].blob


# ------------------------------------------------------------------------------- what the hub refuses


def failing(status: int, code: str = "", **headers: str) -> Answer:
    return Answer(
        status, b"{}", {"X-Error-Code": code} | {name.replace("_", "-"): text for name, text in headers.items()}
    )


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        pytest.param(
            failing(403, "GatedRepo"), "org/tiny is gated: accept its terms at http.*/org/tiny, and", id="gated"
        ),
        pytest.param(failing(403), "may not be read .no token was sent, HTTP 403.: give a token", id="403"),
        pytest.param(failing(401), "or it is private .HTTP 401.: .* hf auth login, or set HF_TOKEN", id="401"),
        pytest.param(failing(404, "RepoNotFound"), "the hub has no model 'org/tiny', or it is private", id="404"),
        pytest.param(failing(429, Retry_After="17"), "too many requests .*umbel pull org/tiny in 17 seconds", id="429"),
        pytest.param(failing(503), "the hub fails .HTTP 503.; run umbel pull org/tiny later$", id="503"),
        pytest.param(failing(418), "the hub refuses .HTTP 418", id="418"),
        pytest.param(Answer(200, b"<html>log in"), "no answer of a Hugging Face hub .*HF_ENDPOINT", id="html"),
        pytest.param(Answer(200, b'{"id": "org/tiny"}'), "no answer of a Hugging Face hub .*no commit", id="bare"),
        pytest.param(Answer(200, b"[1]"), "no answer of a Hugging Face hub", id="list"),
    ],
)
def test_each_refusal_says_what_to_do(answer: Answer, message: str, machine: Machine) -> None:
    machine.hub.change = lambda request, right: answer
    with pytest.raises(ModelError, match=message):
        open_model("org/tiny")
    assert machine.left == []


def test_a_model_may_be_gated_at_its_files_only(machine: Machine) -> None:
    gated = failing(401, "GatedRepo")
    machine.hub.change = lambda request, right: gated if "/resolve/" in request.path else None
    assert "org/tiny is gated: accept its terms at" in refused(machine)


@pytest.mark.parametrize("path", ["../../x.json", "/etc/x.json", "a/../../x.json", "a\\x.json", ""])
def test_a_path_that_leads_out_of_the_cache_is_refused(path: str, machine: Machine) -> None:
    machine.hub.repositories["org/tiny"][path] = b"{}"
    assert "is no path in a repository" in refused(machine)


def test_a_token_that_is_refused_is_said(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_a_test")
    message = refused(machine, "org/private")
    assert "the token was refused" in message
    assert "secret" not in message
    assert machine.hub.requests[0].headers["authorization"] == "Bearer hf_secret_of_a_test"


def test_a_name_that_shares_the_organisation_alone_is_not_offered(machine: Machine) -> None:
    open_model("org/tiny")
    assert "Of models here, known names: default, org/tiny." in refused(machine, "org/nothere")
    assert "did you mean 'org/tiny'?" in refused(machine, "org/tinny")
    assert "did you mean 'org/tiny'?" in refused(machine, "orgs/tiny")


def test_an_unknown_revision_is_said(machine: Machine) -> None:
    assert "org/tiny has no revision 'v9'" in refused(machine, "org/tiny@v9")


# --------------------------------------------------------------------------- what the hub sends wrongly


def of_weights(request: HubRequest) -> bool:
    return request.path.startswith("/cdn/")


def other_content(request: HubRequest, answer: Answer) -> Answer | None:
    return Answer(200, b"y" * len(answer.body), answer.headers) if of_weights(request) else None


def html(request: HubRequest, answer: Answer) -> Answer | None:
    return Answer(200, b"<html>busy</html>") if of_weights(request) else None


def too_short(request: HubRequest, answer: Answer) -> Answer | None:
    return Answer(200, answer.body[:-1], answer.headers) if of_weights(request) else None


def always_cut(request: HubRequest, answer: Answer) -> Answer | None:
    return Answer(answer.status, answer.body, answer.headers, sent=0) if of_weights(request) else None


def other_etag(request: HubRequest, answer: Answer) -> Answer | None:
    if request.method != "HEAD" or "model.safetensors" not in request.path:
        return None
    return Answer(302, b"", answer.headers | {"X-Linked-Etag": f'"{"0" * 64}"'})


def no_commit(request: HubRequest, answer: Answer) -> Answer | None:
    if "/resolve/" not in request.path:
        return None
    return Answer(
        answer.status, answer.body, {key: text for key, text in answer.headers.items() if key != "X-Repo-Commit"}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_content, "sent model.safetensors with another content than it lists .* so it was removed"),
        (html, "announced another length than it sent; run: umbel pull org/tiny"),
        (too_short, "announced another length than it sent; run: umbel pull org/tiny"),
        (always_cut, "connection to http://.* failed: RemoteProtocolError"),
        (no_commit, "no answer of a Hugging Face hub"),
    ],
)
def test_nothing_wrong_is_kept(change: object, message: str, machine: Machine) -> None:
    machine.hub.change = change  # type: ignore[assignment]
    with pytest.raises(ModelError, match=message):
        open_model("org/tiny")
    assert machine.left == []
    machine.hub.change = lambda request, answer: None
    assert open_model("org/tiny").path.is_dir()  # nothing is in the way


def test_a_wrong_etag_changes_a_name_and_no_content(machine: Machine) -> None:
    machine.hub.change = other_etag
    assert open_model("org/tiny").tensors


# --------------------------------------------------------------------------------- this machine's part


def test_code_in_a_repository_is_refused_before_its_weights(machine: Machine, tiny: dict[str, bytes]) -> None:
    files = machine.hub.repositories["org/tiny"]
    files["config.json"] = b'{"model_type": "homemade", "auto_map": {"AutoModel": "modeling.Model"}}'
    files["modeling.py"] = b"raise SystemExit"
    assert "defined by code in its repository (auto_map in config.json), which umbel never runs" in refused(machine)
    assert not any(path.startswith("/cdn/") for path in machine.hub.paths("GET"))
    assert list(hub_models(model_places())) == []
    known = json.dumps(json.loads(tiny["config.json"]) | {"auto_map": {"AutoModel": "modeling.Model"}})
    machine.hub.repositories["org/known"] = files | {"config.json": known.encode()}
    assert not (open_model("org/known").path / "modeling.py").exists()


def test_an_encoder_is_refused_before_its_weights(machine: Machine) -> None:
    machine.hub.repositories["org/tiny"]["config.json"] = b'{"model_type": "bert", "architectures": ["BertModel"]}'
    assert refused(machine).startswith("org/tiny is not downloaded: model_type 'bert' is an encoder, whose tokens")
    assert not any(path.startswith("/cdn/") for path in machine.hub.paths("GET"))
    assert list(hub_models(model_places())) == []


def test_a_model_type_is_known_to_umbel_or_to_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from umbel.srt.models.families import FAMILIES

    assert [family for family in (*FAMILIES, *CONFIG_MAPPING_NAMES) if not module._is_known(family)] == []
    assert not any(module._is_known(family) for family in ("homemade", "internlm2", "", "None"))


def test_a_disk_that_is_too_small_is_seen_before_the_download(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(machine.folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    assert "needs " in (message := refused(machine))
    assert "has 1 MB free; make room (umbel models, umbel rm NAME), or set HF_HOME" in message
    assert machine.left == []


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    assert "is full; make room, or set HF_HOME to a folder on another disk" in refused(machine)
    assert machine.left == []


def test_offline_says_what_was_looked_for_where_and_what_is_there(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_model("org/tiny")
    machine.hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert open_model("org/tiny").name == "org/tiny"
    message = refused(machine, "org/tinny")
    assert f"org/tinny is not on this machine (looked in {machine.folder / 'hf' / 'hub'})" in message
    assert "HF_HUB_OFFLINE" in message
    assert "did you mean 'org/tiny'?" in message
    for name, what in (
        ("org/tiny@v2", "has the revisions main"),
        ("org/tiny:Q4_0", "has no GGUF file"),
    ):
        assert what in refused(machine, name)
    next(machine.repository.glob("snapshots/*/tokenizer.json")).unlink()
    assert "org/tiny is here without tokenizer.json (in " in refused(machine)
    assert machine.hub.requests == []


def test_a_hub_that_cannot_be_reached_says_so(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    message = refused(machine)
    assert "the connection to http://127.0.0.1:9 failed: ConnectError" in message
    assert message.count("Connection refused") == 1


def test_a_model_that_is_here_is_said_to_be_when_the_hub_cannot_be_asked(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = open_model("org/tiny").path
    begins = f"org/tiny is here, in {path}, but the hub cannot be asked for newer files: "
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=re.escape(f"{begins}the connection to http://127.0.0.1:9 failed: ")):
        module.download_latest(HubName("org/tiny"), model_places())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=re.escape(f"{begins}HF_HUB_OFFLINE forbids connections")) as caught:
        module.download_latest(HubName("org/tiny"), model_places())
    assert "did you mean" not in str(caught.value)
