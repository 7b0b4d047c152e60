"""Orders of waiting requests, compared with their definitions."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.counters import Counters
from umbel.srt.core.messages import Schedule
from umbel.srt.scheduler.policy.policy import Arranger, Order
from umbel.srt.scheduler.request import Generation, Prefilling, Request
from umbel.srt.scheduler.scheduler import PolicyName, SchedulerConfig

NOW = 20.0
MAX_WAIT = 10.0


def request(
    number: int, tokens: Sequence[int], *, arrival: float = NOW, max_tokens: int | None = None, **schedule: object
) -> Request:
    """Waits for a prompt only, or with `max_tokens` for a generation."""
    job = (
        Prefilling()
        if max_tokens is None
        else Generation(SamplingParams(max_tokens=max_tokens), 0, False, frozenset(), None, length_limit=1000)
    )
    return Request(number, number, np.array(tokens, dtype=np.int32), job, Schedule(**schedule), arrival)  # type: ignore[arg-type]


def arranger(
    policy: PolicyName = PolicyName.LPM, cached: dict[int, int] | None = None, **settings_: object
) -> tuple[Arranger, Counters]:
    counters = Counters()
    config = SchedulerConfig(policy=policy, max_wait=MAX_WAIT, **settings_)  # type: ignore[arg-type]
    return Arranger(config, lambda r: (cached or {}).get(r.number, 0), counters), counters


def order(
    waiting: Sequence[Request],
    policy: PolicyName = PolicyName.LPM,
    cached: dict[int, int] | None = None,
    **settings_: object,
) -> Order:
    return arranger(policy, cached, **settings_)[0].arrange(waiting, NOW)


def drain(given_: Order) -> list[int]:
    numbers = []
    while (following := given_.next()) is not None:
        numbers.append(following.number)
    return numbers


def admit(given_: Order, kv_length: int | None = None) -> int:
    """The next request is planned, as far as `kv_length`."""
    following = given_.next()
    assert following is not None
    following.kv_length = following.length if kv_length is None else kv_length
    given_.admitted(following)
    return following.number


def admit_all(given_: Order, count: int) -> list[int]:
    return [admit(given_) for _ in range(count)]


# ------------------------------------------------------------------------------------------------- lpm


def test_longest_match_first_then_arrival() -> None:
    waiting = [request(i, [1, 2, 3]) for i in (1, 2, 3, 4)]
    assert drain(order(waiting, cached={2: 1, 3: 2, 4: 2})) == [3, 4, 2, 1]


def test_an_admission_brings_those_forward_that_share_its_tokens() -> None:
    lpm = order([request(1, [5, 5, 1]), request(2, [6, 6, 1]), request(3, [5, 5, 2])])
    assert admit_all(lpm, 3) == [1, 3, 2]


def test_the_same_next_token_behind_another_prefix_is_no_match() -> None:
    lpm = order([request(1, [5, 9]), request(2, [7, 7]), request(3, [6, 9])], cached={1: 2, 3: 1})
    assert admit_all(lpm, 3) == [1, 3, 2]


def test_aged_requests_are_given_once_even_when_they_move_forward() -> None:
    lpm = order([request(i, [5, i], arrival=0.0) for i in (1, 2, 3)])
    assert admit_all(lpm, 3) == [1, 2, 3]
    assert lpm.next() is None


def test_only_planned_tokens_count() -> None:
    lpm = order([request(1, [5, 5, 1]), request(2, [6, 6, 1]), request(3, [5, 5, 2])], cached={2: 1})
    assert admit(lpm, kv_length=0) == 2
    assert drain(lpm) == [1, 3]


def test_a_request_that_does_not_fit_is_the_next_one_again() -> None:
    for policy in PolicyName:
        given_ = order([request(1, [1]), request(2, [2])], policy)
        first = given_.next()
        assert first is not None
        given_.put_back(first)
        assert given_.upcoming(9)[0] is first
        assert given_.next() is first
        assert len(drain(given_)) == 1


def test_what_another_salt_has_cached_does_not_change_the_order_between_salts() -> None:
    waiting = [request(1, [1], salt="a"), request(2, [1], salt="b"), request(3, [1], salt="a")]
    orders = [drain(order(waiting, cached=cached)) for cached in ({}, {2: 1}, {1: 1, 2: 1})]
    assert orders == [[1, 3, 2]] * 3
    assert drain(order(waiting, cached={3: 1})) == [3, 1, 2], "within a salt the longer match wins"


@pytest.mark.parametrize("policy", [PolicyName.LPM, PolicyName.DFS_WEIGHT, PolicyName.RANDOM])
def test_those_behind_the_window_come_last_by_arrival(policy: PolicyName) -> None:
    waiting = [request(i, [i]) for i in range(1, 7)]
    numbers = drain(order(waiting, policy, cached={6: 1, 5: 1, 3: 1}, policy_window=3))
    assert sorted(numbers[:3]) == [1, 2, 3]
    assert numbers[3:] == [4, 5, 6]


# ---------------------------------------------------------------------------------------- lanes before lpm


def test_those_that_waited_too_long_go_first_by_arrival() -> None:
    waiting = [request(1, [1], arrival=10.0), request(2, [1], arrival=10.0), request(3, [1], arrival=19.0)]
    assert drain(order(waiting, cached={3: 1, 2: 1})) == [1, 2, 3]


def test_priority_goes_before_age() -> None:
    waiting = [request(1, [1], arrival=0.0), request(2, [1], priority=1)]
    for policy in PolicyName:
        assert drain(order(waiting, policy)) == [2, 1]


def hurried(timeouts: dict[int, float | None], *, steps: int = 3, **settings_: object) -> tuple[Order, Counters]:
    """Steps of one second, half an admission in each; requests that take two steps, the higher number cached more."""
    made, counters = arranger(cached={i: i for i in timeouts}, **settings_)
    for step in range(steps + 1):
        made.pace.begin_step(NOW - steps + step, busy=True)
    for _ in range(200):
        made.pace.admitted(0)
        made.pace.admitted(1)
    assert made.pace.waiting_seconds(1) == pytest.approx(2.0, rel=0.1)
    waiting = [request(i, [i] * 9, max_tokens=1, timeout=timeout) for i, timeout in timeouts.items()]
    assert made.pace.service_seconds(waiting[0]) == pytest.approx(2.0)
    return made.arrange(waiting, NOW), counters


def test_a_request_that_would_be_late_in_its_turn_goes_first() -> None:
    lpm, counters = hurried({1: 5.0, 2: None, 3: None, 4: None})
    assert admit_all(lpm, 4) == [1, 4, 3, 2]
    assert counters.urgent_admissions == 1


def test_of_two_in_a_hurry_the_earlier_deadline_goes_first() -> None:
    lpm, _ = hurried({1: 5.0, 2: 3.0, 3: None, 4: None})
    assert drain(lpm) == [2, 1, 4, 3]


def test_a_request_that_is_in_time_keeps_its_place() -> None:
    lpm, counters = hurried({1: 60.0, 2: None, 3: None, 4: None})
    assert admit_all(lpm, 4) == [4, 3, 2, 1]
    assert counters.urgent_admissions == 0


def test_a_request_that_nothing_can_save_keeps_its_place() -> None:
    lpm, _ = hurried({1: 1.0, 2: None, 3: None, 4: None})
    assert drain(lpm) == [4, 3, 2, 1]


def test_no_deadline_presses_before_a_step_has_been_timed() -> None:
    made, _ = arranger(cached={2: 1})
    waiting = [request(1, [1] * 9, max_tokens=9, timeout=0.001), request(2, [1] * 9)]
    assert drain(made.arrange(waiting, NOW)) == [2, 1]


def test_deadline_pressure_can_be_switched_off() -> None:
    lpm, _ = hurried({1: 5.0, 2: None, 3: None, 4: None}, deadline_pressure=False)
    assert drain(lpm) == [4, 3, 2, 1]


# --------------------------------------------------------------------------------------- forks and fairness


def branch(number: int, tokens: Sequence[int], group: str = "g", program: str = "p") -> Request:
    return request(number, tokens, program_id=program, fork_group=group)


def test_waiting_siblings_come_right_behind_the_first_branch() -> None:
    waiting = [branch(1, [1, 1, 1]), request(2, [9, 9, 9, 9]), branch(3, [1, 1, 3]), branch(4, [1, 1, 4])]
    made, counters = arranger(cached={1: 3, 2: 3})
    lpm = made.arrange(waiting, NOW)
    assert admit_all(lpm, 4) == [1, 3, 4, 2], "a longer match elsewhere waits until the fork is in"
    assert counters.sibling_admissions == 2
    assert admit_all(order(waiting, cached={1: 3, 2: 3}, fork_hints=False), 4) == [1, 2, 3, 4]


def test_siblings_left_over_when_a_step_is_full_come_first_in_the_next() -> None:
    waiting = [branch(1, [1, 1]), request(2, [9, 9, 9, 9]), branch(3, [1, 3]), branch(4, [1, 4])]
    made, _ = arranger(cached={1: 4, 2: 3})
    assert admit_all(made.arrange(waiting, NOW), 2) == [1, 3]
    assert drain(made.arrange([waiting[1], waiting[3]], NOW)) == [4, 2]


def test_a_branch_that_arrives_later_is_not_called() -> None:
    made, _ = arranger(cached={1: 4, 2: 3})
    assert admit(made.arrange([branch(1, [1, 1]), request(2, [9, 9, 9])], NOW)) == 1
    assert drain(made.arrange([request(2, [9, 9, 9]), branch(3, [1, 3])], NOW)) == [2, 3]


@pytest.mark.parametrize(("group", "program"), [("other", "p"), ("g", "other"), ("", "p")])
def test_only_branches_of_the_same_fork_of_the_same_program_are_siblings(group: str, program: str) -> None:
    waiting = [branch(1, [1, 1]), request(2, [9, 9, 9, 9]), branch(3, [1, 3], group, program)]
    assert admit_all(order(waiting, cached={1: 4, 2: 3}), 3) == [1, 2, 3]


def test_who_shares_more_with_the_branch_than_its_siblings_goes_before_them() -> None:
    waiting = [branch(1, [1, 1, 1, 1]), request(2, [9] * 5), branch(3, [1, 3]), request(4, [1, 1, 1, 4])]
    assert admit_all(order(waiting, cached={1: 4, 2: 4}), 4) == [1, 4, 3, 2]


def test_a_sibling_does_not_go_before_an_aged_request() -> None:
    waiting = [branch(1, [1, 1]), branch(3, [1, 3]), request(4, [9, 9], arrival=0.0)]
    assert admit_all(order(waiting, cached={1: 2}), 3) == [4, 1, 3]


def test_among_equals_the_program_with_least_service_goes_first() -> None:
    """64 branches of one program, then one call of another: all equal, and the one call waits for one branch."""
    waiting = [request(i, [1, i], program_id="wide") for i in range(2, 66)]
    waiting.append(request(99, [1, 99], program_id="narrow"))
    made, counters = arranger(cached={r.number: 1 for r in waiting})
    lpm = made.arrange(waiting, NOW)
    first = lpm.next()
    assert first is not None
    made.service.add(first, 1)
    lpm.admitted(first)
    assert (first.number, admit(lpm)) == (2, 99)
    assert counters.fair_admissions == 1
    plain = order(waiting, cached={r.number: 1 for r in waiting}, fairness=False)
    assert drain(plain)[-1] == 99


def test_service_counts_within_a_salt_and_not_for_requests_without_a_program() -> None:
    made, _ = arranger()
    one, other = request(1, [1], program_id="p", salt="a"), request(2, [1], program_id="p", salt="b")
    for served in (one, one, request(3, [1])):
        made.service.add(served, 5)
    assert [made.service.of(r) for r in (one, other, request(3, [1]))] == [10, 0, 0]


def test_programs_served_long_ago_are_forgotten() -> None:
    made, _ = arranger()
    for i in range(5000):
        made.service.add(request(i, [1], program_id=f"p{i}"), 1)
    assert [made.service.of(request(i, [1], program_id=f"p{i}")) for i in (0, 4999)] == [0, 1]


def test_a_longer_match_goes_before_less_service() -> None:
    made, _ = arranger(cached={1: 1})
    waiting = [request(1, [1, 1], program_id="served"), request(2, [2, 2], program_id="new")]
    made.service.add(waiting[0], 100)
    assert drain(made.arrange(waiting, NOW)) == [1, 2]


# --------------------------------------------------------------------------------------- other policies


def test_first_come_first_served_ignores_the_cache_and_deadlines() -> None:
    waiting = [request(2, [1]), request(1, [1]), request(3, [1], priority=1)]
    assert drain(order(waiting, PolicyName.FCFS, cached={2: 1}, policy_window=1)) == [3, 1, 2]


def test_random_is_the_same_for_a_seed_and_for_every_step_and_differs_between_seeds() -> None:
    waiting = [request(i, [1]) for i in range(30)]
    first = drain(order(waiting, PolicyName.RANDOM))
    assert sorted(first) == list(range(30)) != first
    assert drain(order(waiting, PolicyName.RANDOM)) == first
    assert drain(order(waiting[10:], PolicyName.RANDOM)) == [i for i in first if i >= 10]
    assert drain(order(waiting, PolicyName.RANDOM, policy_seed=1)) != first


def test_random_gives_every_place_to_everybody() -> None:
    waiting = [request(i, [1]) for i in range(3)]
    orders = {tuple(drain(order(waiting, PolicyName.RANDOM, policy_seed=seed))) for seed in range(60)}
    assert len(orders) == 6


def test_the_heaviest_subtree_goes_first_and_is_finished_before_the_next() -> None:
    light, heavy = [[1, 1], [1, 2]], [[2, 1, 1], [2, 2, 1], [2, 2, 2]]
    waiting = [request(i, tokens) for i, tokens in enumerate([light[0], heavy[0], light[1], *heavy[1:]])]
    assert drain(order(waiting, PolicyName.DFS_WEIGHT)) == [3, 4, 1, 0, 2]


def test_a_subtree_that_was_begun_goes_before_a_heavier_one() -> None:
    waiting = [request(i, [1 + i % 2, i]) for i in range(1, 10)]
    made, _ = arranger(PolicyName.DFS_WEIGHT)
    walk = made.arrange(waiting, NOW)
    taken = [walk.next(), walk.next()]
    for following in taken:
        assert following is not None
        made.admitted(following)
    assert [r.number for r in taken if r is not None] == [1, 3]
    left = [r for r in waiting if r not in taken]
    assert drain(made.arrange(left, NOW)) == [5, 7, 9, 2, 4, 6, 8], "3 are left there, 4 in the other"


# --------------------------------------------------------------------------------------- definitions

Row = tuple[list[int], float, str, int]
rows = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=5),
        st.floats(0, NOW),
        st.sampled_from(["", "a"]),
        st.integers(0, 1),
    ),
    max_size=12,
)


def lpm_place(waiting: list[Request], cached: dict[int, int]) -> Callable[[Request], tuple[int, ...]]:
    def place(r: Request) -> tuple[int, ...]:
        same = [o.number for o in waiting if (o.schedule.salt, o.rank[0]) == (r.schedule.salt, r.rank[0])]
        return (min(same), -cached[r.number], r.number)

    return place


def dfs_place(waiting: list[Request]) -> Callable[[Request], tuple[int, ...]]:
    """The definition, word by word: at every prefix, first who ends there, then by weight and age of the subtree."""

    def place(r: Request) -> tuple[int, ...]:
        oldest = next(o for o in sorted(waiting, key=lambda o: o.rank) if o.schedule.salt == r.schedule.salt)
        path: list[int] = [*oldest.rank]
        tokens = r.tokens.tolist()
        for depth in range(len(tokens)):
            inside = [
                o for o in waiting if o.schedule.salt == r.schedule.salt and o.tokens.tolist()[:depth] == tokens[:depth]
            ]
            subtree = [o for o in inside if o.length > depth and o.tokens[depth] == tokens[depth]]
            path += [1, -len(subtree), min(o.number for o in subtree)]
        return (*path, 0, r.number)

    return place


@settings(max_examples=150, deadline=None)
@given(rows, st.sampled_from(list(PolicyName)), st.data())
def test_the_order_of_a_queue_is_the_definition_sorted(
    queue: list[Row], policy: PolicyName, data: st.DataObject
) -> None:
    waiting = [
        request(i, tokens, arrival=arrival, salt=salt, priority=priority)
        for i, (tokens, arrival, salt, priority) in enumerate(queue)
    ]
    cached = {r.number: data.draw(st.integers(0, r.length)) for r in waiting}
    lots = drain(order([request(r.number, [1]) for r in waiting], PolicyName.RANDOM))
    place = {
        PolicyName.LPM: lpm_place(waiting, cached),
        PolicyName.DFS_WEIGHT: dfs_place(waiting),
        PolicyName.FCFS: lambda r: (r.number,),
        PolicyName.RANDOM: lambda r: (lots.index(r.number),),
    }[policy]

    def definition(r: Request) -> tuple[int, bool, tuple[int, ...]]:
        aged = r.arrival <= NOW - MAX_WAIT and policy is not PolicyName.FCFS
        return (-r.schedule.priority, not aged, (r.number,) if aged else place(r))

    assert drain(order(waiting, policy, cached)) == [r.number for r in sorted(waiting, key=definition)]
