"""Gateway, frames and scheduler under faults: every request ends once, honestly, and nothing leaks."""

import datetime
from collections import Counter

import pytest

from ..simulation import World, verify

EVENTS = 60


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.nightly] * (seed > 0)) for seed in range(5)])
@pytest.mark.sampled(4)
def test_every_request_ends_once_with_an_honest_text_whatever_dies(seed: int, overlap: bool, replicas: int) -> None:
    world = World(seed, overlap=overlap, replicas=replicas)
    world.run(EVENTS)
    outcomes = verify(world)
    assert outcomes["Final"] > 5


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("seed", [100, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (101, 102, 103))])
def test_lost_frames_cost_their_requests_and_never_leave_a_gap(seed: int, replicas: int) -> None:
    world = World(seed, loss=0.01, replicas=replicas)
    world.run(EVENTS)
    verify(world)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(4))
def test_two_hundred_new_histories_of_two_and_three_engines(part: int) -> None:
    """The seeds are those of the day: five nights are a thousand histories."""
    first = 200 * datetime.date.today().toordinal() + 50 * part
    for seed in range(first, first + 50):
        print(f"World(seed={seed})")  # the last one is that of a failure
        world = World(seed, loss=(0.0, 0.004)[seed % 2], replicas=2 + seed % 2)
        world.run(300)
        verify(world)


@pytest.mark.nightly
def test_the_same_seed_gives_the_same_history() -> None:
    traces = []
    for _ in range(2):
        world = World(3, loss=0.005)
        world.run(EVENTS)
        traces.append(world.trace.hexdigest())
    other = World(4, loss=0.005)
    other.run(EVENTS)
    assert traces[0] == traces[1] != other.trace.hexdigest()


@pytest.mark.nightly
def test_the_simulation_reaches_every_kind_of_ending() -> None:
    """A simulation that never kills, expires or aborts anything would prove nothing."""
    seen: Counter[str] = Counter()
    kills, retried = 0, 0
    cached: Counter[str] = Counter()
    for seed in range(34, 42):
        world = World(seed, loss=0.004)
        world.run(EVENTS)
        seen += verify(world)
        kills += world.kills
        retried += world.gateway.counters["retried_requests"]
        cached += world.gateway.counters
    assert kills > 0
    assert retried > 0
    assert min(cached[f"caches_{how}"] for how in ("made", "expired", "lost")) > 0
    assert cached["cache_read_tokens"] > 0
    assert {"Final", "Scored", "EngineError", "DeadlineError"} <= set(seen)
