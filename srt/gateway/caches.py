"""The ledger of explicit caching: which prefixes are kept for which salt, until when, and what a request's marks get.

    request ── grant ──▶ marks that read: TTL restarted, EngineRenew     ┐
                         marks that create: EngineMark on the request    ├─ settle ──▶ CachingUsage
         MarksPlaced ──▶ which of them the engine has placed             ┘

The ledger alone decides when a TTL ends, and then releases the engine's pin. The engine keeps a prefix for SLACK
seconds longer, in case the release is lost. A prefix that the engine gave up is forgotten here (KeepsEnded). A TTL
begins when its prefix is computed. Calls that come earlier neither read nor create it, so the branches of a fork create
what they share once.

Prefixes are found by their tokens: an entry is its number of tokens and a digest of them, under the salt. So a mark
reads what it covers exactly when the kept tokens are a strict prefix of the prompt, whatever blocks they came from. The
private namespaces in which the tokens lie are part of the digest.

With several engines an entry lies at one of them, the one that computed it. Calls whose marks read it, or whose prefix
another call is creating, are sent there (`home`).
"""

import logging
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise

from ...lang.caching import COUNTED_MARKS, CacheObject, Caching, CachingUsage, MarkUsage
from ...lang.errors import OverloadedError, ParameterError
from ...lang.prompt import Borders
from ..core.config import GatewayLimits
from ..core.instruments import Clock
from ..core.messages import EngineMark, EngineRelease, EngineRenew, ToEngine

log = logging.getLogger("umbel.gateway")

SLACK = 60.0  # seconds
Prefix = tuple[int, bytes]  # number of tokens, digest


@dataclass(frozen=True, slots=True)
class PromptMark:
    """A mark in tokens.

    Attributes:
        length: tokens that it covers.
        floor: it reads entries of at least so many tokens.
        ttl: seconds.
    """

    length: int
    floor: int
    ttl: float


@dataclass(slots=True, eq=False)
class MarkedPrompt:
    """The marks of one call, and what became of them."""

    salt: str
    marks: tuple[PromptMark, ...]  # by length; none is shorter than the minimum
    name: str = ""  # under which the last one is kept; "" for marks of a request
    record: bytes = b""  # of the name
    replica: int = field(default=0, init=False)  # the engine that has the call; where its entries lie
    pins: list[int | None] = field(default_factory=list, init=False)  # of marks that create; the engine has been told
    prefixes: list[Prefix] = field(default_factory=list, init=False)
    created_elsewhere: set[Prefix] = field(default_factory=set, init=False)  # by calls that are not settled
    read: int = field(default=0, init=False)  # tokens of the longest entry that a mark reads
    usage: CachingUsage = field(default_factory=CachingUsage, init=False)  # once it is settled
    held: bool = field(default=False, init=False)  # the last mark was kept when it was settled


@dataclass(slots=True, eq=False)
class _Hold:
    """A reason to keep an entry: marks of requests, or a name."""

    ttl: float
    ends: float  # on the clock
    made: float
    record: bytes = b""


@dataclass(slots=True, eq=False)
class _Entry:
    """A prefix that is kept as long as it has a hold."""

    salt: str
    prefix: Prefix
    replica: int
    pin: int
    holds: dict[str, _Hold]  # by name; "" is that of marks

    @property
    def ends(self) -> float:
        return max(hold.ends for hold in self.holds.values())


def marked_places(caching: Caching) -> list[tuple[int, int]]:
    """Returns (place of the mark, place of the block end where its look-back ends) of the marks that count.

    The place 0 means the beginning of the prompt.
    """
    counted = caching.marks[-COUNTED_MARKS:]
    if caching.look_back is None:
        return [(mark.place, 0) for mark in counted]
    ends = sorted({*caching.blocks, *(mark.place for mark in caching.marks)})
    index = {place: i for i, place in enumerate(ends)}
    return [(mark.place, ([0] * caching.look_back + ends)[index[mark.place]]) for mark in counted]


class CacheLedger:
    """Keeps the entries of all salts, and talks to the engines about their pins.

    Args:
        new_id: returns an id for a pin; no engine message has the same.
        to_engines: for each engine what carries a message to it.
        counters: receives "caches_made", "caches_expired", "caches_lost", "cache_read_tokens" and
            "cache_created_tokens".
    """

    def __init__(
        self,
        *,
        new_id: Callable[[], int],
        to_engines: Sequence[Callable[[ToEngine], None]],
        clock: Clock,
        limits: GatewayLimits,
        counters: Counter[str],
    ) -> None:
        self._new_id = new_id
        self._to_engines = to_engines
        self._clock = clock
        self._limits = limits
        self._counters = counters
        self._salts: dict[str, dict[Prefix, _Entry]] = {}
        self._pins: dict[int, _Entry] = {}
        self._names: dict[tuple[str, str], _Entry] = {}  # by salt and name
        self._records = 0  # bytes
        self._until = math.inf  # no hold ends before
        self._unsettled: dict[MarkedPrompt, None] = {}  # of calls that the engine has
        self._creating: dict[tuple[str, Prefix], MarkedPrompt] = {}

    def __len__(self) -> int:
        return len(self._pins)

    # ------------------------------------------------------------------ a call with marks

    def home(self, marked: MarkedPrompt, token_ids: Sequence[int], private: Borders = ()) -> int | None:
        """Returns the engine that has the longest prefix that the marks read, or is computing one that they cover.

        None: they read nothing, so any engine may have the call. Called before the call is placed.
        """
        self.tick()
        digests = self._digests_of(marked, token_ids, private)
        found = [(entry.prefix[0], entry.replica) for entry in self._reached(marked, digests)]
        for mark in marked.marks:
            creator = self._creating.get((marked.salt, (mark.length, digests[mark.length])))
            if creator is not None and creator is not marked:
                found.append((mark.length, creator.replica))
        return max(found)[1] if found else None

    def _digests_of(self, marked: MarkedPrompt, token_ids: Sequence[int], private: Borders) -> dict[int, bytes]:
        """Returns the digests of the prompt at its marks, and at the lengths of entries up to the last of these."""
        entries = self._salts.get(marked.salt, {})
        lengths = {mark.length for mark in marked.marks} | {length for length, _ in entries}
        longest = max((mark.length for mark in marked.marks), default=0)
        return dict(_digests(token_ids, sorted(length for length in lengths if length <= longest), private))

    def _reached(self, marked: MarkedPrompt, digests: Mapping[int, bytes]) -> list[_Entry]:
        """Returns the entries that are prefixes of the prompt, shortest first."""
        entries = self._salts.get(marked.salt, {}).values()
        found = (entry for entry in entries if digests.get(entry.prefix[0]) == entry.prefix[1])
        return sorted(found, key=lambda entry: entry.prefix[0])

    def grant(
        self, marked: MarkedPrompt, token_ids: Sequence[int], private: Borders = (), replica: int = 0
    ) -> list[EngineMark]:
        """Finds what the marks read, and returns the marks that the engine is to place. Called when the call is sent.

        What is read ends later from now on. What is created is known when the call is settled.

        Args:
            replica: the engine that gets the call.
        """
        self.cancel(marked)  # what an engine that is lost has not placed
        self.tick()
        entries = self._salts.get(marked.salt, {})
        digests = self._digests_of(marked, token_ids, private)
        marked.prefixes = [(mark.length, digests[mark.length]) for mark in marked.marks]
        reached = [entry for entry in self._reached(marked, digests) if entry.replica == replica]
        marked.read, marked.pins, marked.created_elsewhere, marked.replica = 0, [], set(), replica
        orders: list[EngineMark] = []
        room = min(self._limits.max_caches - len(self), self._limits.max_salt_caches - len(entries))
        for mark, prefix in zip(marked.marks, marked.prefixes, strict=True):
            found = [entry for entry in reached if mark.floor <= entry.prefix[0] <= mark.length]
            if found:
                self._restart(found[-1])
                marked.read = max(marked.read, found[-1].prefix[0])
            creator = None if marked.name else self._creating.get((marked.salt, prefix))
            if creator is not None and creator is not marked:
                marked.created_elsewhere.add(prefix)
            if prefix in entries or creator is not None or len(orders) >= room:
                marked.pins.append(None)
                continue
            self._creating.setdefault((marked.salt, prefix), marked)
            orders.append(EngineMark(self._new_id(), mark.length, mark.ttl + SLACK))
            marked.pins.append(orders[-1].id)
        self._unsettled[marked] = None
        return orders

    def settle(self, marked: MarkedPrompt, placed: Iterable[bool]) -> None:
        """Notes which marks the engine has placed, in the order of `grant`, and computes the call's usage, once."""
        if marked not in self._unsettled:
            return
        now = self._clock.now()
        self.tick()
        answers = iter(placed)
        shown: list[MarkUsage] = []
        covered = 0
        for mark, prefix, pin in zip(marked.marks, marked.prefixes, marked.pins, strict=True):
            made = pin is not None and next(answers, False)
            if made and pin is not None:
                self._add(_Entry(marked.salt, prefix, marked.replica, pin, {}))
            entry = self._salts.get(marked.salt, {}).get(prefix)
            marked.held = entry is not None
            if entry is not None:
                self._hold(entry, marked.name, _Hold(mark.ttl, now + mark.ttl, now, marked.record))
            reads = max(covered, min(marked.read, mark.length))
            kept = mark.length if made else reads
            shown.append(MarkUsage(mark.length, reads - covered, kept - reads, mark.ttl))
            covered = max(kept, mark.length) if prefix in marked.created_elsewhere else kept
        self._forget(marked)
        marked.usage = CachingUsage(tuple(shown))
        self._counters["cache_read_tokens"] += marked.usage.read
        self._counters["cache_created_tokens"] += marked.usage.created

    def cancel(self, marked: MarkedPrompt) -> None:
        """Releases what a call that has not been settled may have placed. May be called again."""
        for pin in self._forget(marked):
            if pin is not None:
                self._send(marked.replica, EngineRelease(pin))

    def _forget(self, marked: MarkedPrompt) -> list[int | None]:
        self._unsettled.pop(marked, None)
        for prefix in marked.prefixes:
            if self._creating.get((marked.salt, prefix)) is marked:
                del self._creating[marked.salt, prefix]
        pins, marked.pins = marked.pins, []
        return pins

    # ------------------------------------------------------------------ names

    def check_name(self, salt: str, name: str, record: bytes) -> None:
        """Checks that a name is new and that there is room for it.

        Raises:
            ParameterError: the salt has a cache of this name.
            OverloadedError: there are too many names, or their records are too large together.
        """
        self.tick()
        if (salt, name) in self._names:
            raise ParameterError(f"name: cache {name!r} exists; extend it, delete it, or write another one")
        limits = self._limits
        if len(self._names) >= limits.max_caches or len(self.objects(salt)) >= limits.max_salt_caches:
            raise OverloadedError(
                f"no more caches may have names ({limits.max_salt_caches} of one caller, {limits.max_caches} of all); "
                "delete one"
            )
        if self._records + len(record) > limits.max_cache_records:
            most = limits.max_cache_records
            raise OverloadedError(f"the records of all caches may have {most} bytes together; delete one")

    def objects(self, salt: str) -> tuple[CacheObject, ...]:
        """Returns the caches of a salt that have names, without records, in order of creation."""
        self.tick()
        return tuple(self._object(entry, name, b"") for (owner, name), entry in self._names.items() if owner == salt)

    def find(self, salt: str, name: str) -> CacheObject | None:
        """Returns the cache of a name with its record; None where the salt has none."""
        self.tick()
        entry = self._names.get((salt, name))
        return None if entry is None else self._object(entry, name, entry.holds[name].record)

    def extend(self, salt: str, name: str, ttl: float) -> CacheObject | None:
        """Gives a cache a TTL that begins now → the cache, or None."""
        self.tick()
        entry = self._names.get((salt, name))
        if entry is not None:
            hold = entry.holds[name]
            hold.ttl, hold.ends = ttl, self._clock.now() + ttl
            self._renew(entry)
        return self.find(salt, name)

    def delete(self, salt: str, name: str) -> CacheObject | None:
        """Ends a cache → what it was, or None. Marks of requests may keep its tokens longer."""
        found = self.find(salt, name)
        if found is not None:
            self._drop(self._names[salt, name], name)
        return found

    def _object(self, entry: _Entry, name: str, record: bytes) -> CacheObject:
        now, hold = self._clock.now(), entry.holds[name]
        return CacheObject(name, entry.prefix[0], hold.ttl, hold.ends - now, now - hold.made, record)

    # ------------------------------------------------------------------ the end of entries

    @property
    def next_end(self) -> float:
        """Time before which no entry ends; infinite when there is none."""
        return self._until

    def tick(self) -> None:
        """Ends the holds whose TTL is over, and releases the entries without one."""
        now = self._clock.now()
        if now < self._until:
            return
        over = [(e, name) for e in self._pins.values() for name, hold in e.holds.items() if now >= hold.ends]
        for entry, name in over:
            self._drop(entry, name)
            self._counters["caches_expired"] += 1
        self._until = min((h.ends for e in self._pins.values() for h in e.holds.values()), default=math.inf)

    def keeps_ended(self, pins: Iterable[int]) -> None:
        """Forgets the entries that the engine does not keep any more."""
        for pin in pins:
            if (entry := self._pins.get(pin)) is not None:
                self._remove(entry)
                self._counters["caches_lost"] += 1

    def engine_lost(self, replica: int = 0) -> None:
        """Forgets the entries of an engine that is gone."""
        for marked in [marked for marked in self._unsettled if marked.replica == replica]:
            self._forget(marked)
        for entry in self._entries_of(replica):
            self._remove(entry)
            self._counters["caches_lost"] += 1
        if not self._pins:
            self._until = math.inf

    def events_lost(self, replica: int = 0) -> None:
        """Releases the entries of an engine, which may have said that it does not keep them."""
        for entry in self._entries_of(replica):
            self._release(entry)
            self._counters["caches_lost"] += 1

    def _entries_of(self, replica: int) -> list[_Entry]:
        return [entry for entry in self._pins.values() if entry.replica == replica]

    # ------------------------------------------------------------------ inside

    def _add(self, entry: _Entry) -> None:
        """Adds an entry that will be held. Where another call has made the same meanwhile, that one stays."""
        entries = self._salts.setdefault(entry.salt, {})
        if entry.prefix in entries:
            self._send(entry.replica, EngineRelease(entry.pin))
            return
        entries[entry.prefix] = self._pins[entry.pin] = entry
        self._counters["caches_made"] += 1

    def _hold(self, entry: _Entry, name: str, hold: _Hold) -> None:
        """Adds a hold. That of other marks stays, at least as long; that of the same name is replaced."""
        if name:
            if (former := self._names.get((entry.salt, name))) is not None and former is not entry:
                self._drop(former, name)
            self._names[entry.salt, name] = entry
            self._records += len(hold.record) - len(entry.holds[name].record if name in entry.holds else b"")
        elif name in entry.holds:
            hold.ttl = max(hold.ttl, entry.holds[name].ttl)
            hold.ends = max(hold.ends, entry.holds[name].ends)
        entry.holds[name] = hold
        self._until = min(self._until, hold.ends)
        self._renew(entry)

    def _drop(self, entry: _Entry, name: str) -> None:
        """Ends one hold, and the entry with the last of them."""
        if len(entry.holds) == 1:
            self._release(entry)
        else:
            self._unname(entry, name)
            del entry.holds[name]

    def _restart(self, entry: _Entry) -> None:
        """Restarts the TTLs of an entry that is read."""
        for hold in entry.holds.values():
            hold.ends = self._clock.now() + hold.ttl
        self._renew(entry)

    def _renew(self, entry: _Entry) -> None:
        """Tells the engine how long the entry is kept at least."""
        self._send(entry.replica, EngineRenew(entry.pin, entry.ends - self._clock.now() + SLACK))

    def _release(self, entry: _Entry) -> None:
        self._remove(entry)
        self._send(entry.replica, EngineRelease(entry.pin))

    def _unname(self, entry: _Entry, name: str) -> None:
        if name:
            del self._names[entry.salt, name]
            self._records -= len(entry.holds[name].record)

    def _remove(self, entry: _Entry) -> None:
        for name in entry.holds:
            self._unname(entry, name)
        del self._pins[entry.pin]
        entries = self._salts[entry.salt]
        del entries[entry.prefix]
        if not entries:
            del self._salts[entry.salt]

    def _send(self, replica: int, message: ToEngine) -> None:
        """Sends a message. A lost one does no harm: the engine's pin ends when its time is over."""
        try:
            self._to_engines[replica](message)
        except Exception:
            log.exception("a message about a cached prefix could not be sent")


def _digests(token_ids: Sequence[int], lengths: Sequence[int], private: Borders) -> Iterator[Prefix]:
    """Yields (length, digest of so many tokens and of the namespaces that they lie in) for ascending lengths."""
    data = memoryview(array("i", token_ids).tobytes())
    size = array("i").itemsize
    digest = blake2b(digest_size=20)
    for before, length in pairwise([0, *lengths]):
        digest.update(data[before * size : length * size])
        whole = digest.copy()
        whole.update(repr([border for border in private if border[0] < length]).encode())
        yield length, whole.digest()
