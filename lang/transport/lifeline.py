"""Ends a child process with its parent, in whatever way the parent ends.

The child's standard input is a pipe of which only the parent holds the other end. When the parent dies, SIGKILL
included, the child reads its end. A process forked from the parent inherits the pipe and keeps it open, so the child
also checks, twice a second, whether it still has the same parent. The first line in the pipe is what the parent tells
its child to do.
"""

import contextlib
import os
import select
import threading
from collections.abc import Callable

LOOK = 0.5  # seconds between checks of the parent's id


END_LINE = b"end\n"  # asks the child to end in an orderly way, before the pipe is closed


def watch(
    parent: int, before_exit: Callable[[], None], *, pipe: int = 0, on_end: Callable[[], None] | None = None
) -> threading.Thread:
    """Ends this process, after `before_exit`, once `pipe` is closed by the parent or the parent is gone.

    on_end: called in the thread when the parent writes END_LINE, and ends the process at some time; None: it is ended
    at once.

    The thread is a daemon and shares no lock: it works while the main thread hangs.
    """

    def look() -> None:
        while os.getppid() == parent:
            readable, _, _ = select.select([pipe], [], [], LOOK)
            if readable and (not os.read(pipe, 4096) or on_end is None):
                break
            if readable and on_end is not None:
                on_end()
        with contextlib.suppress(Exception):  # the parent is gone, and the exit must come
            before_exit()
        os._exit(0)

    thread = threading.Thread(target=look, name="lifeline", daemon=True)
    thread.start()
    return thread


def read_line(pipe: int = 0, limit: int = 1 << 20) -> bytes:
    """Reads the first line of a pipe, byte by byte, so that nothing after it is taken."""
    line = bytearray()
    while (byte := os.read(pipe, 1)) not in (b"\n", b""):
        line += byte
        if len(line) > limit:
            raise ValueError(f"a first line of more than {limit} bytes")
    return bytes(line)
