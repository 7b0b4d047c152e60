"""Whether the body of a run is at rest: it waits for a value, so it says nothing more until it has it.

What a program says behind a `gen` may come a moment later, from another thread. Whoever wants to know what follows
waits until something follows, the body rests, or it has ended.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..waiting import Signal

if TYPE_CHECKING:
    from ..run import Run


class Rest:
    """Of one run: how many of its reads wait now."""

    __slots__ = ("_lock", "_waiting", "changed")

    def __init__(self) -> None:
        self.changed = Signal()
        self._lock = threading.Lock()
        self._waiting = 0

    @property
    def resting(self) -> bool:
        return self._waiting > 0

    def begin(self) -> None:
        with self._lock:
            self._waiting += 1
        self.changed.fire()

    def end(self) -> None:
        with self._lock:
            self._waiting -= 1


@contextmanager
def resting(run: "Run") -> Iterator[None]:
    """Around a wait: when it is the program itself that waits, and not an observer, it rests."""
    if run.speculation is None or not run.is_inside:
        yield
        return
    run.speculation.rest.begin()
    try:
        yield
    finally:
        run.speculation.rest.end()
