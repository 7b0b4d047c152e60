"""The engine's step: plan → forward → sample → commit. No sockets, no threads, no clock of its own.

Requests share one pool of KV slots through a radix tree. Tokens enter the tree when their slots are assigned, before
they are computed: every layer stores its keys before it attends, so a request planned later in the same step reads
what an earlier one is about to write, and a fork of eight costs its shared prefix once without waiting.

    waiting ──admit──▶ running ──end──▶ answered         one failing request ends alone;
       ▲                  │                              a failing forward pass ends its batch, empties the tree
       └────retract───────┘                              and lets everybody else compute again
"""

from collections.abc import Callable
from typing import assert_never

import numpy as np
import torch
from numpy.typing import NDArray

from ..lang.errors import DeadlineError, EngineError, ParameterError, RequestError, UmbelError
from ..lang.protocol import Facts, FinishReason
from .batch import Runner
from .clock import Clock
from .counters import Counters
from .engine_protocol import (
    ControlEnded,
    Ended,
    EngineAbort,
    EngineControl,
    EngineFailed,
    EngineGenerate,
    EnginePrefill,
    EngineScore,
    FromEngine,
    IdLogprob,
    ScoreEnded,
    ToEngine,
    Tokens,
)
from .faults import FaultHook, no_faults
from .intake import Intake
from .kv_space import KVSpace
from .logprobs import Wanted, describe
from .memory import IntegrityError, Slots
from .policy import arrange
from .request import Generation, Phase, Prefilling, Request, Scoring
from .sampler import Draw, Sampler
from .scheduler_config import PolicyName, SchedulerConfig
from .step_plan import PlannedRows, StepPlan
from .stopping import Stop, accept

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
    """

    def __init__(
        self,
        runner: Runner,
        vocabulary_bytes: Callable[[int], bytes],
        eos_ids: frozenset[int],
        config: SchedulerConfig,
        clock: Clock,
        faults: FaultHook = no_faults,
    ) -> None:
        self.config = config
        self.last_failure: Exception | None = None  # for the log of whoever owns the scheduler
        self._runner = runner
        self._token_bytes = vocabulary_bytes
        self._clock = clock
        self._faults = faults
        self._counters = Counters()
        self._space = KVSpace(runner.num_slots, config, self._counters, clock, faults)
        self._intake = Intake(
            vocab_size=runner.vocab_size,
            context_length=runner.context_length,
            pool_size=self._space.pool.total,
            eos_ids=eos_ids,
        )
        self._sampler = Sampler(runner.vocab_size)
        self._waiting: dict[int, Request] = {}  # by number: several sequences may share a message
        self._running: dict[int, Request] = {}
        self._by_message: dict[int, list[Request]] = {}  # not ended yet
        self._aborts: list[int] = []
        self._controls: list[EngineControl] = []
        self._plan_now = StepPlan(None, 0)
        self._events: list[FromEngine] = []
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
            case EngineGenerate() | EngineScore() | EnginePrefill():
                if message.id in self._by_message:
                    raise ParameterError(f"request id {message.id} is in use; give every request its own")
                self._accept(message)
            case _:
                assert_never(message)

    def step(self) -> list[FromEngine]:
        """Runs at most one forward pass. Empty when nothing happened; call again while not `idle`."""
        started = self._clock.now()
        self._answer_controls()
        self._end_aborted_and_expired()
        plan = self._plan()
        if plan.planned:
            self._run(plan)
        if self.config.check_every_step:
            self.check()
        elif not self._by_message and not self._verified:
            self._check_idle()
        self._verified = not self._by_message
        self._counters.step_seconds += self._clock.now() - started
        events, self._events = self._events, []
        return events

    @property
    def idle(self) -> bool:
        """Nothing to do: no request, no answer to fetch."""
        return not (self._by_message or self._aborts or self._controls or self._events)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def counters(self) -> dict[str, float]:
        self._counters.tree_seconds = self._space.tree_time.seconds
        return self._counters.as_dict()

    @property
    def space(self) -> KVSpace:
        """Pool and tree, to look at."""
        return self._space

    def planned_tokens(self) -> list[NDArray[np.int32]]:
        """During a forward pass: the true tokens of each sequence of the batch, for the oracle to compare."""
        return [rows.request.tokens[: rows.end] for rows in self._plan_now.planned]

    def check(self) -> None:
        """Pool, tree and requests agree.

        Raises:
            IntegrityError: what contradicts what.
        """
        self._space.check(list(self._running.values()))
        held = [request for request in self._waiting.values() if request.match is not None]
        if held:
            raise IntegrityError(f"{len(held)} waiting requests hold slots")
        alive = sum(map(len, self._by_message.values()))
        if alive != len(self._waiting) + len(self._running):
            raise IntegrityError(f"{alive} requests are alive, {self.waiting} wait and {self.running} run")

    # ------------------------------------------------------------------------------------------ arrivals

    def _accept(self, message: EngineGenerate | EngineScore | EnginePrefill) -> None:
        now = self._clock.now()
        try:
            match message:
                case EngineGenerate():
                    requests = [self._intake.generate(message, now)]
                case EngineScore():
                    requests = self._intake.score(message, now)
                case EnginePrefill():
                    requests = [self._intake.prefill(message, now)]
                case _:
                    assert_never(message)
        except RequestError as error:
            self._counters.refused += 1
            if isinstance(message, EnginePrefill):
                self._counters.dropped_hints += 1  # a hint is never answered
            else:
                self._events.append(_failure(message.id, error))
            return
        self._counters.requests += 1
        self._counters.hints += isinstance(message, EnginePrefill)
        self._by_message[message.id] = list(requests)
        self._waiting.update((request.number, request) for request in requests)

    def _answer_controls(self) -> None:
        controls, self._controls = self._controls, []
        for control in controls:
            match control.verb:
                case "flush_cache":
                    evicted = self._space.flush()
                    self._events.append(
                        ControlEnded(control.id, {"evicted": evicted, "kept": self._space.cache.total_tokens})
                    )
                case "info":
                    self._events.append(ControlEnded(control.id, self._info()))
                case _:
                    error = ParameterError(f'unknown verb {control.verb!r}; write "flush_cache" or "info"')
                    self._events.append(_failure(control.id, error))

    def _info(self) -> Facts:
        return {
            **self.counters,
            "running": self.running,
            "waiting": self.waiting,
            "free_slots": self._space.pool.free,
            "cached_slots": self._space.cache.total_tokens,
            "total_slots": self._space.pool.total,
            "longest": self._intake.longest,
        }

    def _end_aborted_and_expired(self) -> None:
        aborts, self._aborts = self._aborts, []
        for message_id in aborts:
            if message_id in self._by_message:  # else it has ended already, and was answered by that
                self._counters.aborted += 1
                self._end_message(message_id, self._aborted(self._by_message[message_id][0]))
        now = self._clock.now()
        expired = {
            request.message_id
            for requests in self._by_message.values()
            for request in requests
            if request.deadline is not None and now >= request.deadline
        }
        for message_id in sorted(expired):
            request = self._by_message[message_id][0]
            self._counters.expired += 1
            error = DeadlineError(
                f"the deadline of {request.schedule.timeout:g} s passed after {request.generated} tokens"
            )
            self._end_message(message_id, _failure(message_id, error))

    def _aborted(self, request: Request) -> FromEngine:
        match request.job:
            case Generation() as generation:
                return self._ended(request, Stop(FinishReason.ABORT, None, generation.text_bytes))
            case _:
                return EngineFailed(request.message_id, "CancelledError", "the request was aborted by its sender")

    # -------------------------------------------------------------------------------------------- plan

    def _plan(self) -> StepPlan:
        """Decode rows first, then prompts that are being computed, then waiting requests in the policy's order."""
        self._space.begin_step()
        plan = self._plan_now = StepPlan(None, self.config.max_step_logits)
        running = sorted(self._running.values(), key=lambda request: request.rank)
        for request in running:
            if request.phase is Phase.RUNNING and request.decoding:
                self._plan_rows(request)
        if self.config.max_step_tokens is not None:
            plan.rows_left = max(1, self.config.max_step_tokens - sum(r.end - r.start for r in plan.planned))
        for request in running:
            if request.phase is Phase.RUNNING and not request.decoding and not plan.full:
                self._plan_rows(request)
        self._admit(plan)
        return plan

    def _admit(self, plan: StepPlan) -> None:
        """Takes waiting requests while limits and memory allow; the first that does not fit stops the rest."""
        if plan.full or not self._waiting or len(self._running) >= self.config.max_running:
            return
        order = arrange(
            self.config.policy,
            list(self._waiting.values()),
            self._space.peek,
            now=self._clock.now(),
            max_wait=self.config.max_wait,
            window=self.config.policy_window,
        )
        while not plan.full and len(self._running) < self.config.max_running:
            request = order.next()
            if request is None:
                return
            if request.phase is not Phase.WAITING:
                continue  # it ended with its group while this step was planned
            self._space.open(request)
            if not self._fits(request):
                self._space.close(request)
                if not isinstance(request.job, Prefilling):
                    return
                self._drop(request)  # a hint does not hold up anybody
                continue
            if not request.admitted:
                request.admitted = True
                self._counters.prompt_tokens += request.prompt_length
            del self._waiting[request.number]
            self._running[request.number] = request
            request.phase = Phase.RUNNING
            self._plan_rows(request)
            if request.phase is Phase.RUNNING:
                order.admitted(request)

    def _fits(self, request: Request) -> bool:
        """Its whole sequence has room beside what the running ones still need; alone it always fits."""
        need = self._space.missing(request, request.length)
        for other in self._running.values():
            need += self._space.missing(other, other.length) + self.config.headroom
        return need <= self._space.available

    def _plan_rows(self, request: Request) -> None:
        """Puts as many of the request's next rows into the step as fit. Its own failure ends it alone."""
        try:
            slots = self._claim(request)
        except Exception as error:
            self._fail(request, error)
            return
        if slots is None:
            return
        # From here on a failure is not one request's any more: the tree would know keys that are never computed.
        end, new_slots = slots
        known = request.kv_length
        self._space.place(request, new_slots)
        self._plan_now.add(request, end, known)

    def _claim(self, request: Request) -> tuple[int, Slots] | None:
        """(the row before which this step stops for the request, slots for those that need one).

        None: nothing is left to run, or there is no room now.
        """
        self._faults("engine.plan")
        self._space.advance(request)
        self._space.skip_cached_rows(request)
        if not request.remaining_rows:
            self._finish(request, None)  # everything it asked for was in the tree
            return None
        end = request.computed + 1 if request.decoding else self._plan_now.reachable(request)
        if not self._ensure_room(request, end):
            return None
        return end, self._space.allocate(self._space.missing(request, end))

    def _ensure_room(self, request: Request, end: int) -> bool:
        """Room for rows up to `end`, retracting requests of lower rank; False: not in this step.

        The request of the highest rank gets everything if it must, so some row runs in every step.
        """
        count = self._space.missing(request, end)
        while not self._space.make_room(count):
            planned = {rows.request.number for rows in self._plan_now.planned}
            candidates = [other for other in self._running.values() if other.number not in planned]
            victim = max(candidates, key=lambda other: other.rank)
            if victim is request and not request.decoding:
                return False  # it keeps what it has computed, and goes on when there is room
            self._retract(victim)
            if victim is request:
                return False
        return True

    def _retract(self, request: Request) -> None:
        """Back to waiting with all its tokens. Its keys stay in the tree as long as nobody needs the room."""
        self._counters.retractions += 1
        self._space.close(request)
        del self._running[request.number]
        if isinstance(request.job, Prefilling):
            self._drop(request)
            return
        request.phase = Phase.WAITING
        self._waiting[request.number] = request

    def _drop(self, request: Request) -> None:
        """A hint that cannot be served now: costing time is worse than losing it."""
        self._counters.dropped_hints += 1
        self._end_message(request.message_id, None)

    # ------------------------------------------------------------------------- forward, sample, commit

    def _run(self, plan: StepPlan) -> None:
        try:
            batch = plan.build()
            started = self._clock.now()
            self._faults("engine.forward")
            logits = self._runner.forward(batch)
            assert isinstance(logits, torch.Tensor), "a runner returns a torch tensor"
            sampling = self._clock.now()
            self._faults("engine.sample")
            logprobs, tokens = self._sample(logits, plan)
            self._counters.forward_seconds += sampling - started
            self._counters.sample_seconds += self._clock.now() - sampling
        except Exception as error:
            self._fail_step(plan, error)
            return
        self._counters.steps += 1
        self._counters.forward_rows += batch.rows
        self._counters.logit_rows += plan.logit_rows
        self._commit(plan, logprobs, tokens)

    def _sample(
        self, logits: torch.Tensor, plan: StepPlan
    ) -> tuple[dict[int, list[IdLogprob]], dict[int, tuple[int, IdLogprob | None]]]:
        """(request → log-probabilities of known tokens, request → sampled token with its own).

        Log-probabilities of the model's distribution are taken before the sampler adjusts rows in place.
        """
        draws = [_draw(rows) for rows in plan.planned if rows.end == rows.request.length and rows.request.samples]
        owners = [rows for rows in plan.planned if rows.end == rows.request.length and rows.request.samples]
        wanted: list[Wanted] = []
        shares: list[tuple[int, int]] = []  # (request, number of known tokens)
        for rows in plan.planned:
            known = _known_tokens(rows)
            wanted.extend(known)
            shares.append((rows.request.number, len(known)))
        described = iter(describe(logits, wanted))
        known_logprobs = {number: [next(described) for _ in range(count)] for number, count in shares if count}
        # The sampled tokens are not known yet: keep what their log-probabilities need.
        asked = [i for i, rows in enumerate(owners) if _wants_logprobs(rows.request)]
        saved = logits[torch.tensor([draws[i].row for i in asked], device=logits.device)] if asked else logits[:0]
        tokens = self._sampler.sample(logits, draws)
        chosen = describe(saved, [Wanted(k, tokens[i], draws[i].sampling.top_logprobs) for k, i in enumerate(asked)])
        own = dict(zip(asked, chosen, strict=True))
        return known_logprobs, {
            rows.request.number: (token, own.get(i)) for i, (rows, token) in enumerate(zip(owners, tokens, strict=True))
        }

    def _commit(
        self,
        plan: StepPlan,
        logprobs: dict[int, list[IdLogprob]],
        tokens: dict[int, tuple[int, IdLogprob | None]],
    ) -> None:
        for rows in plan.planned:
            self._count_rows(rows)
        for rows in plan.planned:
            request = rows.request
            if request.phase is not Phase.RUNNING:
                continue  # its group failed in this commit
            try:
                self._faults("engine.commit")
                if request.generated == 0:
                    self._space.adopt(request, request.computed)
                self._commit_request(request, logprobs.get(request.number, []), tokens.get(request.number))
            except Exception as error:
                self._fail(request, error)

    def _count_rows(self, rows: PlannedRows) -> None:
        request, counters = rows.request, self._counters
        first_time = max(0, rows.end - max(rows.start, request.reached))
        of_prompt = max(0, min(rows.end, request.prompt_length) - max(rows.start, request.reached))
        counters.computed_prompt_tokens += of_prompt
        counters.recomputed_tokens += rows.end - rows.start - first_time
        counters.duplicate_rows += max(0, min(rows.known, rows.end) - rows.start)
        request.computed = rows.end
        request.reached = max(request.reached, rows.end)

    def _commit_request(
        self, request: Request, known: list[IdLogprob], sampled: tuple[int, IdLogprob | None] | None
    ) -> None:
        match request.job:
            case Generation() as generation:
                generation.prompt_logprobs.extend(known)
                if sampled is not None:
                    self._commit_token(request, generation, *sampled)
                elif not request.remaining_rows:
                    self._finish(request, Stop(FinishReason.LENGTH, None, 0))  # max_tokens=0
            case Scoring(logprobs=values):
                values.extend(entry.logprob for entry in known)
                if not request.remaining_rows:
                    self._finish(request, None)
            case Prefilling():
                if not request.remaining_rows:
                    self._finish(request, None)
            case _:
                assert_never(request.job)

    def _commit_token(self, request: Request, generation: Generation, token: int, logprob: IdLogprob | None) -> None:
        stop = accept(request, token, self._token_bytes, self._intake.longest)
        self._counters.completion_tokens += 1
        if logprob is not None:
            generation.logprobs.append(logprob)
        if stop is not None:
            self._finish(request, stop)
        elif generation.stream:
            unsent = generation.logprobs[generation.sent :]
            self._events.append(Tokens(request.message_id, request.generated_ids[generation.sent :], unsent))
            generation.sent = request.generated

    # --------------------------------------------------------------------------------------------- ends

    def _finish(self, request: Request, stop: Stop | None) -> None:
        """The request has all it asked for. A score ends with the last of its sequences."""
        match request.job:
            case Generation():
                self._counters.finished += 1
                ending: FromEngine | None = self._ended(request, stop or Stop(FinishReason.LENGTH, None, 0))
            case Scoring(group=group):
                self._release(request)
                if self._by_message[request.message_id]:
                    return
                self._counters.finished += 1
                members = group.members
                ending = ScoreEnded(
                    request.message_id,
                    [member.job.logprobs for member in members if isinstance(member.job, Scoring)],
                    sum(member.prompt_length for member in members),
                    sum(member.cached_tokens for member in members),
                )
            case Prefilling():
                ending = None
            case _:
                assert_never(request.job)
        self._end_message(request.message_id, ending)

    def _ended(self, request: Request, stop: Stop) -> Ended:
        generation = request.job
        assert isinstance(generation, Generation)
        return Ended(
            id=request.message_id,
            token_ids=request.generated_ids[generation.sent :],
            finish_reason=stop.reason,
            matched_stop=stop.matched,
            text_bytes=stop.text_bytes,
            prompt_tokens=request.prompt_length,
            cached_tokens=request.cached_tokens,
            completion_tokens=request.generated,
            logprobs=generation.logprobs[generation.sent :],
            prompt_logprobs=generation.prompt_logprobs,
        )

    def _fail(self, request: Request, error: Exception) -> None:
        """Ends the request's message, all its sequences, with the cause."""
        self.last_failure = error
        self._counters.failed += 1
        self._end_message(request.message_id, _failure(request.message_id, error))

    def _end_message(self, message_id: int, ending: FromEngine | None) -> None:
        """The one place where a message ends: what it holds is given back, then it is answered (hints never are)."""
        alive = self._by_message[message_id]
        hint = any(isinstance(request.job, Prefilling) for request in alive)
        for request in list(alive):
            self._release(request)
        del self._by_message[message_id]
        if ending is not None and not hint:
            self._events.append(ending)

    def _release(self, request: Request) -> None:
        self._space.close(request)
        self._waiting.pop(request.number, None)
        self._running.pop(request.number, None)
        self._by_message[request.message_id].remove(request)
        request.phase = Phase.ENDED

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        """Keys of this step may be wrong or missing, and the tree holds them already: everything is forgotten.

        Those in the batch end with the cause; the other running requests wait again with all their tokens.
        """
        self._counters.failed_steps += 1
        self._forget_keys()
        self._runner.clear()
        for rows in plan.planned:
            if rows.request.phase is not Phase.ENDED:
                self._fail(rows.request, error)

    def _forget_keys(self) -> None:
        """Pool and tree are emptied; whoever runs waits again and computes its tokens anew."""
        self._counters.pool_rebuilds += 1
        self._space.clear()
        for request in self._running.values():
            self._space.detach(request)
            request.phase = Phase.WAITING
        self._waiting.update(self._running)
        self._running.clear()

    def _check_idle(self) -> None:
        """In production a contradiction costs the cache, not the process: nobody runs, so all can be rebuilt."""
        try:
            self.check()
        except IntegrityError as error:
            self.last_failure = error
            self._counters.integrity_failures += 1
            self._forget_keys()


def _failure(message_id: int, error: Exception) -> EngineFailed:
    """Our own errors say what they say; of others only the kind leaves the engine, their text may hold anything."""
    if isinstance(error, UmbelError):
        return EngineFailed(message_id, type(error).__name__, str(error))
    return EngineFailed(message_id, EngineError.__name__, f"the engine's step failed with {type(error).__name__}")


def _draw(rows: PlannedRows) -> Draw:
    request = rows.request
    generation = request.job
    assert isinstance(generation, Generation)
    early = request.generated < generation.sampling.min_tokens
    return Draw(
        row=rows.first_index + rows.end - 1 - rows.first_logit,
        sampling=generation.sampling,
        seed=generation.seed,
        position=request.length,
        counts=generation.counts,
        prompt=request.tokens[: request.prompt_length],
        forbidden=generation.ends if early else frozenset(),
    )


def _known_tokens(rows: PlannedRows) -> list[Wanted]:
    """Rows that predict a token of the prompt or of a choice: row p − 1 gives the log-probability of token p."""
    request = rows.request
    top = request.job.sampling.top_logprobs if isinstance(request.job, Generation) else 0
    last = min(rows.last_logit, request.prompt_length - 1)
    tokens = request.tokens[rows.first_logit + 1 : last + 1].tolist() if rows.first_logit < last else []
    return [Wanted(rows.first_index + i, token, top) for i, token in enumerate(tokens)]


def _wants_logprobs(request: Request) -> bool:
    job = request.job
    return isinstance(job, Generation) and (job.sampling.logprobs or job.sampling.top_logprobs > 0)
