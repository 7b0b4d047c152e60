"""The plan of a step: who runs, which rows, in which slots.

Decode rows come first, then prompts that are being computed, then waiting requests in the policy's order. A request
that fails here, by a fault or by its own data, ends alone.
"""

from collections.abc import Callable

from .clock import Clock
from .faults import FaultHook
from .kv_space import KVSpace
from .memory import Slots
from .policy import arrange
from .request import Phase, Prefilling, Request
from .roster import Roster
from .scheduler_config import SchedulerConfig
from .step_plan import StepPlan


class Planner:
    """Makes one StepPlan after the other.

    Args:
        finish: called for a request that needs no row, because everything it asked for was in the tree.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        space: KVSpace,
        roster: Roster,
        clock: Clock,
        faults: FaultHook,
        finish: Callable[[Request], None],
    ) -> None:
        self.current = StepPlan(None, 0)  # being made, or running
        self._config = config
        self._space = space
        self._roster = roster
        self._clock = clock
        self._faults = faults
        self._finish = finish

    def plan(self) -> StepPlan:
        self._space.begin_step()
        plan = self.current = StepPlan(None, self._config.max_step_logits)
        running = sorted(self._roster.running.values(), key=lambda request: request.rank)
        for request in running:
            if request.phase is Phase.RUNNING and request.decoding:
                self._plan_rows(request)
        if self._config.max_step_tokens is not None:
            plan.rows_left = max(1, self._config.max_step_tokens - len(plan.planned))
        for request in running:
            if request.phase is Phase.RUNNING and not request.decoding and not plan.full:
                self._plan_rows(request)
        if not plan.full and self._roster.waiting and self._may_admit:
            self._admit(plan)
        return plan

    @property
    def _may_admit(self) -> bool:
        return len(self._roster.running) < self._config.max_running

    # ------------------------------------------------------------------------------------------- waiting

    def _admit(self, plan: StepPlan) -> None:
        """Takes waiting requests while limits and memory allow; the first that does not fit stops the rest."""
        order = arrange(
            self._config.policy,
            list(self._roster.waiting.values()),
            self._space.peek,
            now=self._clock.now(),
            max_wait=self._config.max_wait,
            window=self._config.policy_window,
        )
        while not plan.full and self._may_admit:
            request = order.next()
            if request is None:
                return
            if request.phase is not Phase.WAITING:
                continue  # it ended with its message while this step was planned
            self._space.open(request)
            if self._fits(request):
                self._roster.admit(request)
                self._plan_rows(request)
                if request.match is not None:  # it has not failed, and was not done at once
                    order.admitted(request)
            elif isinstance(request.job, Prefilling):
                self._roster.drop(request)  # a hint does not hold up anybody
            else:
                self._space.close(request)
                return

    def _fits(self, request: Request) -> bool:
        """Its whole sequence has room beside what the running ones still need; alone it always fits."""
        need = self._space.missing(request, request.length)
        for other in self._roster.running.values():
            need += self._space.missing(other, other.length) + self._config.headroom
        return need <= self._space.available

    # ------------------------------------------------------------------------------------------- running

    def _plan_rows(self, request: Request) -> None:
        """Puts as many of the request's next rows into the step as fit."""
        try:
            claim = self._claim(request)
        except Exception as error:
            self._roster.fail(request, error)
            return
        if claim is None:
            return
        # From here on a failure is not one request's any more: the tree would know keys that are never computed.
        end, slots = claim
        known = request.kv_length
        self._space.place(request, slots)
        self.current.add(request, end, known)

    def _claim(self, request: Request) -> tuple[int, Slots] | None:
        """(the row before which this step stops for the request, slots for those rows that need one).

        None: nothing is left to run, or there is no room now.
        """
        self._faults("engine.plan")
        self._space.advance(request)
        self._space.skip_cached_rows(request)
        if not request.remaining_rows:
            self._finish(request)
            return None
        end = request.computed + 1 if request.decoding else self.current.reachable(request)
        if not self._ensure_room(request, end):
            return None
        return end, self._space.allocate(self._space.missing(request, end))

    def _ensure_room(self, request: Request, end: int) -> bool:
        """Room for rows up to `end`, retracting requests of lower rank; False: not in this step.

        The request of the highest rank gets everything if it must, so some row runs in every step.
        """
        count = self._space.missing(request, end)
        while not self._space.make_room(count):
            planned = {rows.request.number for rows in self.current.planned}
            candidates = [other for other in self._roster.running.values() if other.number not in planned]
            victim = max(candidates, key=lambda other: other.rank)
            if victim is request and not request.decoding:
                return False  # it keeps what it has computed, and goes on when there is room
            self._roster.retract(victim)
            if victim is request:
                return False
        return True
