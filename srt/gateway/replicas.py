"""The engines of one gateway, its replicas: what is known of each, and which of them gets a call.

    call ── place ──▶ an engine that is ready, with the reason; the same until the call ends or its engine is lost

The gateway's answers to questions about "the engine" are sums over all of them: it is ready when one is.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from ...lang.status import EngineState, ReplicaStatus, RisingCounters
from ..core.instruments import Clock
from ..core.messages import Heartbeat, Schedule, ToEngine

LATE = 1.0  # seconds of silence, in which two heartbeats are due: such an engine gets no call while another can have it


class Replica:
    """Keeps what is known of one engine.

    Args:
        index: its number among the engines.
        send: carries a message to it.
    """

    def __init__(self, index: int, send: Callable[[ToEngine], None], clock: Clock) -> None:
        self.index = index
        self.send = send
        self._clock = clock
        self.state = EngineState.STARTING
        self.cause = ""  # why it cannot be started
        self.generation = 0  # engines in this place that have become ready
        self.losses = 0
        self.heartbeat: Heartbeat | None = None  # the last one of the engine that runs
        self._heard = 0.0  # on the clock, when that came, or the engine became ready
        self._counters = RisingCounters()

    @property
    def is_ready(self) -> bool:
        return self.state is EngineState.READY

    @property
    def heartbeat_age(self) -> float | None:
        """Seconds since its last heartbeat; None while it is not ready."""
        return self._clock.now() - self._heard if self.is_ready else None

    @property
    def is_late(self) -> bool:
        """Whether heartbeats are missing: it is stopped or hangs, or waits long for a core."""
        return self.heartbeat is not None and (self.heartbeat_age or 0.0) > LATE

    @property
    def counters(self) -> dict[str, float]:
        """Returns the counters of all engines that were in this place."""
        return self._counters.sums

    def ready(self) -> None:
        self.state = EngineState.READY
        self.generation += 1
        self._heard = self._clock.now()

    def note(self, heartbeat: Heartbeat) -> None:
        self.heartbeat, self._heard = heartbeat, self._clock.now()
        self._counters.note(self.losses, heartbeat.counters)

    def lost(self) -> None:
        self.state, self.heartbeat = EngineState.STARTING, None
        self.losses += 1

    def given_up(self, cause: str) -> None:
        self.state, self.cause = EngineState.FAILED, cause

    def status(self, in_flight: int) -> ReplicaStatus:
        beat = self.heartbeat or Heartbeat(0, 0, 0)
        return ReplicaStatus(
            engine=self.state,
            cause=self.cause,
            generation=self.generation,
            heartbeat_age=self.heartbeat_age,
            in_flight=in_flight,
            running=beat.running,
            waiting=beat.waiting,
            pool=beat.pool,
            counters=self.counters,
        )


class Replicas:
    """All engines of a gateway.

    Args:
        to_engines: for each engine what carries a message to it.
    """

    def __init__(self, to_engines: Sequence[Callable[[ToEngine], None]], clock: Clock) -> None:
        self.all = tuple(Replica(index, send, clock) for index, send in enumerate(to_engines))
        self._groups: dict[str, int] = {}
        self._turn = 0

    def __getitem__(self, index: int) -> Replica:
        return self.all[index]

    def __len__(self) -> int:
        return len(self.all)

    # ------------------------------------------------------------------ all of them as one

    @property
    def ready(self) -> list[int]:
        return [replica.index for replica in self.all if replica.is_ready]

    @property
    def state(self) -> EngineState:
        """Ready when one is; failed when all are."""
        states = {replica.state for replica in self.all}
        if EngineState.READY in states:
            return EngineState.READY
        return EngineState.STARTING if EngineState.STARTING in states else EngineState.FAILED

    @property
    def states(self) -> tuple[EngineState, ...]:
        """Returns the state of each of several; () where there is one."""
        return tuple(replica.state for replica in self.all) if len(self.all) > 1 else ()

    @property
    def cause(self) -> str:
        """Returns why they cannot be started; "" unless that is so for all of them."""
        return self.all[0].cause if self.state is EngineState.FAILED else ""

    @property
    def heartbeat_age(self) -> float | None:
        """Seconds since the last heartbeat of any; None while none is ready."""
        return min((age for replica in self.all if (age := replica.heartbeat_age) is not None), default=None)

    @property
    def heartbeats(self) -> list[Heartbeat]:
        """Returns the last heartbeats of the engines that run."""
        return [replica.heartbeat for replica in self.all if replica.heartbeat is not None]

    @property
    def counters(self) -> dict[str, float]:
        """Returns the counters of all engines together, those of lost ones among them."""
        return summed(replica.counters for replica in self.all)

    # ------------------------------------------------------------------ which of them gets a call

    def place(self, schedule: Schedule, home: int | None) -> tuple[int, str]:
        """Chooses an engine → its number, and why in words ("" where there is one). One must be ready.

        Args:
            home: the engine that the call has to go to if it is ready; None: any.
        """
        if len(self.all) == 1:
            return 0, ""
        ready = self.ready
        if home in ready:
            return home, "a prefix that is kept for it lies there"
        calm = [index for index in ready if not self.all[index].is_late] or ready
        group = schedule.fork_group or schedule.program_id
        if group and self._groups.get(group) in calm:
            return self._groups[group], "its group is there"
        self._turn += 1
        chosen = calm[self._turn % len(calm)]
        if group:
            self._groups[group] = chosen
        return chosen, "in turn"


def summed(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Adds up counters by their names."""
    total: Counter[str] = Counter()
    for counters in parts:
        total.update(counters)
    return dict(total)
