"""Tools of a small MCP server: as a program, and over HTTP on loopback."""

import asyncio
import importlib
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import umbel as ul

pytest.importorskip("mcp", reason="the extra umbel[mcp] is not installed")
httpx2: Any = importlib.import_module("httpx2")  # of the official client
SERVER = str(Path(__file__).with_name("mcp_server.py"))


@ul.function
def ask(s: ul.State, tools: Any, timeout: float = 60.0) -> ul.AgentResult:
    s += ul.user("?")
    return s.call_tools(tools, "answer", timeout=timeout)


@ul.function
async def ask_async(s: ul.AsyncState, tools: Any) -> ul.AgentResult:
    s += ul.user("?")
    return await s.call_tools(tools, "answer")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "running on" not in (line := process.stderr.readline()):
            assert line, "the server did not start"
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


def said(tools: Any) -> dict[str, Any]:
    return {tool.name: tool for tool in tools}


def test_tools_of_a_program_are_called_and_its_errors_are_told() -> None:
    with ul.mcp(sys.executable, SERVER) as tools:
        named = said(tools)
        assert set(named) == {"double", "fail", "die", "hang", "whoami"}
        assert named["double"].description == "Doubles a number."
        assert named["double"].schema["properties"]["number"]["type"] == "integer"
        script = [named["double"].spelled(number=4), named["fail"].spelled(), "Eight."]
        result = ask.run(tools=tools, backend=ul.Echo(script)).ret_value
        assert result.answer == "Eight."
        assert [(call.result, call.failed) for call in result.calls] == [
            ("8", False),
            ("error: BackendError: Error executing tool fail", True),
        ]
    late = ask.run(tools=tools, backend=ul.Echo([named["double"].spelled(number=4), "?"])).ret_value
    assert "is closed" in late.calls[0].result


def test_tools_of_a_url_are_called_in_async_programs(address: str) -> None:
    async def run() -> ul.AgentResult:
        async with ul.mcp(address) as tools:
            script = [said(tools)["double"].spelled(number=4), "Eight."]
            return (await ask_async.run_async(tools=tools, backend=ul.Echo(script))).ret_value

    assert [call.result for call in asyncio.run(run()).calls] == ["8"]


SECRET = "sk-mcp-secret-12345"


class Signed(httpx2.Auth):
    """An auth object that signs each request."""

    def auth_flow(self, request: Any) -> Any:
        request.headers["authorization"] = "Signed by-hand"
        yield request


def test_headers_and_auth_reach_the_server_and_nothing_else(address: str, tmp_path: Path) -> None:
    journal = tmp_path / "run.jsonl"
    connection = ul.mcp(address + "?key=of-the-url", headers={"Authorization": f"Bearer {SECRET}", "X-Team": "blue"})
    with connection as tools:
        backend = ul.Echo([said(tools)["whoami"].spelled(), "Done."])
        state = ask.run(tools=tools, journal=str(journal), backend=backend)
        (call,) = state.ret_value.calls
    assert call.result == f"[header] blue eulb {SECRET[::-1]} reraeB"  # it came; what is shown of it is the reverse
    for text in (journal.read_text(), repr(connection), repr(tools), state.text(), repr(state)):
        assert SECRET not in text
        assert "of-the-url" not in text
    with ul.mcp(address, auth=Signed(), headers={"x-team": "red"}) as tools:
        backend = ul.Echo([said(tools)["whoami"].spelled(), "Done."])
        (call,) = ask.run(tools=tools, backend=backend).ret_value.calls
    assert call.result.startswith("Signed by-hand red")


def test_an_error_of_a_connection_holds_no_header() -> None:
    class Quoting(httpx2.Auth):
        def auth_flow(self, request: Any) -> Any:
            raise RuntimeError(f"cannot send {request.headers['authorization']} to {request.url}")
            yield request

    address = "http://user:pass-word@127.0.0.1:9/mcp?key=of-the-url"
    with pytest.raises(ul.ConnectionLostError, match="does not answer as an MCP server") as raised:
        ul.mcp(address, headers={"Authorization": f"Bearer {SECRET}"}, auth=Quoting(), timeout=20).__enter__()
    told = "".join(traceback.format_exception(raised.value))
    assert "mcp('http://127.0.0.1:9/mcp')" in told
    for secret in (SECRET, "pass-word", "of-the-url"):
        assert secret not in told


def test_headers_that_cannot_be_sent_are_refused_without_their_values() -> None:
    with pytest.raises(ul.ParameterError, match=r"mcp\(\): headers: the value of 'x-key' is not printable") as raised:
        ul.mcp("http://127.0.0.1:9/mcp", headers={"x-key": SECRET + "\n"})
    assert SECRET not in str(raised.value)
    with pytest.raises(ul.ParameterError, match="a program takes neither headers nor auth"):
        ul.mcp("uvx", "mcp-server-time", headers={"x-key": SECRET})
    with pytest.raises(ul.ParameterError, match="auth is str; write an Auth of httpx2"):
        ul.mcp("http://127.0.0.1:9/mcp", auth=SECRET)  # type: ignore[arg-type]


def test_a_server_that_dies_or_hangs_is_told() -> None:
    with ul.mcp(sys.executable, SERVER) as tools:
        named = said(tools)
        backend = ul.Echo([named["hang"].spelled(), "?"])
        (call,) = ask.run(tools=tools, timeout=0.2, backend=backend).ret_value.calls
        assert "did not end within timeout=0.2 seconds" in call.result
    with ul.mcp(sys.executable, SERVER) as tools:
        backend = ul.Echo([said(tools)["die"].spelled(), said(tools)["double"].spelled(number=1), "?"])
        died, after = ask.run(tools=tools, backend=backend).ret_value.calls
        assert "did not answer the call of die" in died.result
        assert after.failed


def test_what_is_no_server_is_refused() -> None:
    with pytest.raises(ul.ConnectionLostError, match="does not answer as an MCP server"):
        ul.mcp(sys.executable, "-c", "pass").__enter__()
    with pytest.raises(ul.ConnectionLostError, match="FileNotFoundError"):
        ul.mcp("no-such-program-of-mcp").__enter__()
    with pytest.raises(ul.ParameterError, match="neither arguments nor env"):
        ul.mcp("http://127.0.0.1:1/mcp", "x")
