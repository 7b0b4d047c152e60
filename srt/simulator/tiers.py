"""Slower tiers of the cache in a simulation: what they hold, and how long it takes to load it.

    TierContents      coarse: a tree of tokens for each tier
    TimedMemory       exact, host memory: the runtime's class, whose loads take time of the engine's thread
    SimulatedAccess   exact, disk and store: answers looks and brings pages as events of the virtual clock

A tier holds whole pages that were used twice, the least recently used out first; the store is one for all replicas.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ...lang.errors import ParameterError
from ..core.messages import TierRooms
from ..placement.meta_tree import TOKEN_BYTES as META_TOKEN_BYTES
from ..placement.meta_tree import MetaTree
from ..tiers.access import CLOSE_SECONDS, DirectAccess, PageRun, TierAccess
from ..tiers.memory import ENTRY_BYTES, HostMemory
from ..tiers.names import PAGE_TOKENS
from ..tiers.rates import LoadRate
from ..tiers.tier import Payload, TierFacts
from .events import EventClock, Events

PAGE = PAGE_TOKENS
TOKEN_BYTES = 8  # of a simulated token in a page
_PAGE_BYTES = PAGE * TOKEN_BYTES
_MOST_USED = PAGE << 16  # tokens whose uses are known, as PageLedger
_MOST_TOKENS = 10**12  # of a tier, and that it brings in a second
_CHUNK = 8  # pages that are loaded at once: between two chunks the tier answers looks


@dataclass(frozen=True, slots=True)
class TierModel:
    """A tier. `tokens`: that it holds; `rate`: tokens a second; `latency`: seconds before the first page is there."""

    name: str
    tokens: int
    rate: float
    latency: float
    shared: bool = False

    @property
    def medium(self) -> str:
        """The name of such a tier in a runtime."""
        return "shared" if self.shared else self.name

    def loading(self, pages: int) -> float:
        """Returns the seconds in which pages are loaded, after the first look."""
        return pages * PAGE / self.rate

    def memory(self) -> HostMemory:
        """Makes the pages of a disk or a store. Their order of eviction is that of host memory."""
        return HostMemory(self.memory_bytes)

    @property
    def memory_bytes(self) -> int:
        """The bytes of its pages as `HostMemory` counts them."""
        return self.tokens // PAGE * (_PAGE_BYTES + ENTRY_BYTES)


# Of a 270M model's keys (18 kB a token) on a 2-core machine.
_USUAL = {
    "host": TierModel("host", 0, 500_000.0, 0.0001),
    "disk": TierModel("disk", 0, 100_000.0, 0.001),
    "store": TierModel("store", 0, 50_000.0, 0.002, shared=True),
}


def parse_tiers(text: str) -> tuple[TierModel, ...]:
    """Reads "host=400000,disk=4000000@100000". Raises ParameterError."""
    tiers = []
    for entry in filter(None, text.split(",")):
        name, _, value = entry.partition("=")
        tokens, _, rate = value.partition("@")
        try:
            usual = _USUAL[name]
            tier = TierModel(name, int(tokens), float(rate) if rate else usual.rate, usual.latency, usual.shared)
        except (KeyError, ValueError):
            tier = None
        if tier is None or not PAGE <= tier.tokens <= _MOST_TOKENS or not 1 <= tier.rate <= _MOST_TOKENS:
            known = ", ".join(f"{name}=TOKENS" for name in _USUAL)
            raise ParameterError(
                f"--tiers {entry!r}; write some of {known}, {PAGE} to {_MOST_TOKENS:,} tokens; @RATE, tokens a second, "
                "is optional and 1 or more"
            )
        tiers.append(tier)
    if len({tier.name for tier in tiers}) < len(tiers):
        raise ParameterError(f"--tiers {text!r} name one twice; write each once")
    return tuple(tiers)


def rooms_of(tiers: Sequence[TierModel]) -> TierRooms:
    """Returns what tiers hold, for placement: those of each replica (here its disk too), and the store of all."""
    own = max((tier.tokens for tier in tiers if not tier.shared), default=0)
    return TierRooms(own, max((tier.tokens for tier in tiers if tier.shared), default=0), PAGE)


class TierContents:
    """Knows the contents of one tier, for all replicas of a coarse simulation."""

    def __init__(self, model: TierModel) -> None:
        self.model = model
        self._tree = MetaTree()
        self._used = MetaTree()  # by each replica at least once

    def store(self, replica: int, tokens: bytes, salt: str, *, counted: int) -> None:
        """Stores whole pages of a sequence that its replica has used before.

        Args:
            counted: tokens from the head on whose use by this sequence was counted.
        """
        again = int(self._used.lengths(tokens, salt, replicas=replica + 1).held[replica]) // PAGE * PAGE
        self._used.insert(replica, tokens, salt)
        self._used.evict(replica, _MOST_USED)
        if again > counted:
            owner = 0 if self.model.shared else replica
            self._tree.insert(owner, tokens[: again * META_TOKEN_BYTES], salt)
            self._tree.evict(owner, self.model.tokens)

    def longest(self, replica: int, tokens: bytes, salt: str) -> int:
        """Returns how many tokens of whole pages it has."""
        owner = 0 if self.model.shared else replica
        held = self._tree.lengths(tokens, salt, replicas=owner + 1).held[owner]
        return int(held) // PAGE * PAGE

    def seconds(self, tokens: int) -> float:
        """Returns how long it takes to load so many tokens."""
        return self.model.latency + tokens / self.model.rate


# ------------------------------------------------------------------------------------------ exact


class TimedMemory(HostMemory):
    """Host memory that takes time: the engine's thread looks and copies itself, so its clock moves."""

    def __init__(self, model: TierModel, clock: EventClock) -> None:
        super().__init__(model.memory_bytes)
        self._model = model
        self._clock = clock

    def longest(self, names: Sequence[bytes]) -> int:
        self._clock.move_to(self._clock.now() + self._model.latency)
        return super().longest(names)

    def load(self, names: Sequence[bytes]) -> list[Payload | None]:
        self._clock.move_to(self._clock.now() + self._model.loading(len(names)))
        return super().load(names)


class SimulatedAccess:
    """Implements `TierAccess` as its thread does, in virtual time: looks go before loads, which take turns.

    Args:
        pages: of the tier; several replicas have those of one store.
        clock: of the engine, which is ahead of the events' while it steps.
    """

    def __init__(self, model: TierModel, pages: HostMemory, events: Events, clock: EventClock) -> None:
        self.name = model.medium
        self._model = model
        self._pages = pages
        self._events = events
        self._clock = clock
        self._looks: deque[PageRun] = deque()
        self._loads: deque[PageRun] = deque()
        self._busy = False
        self._waiting = 0  # pages that are asked for and have not come
        self._rate = LoadRate()
        self._rate.loaded(_PAGE_BYTES, model.loading(1))  # as a tier measures a page at its start

    def look(self, names: Sequence[bytes]) -> PageRun:
        run = PageRun(names, self._enqueue_load)
        self._looks.append(run)
        self._wake()
        return run

    def store(self, names: Sequence[bytes], payloads: Sequence[Payload]) -> None:
        self._events.at(self._clock.now(), lambda: self._pages.store(names, payloads))

    def forget(self, names: Sequence[bytes]) -> None:
        self._events.at(self._clock.now(), lambda: self._pages.forget(names))

    def facts(self) -> TierFacts:
        return replace(
            self._pages.facts(),
            name=self.name,
            queued=len(self._looks) + len(self._loads),
            waiting_bytes=self._waiting * _PAGE_BYTES,
            latency=self._rate.latency,
            seconds_per_byte=self._rate.per_byte,
        )

    def settle(self, seconds: float) -> None:
        """Has nothing to wait for: no simulation saves pages at its end."""

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        self._pages.close()

    def _enqueue_load(self, run: PageRun) -> None:
        self._loads.append(run)
        self._waiting += run.asked
        self._wake()

    def _wake(self) -> None:
        if not self._busy:
            self._busy = True
            self._events.at(self._clock.now(), self._next)

    def _next(self) -> None:
        """Begins the next job; it ends after the time that it takes."""
        if self._looks:
            run = self._looks.popleft()
            self._after(0.0 if run.cancelled else self._model.latency, lambda: self._answer(run))
        elif self._loads:
            run = self._loads.popleft()
            first = run.first + run.came
            names = run.names[first : min(first + _CHUNK, run.first + run.asked)]
            self._after(0.0 if run.cancelled else self._model.loading(len(names)), lambda: self._load(run, names))
        else:
            self._busy = False

    def _after(self, seconds: float, end: Callable[[], None]) -> None:
        def done() -> None:
            end()
            self._next()

        self._events.at(self._events.now + seconds, done)

    def _answer(self, run: PageRun) -> None:
        if not run.cancelled:
            self._rate.looked(self._model.latency)
            run.answer(self._pages.longest(run.names))

    def _load(self, run: PageRun, names: Sequence[bytes]) -> None:
        waited = run.asked - run.came
        if not run.cancelled:
            payloads = self._pages.load(names)
            found = sum(payload is not None for payload in payloads)
            self._rate.loaded(found * _PAGE_BYTES, self._model.loading(len(payloads)))
            run.arrive(payloads)
        if run.done:
            self._waiting -= waited
        else:
            self._waiting -= waited - (run.asked - run.came)
            self._loads.append(run)


def open_access(model: TierModel, store: HostMemory | None, events: Events, clock: EventClock) -> TierAccess:
    """Opens a replica's access to a tier. store: the pages of the shared store; None for tiers of its own."""
    if model.name == "host":
        return DirectAccess(TimedMemory(model, clock), clock=clock)
    return SimulatedAccess(model, store or model.memory(), events, clock)
