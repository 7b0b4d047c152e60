"""A shipped program pays for its own way, not for those between its calls; time is virtual, so numbers are exact."""

import asyncio

import pytest
from umbel.lang.errors import DeadlineError
from umbel.srt.in_process import LocalBackend

from benchmarks.round_trips.compare import LATENCY, STEP, compare, interview, table, tree
from benchmarks.round_trips.virtual_time import VirtualTime


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


def test_a_deadline_of_a_shipped_program_is_kept_to_the_millisecond() -> None:
    time = VirtualTime()
    backend = LocalBackend(latency=LATENCY, step_seconds=STEP, clock=time, debug={"check_every_step": False})
    compiled = interview.compile(static_args={"tokens": 1000}, server=True)

    async def late() -> None:
        state = await compiled.run_async("Ada", backend=backend, timeout=0.1)
        ended = asyncio.Event()
        state._sink.run.when_finished(ended.set)  # readers look at a real clock
        await ended.wait()
        assert isinstance(state._sink.error(), DeadlineError)

    async def idle() -> None:
        while not backend.engine.scheduler.idle:
            await asyncio.sleep(STEP)

    with time:
        time.run(backend.start())
        assert time.run(late()) == pytest.approx(0.1)
        assert time.run(idle()) <= 2 * LATENCY  # the engine has let it go, too
        time.run(backend.close())


def test_virtual_time_passes_only_where_everybody_waits() -> None:
    async def work() -> None:
        await asyncio.gather(*(asyncio.sleep(seconds) for seconds in (3600.0, 0.25)))

    with VirtualTime() as time:
        assert time.run(work()) == 3600.0
        assert time.run(asyncio.sleep(0.5)) == 0.5
