"""The numbers of a batch, on a virtual clock; the bar; the function that gets them."""

import pytest
import umbel as ul
from umbel.interpreter.data.progress import Tally


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@ul.function
def check(s: ul.State, x: int) -> None:
    s += f"<{x}>" + ul.gen("y")
    s["y"]
    if x == 1:
        raise ValueError("one")


def test_rate_and_time_left_are_of_this_run() -> None:
    clock = Clock()
    tally = Tally(100, clock)
    tally.resumed = 40
    usage = ul.Usage(prompt_tokens=4000, cached_tokens=1000, completion_tokens=70, calls=3)
    clock.now += 10
    for number in range(20):
        tally.add(ul.Cost(usage, dollars=0.25), failed=number < 2)
    numbers = tally.numbers()
    assert (numbers.done, numbers.failed, numbers.finished) == (18, 2, 60)
    assert (numbers.rate, numbers.seconds_left, numbers.cached_share, numbers.dollars) == (2.0, 20.0, 0.25, 5.0)
    assert str(numbers) == (
        "2 failed · 40 done before · 2 rows/s · 80,000 tokens in, 25% cached, 1,400 out · $5.00 · 20 s left"
    )


def test_what_is_not_known_is_not_made_up() -> None:
    clock = Clock()
    tally = Tally(None, clock)
    assert (tally.numbers().rate, tally.numbers().seconds_left) == (0.0, None)
    clock.now += 1
    tally.add(ul.Cost(dollars=None), failed=False)
    assert tally.numbers().seconds_left is None
    assert str(tally.numbers()).endswith("price not known")


def test_a_function_gets_the_numbers() -> None:
    seen: list[ul.BatchProgress] = []
    check.run_batch([(n,) for n in range(4)], backend=ul.Echo(), progress=seen.append, on_error="return")
    assert (seen[-1].total, seen[-1].done, seen[-1].failed, seen[-1].usage.calls) == (4, 3, 1, 4)
    assert [each.finished for each in seen] == sorted({each.finished for each in seen})


def test_the_bar_has_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    check.run_batch([(n,) for n in range(4)], backend=ul.Echo(), progress=True, on_error="return")
    told = capsys.readouterr().err
    assert "4/4" in told
    assert "1 failed" in told


def test_progress_is_a_switch_or_a_function() -> None:
    with pytest.raises(ul.ParameterError, match="progress must be True or False"):
        check.run_batch([(1,)], backend=ul.Echo(), progress="yes")  # type: ignore[call-overload]
    with pytest.raises(ul.ParameterError, match=r"progress must be True or False, got \[]"):
        check.run_batch([(1,)], backend=ul.Echo(), progress=[])  # type: ignore[call-overload]
    with pytest.raises(ul.ParameterError, match="progress must be a function, got type"):
        check.run_batch([(1,)], backend=ul.Echo(), progress=object)  # type: ignore[arg-type]
