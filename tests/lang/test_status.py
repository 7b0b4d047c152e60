"""Counters that add up over restarts, and what counts as healthy."""

from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.lang.status import RisingCounters, RuntimeHealth, RuntimeState

WORK = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=5)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.booleans(), WORK), max_size=12))
def test_sums_over_lives_never_fall_and_are_all_that_was_counted(
    beats: list[tuple[bool, list[tuple[str, int]]]],
) -> None:
    rising, life, now = RisingCounters(), 0, dict[str, float]()
    whole = dict[str, float]()
    for dies, work in beats:
        if dies:
            life, now = life + 1, {}
        for name, count in work:
            now[name] = now.get(name, 0) + count
            whole[name] = whole.get(name, 0) + count
        before = rising.sums
        rising.note(life, dict(now))
        assert rising.sums == whole
        assert all(count >= before.get(name, 0) for name, count in rising.sums.items())


def test_a_count_that_was_corrected_downwards_does_not_fall() -> None:
    rising = RisingCounters()
    rising.note("one", {"reused": 5})
    rising.note("one", {"reused": 4})
    assert rising.sums == {"reused": 5}
    rising.note("two", {"reused": 1})
    assert rising.sums == {"reused": 6}


def test_only_a_runtime_that_is_ready_is_healthy() -> None:
    assert [state for state in RuntimeState if RuntimeHealth(state).healthy] == [RuntimeState.READY]
