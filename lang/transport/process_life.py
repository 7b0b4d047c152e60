"""State of a process as the system knows it: its CPU time, and the time it wanted a core and had none.

A process that is asked nothing tells the truth: these readings need no thread of it and no interpreter lock. Both
directions of supervision use them: the gateway watches the engine, and a program's link watches the gateway.

                         wants a core, or computes        asleep            waits for a disk    stopped
    seconds count as     computed, or nothing at all      idle              on_disk             stopped
"""

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

ACTIVE = 0.05  # of a core: below it a process is idle. Threads that wait for an interpreter lock take up to 0.03
LONGEST_LOOK = 1.0  # seconds between two looks that count: after a longer time the observer was away itself
_PROCESS_CLOCK = 2  # of Linux: the clock of a process is (~id << 3) | 2, see clock_getcpuclockid(3)
_NANOSECONDS = 1e-9


class ProcessState(Enum):
    RUNNABLE = auto()  # a thread computes or waits for a core
    ASLEEP = auto()
    ON_DISK = auto()  # a thread waits where no signal reaches it, mostly for a page of a file
    STOPPED = auto()  # by SIGSTOP or a debugger
    GONE = auto()  # ended, perhaps not collected by its parent


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """A process at one moment.

    Attributes:
        computed: seconds of CPU time of all its threads.
        waited: seconds that its living threads wanted a core and had none; 0 where the system does not say.
    """

    state: ProcessState
    computed: float = 0.0
    waited: float = 0.0


@dataclass(slots=True)
class TimeSpent:
    """Adds up how a process has spent the time since `begin`, as far as it was observed. All in seconds.

    Attributes:
        idle: it could have answered: it neither computed nor waited for a core or a disk, and its observer did not
            wait for a core either.
        stopped: it could not.
        on_disk: it waited for a disk.
        computed: seconds of a core; those of several threads at once count once.
    """

    idle: float = 0.0
    stopped: float = 0.0
    on_disk: float = 0.0
    computed: float = 0.0
    _last: tuple[float, ProcessSample, ProcessSample] | None = field(default=None, repr=False)

    def begin(self) -> None:
        """Counts anew: it was heard, or does something else now."""
        self.idle = self.stopped = self.on_disk = self.computed = 0.0
        self._last = None

    def look(self, now: float, process: ProcessSample, observer: ProcessSample) -> None:
        """Adds the time since the last look. `now`: on any monotonic clock, in seconds."""
        last, self._last = self._last, (now, process, observer)
        if last is None:
            return
        then, before, observer_before = last
        passed = now - then
        computed = min(max(process.computed - before.computed, 0.0), passed)
        starved = max(process.waited - before.waited, 0.0) + max(observer.waited - observer_before.waited, 0.0)
        available = max(passed - starved, 0.0)  # what it had of a core, or could have had
        self.computed += computed
        match process.state:
            case ProcessState.STOPPED | ProcessState.GONE:
                self.stopped += min(passed, LONGEST_LOOK)
            case ProcessState.ON_DISK:
                self.on_disk += min(passed, LONGEST_LOOK)
            case ProcessState.ASLEEP if computed < ACTIVE * available:
                self.idle += min(available, LONGEST_LOOK)
            case ProcessState.ASLEEP | ProcessState.RUNNABLE:
                pass


def read_process(process_id: int) -> ProcessSample:
    """Asks the system for the state of a process of this user. Costs some 30 µs of CPU per thread on Linux."""
    return _from_files(process_id) if Path("/proc/self/task").is_dir() else _from_ps(process_id)


def read_this_thread() -> ProcessSample:
    """The thread that observes. Other threads of its process may want cores all the time, and do not keep it from
    looking."""
    waited = 0.0
    with contextlib.suppress(OSError, IndexError, ValueError):
        waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * _NANOSECONDS
    return ProcessSample(ProcessState.RUNNABLE, time.thread_time(), waited)


def read_session(leader: int) -> ProcessSample:
    """A process that leads a session, and all that it has started in it, as one; where there is no /proc, it alone."""
    readings = [read_process(process_id) for process_id in _session(leader)]
    state = read_process(leader).state
    return ProcessSample(state, sum(each.computed for each in readings), sum(each.waited for each in readings))


def _session(leader: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            found.append(int(entry.parent.name))
    return found or [leader]


def _from_files(process_id: int) -> ProcessSample:
    letters, waited = set(), 0.0
    try:
        threads = list(Path(f"/proc/{process_id}/task").iterdir())
        computed = time.clock_gettime((~process_id << 3) | _PROCESS_CLOCK)
    except OSError:
        return ProcessSample(ProcessState.GONE)
    for thread in threads:
        try:
            letters.add((thread / "stat").read_text().rpartition(") ")[2][0])
            waited += int((thread / "schedstat").read_text().split()[1]) * _NANOSECONDS
        except OSError:  # this thread has ended, or the system keeps no such statistics
            continue
    return ProcessSample(_state(letters), computed, waited)


def _from_ps(process_id: int) -> ProcessSample:
    """Samples a process with ps, on systems without /proc: macOS."""
    command = ["ps", "-o", "stat=,time=", "-p", str(process_id)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ProcessSample(ProcessState.RUNNABLE)  # nothing is known, so nothing speaks against it
    if not answer.stdout.strip():
        return ProcessSample(ProcessState.GONE)
    state, clock = answer.stdout.split()[:2]
    return ProcessSample(_state({state[0]}), _seconds(clock))


def _seconds(clock: str) -> float:
    """`[[days-]hours:]minutes:seconds`, as ps writes CPU time."""
    days, _, rest = clock.rpartition("-")
    seconds = 0.0
    for part in rest.split(":"):
        seconds = 60 * seconds + float(part)
    return seconds + 86_400 * int(days or 0)


def _state(letters: set[str]) -> ProcessState:
    """Returns the state of a process from its threads' states, in the letters of ps."""
    living = letters - set("ZX")
    if not living:
        return ProcessState.GONE
    if living <= set("Tt"):
        return ProcessState.STOPPED
    if "R" in living:
        return ProcessState.RUNNABLE
    return ProcessState.ON_DISK if living & set("DU") else ProcessState.ASLEEP


# --------------------------------------------------------------------------------------- in words, for errors


def machine_in_words() -> str:
    """Describes the load of the machine, for errors: "the machine is busy (load 33.1 on 2 cores)"."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"the machine is {'busy' if load > 1.5 * cores else 'not busy'} (load {load:.1f} on {cores} cores)"


def share_in_words(reading: ProcessSample) -> str:
    """Describes the CPU time of a process: "consumed 3.1 s of CPU time and waited 40.2 s for a core"."""
    return f"consumed {reading.computed:.1f} s of CPU time and waited {reading.waited:.1f} s for a core"


def memory_kills() -> int | None:
    """Processes that Linux has killed for lack of memory since it started; None where the system does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def exit_in_words(code: int, memory_kills_before: int | None) -> str:
    """Describes a process's end. `code`: of subprocess, negative for a signal. `memory_kills_before`: at its start."""
    if code >= 0:
        return f"its process ended with status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    if name != "SIGKILL":
        return f"its process was ended by {name}"
    kills = memory_kills()
    if kills is None or memory_kills_before is None:
        return f"its process was ended by {name} (out of memory, perhaps)"
    if kills > memory_kills_before:
        return f"its process was ended by {name}, as the system ran out of memory; use a smaller model or pool_memory"
    return f"its process was ended by {name}, sent by another process (the system did not run out of memory)"
