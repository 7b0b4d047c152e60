"""A backend that passes everything on to another one and keeps what was asked: the tokens of a run can be counted.

It is also where the frontend's ablations sit, since every call of a program goes through here: without hints, and
with a share of the calls salted, so that these find nothing in the cache (the sweep of the paper's figure 8 a, b).
"""

import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from umbel.lang.chat_template import ChatTemplate
from umbel.lang.prompt import Part
from umbel.lang.protocol import (
    Backend,
    Capabilities,
    Chunk,
    Done,
    Final,
    GenRequest,
    Hint,
    Origin,
    Scored,
    ScoreRequest,
    Usage,
)


@dataclass(frozen=True, slots=True)
class Generated:
    """A generation that ended: its prompt and the tokens of each continuation."""

    prompt: tuple[Part, ...]
    continuations: tuple[tuple[int, ...], ...]
    usage: Usage
    seconds: float
    first_token: float | None  # seconds, when pieces were asked for


@dataclass(frozen=True, slots=True)
class Chosen:
    """A choice that was scored: its prompt, and the tokens of each choice."""

    prompt: tuple[Part, ...]
    choices: tuple[str, ...]
    usage: Usage
    seconds: float


Call = Generated | Chosen


class Recorder:
    """A `protocol.Backend` in front of `backend`.

    Args:
        hints: pass hints on; without, the backend is said not to take any.
        salted_share: of the calls, drawn with `seed`, each get a cache namespace of their own.
        first_tokens: ask for pieces, so that the time to the first token is known.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        hints: bool = True,
        salted_share: float = 0.0,
        first_tokens: bool = False,
        seed: int = 0,
    ) -> None:
        self.calls: list[Call] = []  # in the order in which they ended
        self._backend = backend
        self._hints = hints
        self._salted_share = salted_share
        self._first_tokens = first_tokens
        self._draw = random.Random(seed)
        self._salts = 0

    @property
    def capabilities(self) -> Capabilities:
        capabilities = self._backend.capabilities
        return capabilities if self._hints else msgspec.structs.replace(capabilities, hint=False)

    @property
    def chat_template(self) -> ChatTemplate:
        return self._backend.chat_template

    async def start(self) -> None:
        await self._backend.start()

    async def generate(self, request: GenRequest) -> AsyncGenerator[Chunk | Final, None]:
        request = msgspec.structs.replace(
            request, origin=self._origin(request.origin), stream=request.stream or self._first_tokens
        )
        started = time.perf_counter()
        first: float | None = None
        async with aclosing(self._backend.generate(request)) as events:  # type: ignore[type-var]  # all are generators
            async for event in events:
                if isinstance(event, Chunk) and first is None:
                    first = time.perf_counter() - started
                if isinstance(event, Final):
                    taken = time.perf_counter() - started
                    tokens = tuple(completion.token_ids for completion in event.completions)
                    self.calls.append(Generated(request.prompt, tokens, event.usage, taken, first))
                yield event

    async def score(self, request: ScoreRequest) -> Scored:
        request = msgspec.structs.replace(request, origin=self._origin(request.origin))
        started = time.perf_counter()
        scored = await self._backend.score(request)
        self.calls.append(Chosen(request.prompt, request.choices, scored.usage, time.perf_counter() - started))
        return scored

    def hint(self, hint: Hint) -> None:
        if self._hints:
            self._backend.hint(hint)

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        return self._backend.tokens_at_most(prompt)

    async def control(self, verb: str) -> Done:
        return await self._backend.control(verb)

    async def close(self) -> None:
        """The backend lives on: whoever made it closes it."""

    def take(self) -> list[Call]:
        """What was recorded since the last time."""
        calls, self.calls = self.calls, []
        return calls

    def _origin(self, origin: Origin) -> Origin:
        if not self._salted_share or self._draw.random() >= self._salted_share:
            return origin
        self._salts += 1
        return msgspec.structs.replace(origin, salt=f"{origin.salt}alone-{self._salts}")
