"""What an interrupt of a notebook's kernel stops, at the moments that a real kernel meets seldom."""

import asyncio
import os
import signal
import sys
from types import ModuleType

import pytest
from umbel.interpreter.notebooks.interrupts import interrupted_with_cell


class Interrupted:
    """A run that says how often it was interrupted."""

    times = 0

    def interrupt(self) -> None:
        self.times += 1


@pytest.fixture(autouse=True)
def in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))


async def cancelled_by_signal(run: Interrupted) -> None:
    """A cell whose read ends before the event loop comes to read the signal's byte."""
    cell = asyncio.current_task()
    assert cell is not None
    before = signal.signal(signal.SIGINT, lambda *_: cell.cancel())
    try:
        with interrupted_with_cell(run):
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_cell_that_ends_before_the_signal_is_heard_stops_its_run() -> None:
    run = Interrupted()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled_by_signal(run))
    assert run.times == 1


def test_a_read_without_a_signal_stops_nothing() -> None:
    run = Interrupted()

    async def read() -> None:
        with interrupted_with_cell(run):
            await asyncio.sleep(0)

    asyncio.run(read())
    assert run.times == 0


def test_each_loop_hears_its_own_signals() -> None:
    """Sockets that were closed get no byte more: their descriptors may be those of files by then."""
    runs = [Interrupted() for _ in range(3)]
    held: list[int] = []
    for run in runs:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(cancelled_by_signal(run))
        held += os.pipe()  # descriptors of the last loop's sockets, once they are closed
    assert [run.times for run in runs] == [1, 1, 1]
    for descriptor in held:
        os.close(descriptor)


def test_a_descriptor_of_others_that_is_closed_is_no_hindrance() -> None:
    run = Interrupted()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    async def cell() -> None:
        before = signal.set_wakeup_fd(writing)
        os.close(writing)
        try:
            await cancelled_by_signal(run)
        finally:
            assert before != writing

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cell())
    assert run.times == 1
    os.close(reading)


def test_a_signal_between_two_reads_of_a_cell_stops_the_second() -> None:
    first, second = Interrupted(), Interrupted()

    async def cell() -> None:
        with interrupted_with_cell(first):
            await asyncio.sleep(0)
        signal.raise_signal(signal.SIGINT)
        with interrupted_with_cell(second):
            await asyncio.sleep(0)

    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        asyncio.run(cell())
    finally:
        signal.signal(signal.SIGINT, before)
    assert (first.times, second.times) == (0, 1)


def test_a_signal_that_no_read_waits_through_stops_no_later_one() -> None:
    run = Interrupted()

    async def cells() -> None:
        with interrupted_with_cell(Interrupted()):
            await asyncio.sleep(0)
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # a whole turn of the loop, as between two cells
        with interrupted_with_cell(run):
            await asyncio.sleep(0)

    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        asyncio.run(cells())
    finally:
        signal.signal(signal.SIGINT, before)
    assert run.times == 0
