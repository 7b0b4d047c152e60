"""A runtime on a machine that does something else, and one whose processes are stopped.

The short form is for every run. The full one, with the default model, is for `pytest -m nightly tests/stress`.
"""

from collections.abc import Callable

import psutil
import pytest
from umbel.interpreter.backends.runtime import Runtime
from umbel.lang.errors import ConnectionLostError, EngineError, UmbelError

from .load import busy_machine
from .runs import engine_of, gateway_of, losses, requests, runtime_of, seconds_to_notice, texts

pytestmark = pytest.mark.processes


def check_starts(model: str, count: int, *, spinners: int, seized_seconds: float) -> None:
    with busy_machine(spinners, seized_seconds=seized_seconds) as priority:
        print(f"the seizing process has priority {priority}")
        for _ in range(count):
            with runtime_of(model) as runtime:
                assert losses(runtime) == (0, 0, 0)


def check_texts(model: str, count: int, *, spinners: int, seized_seconds: float, at_once: int) -> None:
    """`count` constrained and `count` free requests: all answered, as on the quiet machine."""
    asked = [*requests(count, constrained=True), *requests(count, constrained=False)]
    with runtime_of(model) as runtime:
        quiet = texts(runtime, asked, at_once=at_once)
    with runtime_of(model) as runtime, busy_machine(spinners, seized_seconds=seized_seconds) as priority:
        print(f"the seizing process has priority {priority}")
        assert texts(runtime, asked, at_once=at_once) == quiet
        assert losses(runtime) == (0, 0, 0)
    assert not [text for text in quiet if "Error: " in text]


def test_a_start_succeeds_on_a_busy_machine() -> None:
    check_starts("oracle", 1, spinners=4, seized_seconds=4.0)


def test_texts_on_a_busy_machine_are_those_of_a_quiet_one() -> None:
    check_texts("oracle", 12, spinners=4, seized_seconds=4.0, at_once=8)


@pytest.mark.parametrize(
    ("which", "error"), [(engine_of, EngineError), (gateway_of, ConnectionLostError)], ids=["engine", "gateway"]
)
def test_a_stopped_process_is_noticed_within_five_seconds_and_replaced(
    which: Callable[[Runtime], psutil.Process], error: type[UmbelError]
) -> None:
    with runtime_of("oracle") as runtime:
        victim = which(runtime)
        assert seconds_to_notice(runtime, lambda: victim, error) < 5
        assert runtime.complete("hello", {"max_tokens": 3})
        assert which(runtime).pid != victim.pid


@pytest.mark.nightly
@pytest.mark.model
def test_twenty_of_twenty_starts_of_the_default_model_succeed_next_to_twelve_spinners() -> None:
    check_starts("default", 20, spinners=12, seized_seconds=10.0)


@pytest.mark.nightly
@pytest.mark.model
def test_four_hundred_texts_of_the_default_model_are_the_same_next_to_twelve_spinners() -> None:
    check_texts("default", 200, spinners=12, seized_seconds=10.0, at_once=32)
