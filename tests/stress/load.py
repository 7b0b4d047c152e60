"""A machine that does something else: processes that spin, and one of real-time priority that takes a core for seconds.

All of them end with this process, however it ends.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# prctl(PR_SET_PDEATHSIG, SIGKILL): the kernel ends a spinner whose parent is gone.
_DIE_WITH_PARENT = """
import ctypes, os, sys, time
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
"""

_SPIN = f"{_DIE_WITH_PARENT}\nwhile True: pass\n"

# Says in one line which priority it was allowed, then spins and rests in turn.
_SEIZE = f"""{_DIE_WITH_PARENT}
seconds = float(sys.argv[1])
try:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    priority = "SCHED_FIFO"
except (OSError, AttributeError):
    try:
        os.nice(-20)
        priority = "nice -20"
    except OSError:
        priority = "none"
print(priority, flush=True)
while True:
    until = time.monotonic() + seconds
    while time.monotonic() < until: pass
    time.sleep(seconds / 4)
"""


@contextmanager
def busy_machine(spinners: int, *, seized_seconds: float) -> Iterator[str]:
    """Runs `spinners` processes that spin, and one that seizes a core for `seized_seconds` at a time, then rests for a
    quarter of that. Gives the priority it was allowed: "SCHED_FIFO", "nice -20" or "none"."""
    with ExitStack() as stack:
        for _ in range(spinners):
            stack.enter_context(_running(_SPIN))
        seizer = stack.enter_context(_running(_SEIZE, str(seized_seconds)))
        assert seizer.stdout is not None
        yield seizer.stdout.readline().strip()


@contextmanager
def _running(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", program, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
