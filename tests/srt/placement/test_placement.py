"""Where calls go: policies on small cases, loads, groups, replicas that come and go."""

import random

import pytest
from umbel.srt.core.messages import CacheCleared, NodeAdded, NodeExtended, NodeRemoved, TierRooms
from umbel.srt.placement.meta_tree import packed
from umbel.srt.placement.placement import GROUP_IMBALANCE, PROGRAM_IMBALANCE, Placed, Placement
from umbel.srt.placement.policies import POLICIES, Placing, policy_named

PREFIX = packed(range(1000))


def call(*rest: int, prefix: bytes = PREFIX, **facts: object) -> Placing:
    return Placing(prefix + packed(rest), **facts)


def place(placement: Placement, what: Placing, **facts: object) -> Placed:
    placed = placement.place(what, 0.0, **facts)
    assert placed is not None
    return placed


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_places_on_replicas_that_are_up(name: str) -> None:
    placement = Placement(name, range(4), seed=3)
    placement.down(1)
    chosen = [place(placement, call(n, prefix=packed([n] * 50)), exclude={2}) for n in range(40)]
    assert {placed.replica for placed in chosen} == {0, 3}
    assert all(placed.reason for placed in chosen)
    placement.check()
    assert placement.place(call(), 0.0, exclude={0, 2, 3}) is None


def test_an_unknown_policy_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match="added-delay, cache-aware, round-robin"):
        policy_named("nearest")


def test_round_robin_takes_turns() -> None:
    placement = Placement("round-robin", range(3))
    first = place(placement, call()).replica
    assert [place(placement, call()).replica for _ in range(4)] == [(first + n) % 3 for n in (1, 2, 3, 4)]


def test_the_same_seed_draws_the_same() -> None:
    def draws(name: str, seed: int) -> list[int]:
        placement = Placement(name, range(8), seed=seed)
        return [place(placement, call(n)).replica for n in range(50)]

    for name in ("random", "power-of-two"):
        assert draws(name, 1) == draws(name, 1) != draws(name, 2)
        assert len(set(draws(name, 1))) == 8


def test_a_call_goes_where_its_prefix_is() -> None:
    placement = Placement("added-delay", range(3))
    assert placement.apply(2, [NodeAdded(1, 0, "", PREFIX)])
    placed = place(placement, call(7))
    assert (placed.replica, placed.cached, placed.expected) == (2, 1000, 1000)
    assert place(placement, call(7, salt="other")).replica != 2


def test_a_call_finds_the_prefix_that_a_call_in_flight_brings() -> None:
    placement = Placement("added-delay", range(3))
    first = place(placement, call(7))
    placement.began(first.number, 1.0)
    second = place(placement, call(8))
    assert (second.replica, second.cached, second.expected) == (first.replica, 0, 1000)


def test_an_expectation_ends_with_the_first_events_after_its_call() -> None:
    placement = Placement("added-delay", range(2))
    first = place(placement, call(7))
    placement.ended(first.number, 1.0)
    assert place(placement, call(8)).expected == 1000
    placement.apply(first.replica, [NodeAdded(1, 0, "", packed([1]))])
    for number in (1, 2):
        placement.ended(number, 2.0)
    placement.apply(first.replica, [])
    assert placement.tree.lengths(PREFIX, "", replicas=2).coming.tolist() == [0, 0]
    placement.check()


def test_a_cold_call_goes_where_load_is_least() -> None:
    placement = Placement("added-delay", range(3))
    chosen = [place(placement, call(prefix=packed([n] * size))) for n, size in enumerate((900, 100, 300, 50))]
    assert [placed.replica for placed in chosen] == [0, 1, 2, 1]
    assert "cached nowhere" in chosen[3].reason


def test_a_call_goes_to_an_idle_replica_while_another_has_too_much() -> None:
    """Calls end at some replicas, so the mean falls below what others have; the next call ends that."""
    placement = Placement("added-delay", range(6))
    running = [place(placement, call(number)) for number in range(90)]
    placement.apply(0, [NodeAdded(1, 0, "", PREFIX)])
    for ended in running:
        if ended.replica in (1, 2) or (ended.replica == 0 and ended.number <= 72):
            placement.ended(ended.number, 0.0)
    for replica in (1, 2):
        placement.apply(replica, [])
    assert [facts.running for facts in placement.facts().replicas] == [3, 0, 0, 15, 15, 15]
    placed = place(placement, call(90))
    assert placed.replica in (1, 2)
    assert placed.reason.startswith("4 left out, or one would have over 1.75 times the mean")


@pytest.mark.parametrize("seed", range(4))
def test_no_placement_puts_a_replica_above_twice_the_mean_while_another_idles(seed: int) -> None:
    """One prefix has all calls; they end in any order, many more at some replicas than at others."""
    source, placement = random.Random(seed), Placement("added-delay", range(6))
    running: dict[int, int] = {}  # number → replica
    for number in range(600):
        if running and source.random() < 0.45:
            favoured = [name for name, replica in running.items() if replica < 3] or list(running)
            ended = source.choice(favoured)
            del running[ended]
            placement.ended(ended, 0.0)
        else:
            placed = place(placement, call(number, work=64))
            running[placed.number] = placed.replica
            calls = [facts.running for facts in placement.facts().replicas]
            chosen, mean = calls[placed.replica], sum(calls) / 6
            assert min(calls) > 0 or chosen <= max(4, 2 * mean)
            assert mean < 4 or chosen <= 1.75 * mean
    assert len(running) > 24, "the bound of the mean was not reached"
    placement.check()


def test_load_counts_from_the_placement_until_the_end() -> None:
    placement = Placement("added-delay", range(2))
    placed = place(placement, call(work=64))
    facts = placement.facts().replicas[placed.replica]
    assert (facts.running, facts.waiting, facts.wait) == (1, 1, pytest.approx(1000 / 5000 + 64 / 625))
    placement.began(placed.number, 0.5)
    facts = placement.facts().replicas[placed.replica]
    assert (facts.running, facts.waiting, facts.wait) == (1, 0, pytest.approx(64 / 625))
    placement.ended(placed.number, 1.0, generated=10)
    facts = placement.facts().replicas[placed.replica]
    assert (facts.processed, facts.running, facts.waiting, facts.wait) == (1, 0, 0, 0)
    placement.ended(placed.number, 1.0)
    placement.check()


def test_a_lost_replica_names_its_calls_and_is_empty_when_it_comes_back() -> None:
    placement = Placement("added-delay", range(2))
    placement.apply(1, [NodeAdded(1, 0, "", PREFIX)])
    lost = [place(placement, call(n)) for n in range(3)]
    assert [placed.replica for placed in lost] == [1, 1, 1]
    assert placement.down(1) == [placed.number for placed in lost]
    placement.check()
    assert place(placement, call(1)).replica == 0
    placement.up(1)
    assert placement.tree.lengths(PREFIX, "", replicas=2).coming.tolist() == [1000, 0]
    for placed in lost:
        placement.ended(placed.number, 1.0)
    placement.check()


def test_after_a_gap_a_replica_counts_as_empty_until_a_snapshot() -> None:
    placement = Placement("added-delay", range(2))
    placement.apply(1, [NodeAdded(1, 0, "", PREFIX)])
    assert not placement.apply(1, [NodeExtended(7, packed([1]))])
    assert placement.facts().replicas[1].stale
    assert not placement.apply(1, [NodeExtended(1, packed([1]))])
    assert placement.tree.tokens_of(1) == 0
    assert placement.apply(1, [CacheCleared(), NodeAdded(1, 0, "", PREFIX)])
    assert placement.tree.tokens_of(1) == 1000
    placement.check()


@pytest.mark.parametrize(("kind", "imbalance"), [("group", GROUP_IMBALANCE), ("program", PROGRAM_IMBALANCE)])
def test_calls_stay_together_until_the_stated_imbalance(kind: str, imbalance: object) -> None:
    placement = Placement("added-delay", range(2))
    first = place(placement, call(prefix=packed([0] * 500), **{kind: "g"})).replica
    chosen = [place(placement, call(prefix=packed([n] * 500), **{kind: "g"})).replica for n in range(1, 150)]
    assert chosen[: imbalance.calls] == [first] * imbalance.calls
    assert chosen[imbalance.calls] != first
    assert 0 in chosen[imbalance.calls :]
    assert 1 in chosen[imbalance.calls :]


def test_groups_of_one_name_in_two_salts_are_two() -> None:
    placement = Placement("added-delay", range(2))
    chosen = {salt: place(placement, call(salt=salt, group="g")).replica for salt in ("a", "b")}
    assert chosen["a"] != chosen["b"]


def test_routing_is_learned_from_and_evicted_at_intervals() -> None:
    placement = Placement("cache-aware", range(2), learns="routing")
    first = place(placement, call(7))
    placement.ended(first.number, 1.0)
    assert place(placement, call(8)).replica == first.replica
    assert placement.facts().eviction is None
    assert placement.place(call(9), 61.0) is not None
    sizes = {0: 0, 1: 0} | {first.replica: 1002}
    facts = placement.facts()
    assert facts.eviction is not None
    assert (facts.eviction.before, facts.eviction.after) == (sizes, sizes)
    assert facts.lines({0: "http://localhost:30001", 1: "http://localhost:30002"}) == [
        "Before eviction - Used size per tenant:",
        "Tenant: http://localhost:30001, Size: 1002",
        "Tenant: http://localhost:30002, Size: 0",
        "After eviction - Used size per tenant:",
        "Tenant: http://localhost:30001, Size: 1002",
        "Tenant: http://localhost:30002, Size: 0",
        'Processed Queue: {"http://localhost:30001": 3, "http://localhost:30002": 0}',
        'Running Queue: {"http://localhost:30001": 2, "http://localhost:30002": 0}',
    ]


def test_the_cost_of_a_placement_does_not_grow_with_the_tree() -> None:
    """Nodes are visited on the path of the call alone: to find it, to expect it, and to forget it."""

    def operations(documents: int) -> int:
        placement = Placement("added-delay", range(64))
        for replica in range(64):
            placement.apply(replica, [NodeAdded(1, 0, "", PREFIX)])
            for number in range(documents):
                tokens = packed([replica * documents + number, *range(200)])
                placement.apply(replica, [NodeAdded(2 + number, 1, "", tokens)])
        before = placement.tree.operations
        placed = place(placement, call(3, *range(200), 5))
        placement.ended(placed.number, 0.0)
        placement.apply(placed.replica, ())
        placement.check()
        return placement.tree.operations - before

    assert operations(2) == operations(20) <= 15


def with_tiers(host: int = 0, lasting: int = 0) -> Placement:
    placement = Placement("added-delay", range(2))
    for replica in range(2):
        placement.tiers(replica, TierRooms(host, lasting, 64))
    return placement


def used_and_evicted(placement: Placement, prefix: bytes) -> None:
    """Replica 1 has a prefix, a call uses it there, and it leaves the device."""
    placement.apply(1, [NodeAdded(1, 0, "", prefix)])
    placed = place(placement, call(prefix=prefix))
    assert (placed.replica, placed.to_load) == (1, 0)
    placement.ended(placed.number, 0.0)
    placement.apply(1, [NodeRemoved(1)])


def test_a_call_goes_where_its_prefix_can_be_loaded_if_that_is_faster_than_computing() -> None:
    placement = with_tiers(host=2_000)
    used_and_evicted(placement, PREFIX)
    placed = place(placement, call(1))
    assert (placed.replica, placed.cached, placed.to_load) == (1, 0, 960)
    placement.ended(placed.number, 0.0)
    placement.apply(1, [])  # what the call would have brought is not there
    placement.rates(1, load=100.0)
    slow = place(placement, call(1))
    assert (slow.replica, slow.to_load) == (0, 0)
    placement.check()


def test_a_prefix_that_was_used_once_is_kept_by_no_tier() -> None:
    placement = with_tiers(host=2_000)
    placement.apply(1, [NodeAdded(1, 0, "", PREFIX)])
    placement.apply(1, [NodeRemoved(1)])
    placed = place(placement, call(1))
    assert (placed.replica, placed.to_load) == (0, 0)


def test_all_replicas_load_what_lasts_and_a_lost_one_loses_only_its_memory() -> None:
    for rooms, loads in (({"host": 2_000}, 0), ({"lasting": 2_000}, 960)):
        placement = with_tiers(**rooms)
        used_and_evicted(placement, PREFIX)
        placement.down(1)
        placed = place(placement, call(1))
        assert (placed.replica, placed.to_load) == (0, loads)


def test_a_tier_evicts_what_was_used_least_recently() -> None:
    placement = with_tiers(host=1_000)
    other = packed(range(5_000, 6_000))
    used_and_evicted(placement, PREFIX)
    used_and_evicted(placement, other)
    for prefix, loads in ((PREFIX, 0), (other, 960)):
        placed = place(placement, call(1, prefix=prefix))
        assert placed.to_load == loads
        placement.ended(placed.number, 0.0)


def test_what_one_salt_can_load_another_cannot() -> None:
    placement = with_tiers(host=2_000)
    used_and_evicted(placement, PREFIX)
    placed = place(placement, call(1, salt="another"))
    assert (placed.replica, placed.to_load) == (0, 0)
