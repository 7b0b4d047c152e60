"""Which backends have been started on a loop, so that not every stream asks again.

`Backend.start` is idempotent and may take seconds the first time, so it is awaited in a task of its own; for a backend
that has started long ago that task would be a tenth of what a call costs. A backend that is gone is forgotten, a new
loop starts everything anew, and after a fork the loop is a new one.
"""

import asyncio
import weakref

from ..lang.protocol import Backend

_started: "weakref.WeakKeyDictionary[Backend, weakref.ref[asyncio.AbstractEventLoop]]" = weakref.WeakKeyDictionary()


def has_started(backend: Backend) -> bool:
    """On the running loop."""
    try:
        loop = _started.get(backend)
    except TypeError:  # not hashable, or it takes no weak reference: it is asked again
        return False
    return loop is not None and loop() is asyncio.get_running_loop()


def note(backend: Backend) -> None:
    """Its `start` has returned on the running loop."""
    try:
        _started[backend] = weakref.ref(asyncio.get_running_loop())
    except TypeError:
        return
