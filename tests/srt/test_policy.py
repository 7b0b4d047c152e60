"""Orders of waiting requests, compared with their definitions."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.srt.engine_protocol import Schedule
from umbel.srt.policy import Order, arrange
from umbel.srt.request import Prefilling, Request
from umbel.srt.scheduler import PolicyName


def request(number: int, tokens: list[int], *, arrival: float = 0.0, salt: str = "", priority: int = 0) -> Request:
    schedule = Schedule(salt=salt, priority=priority)
    return Request(number, number, np.array(tokens, dtype=np.int32), Prefilling(), schedule, arrival)


def lpm(waiting: list[Request], cached: dict[int, int], *, now: float = 0.0, window: int = 100) -> Order:
    return arrange(PolicyName.LPM, waiting, lambda r: cached.get(r.number, 0), now=now, max_wait=10.0, window=window)


def drain(order: Order) -> list[int]:
    numbers = []
    while (following := order.next()) is not None:
        numbers.append(following.number)
    return numbers


def test_longest_match_first_then_arrival() -> None:
    waiting = [request(i, [1, 2, 3]) for i in (1, 2, 3, 4)]
    assert drain(lpm(waiting, {2: 1, 3: 2, 4: 2})) == [3, 4, 2, 1]


def test_an_admission_brings_those_forward_that_share_its_tokens() -> None:
    waiting = [request(1, [5, 5, 1]), request(2, [6, 6, 1]), request(3, [5, 5, 2])]
    order = lpm(waiting, {})
    first = order.next()
    assert first is not None
    first.kv_length = 3
    order.admitted(first)
    assert drain(order) == [3, 2]


def test_the_same_next_token_behind_another_prefix_is_no_match() -> None:
    waiting = [request(1, [5, 9]), request(2, [7, 7]), request(3, [6, 9])]
    order = lpm(waiting, {1: 2, 3: 1})
    first = order.next()
    assert first is not None
    first.kv_length = 2
    order.admitted(first)
    assert drain(order) == [3, 2]


def test_aged_requests_are_given_once_even_when_they_move_forward() -> None:
    waiting = [request(i, [5, i]) for i in (1, 2, 3)]
    order = lpm(waiting, {}, now=99.0)
    first = order.next()
    assert first is not None
    first.kv_length = 2
    order.admitted(first)
    assert drain(order) == [2, 3]


def test_only_planned_tokens_count() -> None:
    waiting = [request(1, [5, 5, 1]), request(2, [6, 6, 1]), request(3, [5, 5, 2])]
    order = lpm(waiting, {2: 1})
    first = order.next()
    assert first is not None
    assert first.number == 2
    first.kv_length = 0
    order.admitted(first)
    assert drain(order) == [1, 3]


def test_those_that_waited_too_long_go_first_by_arrival() -> None:
    waiting = [request(1, [1], arrival=5.0), request(2, [1], arrival=5.0), request(3, [1], arrival=14.0)]
    assert drain(lpm(waiting, {3: 1, 2: 1}, now=15.0)) == [1, 2, 3]


def test_priority_goes_before_age() -> None:
    waiting = [request(1, [1], arrival=0.0), request(2, [1], arrival=15.0, priority=1)]
    assert drain(lpm(waiting, {}, now=15.0)) == [2, 1]


def test_what_another_salt_has_cached_does_not_change_the_order_between_salts() -> None:
    waiting = [request(1, [1], salt="a"), request(2, [1], salt="b"), request(3, [1], salt="a")]
    orders = [drain(lpm(waiting, cached)) for cached in ({}, {2: 1}, {1: 1, 2: 1})]
    assert orders == [[1, 3, 2]] * 3
    assert drain(lpm(waiting, {3: 1})) == [3, 1, 2], "within a salt the longer match wins"


def test_those_behind_the_window_keep_their_order() -> None:
    waiting = [request(i, [1]) for i in range(1, 7)]
    assert drain(lpm(waiting, {6: 1, 5: 1, 3: 1}, window=3)) == [3, 1, 2, 4, 5, 6]


def test_first_come_first_served_ignores_the_cache() -> None:
    waiting = [request(2, [1]), request(1, [1]), request(3, [1], priority=1)]
    order = arrange(PolicyName.FCFS, waiting, lambda r: 99 - r.number, now=99.0, max_wait=1.0, window=1)
    assert drain(order) == [3, 1, 2]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 20), st.sampled_from(["", "a"]), st.integers(0, 1)), max_size=12)
)
def test_the_order_is_the_definition_sorted(rows: list[tuple[int, float, str, int]]) -> None:
    waiting = [
        request(i, [1] * 4, arrival=arrival, salt=salt, priority=priority)
        for i, (_, arrival, salt, priority) in enumerate(rows)
    ]
    cached = {i: match for i, (match, _, _, _) in enumerate(rows)}

    def definition(r: Request) -> tuple[int, bool, int, int, int]:
        same = [
            o.number
            for o in waiting
            if (o.schedule.salt, o.schedule.priority) == (r.schedule.salt, r.schedule.priority)
        ]
        aged = r.arrival <= 20 - 10
        return (-r.schedule.priority, not aged, 0 if aged else min(same), 0 if aged else -cached[r.number], r.number)

    assert drain(lpm(waiting, cached, now=20.0)) == [r.number for r in sorted(waiting, key=definition)]
