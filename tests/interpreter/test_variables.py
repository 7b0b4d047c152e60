"""Bindings, feeds and waiting: what is announced has happened."""

import asyncio
import threading
import time

import pytest
from umbel.interpreter.loop import Signal, earliest, wait_until, wait_until_async
from umbel.interpreter.variables import Binding, VariableTable
from umbel.lang.errors import DeadlineError, VariableError


def test_a_value_is_recorded_before_anybody_is_woken() -> None:
    binding = Binding("x")
    seen: list[object] = []
    binding.settled.add(lambda: seen.append((binding.done, binding.value(), binding.meta, list(binding.feed.pieces))))
    binding.resolve("text", {"id": "1"})
    assert seen == [(True, "text", {"id": "1"}, [("text", {"id": "1"})])]


def test_an_error_is_recorded_before_anybody_is_woken() -> None:
    binding, error = Binding("x"), ValueError("mine")
    seen: list[object] = []
    binding.settled.add(lambda: seen.append((binding.done, binding.error)))
    binding.feed.changed.add(lambda: seen.append((binding.done, binding.error)))
    binding.fail(error)
    assert seen == [(True, error)] * 2


def test_an_error_after_the_value_changes_nothing() -> None:
    binding = Binding("x")
    binding.resolve(1)
    binding.fail(ValueError())
    assert binding.value() == 1


def test_a_value_is_written_once() -> None:
    binding = Binding("x")
    binding.resolve(1)
    with pytest.raises(AssertionError, match="written once"):
        binding.resolve(2)


def test_what_was_not_streamed_is_the_last_piece() -> None:
    binding = Binding("x")
    binding.feed.append("one", {"piece": 1})
    binding.resolve("one two", {"all": True})
    assert binding.feed.pieces == [("one", {"piece": 1}), (" two", {"all": True})]


def test_a_branch_sees_the_names_of_its_base_and_hides_them() -> None:
    parent = VariableTable()
    old = Binding("a")
    parent.bind(old)
    first, second = VariableTable(parent.snapshot()), VariableTable(parent.snapshot())
    parent.bind(Binding("a"))
    mine = Binding("a")
    first.bind(mine)
    assert (first.get("a"), second.get("a")) == (mine, old)
    assert first.own == {"a": mine}
    assert second.own == {}
    assert first.names() == ["a"]


@pytest.mark.parametrize(
    ("names", "hint"),
    [((), "has set none so far"), (("answer",), "did you mean 'answer'"), (("zzz",), "it sets 'zzz'")],
)
def test_an_unknown_name_comes_with_a_hint(names: tuple[str, ...], hint: str) -> None:
    table = VariableTable()
    for name in names:
        table.bind(Binding(name))
    error = table.unknown("anser")
    assert isinstance(error, VariableError)
    assert hint in str(error)


def test_a_signal_calls_each_waiter_once() -> None:
    signal, calls = Signal(), []
    first, second, gone = (lambda n=n: calls.append(n) for n in range(3))
    for wake in (first, second, gone):
        signal.add(wake)
    signal.discard(gone)
    signal.fire()
    signal.fire()
    assert calls == [0, 1]


def test_a_waiter_leaves_nothing_behind() -> None:
    signal = Signal()
    with pytest.raises(DeadlineError, match="the thing was not known in time"):
        wait_until(lambda: False, (signal,), time.monotonic(), "the thing")
    with pytest.raises(DeadlineError):
        asyncio.run(wait_until_async(lambda: False, (signal,), time.monotonic() + 0.001, "the thing"))
    assert signal._wakes == {}


def test_many_waiters_of_one_signal_all_wake() -> None:
    signal, ready = Signal(), threading.Event()
    woken: list[int] = []

    def wait(number: int) -> None:
        wait_until(ready.is_set, (signal,), time.monotonic() + 20, "it")
        woken.append(number)

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    ready.set()
    signal.fire()
    for thread in threads:
        thread.join(20)
    assert sorted(woken) == list(range(8))


def test_the_nearer_of_timeout_and_deadline_counts() -> None:
    now = time.monotonic()
    assert earliest(None, None) is None
    assert earliest(None, now) == now
    assert earliest(1000.0, now + 5) == now + 5
    assert now < earliest(1.0, now + 1000) < now + 100  # type: ignore[operator]
