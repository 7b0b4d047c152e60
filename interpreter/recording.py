"""Recording: while a program is traced, runs that its body opens are recorded too, and not run.

A recording is looked up where a run is opened. It follows the context, as the default backend does.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from inspect import BoundArguments
from typing import TYPE_CHECKING, Any, Protocol

from ..lang.state import AsyncState, Sink, State

if TYPE_CHECKING:
    from .body import Body


class Recording(Protocol):
    """Records what a program asks while its caller is recorded."""

    def run(self, body: "Body", call: BoundArguments, options: Mapping[str, Any]) -> State:
        """`program.run(...)`: a stream of its own. `options`: keywords of the run as they were given."""

    async def run_async(self, body: "Body", call: BoundArguments, options: Mapping[str, Any]) -> AsyncState: ...

    def enter(self, body: "Body", call: BoundArguments, sink: Sink) -> None:
        """`program(s, ...)`, in a state of the program around it. Raises TraceError for a state of another one."""

    def refuse(self, what: str, instead: str) -> Exception:
        """The error for what cannot be recorded: what it was, and what to write instead."""


_recording: ContextVar[Recording | None] = ContextVar("umbel_recording", default=None)


def recording() -> Recording | None:
    """Of the program that is being traced here; None where programs run."""
    return _recording.get()


@contextmanager
def recorded(by: Recording) -> Iterator[None]:
    """Around the body that is traced."""
    token = _recording.set(by)
    try:
        yield
    finally:
        _recording.reset(token)


def not_while_recording(what: str, instead: str) -> None:
    """Raises TraceError inside of a program that is traced: what was about to happen, and what to write instead."""
    recorder = _recording.get()
    if recorder is not None:
        raise recorder.refuse(what, instead)
