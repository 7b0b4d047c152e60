"""Sends every request of a run's streams to its backend, and enters its cost into the ledger.

not in the journal ─► budget has room ─► backend ─► cost into the ledger, result into the journal
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from ..lang.errors import BackendError, DeadlineError
from ..lang.prompt import Part
from ..lang.protocol import Backend, Chunk, Final, GenRequest, Scored, ScoreRequest, Usage
from .budget import Charge

if TYPE_CHECKING:
    from .journal.stored import StoredCalls
    from .run import Run


OnChunk = Callable[[Chunk], None]
Request = TypeVar("Request", GenRequest, ScoreRequest)
Answer = TypeVar("Answer", Final, Scored)


class Calls:
    """Sends the requests of one run.

    Args:
        run: has the backend and the ledger.
    """

    __slots__ = ("_run",)

    def __init__(self, run: "Run") -> None:
        self._run = run

    @property
    def backend(self) -> Backend:
        """The backend that requests go to."""
        return self._run.backend

    async def generate(self, request: GenRequest, on_chunk: OnChunk) -> Final:
        """Runs one request to its end. An error or a cancellation aborts it at the backend.

        If the request asks for more continuations than the backend takes at once, each is a request and a call.

        Raises:
            BudgetError: before the call, which is not made.
            BackendError: the backend's answer is not what was asked for.
        """
        ledger, backend = self._run.ledger, self._run.backend
        if request.sampling.n > backend.capabilities.most_n:
            return await apart(self.generate, request, on_chunk)
        stored = self._run.stored
        if stored is not None:
            known = self._recorded(stored, request, Final)
            if known is not None:
                await _deliver(known, request, on_chunk)
                return known
        request, held = await self._allowed(request)
        log = self._run.log
        asked = log.record(request)
        final: Final | None = None
        generated = 0  # tokens that have come, or a bound of them
        try:
            events = backend.generate(request)
            try:
                async for event in events:
                    if isinstance(event, Chunk):
                        log.note_piece(asked)
                        said = event.reasoning + event.text
                        generated += len(event.token_ids) or len(said.encode("utf-8", "surrogatepass"))
                        on_chunk(event)
                    else:
                        final = event
            finally:
                close = getattr(events, "aclose", None)  # every async generator has it; a bare iterator need not
                if close is not None:
                    await close()
        except DeadlineError as error:
            self._raise_late(error)
            raise
        except asyncio.CancelledError:
            ledger.cancelled(max(0, request.sampling.n * request.sampling.max_tokens - generated))
            raise
        finally:
            if final is not None:
                ledger.settle(held, final.usage)
                answer = final.completions[0].text if final.completions else ""
                log.end(asked, final.usage, answer, final.placed, final.times)
                if stored is not None and len(final.completions) == request.sampling.n:
                    stored.write(request, final)
            else:
                ledger.settle_unfinished(held, generated)
        if final is None:
            raise BackendError(f"{backend.capabilities.name} ended request {request.id} without a result")
        if len(final.completions) != request.sampling.n:
            raise BackendError(
                f"asked for n={request.sampling.n} continuations, {backend.capabilities.name} gave "
                f"{len(final.completions)}"
            )
        return final

    async def score(self, request: ScoreRequest) -> Scored:
        """Runs one scoring request: the log-probabilities of each choice.

        Raises:
            As `generate`.
        """
        ledger, backend = self._run.ledger, self._run.backend
        stored = self._run.stored
        if stored is not None:
            known = self._recorded(stored, request, Scored)
            if known is not None:
                await asyncio.sleep(0)
                return known
        request, held = await self._allowed(request)
        asked = self._run.log.record(request)
        scored: Scored | None = None
        try:
            scored = await backend.score(request)
        except DeadlineError as error:
            self._raise_late(error)
            raise
        except asyncio.CancelledError:
            ledger.cancelled(0)
            raise
        finally:
            if scored is not None:
                ledger.settle(held, scored.usage)
                self._run.log.end(asked, scored.usage, "", scored.placed)
                if stored is not None and len(scored.choices) == len(request.choices):
                    stored.write(request, scored)
            else:
                ledger.settle_unfinished(held, 0)
        if len(scored.choices) != len(request.choices):
            raise BackendError(
                f"{len(request.choices)} choices given, {backend.capabilities.name} scored {len(scored.choices)}"
            )
        return scored

    def affordable_tokens(self, prompt: tuple[Part, ...]) -> int | None:
        """Returns the number of tokens a call with this prompt may generate within the budget; None: no limit.

        Speculation, which requests more tokens than its `gen` needs, asks here first: the budget refuses a request
        as a whole.
        """
        return self._run.ledger.affordable_tokens(prompt)

    # -------------------------------------------------------------------------------- how

    def _recorded(self, stored: "StoredCalls", request: Request, kind: type[Answer]) -> Answer | None:
        """Returns the result that the journal has; None for a call that is to be made. Raises as `StoredCalls.read`."""
        return stored.read(request, kind)

    async def _allowed(self, request: Request) -> tuple[Request, Charge]:
        """Reserves budget for the request. Returns it, with the time that is left, and the reservation."""
        held = await self._run.ledger.reserve(request)
        if self._run.deadline is not None:  # the wait took some of its time
            origin = msgspec.structs.replace(request.origin, timeout=self._run.seconds_left)
            request = msgspec.structs.replace(request, origin=origin)
        return request, held

    def _raise_late(self, error: DeadlineError) -> None:
        """Raises the run's own deadline error if it is late: the backend may notice before the run's timer fires."""
        if self._run.is_late:
            raise self._run.lateness() from error


async def _deliver(final: Final, request: GenRequest, on_chunk: OnChunk) -> None:
    """Gives readers the text of a recorded result, in one piece, and other streams their turn."""
    if request.stream:
        for index, completion in enumerate(final.completions):
            on_chunk(
                Chunk(
                    request.id,
                    index,
                    completion.text,
                    completion.token_ids,
                    completion.logprobs,
                    reasoning=completion.reasoning,
                )
            )
    await asyncio.sleep(0)


class Generate(Protocol):
    """Runs one request to its end, as `Calls.generate`."""

    def __call__(self, request: GenRequest, on_chunk: OnChunk) -> Coroutine[Any, Any, Final]: ...


async def apart(generate: Generate, request: GenRequest, on_chunk: OnChunk) -> Final:
    """Requests each continuation of `request` separately; an error of one cancels the others.

    A seed is counted up, as equal ones would give equal texts. The usage is the sum, with `n` calls.
    """
    tasks = [
        asyncio.ensure_future(generate(_one(request, index), _renamed(on_chunk, request.id, index)))
        for index in range(request.sampling.n)
    ]
    try:
        finals = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Final(
        request.id,
        tuple(final.completions[0] for final in finals),
        sum((final.usage for final in finals), Usage()),
        finals[0].prompt_logprobs,
    )


def _one(request: GenRequest, index: int) -> GenRequest:
    seed = request.sampling.seed
    sampling = msgspec.structs.replace(request.sampling, n=1, seed=None if seed is None else (seed + index) % 2**63)
    return msgspec.structs.replace(request, id=f"{request.id}-n{index}", sampling=sampling)


def _renamed(on_chunk: OnChunk, request_id: str, index: int) -> OnChunk:
    return lambda chunk: on_chunk(msgspec.structs.replace(chunk, id=request_id, index=index))
