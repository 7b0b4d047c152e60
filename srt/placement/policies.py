"""Policies: which replica computes a call, from the prefixes and the load of each.

A policy is a pure function of a `Choice`; what it needs of the past (round robin's turn, random draws) it derives from
the number of the call. `AddedDelay` is the default and the only one that keeps fork groups and programs together.

    added delay at a replica = wait there + (tokens to compute ÷ prefill rate + tokens to load ÷ load rate)
                                            × (1 + calls that wait there)
                               + tokens to evict ÷ prefill rate

The factor is what distinguishes it from the least time to first token: computing a prefix again delays every call that
waits, too, so when all replicas are busy a call goes where its prefix is. The last term is for calls to come: what a
prefix that is computed again evicts will be missed. Without it calls that meet a short queue spread prefixes over all
replicas; at half load 8 replicas with room for 11 of 64 prefixes each then hit 0.69 of all tokens, with it 0.88.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...lang.prompt import Borders
from .meta_tree import TOKEN_BYTES, Counts, Lengths

Seconds = NDArray[np.float64]

COLD_SHARE = 1 / 16  # of a prompt; where less of it is cached anywhere, as a template's first tokens, it is cold
HASHED_TOKENS = 128  # the beginning of a prompt that consistent hashing looks at
RING_PLACES = 128  # of one replica on the ring
LOAD_BOUND = 1.25  # times the mean load


@dataclass(frozen=True, slots=True)
class Placing:
    """Describes a call that is to be placed.

    Attributes:
        tokens: the prompt, as `meta_tree.packed` makes it.
        salt, borders: its namespace, and the private ones that open in it, as of RadixCache.
        group: the fork group; "": none.
        program: the shipped program, or the run; "": none.
        work: tokens that it may generate; 0 computes the prompt only.
        loadable: replica → length of the prefix that its slower tiers have.
    """

    tokens: bytes
    salt: str = ""
    borders: Borders = ()
    group: str = ""
    program: str = ""
    work: int = 0
    loadable: Mapping[int, int] | None = None

    @property
    def length(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Loads:
    """Has the load of each replica, by its number. It counts from the placement of a call on.

    Attributes:
        calls: calls placed there that have not ended.
        waiting: those whose prompt is not computed yet.
        wait: seconds of computing that these calls still need.
        tokens: what the tree has for the replica.
        prefill, load: tokens a second that it computes, and loads from its tiers.
        room: tokens that its pool holds; infinite where that is not known.
    """

    calls: Counts
    waiting: Counts
    wait: Seconds
    tokens: Counts
    prefill: Seconds
    load: Seconds
    room: Seconds


@dataclass(frozen=True, slots=True)
class Choice:
    """Gives a policy all that it may look at. `replicas`: those to choose from, at least one, ascending."""

    call: Placing
    number: int  # of the call; each has another
    replicas: NDArray[np.int64]
    lengths: Lengths
    loads: Loads


@dataclass(frozen=True, slots=True)
class CacheAwareSettings:
    """Thresholds of `CacheAware` and of copies that are guessed from placements; SGLang's names and defaults.

    Attributes:
        cache_threshold: a prompt goes to its prefix if more than this share of it is there.
        balance_abs_threshold, balance_rel_threshold: loads are imbalanced where the greatest is above the least by
            more calls than the first, and above the least times the second.
        eviction_interval: seconds between evictions from guessed copies.
        max_tree_size: tokens that a guessed copy keeps for each replica.
    """

    cache_threshold: float = 0.5
    balance_abs_threshold: int = 32
    balance_rel_threshold: float = 1.0001
    eviction_interval: float = 60.0
    max_tree_size: int = 16_777_216


class PlacementPolicy(Protocol):
    """Chooses a replica. `follows`: fork groups and programs stay together, unless a stated imbalance is passed."""

    name: str
    follows: bool

    def choose(self, choice: Choice) -> tuple[int, str]:
        """Returns the replica, and the reason in words."""


def least_of(among: NDArray[np.int64], *keys: NDArray[np.int64] | Seconds) -> int:
    """Returns the replica with the least first key; among equals that with the least second one, and so on."""
    for key in keys:
        if len(among) == 1:
            break
        values = key if len(among) == len(key) else key[among]
        least = float(values.min())
        among = among[values <= least + 1e-9 * abs(least)]
    return int(among[0])


def least_loaded(choice: Choice, among: NDArray[np.int64] | None = None) -> int:
    """Returns the replica with the fewest seconds of work; among equals, with the fewest calls and cached tokens."""
    loads = choice.loads
    return least_of(choice.replicas if among is None else among, loads.wait, loads.calls, loads.tokens)


def is_cold(choice: Choice) -> bool:
    """Returns whether so little of a prompt is cached anywhere that it does not matter where."""
    return bool(choice.lengths.coming[choice.replicas].max() < max(1.0, COLD_SHARE * choice.call.length))


def loaded_tokens(call: Placing, replica: int, cached: int, load: Seconds, prefill: Seconds) -> int:
    """Returns how many tokens of a call a replica loads from its tiers, because that is faster than computing them."""
    if not call.loadable or load[replica] <= prefill[replica]:
        return 0
    return max(0, min(call.loadable.get(replica, 0), call.length) - cached)


class AddedDelay:
    """Places a call where it delays all calls least: itself, and those that wait there."""

    name = "added-delay"
    follows = True

    # No replica is given more calls than this and than so many times the mean, while another idles or the replicas have
    # four calls each. If they have, and one is above the ratio while another idles, the call goes to one that idles.
    # The ratio is below the 2 that is aimed at while another idles, since the mean falls when calls end, and a call
    # that is placed does not move any more.
    spared_calls = 4
    spared_ratio = 1.75
    compared_calls = 4

    def choose(self, choice: Choice) -> tuple[int, str]:
        # Arrays have a place for each number of a replica; those that cannot be chosen get an infinite delay.
        replicas, loads, call = self._not_overloaded(choice), choice.loads, choice.call
        cold = is_cold(choice)
        new = call.length - choice.lengths.coming
        missing = np.full_like(new, call.length) if cold else new
        to_load: Counts | None = None
        if call.loadable:
            to_load = np.zeros_like(new)
            for replica, known in zip(replicas.tolist(), (call.length - missing)[replicas].tolist(), strict=True):
                to_load[replica] = loaded_tokens(call, replica, known, loads.load, loads.prefill)
        if to_load is not None and to_load.any():
            seconds = (missing - to_load) / loads.prefill + to_load / loads.load
        else:
            to_load, seconds = None, missing / loads.prefill
        seconds *= 1 + loads.waiting
        seconds += loads.wait
        evicted = np.minimum(loads.tokens + missing - loads.room, missing)
        np.maximum(evicted, 0, out=evicted)
        evicted /= loads.prefill
        seconds += evicted
        if len(replicas) == len(seconds):
            delays = seconds
        else:
            delays = np.full(len(seconds), np.inf)
            delays[replicas] = seconds[replicas]
        chosen = least_of(replicas, delays, loads.calls, loads.tokens)
        left_out = len(choice.replicas) - len(replicas)
        why = f"{left_out} left out, or one would have over {self.spared_ratio} times the mean; " if left_out else ""
        if cold and to_load is None:
            return (
                chosen,
                f"{why}its prefix is cached nowhere, and load is least there: {loads.wait[chosen]:.3f} s of work",
            )
        delay = float(delays[chosen])
        why += f"least added delay, {delay:.3f} s"
        if len(replicas) > 1:
            delays[chosen] = np.inf
            other = int(delays.argmin())
            why += f"; at replica {other}, with {choice.lengths.coming[other]} tokens, {delays[other]:.3f} s"
        return chosen, why

    def _not_overloaded(self, choice: Choice) -> NDArray[np.int64]:
        calls = choice.loads.calls[choice.replicas]
        total = int(calls.sum()) + 1  # with this one
        one_idles, many = calls.min() == 0, total >= self.compared_calls * len(calls)
        if not one_idles and not many:
            return choice.replicas
        if one_idles and many and calls.max() * len(calls) > self.spared_ratio * (total - 1):
            return choice.replicas[calls < 1]
        within = calls < max(self.spared_calls, math.floor(self.spared_ratio * total / len(calls)))
        return choice.replicas if within.all() else choice.replicas[within]  # never none: the least of them is


class RoundRobin:
    """Places calls in turn."""

    name = "round-robin"
    follows = False

    def choose(self, choice: Choice) -> tuple[int, str]:
        return int(choice.replicas[choice.number % len(choice.replicas)]), "its turn"


class CacheAware:
    """Places a call at its prefix while loads are balanced, else at the least load: SGLang's router.

    A call whose prefix is too short goes to the least load, as its later versions do; at first they chose the smallest
    tree, which sends everything to a replica that has just started.
    """

    name = "cache-aware"
    follows = False

    def __init__(self, settings: CacheAwareSettings | None = None) -> None:
        self.settings = settings if settings is not None else CacheAwareSettings()

    def choose(self, choice: Choice) -> tuple[int, str]:
        settings, replicas = self.settings, choice.replicas
        calls = choice.loads.calls[replicas]
        most, least = int(calls.max()), int(calls.min())
        if most - least > settings.balance_abs_threshold and most > settings.balance_rel_threshold * least:
            return self._shortest(
                choice, replicas
            ), f"loads are imbalanced ({least} to {most} calls); the fewest are there"
        coming = choice.lengths.coming[replicas]
        longest = int(coming.max())
        if longest > settings.cache_threshold * choice.call.length:
            best = self._shortest(choice, replicas[coming == longest])
            return best, f"{longest} of {choice.call.length} tokens are cached there, and loads are balanced"
        share = longest / max(1, choice.call.length)
        reason = f"at most {share:.0%} of it is cached, threshold {settings.cache_threshold:.0%}; load is least there"
        return self._shortest(choice, replicas), reason

    @staticmethod
    def _shortest(choice: Choice, among: NDArray[np.int64]) -> int:
        return least_of(among, choice.loads.calls, choice.loads.tokens)


def _draw(seed: int, number: int, purpose: int, below: int) -> int:
    """Returns a number in [0, below) that depends on the arguments only."""
    data = b"".join(value.to_bytes(8, "little") for value in (seed, number, purpose))
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") % below


class Random:
    """Places calls at random, the same way for the same seed."""

    name = "random"
    follows = False

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def choose(self, choice: Choice) -> tuple[int, str]:
        return int(choice.replicas[_draw(self._seed, choice.number, 0, len(choice.replicas))]), "drawn at random"


class PowerOfTwo:
    """Draws two replicas and places the call at that with fewer calls."""

    name = "power-of-two"
    follows = False

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def choose(self, choice: Choice) -> tuple[int, str]:
        count = len(choice.replicas)
        first = _draw(self._seed, choice.number, 1, count)
        second = (first + 1 + _draw(self._seed, choice.number, 2, count - 1)) % count if count > 1 else first
        drawn = np.array(sorted({first, second}))
        chosen = least_of(choice.replicas[drawn], choice.loads.calls)
        shown = " and ".join(str(int(replica)) for replica in choice.replicas[drawn])
        return chosen, f"drawn: {shown}; it has the fewer calls, {choice.loads.calls[chosen]}"


class ConsistentHashing:
    """Hashes the beginning of a prompt to a ring; replicas above a bound of the mean load are passed over.

    A replica that comes or goes moves only the prompts next to its places on the ring.
    """

    name = "consistent-hashing"
    follows = False

    def __init__(self) -> None:
        self._places: dict[int, list[int]] = {}  # replica → its places on the ring
        self._rings: dict[bytes, list[tuple[int, int]]] = {}  # replicas → (place, replica), ascending; the last one

    def choose(self, choice: Choice) -> tuple[int, str]:
        calls = choice.loads.calls
        most = math.ceil(LOAD_BOUND * (int(calls[choice.replicas].sum()) + 1) / len(choice.replicas))
        ring = self._ring(choice.replicas)
        start = bisect_left(ring, (self._hash_of(choice.call), -1))
        passed: dict[int, None] = {}
        for step in range(len(ring)):
            _, replica = ring[(start + step) % len(ring)]
            if calls[replica] < most:
                return replica, f"next on the ring{f'; {len(passed)} above {most - 1} calls passed' if passed else ''}"
            passed[replica] = None
        raise AssertionError("some replica has at most the mean load")

    def _ring(self, replicas: NDArray[np.int64]) -> list[tuple[int, int]]:
        key = replicas.tobytes()
        if key not in self._rings:
            places = sorted((place, replica) for replica in replicas.tolist() for place in self._of(replica))
            self._rings = {key: places}
        return self._rings[key]

    def _of(self, replica: int) -> list[int]:
        if replica not in self._places:
            self._places[replica] = [_draw(replica, place, 3, 1 << 64) for place in range(RING_PLACES)]
        return self._places[replica]

    @staticmethod
    def _hash_of(call: Placing) -> int:
        hasher = hashlib.blake2b(digest_size=8)
        for place, name in ((0, call.salt), *call.borders):
            if place < HASHED_TOKENS:
                encoded = name.encode()
                hasher.update(place.to_bytes(8, "little") + len(encoded).to_bytes(8, "little") + encoded)
        hasher.update(call.tokens[: HASHED_TOKENS * TOKEN_BYTES])
        return int.from_bytes(hasher.digest(), "little")


_MAKERS: Mapping[str, Callable[[CacheAwareSettings, int], PlacementPolicy]] = {
    "added-delay": lambda settings, seed: AddedDelay(),
    "cache-aware": lambda settings, seed: CacheAware(settings),
    "round-robin": lambda settings, seed: RoundRobin(),
    "random": lambda settings, seed: Random(seed),
    "power-of-two": lambda settings, seed: PowerOfTwo(seed),
    "consistent-hashing": lambda settings, seed: ConsistentHashing(),
}
POLICIES: Sequence[str] = tuple(_MAKERS)


def policy_named(name: str, settings: CacheAwareSettings | None = None, seed: int = 0) -> PlacementPolicy:
    """Makes the policy of a name. `seed`: of those that draw.

    Raises:
        ValueError: there is none of this name; names those that there are.
    """
    if name not in _MAKERS:
        raise ValueError(f"no placement policy is called {name!r}; write one of {', '.join(POLICIES)}")
    return _MAKERS[name](settings if settings is not None else CacheAwareSettings(), seed)
