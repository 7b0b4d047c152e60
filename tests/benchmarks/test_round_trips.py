"""A shipped program pays for its own way, not for those between its calls; time is virtual, so numbers are exact."""

import asyncio

import pytest

from benchmarks.round_trips import LATENCY, STEP, compare, interview, table, tree
from benchmarks.virtual_time import VirtualTime


def test_five_gens_take_one_message_and_less_than_half_the_time() -> None:
    found = compare(interview, 5)
    assert found.interpreted.messages == 5
    assert found.shipped.messages == 1
    assert found.interpreted.seconds == pytest.approx(5 * (2 * LATENCY + 5 * STEP))
    assert found.shipped.seconds == pytest.approx(2 * LATENCY + 5 * 5 * STEP)
    assert found.times == pytest.approx(75 / 35)


@pytest.mark.parametrize("tokens", [1, 10])
def test_what_is_saved_are_the_ways_between_the_calls(tokens: int) -> None:
    found = compare(interview, tokens)
    assert found.interpreted.seconds - found.shipped.seconds == pytest.approx(4 * 2 * LATENCY)


def test_branches_are_shipped_with_their_program() -> None:
    found = compare(tree, 5)
    assert found.shipped.messages == 1
    assert found.shipped.seconds == pytest.approx(2 * LATENCY + 4 * 5 * STEP)
    assert found.times == pytest.approx(2.0)
    assert "| tree | 5 |" in table([found])


def test_virtual_time_passes_only_where_everybody_waits() -> None:
    async def work() -> None:
        await asyncio.gather(*(asyncio.sleep(seconds) for seconds in (3600.0, 0.25)))

    with VirtualTime() as time:
        assert time.run(work()) == 3600.0
        assert time.run(asyncio.sleep(0.5)) == 0.5
