"""The numbers of a batch, on a virtual clock; the bar; the function that gets them."""

import threading

import pytest
import umbel as ul
from umbel.interpreter.data.progress import Bar, Tally


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
        "2 failed · 40 done before · 2 rows/s · 20 s left · 60 calls · 80,000 tokens in, 25% cached, 1,400 out · $5.00"
    )


def test_calls_of_programs_that_run_are_counted_as_they_end() -> None:
    tally = Tally(500, Clock())
    costs = [ul.Cost(ul.Usage(prompt_tokens=100, completion_tokens=7, calls=2), dollars=0.5)] * 3
    numbers = tally.numbers(costs)
    assert (numbers.finished, numbers.running, numbers.usage.calls, numbers.dollars) == (0, 3, 6, 1.5)
    assert numbers.lines() == ("3 running · 0 rows/s", "6 calls · 300 tokens in, 0% cached, 21 out · $1.50")
    for cost in costs:
        tally.add(cost, failed=False)
    assert tally.numbers().usage == numbers.usage
    assert tally.numbers([ul.Cost(dollars=None)]).dollars is None


def test_lines_of_a_long_batch_fit_a_terminal() -> None:
    usage = ul.Usage(prompt_tokens=91_220_411, cached_tokens=81_220_411, completion_tokens=910_400, calls=191_220)
    for dollars in (1234.56, None):
        numbers = ul.BatchProgress(90_000, 900, 1_234, 45_678, 1234.5, usage, dollars, running=256)
        assert max(map(len, numbers.lines())) <= 80


def test_numbers_come_while_no_program_has_ended() -> None:
    seen: list[ul.BatchProgress] = []
    told = threading.Event()

    def note(numbers: ul.BatchProgress) -> None:
        seen.append(numbers)
        if numbers.usage.calls == 4:
            told.set()

    @ul.function
    def waits(s: ul.State, x: int) -> None:
        s += f"<{x}>" + ul.gen("y")
        s["y"]
        assert told.wait(60)

    waits.run_batch([(n,) for n in range(4)], backend=ul.Echo(), progress=note)
    assert (0, 4, 4) in [(numbers.finished, numbers.running, numbers.usage.calls) for numbers in seen]
    assert (seen[-1].finished, seen[-1].running, seen[-1].usage.calls) == (4, 0, 4)


def test_without_a_terminal_the_numbers_are_told_twice_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Bar(4, clock) as bar:
        for calls in range(4):
            bar.show(ul.BatchProgress(4, 0, 0, 0, clock.now, ul.Usage(calls=calls), 0.0, running=2))
            clock.now += 20
        told = capsys.readouterr().err
    assert told == "programs 0/4\n2 running · 0 rows/s\n2 calls · 0 tokens in, 0% cached, 0 out\n"


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
    assert [each.finished for each in seen] == sorted(each.finished for each in seen)


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
