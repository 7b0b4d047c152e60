"""The engines of one gateway, its replicas: what is known of each, and which of them gets a call.

    call ── place ──▶ an engine that is ready, with the reason; the same until the call ends or its engine is lost
    CacheEvents ──▶ backlog ──▶ the copy of each engine's tree     read when the gateway is idle, or before a placement

The gateway's answers to questions about "the engine" are sums over all of them: it is ready when one is. Only at the
first start it waits for all of them, for some seconds: a batch that comes then is computed by all, not by the first.
Of a single engine no copy is kept, and nothing is placed.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...lang.protocol import PlaceKind
from ...lang.status import EngineState, ReplicaStatus, RisingCounters
from ..core.instruments import Clock
from ..core.messages import NO_TIERS, CacheEvent, EngineSnapshot, Heartbeat, Schedule, TierRooms, ToEngine

if TYPE_CHECKING:  # it needs numpy, which a gateway of one engine does not load
    from ..placement.placement import Placement

LATE = 1.0  # seconds of silence, in which two heartbeats are due: such an engine gets no call while another can have it

# Seconds after the first engine is ready for which the first start waits for the others. On two cores that other work
# kept busy two engines were ready 0.9 to 2.5 s apart. Where they are further apart than this, the first one computes.
GATHERING = 10.0


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
        self.measured = MeasuredRates()

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
        self.measured.lost()

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
            rates=self.measured.rates,
        )


class MeasuredRates:
    """Measures how many tokens a second an engine prefills, decodes and loads, from counters of its heartbeats.

    These count the seconds of steps and loads, so time in which it idles says nothing. A rate is a moving mean of
    samples; a sample has at least `least` tokens.
    """

    # Each rate: the counters of its tokens, that of its seconds, the tokens of a sample.
    kinds: Mapping[str, tuple[tuple[str, ...], str, int]] = {
        "prefill": (("prompt_step_rows",), "prompt_step_seconds", 256),
        "decode": (("decode_step_rows",), "decode_step_seconds", 64),
        "load": (("loaded_host_tokens", "loaded_disk_tokens", "loaded_shared_tokens"), "load_seconds", 256),
    }
    weight = 0.25  # of the latest sample

    def __init__(self) -> None:
        self._seconds_per_token: dict[str, float] = {}
        self._read: dict[str, tuple[float, float]] = {}  # tokens and seconds when the last sample was taken

    @property
    def rates(self) -> dict[str, float]:
        """Returns tokens a second, of those rates that were measured."""
        return {kind: 1 / seconds for kind, seconds in self._seconds_per_token.items()}

    def note(self, counters: Mapping[str, float]) -> bool:
        """Reads counters of the engine that runs; returns whether a rate has changed."""
        changed = False
        for kind, (names, seconds_name, least) in self.kinds.items():
            tokens, seconds = sum(counters.get(name, 0.0) for name in names), counters.get(seconds_name, 0.0)
            before, seconds_before = self._read.get(kind, (0.0, 0.0))
            if tokens - before < least or seconds <= seconds_before:
                continue
            self._read[kind] = tokens, seconds
            sample = (seconds - seconds_before) / (tokens - before)
            mean = self._seconds_per_token.get(kind, sample)
            self._seconds_per_token[kind] = mean + self.weight * (sample - mean)
            changed = True
        return changed

    def lost(self) -> None:
        """Says that the next counters are those of another engine, which begin at 0; the rates stay until it says."""
        self._read.clear()


MOST_CHANGES = 4096  # cache events that wait to be read
SNAPSHOT_AGAIN = 1.0  # seconds after which an engine is asked again for its whole tree
HINT_SECONDS = 10.0  # for which a hint counts as load at most: one that an engine has dropped never shows in its tree


class CallPlace(NamedTuple):
    """Says which engine gets a call.

    Attributes:
        reason: in words; "" where there is one engine.
        number: of the call, for `Replicas.began` and `ended`.
        cached: tokens of its prompt that the engine holds.
    """

    replica: int
    reason: str = ""
    number: int = 0
    kind: PlaceKind = PlaceKind.COLD
    cached: int = 0


class Replicas:
    """All engines of a gateway.

    Args:
        to_engines: for each engine what carries a message to it.
        policy: name of the placement policy.
        counters: receives the numbers of placements by their kind, "placed_…".
    """

    def __init__(
        self, to_engines: Sequence[Callable[[ToEngine], None]], clock: Clock, policy: str, counters: Counter[str]
    ) -> None:
        self.all = tuple(Replica(index, send, clock) for index, send in enumerate(to_engines))
        self._clock = clock
        self._counters = counters
        self._placement = _new_placement(policy) if len(self.all) > 1 else None
        self._changes: deque[tuple[int, list[CacheEvent]]] = deque()
        self._asked: dict[int, float] = {}  # when an engine was asked for its whole tree
        self._hints: dict[int, float] = {}  # number → when it counts no more, on the clock; in their order
        self._gathers = len(self.all) > 1  # the first start goes on
        self.gathered_by = float("inf")  # on the clock: it ends then at the latest

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
        """Ready when one is, and the first start is over; failed when all are."""
        states = {replica.state for replica in self.all}
        if EngineState.READY in states:
            return EngineState.STARTING if self._gathers else EngineState.READY
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

    # ------------------------------------------------------------------ their lives

    def became_ready(self, replica: int, tiers: TierRooms = NO_TIERS) -> None:
        self.all[replica].ready()
        if self._placement is not None:
            self._placement.up(replica)
            self._placement.tiers(replica, tiers)
        if self._gathers:
            self.gathered_by = min(self.gathered_by, self._clock.now() + GATHERING)
            self.gather()

    def gather(self) -> bool:
        """Ends the first start if all engines are ready or have failed, or its time is over; returns whether it did."""
        if not self._gathers or not self.ready:
            return False
        settled = all(replica.state is not EngineState.STARTING for replica in self.all)
        if settled or self._clock.now() >= self.gathered_by:
            self._gathers, self.gathered_by = False, float("inf")
        return not self._gathers

    def heard(self, replica: int, heartbeat: Heartbeat) -> None:
        self.all[replica].note(heartbeat)
        if self._placement is not None and heartbeat.pool.total:
            self._placement.room(replica, heartbeat.pool.total)
        if self._placement is not None and self.all[replica].measured.note(heartbeat.counters):
            self._set_rates(self._placement)

    def _set_rates(self, placement: "Placement") -> None:
        """Sets the rates of all engines: what one has not measured is the mean of the others.

        What none has measured keeps its proportion to the rate of prefilling. So engines are compared by figures of one
        kind, not by a measured one and a guess."""
        from ..placement.placement import DECODE_RATE, LOAD_RATE, PREFILL_RATE

        means: dict[str, float] = {}
        for kind, guess in (("prefill", PREFILL_RATE), ("decode", DECODE_RATE), ("load", LOAD_RATE)):
            known = [rates[kind] for replica in self.all if kind in (rates := replica.measured.rates)]
            guess *= means.get("prefill", PREFILL_RATE) / PREFILL_RATE
            means[kind] = sum(known) / len(known) if known else guess
        for replica in self.all:
            placement.rates(replica.index, **(means | replica.measured.rates))

    def lost(self, replica: int) -> None:
        self.all[replica].lost()
        if not self.ready:
            self.gathered_by = float("inf")  # the next one that is ready begins it anew
        if self._placement is not None:
            self._forget_changes(replica)
            self._placement.down(replica)

    def given_up(self, replica: int, cause: str) -> None:
        self.all[replica].given_up(cause)

    # ------------------------------------------------------------------ which of them gets a call

    def place(self, tokens: Sequence[int], schedule: Schedule, *, work: int = 0, home: int | None = None) -> CallPlace:
        """Chooses an engine. One must be ready.

        Args:
            tokens: of the prompt.
            work: tokens that it may generate.
            home: the engine that the call has to go to if it is ready; None: any.
        """
        if self._placement is None:
            return CallPlace(0)
        from ..placement.meta_tree import packed
        from ..placement.policies import Placing

        self.read_changes()
        now, ready = self._clock.now(), set(self.ready)
        late = {index for index in ready if self.all[index].is_late}
        exclude = ready - {home} if home in ready else late if late < ready else set()
        names = schedule.fork_group, schedule.program_id
        call = Placing(packed(tokens), schedule.salt, schedule.private, *names, work)
        placed = self._placement.place(call, now, exclude)
        assert placed is not None, "one is ready and not excluded"
        if home in ready:
            kind, reason = PlaceKind.KEPT, PlaceKind.KEPT.words
        else:
            kind = placed.kind
            coming = f", {placed.expected - placed.cached} more to come" if placed.expected > placed.cached else ""
            load = f", {placed.to_load} to be loaded from its tiers" if placed.to_load else ""
            reason = f"{placed.reason}; {placed.cached} of {call.length} tokens cached there{coming}{load}"
        self._counters[f"placed_{kind}"] += 1
        return CallPlace(placed.replica, reason, placed.number, kind, placed.cached)

    def place_hint(self, tokens: Sequence[int], schedule: Schedule) -> int:
        """Chooses an engine for a prefix that calls will share, which follow it. One must be ready."""
        place = self.place(tokens, schedule)
        if self._placement is not None:
            self._hints[place.number] = self._clock.now() + HINT_SECONDS
        return place.replica

    def began(self, place: CallPlace | None) -> None:
        """Says that the prompt of a call is computed; may be called again."""
        if self._placement is not None and place is not None:
            self._placement.began(place.number, self._clock.now())

    def ended(self, place: CallPlace | None, generated: int | None = None) -> None:
        """Says that a call needs nothing more of its engine; may be called again. `generated`: tokens, if known."""
        if self._placement is not None and place is not None:
            self._placement.ended(place.number, self._clock.now(), generated)

    # ------------------------------------------------------------------ copies of their trees

    def note_changes(self, replica: int, changes: list[CacheEvent]) -> None:
        """Takes changes of an engine's tree, to be read later."""
        self._counters["cache_events"] += len(changes)
        if self._placement is not None:
            self._changes.append((replica, changes))
            if sum(len(each) for _, each in self._changes) > MOST_CHANGES:
                self.read_changes()

    def read_changes(self) -> None:
        """Brings the copies up to date. Called when the gateway is idle, and before each placement."""
        if self._placement is None:
            return
        now = self._clock.now()
        while self._hints and (oldest := next(iter(self._hints.items())))[1] <= now:
            self._end_hint(self._placement, oldest[0])
        changed = {replica for replica, _ in self._changes}
        while self._changes:
            replica, changes = self._changes.popleft()
            if not self._placement.apply(replica, changes) and now >= self._asked.get(replica, -1e9) + SNAPSHOT_AGAIN:
                self.ask_for_tree(replica)
        for replica in changed:
            for number in self._placement.computed(replica, now):
                if number in self._hints:
                    self._end_hint(self._placement, number)

    def _end_hint(self, placement: "Placement", number: int) -> None:
        del self._hints[number]
        placement.ended(number, self._clock.now())

    def changes_lost(self, replica: int) -> None:
        """Notes that changes of an engine's tree were lost, and asks for all of it."""
        if self._placement is not None:
            self._forget_changes(replica)
            self._placement.gap(replica)
            self.ask_for_tree(replica)

    def ask_for_tree(self, replica: int) -> None:
        self._asked[replica] = self._clock.now()
        self.all[replica].send(EngineSnapshot())

    def _forget_changes(self, replica: int) -> None:
        self._changes = deque(each for each in self._changes if each[0] != replica)


def _new_placement(policy: str) -> "Placement":
    from ..placement.placement import Placement

    return Placement(policy)


def summed(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Adds up counters by their names."""
    total: Counter[str] = Counter()
    for counters in parts:
        total.update(counters)
    return dict(total)
