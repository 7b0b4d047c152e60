"""Loaded by every Python process whose PYTHONPATH has this folder: a thread notes long holds of the interpreter lock.

It wants the lock every 20 ms. When it gets it late, the CPU time that another thread took meanwhile, less the time that
this one itself waited for a core, is how long the lock was held, so a busy machine makes no holds. It waits for none
where it may have real-time priority; elsewhere a busy machine hides some. Holds go to the file UMBEL_TICKS.<process id>
as lines of `monotonic end, seconds, thread id, module`.
"""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

TURN = 0.02  # seconds
NOTED = 0.05  # seconds; shorter holds are not written down


def readings() -> dict[int, tuple[float, float]]:
    """Thread id → seconds of CPU time, seconds without a core that it wanted."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            computed, waited, _ = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
        except OSError:  # it has ended
            continue
        found[int(thread)] = int(computed) / 1e9, int(waited) / 1e9
    return found


def tick(path: str, module: str) -> None:
    own = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.sched_setscheduler(own, os.SCHED_FIFO, os.sched_param(2))
    before = readings()
    with open(f"{path}.{os.getpid()}", "a", buffering=1) as file:
        while True:
            time.sleep(TURN)
            after = readings()
            computed = {id: now[0] - before.get(id, (0.0, 0.0))[0] for id, now in after.items() if id != own}
            holder = max(computed, key=computed.__getitem__)
            held = computed[holder] - (after[own][1] - before[own][1]) - TURN
            if held > NOTED:
                file.write(f"{time.monotonic()} {held} {holder} {module}\n")
            before = after


if "UMBEL_TICKS" in os.environ:
    module = next((word for word in sys.orig_argv if word.startswith("umbel.srt.")), "test")
    threading.Thread(target=tick, args=(os.environ["UMBEL_TICKS"], module), daemon=True).start()
