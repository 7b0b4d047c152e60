"""Chooses the backend of a program that is given none; flushes and inspects any backend.

`set_default_backend` is for the process; `default_backend` is for a block, and follows the context:
two threads, or two tasks, do not see each other's blocks. If none was chosen, programs run on the embedded model.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast

from ..lang.errors import ParameterError, shown
from ..lang.protocol import Backend, Done
from . import loop

_HOOKS = ("start", "generate", "score", "hint", "tokens_at_most", "control", "close")

_in_context: ContextVar[Backend | None] = ContextVar("umbel_default_backend", default=None)
_lock = threading.Lock()
_of_process: list[Backend] = []  # at most one


def set_default_backend(backend: Backend | None) -> None:
    """Sets the default backend of this process; None unsets it.

    Raises:
        ParameterError: not a backend.
    """
    chosen = [] if backend is None else [checked(backend)]
    with _lock:
        _of_process[:] = chosen


@contextmanager
def default_backend(backend: Backend) -> Iterator[Backend]:
    """Sets the default backend of a block: `with default_backend(backend): ...`."""
    token = _in_context.set(checked(backend))
    try:
        yield backend
    finally:
        _in_context.reset(token)


def chosen_backend(given: object = None) -> Backend:
    """Returns the backend given to a run, else the block's, else the process's, else the embedded model.

    Raises:
        ParameterError: not a backend.
        MissingExtraError: none was chosen, and the runtime is not installed.
    """
    if given is not None:
        return checked(given)
    in_context = _in_context.get()
    if in_context is not None:
        return in_context
    with _lock:
        if not _of_process:
            from .backends.runtime import Runtime

            _of_process.append(Runtime())  # starts nothing before its first use
        return _of_process[0]


def checked(backend: object) -> Backend:
    """Checks that an object is a backend, by its class: properties may need a started backend."""
    if isinstance(backend, type) or not all(callable(getattr(type(backend), hook, None)) for hook in _HOOKS):
        raise ParameterError(
            f"{shown(backend)} is not a backend; write an instance such as umbel.Runtime() or umbel.Echo()"
        )
    return cast(Backend, backend)


def flush_cache(backend: Backend | None = None) -> None:
    """Drops every cached prefix of the backend, or of the default one."""
    _ask(chosen_backend(backend), "flush_cache")


def get_server_info(backend: Backend | None = None) -> dict[str, Any]:
    """Returns facts about the backend, or the default one: model, sizes, counters."""
    return dict(_ask(chosen_backend(backend), "info").result)


def _ask(backend: Backend, verb: str) -> Done:
    async def ask() -> Done:
        await backend.start()
        return await backend.control(verb)

    return loop.streams.run(ask())
