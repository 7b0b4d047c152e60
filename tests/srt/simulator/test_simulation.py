"""Whole simulations: exact against the optimum and against what must hold, coarse against exact."""

from collections.abc import Set as AbstractSet
from pathlib import Path

import pytest
from umbel.lang.errors import ParameterError
from umbel.srt.placement.placement import Placed, Placement
from umbel.srt.placement.policies import AddedDelay, Choice, Placing
from umbel.srt.simulator.arrivals import ClosedLoop, Poisson
from umbel.srt.simulator.command import Plan, open_scenario, simulate
from umbel.srt.simulator.exact import ReplicaShape
from umbel.srt.simulator.measurements import SimulationResult
from umbel.srt.simulator.tiers import parse_tiers

WORKLOADS = Path(__file__).parents[3] / "benchmarks" / "workloads"


def run(
    name: str, plan: Plan | None = None, *, pool: int = 1 << 20, first: int | None = None, poisson: float = 0.0
) -> SimulationResult:
    shape = ReplicaShape(pool=pool)
    arrivals = Poisson(poisson) if poisson else None
    scenario = open_scenario(name, arrivals, model="oracle", settings=shape, first=first)
    result, _ = simulate(scenario, plan or Plan())
    return result


def test_one_replica_with_room_reaches_the_optimum() -> None:
    result = run("prefixes=8,prefix=100,own=10,requests=60")
    assert result.hit_rate == result.optimal_hit_rate
    assert result.calls == 60
    assert result.seconds > 0
    assert result.waiting.p50 <= result.first_token.p50 <= result.call.p50


def test_a_simulation_repeats_itself() -> None:
    name, plan = "prefixes=8,prefix=100,own=10,requests=60,output=5", Plan(replicas=3)
    assert run(name, plan, poisson=20) == run(name, plan, poisson=20)


COMPARED = [("mmlu_5shot", 12), ("react_agent", 4), ("hellaswag_20shot", 4), ("multi_turn_chat_short", 6)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("workload", "first", "replicas"),
    [
        *((*compared, 3) for compared in COMPARED),
        (*COMPARED[0], 1),
        *(pytest.param(*compared, 1, marks=pytest.mark.nightly) for compared in COMPARED[1:]),
    ],
)
@pytest.mark.nightly
def test_coarse_is_near_exact_on_workload_files(workload: str, first: int, replicas: int) -> None:
    path = str(WORKLOADS / f"{workload}.jsonl")
    exact = run(path, Plan(replicas=replicas), first=first)
    coarse = run(path, Plan(coarse=True, replicas=replicas), first=first)
    assert coarse.hit_rate == pytest.approx(exact.hit_rate, abs=0.02)
    assert coarse.calls_per_second == pytest.approx(exact.calls_per_second, rel=0.1)
    assert coarse.optimal_cached_tokens is not None


def test_coarse_is_near_exact_where_the_pool_is_short() -> None:
    name = "prefixes=12,prefix=200,own=20,requests=150,output=4"
    exact, coarse = run(name, pool=1_500, poisson=10), run(name, Plan(coarse=True), pool=1_500, poisson=10)
    assert exact.hit_rate < exact.optimal_hit_rate - 0.05  # otherwise nothing was short
    assert coarse.hit_rate == pytest.approx(exact.hit_rate, abs=0.02)
    assert coarse.calls_per_second == pytest.approx(exact.calls_per_second, rel=0.1)


def test_four_replicas_are_four_times_one_with_their_cache_together() -> None:
    name = "prefixes=57,prefix=100,own=14,requests=600"
    one, four = run(name, pool=8_000), run(name, Plan(replicas=4), pool=2_000)
    assert four.calls_per_second > 0.9 * 4 * one.calls_per_second
    assert four.hit_rate > 0.95 * one.hit_rate


@pytest.mark.parametrize("coarse", [False, True])
def test_placement_beats_taking_turns(coarse: bool) -> None:
    """Eight replicas with room for eleven of 64 prefixes each."""
    name, plan = "prefixes=64,prefix=200,own=12,requests=800", Plan(coarse=coarse, replicas=8)
    placed = run(name, plan, pool=11 * 212)
    turns = run(name, Plan(coarse=coarse, replicas=8, policy="round-robin"), pool=11 * 212)
    assert placed.hit_rate > 1.5 * turns.hit_rate
    assert placed.calls_per_second > 1.5 * turns.calls_per_second


@pytest.mark.nightly
def test_eight_coarse_replicas_beat_taking_turns_by_far() -> None:
    name, plan = "prefixes=64,prefix=1000,own=60,requests=1500", Plan(coarse=True, replicas=8)
    placed = run(name, plan, pool=11_660)
    turns = run(name, Plan(coarse=True, replicas=8, policy="round-robin"), pool=11_660)
    assert placed.hit_rate >= 3 * turns.hit_rate
    assert placed.calls_per_second >= 2.5 * turns.calls_per_second


@pytest.mark.parametrize("coarse", [False, True])
def test_placement_knows_pools_and_speeds(coarse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls come seldom: no replica counts as late because it has told nothing since the last one."""
    rooms: dict[int, int] = {}
    speeds: set[tuple[int, str]] = set()

    class Knowing(Placement):
        def room(self, replica: int, tokens: int) -> None:
            rooms[replica] = tokens
            super().room(replica, tokens)

        def rates(self, replica: int, **rates: float | None) -> None:
            speeds.update((replica, kind) for kind in rates)
            super().rates(replica, **rates)

        def place(self, call: Placing, now: float, exclude: AbstractSet[int] = frozenset()) -> Placed | None:
            assert not exclude
            return super().place(call, now, exclude)

    for module in ("placement.placement", "simulator.coarse"):
        monkeypatch.setattr(f"umbel.srt.{module}.Placement", Knowing)
    run("prefixes=9,prefix=300,own=20,requests=40,output=16", Plan(coarse=coarse, replicas=3), pool=5_000, poisson=0.5)
    assert rooms == {0: 5_000, 1: 5_000, 2: 5_000}
    assert speeds >= {(replica, kind) for replica in range(3) for kind in ("prefill", "decode")}


@pytest.mark.parametrize("coarse", [False, True])
def test_below_saturation_prefixes_stay_where_they_are(coarse: bool) -> None:
    """Without the size of the pools, calls that meet a queue copy prefixes to idle replicas: 0.80 and 0.66 of it."""
    name = "prefixes=64,prefix=200,own=12,requests=500"
    result = run(name, Plan(coarse=coarse, replicas=8), pool=11 * 212, poisson=40)
    assert result.optimal_hit_rate is not None
    assert result.hit_rate > 0.9 * result.optimal_hit_rate


@pytest.mark.nightly
def test_near_capacity_no_call_is_placed_at_a_hot_replica_while_another_idles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads drift apart as calls end: then the next call goes to one that idles, so it does not last."""
    choose, overloads = AddedDelay.choose, []

    def watched(policy: AddedDelay, choice: Choice) -> tuple[int, str]:
        chosen, why = choose(policy, choice)
        before = choice.loads.calls
        after = before + (choice.replicas == chosen)
        if after.sum() >= 4 * len(after) and before.min() == 0:
            too_many, was_idle = before.max() > 1.75 * before.mean(), before[chosen] == 0
            overloads.append(bool((too_many and not was_idle) or after[chosen] > max(4, 2 * after.mean())))
        return chosen, why

    monkeypatch.setattr(AddedDelay, "choose", watched)
    name = "prefixes=64,prefix=1000,own=60,requests=1000,skew=1.5"
    result = run(name, Plan(replicas=8), pool=11_660, poisson=25)
    assert len(overloads) > 10
    assert not any(overloads)
    assert result.most_over_mean is not None
    assert 0 < result.most_over_mean <= 2
    assert result.hit_rate > 0.85


def test_no_replica_is_overloaded_by_a_hot_prefix_while_another_idles() -> None:
    """One prefix has two thirds of the calls."""
    result = run("prefixes=20,prefix=200,own=12,requests=500,skew=2", Plan(replicas=4), pool=4_000, poisson=80)
    assert result.most_over_mean is not None
    assert result.most_over_mean <= 2


def test_clients_that_wait_are_never_more_than_they_are() -> None:
    scenario = open_scenario("prefixes=4,prefix=50,requests=40", ClosedLoop(5), settings=ReplicaShape(pool=5_000))
    _, measurements = simulate(scenario, Plan(replicas=2))
    _, loads = measurements.loads(200)
    assert int(loads.sum(axis=0).max()) == 5


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("tier", ["host", "disk", "store"])
@pytest.mark.sampled(4)
def test_a_slower_tier_brings_what_was_evicted(tier: str, coarse: bool) -> None:
    name, tiers = "prefixes=20,prefix=256,own=16,requests=150", parse_tiers(f"{tier}=20000")
    without = run(name, Plan(coarse=coarse), pool=1_200, poisson=2)
    brought = run(name, Plan(coarse=coarse, tiers=tiers), pool=1_200, poisson=2)
    assert brought.tier_tokens[tier] > 0
    assert brought.computed_tokens < without.computed_tokens / 2
    assert brought.first_token.mean < without.first_token.mean


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tiers", ["host=20000", "disk=8000", "host=2000,disk=10000,store=20000"])
@pytest.mark.nightly
def test_coarse_is_near_exact_with_tiers(tiers: str) -> None:
    """Of fewer calls one prefix, found or not, would be half a point."""
    name, places = "prefixes=20,prefix=256,own=16,requests=400,output=4", parse_tiers(tiers)
    exact = run(name, Plan(tiers=places, replicas=2), pool=1_200, poisson=4)
    coarse = run(name, Plan(tiers=places, replicas=2, coarse=True), pool=1_200, poisson=4)
    assert sum(exact.tier_tokens.values()) > 0
    assert coarse.hit_rate == pytest.approx(exact.hit_rate, abs=0.02)
    assert coarse.calls_per_second == pytest.approx(exact.calls_per_second, rel=0.1)


@pytest.mark.parametrize("coarse", [False, True])
def test_a_tier_that_is_slower_than_computing_is_left_alone(coarse: bool) -> None:
    name, tiers = "prefixes=20,prefix=256,own=16,requests=100", parse_tiers("disk=20000@10")
    plain = run(name, Plan(coarse=coarse), pool=1_200, poisson=2)
    slow = run(name, Plan(coarse=coarse, tiers=tiers), pool=1_200, poisson=2)
    assert slow.tier_tokens == {}
    assert slow.computed_tokens == plain.computed_tokens


@pytest.mark.nightly
def test_others_run_while_a_disk_loads() -> None:
    """Loads of 0.1 s: a call that waits for pages holds up none that has all on the device."""
    name, tiers = "prefixes=20,prefix=256,own=16,requests=150,output=8", parse_tiers("disk=20000@2500")
    result = run(name, Plan(tiers=tiers), pool=1_200, poisson=2)
    assert result.tier_tokens["disk"] > 0
    assert result.by_replica[0].busy < 0.7
    assert result.first_token.mean < run(name, pool=1_200, poisson=2).first_token.mean


@pytest.mark.parametrize("coarse", [False, True])
def test_the_store_is_one_for_all_replicas(coarse: bool) -> None:
    name = "prefixes=3,prefix=640,own=16,requests=60"
    plans = [
        Plan(coarse=coarse, replicas=4, policy="round-robin", tiers=parse_tiers(f"{tier}=20000"))
        for tier in ("store", "disk")
    ]
    store, disk = (run(name, plan, pool=1_000, poisson=0.5) for plan in plans)
    assert store.computed_tokens < disk.computed_tokens
    assert store.tier_tokens["store"] > disk.tier_tokens["disk"]


def test_tiers_and_modes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ParameterError, match="at most 64"):
        run("prefixes=2,requests=4", Plan(replicas=65))
    for text in ("host", "tape=1000", "host=10", "host=1000@0", "host=1000,host=2000"):
        with pytest.raises(ParameterError):
            parse_tiers(text)


@pytest.mark.nightly
def test_a_thousand_replicas() -> None:
    plan = Plan(coarse=True, replicas=1_000)
    result = run("prefixes=3000,prefix=1000,own=60,requests=20000", plan, pool=11_660, poisson=5_000)
    assert result.calls == 20_000
    assert result.hit_rate > 0.6
