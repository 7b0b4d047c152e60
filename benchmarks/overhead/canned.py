"""A runtime without an engine: interpreter and gateway for real, answers from a can. For measuring what those two cost.

Everything runs in this process and on one event loop, so the CPU time of the loop's thread is that of interpreter and
gateway together, and `Canned.gateway_seconds` is the gateway's share of it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from umbel.lang.chat_template import ChatTemplate
from umbel.lang.errors import BackendError
from umbel.lang.prompt import Part, tokens_at_most
from umbel.lang.protocol import (
    Capabilities,
    Chunk,
    Done,
    Final,
    FinishReason,
    GenRequest,
    Hint,
    Scored,
    ScoreRequest,
    ToBackend,
)
from umbel.lang.transport.exchange import Exchange
from umbel.srt.core.config import GatewayLimits
from umbel.srt.core.instruments import SystemClock
from umbel.srt.core.messages import (
    Ended,
    EngineControl,
    EngineGenerate,
    EngineScore,
    FromEngine,
    ScoreEnded,
    ToEngine,
    Tokens,
)
from umbel.srt.gateway.calls import Answer, Client
from umbel.srt.gateway.gateway import Gateway
from umbel.srt.tokenizer.prompt import CACHE_BYTES
from umbel.srt.tokenizer.tokenizer import Tokenizer


class Canned:
    """A `protocol.Backend` whose engine says the same word again and again, at once.

    Args:
        reuse: keep the tokens of earlier texts.
    """

    def __init__(self, tokenizer: Tokenizer, context_length: int, *, reuse: bool = True) -> None:
        self._client = Client(self, b"canned")
        self.gateway = Gateway(
            tokenizer,
            model="canned",
            to_engines=[self._to_engine],
            clock=SystemClock(),
            limits=GatewayLimits(),
            token_cache_bytes=CACHE_BYTES if reuse else 0,
        )
        self.gateway.engine_ready(context_length)
        self.chat_template = ChatTemplate(tokenizer.chat_template, tokens=tokenizer.template_tokens, name="canned")
        self.capabilities = Capabilities(name="canned", score=True, hint=True, token_ids=True, logprobs=True)
        self.gateway_seconds = 0.0
        (self._word,) = tokenizer.encode("a", first=False)
        self._exchange: Exchange | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[int, EngineGenerate] = {}
        self._told: dict[int, int] = {}
        self._events: list[FromEngine] = []

    async def start(self) -> None:
        if self._exchange is None:
            self._loop = asyncio.get_running_loop()
            self._exchange = Exchange(self._send)

    async def generate(self, request: GenRequest) -> AsyncGenerator[Chunk | Final, None]:
        async with aclosing(self._calls.generate(request)) as events:
            async for event in events:
                yield event

    async def score(self, request: ScoreRequest) -> Scored:
        return await self._calls.score(request)

    def hint(self, hint: Hint) -> None:
        self._calls.hint(hint)

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        return tokens_at_most(prompt)

    async def control(self, verb: str) -> Done:
        raise BackendError(f"nobody here knows {verb!r}; this backend answers generate and score only")

    async def close(self) -> None:
        """Holds nothing."""

    @property
    def _calls(self) -> Exchange:
        assert self._exchange is not None, "start() made it"
        return self._exchange

    # ------------------------------------------------------------------ the gateway, timed

    def _send(self, message: ToBackend) -> None:
        started = time.thread_time()
        self.gateway.receive(self._client, message)
        self.gateway_seconds += time.thread_time() - started

    def deliver(self, identity: bytes, message: Answer) -> None:
        started = time.thread_time()
        self._calls.deliver(message)
        self.gateway_seconds -= time.thread_time() - started  # this is the program's side

    def _step(self) -> None:
        """One turn of an engine: the answers to what has come, or one more token of every stream."""
        started = time.thread_time()
        events, self._events = self._events, []
        for id, message in list(self._streams.items()):
            events.append(self._grown(id, message))
        for event in events:
            self.gateway.engine_event(event)
        self.gateway_seconds += time.thread_time() - started
        if self._streams:
            self._soon()

    # ------------------------------------------------------------------ the engine

    def _to_engine(self, message: ToEngine) -> None:
        idle = not self._events and not self._streams
        match message:
            case EngineGenerate(id=id) if message.stream:
                self._streams[id], self._told[id] = message, 0
            case EngineGenerate(id=id):
                self._events.append(self._ended(message, [self._word] * message.sampling.max_tokens))
            case EngineScore(id=id, sequences=sequences, start=start):
                rows = [[-1.0] * (len(sequence) - start) for sequence in sequences]
                self._events.append(ScoreEnded(id, rows, sum(map(len, sequences)), 0))
            case EngineControl():
                raise BackendError("nobody here answers questions")
            case _:
                return  # hints and aborts ask for no answer
        if idle:
            self._soon()

    def _soon(self) -> None:
        assert self._loop is not None, "start() was called"
        self._loop.call_soon(self._step)

    def _grown(self, id: int, message: EngineGenerate) -> FromEngine:
        self._told[id] += 1
        if self._told[id] < message.sampling.max_tokens:
            return Tokens(id, [self._word])
        del self._streams[id], self._told[id]
        return self._ended(message, [self._word])

    def _ended(self, message: EngineGenerate, last: list[int]) -> Ended:
        generated = message.sampling.max_tokens
        return Ended(message.id, last, FinishReason.LENGTH, None, generated, len(message.token_ids), 0, generated)
