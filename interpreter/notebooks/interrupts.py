"""Stops the runs that the coroutines of a notebook wait for when its kernel is interrupted.

IPython's kernel answers SIGINT in an async cell by a handler that cancels the cell. The handler runs at once, but the
event loop sleeps in its selector, and cancels nothing before something else wakes it: `await asyncio.sleep(60)` cannot
be interrupted, nor can a call that has no answer yet. And a read that is cancelled leaves its run alone, since others
may read it, so that a model would go on for a cell that is over.

    SIGINT ──▶ byte in a pair of sockets ──▶ the loop wakes: the kernel's handler is heard, the runs are stopped

Outside of a notebook's main thread nothing here does anything. Sync cells need nothing of it: KeyboardInterrupt is
raised in the read that blocks, and `Run.interruptible` stops the run.
"""

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

_MOST_BYTES = 4096  # of signals, read at once


class Stoppable(Protocol):
    """A run: it is stopped once, and not when it has ended."""

    def interrupt(self) -> None: ...


class _Listener:
    """Hears signals on the event loop of the main thread, from the first wait on: a signal that comes between two waits
    of a cell, before the loop's next turn, stops the run that the cell waits for then."""

    def __init__(self) -> None:
        self._waits: Counter[Stoppable] = Counter()
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, run: Stoppable) -> None:
        self._listen(asyncio.get_running_loop())
        self._waits[run] += 1

    def discard(self, run: Stoppable) -> None:
        self._hear()  # the cell may have been cancelled before the loop came to read the byte
        self._waits[run] -= 1
        if not self._waits[run]:
            del self._waits[run]

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not loop:
            self._close()
            self._open(loop)
        if self._sockets is not None:
            ours = self._sockets[1].fileno()
            before = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
            if before not in (-1, ours):
                # of a loop that wakes by itself; the cell is cancelled, reads leave their runs alone
                with contextlib.suppress(OSError, ValueError):  # it is closed: ours stays
                    signal.set_wakeup_fd(before)

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        reading, writing = socket.socketpair()
        reading.setblocking(False)
        writing.setblocking(False)
        try:
            loop.add_reader(reading, self._hear)
        except NotImplementedError:  # the loop of Windows that has no readers
            reading.close()
            writing.close()
            return
        self._sockets = reading, writing

    def _close(self) -> None:
        """Leaves a loop that has ended, or that another one has taken the place of."""
        sockets, loop = self._sockets, self._loop
        self._sockets = self._loop = None
        if sockets is None or loop is None:
            return
        reading, writing = sockets
        before = signal.set_wakeup_fd(-1)
        if before not in (-1, writing.fileno()):
            with contextlib.suppress(OSError, ValueError):
                signal.set_wakeup_fd(before)
        if not loop.is_closed():
            loop.remove_reader(reading)
        reading.close()
        writing.close()

    def _hear(self) -> None:
        if self._sockets is None:
            return
        with contextlib.suppress(BlockingIOError):  # no signal came
            if signal.SIGINT in self._sockets[0].recv(_MOST_BYTES):
                for run in tuple(self._waits):
                    run.interrupt()


_listener = _Listener()


@contextmanager
def interrupted_with_cell(run: Stoppable) -> Iterator[None]:
    """Wraps a wait of a coroutine for a run: an interrupt of the notebook's kernel stops the run."""
    if "ipykernel" not in sys.modules or threading.current_thread() is not threading.main_thread():
        yield
        return
    _listener.add(run)
    try:
        yield
    finally:
        _listener.discard(run)
