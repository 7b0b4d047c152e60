"""Places calls at replicas: the tree of what they have cached, their load, and the calls that stay together.

    place(call) ──► lengths (MetaTree) ──► group or program placed before? ──► policy ──► Placed(replica, reason)
                                                                                            │ load counts from here on
    apply(replica, events) ──► the exact copy          began(number) ◄── the prompt is computed
                                                       ended(number) ◄── no more work there

There is no I/O, no clock and no lock here: callers hand in the time, one thread uses a Placement. The gateway has one
for its engines, the router on Ray one for its replicas, and the simulator one under its virtual clock.

A call's prompt is expected at its replica from `place` on, so calls that come before any event find it. It stays
expected until the first events that are applied after its end: they tell what became of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...lang.protocol import PlaceKind
from ..core.messages import NO_TIERS, CacheCleared, CacheEvent, TierRooms
from .meta_tree import TOKEN_BYTES, CopyError, CorruptTreeError, Counts, Expectation, Lengths, MetaTree
from .policies import (
    CacheAwareSettings,
    Choice,
    Loads,
    PlacementPolicy,
    Placing,
    is_cold,
    loaded_tokens,
    policy_named,
)

Learning = Literal["events", "routing"]

# Tokens a second until `rates` says better. Only their proportions matter: a token to decode costs eight to compute.
PREFILL_RATE = 5_000.0
DECODE_RATE = 625.0
LOAD_RATE = 50_000.0
USUAL_TOKENS = 64.0  # that a call generates, until some have ended
_NEW_SHARE = 0.05  # of a call that has ended, in the moving mean
_MOST_HOMES = 16_384  # groups and programs that are remembered; the least recently used goes first


@dataclass(frozen=True, slots=True)
class Imbalance:
    """States when calls leave the replica where their group is.

    It then has more than `calls` calls more than the least loaded replica, and more than `ratio` times as many.
    """

    calls: int
    ratio: float = 2.0

    def passed(self, there: int, least: int) -> bool:
        return there > least + self.calls and there > self.ratio * least


GROUP_IMBALANCE = Imbalance(32)
PROGRAM_IMBALANCE = Imbalance(4)  # its calls need not share a prefix


@dataclass(frozen=True, slots=True)
class Placed:
    """Says where a call goes.

    Attributes:
        reason: in words, for `explain_cache()` and logs; it has no text of the prompt, but the load of all callers.
        kind: the reason without that load.
        cached: tokens of its prefix that the replica holds.
        expected: tokens of its prefix that it holds or calls in flight bring; at least `cached`.
        to_load: tokens after those that it loads from its tiers, as far as is known.
        lengths: the first two, for all replicas.
        number: of the call, for `began` and `ended`.
    """

    replica: int
    reason: str
    kind: PlaceKind
    cached: int
    expected: int
    to_load: int
    lengths: Lengths
    number: int


@dataclass(slots=True)
class _PlacedCall:
    replica: int
    to_compute: int  # tokens of the prompt
    to_load: int
    to_generate: int  # tokens, an estimate
    placed_at: float
    expectation: Expectation | None
    began: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """Has the facts of one replica.

    Attributes:
        processed: calls placed there, cumulative.
        running: calls that have not ended.
        waiting: those whose prompt is not computed yet.
        wait: seconds of computing that they still need, by the rates.
        tokens: what the tree has for it.
        stale: events were lost, and no snapshot has come since; it counts as empty.
        seconds_to_begin: moving mean of the time from the placement of a call until its prompt was computed.
    """

    replica: int
    up: bool
    processed: int
    running: int
    waiting: int
    wait: float
    tokens: int
    stale: bool
    seconds_to_begin: float


@dataclass(frozen=True, slots=True)
class Eviction:
    """Has the sizes of guessed copies before and after an eviction, by replica, in tokens."""

    at: float
    before: Mapping[int, int]
    after: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class PlacementFacts:
    policy: str
    replicas: tuple[ReplicaFacts, ...]
    eviction: Eviction | None  # the last one; None: there was none yet

    def lines(self, names: Mapping[int, str] | None = None) -> list[str]:
        """Returns lines for a log, worded as those of SGLang's router. `names`: of replicas; by default numbers."""

        def name(replica: int) -> str:
            return str(replica) if names is None else names[replica]

        lines = []
        if self.eviction is not None:
            for when, sizes in (("Before", self.eviction.before), ("After", self.eviction.after)):
                lines.append(f"{when} eviction - Used size per tenant:")
                lines.extend(f"Tenant: {name(replica)}, Size: {size}" for replica, size in sizes.items())
        for title, counts in (
            ("Processed", {facts.replica: facts.processed for facts in self.replicas}),
            ("Running", {facts.replica: facts.running for facts in self.replicas}),
        ):
            shown = ", ".join(f'"{name(replica)}": {count}' for replica, count in counts.items())
            lines.append(f"{title} Queue: {{{shown}}}")
        return lines


class _LoadTable:
    """Arrays with a place for each replica. `size` is one more than the greatest number of a replica."""

    def __init__(self) -> None:
        self.size = 0
        self.up = np.zeros(0, bool)
        self.prefill = np.zeros(0)  # tokens a second, as the next two
        self.decode = np.zeros(0)
        self.load = np.zeros(0)
        self.room = np.zeros(0)  # tokens
        self.seconds_to_begin = np.zeros(0)
        self.processed: Counts = np.zeros(0, np.int64)
        self.calls: Counts = np.zeros(0, np.int64)
        self.waiting: Counts = np.zeros(0, np.int64)
        self.to_compute: Counts = np.zeros(0, np.int64)  # tokens, as the next two
        self.to_load: Counts = np.zeros(0, np.int64)
        self.to_generate: Counts = np.zeros(0, np.int64)

    def grow(self, size: int) -> None:
        more = size - self.size
        if more <= 0:
            return
        firsts = {"prefill": PREFILL_RATE, "decode": DECODE_RATE, "load": LOAD_RATE, "room": np.inf}
        for name, first in firsts.items():
            setattr(self, name, np.append(getattr(self, name), np.full(more, first)))
        for name in ("up", "seconds_to_begin", "processed", "calls", "waiting", "to_compute", "to_load", "to_generate"):
            array = getattr(self, name)
            setattr(self, name, np.append(array, np.zeros(more, array.dtype)))
        self.size = size

    def add(self, call: _PlacedCall, sign: int) -> None:
        """Counts a call that was placed (1) or has ended (-1)."""
        self.calls[call.replica] += sign
        self.to_generate[call.replica] += sign * call.to_generate
        if not call.began:
            self.add_prompt(call, sign)

    def add_prompt(self, call: _PlacedCall, sign: int) -> None:
        self.waiting[call.replica] += sign
        self.to_compute[call.replica] += sign * call.to_compute
        self.to_load[call.replica] += sign * call.to_load

    def loads(self, tokens: Counts) -> Loads:
        wait = self.to_compute / self.prefill + self.to_load / self.load + self.to_generate / self.decode
        return Loads(self.calls, self.waiting, wait, tokens, self.prefill, self.load, self.room)


_LASTING = 0  # the place in the tree of what all replicas can load; a replica's own memory has its number + 1


class _TierCopies:
    """Guesses what replicas can load from their slower tiers. A wrong guess moves a call, and never changes a token.

    Engines keep a page from its second use on: a call that finds a prefix at its replica is that use. Each tier is
    taken to evict what was used least recently. Disk and store are taken to be the same for all replicas.
    """

    def __init__(self) -> None:
        self.rooms: dict[int, TierRooms] = {}
        self._tree = MetaTree()

    def down(self, replica: int) -> None:
        """Says that a replica has lost its memory."""
        self.rooms.pop(replica, None)
        self._tree.drop(replica + 1)

    def shown(self, call: Placing, replicas: list[int]) -> Placing:
        """Returns the call with what each of the replicas can load of it."""
        if not self._tree.total_tokens:
            return call
        held = self._tree.lengths(call.tokens, call.salt, call.borders, replicas=max(replicas) + 2).held.tolist()
        loadable = {
            replica: max(held[replica + 1], held[_LASTING] if self.rooms.get(replica, NO_TIERS).lasting else 0)
            for replica in replicas
        }
        return replace(call, loadable={replica: length for replica, length in loadable.items() if length})

    def use(self, call: Placing, replica: int, length: int) -> None:
        """Says that a call uses the first `length` tokens of its prompt again at a replica."""
        rooms = self.rooms.get(replica, NO_TIERS)
        length -= length % rooms.page
        if not length:
            return
        tokens, borders = call.tokens[: length * TOKEN_BYTES], tuple(each for each in call.borders if each[0] < length)
        for place, room in ((replica + 1, rooms.host), (_LASTING, rooms.lasting)):
            if room:
                self._tree.insert(place, tokens, call.salt, borders)
                self._tree.evict(place, room)


class Placement:
    """Places calls at replicas, which are numbers from 0 on; the number of one that is gone may be used again.

    Args:
        policy: its name, of `policies.POLICIES`, or the policy.
        replicas: those that are up at first.
        learns: how it knows what replicas have cached. "events": exactly, by `apply`. "routing": it guesses from where
            calls were placed, for replicas that tell nothing.
        settings: thresholds of `cache-aware`, and how much a guessed copy keeps.
        seed: of policies that draw.
    """

    def __init__(
        self,
        policy: str | PlacementPolicy = "added-delay",
        replicas: Iterable[int] = (),
        *,
        learns: Learning = "events",
        settings: CacheAwareSettings | None = None,
        seed: int = 0,
    ) -> None:
        self._settings = settings if settings is not None else CacheAwareSettings()
        self.policy = policy_named(policy, self._settings, seed) if isinstance(policy, str) else policy
        self.tree = MetaTree()
        self._learns = learns
        self._table = _LoadTable()
        self._up: NDArray[np.int64] = np.zeros(0, np.int64)
        self._calls: dict[int, _PlacedCall] = {}
        self._waiting: dict[int, set[int]] = {}  # replica → its calls whose prompt is not computed, as far as known
        self._number = 0
        self._ended: dict[int, list[Expectation]] = {}  # replica → of calls that ended since the last events
        self._stale: set[int] = set()
        self._homes: OrderedDict[tuple[str, str, str], int] = OrderedDict()  # (kind, salt, name) → replica
        self._usual_tokens = USUAL_TOKENS
        self._eviction: Eviction | None = None
        self._next_eviction: float | None = None
        self._tiers = _TierCopies()
        for replica in replicas:
            self.up(replica)

    # ------------------------------------------------------------------------------------------ replicas

    def up(self, replica: int) -> None:
        """Says that a replica takes calls from now on. Nothing is cached there."""
        self._table.grow(replica + 1)
        self._table.up[replica] = True
        self._up = np.flatnonzero(self._table.up)

    def down(self, replica: int) -> list[int]:
        """Says that a replica takes no calls and has lost its cache.

        Returns:
            The numbers of the calls that were there, which are forgotten. Those that sent nothing may be placed again.
        """
        lost = [number for number, call in self._calls.items() if call.replica == replica]
        self._waiting.pop(replica, None)
        for number in lost:
            call = self._calls.pop(number)
            self._table.add(call, -1)
            if call.expectation is not None:
                self.tree.forget(call.expectation)
        self._settle(replica)
        self.tree.drop(replica)
        self._tiers.down(replica)
        self._stale.discard(replica)
        for home in [key for key, there in self._homes.items() if there == replica]:
            del self._homes[home]
        self._table.up[replica] = False
        self._up = np.flatnonzero(self._table.up)
        return lost

    def rates(
        self, replica: int, *, prefill: float | None = None, decode: float | None = None, load: float | None = None
    ) -> None:
        """Sets rates of a replica, in tokens a second over all of its calls; those that are None stay."""
        table = self._table
        table.grow(replica + 1)
        for rates, value in ((table.prefill, prefill), (table.decode, decode), (table.load, load)):
            if value is not None:
                assert value > 0, f"a rate is above 0, not {value}"
                rates[replica] = value

    def room(self, replica: int, tokens: int) -> None:
        """Sets how many tokens the pool of a replica holds; without it, nothing counts as evicted."""
        self._table.grow(replica + 1)
        self._table.room[replica] = tokens

    def tiers(self, replica: int, rooms: TierRooms) -> None:
        """Sets how much the slower tiers of a replica hold; without it, nothing counts as loadable."""
        if rooms.host or rooms.lasting:
            self._tiers.rooms[replica] = rooms
        else:
            self._tiers.rooms.pop(replica, None)

    # ------------------------------------------------------------------------------------------ calls

    def place(self, call: Placing, now: float, exclude: AbstractSet[int] = frozenset()) -> Placed | None:
        """Chooses a replica for a call, and counts the call there. None: no replica is up that is not excluded."""
        replicas = self._up
        if exclude:
            replicas = np.array([replica for replica in replicas.tolist() if replica not in exclude], np.int64)
        if not len(replicas):
            return None
        self._number += 1
        table, number = self._table, self._number
        if self._learns == "routing":
            self._evict_when_due(now)
        lengths = self.tree.lengths(call.tokens, call.salt, call.borders, replicas=table.size)
        if call.loadable is None and self._tiers.rooms:
            call = self._tiers.shown(call, replicas.tolist())
        choice = Choice(call, number, replicas, lengths, table.loads(self.tree.all_tokens(table.size)))
        together = self._together(choice)
        replica, reason = together or self.policy.choose(choice)
        self._remember(call, replica)
        expected = int(lengths.coming[replica])
        to_load = self._count(call, number, replica, expected, now)
        if self._tiers.rooms:
            self._tiers.use(call, replica, expected + to_load)
        known = PlaceKind.CACHED if expected or to_load else PlaceKind.COLD
        kind = known if together is None else PlaceKind.TOGETHER
        return Placed(replica, reason, kind, int(lengths.held[replica]), expected, to_load, lengths, number)

    def began(self, number: int, now: float) -> None:
        """Says that the prompt of a call is computed. Calls that are not known any more are no error."""
        call = self._calls.get(number)
        if call is not None and not call.began:
            call.began = True
            self._waiting[call.replica].discard(number)
            self._table.add_prompt(call, -1)
            mean = self._table.seconds_to_begin
            mean[call.replica] += _NEW_SHARE * (now - call.placed_at - mean[call.replica])

    def computed(self, replica: int, now: float) -> list[int]:
        """Says that prompts are computed which the events of a replica have shown; returns the numbers of the calls.

        A call that does not stream tells nothing before its end."""
        found = [number for number in self._waiting.get(replica, ()) if self._is_there(self._calls[number])]
        for number in found:
            self.began(number, now)
        return found

    @staticmethod
    def _is_there(call: _PlacedCall) -> bool:
        """Returns whether the replica holds the whole prompt, but for the last token at most."""
        end = None if call.expectation is None else call.expectation.end
        if end is not None and len(end.tokens) == TOKEN_BYTES and not end.held >> call.replica & 1:
            end = end.parent
        return end is not None and bool(end.held >> call.replica & 1)

    def ended(self, number: int, now: float, generated: int | None = None) -> None:
        """Says that a call needs nothing more of its replica. `generated`: the tokens that it made, if known."""
        call = self._calls.get(number)
        if call is None:
            return
        if generated is not None:
            self.began(number, now)
            self._usual_tokens += _NEW_SHARE * (generated - self._usual_tokens)
        del self._calls[number]
        self._waiting[call.replica].discard(number)
        self._table.add(call, -1)
        if call.expectation is not None:
            self._ended.setdefault(call.replica, []).append(call.expectation)

    def _together(self, choice: Choice) -> tuple[int, str] | None:
        """Returns the replica of the call's group or program, if the policy keeps them together."""
        if not self.policy.follows:
            return None
        call, calls = choice.call, choice.loads.calls
        for kind, name, imbalance in (
            ("fork group", call.group, GROUP_IMBALANCE),
            ("program", call.program, PROGRAM_IMBALANCE),
        ):
            home = self._homes.get((kind, call.salt, name)) if name else None
            if home is None or home not in choice.replicas:
                continue
            if kind == "program" and not is_cold(choice):
                continue  # its prefix says better where it goes
            if not imbalance.passed(int(calls[home]), int(calls[choice.replicas].min())):
                return home, f"its {kind} is there, {calls[home]} calls in flight"
        return None

    def _remember(self, call: Placing, replica: int) -> None:
        for kind, name in (("fork group", call.group), ("program", call.program)):
            if name:
                key = (kind, call.salt, name)
                self._homes[key] = replica
                self._homes.move_to_end(key)
        while len(self._homes) > _MOST_HOMES:
            self._homes.popitem(last=False)

    def _count(self, call: Placing, number: int, replica: int, expected: int, now: float) -> int:
        """Counts a call at its replica; returns the tokens that it will load."""
        rest = max(1, call.length - expected)  # the last token is always computed
        to_load = min(rest - 1, loaded_tokens(call, replica, expected, self._table.load, self._table.prefill))
        generate = min(call.work, round(self._usual_tokens))
        expectation = None
        if self._learns == "events":
            expectation = self.tree.expect(replica, call.tokens, call.salt, call.borders)
        else:
            self.tree.insert(replica, call.tokens, call.salt, call.borders)
        placed = _PlacedCall(replica, rest - to_load, to_load, generate, now, expectation)
        self._calls[number] = placed
        self._waiting.setdefault(replica, set()).add(number)
        self._table.add(placed, 1)
        self._table.processed[replica] += 1
        return to_load

    # ------------------------------------------------------------------------------------------ what is cached

    def apply(self, replica: int, events: Iterable[CacheEvent]) -> bool:
        """Reads events of a replica's engine, in order.

        Returns:
            False: they do not fit, or earlier ones did not. The replica counts as empty until a snapshot comes:
            CacheCleared, then NodeAdded of all nodes, parents first.
        """
        for event in events:
            if isinstance(event, CacheCleared):
                self._stale.discard(replica)
            if replica in self._stale:
                continue
            try:
                self.tree.apply(replica, event)
            except CopyError:
                self.gap(replica)
        self._settle(replica)
        return replica not in self._stale

    def gap(self, replica: int) -> None:
        """Says that events of a replica were lost: it counts as empty until a snapshot comes."""
        self.tree.drop(replica)
        self._stale.add(replica)

    def _settle(self, replica: int) -> None:
        for expectation in self._ended.pop(replica, ()):
            self.tree.forget(expectation)

    def _evict_when_due(self, now: float) -> None:
        if self._next_eviction is None:
            self._next_eviction = now + self._settings.eviction_interval
        if now >= self._next_eviction:
            self._next_eviction = now + self._settings.eviction_interval
            self.evict(now)

    def evict(self, now: float) -> Eviction:
        """Takes from guessed copies what is more than `max_tree_size`, and returns their sizes."""
        replicas = self._up.tolist()
        before = {replica: self.tree.tokens_of(replica) for replica in replicas}
        for replica in replicas:
            self.tree.evict(replica, self._settings.max_tree_size)
        self._eviction = Eviction(now, before, {replica: self.tree.tokens_of(replica) for replica in replicas})
        return self._eviction

    # ------------------------------------------------------------------------------------------ look

    def facts(self) -> PlacementFacts:
        table = self._table
        wait = table.loads(self.tree.all_tokens(table.size)).wait
        return PlacementFacts(
            self.policy.name,
            tuple(
                ReplicaFacts(
                    replica,
                    bool(table.up[replica]),
                    int(table.processed[replica]),
                    int(table.calls[replica]),
                    int(table.waiting[replica]),
                    float(wait[replica]),
                    self.tree.tokens_of(replica),
                    replica in self._stale,
                    float(table.seconds_to_begin[replica]),
                )
                for replica in range(table.size)
            ),
            self._eviction,
        )

    def check(self) -> None:
        """Checks the tree, and that loads are those of the calls in flight.

        Raises:
            CorruptTreeError: says what does not fit.
        """
        self.tree.check()
        table = _LoadTable()
        table.grow(self._table.size)
        for call in self._calls.values():
            table.add(call, 1)
        for name in ("calls", "waiting", "to_compute", "to_load", "to_generate"):
            if getattr(table, name).tolist() != getattr(self._table, name).tolist():
                raise CorruptTreeError(f"{name} is {getattr(self._table, name)}; the calls say {getattr(table, name)}")
