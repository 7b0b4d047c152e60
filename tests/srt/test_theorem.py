"""Theorem 3.1 of the paper: with a cache at least as large as the longest request, visiting the radix tree of the
requests depth first computes every edge once, which no order can beat; and longest prefix first is such an order.
"""

from itertools import permutations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.lang.sampling import SamplingParams
from umbel.srt.scheduler import PolicyName

from .engine_harness import Engine

PROMPT_ONLY = SamplingParams(temperature=0.0, max_tokens=0)
Requests = list[tuple[int, ...]]

requests = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=7).map(tuple), min_size=1, max_size=12)


def sum_of_edges(batch: Requests) -> int:
    """Tokens of the radix tree of the batch: its distinct prefixes."""
    return len({tokens[: i + 1] for tokens in batch for i in range(len(tokens))})


def computed(batch: Requests, pool: int, policy: PolicyName, **settings_: object) -> float:
    """Keys computed when the whole batch waits from the start."""
    engine = Engine(pool=pool, policy=policy, headroom=0, max_wait=1e9, **settings_)
    for tokens in batch:
        engine.generate(tokens, PROMPT_ONLY)
    engine.run()
    assert len(engine.endings) == len(batch)
    return engine.count("computed_prompt_tokens")


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


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batch=st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=5).map(tuple), min_size=2, max_size=4))
def test_no_order_computes_less(batch: Requests) -> None:
    pool = max(map(len, batch))
    best = min(computed(list(order), pool, PolicyName.FCFS, max_running=1) for order in permutations(batch))
    assert computed(batch, pool, PolicyName.LPM, max_running=1) == best == sum_of_edges(batch)


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
