"""When a process that works for the gateway is ended: by its own CPU time, never because the machine is busy."""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

import pytest
from umbel.srt.child_clock import ChildState, Condition, look_at
from umbel.srt.config import WorkerLimits
from umbel.srt.worker_process import Cause, Trouble, Watch

LIMITS = WorkerLimits()


def watch(states: Iterable[ChildState | None], *, may_sleep: bool = False) -> Watch:
    """Of a child that is in these states, one for each look and one for the beginning."""
    return Watch(iter(states).__next__, LIMITS, cpu_seconds=2.5, wall_seconds=LIMITS.wall_seconds, may_sleep=may_sleep)


def states(condition: Condition, cpu: Callable[[int], float]) -> Iterable[ChildState]:
    return (ChildState(condition, cpu(number)) for number in itertools.count())


def judged(watched: Watch, looks: int, elapsed: float = LIMITS.look) -> Trouble | None:
    """The first trouble within so many looks."""
    return next(filter(None, (watched.judge(elapsed) for _ in range(looks))), None)


def test_a_child_that_waits_for_a_core_is_left_alone_for_minutes() -> None:
    assert judged(watch(states(Condition.RUNNABLE, lambda number: 0.0)), 2000) is None
    assert judged(watch(states(Condition.RUNNABLE, lambda number: number * 0.001)), 2000) is None


def test_a_child_that_got_no_core_for_as_long_as_any_request_lives_is_ended_as_busy() -> None:
    trouble = judged(watch(states(Condition.RUNNABLE, lambda number: 0.0)), 3000)
    assert trouble is not None
    assert trouble.cause is Cause.BUSY
    assert trouble.wall_seconds > LIMITS.starved_seconds


def test_a_child_is_ended_for_the_cpu_time_it_has_used_since_its_job_began() -> None:
    watched = watch(ChildState(Condition.RUNNABLE, 7.0 + 0.2 * number) for number in itertools.count())
    assert judged(watched, 12) is None
    trouble = judged(watched, 2)
    assert trouble is not None
    assert trouble.cause is Cause.CPU
    assert trouble.cpu_seconds == pytest.approx(2.6)


@pytest.mark.parametrize("condition", [Condition.STOPPED, Condition.ASLEEP])
def test_a_child_that_uses_no_time_although_it_could_is_ended(condition: Condition) -> None:
    looks = round(LIMITS.idle_seconds / LIMITS.look)
    watched = watch(states(condition, lambda number: 1.0))
    assert judged(watched, looks - 1) is None
    trouble = judged(watched, 2)
    assert trouble is not None
    assert trouble.cause is Cause.HUNG


def test_a_child_that_sleeps_now_and_then_is_no_child_that_hangs() -> None:
    assert judged(watch(states(Condition.ASLEEP, lambda number: 0.01 * (number // 8))), 400) is None
    assert judged(watch(states(Condition.DISK, lambda number: 0.0)), 400) is None


def test_a_child_may_sleep_while_it_starts_and_not_be_stopped() -> None:
    assert judged(watch(states(Condition.ASLEEP, lambda number: 0.0), may_sleep=True), 400) is None
    trouble = judged(watch(states(Condition.STOPPED, lambda number: 0.0), may_sleep=True), 400)
    assert trouble is not None
    assert trouble.cause is Cause.HUNG


def test_the_absence_of_the_parent_counts_against_no_child() -> None:
    assert judged(watch(states(Condition.STOPPED, lambda number: 0.0)), 2, elapsed=3600.0) is None


def test_where_the_system_does_not_say_the_wall_decides() -> None:
    looks = round(LIMITS.wall_seconds / LIMITS.look)
    watched = watch(itertools.repeat(None))
    assert judged(watched, looks) is None
    trouble = judged(watched, 1)
    assert trouble is not None
    assert trouble.cause is Cause.BUSY


# ------------------------------------------------------------------------------------------ the system's word


def until(process_id: int, wanted: Callable[[ChildState], bool]) -> ChildState:
    while True:
        state = look_at(process_id)
        assert state is not None, "it lives"
        if wanted(state):
            return state
        os.sched_yield()


@pytest.mark.processes
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system has no /proc")
def test_the_system_says_what_a_child_does() -> None:
    script = "import sys\nprint(flush=True)\nsys.stdin.readline()\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        until(child.pid, lambda state: state.condition is Condition.ASLEEP)
        child.stdin.write(b"\n")
        child.stdin.flush()
        before = until(child.pid, lambda state: state.condition is Condition.RUNNABLE).cpu_seconds
        until(child.pid, lambda state: state.cpu_seconds > before)
        child.send_signal(signal.SIGSTOP)
        stopped = until(child.pid, lambda state: state.condition is Condition.STOPPED)
        assert look_at(child.pid) == stopped, "what is stopped uses no time"
        child.kill()
        child.wait()
        assert look_at(child.pid) is None


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system has no /proc")
def test_the_clock_of_a_child_is_the_clock_it_sees_itself() -> None:
    before, state = time.process_time(), look_at(os.getpid())
    assert state is not None
    assert before - 0.05 <= state.cpu_seconds <= time.process_time() + 0.05
