"""What HTTP costs: the CPU time of the server's process for a request and for a streamed token, next to ZeroMQ alone.

    python -m benchmarks.http_front --requests 2000 --streams 64 --tokens 100

The oracle answers, so nearly all time is that of the ways in and out. Processes are measured by their own CPU time,
which a busy machine changes little; rates are wall time and need an idle one.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass

from umbel.interpreter.backends.runtime import Runtime
from umbel.lang.prompt import Text
from umbel.lang.protocol import GenRequest
from umbel.lang.sampling import SamplingParams

SERVE = "import sys; from umbel.interpreter.cli import main; sys.exit(main(sys.argv[1:]))"
READY = 60.0  # seconds for the oracle to start
PROMPT = "sixteen tokens !"
IN_FLIGHT = 32


@dataclass(frozen=True)
class Measured:
    """One way, one load: CPU of the process in front of the gateway, and wall time."""

    way: str
    load: str
    events: int
    cpu: float
    wall: float

    def __str__(self) -> str:
        each = 1e6 * self.cpu / self.events
        return f"{self.way:>7} {self.load:<9} {each:7.0f} us of CPU each, {self.events / self.wall:8.0f} a second"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="of one token each; default: 2000")
    parser.add_argument("--streams", type=int, default=64, help="at the same time; default: 64")
    parser.add_argument("--tokens", type=int, default=100, help="of each stream; default: 100")
    parser.add_argument("--path", default="/generate", help="/generate, /v1/completions or /v1/chat/completions")
    options = parser.parse_args()
    found = [*asyncio.run(_zeromq(options)), *_http(options)]
    for each in found:
        print(each)
    for number, unit in enumerate(("a request", "a streamed token")):
        added = found[2 + number].cpu / found[2 + number].events - found[number].cpu / found[number].events
        ratio = found[number].wall / found[2 + number].wall
        print(f"HTTP adds {1e6 * added:.0f} us of CPU {unit}, at {100 * ratio:.0f} % of the rate")


# ------------------------------------------------------------------------------------------------ ZeroMQ


async def _zeromq(options: argparse.Namespace) -> list[Measured]:
    runtime = Runtime("oracle", max_queue=4096)
    await runtime.start()

    async def ask(name: str, tokens: int, stream: bool) -> None:
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        request = GenRequest(name, (Text(f"{name} {PROMPT}"),), sampling, stream)
        async with aclosing(runtime.generate(request)) as events:
            async for _ in events:
                pass

    try:
        await _many(50, lambda number: ask(f"warm-{number}", 1, False))
        one = await _timed("zeromq", "requests", options.requests, lambda n: ask(f"r{n}", 1, False), options.requests)
        tokens = options.streams * options.tokens
        two = await _timed("zeromq", "tokens", tokens, lambda n: ask(f"s{n}", options.tokens, True), options.streams)
    finally:
        await runtime.close()
    return [one, two]


async def _timed(way: str, load: str, events: int, ask: Callable[[int], Awaitable[None]], calls: int) -> Measured:
    cpu, wall = time.process_time(), time.perf_counter()
    await _many(calls, ask, calls if load == "tokens" else IN_FLIGHT)
    return Measured(way, load, events, time.process_time() - cpu, time.perf_counter() - wall)


async def _many(calls: int, ask: Callable[[int], Awaitable[None]], at_once: int = IN_FLIGHT) -> None:
    numbers = iter(range(calls))

    async def worker() -> None:
        for number in numbers:
            await ask(number)

    await asyncio.gather(*(worker() for _ in range(at_once)))


# -------------------------------------------------------------------------------------------------- HTTP


def _http(options: argparse.Namespace) -> list[Measured]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVE, "serve", "--model", "oracle", "--port", str(port), "--max-queue", "4096"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        return asyncio.run(_over_http(port, server.pid, options))
    finally:
        server.terminate()
        server.wait(30)


async def _over_http(port: int, pid: int, options: argparse.Namespace) -> list[Measured]:
    deadline = time.monotonic() + READY
    while b" 200 " not in await _health(port):
        assert time.monotonic() < deadline, "the server did not start"
        await asyncio.sleep(0.2)
    body = {"model": "oracle", "ignore_eos": True, "temperature": 0}

    def request(number: int, tokens: int, stream: bool) -> bytes:
        prompt = f"{number} {PROMPT}"
        match options.path:
            case "/generate":
                sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
                facts = {"text": prompt, "sampling_params": sampling, "stream": stream}
            case "/v1/completions":
                facts = {**body, "prompt": prompt, "max_tokens": tokens, "stream": stream}
            case _:
                messages = [{"role": "user", "content": prompt}]
                facts = {**body, "messages": messages, "max_tokens": tokens, "stream": stream}
        data = json.dumps(facts).encode()
        head = f"POST {options.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        return head.encode() + data

    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(max(IN_FLIGHT, options.streams))]

    async def load(name: str, calls: int, tokens: int, stream: bool, at_once: int) -> Measured:
        free = list(connections)

        async def ask(number: int) -> None:
            reader, writer = free.pop()
            writer.write(request(number, tokens, stream))
            await _read_answer(reader)
            free.append((reader, writer))

        cpu, wall = _cpu_of(pid), time.perf_counter()
        await _many(calls, ask, at_once)
        return Measured("http", name, calls * tokens, _cpu_of(pid) - cpu, time.perf_counter() - wall)

    await load("warm", 50, 1, False, IN_FLIGHT)
    one = await load("requests", options.requests, 1, False, IN_FLIGHT)
    two = await load("tokens", options.streams, options.tokens, True, options.streams)
    for _, writer in connections:
        writer.close()
    return [one, two]


async def _health(port: int) -> bytes:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return b""
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return answer


async def _read_answer(reader: asyncio.StreamReader) -> None:
    """Reads one answer with a length, or in chunks."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head + await reader.read(2000)
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            await reader.readexactly(int(line.partition(b":")[2]))
            return
    while size := int(await reader.readline(), 16):
        await reader.readexactly(size + 2)
    await reader.readline()


def _cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has used, by the system's count."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
