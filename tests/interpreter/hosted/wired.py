"""A wire without a network, and a clock that nobody waits for: for tests of hosted backends."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence

import openai
from umbel import OpenAI
from umbel.interpreter.backends.hosted.session import Environment
from umbel.interpreter.backends.hosted.transport import http_library
from umbel.lang.prompt import Part, Text
from umbel.lang.protocol import Chunk, ConstraintSpec, Final, GenRequest, Origin
from umbel.lang.sampling import SamplingParams

http = http_library(openai)  # httpx or httpx2, as the SDK is written for

Reply = http.Response | Exception
KEY = "sk-secret-1234567890"


class Clock:
    """Sleeping takes no time here and moves the clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Wire(http.AsyncBaseTransport):
    """Answers requests in order, the last reply again and again; `seen` are the requests."""

    def __init__(self, *replies: Reply | Callable[[], Reply]) -> None:
        self._replies = list(replies)
        self.seen: list[http.Request] = []

    async def handle_async_request(self, request: http.Request) -> http.Response:
        await request.aread()
        self.seen.append(request)
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        if callable(reply):
            reply = reply()
        if isinstance(reply, Exception):
            raise reply
        return reply

    @property
    def bodies(self) -> list[dict[str, object]]:
        return [json.loads(request.content) for request in self.seen]


class Pieces(http.AsyncByteStream):
    """A body in pieces. None: silence from here on. An exception: raised here."""

    def __init__(self, pieces: Sequence[bytes | Exception | None]) -> None:
        self._pieces = pieces
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            if piece is None:
                await asyncio.get_running_loop().create_future()
            elif isinstance(piece, Exception):
                raise piece
            else:
                yield piece

    async def aclose(self) -> None:
        self.closed = True


def answer(text: str = "Paris.", reason: str = "stop", **more: object) -> http.Response:
    """A whole chat answer."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason, **more}
    return http.Response(200, json={"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": 2}})


def failing(status: int, headers: dict[str, str] | None = None, **error: object) -> Callable[[], http.Response]:
    return lambda: http.Response(status, json={"error": {"message": "no", **error}}, headers=headers)


def event(text: str | None = None, reason: str | None = None, index: int = 0) -> bytes:
    """An event of a chat stream."""
    choice = {"index": index, "delta": {} if text is None else {"content": text}, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"


def streamed(*pieces: bytes | Exception | None, kind: str = "text/event-stream") -> http.Response:
    return http.Response(200, headers={"content-type": kind}, stream=Pieces(pieces))


def backend(wire: Wire, clock: Clock | None = None, **options: object) -> OpenAI:
    """A backend on this wire; chance is always one half."""
    clock = clock or Clock()
    environment = Environment(clock, clock.sleep, lambda: 0.5, wire, variables={})
    given = {"model": "gpt-4o", "api_key": KEY, "environment": environment, **options}
    return OpenAI(**given)  # type: ignore[arg-type]  # a test's options are of all types


def conversation(said: str = "Capital of France?", begun: str = "") -> tuple[Part, ...]:
    parts = [Text("<|im_start|>user\n", True), Text(said), Text("<|im_end|>\n<|im_start|>assistant\n", True)]
    return (*parts, Text(begun)) if begun else tuple(parts)


def asking(
    prompt: tuple[Part, ...] | None = None,
    *,
    stream: bool = False,
    origin: Origin | None = None,
    constraint: ConstraintSpec | None = None,
    **sampling: object,
) -> GenRequest:
    return GenRequest(
        "r1",
        conversation() if prompt is None else prompt,
        SamplingParams(**sampling),  # type: ignore[arg-type]  # as above
        stream,
        origin or Origin(),
        constraint,
    )


def generate(model: OpenAI, request: GenRequest | None = None) -> tuple[list[Chunk], Final]:
    """One request on a loop of its own."""

    async def run() -> tuple[list[Chunk], Final]:
        events = [event async for event in model.generate(request or asking())]
        await model.close()
        final = events[-1]
        assert isinstance(final, Final)
        return [event for event in events[:-1] if isinstance(event, Chunk)], final

    return asyncio.run(run())
