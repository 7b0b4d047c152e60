"""Policies on replicas with real radix trees and closed-form service times: what is computed, and how long calls wait.

`python -m tests.srt.placement.test_policy_trials` prints the figures of all policies.
"""

import functools
import random

import pytest
from umbel.srt.placement.meta_tree import packed
from umbel.srt.placement.placement import Placement
from umbel.srt.placement.policies import POLICIES, Placing

from .coarse_replicas import Outcome, run

REPLICAS, PREFIXES, PREFIX_LENGTH, REST = 8, 64, 1000, 60
ROOM = 11 * (PREFIX_LENGTH + REST) + 400
WORK = 25  # tokens that a call generates


def tokens(source: random.Random, count: int) -> bytes:
    return packed(source.randrange(1 << 18) for _ in range(count))


def few_shot(count: int, rate: float | None, seed: int = 1) -> list[tuple[float, Placing]]:
    """Returns calls with one of some prefixes each, and the times at which they come; `rate` None: all at once."""
    source = random.Random(seed)
    prefixes = [tokens(source, PREFIX_LENGTH) for _ in range(PREFIXES)]
    calls, time = [], 0.0
    for _ in range(count):
        calls.append((time, Placing(source.choice(prefixes) + tokens(source, REST), work=WORK)))
        time += source.expovariate(rate) if rate is not None else 0.0
    return calls


@functools.cache
def trial(policy: str, rate: float | None, delay: float = 0.0, count: int = 1500) -> Outcome:
    placement = Placement(policy, range(REPLICAS))
    for replica in range(REPLICAS):
        placement.room(replica, ROOM)
    outcome = run(placement, [ROOM] * REPLICAS, few_shot(count, rate), delay=delay)
    placement.check()
    return outcome


def test_many_prefixes_on_few_caches() -> None:
    """64 prefixes of 1,000 tokens, 8 replicas with room for 11 each, all calls at once."""
    ours, turns = trial("added-delay", None), trial("round-robin", None)
    assert ours.throughput >= 2.5 * turns.throughput
    assert ours.hit_rate >= 3 * turns.hit_rate
    assert ours.throughput >= trial("cache-aware", None).throughput


@pytest.mark.nightly
def test_short_queues_do_not_spread_prefixes() -> None:
    """At half the load that saturates them, the policy keeps what it has, also where events come late."""
    for delay in (0.0, 0.1):
        ours = trial("added-delay", 60.0, delay)
        assert ours.hit_rate >= trial("added-delay", None).hit_rate - 0.02
        assert sum(ours.waits) < sum(trial("cache-aware", 60.0, delay).waits) * 1.2


def forks(policy: str, branches: int, count: int, *, grouped: bool = True) -> list[float]:
    """Returns for each of some cold forks how often its prefix was computed, on 2 replicas."""
    source = random.Random(branches)
    found = []
    for fork in range(count):
        prefix = tokens(source, 2000)
        group = f"fork {fork}" if grouped else ""
        calls = [(0.0, Placing(prefix + tokens(source, 20), group=group, work=WORK)) for _ in range(branches)]
        outcome = run(Placement(policy, range(2)), [60_000] * 2, calls)
        found.append((sum(outcome.computed) - 20 * branches) / 2000)
    return found


@pytest.mark.parametrize("branches", [2, 4, 8])
def test_a_cold_fork_computes_its_prefix_once(branches: int) -> None:
    assert forks("added-delay", branches, 100) == [1.0] * 100
    assert min(forks("round-robin", branches, 3)) == 2.0


def test_cold_forks_of_many_programs_at_once_compute_each_prefix_once() -> None:
    """The replicas are loaded by the other forks while the branches come, one from each fork in turn."""
    source = random.Random(0)
    prefixes = [tokens(source, 2000) for _ in range(12)]
    calls = [
        (0.001 * turn, Placing(prefix + tokens(source, 20), group=f"fork {fork}", program=f"run {fork}", work=WORK))
        for turn in range(8)
        for fork, prefix in enumerate(prefixes)
    ]
    outcome = run(Placement("added-delay", range(2)), [60_000] * 2, calls)
    assert sum(outcome.computed) == 12 * 2000 + 12 * 8 * 20
    assert max(outcome.placed) == min(outcome.placed)


@pytest.mark.parametrize("rate", [None, 150.0, 30.0])
def test_a_hot_prefix_keeps_no_replica_idle_while_another_has_twice_the_mean(rate: float | None) -> None:
    source = random.Random(2)
    prefix, time, calls = tokens(source, 4000), 0.0, []
    for _ in range(400):
        calls.append((time, Placing(prefix + tokens(source, 20), work=WORK)))
        time += source.expovariate(rate) if rate is not None else 0.0
    placement = Watched("added-delay", range(4))
    outcome = run(placement, [60_000] * 4, calls)
    assert placement.worst <= 2.0
    assert max(outcome.placed) <= 2 * sum(outcome.placed) / 4


class Watched(Placement):
    """Notes the greatest load over the mean at moments at which a replica has no call and another more than 4."""

    worst = 0.0

    def place(self, call: Placing, now: float, exclude: frozenset[int] = frozenset()) -> object:
        placed = super().place(call, now, exclude)
        running = [facts.running for facts in self.facts().replicas]
        if min(running) == 0 and max(running) > 4:
            self.worst = max(self.worst, max(running) * len(running) / sum(running))
        return placed


def main() -> None:
    for rate in (None, 60.0, 100.0):
        print(f"{'all at once' if rate is None else f'{rate:.0f} calls a second'}: 8 replicas, 64 prefixes")
        for policy in POLICIES:
            outcome = trial(policy, rate)
            wait = sum(outcome.waits) / outcome.calls
            most = max(outcome.placed) / outcome.calls * REPLICAS
            print(
                f"  {policy:20} hit rate {outcome.hit_rate:.3f}, {outcome.throughput:6.1f} calls/s, "
                f"most/mean {most:.2f}, wait {wait:6.2f} s"
            )
    for branches in (2, 4, 8):
        means = {name: sum(forks(name, branches, 100)) / 100 for name in ("added-delay", "cache-aware", "round-robin")}
        print(f"cold forks of {branches}: prefix computed on average", means)


if __name__ == "__main__":
    main()
