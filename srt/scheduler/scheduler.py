"""Runs the engine's step: plan → launch → complete. No sockets, no threads, no clock of its own.

Launching a plan starts its forward pass. Completing it waits for that pass, samples tokens and commits them.
With overlap a step is launched before the previous one completes (step.py); without, each completes at once.

Requests share one pool of KV slots through a radix tree. Tokens enter the tree when their slots are assigned, before
they are computed. Every layer stores its keys before it attends, so a request planned later in the same step reads
what an earlier one is about to write: a fork of eight computes its shared prefix once, without waiting.

A request that fails ends alone, also when its row fails during sampling: the keys of the step are sound. A forward
pass that fails ends its batch and empties the tree; all other requests compute their tokens again.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from ...lang.errors import CapabilityError, DeadlineError, ParameterError, UmbelError
from ...lang.sampling import SamplingParams
from ..cache.slot_allocator import IntegrityError, Slots
from ..cache.window_slots import WindowSlots
from ..constraints.matcher import MatcherCache
from ..core.batch import AsyncRunner, LaunchedStep, Logits, Runner, ShortOfMemory, VectorHead
from ..core.instruments import Clock, Counters, FaultHook, no_faults
from ..core.messages import (
    ControlEnded,
    EngineAbort,
    EngineChoose,
    EngineControl,
    EngineEmbed,
    EngineEnd,
    EngineForget,
    EngineGenerate,
    EnginePicture,
    EnginePrefill,
    EngineRelease,
    EngineRenew,
    EngineScore,
    EngineSnapshot,
    EngineSurvey,
    EngineSurveyed,
    FromEngine,
    KeepsEnded,
    ToEngine,
)
from ..sampling.sampler import Sampler
from .choice_search import ChoiceSearches
from .commit import Commit, StepResult, read_step_result
from .constrained import ConstrainedTexts
from .guesses import Guesser, make_guesser
from .kv_manager import KVManager
from .page_cache import PageCache, PageTiers
from .planner import Planner
from .policy import PolicyName, SchedulerConfig
from .recording import EngineRecorder
from .request import Phase, Prefilling
from .request_table import RequestFactory, RequestTable, SchedulerContext, Timing, failure
from .step import (
    NO_REQUESTS,
    FinishedStep,
    InFlightStep,
    PlannedRows,
    StepPlan,
    build_row_requests,
    pending_tokens,
)
from .trace import HostPhase, StepTrace

Info = dict[str, str | int | float | bool | list[int | str] | None]

_MEASURED_TOKENS = 256
_log = logging.getLogger("umbel.engine")
_ROWS_OF_PROMPT = 16  # rows of each sequence, on average, in a step that says how long prompts take

__all__ = ["PolicyName", "Scheduler", "SchedulerConfig"]


class Scheduler:
    """Owns all requests, the slot allocator and the radix tree. One thread calls it.

    Args:
        runner: the model.
        vocabulary_bytes: the bytes of a token, b"" for control tokens.
        eos_ids: tokens with which the model ends its text.
        clock: for deadlines, ageing and the seconds in `counters`.
        faults: visited at engine.plan, engine.sample and engine.commit (once for each request), memory.allocate (once
            for each allocation), engine.forward (once for each step).
        constraints: opens the constraints of requests; None: such requests are refused.
        vectors: turns hidden states into vectors; None: requests for embeddings are refused.
        tiers: keep pages that are not in the pool; None: there are none.
        recorder: writes down what arrives and what steps take, for the simulator; None: nothing is written.
        guesser: guesses tokens in place of the one that config.token_guesses asks for.
        trace: writes down when the device ran and what the host did; None: nothing is written. The runner was told by
            `TimedRunner.time_steps`.

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
        constraints: MatcherCache | None = None,
        vectors: VectorHead | None = None,
        tiers: PageTiers | None = None,
        recorder: EngineRecorder | None = None,
        guesser: Guesser | None = None,
        trace: StepTrace | None = None,
    ) -> None:
        if config.overlap and not isinstance(runner, AsyncRunner):
            raise ParameterError(f"overlap=True: {type(runner).__name__} waits for its steps; write overlap=False")
        self.config = config
        assert not (config.overlap and runner.num_states), "a state that a step ahead has moved cannot be taken back"
        self._runner = runner
        self._async_runner = runner if config.overlap and isinstance(runner, AsyncRunner) else None
        self._in_flight: deque[InFlightStep] = deque()  # oldest first; between steps one at most
        self._clock = clock
        self._faults = faults
        self._counters = Counters()
        self._pictures = runner.pictures
        self._recorder, self._trace = recorder, trace
        self.kv = KVManager(
            runner.num_slots,
            config,
            self._counters,
            clock,
            faults,
            context_length=runner.context_length,
            num_states=runner.num_states,
            window_pool=runner.window_pool,
            pages=None if tiers is None else partial(self._page_cache, tiers),
        )
        self._timing = Timing(clock)
        self._table = RequestTable(self.kv, self._counters, self._timing)
        self._factory = RequestFactory(
            vocab_size=runner.vocab_size,
            context_length=runner.context_length,
            pool_size=self.kv.pool.total,
            most_of_salt=self.kv.most_of_salt,
            eos_ids=eos_ids,
            pictures=runner.pictures,
            vectors=vectors,
        )
        context = SchedulerContext(
            config,
            self.kv,
            self._table,
            self._factory,
            self._counters,
            self._timing,
            clock,
            faults,
            token_bytes=vocabulary_bytes,
            constraints=constraints,
            vectors=vectors,
        )
        self._constrained = ConstrainedTexts(context)
        self._searches = ChoiceSearches(context)
        self._commit = Commit(context, self._constrained, self._searches)
        self._guesser = guesser or make_guesser(config, runner)
        if self._guesser is not None:
            self._guesser.attach(context, self._constrained)
        self._planner = Planner(context, self._constrained, self._commit, self._guesser, trace)
        self._sampler = Sampler(runner.vocab_size, runner.chooser)
        self._aborts: list[int] = []
        self._controls: list[EngineControl | EngineSurvey] = []
        self._completed_at = 0.0  # on the clock: the last step
        self._told = np.empty(0, dtype=np.int64)  # [L] the tokens that its rows chose
        self._ran, self._rested = False, True  # since pool and tree were checked; no request was left by the last step

    # ------------------------------------------------------------------------------------------ outside

    def handle_message(self, message: ToEngine) -> None:
        """Handles a message between steps. `step` returns its answers, refusals included.

        Raises:
            ParameterError: the id is in use; two endings with one id could not be told apart.
        """
        if self._recorder is not None:
            self._recorder.arrived(message, self._clock.now())
        match message:
            case EngineAbort(id=message_id):
                self._aborts.append(message_id)
            case EngineControl() | EngineSurvey():
                self._controls.append(message)
            case EngineRelease(id=message_id):
                self._release(message_id)
            case EngineRenew(id=message_id, seconds=seconds):
                self.kv.pins.prolong(message_id, seconds=seconds, now=self._clock.now())
            case EnginePicture():
                self._take_picture(message)
            case EngineForget(number):
                if self._pictures is not None:
                    self._pictures.forget(number)
            case EngineSnapshot():
                if self.kv.journal is not None and self.kv.tree is not None:
                    self.kv.journal.snapshot(self.kv.tree)
            case EngineGenerate() | EngineScore() | EngineChoose() | EngineEmbed() | EnginePrefill():
                if message.id in self._table.alive:
                    raise ParameterError(f"request id {message.id} is in use; give every request its own")
                self._accept(message)
            case EngineEnd():
                raise AssertionError("it is for the process")
            case _:
                assert_never(message)

    def step(self) -> list[FromEngine]:
        """Launches at most one forward pass and returns the messages to send. Call again while not `idle`.

        An idle scheduler that is `unchecked` continues the check of pool and tree, for a fraction of a millisecond.
        """
        trace = self._trace
        if trace is not None:
            self._trace_begin(trace)
        started = self._clock.now()
        self._begin_step(started)
        if self._recorder is not None:
            held = {request.message_id for request in self._table.held.values()}
            self._recorder.opened(held, self._clock.now())
        if self._in_flight and (self._planner.short or self._in_flight[0].delays_too_many):
            self._complete()
        ahead = 1 if self._launch(started) and self._async_runner is not None else 0
        while len(self._in_flight) > ahead:
            self._complete()
        self._choose_late()
        if trace is not None:
            trace.enter(HostPhase.END)
        self._end_step(started)
        self._rested = not self._table.alive
        if lost := self.kv.pins.take_lost():
            self._table.events.append(KeepsEnded(lost))
        events = self._table.take_events()
        if self.kv.journal:
            changes = self.kv.journal.take()
            self._counters.cache_events += sum(len(message.events) for message in changes)
            events[:0] = changes
        if self._recorder is not None:
            self._recorder.stepped(started, events, self._clock.now(), goes_on=not self.idle)
        if trace is not None:
            trace.enter(HostPhase.RESTING if self._rested else HostPhase.OUTSIDE)
        return events

    @property
    def idle(self) -> bool:
        """Returns whether there is nothing to do: no request, no answer and no change of the tree to fetch."""
        return self._nothing_asked and not (
            self._table.alive or self._in_flight or self._table.events or self.kv.journal
        )

    @property
    def unchecked(self) -> bool:
        """Returns whether the only work left is to check pool and tree, which were used since the last check.

        When idle, a contradiction costs only the cache. With check_every_step nothing is left to check.
        """
        return self._ran and not self.config.check_every_step and self.idle

    @property
    def opening(self) -> bool:
        """Returns whether every live request waits for its constraint, or for its pages from a tier of the cache, so
        that `step` has nothing to compute yet."""
        table = self._table
        if table.waiting or not table.alive or self._in_flight or not self._nothing_asked:
            return False
        return all(request.phase is Phase.LOADING for request in table.running.values())

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
        return self._counters.as_dict() | self._timing.counters

    def reset_counters(self) -> None:
        """Begins to count at 0, as if nothing had been computed."""
        self._counters.reset()
        self.kv.tree_time.seconds = 0.0
        self._timing.reset()

    def measure_prompts(self, token: int) -> None:
        """Computes a prompt of one token, repeated, until the time of a token is known, and logs from where on loading
        pays. Called before the first request."""
        assert self.kv.pages is not None, "there is something to compare it with"
        pages = self.kv.pages
        most = self.config.max_step_tokens or _MEASURED_TOKENS
        tokens = max(1, min(_MEASURED_TOKENS, most, self._factory.longest - 1))
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0)
        pages.active = False
        for pages.measures in (False, True):  # the first time also loads what steps need
            self.handle_message(EngineGenerate(0, [token] * tokens, sampling, False))
            while not self.idle:
                self.step()
            self.kv.flush()
        pages.active = True
        self.reset_counters()
        for line in pages.crossings():
            _log.info("%s", line)

    @property
    def last_failure(self) -> Exception | None:
        """The last exception that ended a request or a step, for the log of the engine."""
        return self._table.last_failure

    def planned_tokens(self) -> list[NDArray[np.int32]]:
        """Returns the true tokens of each sequence of the batch while a step is launched; the oracle compares them.

        A token that is not known yet is PENDING_TOKEN.
        """
        planned = self._planner.current.planned
        return [np.append(rows.request.tokens[: rows.end], rows.guesses).astype(np.int32) for rows in planned]

    def planned_messages(self) -> list[int]:
        """Returns the ids of the messages with rows in the last planned step, in batch order."""
        return [rows.request.message_id for rows in self._planner.current.planned]

    def check(self) -> None:
        """Checks that pool, tree and requests agree.

        Raises:
            IntegrityError: says what contradicts what.
        """
        self.kv.check(list(self._table.running.values()))
        self._table.check()

    # ------------------------------------------------------------------------------------------ inside

    def _trace_begin(self, trace: StepTrace) -> None:
        """Notes that a step begins. Before, what was noted is written if no request waits for it, or if it is much."""
        if trace.is_full or (self._rested and not self._table.alive):
            trace.flush()
        trace.enter(HostPhase.BEGIN)

    @property
    def _nothing_asked(self) -> bool:
        """Returns whether no control and no abort is pending."""
        return not (self._aborts or self._controls)

    def _begin_step(self, now: float) -> None:
        """Answers controls, ends aborted and expired messages, and queues requests whose constraint is now open."""
        self._answer_controls()
        self._end_aborted()
        self._end_expired()
        self.kv.pins.expire(now)
        if self.kv.pages is not None:
            self._receive_pages(self.kv.pages)
        self._constrained.begin_step()
        self._searches.begin_step()
        self._ran |= bool(self._table.alive)

    def _end_step(self, started: float) -> None:
        """Renews pins that were used, counts the time, and checks pool and tree when due."""
        self.kv.pins.renew(self._clock.now())
        if self.kv.pages is not None:
            self.kv.pages.after_step()
        if self.config.check_every_step:
            self.check()
        self._counters.step_seconds += self._clock.now() - started
        if self.unchecked:
            self._check_some()

    def _page_cache(self, tiers: PageTiers, windows: WindowSlots | None, written: Callable[[Slots], bool]) -> PageCache:
        port = self._runner.pages
        assert port is not None, "no tiers are made for such a runner"
        return PageCache(tiers, port, windows, self._pictures, self._counters, self._clock, written)

    def _receive_pages(self, pages: PageCache) -> None:
        """Lets requests run whose load has ended, with what has come."""
        for load in pages.loads.poll():
            for request in sorted(load.waiting.values(), key=lambda request: request.rank):
                if request.phase is not Phase.LOADING:
                    continue  # its message has failed just now
                assert request.pages is not None, "it waits for them"
                request.pages.load = None
                try:
                    self.kv.receive(request, load)
                except Exception as error:
                    self._table.fail(request, error)
                else:
                    self._table.loaded(request)

    def _info(self) -> Info:
        pool = self.kv.gauges
        return {
            **self.counters,
            **self._runner.facts(),
            **({} if self.kv.pages is None else self.kv.pages.facts()),
            "max_running": self.config.max_running,
            "chunk_size": self.config.max_step_tokens or 0,
            "running": self.running,
            "waiting": self.waiting,
            "free_slots": pool.free,
            "cached_slots": pool.cached,
            "pinned_slots": pool.pinned,
            "pins": pool.pins,
            "total_slots": pool.total,
            "kept_slots": self.kv.cache.kept_tokens,
            "most_kept_slots": self.kv.pins.most_kept,
            "keeps": self.kv.pins.keeps,
            "longest": self._factory.longest,
            "state_slots": 0 if self.kv.states is None else self.kv.states.slots.total,
            "snapshots": 0 if self.kv.states is None else self.kv.states.slots.snapshots,
            "window_slots": pool.window_total,
            "free_window_slots": pool.window_free,
        }

    def _check_some(self) -> None:
        """Runs a slice of the check. It continues where it stopped, also if requests ran in between."""
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

    # ----------------------------------------------------------------------------------------- messages

    def _accept(self, message: EngineGenerate | EngineScore | EngineChoose | EngineEmbed | EnginePrefill) -> None:
        now = self._clock.now()
        try:
            match message:
                case EngineGenerate():
                    requests = [self._factory.generate(message, now)]
                    if message.constraint is not None:
                        self._constrained.hold(requests[0], message)
                case EngineScore():
                    requests = self._factory.score(message, now)
                case EngineChoose():
                    requests = [self._factory.choose(message, now)]
                    self._searches.hold(requests[0], message)
                case EngineEmbed():
                    requests = [self._factory.embed(message, now)]
                case EnginePrefill():
                    requests = [self._factory.prefill(message, now)]
                case _:
                    assert_never(message)
        except Exception as error:
            self._counters.refused += 1
            if not isinstance(error, UmbelError):
                self._table.last_failure = error
            if isinstance(message, EnginePrefill):
                self._counters.dropped_hints += 1  # a hint is never answered
            else:
                self._table.events.append(failure(message.id, error))
            return
        self._counters.requests += 1
        self._counters.hints += isinstance(message, EnginePrefill)
        if isinstance(message, EngineChoose) or (
            isinstance(message, EngineGenerate) and message.constraint is not None
        ):
            self._table.hold(requests[0])
        else:
            self._table.add(message.id, requests)

    def _take_picture(self, picture: EnginePicture) -> None:
        """Stores a picture. If that fails, messages that hold the picture are refused on arrival."""
        try:
            if self._pictures is None:
                raise CapabilityError("the model reads text only")
            self._pictures.put(picture)
        except Exception as error:
            self._table.last_failure = error

    def _release(self, message_id: int) -> None:
        """Ends a pin or a kept prefix, or the hint that would have placed the pin."""
        requests = self._table.alive.get(message_id)
        if requests is None:
            self.kv.pins.release(message_id)
        elif isinstance(requests[0].job, Prefilling):
            self._table.drop(requests[0])

    def _answer_controls(self) -> None:
        controls, self._controls = self._controls, []
        for control in controls:
            match control:
                case EngineSurvey(id, most, shown):
                    answer: FromEngine = EngineSurveyed(id, *self.kv.survey(most, shown))
                case EngineControl(id, "flush_cache"):
                    if self._guesser is not None:
                        self._guesser.forget()
                    answer = ControlEnded(id, {"evicted": self.kv.flush(), "kept": self.kv.cache.total_tokens})
                case EngineControl(id, "info"):
                    answer = ControlEnded(id, self._info())
                case EngineControl(id, verb):
                    answer = failure(id, ParameterError(f'unknown verb {verb!r}; write "flush_cache" or "info"'))
            self._table.events.append(answer)

    def _end_aborted(self) -> None:
        aborts, self._aborts = self._aborts, []
        for message_id in aborts:
            if message_id in self._table.alive:  # else it has ended already, and was answered by that
                self._counters.aborted += 1
                request = self._table.alive[message_id][0]
                try:
                    ending = self._table.aborted(request)
                except Exception as error:
                    self._table.fail(request, error)
                else:
                    self._table.end(message_id, ending)

    def _end_expired(self) -> None:
        now = self._clock.now()
        expired = [
            (message_id, requests[0])
            for message_id, requests in self._table.alive.items()
            if requests[0].deadline is not None and now >= requests[0].deadline
        ]
        for message_id, request in expired:
            self._counters.expired += 1
            seconds, tokens = request.schedule.timeout or 0.0, request.generated
            error = DeadlineError(f"the deadline of {round(seconds, 2):g} s passed after {tokens} tokens")
            self._table.end(message_id, failure(message_id, error))

    # ----------------------------------------------------------------------------------- plan, launch, complete

    def _launch(self, started: float) -> bool:
        """Plans and starts a step; False when there is nothing to run, or it crashed. started: on the clock."""
        before = self._in_flight[-1] if self._in_flight else None
        trace = self._trace
        if trace is not None:
            trace.enter(HostPhase.PLAN)
        with pending_tokens(before):
            plan = self._planner.plan(step_running=before is not None)
            if not plan.planned:
                return False
            if self._recorder is not None:
                self._recorder.planned(plan)
            self._commit.begin(plan)
            if trace is not None:
                trace.enter(HostPhase.LAUNCH)
            launched_at = self._clock.now()
            try:
                step = self._start(plan)
            except Exception as error:
                step = InFlightStep.crashed(plan, error)
        self.kv.end_plan()
        if self._guesser is not None and self._async_runner is not None and before is None and not self._rested:
            self._guesser.waited(self._clock.now() - self._completed_at)
        self._counters.overlapped_steps += before is not None
        self._counters.first_steps += self._rested
        self._in_flight.append(replace(step, begun_at=started, launched_at=launched_at))
        return not step.failed

    def _start(self, plan: StepPlan) -> InFlightStep:
        launcher, asked = self._async_runner, NO_REQUESTS
        if self.config.partial_logits:
            asked = build_row_requests(plan.planned, plan.logit_rows, launched=launcher is not None)
        windows = self.kv.windows
        batch = plan.build(asked.row_requests, None if windows is None else windows.slots)
        started = self._clock.now()
        if self._recorder is not None:
            self._recorder.launched(batch.shape)
        self._faults("engine.forward")
        if launcher is None:
            step = InFlightStep(plan, asked, FinishedStep(self._runner.forward(batch)))
        else:
            step = InFlightStep.launched(plan, asked, launcher.launch(batch))
        self._counters.forward_seconds += self._clock.now() - started
        return step

    def _choose_late(self) -> None:
        """Has the step that runs choose its late tokens, now that the step before it is complete."""
        if not self._in_flight or not self._in_flight[0].asked.late:
            return
        if self._trace is not None:
            self._trace.enter(HostPhase.MASK)
        step = self._in_flight[0]
        chosen: list[PlannedRows] = []
        dropped: list[int] = []
        for rows, source in step.asked.late:
            request = rows.request
            if request.phase is not Phase.RUNNING:
                continue
            right = int(request.tokens[rows.start]) == self._told[source]
            ready = right and rows.end == request.length and self._constrained.ready(request)
            if request.phase is not Phase.RUNNING or (right and rows.end < request.length):
                continue  # forced tokens follow
            if ready:
                chosen.append(rows)
            else:
                request.computed = request.kv_length = rows.start
                dropped.append(request.number)
        asked = build_row_requests(chosen, step.plan.logit_rows, launched=True)  # whose masks are known now
        for rows in chosen:
            if (error := asked.errors.get(rows.request.number)) is not None:
                self._table.fail(rows.request, error)
        chosen = [rows for rows in chosen if rows.request.number not in asked.errors]
        self._counters.late_rows += len(chosen) + len(dropped)
        self._counters.dropped_rows += len(dropped)
        self._in_flight[0] = step.chosen_late(chosen, dropped)
        if not chosen:
            return
        assert isinstance(step.pending, LaunchedStep), "its rows choose later"
        assert asked.row_requests is not None, "requests were built"
        places = np.array([rows.logits_of_last for rows in chosen], dtype=np.int64)
        try:
            step.pending.choose(places, asked.row_requests.take(places))
        except Exception as error:
            self._in_flight.popleft()
            self._fail(step, error)

    def _complete(self) -> None:
        """Waits for the oldest step and commits its result."""
        step = self._in_flight.popleft()
        planned = step.plan.planned
        going = [rows for rows in planned if rows.request.phase is not Phase.ENDED]
        if step.dropped:
            going = [rows for rows in going if rows.request.number not in step.dropped]
        guessed = [rows for rows in going if rows.guessed is not None] if step.plan.guess_rows else []
        others = [rows for rows in going if rows.guessed is None] if guessed else going
        try:
            logits = self._wait(step)
            self._told = logits.tokens
            result, of_guessed = self._read(step, others, logits), self._read(step, guessed, logits)
        except Exception as error:
            self._fail(step, error)
            return
        rows = step.plan.row_count
        self._planner.relax()
        self._counters.steps += 1
        self._counters.forward_rows += rows
        if len(going) < len(planned):
            self._counters.wasted_rows += rows - sum(rows.whole_end - rows.start for rows in going)
        self._counters.logit_rows += step.plan.logit_rows
        before, seconds = self._completed_at, self._duration(step)
        self._commit.commit(others, result)
        right = self._verify(step, guessed, of_guessed, logits) if guessed else 0
        alone = step.begun_at >= before  # no other step ran while it was planned
        delay = self._clock.now() - step.begun_at if alone else self._completed_at - before
        self._time(step, rows, right, seconds, delay, alone=alone)

    def _verify(self, step: InFlightStep, guessed: list[PlannedRows], result: StepResult, logits: Logits) -> int:
        """Commits rows that rows of guesses follow, and returns how many of these were right."""
        assert self._guesser is not None, "the step has guesses"
        right = self._commit.verify(guessed, result, lambda some: self._read(step, some, logits))
        for rows in guessed:
            count = right[rows.request.number]
            self._guesser.learn(rows, count)
            self._planner.charge(rows.request, count)
        return sum(right.values())

    def _duration(self, step: InFlightStep) -> float:
        """Returns the seconds of a step that has completed just now."""
        now = self._clock.now()
        seconds = now - max(step.launched_at, self._completed_at)
        self._completed_at = now
        return seconds

    def _time(self, step: InFlightStep, rows: int, right: int, seconds: float, delay: float, *, alone: bool) -> None:
        """Counts steps that consist of prompts, and those that only decode; others say little of either.

        rows: of the step, guesses included. right: guesses that were. delay: of the next step, by this one. alone: no
        other step ran while it was planned.
        """
        sequences, pages = len(step.plan.planned), self.kv.pages
        if rows - step.plan.guess_rows == sequences:
            self._counters.decode_step_rows += sequences + right
            self._counters.decode_step_seconds += seconds
            if self._guesser is not None:
                self._guesser.decoded(step.plan, rows, delay, alone=alone)
        elif rows >= _ROWS_OF_PROMPT * sequences:
            self._counters.prompt_step_rows += rows
            self._counters.prompt_step_seconds += seconds
            if pages is not None and pages.measures:
                pages.loads.rates.computed(rows, seconds)

    def _wait(self, step: InFlightStep) -> Logits:
        trace = self._trace
        if trace is not None:
            trace.enter(HostPhase.WAIT)
        started = self._clock.now()
        logits = step.pending.result()
        self._counters.forward_seconds += self._clock.now() - started
        if trace is not None:
            masks = self._counters.mask_seconds
            trace.completed(step.plan, step.pending, step.launched_at, masks, len(step.asked.late))
            trace.enter(HostPhase.COMMIT)
        self._counters.picked_rows += int((logits.places < 0).sum())
        return logits

    def _read(self, step: InFlightStep, going: Sequence[PlannedRows], logits: Logits) -> StepResult:
        """Reads the results of the requests that have not ended since the step was launched."""
        started = self._clock.now()
        errors = dict(step.asked.errors)
        for rows in going:
            try:
                self._faults("engine.sample")
            except Exception as error:
                errors[rows.request.number] = error
        result = read_step_result(logits, going, step.asked.row_requests, self._sampler, errors)
        self._counters.sample_seconds += self._clock.now() - started
        return result

    # ------------------------------------------------------------------------------------------ failures

    def _fail(self, step: InFlightStep, error: Exception) -> None:
        """Forgets all keys: those of this step may be wrong or missing, and the tree already holds them.

        Requests in the batch end with the cause; the other running requests wait again with all their tokens. Where
        memory was short, those in the batch do so, too, and the next steps have fewer rows.
        """
        while self._in_flight:
            self._in_flight.popleft().drop()  # it has read those keys
        again = isinstance(error, ShortOfMemory) and self._planner.shrink(step.plan.row_count)
        self._counters.memory_shortages += again
        self._counters.failed_steps += not again
        self._forget_keys()
        self._runner.clear()
        if again:
            return
        for rows in step.plan.planned:
            if rows.request.phase is not Phase.ENDED:
                self._table.fail(rows.request, error)

    def _forget_keys(self) -> None:
        """Empties pool and tree; running requests wait again and recompute their tokens."""
        self._counters.pool_rebuilds += 1
        self.kv.clear()
        self._table.retract_all()
