"""Theorem 3.1 of the paper: with a cache at least as large as the longest request, visiting the radix tree of the
requests depth first computes every edge once, which no order can beat; and longest prefix first is such an order.
"""

from collections.abc import Sequence
from itertools import permutations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.lang.sampling import SamplingParams
from umbel.srt.cache.radix_cache import RadixCache
from umbel.srt.cache.slot_allocator import SlotAllocator
from umbel.srt.scheduler.scheduler import PolicyName

from ..engine_harness import Engine

PROMPT_ONLY = SamplingParams(temperature=0.0, max_tokens=0)
Requests = list[tuple[int, ...]]

requests = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=7).map(tuple), min_size=1, max_size=12)


def sum_of_edges(batch: Requests) -> int:
    """Tokens of the radix tree of the batch: its distinct prefixes."""
    return len({tokens[: i + 1] for tokens in batch for i in range(len(tokens))})


def computed(batch: Requests, pool: int, policy: PolicyName, forks: Sequence[str] = (), **settings_: object) -> float:
    """Keys computed when the whole batch waits from the start. `forks`: the fork group of each request."""
    engine = Engine(pool=pool, policy=policy, headroom=0, max_wait=1e9, **settings_)
    for i, tokens in enumerate(batch):
        group = forks[i] if forks else ""
        engine.generate(tokens, PROMPT_ONLY, program_id=group[:1], fork_group=group)
    engine.run()
    assert len(engine.endings) == len(batch)
    return engine.count("computed_prompt_tokens")


def test_a_call_that_is_left_over_does_not_end_a_subtree_early() -> None:
    """Found by the property below: (1, 1) was called in the subtree of 2, and went before (1, 2) in its own."""
    batch = [(2,), (1,), (1,), (2, 2), (1,), (1, 2), (1, 1), (1, 2), (2, 1)]
    forks = ["", "", "", "ph", "", "", "ph", "pg", "pg"]
    assert computed(batch, 2, PolicyName.LPM, forks, max_running=1) == sum_of_edges(batch)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=requests, slack=st.integers(0, 3))
def test_longest_prefix_first_computes_every_edge_once(batch: Requests, slack: int) -> None:
    pool = max(map(len, batch)) + slack
    assert computed(batch, pool, PolicyName.LPM, max_running=1) == sum_of_edges(batch)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=requests, extra=st.integers(0, 20))
def test_it_does_so_for_requests_that_run_together(batch: Requests, extra: int) -> None:
    pool = max(map(len, batch)) + extra
    assert computed(batch, pool, PolicyName.LPM) == sum_of_edges(batch)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=requests, extra=st.integers(0, 12), running=st.sampled_from([1, 3, 64]), data=st.data())
def test_calling_siblings_keeps_the_order_depth_first(
    batch: Requests, extra: int, running: int, data: st.DataObject
) -> None:
    """Whatever requests are said to be branches of one fork."""
    forks = [data.draw(st.sampled_from(["", "pg", "ph", "qg"])) for _ in batch]
    pool = max(map(len, batch)) + extra
    assert computed(batch, pool, PolicyName.LPM, forks, max_running=running) == sum_of_edges(batch)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=5).map(tuple), min_size=2, max_size=6))
def test_no_order_computes_less(batch: Requests) -> None:
    """All orders of at most 6 requests, in a cache as large as the longest, by the tree itself."""
    pool = max(map(len, batch))
    best = min(served_in_turn(order, pool) for order in set(permutations(batch)))
    assert computed(batch, pool, PolicyName.LPM, max_running=1) == best == sum_of_edges(batch)


def served_in_turn(order: Sequence[tuple[int, ...]], pool_size: int) -> int:
    """Keys computed by one request after the other, with least recently used eviction."""
    pool = SlotAllocator(pool_size + 1)
    cache = RadixCache(pool)
    total = 0
    for tokens in order:
        sequence = np.array(tokens, dtype=np.int32)
        match = cache.match(sequence, "")
        cache.lock(match)
        missing = len(sequence) - match.length
        if missing:
            cache.evict(missing - pool.free)
            match = cache.extend(match, sequence[match.length :], pool.allocate(missing))
        cache.unlock(match)
        total += missing
    return total


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=requests, policy=st.sampled_from(list(PolicyName)), extra=st.integers(0, 6), running=st.integers(1, 3))
def test_no_policy_computes_less_than_every_edge(batch: Requests, policy: PolicyName, extra: int, running: int) -> None:
    pool = max(map(len, batch)) + extra
    assert computed(batch, pool, policy, max_running=running) >= sum_of_edges(batch)


def test_first_come_first_served_thrashes_where_the_theorem_does_not() -> None:
    batch = [(1, 1, 1, 1, i) if i % 2 else (2, 2, 2, 2, i) for i in range(1, 9)]
    pool = 5
    assert computed(batch, pool, PolicyName.LPM, max_running=1) == sum_of_edges(batch) == 16
    assert computed(batch, pool, PolicyName.FCFS, max_running=1) == 40


def test_online_arrivals_stay_near_the_optimum() -> None:
    """Two families arrive mixed, four at a time, into a cache that holds one of them and a little more."""
    stems = [(1,) * 12, (2,) * 12]
    batch = [(*stems[i % 2], 3 + i // 20, 3 + i % 20) for i in range(80)]
    rates = {}
    for policy in PolicyName:
        engine = Engine(pool=20, policy=policy, headroom=0, max_running=1, max_wait=1e9, context=60)
        for i, tokens in enumerate(batch):
            engine.generate(tokens, PROMPT_ONLY)
            if i % 4 == 3:
                for _ in range(3):
                    engine.step()
        engine.run()
        rates[policy] = engine.count("cached_tokens") / engine.count("prompt_tokens")
    optimum = 1 - sum_of_edges(batch) / sum(map(len, batch))
    assert rates[PolicyName.LPM] > 0.94 * optimum
    assert rates[PolicyName.FCFS] < 0.5 * optimum
