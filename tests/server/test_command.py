"""The command line of `umbel serve`, its file, and the processes it starts."""

import asyncio
import json
import os
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from umbel.interpreter import cli
from umbel.lang.errors import ParameterError
from umbel.lang.runtime_options import RuntimeOptions
from umbel.server import command
from umbel.server.access import Access
from umbel.server.app import ENDPOINTS, application
from umbel.server.command import LIMITS, OPTIONS, Server, _attributes, _worker_start, bind, main, settings_of, stopping
from umbel.server.front import Front
from umbel.server.limits import HttpLimits
from umbel.srt.in_process import LocalBackend

from ..serving import PATIENCE, ServerProcess, until
from .client import AsgiClient
from .serving import KEY, Serving

FILE = """
port = 4000
served_name = ["small"]
[keys]
team = "sk-one"
[runtime]
model = "oracle"
max_running = 8
[limits]
drain = 5.0
"""


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text(FILE)
    given = ["--config", str(tmp_path / "serve.toml"), "--port", "5000", "--max-running", "4", "--drain", "2"]
    settings = settings_of([*given, "--api-key", "other=sk-two", "--radix-cache", "false"], {})
    assert (settings.port, settings.served_name) == (5000, ["small"])
    assert settings.runtime == {"model": "oracle", "max_running": 4, "radix_cache": False}
    assert settings.limits == HttpLimits(drain=2.0)
    assert settings.keys == {"team": "sk-one", "other": "sk-two"}


def test_the_model_may_stand_alone() -> None:
    assert settings_of(["oracle", "--port", "0"], {}).runtime == settings_of(["--model", "oracle"], {}).runtime
    with pytest.raises(ParameterError, match="MODEL is 'a', and --model is 'b'; write one of them"):
        settings_of(["a", "--model", "b"], {})


def test_gpus_are_chosen_and_shared_on_the_command_line() -> None:
    given = ["--device", "cuda:1", "--memory-share", "0.45", "--chunk-size", "2048", "--max-running", "auto"]
    runtime = settings_of(given, {}).runtime
    assert runtime == {"device": "cuda:1", "memory_share": 0.45, "chunk_size": 2048, "max_running": "auto"}
    assert RuntimeOptions(**runtime).max_running == "auto"


def test_keys_come_from_the_environment_where_none_are_written() -> None:
    environment = {"UMBEL_API_KEY": "sk-env", "UMBEL_ADMIN_KEY": "sk-admin"}
    settings = settings_of([], environment)
    assert (settings.keys, settings.admin_key) == ({"default": "sk-env"}, "sk-admin")
    assert settings_of(["--api-key", "sk-line"], environment).keys == {"default": "sk-line"}


def test_programs_are_named_on_the_line_and_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text('program = ["a.umbel.json:question"]')
    assert settings_of(["--config", str(tmp_path / "serve.toml")], {}).program == ["a.umbel.json:question"]
    assert settings_of(["--program", "b.umbel.json", "--program", "c.umbel.json:x"], {}).program == [
        "b.umbel.json",
        "c.umbel.json:x",
    ]


def test_lines_to_ignore_are_named_on_the_line_and_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text("ignore_line = ['x-id:.*']")
    assert settings_of(["--config", str(tmp_path / "serve.toml")], {}).ignore_line == ["x-id:.*"]
    settings = settings_of(["--ignore-line", "a.*", "--ignore-line", "b"], {})
    assert settings.ignore_line == ["a.*", "b"]
    with socket.socket() as listening:
        assert _worker_start(settings, listening, "default").ignored == ("a.*", "b")


def test_a_pattern_that_is_refused_ends_the_command() -> None:
    with pytest.raises(ParameterError, match=r"--ignore-line '\(a\+\)\+': groups"):
        main(["--ignore-line", "(a+)+"])


@pytest.mark.parametrize("key", ["sk-plain", "c2VjcmV0==", "c2VjcmV0="])
def test_a_key_without_a_name_may_end_with_padding(key: str) -> None:
    assert settings_of(["--api-key", key], {}).keys == {"default": key}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 1", "did you mean 'port'"),
        ("port = 'x'", "Expected `int`"),
        ("port = 65536", "port: Expected `int` <= 65535"),
        ("[limits]\nmost_in_fligt = 1", r"\[limits\] has no 'most_in_fligt'; did you mean 'most_in_flight'"),
        ("limits = 1", "limits: Expected `object`"),
        ("model = 'oracle'", r"write model below \[runtime\]"),
        ("drain = 3.0", r"write drain below \[limits\]"),
        ("port = ", "Invalid value"),
        ("[limits]\ndrain = -1", "drain must be"),
    ],
)
def test_a_file_that_is_wrong_is_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text(text)
    with pytest.raises(ParameterError, match=says):
        settings_of(["--config", str(tmp_path / "serve.toml")], {})


def test_help_has_the_defaults_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings_of(["--help"], {})
    text = " ".join(capsys.readouterr().out.split())
    assert "64 to 256 on a GPU, by its class; default: auto" in text
    assert "requests the gateway holds; more are refused with OverloadedError; default: 2048" in text


def test_an_address_of_another_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--model", "oracle", "--host", "192.0.2.1"]) == 1
    assert "choose another --host" in capsys.readouterr().err


def test_two_keys_of_one_name_are_refused() -> None:
    with pytest.raises(ParameterError, match="two API keys"):
        settings_of(["--api-key", "sk-one", "--api-key", "sk-two"], {})


def test_no_limit_has_the_name_of_an_option_of_the_runtime() -> None:
    assert not set(LIMITS) & set(OPTIONS)


@pytest.mark.parametrize("given", [["--tcp", "tcp://127.0.0.1:1"], ["--tcp-key", "x"], ["--tcp-clients", "x"]])
def test_a_tcp_port_needs_a_key_and_a_list(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--model", "oracle", *given]) == 1
    assert "--tcp, --tcp-key and --tcp-clients belong together" in capsys.readouterr().err


def test_a_tcp_port_is_given_to_the_runtime(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--tcp", "tcp://127.0.0.1:1", "--tcp-key", "server.key", "--tcp-clients", "clients.toml"]
    assert cli.main(["serve", "--model", "oracle", *given]) == 1
    assert "'server.key' cannot be read as a key file" in capsys.readouterr().err


def test_who_connects_before_the_server_runs_is_not_refused() -> None:
    with bind("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname(), timeout=30):
        pass


def test_a_port_that_is_taken_is_an_error_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--model", "oracle", "--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_the_help_says_of_every_limit_and_option_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings_of(["--help"], {})
    printed = " ".join(capsys.readouterr().out.split())
    for name, said in {**_attributes(HttpLimits), **_attributes(RuntimeOptions)}.items():
        if name != "debug":
            assert f"--{name.replace('_', '-')} VALUE {said.rstrip('.')[:60]}" in printed
    assert set(LIMITS) <= set(_attributes(HttpLimits))
    assert set(OPTIONS) <= set(_attributes(RuntimeOptions))


@pytest.mark.parametrize(
    ("left", "line"),
    [
        (0, "stopping"),
        (1, "stopping: 1 request in flight has 30 s to end; Ctrl-C again ends at once"),
        (2, "stopping: 2 requests in flight have 30 s to end; Ctrl-C again ends at once"),
    ],
)
def test_the_line_of_a_server_that_stops_tells_what_it_waits_for(left: int, line: str) -> None:
    assert stopping(left, 30.0) == line


@pytest.mark.processes
@pytest.mark.nightly
def test_a_second_signal_ends_what_runs_with_an_error_and_no_traceback() -> None:
    serving = Serving("--model", "oracle")
    try:
        body = {"model": "oracle", "prompt": "x", "max_tokens": 4000, "n": 16, "stream": True, "ignore_eos": True}
        headers = {"authorization": f"Bearer {KEY}"}
        asked = urllib.request.Request(serving.ready().address + "/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
            answer.readline()
            serving.process.send_signal(signal.SIGINT)
            until(lambda: serving.said("(stopping): 16 requests"), "it does not stop")
            serving.process.send_signal(signal.SIGINT)
            rest = answer.read()
        assert serving.process.wait(PATIENCE) == 0
        assert b'"code":"draining"' in rest
        assert "ending 16 requests before the answer" in serving.log
        assert "Traceback" not in serving.log
    finally:
        serving.end()


def test_a_server_that_cannot_start_ends_with_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["serve", "--model", "oracle", "--port", "0", "--served-name", "a", "--served-name", "a"]
    assert cli.main(arguments) == 1
    assert "the name 'a' twice" in capsys.readouterr().err


class Local(LocalBackend):
    """A runtime without processes."""

    listens_on = ""


ADMINISTRATIVE = [each.path for each in ENDPOINTS if each.admin and each.method == "GET"]
EXPOSED = "every machine that reaches this address may use it; --api-key asks for a key"
BRINGS = ", and --admin-key brings the administrative routes, which are absent"


@pytest.mark.parametrize(
    ("host", "given", "there"),
    [
        ("127.0.0.1", [], True),
        ("localhost", [], True),
        ("0.0.0.0", [], False),
        ("0.0.0.0", ["--admin-key", "sk-admin"], True),
        ("127.0.0.1", ["--api-key", KEY], False),
    ],
)
def test_without_an_admin_key_the_administration_is_there_on_loopback_only(
    host: str, given: list[str], there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fronts: list[Front] = []

    class Kept:
        def __init__(self, front: Front, runtime: object, listening: socket.socket) -> None:
            fronts.append(front)
            listening.close()

        def run(self) -> int:
            return 0

    async def answers() -> tuple[set[bool], set[bool]]:
        client = AsgiClient(application(front), {"authorization": f"Bearer {given[-1] if given else ''}"})
        described = (await client.get("/openapi.json")).json["paths"]
        found = {(await client.get(path)).status != 404 for path in ADMINISTRATIVE}
        return found, {path in described for path in ADMINISTRATIVE}

    monkeypatch.setattr(command, "Server", Kept)
    assert main(["--model", "oracle", "--host", host, "--port", "0", *given]) == 0
    (front,) = fronts
    assert front.alias == "oracle"
    front.backend = LocalBackend()
    assert asyncio.run(answers()) == ({there}, {there})


@pytest.mark.parametrize(
    ("host", "access", "told"),
    [
        ("127.0.0.1", Access(), []),
        ("0.0.0.0", Access(loopback=False), [EXPOSED + BRINGS]),
        ("0.0.0.0", Access(admin_key="sk-admin", loopback=False), [EXPOSED]),
        ("0.0.0.0", Access({"team": KEY}, loopback=False), []),
    ],
)
def test_a_server_that_other_machines_reach_without_a_key_says_so(
    host: str, access: Access, told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        backend = Local()
        server = Server(Front(backend, access), backend, bound)  # type: ignore[arg-type]  # as a Runtime is
        serving = asyncio.create_task(server._serve())
        while not server._front.started:
            await asyncio.sleep(0)
        server.end()
        await serving

    bound = bind(host, 0)
    asyncio.run(scenario())
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == told


@pytest.mark.processes
@pytest.mark.nightly
def test_workers_that_other_machines_reach_have_no_administration_without_an_admin_key() -> None:
    serving = ServerProcess("--model", "oracle", "--host", "0.0.0.0", "--http-workers", "2")
    try:
        until(lambda: serving.said(f"({EXPOSED + BRINGS})"), "no worker says what is absent")
        for path in ADMINISTRATIVE:
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(serving.address + path, timeout=PATIENCE)
    finally:
        serving.end()


async def lived(server: Server, port: int) -> bytes:
    """The whole life of a server, which gets a signal to end while a stream runs → that stream."""
    serving = asyncio.create_task(server._serve())
    while not server._front.started:
        await asyncio.sleep(0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b'{"model": "oracle", "prompt": "x", "max_tokens": 20, "stream": true, "ignore_eos": true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    begun = await reader.readuntil(b"data: ")
    server.end()
    streamed = begun + await reader.read()
    writer.close()
    await serving
    return streamed


def test_ten_servers_start_and_end_and_leave_their_ports_and_nothing_else() -> None:
    """Twice on the same ports. The nightly form starts ten processes."""

    async def scenario(ports: list[int]) -> list[int]:
        sockets = [bind("127.0.0.1", port) for port in ports]
        ports = [each.getsockname()[1] for each in sockets]
        backends = [Local(pool_tokens=1 << 10) for _ in ports]
        servers = [Server(Front(each), each, bound) for each, bound in zip(backends, sockets, strict=True)]  # type: ignore[arg-type]  # as a Runtime is
        streams = await asyncio.gather(*(lived(server, port) for server, port in zip(servers, ports, strict=True)))
        assert all(stream.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for stream in streams)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return ports

    ports = asyncio.run(scenario([0] * 10))
    assert len(set(ports)) == 10
    open_before = len(os.listdir("/proc/self/fd"))
    assert asyncio.run(scenario(ports)) == ports
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_adapters_are_pairs_on_the_line_and_a_table_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert settings_of(["--adapters", "sql=a/b,law=c"], {}).runtime == {"adapters": {"sql": "a/b", "law": "c"}}
    file = tmp_path / "serve.toml"
    file.write_text('[runtime.adapters]\nsql = "a/b"\n', encoding="utf-8")
    assert settings_of(["--config", str(file)], {}).runtime == {"adapters": {"sql": "a/b"}}
    with pytest.raises(SystemExit):
        settings_of(["--adapters", "sql"], {})
    assert "write NAME=PATH" in capsys.readouterr().err
