"""Plans a step: chooses the requests that run, their rows and their slots.

Decode rows come first, then prompts in prefill, then waiting requests in the policy's order. A request that fails here,
by a fault or by its own data, ends alone.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Literal

from ..cache.slot_allocator import Slots
from .commit import Commit
from .constrained import ConstrainedTexts
from .guesses import Guesser
from .policy import AdmissionPolicy, Order
from .request import NO_SOURCE, Generation, Phase, Prefilling, Request
from .request_table import SchedulerContext
from .step import StepPlan
from .trace import HostPhase, StepTrace

_rank = attrgetter("rank")
_log = logging.getLogger("umbel.engine")
_SHORTAGES = 16  # in a row, after which a step fails: each halves the rows
_UNTIL_MORE = 64  # steps that had memory, after which the next ones may have twice as many rows
_WHOLE_STEP = 1 << 16  # rows; more are no limit where prompts are computed whole
_ADMITTING = 0.0015  # seconds of a step that overlaps in which requests are admitted
_ORDER_LASTS = 0.1  # seconds: requests age, and prefixes are evicted
_PATIENCE = 16  # steps after which admission is tried again though the queue head did not fit and no request has ended


class Planner:
    """Makes the StepPlan of each step."""

    def __init__(
        self,
        context: SchedulerContext,
        constrained: ConstrainedTexts,
        commit: Commit,
        guesser: Guesser | None,
        trace: StepTrace | None = None,
    ) -> None:
        self.current = StepPlan(None, 0)  # being made, or running
        self._config = context.config
        self._kv = context.kv
        self._table = context.table
        self._clock = context.clock
        self._faults = context.faults
        self._constrained = constrained
        self._commit = commit
        self._guesser = guesser
        self._trace = trace
        self._step_running = False  # a step is running
        self._leaving = 0  # requests that certainly end with that step
        self._most_rows: int | None = None  # of a step, while memory is short
        self._shortages = self._steps_since = 0  # steps without memory in a row; steps with some since the last one
        self.short = False  # the last plan left rows out for lack of slots that the running step may free
        self._policy = AdmissionPolicy(context.config, context.kv.peek, context.counters)
        self._held = 0  # steps to skip admission for: the queue head did not fit and nothing was freed
        self._held_at = 0  # state of the table then
        self._order: Order | None = None  # in which the rest of many waiting requests is admitted
        self._ordered: set[int] = set()  # numbers of the requests that it has
        self._order_made = 0.0  # on the clock

    def plan(self, *, step_running: bool = False) -> StepPlan:
        """Plans the next step. step_running: one is running, and `computed` of its requests counts its rows.

        Then no request is retracted: those that end with the running step may free the missing slots.
        """
        self._step_running, self.short = step_running, False
        running = list(self._table.running.values())
        self._leaving = 0
        if step_running:
            several, running = len(running), [request for request in running if request.wants_rows]
            if len(running) < several:
                paused = [request for request in self._table.running.values() if not request.wants_rows]
                self._leaving = sum(not request.goes_on for request in paused)
        running.sort(key=_rank)
        self._kv.begin_step()
        most = self._most_rows
        logits = self._config.max_step_logits if most is None else min(self._config.max_step_logits, most)
        plan = self.current = StepPlan(None, logits, self._config.whole_texts)
        self._plan_next_rows(running, most)
        if most is not None and len(plan.planned) >= most:
            return plan
        decoding = len(plan.planned)
        limits = [limit for limit in (self._config.max_step_tokens, most) if limit is not None]
        if limits:
            plan.rows_left = max(1, min(limits) - decoding)
        if decoding < len(running):
            if self._trace is not None:
                self._trace.enter(HostPhase.PREFILL)
            planned = {rows.request.number for rows in plan.planned}
            rest = [request for request in running if request.number not in planned]
            rest.sort(key=lambda request: not request.continuing)  # a few forced tokens do not wait for long prompts
            for request in rest:
                if request.phase is Phase.RUNNING and not request.decoding and not plan.full:
                    self._plan_rows(request)
        if self._table.waiting and not plan.full and self._may_admit and not self._still_held:
            if self._trace is not None:
                self._trace.enter(HostPhase.ADMIT)
            self._admit(plan)
        if self._guesser is not None:
            if self._trace is not None:
                self._trace.enter(HostPhase.PLAN)
            self._guesser.extend(plan)
        return plan

    def shrink(self, rows: int) -> bool:
        """Halves the rows of the next steps: one of `rows` had no memory. False: it was tried often, or had one."""
        self._shortages += 1
        if rows < 2 or self._shortages > _SHORTAGES:
            return False
        self._most_rows, self._steps_since = rows // 2, 0
        _log.warning("there is no memory for a step of %d rows: the next ones have %d at most", rows, rows // 2)
        return True

    def relax(self) -> None:
        """Notes that a step had memory, and after many of them lets steps have more rows again."""
        self._shortages, most = 0, self._most_rows
        if most is None:
            return
        self._steps_since += 1
        if self._steps_since >= _UNTIL_MORE:
            largest = max(self._config.max_step_tokens or _WHOLE_STEP, self._config.max_step_logits)
            self._most_rows, self._steps_since = (2 * most if 2 * most < largest else None), 0

    def charge(self, request: Request, rows: int) -> None:
        """Counts rows of right guesses as used by the request's program."""
        self._policy.usage.add(request, rows)

    @property
    def _may_admit(self) -> bool:
        return len(self._table.running) - self._leaving < self._config.max_running

    @property
    def _still_held(self) -> bool:
        """Returns whether admission is skipped: the queue head did not fit, and no request has ended since."""
        self._held -= 1
        return self._held > 0 and self._held_at == self._table.changes

    # ------------------------------------------------------------------------------------------- waiting

    def _admit(self, plan: StepPlan) -> None:
        """Admits waiting requests while limits and slots allow; the first that does not fit blocks the rest.

        One that does not fit into the share of its salt blocks those of its salt only. Where steps overlap, the rest of
        many waits for the next step, so that the device does not wait for all of them.
        """
        order, sliced = self._order_of_waiting(), self._config.overlap
        until = self._clock.now() + _ADMITTING
        promised = self._promised(self._table.running.values())
        blocked: set[str] = set()  # salts
        stuck = False  # none of those that wait fits
        while not plan.full and self._may_admit:
            if sliced and plan.planned and not blocked and self._clock.now() > until:
                self._order = order  # of the rest
                return
            request = order.next()
            if request is None:
                stuck = bool(blocked)
                break
            if request.phase is not Phase.WAITING or request.schedule.salt in blocked:
                continue  # the former ended with its message while this step was planned
            self._kv.open(request)
            if self._not_worth_it(request):
                self._table.drop(request)
            elif (full := self._no_room(request, promised)) is None:
                self._table.admit(request)
                if self._kv.load(request):
                    self._table.wait_for_load(request)
                else:
                    self._plan_rows(request)
                if request.match is not None:  # it has not failed, and was not done at once
                    order.admitted(request)
                    promised += self._kv.missing(request, request.length) + self._config.headroom
            elif isinstance(request.job, Prefilling):
                self._table.drop(request)  # a hint does not hold up other requests
            else:
                self._kv.close(request)
                blocked.add(request.schedule.salt)
                if full == "pool":
                    stuck = True
                    break
        if stuck and all(rows.request.decoding for rows in plan.planned):
            self._held, self._held_at = _PATIENCE, self._table.changes

    def _order_of_waiting(self) -> Order:
        """Returns the order that the last step left with what has come since, or a new one."""
        waiting, order, now = self._table.waiting, self._order, self._clock.now()
        if order is not None and now - self._order_made > _ORDER_LASTS:
            order = None
        if order is not None:
            arrived = [request for number, request in waiting.items() if number not in self._ordered]
            if arrived and not order.extend(arrived):
                order = None
        self._order, self._ordered = None, set(waiting)
        if order is None:
            order, self._order_made = self._policy.order(list(waiting.values()), now), now
        return order

    def _not_worth_it(self, request: Request) -> bool:
        """Returns whether a hint misses so few tokens that prefilling them would cost more than it saves.

        The branches that arrive shortly after compute them anyway.
        """
        job = request.job
        if not isinstance(job, Prefilling) or job.pin is not None:
            return False
        return request.length - self._kv.reusable(request) < self._config.least_ahead

    def _no_room(self, request: Request, promised: int) -> Literal["pool", "share"] | None:
        """Returns what is too full for an opened request: the pool, or the share of its salt. None: it fits.

        One that fits has the slot of its recurrent state from then on, where the model has one.

        Pins keep their slots while running requests will free enough others. They give way when no request runs, or
        when the request has waited too long: of a salt that is at its share, those of its own.
        """
        missing = self._kv.missing(request, request.length)
        hint = isinstance(request.job, Prefilling)
        aged = request.arrival <= self._clock.now() - self._config.max_wait
        if self._kv.limited:
            salt = request.schedule.salt
            siblings = [other for other in self._table.running.values() if other.schedule.salt == salt]
            needed = self._promised(siblings) + missing
            while (full := self._kv.narrow(request, needed)) is not None:
                if hint or (siblings and not aged) or not self._kv.pins.give_way(full):
                    return "share"
        needed = promised + missing
        while needed > self._kv.available:
            if hint or (self._table.running and not aged) or not self._kv.pins.give_way():
                return "pool"
        return None if self._kv.window_fits(request) and self._kv.begin_state(request) else "pool"

    def _promised(self, running: Collection[Request]) -> int:
        """Returns the slots that running requests still need, plus the headroom of each.

        A request is admitted only if its whole sequence fits in addition to these; alone it always fits.
        """
        missing = sum(self._kv.missing(other, other.length) for other in running)
        return missing + self._config.headroom * len(running)

    # ------------------------------------------------------------------------------------------- running

    @property
    def _others(self) -> Iterator[Request]:
        """The requests whose prompts are not computed yet: those in prefill, and the first that wait."""
        yield from (request for request in self._table.running.values() if not request.decoding)
        yield from islice(self._table.waiting.values(), self._config.policy_window)

    def _plan_next_rows(self, running: Sequence[Request], most: int | None) -> None:
        """Plans the rows of those that decode, in their order. most: rows of the step; None: they have no limit.

        Hundreds may, and most of them are plain rows with a spare slot: these are planned here, in a third of the time.
        """
        plan, faults, usage, stateless = self.current, self._faults, self._policy.usage, self._kv.states is None
        plain: list[Request] = []
        is_running = Phase.RUNNING
        for request in running:
            row = request.computed
            if request.length - row != 1 or row < request.prompt_length or request.phase is not is_running:
                continue
            needs = request.job.needs if isinstance(request.job, Generation) else None
            if needs is None or not (needs.plain and stateless and request.slot_end > request.kv_length):
                plan.add_next(plain, plain=True)
                plain = []
                self._plan_next_row(request)
            else:
                try:
                    faults("engine.plan")
                except Exception as error:
                    self._table.fail(request, error)
                    continue
                request.kv_length += 1
                if request.schedule.program_id:
                    usage.add(request, 1)
                plain.append(request)
            if most is not None and len(plan.planned) + len(plain) == most:
                break
        plan.add_next(plain, plain=True)

    def _plan_next_row(self, request: Request) -> None:
        """Plans the row of a decoding request, whose slot is usually a spare one."""
        needs = request.job.needs if isinstance(request.job, Generation) else None
        plain = needs is not None and needs.plain
        masked = not plain and request.constrained and request.source == NO_SOURCE  # else its mask comes later
        if masked and not (self._constrained.ready(request) and request.decoding):
            return
        try:
            spare = request.slot_end > request.kv_length or self._kv.take_ahead(request)
            if spare:
                self._faults("engine.plan")
        except Exception as error:
            self._table.fail(request, error)
            return
        if not spare:
            self._plan_rows(request)
            return
        request.kv_length += 1
        self._policy.usage.add(request, 1)
        states = () if self._kv.states is None else self._kv.run_state(request, request.kv_length)
        self.current.add_next([request], states, plain=plain)

    def _plan_rows(self, request: Request) -> None:
        """Puts as many of the request's next rows into the step as fit."""
        try:
            claim = self._claim(request)
        except Exception as error:
            self._table.fail(request, error)
            return
        if claim is None:
            return
        # A failure from here on concerns more than one request: the tree would have keys that are never computed.
        end, slots = claim
        known = request.kv_length
        first_write = self._kv.place(request, end, slots)
        self._policy.usage.add(request, end - request.computed)
        self.current.add(request, end, known, first_write, self._kv.run_state(request, end, known, self._others))

    def _claim(self, request: Request) -> tuple[int, Slots] | None:
        """Returns the exclusive end of the request's rows in this step, and slots for those that need one.

        None: nothing is left to run, or there is no room now.
        """
        self._faults("engine.plan")
        waits = request.source == NO_SOURCE and request.constrained and not self._constrained.ready(request)
        if request.phase is not Phase.RUNNING:
            return None
        last = request.length - waits  # the row that chooses waits for its mask
        self._kv.advance(request)
        self._kv.skip_cached_rows(request)
        if not request.remaining_rows:
            self._commit.finish(request)
            return None
        if request.decoding:
            end = min(request.computed + 1, last)
        else:
            end = self.current.reachable(request, last, self._kv.most_rows(request))
            if end > request.computed:
                end = self._kv.rows_that_fit(request, end)
        if end <= request.computed or not self._ensure_room(request, end):
            return None
        count = self._kv.missing(request, end)
        if request.decoding and count:
            count = self._kv.run_length(request)
            self._kv.make_room(request, end, count)
        return end, self._kv.allocate(request, count)

    def _ensure_room(self, request: Request, end: int) -> bool:
        """Makes room for rows up to `end`, if needed by retracting requests of lower rank; False: not in this step.

        The request of the highest rank may take all slots, so some row runs in every step. Where its salt is at its
        share, only requests and pins of that salt make room.
        """
        count = self._kv.missing(request, end)
        while not self._kv.make_room(request, end, count):
            full = self._kv.narrow(request, count)
            salt = request.schedule.salt
            rivals = [other for other in self._table.running.values() if full is None or other.schedule.salt == salt]
            if self._kv.take_back_spare(rivals):
                continue
            if self._step_running:
                self.short = True
                return False
            if not self._kv.has_slots(request, count) and self._kv.pins.give_way(full):
                continue
            planned = {rows.request.number for rows in self.current.planned}
            candidates = [other for other in rivals if other.number not in planned]
            victim = max(candidates, key=_rank)
            if victim is request and not request.decoding:
                return False  # it keeps what it has computed, and goes on when there is room
            self._table.retract(victim)
            if victim is request:
                return False
        return True
