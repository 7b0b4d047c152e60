"""Ends child processes when their parent ends, in whatever way it ends.

Three mechanisms, because each has a hole:
  * the child's standard input is a pipe of which only the parent holds the other end. When the parent
    dies, SIGKILL included, the child reads its end. (Hole: a process forked from the parent inherits
    the pipe and keeps it open.)
  * the child checks whether it still has the same parent. (Hole: half a second late.)
  * Linux sends a signal when the parent *thread* dies, so only children started from a main thread may
    ask for it.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

LOOK = 0.5  # seconds between checks of the parent's id
_PR_SET_PDEATHSIG = 1


def watch(parent: int, before_exit: Callable[[], None], *, pipe: int = 0) -> threading.Thread:
    """Ends this process, after `before_exit`, once `pipe` is closed by the parent or the parent is gone.

    The thread is a daemon and shares no lock: it works while the main thread hangs.
    """

    def look() -> None:
        while os.getppid() == parent:
            readable, _, _ = select.select([pipe], [], [], LOOK)
            if readable and not os.read(pipe, 4096):
                break
        with contextlib.suppress(Exception):  # the parent is gone, and the exit must come
            before_exit()
        os._exit(0)

    thread = threading.Thread(target=look, name="lifeline", daemon=True)
    thread.start()
    return thread


def die_with_parent_thread(parent: int) -> None:
    """Asks Linux for SIGKILL at the death of the thread that started this process; does nothing elsewhere."""
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(0)


def read_line(pipe: int = 0, limit: int = 1 << 20) -> bytes:
    """Reads the first line of a pipe, byte by byte, so that nothing after it is taken."""
    line = bytearray()
    while (byte := os.read(pipe, 1)) not in (b"\n", b""):
        line += byte
        if len(line) > limit:
            raise ValueError(f"a first line of more than {limit} bytes")
    return bytes(line)
