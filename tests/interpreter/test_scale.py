"""Ten thousand programs: memory stays flat, one failure is one failure, threads stay few."""

import gc
import threading

import psutil
import pytest
import umbel as ul
from umbel.interpreter.backends.echo import Echo

PROGRAMS = 10_000
WARM_UP = 1_000  # caches, pools and lazily imported modules have their size by then
MEGABYTE = 2**20


@pytest.mark.nightly
def test_ten_thousand_programs_in_generator_form_hold_flat_memory() -> None:
    @ul.function
    def program(s, number):
        s += f"Some text that is not the same for each: {number}. " * 5
        s += ul.gen("x", max_tokens=8)
        if number == 7_777:
            raise ValueError("one of them")

    process = psutil.Process()
    before = threading.active_count()
    results = program.run_batch(
        ((number,) for number in range(PROGRAMS)),
        backend=Echo(lambda prompt: "some answer of a few words", record=10),
        generator_style=True,
        on_error="return",
        timeout=60.0,
    )
    start = growth = failures = most_threads = 0
    for count, result in enumerate(results, 1):
        failures += isinstance(result, ul.Failure)
        if count == WARM_UP:
            gc.collect()
            start = process.memory_info().rss
        if count > WARM_UP and count % 500 == 0:
            growth = max(growth, process.memory_info().rss - start)
            most_threads = max(most_threads, threading.active_count())
    assert count == PROGRAMS
    assert failures == 1
    assert most_threads <= before + 33
    assert growth < 50 * MEGABYTE, f"{growth / MEGABYTE:.0f} MB"
