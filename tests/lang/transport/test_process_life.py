"""What the system says of processes, and what follows from it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from umbel.lang.transport import process_life
from umbel.lang.transport.process_life import (
    ProcessSample,
    ProcessState,
    TimeSpent,
    exit_in_words,
    machine_in_words,
    read_process,
    read_session,
    read_this_thread,
)

PATIENCE = 60.0  # seconds until a condition that must come counts as missing
READERS = [process_life._from_files, process_life._from_ps]

SLEEPER = "import time; time.sleep(1000)"
SPINNER = "while True: pass"
# Native code that sleeps and keeps the interpreter lock, while threads of Python want it.
LOCK_HOLDER = """
import ctypes, threading, time
for _ in range(4):
    threading.Thread(target=lambda: [time.sleep(0.01) for _ in range(10**6)], daemon=True).start()
ctypes.PyDLL(None).sleep(1000)
"""


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", program])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


@pytest.mark.processes
@pytest.mark.parametrize("read", READERS)
def test_the_system_tells_a_process_that_computes_from_one_that_is_stopped_or_gone(
    read: Callable[[int], ProcessSample],
) -> None:
    with running(SPINNER) as process:
        wait_until(lambda: read(process.pid).computed >= 1.0)
        assert read(process.pid).state is ProcessState.RUNNABLE
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: read(process.pid).state is ProcessState.STOPPED)
        process.kill()
        wait_until(lambda: read(process.pid).state is ProcessState.GONE)  # not collected yet
        process.wait()
        assert read(process.pid).state is ProcessState.GONE


@pytest.mark.processes
@pytest.mark.parametrize("read", READERS)
def test_a_process_that_sleeps_is_asleep(read: Callable[[int], ProcessSample]) -> None:
    with running(SLEEPER) as process:
        wait_until(lambda: read(process.pid).state is ProcessState.ASLEEP)


@pytest.mark.processes
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="the system does not say how long a process waited")
def test_a_process_that_shares_a_core_is_known_to_wait_for_it() -> None:
    core = {min(os.sched_getaffinity(0))}
    with running(SPINNER) as first, running(SPINNER) as second:
        for process in (first, second):
            os.sched_setaffinity(process.pid, core)
        wait_until(lambda: read_process(first.pid).waited > 0.2 and read_process(second.pid).waited > 0.2)


@pytest.mark.processes
def test_threads_that_look_for_the_interpreter_lock_are_no_work() -> None:
    with running(LOCK_HOLDER) as process:
        stay = TimeSpent()
        wait_until(lambda: read_process(process.pid).state is ProcessState.ASLEEP)

        def idle() -> bool:
            stay.look(time.monotonic(), read_process(process.pid), read_process(os.getpid()))
            time.sleep(0.1)
            return stay.idle > 0.5

        wait_until(idle)


@pytest.mark.processes
def test_a_session_is_read_as_one() -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {SPINNER!r}])"
    process = subprocess.Popen([sys.executable, "-S", "-c", child], start_new_session=True)
    try:
        wait_until(lambda: read_session(process.pid).computed > 0.5 + read_process(process.pid).computed)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(
    ("clock", "seconds"), [("0:00.05", 0.05), ("12:34.50", 754.5), ("01:00:01", 3601.0), ("2-00:00:03", 172_803.0)]
)
def test_the_clock_of_ps_is_understood(clock: str, seconds: float) -> None:
    assert process_life._seconds(clock) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("letters", "state"),
    [
        ("SRD", ProcessState.RUNNABLE),
        ("SD", ProcessState.ON_DISK),
        ("SU", ProcessState.ON_DISK),
        ("SI", ProcessState.ASLEEP),
        ("TT", ProcessState.STOPPED),
        ("t", ProcessState.STOPPED),
        ("TS", ProcessState.ASLEEP),  # a debugger looks at one thread
        ("ZT", ProcessState.STOPPED),
        ("Z", ProcessState.GONE),
        ("", ProcessState.GONE),
    ],
)
def test_the_state_of_a_process_is_that_of_its_liveliest_thread(letters: str, state: ProcessState) -> None:
    assert process_life._state(set(letters)) is state


class TestStay:
    def test_the_first_look_counts_nothing_and_a_new_beginning_forgets(self) -> None:
        stay = TimeSpent()
        stay.look(100.0, ProcessSample(ProcessState.STOPPED), ProcessSample(ProcessState.RUNNABLE))
        assert stay.stopped == 0
        stay.look(100.5, ProcessSample(ProcessState.STOPPED), ProcessSample(ProcessState.RUNNABLE))
        assert stay.stopped == 0.5
        stay.begin()
        stay.look(101.0, ProcessSample(ProcessState.STOPPED), ProcessSample(ProcessState.RUNNABLE))
        assert stay.stopped == 0

    def test_a_long_time_without_a_look_counts_as_one_second(self) -> None:
        for state in (ProcessState.STOPPED, ProcessState.ASLEEP, ProcessState.ON_DISK):
            stay = TimeSpent()
            for now in (0.0, 3600.0):
                stay.look(now, ProcessSample(state), ProcessSample(ProcessState.RUNNABLE))
            assert stay.stopped + stay.idle + stay.on_disk == process_life.LONGEST_LOOK

    def test_threads_that_have_ended_take_no_time_back(self) -> None:
        stay = TimeSpent()
        stay.look(0.0, ProcessSample(ProcessState.RUNNABLE, 5.0, 9.0), ProcessSample(ProcessState.RUNNABLE))
        stay.look(0.5, ProcessSample(ProcessState.ASLEEP, 4.0, 2.0), ProcessSample(ProcessState.RUNNABLE))
        assert (stay.computed, stay.idle) == (0.0, 0.5)


class TestWords:
    def test_a_killed_process_says_whether_the_system_was_out_of_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for kills, says in ((4, "ran out of memory"), (3, "did not run out of memory"), (None, "perhaps")):
            monkeypatch.setattr(process_life, "memory_kills", lambda kills=kills: kills)
            assert "SIGKILL" in exit_in_words(-signal.SIGKILL, 3)
            assert says in exit_in_words(-signal.SIGKILL, 3)
        assert "SIGSEGV" in exit_in_words(-signal.SIGSEGV, 3)
        assert exit_in_words(7, 3) == "its process ended with status 7"

    @pytest.mark.parametrize(("load", "busy"), [(0.5, "not busy"), (33.0, "is busy")])
    def test_the_machine_is_busy_when_more_wants_to_run_than_there_are_cores(
        self, load: float, busy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
        monkeypatch.setattr(os, "cpu_count", lambda: 2)
        assert busy in machine_in_words()
        assert f"load {load}" in machine_in_words()


def test_a_signal_without_a_name_has_its_number() -> None:
    assert exit_in_words(-40, None) == "its process was ended by signal 40"


def test_the_time_of_other_threads_is_not_that_of_the_thread_that_looks() -> None:
    before = read_this_thread()
    spent = threading.Thread(target=lambda: spin(0.1))
    spent.start()
    spent.join()
    after = read_this_thread()
    assert after.computed - before.computed < 0.05


def spin(seconds: float) -> None:
    """Takes so much CPU time of the thread that calls it."""
    while time.thread_time() < seconds:
        pass
