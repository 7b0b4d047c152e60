"""A server process on the oracle, a client of its socket, and the state of its processes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ..serving import PATIENCE, ServerProcess

_ENGINE, _GATEWAY = "umbel.srt.engine.process", "umbel.srt.gateway"


@dataclass
class Answer:
    """One answer, whole or as far as it came. `whole`: its end came, too."""

    status: int
    headers: dict[str, str]
    content: bytes
    whole: bool

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def events(self) -> list[Any]:
        """Data of its events that are JSON."""
        blocks = [block[6:] for block in self.content.split(b"\n\n") if block.startswith(b"data: ")]
        return [json.loads(block) for block in blocks if block != b"[DONE]"]

    @property
    def text(self) -> str:
        """The text of a completion, or as much as a stream of it has."""
        events = self.events if "event-stream" in self.headers["content-type"] else [self.json]
        return "".join(event["choices"][0]["text"] for event in events if event.get("choices"))

    @property
    def error(self) -> str:
        """The message of an error, which may be the last event; "" for none."""
        events = self.events if "event-stream" in self.headers["content-type"] else [self.json]
        return str(events[-1]["error"]["message"]) if "error" in events[-1] else ""


class Serving(ServerProcess):
    """A server process.

    Args:
        folder: for its settings.
        runtime: options of the runtime, such as {"debug": {"step_delay": 0.1}}.
        arguments: further ones of the command line.
    """

    def __init__(self, folder: Path, runtime: Mapping[str, Any] | None = None, *arguments: str) -> None:
        settings = folder / "serve.toml"
        lines = [f"{name} = {_toml(value)}" for name, value in {"model": "oracle", **(runtime or {})}.items()]
        settings.write_text("[runtime]\n" + "\n".join(lines))
        self._known: dict[int, psutil.Process] = {}
        super().__init__("--config", str(settings), *arguments)

    # ------------------------------------------------------------------ processes

    def processes(self) -> list[psutil.Process]:
        """The server's process and all below it."""
        whole = psutil.Process(self.process.pid)
        found = [whole, *whole.children(recursive=True)]
        self._known |= {each.pid: each for each in found}
        return found

    def known(self) -> list[psutil.Process]:
        """All processes of it that were seen, those that have ended among them."""
        if self.process.poll() is None:
            self.processes()
        return list(self._known.values())

    def engine(self) -> psutil.Process:
        return self._child(_ENGINE)

    def engines(self) -> list[psutil.Process]:
        """The engines of several replicas; a new one comes last."""
        found = [each for each in self.processes() if _ENGINE in _command(each)]
        return sorted(found, key=lambda each: (each.create_time(), each.pid))

    def gateway(self) -> psutil.Process:
        return self._child(_GATEWAY)

    def _child(self, module: str) -> psutil.Process:
        (found,) = (each for each in self.processes() if module in _command(each))
        return found

    def kinds(self) -> set[str]:
        """The modules that run below the server."""
        return {kind for each in self.processes() for kind in (_ENGINE, _GATEWAY) if kind in _command(each)}

    def resources(self) -> tuple[int, int, int]:
        """Descriptors, threads and processes of the server and all below it."""
        found = self.processes()
        return sum(each.num_fds() for each in found), sum(each.num_threads() for each in found), len(found)

    def sizes(self) -> dict[str, int]:
        """Bytes in RAM of each of them, by the module that it runs; "front" is the server's own process."""
        return {_module(each): each.memory_info().rss for each in self.processes()}

    def memory(self) -> int:
        """Bytes of all of them in RAM."""
        return sum(self.sizes().values())

    def end(self) -> None:
        """Kills what is left of it."""
        for each in self.known():
            if each.pid != self.process.pid and each.is_running():
                each.kill()
        super().end()

    # ------------------------------------------------------------------ requests

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """One request on a socket of its own."""
        async with self.sending(method, path, body, **headers) as (reader, _):
            return await read_answer(reader)

    async def post(self, path: str, body: Any) -> Answer:
        return await self.ask("POST", path, body)

    async def stream(self, body: Mapping[str, Any], on_data: Callable[[bytes], object] = bool) -> Answer:
        """A streamed completion; `on_data` is called with all of the stream so far, for each chunk."""
        async with self.sending("POST", "/v1/completions", {**body, "stream": True}) as (reader, _):
            return await read_answer(reader, on_data)

    @asynccontextmanager
    async def sending(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Sends a request, and closes its socket at the end of the block, whatever has come."""
        data = b"" if body is None else json.dumps(body).encode()
        lines = {"host": "localhost", "connection": "close", "content-length": str(len(data)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        async with self.connected() as (reader, writer):
            writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)
            await writer.drain()
            yield reader, writer

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=1 << 20)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def status_of_health(self) -> int:
        """0 when nothing answers."""
        try:
            return (await self.ask("GET", "/health")).status
        except (OSError, asyncio.IncompleteReadError):
            return 0

    async def ready(self) -> None:
        await until_async(lambda: self._is_healthy(), "the server is ready")

    async def _is_healthy(self) -> bool:
        assert self.process.poll() is None, self.log
        return await self.status_of_health() == 200

    async def facts(self) -> dict[str, Any]:
        """Gauges and counters of the server."""
        return (await self.ask("GET", "/server_info")).json  # type: ignore[no-any-return]

    async def figures(self) -> dict[str, float]:
        """Returns the samples of `/metrics` by name and labels."""
        content = (await self.ask("GET", "/metrics")).content.decode()
        lines = (line.rpartition(" ") for line in content.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    async def rest(self) -> dict[str, Any]:
        """Waits until nothing runs, and the pool is whole → the facts then."""

        async def resting() -> dict[str, Any] | None:
            facts = await self.facts()
            busy = facts["http_in_flight"] or facts["in_flight"] or facts["running"] or facts["waiting"]
            whole = facts["pool_free"] + facts["pool_cached"] == facts["max_total_tokens"]
            return None if busy or not whole else facts

        return await until_async(resting, "nothing runs, and the pool is whole")


async def read_answer(reader: asyncio.StreamReader, on_data: Callable[[bytes], object] = bool) -> Answer:
    """Reads an answer to its end, or to the end of the socket.

    Args:
        on_data: called with all of a stream so far, for each chunk.

    Raises:
        asyncio.IncompleteReadError: the socket ended before the head did.
    """
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
    status = int(first.split()[1])
    if "content-length" in headers:
        length = int(headers["content-length"])
        try:
            return Answer(status, headers, await reader.readexactly(length), True)
        except (asyncio.IncompleteReadError, ConnectionError):
            return Answer(status, headers, b"", False)
    content = bytearray()
    try:
        while size := int(await reader.readline() or b"x", 16):
            content += (await reader.readexactly(size + 2))[:-2]
            on_data(bytes(content))
    except (asyncio.IncompleteReadError, ConnectionError, ValueError):
        return Answer(status, headers, bytes(content), False)
    return Answer(status, headers, bytes(content), True)


@contextmanager
def serving(folder: Path, runtime: Mapping[str, Any] | None = None, *arguments: str) -> Iterator[Serving]:
    server = Serving(folder, runtime, *arguments)
    try:
        yield server
    finally:
        server.end()


async def until_async(condition: Any, what: str) -> Any:
    """Waits until a condition that is awaited holds → what it gave."""
    async with asyncio.timeout(PATIENCE):
        while not (found := await condition()):
            await asyncio.sleep(0.05)
        return found
    raise AssertionError(what)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def _module(process: psutil.Process) -> str:
    """Returns what a process runs, such as "engine.process"."""
    command = _command(process)
    return command[command.index("-m") + 1].removeprefix("umbel.srt.") if "-m" in command else "front"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_toml(each)}" for name, each in value.items()) + " }"
    return json.dumps(value)
