"""When a process that works for the gateway is ended: by its own CPU time, never because the machine is busy."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

import pytest
from umbel.lang.transport.process_life import ProcessSample, ProcessState, read_process
from umbel.srt.core.config import WorkerLimits
from umbel.srt.processes.worker import Cause, Trouble, Watch

LIMITS = WorkerLimits()


def watch(states: Iterable[ProcessSample], *, may_sleep: bool = False) -> Watch:
    """Of a child that is in these states, one for each look and one for the beginning."""
    return Watch(iter(states).__next__, LIMITS, cpu_seconds=2.5, wall_seconds=LIMITS.wall_seconds, may_sleep=may_sleep)


def states(condition: ProcessState, cpu: Callable[[int], float]) -> Iterable[ProcessSample]:
    return (ProcessSample(condition, cpu(number)) for number in itertools.count())


def judged(watched: Watch, looks: int, elapsed: float = LIMITS.look) -> Trouble | None:
    """The first trouble within so many looks."""
    return next(filter(None, (watched.judge(elapsed) for _ in range(looks))), None)


def test_a_child_that_waits_for_a_core_is_left_alone_for_minutes() -> None:
    assert judged(watch(states(ProcessState.RUNNABLE, lambda number: 0.0)), 2000) is None
    assert judged(watch(states(ProcessState.RUNNABLE, lambda number: number * 0.001)), 2000) is None


def test_a_child_that_got_no_core_for_as_long_as_any_request_lives_is_ended_as_busy() -> None:
    trouble = judged(watch(states(ProcessState.RUNNABLE, lambda number: 0.0)), 3000)
    assert trouble is not None
    assert trouble.cause is Cause.BUSY
    assert trouble.wall_seconds > LIMITS.starved_seconds


def test_a_child_is_ended_for_the_cpu_time_it_has_used_since_its_job_began() -> None:
    watched = watch(ProcessSample(ProcessState.RUNNABLE, 7.0 + 0.2 * number) for number in itertools.count())
    assert judged(watched, 12) is None
    trouble = judged(watched, 2)
    assert trouble is not None
    assert trouble.cause is Cause.CPU
    assert trouble.cpu_seconds == pytest.approx(2.6)


@pytest.mark.parametrize("condition", [ProcessState.STOPPED, ProcessState.ASLEEP])
def test_a_child_that_uses_no_time_although_it_could_is_ended(condition: ProcessState) -> None:
    looks = round(LIMITS.idle_seconds / LIMITS.look)
    watched = watch(states(condition, lambda number: 1.0))
    assert judged(watched, looks - 1) is None
    trouble = judged(watched, 2)
    assert trouble is not None
    assert trouble.cause is Cause.HUNG


def test_a_child_that_sleeps_now_and_then_is_no_child_that_hangs() -> None:
    assert judged(watch(states(ProcessState.ASLEEP, lambda number: 0.01 * (number // 8))), 400) is None
    assert judged(watch(states(ProcessState.ON_DISK, lambda number: 0.0)), 400) is None


def test_a_child_may_sleep_while_it_starts_and_not_be_stopped() -> None:
    assert judged(watch(states(ProcessState.ASLEEP, lambda number: 0.0), may_sleep=True), 400) is None
    trouble = judged(watch(states(ProcessState.STOPPED, lambda number: 0.0), may_sleep=True), 400)
    assert trouble is not None
    assert trouble.cause is Cause.HUNG


def test_the_absence_of_the_parent_counts_against_no_child() -> None:
    assert judged(watch(states(ProcessState.STOPPED, lambda number: 0.0)), 2, elapsed=3600.0) is None


def test_where_the_system_does_not_say_the_wall_decides() -> None:
    looks = round(LIMITS.wall_seconds / LIMITS.look)
    watched = watch(itertools.repeat(ProcessSample(ProcessState.GONE)))
    assert judged(watched, looks) is None
    trouble = judged(watched, 1)
    assert trouble is not None
    assert trouble.cause is Cause.BUSY


# ------------------------------------------------------------------------------------------ the system's word


def until(process_id: int, wanted: Callable[[ProcessSample], bool]) -> ProcessSample:
    while True:
        state = read_process(process_id)
        if wanted(state):
            return state
        os.sched_yield()


@pytest.mark.processes
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system has no /proc")
def test_the_system_says_what_a_child_does() -> None:
    script = "import sys\nprint(flush=True)\nsys.stdin.readline()\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdout.readline()
            until(child.pid, lambda state: state.state is ProcessState.ASLEEP)
            child.stdin.write(b"\n")
            child.stdin.flush()
            before = until(child.pid, lambda state: state.state is ProcessState.RUNNABLE).computed
            until(child.pid, lambda state: state.computed > before)
            child.send_signal(signal.SIGSTOP)
            until(child.pid, lambda state: state.state is ProcessState.STOPPED)  # which it may be on its CPU still
            looks = [read_process(child.pid) for _ in range(100)]
            assert looks[-1] == looks[50], "what is stopped uses no time"
        finally:
            child.kill()  # a child that is stopped would be waited for without end
        child.wait()
        assert read_process(child.pid).state is ProcessState.GONE


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system has no /proc")
def test_the_clock_of_a_child_is_the_clock_it_sees_itself() -> None:
    before, state = time.process_time(), read_process(os.getpid())
    assert before - 0.05 <= state.computed <= time.process_time() + 0.05
