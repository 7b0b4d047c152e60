"""What is left out to save time: each thing once, and nothing when nothing is to be done."""

import asyncio
import gc
import weakref

import pytest
import umbel as ul
from umbel.interpreter import loop
from umbel.interpreter.backends.echo import Echo
from umbel.lang.errors import BackendError

from .conftest import PATIENCE


class Counting(Echo):
    """Counts its starts; fails the first `failing` of them."""

    def __init__(self, failing: int = 0) -> None:
        super().__init__()
        self.starts = 0
        self.failing = failing

    async def start(self) -> None:
        self.starts += 1
        if self.starts <= self.failing:
            raise BackendError("not yet; try again")
        await super().start()


@ul.function
def ask(s: ul.State, text: str) -> None:
    s += text + ul.gen("answer")


def test_a_backend_is_started_once_for_all_runs() -> None:
    backend = Counting()
    for number in range(5):
        assert ask.run(f"{number}", backend=backend, timeout=PATIENCE)["answer"] == f"{number}"
    ask.run_batch([(f"{number}",) for number in range(20)], backend=backend)
    assert backend.starts == 1


def test_a_backend_whose_start_failed_is_started_again() -> None:
    backend = Counting(failing=1)
    with pytest.raises(BackendError, match="not yet"):
        ask.run("a", backend=backend, timeout=PATIENCE)["answer"]
    assert ask.run("b", backend=backend, timeout=PATIENCE)["answer"] == "b"
    assert backend.starts == 2


def test_a_backend_is_started_anew_on_a_new_loop() -> None:
    backend = Counting()
    assert ask.run("a", backend=backend, timeout=PATIENCE)["answer"] == "a"
    loop.streams.close()
    assert ask.run("b", backend=backend, timeout=PATIENCE)["answer"] == "b"
    assert backend.starts == 2


def test_a_started_backend_that_nobody_holds_is_collected() -> None:
    backend = Counting()
    ask.run("a", backend=backend, timeout=PATIENCE).sync()
    assert backend in loop._started
    reference = weakref.ref(backend)
    del backend
    loop.streams.run(asyncio.sleep(0))  # what the loop's last turn held is let go
    gc.collect()
    assert reference() is None


def test_a_state_that_has_nothing_to_do_is_read_without_the_loop(monkeypatch: pytest.MonkeyPatch, echo: Echo) -> None:
    state = ask.run("a", backend=echo, timeout=PATIENCE)
    state.sync()

    def refused(*_: object) -> None:
        raise AssertionError("the loop was woken for nothing")

    monkeypatch.setattr(loop.streams, "call", refused)
    assert state.text() == "aa"
    assert state["answer"] == "a"
    state.sync()
