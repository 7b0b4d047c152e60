"""The router's decisions, with replicas that are names."""

import random

import pytest
from umbel.server.ray.keys import RoutingKey
from umbel.server.ray.placements import LOST_SECONDS, Call, NoReplicaError, Placements


def replicas(*names: str, **told: float) -> dict[str, dict[str, float]]:
    return dict.fromkeys(names, told)


def prompt(text: str, group: str = "", salt: str = "", work: int = 8) -> Call:
    return Call(RoutingKey(salt=salt, units=text.encode("utf-32-le"), group=group, work=work))


def opened(*names: str, policy: str = "added-delay") -> Placements:
    placements = Placements(policy, clock=lambda: 0.0)
    placements.set_replicas(replicas(*names))
    return placements


def answered(placements: Placements, call: Call) -> str:
    """Places a call and lets it end well."""
    chosen = placements.place(call)
    call.begin()
    call.end()
    return chosen


LONG = "a manual of some length, which all questions begin with; " * 8


def test_a_call_goes_where_its_prefix_went() -> None:
    placements = opened("a", "b")
    first = answered(placements, prompt(LONG + "one"))
    assert {answered(placements, prompt(LONG + str(number))) for number in range(20)} == {first}
    assert answered(placements, prompt("of another kind " * 20)) != first


def test_salts_share_nothing() -> None:
    placements = opened("a", "b")
    first = answered(placements, prompt(LONG, salt="x"))
    assert answered(placements, prompt(LONG, salt="y")) != first


def test_a_call_counts_from_its_placement_to_its_end() -> None:
    placements = opened("a", "b")
    calls = [prompt(f"{number} {LONG}") for number in range(6)]
    for call in calls:
        placements.place(call)
    assert placements.calls() == {"a": 3, "b": 3}
    for call in calls:
        call.end()
        call.end()
    assert placements.calls() == {"a": 0, "b": 0}


@pytest.mark.parametrize("branches", [2, 4, 8])
def test_the_branches_of_a_fork_stay_together_from_the_first_on(branches: int) -> None:
    placements = opened("a", "b", "c")
    calls = [prompt(f"{LONG} branch {number}", group="fork") for number in range(branches)]
    assert len({placements.place(call) for call in calls}) == 1


def test_an_excluded_replica_is_not_chosen_again() -> None:
    placements = opened("a", "b")
    call = prompt(LONG)
    first = placements.place(call)
    call.refused()
    second = placements.place(call)
    assert {first, second} == {"a", "b"}
    assert placements.calls() == {first: 0, second: 1}  # the first placement has ended
    call.refused()
    with pytest.raises(NoReplicaError):
        placements.place(call)
    assert placements.calls() == {"a": 0, "b": 0}


def test_without_replicas_nothing_is_waited_for() -> None:
    placements = Placements("added-delay")
    with pytest.raises(NoReplicaError):
        placements.place(prompt(LONG))


def test_a_replica_that_is_lost_is_not_chosen_for_a_while_and_has_lost_its_cache() -> None:
    now = [0.0]
    placements = Placements("added-delay", clock=lambda: now[0])
    placements.set_replicas(replicas("a", "b"))
    lost = answered(placements, prompt(LONG))
    placements.lost(lost)
    placements.lost(lost)
    (other,) = {"a", "b"} - {lost}
    assert answered(placements, prompt(LONG)) == other
    placements.set_replicas(replicas("a", "b"))
    assert placements.calls() == {other: 0}
    now[0] += LOST_SECONDS
    assert answered(placements, prompt(LONG)) == other
    assert placements.calls() == {"a": 0, "b": 0}


def test_a_replica_that_a_call_does_not_reach_gets_no_other_one() -> None:
    placements = opened("a", "b")
    call = prompt(LONG)
    lost = placements.place(call)
    call.refused(unreachable=True)
    assert lost not in placements.calls()
    assert placements.place(call) != lost


def test_a_call_ends_though_its_replica_has_gone() -> None:
    placements = opened("a", "b")
    call = prompt(LONG)
    lost = placements.place(call)
    placements.set_replicas(replicas(*({"a", "b"} - {lost})))
    placements.set_replicas(replicas("a", "b"))
    call.begin()
    call.end()
    assert placements.calls() == {"a": 0, "b": 0}


def test_a_replica_that_was_flushed_is_known_to_have_nothing() -> None:
    placements = opened("a", "b")
    first = answered(placements, prompt(LONG))
    placements.set_replicas(replicas("a", "b", cached=100.0))
    assert answered(placements, prompt(LONG)) == first
    placements.set_replicas(replicas("a", "b", cached=0.0))
    holder = prompt("1" + LONG)  # so that load is least at the other one
    while placements.place(holder) != first:
        holder = prompt("2" + LONG)
    assert placements.place(prompt(LONG)) != first


def test_the_copy_of_a_replica_is_not_larger_than_its_pool() -> None:
    placements = opened("a")
    for number in range(50):
        answered(placements, prompt(f"{number} {LONG}"))
    placements.set_replicas(replicas("a", pool=1000.0))
    assert placements.cached_tokens() == {"a": pytest.approx(1000, abs=len(LONG))}
    assert placements.cached_tokens()["a"] <= 1000


def test_a_slow_replica_gets_less() -> None:
    placements = Placements("added-delay", clock=lambda: 0.0)
    placements.set_replicas({"slow": {"prefill_rate": 100.0}, "fast": {"prefill_rate": 10_000.0}})
    chosen = [placements.place(prompt(f"{number} {LONG}", work=0)) for number in range(40)]
    assert chosen.count("fast") > 3 * chosen.count("slow")


@pytest.mark.parametrize("policy", ["added-delay", "cache-aware", "round-robin", "random", "power-of-two"])
@pytest.mark.parametrize("seed", range(5))
def test_no_count_is_lost_whatever_happens(policy: str, seed: int) -> None:
    draw = random.Random(seed)
    now = [0.0]
    placements = Placements(policy, clock=lambda: now[0])
    names = ["a", "b", "c", "d"]
    there: set[str] = set()  # and not lost
    live: list[Call] = []
    for _ in range(400):
        match draw.randrange(6):
            case 0:
                now[0] += LOST_SECONDS
                there = set(draw.sample(names, draw.randrange(5)))
                placements.set_replicas(replicas(*there, cached=float(draw.randrange(3)), pool=500.0))
            case 1 if there:
                gone = draw.choice(sorted(there))
                there.discard(gone)
                placements.lost(gone)
            case 2 if live:
                live.pop(draw.randrange(len(live))).end()
            case 3 if live:
                draw.choice(live).begin()
            case _:
                call = prompt(draw.choice("pqr") * draw.randrange(1, 200), draw.choice(["", "g"]))
                if there:
                    assert placements.place(call) in there
                    live.append(call)
                else:
                    with pytest.raises(NoReplicaError):
                        placements.place(call)
    now[0] += LOST_SECONDS
    placements.set_replicas(replicas(*names))
    for call in live:
        call.end()
    assert placements.calls() == dict.fromkeys(names, 0)
