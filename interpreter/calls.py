"""A run's way to its backend: every request of its streams goes through here, and its cost is noted here."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..lang.errors import BackendError
from ..lang.protocol import Chunk, Final, GenRequest, Scored, ScoreRequest

if TYPE_CHECKING:
    from .run import Run

OnChunk = Callable[[Chunk], None]


class Calls:
    """Requests of one run.

    Args:
        run: gives the backend, and keeps what is spent.
    """

    __slots__ = ("_run",)

    def __init__(self, run: "Run") -> None:
        self._run = run

    async def generate(self, request: GenRequest, on_chunk: OnChunk) -> Final:
        """One request to its end. Leaving early, by an error or by cancellation, aborts it at the backend."""
        name = self._run.backend.capabilities.name
        final: Final | None = None
        events = self._run.backend.generate(request)
        try:
            async for event in events:
                if isinstance(event, Chunk):
                    on_chunk(event)
                else:
                    final = event
        finally:
            close = getattr(events, "aclose", None)  # every async generator has it; a bare iterator need not
            if close is not None:
                await close()
        if final is None:
            raise BackendError(f"{name} ended request {request.id} without a result")
        self._run.spend(final.usage)
        if len(final.completions) != request.sampling.n:
            raise BackendError(f"asked for n={request.sampling.n} continuations, {name} gave {len(final.completions)}")
        return final

    async def score(self, request: ScoreRequest) -> Scored:
        """One request for log-probabilities: an entry for each choice."""
        scored = await self._run.backend.score(request)
        self._run.spend(scored.usage)
        if len(scored.choices) != len(request.choices):
            name = self._run.backend.capabilities.name
            raise BackendError(f"{len(request.choices)} choices given, {name} scored {len(scored.choices)}")
        return scored
