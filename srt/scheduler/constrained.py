"""Runs constrained texts: holds requests until their constraint is open, prepares masks, appends forced tokens.

arrive ──hold──▶ held ──open──▶ waiting      begin_step opens the constraints that are ready
plan   ──ready──▶ the mask is ready, or the row that chooses is left out of this step
commit ──commit─▶ the sampled token and the forced tokens after it
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from ...fsm.errors import ConstraintRefused
from ...lang.errors import CapabilityError, ConstraintError
from ...lang.protocol import FinishReason
from ..constraints.matcher import Boundary, Matcher, SharedConstraint
from ..core.batch import PICTURE_BASE, Allowed
from ..core.messages import EngineGenerate
from .request import Generation, Request, Stop, constraint_end
from .request_table import SchedulerContext
from .step import allowed_of


@dataclass(frozen=True, slots=True)
class _Held:
    request: Request
    heal: bool  # the prompt's last token may be replaced
    constraint: Future[tuple[SharedConstraint, frozenset[int]]]


class ConstrainedTexts:
    """Opens the constraints of requests, prepares masks before their rows run, and appends forced tokens."""

    def __init__(self, context: SchedulerContext) -> None:
        self._jump_forward = context.config.jump_forward
        self._step_fuel = context.config.constraint_fuel
        self._context = context
        self._matcher_cache = context.constraints
        self._table = context.table
        self._counters = context.counters
        self._clock = context.clock
        self._token_bytes = context.token_bytes
        self._held: list[_Held] = []
        self._fuel = 0

    # ------------------------------------------------------------------------------------------ arrival

    def hold(self, request: Request, message: EngineGenerate) -> None:
        """Starts opening the request's constraint, and keeps the request until it is open.

        Raises:
            CapabilityError: this engine enforces no constraints.
        """
        assert message.constraint is not None, "a request without a constraint has nothing to wait for"
        if self._matcher_cache is None:
            raise CapabilityError("this engine enforces no constraints; leave the constraint out")
        self._held.append(_Held(request, message.heal, self._matcher_cache.find(message.constraint, request.namespace)))

    def count(self) -> None:
        """Updates the counters of constraints."""
        if self._matcher_cache is not None:
            self._counters.constraints_opened = self._matcher_cache.opened
            self._counters.constraint_hits = self._matcher_cache.hits
            self._counters.jumps_cut = self._matcher_cache.jumps_cut

    def begin_step(self) -> None:
        """Refills the fuel and moves requests whose constraint is open to the waiting ones."""
        self._fuel = self._step_fuel
        if not self._held:
            return
        held, self._held = self._held, []
        for entry in held:
            if entry.request.number not in self._table.held:
                continue  # it has ended meanwhile
            try:
                if not entry.constraint.done() or not self._open(entry, *entry.constraint.result()):
                    self._held.append(entry)
            except ConstraintRefused as error:
                self._table.fail(entry.request, ConstraintError(str(error)))
            except Exception as error:
                self._table.fail(entry.request, error)

    def _open(self, held: _Held, constraint: SharedConstraint, eos_ids: frozenset[int]) -> bool:
        """Attaches the constraint to its request; False: that needs more fuel than this step has."""
        request = held.request
        generation = request.job
        assert isinstance(generation, Generation), "only generations have constraints"
        _check_budget(request, generation, constraint)
        last = int(request.tokens[-1])
        replaced = self._token_bytes(last) if last < PICTURE_BASE else b""
        boundary: Boundary | None = None
        if held.heal and replaced and _replaceable(request, generation):
            healing = constraint.healing(replaced)
            if not self._spend(healing.prepare):
                return False
            if healing.possible:
                boundary = Boundary(last, replaced, healing.mask(last), constraint, self._token_bytes)
        cursor = generation.cursor = Matcher(constraint.begin(replaced), eos_ids, boundary)
        if boundary is not None:
            request.drop_prompt_token()
        self._table.queue(request)
        stop = constraint_end(generation) if cursor.finished else self._jump(request, generation, cursor)
        if stop is not None:
            self._table.end_text(request, stop)
        return True

    # ------------------------------------------------------------------------------------------ a step

    def ready(self, request: Request) -> bool:
        """Returns whether the next token can be chosen in this step. Appends forced tokens; may end the request.

        All requests of a step share its fuel, and each may take half of what is left. A request with an expensive mask
        skips some steps and does not delay the others.
        """
        generation = request.job
        assert isinstance(generation, Generation), "only generations choose tokens"
        cursor = generation.cursor
        assert cursor is not None, "asked for texts with a constraint only"
        started = self._clock.now()
        try:
            while self._spend(cursor.prepare):
                if not cursor.pending or not self._jump_forward:
                    return True
                stop = self._jump(request, generation, cursor)
                if stop is not None:
                    self._table.end_text(request, stop)
                    return False
            self._counters.mask_waits += 1
        except Exception as error:
            self._table.fail(request, error)
        finally:
            self._counters.mask_seconds += self._clock.now() - started
        return False

    def allowed_after(self, request: Request, tokens: Sequence[int]) -> list[Allowed | None]:
        """Returns the tokens that may come after each of `tokens`, as far as these may follow the text."""
        generation = request.job
        assert isinstance(generation, Generation), "only generations have constraints"
        assert generation.cursor is not None, "asked for texts with a constraint only"
        started = self._clock.now()
        after = generation.cursor.ahead(tokens, self._spend)
        found = [allowed_of(request, generation, ahead) for ahead, _ in enumerate(after, 1)]
        self._counters.mask_seconds += self._clock.now() - started
        return found

    def _spend(self, prepare: Callable[[int], int | None]) -> bool:
        """Runs `prepare` with half of the step's remaining fuel; False when that was not enough."""
        given = (self._fuel + 1) // 2
        left = prepare(given)
        self._fuel -= given if left is None else given - left
        return left is not None

    def commit(self, request: Request, generation: Generation, token: int | None) -> Stop | None:
        """Appends the settled token and, with jump-forward, the forced ones after it; returns the stop, if any."""
        cursor = generation.cursor
        assert cursor is not None, "called for texts with a constraint only"
        if cursor.error is None and cursor.restored and token is not None:
            request.restore_prompt_token(token)
            self._counters.prompt_tokens += 1  # it was left out when the request was admitted
            return self._jump(request, generation, cursor)
        stop = self._append(request, generation, cursor, token)
        return self._jump(request, generation, cursor) if stop is None else stop

    def _jump(self, request: Request, generation: Generation, cursor: Matcher) -> Stop | None:
        """Appends the forced tokens."""
        while cursor.pending and self._jump_forward:
            token = cursor.settle(cursor.pending[0], generation.length_limit - request.length)
            self._counters.forward_passes_saved += 1
            stop = self._append(request, generation, cursor, token)
            if stop is not None:
                return stop
        return None

    def _append(self, request: Request, generation: Generation, cursor: Matcher, token: int | None) -> Stop | None:
        if cursor.error is not None:
            raise cursor.error
        if token is None:
            stop: Stop | None = constraint_end(generation)
        else:
            stop = self._context.append_token(request, token)
            self._counters.constrained_tokens += 1
            if cursor.was_forced:
                self._counters.forced_tokens += 1
                generation.origins[request.generated - 1] = "forced"
        self._counters.closed_texts += stop is not None and stop.reason is FinishReason.LENGTH_CLOSED
        return stop


def _replaceable(request: Request, generation: Generation) -> bool:
    """Returns whether healing may replace the prompt's last token: not the only one, no log-probability requested."""
    return request.prompt_length > 1 and generation.sampling.prompt_logprobs_from is None


def _check_budget(request: Request, generation: Generation, constraint: SharedConstraint) -> None:
    """Raises ConstraintError when provably no text fits; a text that may fit is tried."""
    room = generation.length_limit - request.length
    start = constraint.begin()
    closing = [] if start.closing_bound <= room else start.closing_tokens()
    if closing is not None and len(closing) <= room:
        return
    least = constraint.minimum_tokens
    if least <= room:
        return
    enough = least if closing is None else len(closing)
    shortest = f"no text that satisfies the constraint has fewer than {least} tokens"
    if least > generation.sampling.max_tokens:
        raise ConstraintError(
            f"max_tokens={generation.sampling.max_tokens}: {shortest}; write max_tokens={enough} or more"
        )
    raise ConstraintError(
        f"the prompt has {request.prompt_length} tokens and leaves room for {room}; {shortest}: shorten the prompt"
    )
