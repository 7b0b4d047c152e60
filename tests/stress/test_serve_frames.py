"""Malformed HTTP: damaged, cut, repeated and reordered requests. Each is answered or dropped, and others are served.

The short form is for every run. The full one is for `pytest -m nightly tests/stress`.
"""

import asyncio
import base64
import random
from collections import Counter
from dataclasses import dataclass

import msgspec
import pytest
from umbel.lang.prompt import Text
from umbel.lang.protocol import GenRequest, Hint, Release, ScoreRequest, Tokenize
from umbel.lang.sampling import SamplingParams

from ..serving import PATIENCE
from .serving import Serving

pytestmark = pytest.mark.processes

AT_ONCE = 32
MOST_GROWTH = 64 << 20  # bytes of all processes
ASKED = {"model": "oracle", "prompt": "hello", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
CHAT = {"model": "oracle", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "stream": True}
MESSAGES = [
    GenRequest("g", (Text("hello"),), SamplingParams(max_tokens=2), stream=True),
    ScoreRequest("s", (Text("is it "),), ("yes", "no")),
    Tokenize("t", (Text("some words"),)),
    Hint("h", (Text("ahead"),)),
    Release("h"),
]
BAD_CHUNKS = (
    b"zz\r\n{}\r\n",
    b"-1\r\n{}\r\n",
    b"f" * 40 + b"\r\n{}\r\n",
    b"2;\x00\r\n{}\r\n",
    b"2\r\n{}{}\r\n",
    b"\r\n\r\n",
)


def request(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *(headers or (f"Content-Length: {len(body)}",))]
    return "\r\n".join([*lines, "", ""]).encode() + body


def message(data: bytes) -> bytes:
    return request("/runtime", msgspec.json.encode({"message": base64.b64encode(data).decode()}))


WHOLE = [
    request("/v1/completions", msgspec.json.encode(ASKED)),
    request("/v1/chat/completions", msgspec.json.encode(CHAT)),
    request("/tokenize", b'{"model": "oracle", "prompt": "some words"}'),
    request("/tokenize", b'13\r\n{"prompt": "words"}\r\n0\r\n\r\n', "Transfer-Encoding: chunked"),
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    *(message(msgspec.msgpack.encode(each)) for each in MESSAGES),
]


@dataclass(frozen=True)
class Frame:
    """Bytes to send on a socket of their own.

    `answered`: an answer has to come; else the client leaves when it has sent them.
    """

    kind: str
    data: bytes
    answered: bool = True


def damaged(data: bytes, dice: random.Random) -> bytes:
    """Some bytes of it changed, added or cut off."""
    hurt = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(hurt)) if hurt else 0
        match dice.randrange(4):
            case 0:
                hurt[at:at] = dice.randbytes(dice.randint(1, 8))
            case 1:
                del hurt[at:]
            case _:
                hurt[at : at + 1] = dice.randbytes(1)
    return bytes(hurt)


def malformed(dice: random.Random) -> Frame:
    whole = dice.choice(WHOLE)
    match dice.randrange(8):
        case 0:
            return Frame("damaged", damaged(whole, dice), False)
        case 1:
            return Frame("cut", whole[: dice.randrange(1, len(whole))], False)
        case 2:
            places = sorted(dice.randrange(len(whole)) for _ in range(3))
            slices = [whole[start:end] for start, end in zip([0, *places], [*places, len(whole)], strict=True)]
            dice.shuffle(slices)
            return Frame("reordered", b"".join(slices), False)
        case 3:
            length = dice.choice((0, 1, 10**4, 10**9, 10**30))
            return Frame("wrong length", request("/tokenize", b'{"prompt": "x"}', f"Content-Length: {length}"), False)
        case 4:
            return Frame("repeated", whole * dice.randint(2, 5))
        case 5:
            return Frame("garbage follows", whole + dice.randbytes(dice.randint(1, 200)))
        case 6:
            return Frame("bad chunk", request("/tokenize", dice.choice(BAD_CHUNKS), "Transfer-Encoding: chunked"))
        case _:
            data = damaged(msgspec.msgpack.encode(dice.choice(MESSAGES)), dice)
            return Frame("damaged message", message(data))


async def send(server: Serving, frame: Frame) -> int:
    """Sends a frame → the status of the first answer; 0 where the socket was closed without one."""
    async with asyncio.timeout(PATIENCE), server.connected() as (reader, writer):
        head = b""
        try:
            writer.write(frame.data)
            if not frame.answered:
                writer.write_eof()
            head = await reader.readline()
            if frame.answered:
                writer.write_eof()
            while await reader.read(1 << 16):
                pass
        except ConnectionError:
            pass
    return int(head.split()[1]) if head else 0


async def attack(server: Serving, count: int) -> "Counter[tuple[str, int]]":
    """Sends malformed frames, AT_ONCE at a time, while another client asks on → how often each kind got each status."""
    dice, statuses, left = random.Random(count), Counter[tuple[str, int]](), count
    expected = (await server.post("/v1/completions", ASKED)).text

    async def attacker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            frame = malformed(dice)
            status = await send(server, frame)
            assert status < 500 or status == 503, frame
            assert status or not frame.answered, frame
            statuses[frame.kind, status] += 1

    async def bystander() -> None:
        while left > 0:
            answer = await server.post("/v1/completions", ASKED)
            assert (answer.status, answer.text) == (200, expected)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(attacker())
        group.create_task(bystander())
    return statuses


async def check(server: Serving, count: int) -> None:
    await server.ready()
    await attack(server, 200)
    counted = (await server.rest())["http_malformed"]
    before, processes = server.memory(), {each.pid for each in server.processes()}
    statuses = await attack(server, count)
    facts = await server.rest()
    print(dict(statuses), f"{(server.memory() - before) / 2**20:.1f} MB more, {facts['http_malformed']} malformed")
    assert statuses.total() == count
    assert facts["http_malformed"] - counted >= statuses["bad chunk", 400] > 0
    assert {each.pid for each in server.processes()} == processes
    assert server.memory() - before < MOST_GROWTH
    assert "Traceback" not in server.log


@pytest.mark.parametrize("count", [400, pytest.param(200_000, marks=pytest.mark.nightly)])
def test_malformed_frames_are_answered_or_dropped_and_others_are_served(count: int, server: Serving) -> None:
    asyncio.run(check(server, count))
