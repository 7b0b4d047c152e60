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
    """Hears signals on an event loop of the main thread, as long as anything waits."""

    def __init__(self) -> None:
        self._waits: Counter[Stoppable] = Counter()
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, run: Stoppable) -> None:
        self._waits[run] += 1
        if self._sockets is None:
            self._open(asyncio.get_running_loop())

    def discard(self, run: Stoppable) -> None:
        self._waits[run] -= 1
        if not self._waits[run]:
            del self._waits[run]
        if not self._waits:
            self._close()

    def _open(self, loop: asyncio.AbstractEventLoop) -> None:
        reading, writing = socket.socketpair()
        reading.setblocking(False)
        writing.setblocking(False)
        try:
            loop.add_reader(reading, self._hear)
        except NotImplementedError:  # the loop of Windows that has no readers
            reading.close()
            writing.close()
            return
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        if before != -1:  # of a loop that wakes by itself; the cell is cancelled, reads leave their runs alone
            signal.set_wakeup_fd(before)
        self._sockets, self._loop = (reading, writing), loop

    def _close(self) -> None:
        sockets, loop = self._sockets, self._loop
        self._sockets = self._loop = None
        if sockets is None or loop is None:
            return
        reading, writing = sockets
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, writing.fileno()):
            signal.set_wakeup_fd(current)
        if not loop.is_closed():
            loop.remove_reader(reading)
        reading.close()
        writing.close()

    def _hear(self) -> None:
        if self._sockets is None:
            return
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
