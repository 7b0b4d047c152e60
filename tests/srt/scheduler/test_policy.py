"""Orders of waiting requests, compared with their definitions."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.instruments import Counters
from umbel.srt.core.messages import Schedule
from umbel.srt.scheduler.policy import MOST_PROGRAMS, AdmissionPolicy, Order, ProgramUsage
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


def policy_of(
    policy: PolicyName = PolicyName.LPM, cached: dict[int, int] | None = None, **settings_: object
) -> tuple[AdmissionPolicy, Counters]:
    counters = Counters()
    config = SchedulerConfig(policy=policy, max_wait=MAX_WAIT, **settings_)  # type: ignore[arg-type]
    return AdmissionPolicy(config, lambda r: (cached or {}).get(r.number, 0), counters), counters


def order(
    waiting: Sequence[Request],
    policy: PolicyName = PolicyName.LPM,
    cached: dict[int, int] | None = None,
    **settings_: object,
) -> Order:
    return policy_of(policy, cached, **settings_)[0].order(waiting, NOW)


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


def test_what_another_salt_has_cached_does_not_change_the_order_between_salts() -> None:
    waiting = [request(1, [1], salt="a"), request(2, [1], salt="b"), request(3, [1], salt="a")]
    orders = [drain(order(waiting, cached=cached)) for cached in ({}, {2: 1}, {1: 1, 2: 1})]
    assert orders == [[1, 3, 2]] * 3
    assert drain(order(waiting, cached={3: 1})) == [3, 1, 2], "within a salt the longer match wins"


def test_requests_outside_the_window_come_last_by_arrival() -> None:
    waiting = [request(i, [i]) for i in range(1, 7)]
    numbers = drain(order(waiting, cached={6: 1, 5: 1, 3: 1}, policy_window=3))
    assert sorted(numbers[:3]) == [1, 2, 3]
    assert numbers[3:] == [4, 5, 6]


# ---------------------------------------------------------------------------------------- age before lpm


def test_those_that_waited_too_long_go_first_by_arrival() -> None:
    waiting = [request(1, [1], arrival=10.0), request(2, [1], arrival=10.0), request(3, [1], arrival=19.0)]
    assert drain(order(waiting, cached={3: 1, 2: 1})) == [1, 2, 3]


def test_priority_goes_before_age() -> None:
    waiting = [request(1, [1], arrival=0.0), request(2, [1], priority=1)]
    for policy in PolicyName:
        assert drain(order(waiting, policy)) == [2, 1]


# --------------------------------------------------------------------------------------- forks and fairness


def branch(number: int, tokens: Sequence[int], group: str = "g", program: str = "p") -> Request:
    return request(number, tokens, program_id=program, fork_group=group)


def test_waiting_siblings_come_right_behind_the_first_branch() -> None:
    waiting = [branch(1, [1, 1, 1]), request(2, [9, 9, 9, 9]), branch(3, [1, 1, 3]), branch(4, [1, 1, 4])]
    made, counters = policy_of(cached={1: 3, 2: 3})
    lpm = made.order(waiting, NOW)
    assert admit_all(lpm, 4) == [1, 3, 4, 2], "a longer match elsewhere waits until the fork is in"
    assert counters.sibling_admissions == 2


def test_siblings_left_over_when_a_step_is_full_come_first_in_the_next() -> None:
    waiting = [branch(1, [1, 1]), request(2, [9, 9, 9, 9]), branch(3, [1, 3]), branch(4, [1, 4])]
    made, _ = policy_of(cached={1: 4, 2: 3})
    assert admit_all(made.order(waiting, NOW), 2) == [1, 3]
    assert drain(made.order([waiting[1], waiting[3]], NOW)) == [4, 2]


def test_a_branch_that_arrives_later_is_not_called() -> None:
    made, _ = policy_of(cached={1: 4, 2: 3})
    assert admit(made.order([branch(1, [1, 1]), request(2, [9, 9, 9])], NOW)) == 1
    assert drain(made.order([request(2, [9, 9, 9]), branch(3, [1, 3])], NOW)) == [2, 3]


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


def test_among_equals_the_program_with_least_usage_goes_first() -> None:
    """64 branches of one program, then one call of another: all equal, and the one call waits for one branch."""
    waiting = [request(i, [1, i], program_id="wide") for i in range(2, 66)]
    waiting.append(request(99, [1, 99], program_id="narrow"))
    made, counters = policy_of(cached={r.number: 1 for r in waiting})
    lpm = made.order(waiting, NOW)
    first = lpm.next()
    assert first is not None
    made.usage.add(first, 1)
    lpm.admitted(first)
    assert (first.number, admit(lpm)) == (2, 99)
    assert counters.fair_admissions == 1


def test_usage_counts_within_a_salt_and_not_for_requests_without_a_program() -> None:
    made, _ = policy_of()
    one, other = request(1, [1], program_id="p", salt="a"), request(2, [1], program_id="p", salt="b")
    for served in (one, one, request(3, [1])):
        made.usage.add(served, 5)
    assert [made.usage.rows(r) for r in (one, other, request(3, [1]))] == [10, 0, 0]


def test_programs_served_long_ago_are_forgotten() -> None:
    made, _ = policy_of()
    for i in range(5000):
        made.usage.add(request(i, [1], program_id=f"p{i}"), 1)
    assert [made.usage.rows(request(i, [1], program_id=f"p{i}")) for i in (0, 4999)] == [0, 1]


def test_a_longer_match_goes_before_less_usage() -> None:
    made, _ = policy_of(cached={1: 1})
    waiting = [request(1, [1, 1], program_id="served"), request(2, [2, 2], program_id="new")]
    made.usage.add(waiting[0], 100)
    assert drain(made.order(waiting, NOW)) == [1, 2]


# --------------------------------------------------------------------------------------- other policies


def test_first_come_first_served_ignores_the_cache_and_deadlines() -> None:
    waiting = [request(2, [1]), request(1, [1]), request(3, [1], priority=1)]
    assert drain(order(waiting, PolicyName.FCFS, cached={2: 1}, policy_window=1)) == [3, 1, 2]


def test_what_another_tenant_has_cached_does_not_change_the_order_between_tenants() -> None:
    """They share the head [1], and are found in the cache one after the other all the same."""
    names = {1: "/a", 2: "/b", 3: "/a"}
    waiting = [request(number, [1, 2], private=((1, name),)) for number, name in names.items()]
    orders = [drain(order(waiting, cached=cached)) for cached in ({}, {2: 2}, {1: 2, 2: 2})]
    assert orders == [[1, 3, 2]] * 3
    assert drain(order(waiting, cached={3: 2})) == [3, 1, 2], "within a tenant the longer match wins"


def test_an_admission_brings_forward_the_head_that_tenants_share_and_no_tail() -> None:
    """5 and 6 of tenant b: 5 shares two tokens with what a has just cached, of which one is the head."""
    own, other = ((1, "/b"),), ((1, "/a"),)
    waiting = [request(1, [7, 8], private=other), request(2, [9, 8], private=own), request(3, [7, 8], private=own)]
    lpm = order(waiting)
    assert admit(lpm) == 1
    assert lpm._cached == {1: 0, 2: 0, 3: 1}  # type: ignore[attr-defined]
    assert drain(lpm) == [3, 2]


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
    place = {
        PolicyName.LPM: lpm_place(waiting, cached),
        PolicyName.FCFS: lambda r: (r.number,),
    }[policy]

    def definition(r: Request) -> tuple[int, bool, tuple[int, ...]]:
        aged = r.arrival <= NOW - MAX_WAIT and policy is not PolicyName.FCFS
        return (-r.schedule.priority, not aged, (r.number,) if aged else place(r))

    assert drain(order(waiting, policy, cached)) == [r.number for r in sorted(waiting, key=definition)]


def test_the_usage_of_a_bounded_number_of_programs_is_counted() -> None:
    """However many names and salts clients make up; those that ran last are counted."""
    usage = ProgramUsage()
    old = request(0, [1], salt="s", program_id="old")
    for number in range(2 * MOST_PROGRAMS):
        usage.add(request(number, [1], salt=f"salt {number % 7}", program_id=f"p{number}"), 5)
        usage.add(request(number, [1], salt=f"salt {number}"), 5)
        if number < 10:
            usage.add(old, 1)
    assert len(usage._rows) == MOST_PROGRAMS == 4_096
    assert usage.rows(old) == 0
    last = 2 * MOST_PROGRAMS - 1
    assert usage.rows(request(9, [1], salt=f"salt {last % 7}", program_id=f"p{last}")) == 5


# ------------------------------------------------------------------------------------------------- arrivals


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=2, max_size=10),
    first=st.integers(1, 9),
    admitted=st.integers(0, 4),
    groups=st.lists(st.sampled_from(["", "", "f", "g"]), min_size=10, max_size=10),
    cached=st.dictionaries(st.integers(1, 10), st.integers(0, 1)),
)
def test_an_extended_order_is_that_of_all_from_the_start(
    prompts: list[list[int]], first: int, admitted: int, groups: list[str], cached: dict[int, int]
) -> None:
    """Those that come later are last by arrival, so it does not matter that some were admitted before."""
    first, admitted = min(first, len(prompts) - 1), min(admitted, first, len(prompts) - 1)
    waiting = [
        request(number, prompt, fork_group=group)
        for number, (prompt, group) in enumerate(zip(prompts, groups, strict=False), 1)
    ]
    made, _ = policy_of(cached=cached)
    extended = made.order(waiting[:first], NOW)
    before = admit_all(extended, admitted)
    assert extended.extend(waiting[first:])
    left = [one for one in waiting if one.number not in before]
    anew = policy_of(cached=extended._cached)[0].order(left, NOW)  # type: ignore[attr-defined]
    expected = drain(anew)
    found = drain(extended)
    assert sorted(found) == sorted(expected)
    if not admitted:  # a call of siblings, which an admission makes, is remembered
        assert found == expected


def test_an_order_that_cannot_be_extended_says_so() -> None:
    waiting = [request(number, [1, number]) for number in (1, 2, 3)]
    assert not order(waiting[:2], PolicyName.FCFS).extend(waiting[2:])
    assert not order(waiting[:2], policy_window=2).extend(waiting[2:]), "its window is full"
    assert not order(waiting[:2], policy_window=1).extend(waiting[2:]), "others wait outside of it"
    assert not order(waiting[:2]).extend([request(4, [1, 4], program_id="p", ahead=5)]), "its program exchanges places"
    assert not order(waiting[1:]).extend(waiting[:1]), "it is the oldest"
    assert order(waiting[:2]).extend(waiting[2:])
