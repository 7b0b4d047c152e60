"""The engine's step: plan → forward → sample → commit. No sockets, no threads, no clock of its own.

Requests share one pool of KV slots through a radix tree. Tokens enter the tree when their slots are assigned, before
they are computed: every layer stores its keys before it attends, so a request planned later in the same step reads
what an earlier one is about to write, and a fork of eight costs its shared prefix once without waiting.

One failing request ends alone. A failing forward pass ends its batch, empties the tree and lets everybody else
compute again.
"""

from collections.abc import Callable
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from ..lang.errors import CapabilityError, ConstraintError, DeadlineError, ParameterError, RequestError
from .batch import Runner
from .clock import Clock
from .commit import Commit
from .constraint_shelf import ConstraintShelf
from .counters import Counters
from .endings import aborted, failure
from .engine_protocol import (
    ControlEnded,
    EngineAbort,
    EngineChoose,
    EngineControl,
    EngineForget,
    EngineGenerate,
    EnginePicture,
    EnginePrefill,
    EngineRelease,
    EngineScore,
    FromEngine,
    ToEngine,
)
from .faults import FaultHook, no_faults
from .intake import Intake
from .kv_space import KVSpace
from .memory import IntegrityError
from .outcome import Outcome, read_outcome
from .picks import picks_of
from .planner import Planner
from .request import Phase, Prefilling
from .roster import Roster
from .sampler import Sampler
from .scheduler_config import PolicyName, SchedulerConfig
from .step_plan import StepPlan

__all__ = ["PolicyName", "Scheduler", "SchedulerConfig"]


class Scheduler:
    """Owns all requests, the pool and the tree. One thread calls it.

    Args:
        runner: the model.
        vocabulary_bytes: the bytes of a token, b"" for control tokens.
        eos_ids: tokens with which the model ends its text.
        clock: deadlines, ageing and the seconds in `counters`.
        faults: visited at engine.plan and engine.commit (once for each request), memory.allocate (once for each
            allocation), engine.forward and engine.sample (once for each step).
        constraints: opens the constraints of requests; None refuses such requests.
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
        self.config = config
        self._runner = runner
        self._clock = clock
        self._faults = faults
        self._counters = Counters()
        self.space = KVSpace(runner.num_slots, config, self._counters, clock, faults)
        self._intake = Intake(
            vocab_size=runner.vocab_size,
            context_length=runner.context_length,
            pool_size=self.space.pool.total,
            eos_ids=eos_ids,
            pictures=runner.pictures,
        )
        self._roster = Roster(self.space, self._counters)
        self._commit = Commit(
            config,
            self.space,
            self._roster,
            self._counters,
            clock,
            faults,
            token_bytes=vocabulary_bytes,
            longest=self._intake.longest,
            another=self._intake.another,
            constraints=constraints,
        )
        self._constrained = self._commit.constrained
        self._searches = self._commit.searches
        self._planner = Planner(
            config,
            self.space,
            self._roster,
            self._counters,
            clock,
            faults,
            finish=self._commit.finish,
            ready=self._constrained.ready,
        )
        self._sampler = Sampler(runner.vocab_size, runner.chooser)
        self._aborts: list[int] = []
        self._controls: list[EngineControl] = []
        self._verified = True  # nobody has run since pool and tree were verified

    # ------------------------------------------------------------------------------------------ outside

    def submit(self, message: ToEngine) -> None:
        """Takes a message between steps. Its answers come from `step`, refusals too.

        Raises:
            ParameterError: an id that is in use; two endings with one id could not be told apart.
        """
        match message:
            case EngineAbort(id=message_id):
                self._aborts.append(message_id)
            case EngineControl():
                self._controls.append(message)
            case EngineRelease(id=message_id):
                self._release(message_id)
            case EnginePicture():
                self._take_picture(message)
            case EngineForget(number):
                if self._runner.pictures is not None:
                    self._runner.pictures.forget(number)
            case EngineGenerate() | EngineScore() | EngineChoose() | EnginePrefill():
                if message.id in self._roster.alive:
                    raise ParameterError(f"request id {message.id} is in use; give every request its own")
                self._accept(message)
            case _:
                assert_never(message)

    def step(self) -> list[FromEngine]:
        """Runs at most one forward pass. Empty when nothing happened; call again while not `idle`."""
        started = self._clock.now()
        self._answer_controls()
        self._end_aborted()
        self._end_expired()
        self.space.pins.expire(started)
        self._constrained.begin_step()
        self._searches.begin_step()
        plan = self._planner.plan()
        if plan.planned:
            outcome = self._forward(plan)
            if outcome is not None:
                self._commit.commit(plan, outcome)
        self.space.pins.renew(self._clock.now())
        self._verify()
        self._counters.step_seconds += self._clock.now() - started
        events, self._roster.events = self._roster.events, []
        return events

    @property
    def idle(self) -> bool:
        """Nothing to do: no request, no answer to fetch."""
        return not (self._roster.alive or self._aborts or self._controls or self._roster.events)

    @property
    def opening(self) -> bool:
        """All that is alive waits for its constraint to be opened elsewhere: `step` has nothing to compute yet."""
        return len(self._roster.held) == len(self._roster.alive) > 0 and not (self._aborts or self._controls)

    @property
    def running(self) -> int:
        return len(self._roster.running)

    @property
    def waiting(self) -> int:
        return len(self._roster.waiting) + len(self._roster.held)

    @property
    def counters(self) -> dict[str, float]:
        self._counters.tree_seconds = self.space.tree_time.seconds
        self._constrained.count()
        return self._counters.as_dict()

    @property
    def last_failure(self) -> Exception | None:
        """The last exception that ended a request or a step, for the log of whoever owns the scheduler."""
        return self._roster.last_failure

    def planned_tokens(self) -> list[NDArray[np.int32]]:
        """During a forward pass: the true tokens of each sequence of the batch, for the oracle to compare."""
        return [rows.request.tokens[: rows.end] for rows in self._planner.current.planned]

    def planned_messages(self) -> list[int]:
        """The ids of the messages that had rows in the last step, in the order of the batch."""
        return [rows.request.message_id for rows in self._planner.current.planned]

    def check(self) -> None:
        """Pool, tree and requests agree.

        Raises:
            IntegrityError: what contradicts what.
        """
        self.space.check(list(self._roster.running.values()))
        self._roster.check()

    # ------------------------------------------------------------------------------------- between steps

    def _accept(self, message: EngineGenerate | EngineScore | EngineChoose | EnginePrefill) -> None:
        if isinstance(message, EnginePrefill) and message.pin is None and not self.config.fork_hints:
            self._counters.dropped_hints += 1
            return
        now = self._clock.now()
        try:
            match message:
                case EngineGenerate():
                    requests = [self._intake.generate(message, now)]
                    if message.constraint is not None:
                        self._constrained.hold(requests[0], message)
                case EngineScore():
                    requests = self._intake.score(message, now)
                case EngineChoose():
                    requests = [self._intake.choose(message, now)]
                    self._searches.hold(requests[0], message)
                case EnginePrefill():
                    requests = [self._intake.prefill(message, now)]
                case _:
                    assert_never(message)
        except (RequestError, CapabilityError, ConstraintError) as error:
            self._counters.refused += 1
            if isinstance(message, EnginePrefill):
                self._counters.dropped_hints += 1  # a hint is never answered
            else:
                self._roster.events.append(failure(message.id, error))
            return
        self._counters.requests += 1
        self._counters.hints += isinstance(message, EnginePrefill)
        if isinstance(message, EngineChoose) or (
            isinstance(message, EngineGenerate) and message.constraint is not None
        ):
            self._roster.hold(requests[0])
        else:
            self._roster.add(message.id, requests)

    def _take_picture(self, picture: EnginePicture) -> None:
        """Messages that hold a picture which could not be taken are refused when they come."""
        try:
            if self._runner.pictures is None:
                raise CapabilityError("the model reads text only")
            self._runner.pictures.put(picture)
        except Exception as error:
            self._roster.last_failure = error

    def _release(self, message_id: int) -> None:
        """Ends a pin, or the hint that would have placed it."""
        requests = self._roster.alive.get(message_id)
        if requests is None:
            self.space.pins.release(message_id)
        elif isinstance(requests[0].job, Prefilling):
            self._roster.drop(requests[0])

    def _answer_controls(self) -> None:
        controls, self._controls = self._controls, []
        for control in controls:
            match control.verb:
                case "flush_cache":
                    answer: FromEngine = ControlEnded(
                        control.id, {"evicted": self.space.flush(), "kept": self.space.cache.total_tokens}
                    )
                case "info":
                    answer = ControlEnded(control.id, self._info())
                case _:
                    error = ParameterError(f'unknown verb {control.verb!r}; write "flush_cache" or "info"')
                    answer = failure(control.id, error)
            self._roster.events.append(answer)

    def _info(self) -> dict[str, str | int | float | bool | list[int | str] | None]:
        return {
            **self.counters,
            **self._runner.facts(),
            "running": self.running,
            "waiting": self.waiting,
            "free_slots": self.space.pool.free,
            "cached_slots": self.space.cache.total_tokens,
            "pinned_slots": self.space.cache.pinned_tokens,
            "pins": len(self.space.pins),
            "total_slots": self.space.pool.total,
            "longest": self._intake.longest,
        }

    def _end_aborted(self) -> None:
        aborts, self._aborts = self._aborts, []
        for message_id in aborts:
            if message_id in self._roster.alive:  # else it has ended already, and was answered by that
                self._counters.aborted += 1
                self._roster.end(message_id, aborted(self._roster.alive[message_id][0]))

    def _end_expired(self) -> None:
        now = self._clock.now()
        expired = [
            (message_id, requests[0])
            for message_id, requests in self._roster.alive.items()
            if requests[0].deadline is not None and now >= requests[0].deadline
        ]
        for message_id, request in expired:
            self._counters.expired += 1
            seconds, tokens = request.schedule.timeout, request.generated
            error = DeadlineError(f"the deadline of {seconds:g} s passed after {tokens} tokens")
            self._roster.end(message_id, failure(message_id, error))

    def _verify(self) -> None:
        """After every step in tests, else when nobody is left: there a contradiction costs only the cache."""
        if self.config.check_every_step:
            self.check()
        elif not self._roster.alive and not self._verified:
            try:
                self.check()
            except IntegrityError as error:
                self._roster.last_failure = error
                self._counters.integrity_failures += 1
                self._forget_keys()
        self._verified = not self._roster.alive

    # --------------------------------------------------------------------------- forward, sample, commit

    def _forward(self, plan: StepPlan) -> Outcome | None:
        """Logits and what they say; None when the step has failed."""
        try:
            batch = plan.build(picks_of(plan.planned, plan.logit_rows) if self.config.partial_logits else None)
            started = self._clock.now()
            self._faults("engine.forward")
            logits = self._runner.forward(batch)
            computed = self._clock.now()
            self._faults("engine.sample")
            outcome = read_outcome(logits, plan, batch.picks, self._sampler)
        except Exception as error:
            self._fail_step(plan, error)
            return None
        self._counters.forward_seconds += computed - started
        self._counters.sample_seconds += self._clock.now() - computed
        self._counters.steps += 1
        self._counters.forward_rows += batch.rows
        self._counters.logit_rows += plan.logit_rows
        self._counters.picked_rows += int((logits.places < 0).sum())
        return outcome

    # ------------------------------------------------------------------------------------------ failures

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        """Keys of this step may be wrong or missing, and the tree holds them already: everything is forgotten.

        Those in the batch end with the cause; the other running requests wait again with all their tokens.
        """
        self._counters.failed_steps += 1
        self._forget_keys()
        self._runner.clear()
        for rows in plan.planned:
            if rows.request.phase is not Phase.ENDED:
                self._roster.fail(rows.request, error)

    def _forget_keys(self) -> None:
        """Pool and tree are emptied; whoever runs waits again and computes its tokens anew."""
        self._counters.pool_rebuilds += 1
        self.space.clear()
        self._roster.retract_all()
