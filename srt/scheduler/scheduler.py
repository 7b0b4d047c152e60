"""The engine's step: plan → launch → land. No sockets, no threads, no clock of its own.

To launch a plan is to begin its forward pass; to land it, to wait for that, to choose tokens and to commit them. With
overlap a step is planned and launched before the one before it lands (overlap.py); without, they land at once.

Requests share one pool of KV slots through a radix tree. Tokens enter the tree when their slots are assigned, before
they are computed: every layer stores its keys before it attends, so a request planned later in the same step reads
what an earlier one is about to write, and a fork of eight costs its shared prefix once without waiting.

A request that fails ends alone, also where its row fails while tokens are chosen: the keys of the step are sound. A
forward pass that fails ends its batch, empties the tree and lets everybody else compute again.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ...lang.errors import ParameterError
from ..cache.slot_allocator import IntegrityError
from ..constraints.matcher_cache import ConstraintShelf
from ..core.batch import AsyncRunner, Runner
from ..core.clock import Clock
from ..core.counters import Counters
from ..core.faults import FaultHook, no_faults
from ..core.messages import FromEngine, ToEngine
from ..sampling.sampler import Sampler
from .commit import Commit
from .config import PolicyName, SchedulerConfig
from .inbox import Inbox, Info
from .kv_manager import KVManager
from .overlap import FinishedStep, InFlightStep, pending_tokens
from .planner import Planner
from .request import Phase
from .request_table import RequestTable
from .row_requests import NO_REQUESTS, build_row_requests
from .step_plan import PlannedRows, StepPlan
from .step_results import StepResult, read_step_result
from .validation import RequestFactory

__all__ = ["PolicyName", "Scheduler", "SchedulerConfig"]


class Scheduler:
    """Owns all requests, the pool and the tree. One thread calls it.

    Args:
        runner: the model.
        vocabulary_bytes: the bytes of a token, b"" for control tokens.
        eos_ids: tokens with which the model ends its text.
        clock: deadlines, ageing and the seconds in `counters`.
        faults: visited at engine.plan, engine.sample and engine.commit (once for each request), memory.allocate (once
            for each allocation), engine.forward (once for each step).
        constraints: opens the constraints of requests; None refuses such requests.

    Raises:
        ParameterError: overlap with a runner that is no `batch.AsyncRunner`.
    """

    def __init__(
        self,
        runner: Runner,
        vocabulary_bytes: Callable[[int], bytes],
        eos_ids: frozenset[int],
        config: SchedulerConfig,
        clock: Clock,
        faults: FaultHook = no_faults,
        constraints: ConstraintShelf | None = None,
    ) -> None:
        if config.overlap and not isinstance(runner, AsyncRunner):
            raise ParameterError(f"overlap=True: {type(runner).__name__} waits for its steps; write overlap=False")
        self.config = config
        self._runner = runner
        self._launcher = runner if config.overlap and isinstance(runner, AsyncRunner) else None
        self._in_flight: deque[InFlightStep] = deque()  # oldest first; between steps one at most
        self._clock = clock
        self._faults = faults
        self._counters = Counters()
        self.kv = KVManager(runner.num_slots, config, self._counters, clock, faults)
        self._factory = RequestFactory(
            vocab_size=runner.vocab_size,
            context_length=runner.context_length,
            pool_size=self.kv.pool.total,
            eos_ids=eos_ids,
            pictures=runner.pictures,
        )
        self._table = RequestTable(self.kv, self._counters)
        self._commit = Commit(
            config,
            self.kv,
            self._table,
            self._counters,
            clock,
            faults,
            token_bytes=vocabulary_bytes,
            longest=self._factory.longest,
            another=self._factory.another,
            constraints=constraints,
        )
        self._constrained = self._commit.constrained
        self._searches = self._commit.searches
        self._planner = Planner(
            config,
            self.kv,
            self._table,
            self._counters,
            clock,
            faults,
            finish=self._commit.finish,
            ready=self._constrained.ready,
        )
        self._sampler = Sampler(runner.vocab_size, runner.chooser)
        self._inbox = Inbox(
            self._factory,
            self._table,
            self.kv,
            self._counters,
            clock,
            pictures=runner.pictures,
            constrained=self._constrained,
            searches=self._searches,
            info=self._info,
        )
        self._ran = False  # since pool and tree were checked

    # ------------------------------------------------------------------------------------------ outside

    def submit(self, message: ToEngine) -> None:
        """Takes a message between steps. Its answers come from `step`, refusals too.

        Raises:
            ParameterError: an id that is in use; two endings with one id could not be told apart.
        """
        self._inbox.submit(message)

    def step(self) -> list[FromEngine]:
        """Launches at most one forward pass. Empty when nothing happened; call again while not `idle`.

        An idle scheduler that is `unchecked` goes on with the check of pool and tree, for a fraction of a millisecond.
        """
        started = self._clock.now()
        self._inbox.read()
        self.kv.pins.expire(started)
        self._constrained.begin_step()
        self._searches.begin_step()
        self._ran |= bool(self._table.alive)
        if self._in_flight and (self._planner.short or self._in_flight[0].delays_too_many):
            self._complete()
        ahead = 1 if self._launch() and self._launcher is not None else 0
        while len(self._in_flight) > ahead:
            self._complete()
        self.kv.pins.renew(self._clock.now())
        if self.config.check_every_step:
            self.check()
        self._counters.step_seconds += self._clock.now() - started
        if self.unchecked:
            self._check_some()
        events, self._table.events = self._table.events, []
        return events

    @property
    def idle(self) -> bool:
        """Nothing to do: no request, no answer to fetch."""
        return self._inbox.empty and not (self._table.alive or self._in_flight or self._table.events)

    @property
    def unchecked(self) -> bool:
        """Nothing to do but to check pool and tree, which have been used since the last time. There a contradiction
        costs only the cache. Steps that are checked one by one leave nothing to check."""
        return self._ran and not self.config.check_every_step and self.idle

    @property
    def opening(self) -> bool:
        """All that is alive waits for its constraint to be opened elsewhere: `step` has nothing to compute yet."""
        waits = len(self._table.held) == len(self._table.alive) > 0
        return waits and self._inbox.empty and not self._in_flight

    @property
    def running(self) -> int:
        return len(self._table.running)

    @property
    def waiting(self) -> int:
        return len(self._table.waiting) + len(self._table.held)

    @property
    def counters(self) -> dict[str, float]:
        self._counters.tree_seconds = self.kv.tree_time.seconds
        self._constrained.count()
        return self._counters.as_dict()

    @property
    def last_failure(self) -> Exception | None:
        """The last exception that ended a request or a step, for the log of whoever owns the scheduler."""
        return self._table.last_failure

    def planned_tokens(self) -> list[NDArray[np.int32]]:
        """While a step is launched: the true tokens of each sequence of the batch, for the oracle to compare. One that
        is not known yet is PENDING_TOKEN."""
        return [rows.request.tokens[: rows.end] for rows in self._planner.current.planned]

    def planned_messages(self) -> list[int]:
        """The ids of the messages that have rows in the step that was planned last, in the order of the batch."""
        return [rows.request.message_id for rows in self._planner.current.planned]

    def check(self) -> None:
        """Pool, tree and requests agree.

        Raises:
            IntegrityError: what contradicts what.
        """
        self.kv.check(list(self._table.running.values()))
        self._table.check()

    # ------------------------------------------------------------------------------------------ inside

    def _info(self) -> Info:
        return {
            **self.counters,
            **self._runner.facts(),
            "running": self.running,
            "waiting": self.waiting,
            "free_slots": self.kv.pool.free,
            "cached_slots": self.kv.cache.total_tokens,
            "pinned_slots": self.kv.cache.pinned_tokens,
            "pins": len(self.kv.pins),
            "total_slots": self.kv.pool.total,
            "longest": self._factory.longest,
        }

    def _check_some(self) -> None:
        """A slice of the check. It goes on where it was when requests have run in between."""
        try:
            complete = self.kv.check_some()
            if complete:
                self._table.check()
        except IntegrityError as error:
            self._table.last_failure = error
            self._counters.integrity_failures += 1
            self._forget_keys()
            complete = True  # nothing is left to check; requests that run bring the next round
        else:
            self._counters.idle_checks += complete
        self._ran = not complete

    # ----------------------------------------------------------------------------------- plan, launch, land

    def _launch(self) -> bool:
        """Plans a step and begins it; False when there is nothing to run, or it crashed."""
        before = self._in_flight[-1] if self._in_flight else None
        with pending_tokens(before):
            plan = self._planner.plan(behind=before is not None)
            if not plan.planned:
                return False
            self._commit.begin(plan)
            try:
                step = self._start(plan)
            except Exception as error:
                step = InFlightStep.crashed(plan, error)
        self._counters.overlapped_steps += before is not None
        self._in_flight.append(step)
        return not step.failed

    def _start(self, plan: StepPlan) -> InFlightStep:
        launcher, asked = self._launcher, NO_REQUESTS
        if self.config.partial_logits:
            asked = build_row_requests(plan.planned, plan.logit_rows, launched=launcher is not None)
        batch = plan.build(asked.row_requests)
        started = self._clock.now()
        self._faults("engine.forward")
        pending = FinishedStep(self._runner.forward(batch)) if launcher is None else launcher.launch(batch)
        self._counters.forward_seconds += self._clock.now() - started
        return InFlightStep(plan, asked, pending) if launcher is None else InFlightStep.launched(plan, asked, pending)

    def _complete(self) -> None:
        """Waits for the oldest step, and commits what it says."""
        step = self._in_flight.popleft()
        planned = step.plan.planned
        going = [rows for rows in planned if rows.request.phase is not Phase.ENDED]
        try:
            result = self._read(step, going)
        except Exception as error:
            self._fail(step, error)
            return
        rows = sum(rows.end - rows.start for rows in planned)
        self._counters.steps += 1
        self._counters.forward_rows += rows
        self._counters.wasted_rows += rows - sum(rows.end - rows.start for rows in going)
        self._counters.logit_rows += step.plan.logit_rows
        self._commit.commit(going, result)

    def _read(self, step: InFlightStep, going: list[PlannedRows]) -> StepResult:
        """Waits, and asks what the step says of those that have not ended meanwhile."""
        started = self._clock.now()
        logits = step.pending.result()
        computed = self._clock.now()
        self._counters.forward_seconds += computed - started
        errors = dict(step.asked.errors)
        for rows in going:
            try:
                self._faults("engine.sample")
            except Exception as error:
                errors[rows.request.number] = error
        result = read_step_result(logits, going, step.asked.row_requests, self._sampler, errors)
        self._counters.sample_seconds += self._clock.now() - computed
        self._counters.picked_rows += int((logits.places < 0).sum())
        return result

    # ------------------------------------------------------------------------------------------ failures

    def _fail(self, step: InFlightStep, error: Exception) -> None:
        """Keys of this step may be wrong or missing, and the tree holds them already: everything is forgotten.

        Those in the batch end with the cause; the other running requests wait again with all their tokens.
        """
        while self._in_flight:
            self._in_flight.popleft().drop()  # it has read those keys
        self._counters.failed_steps += 1
        self._forget_keys()
        self._runner.clear()
        for rows in step.plan.planned:
            if rows.request.phase is not Phase.ENDED:
                self._table.fail(rows.request, error)

    def _forget_keys(self) -> None:
        """Pool and tree are emptied; whoever runs waits again and computes its tokens anew."""
        self._counters.pool_rebuilds += 1
        self.kv.clear()
        self._table.retract_all()
