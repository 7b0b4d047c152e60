"""Records runs that the body of a traced program opens, instead of running them.

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
    """Records the runs of a program while its caller is traced."""

    def run(self, body: "Body", call: BoundArguments, options: Mapping[str, Any]) -> State:
        """Records `program.run(...)` as a stream of its own. `options`: keywords of the run as they were given."""

    async def run_async(self, body: "Body", call: BoundArguments, options: Mapping[str, Any]) -> AsyncState: ...

    def enter(self, body: "Body", call: BoundArguments, sink: Sink) -> None:
        """Records `program(s, ...)` in the caller's state. Raises TraceError for a state of another program."""

    def refuse(self, what: str, instead: str) -> Exception:
        """Returns the error for `what`, which cannot be recorded; `instead`: what to write."""


_recording: ContextVar[Recording | None] = ContextVar("umbel_recording", default=None)


def recording() -> Recording | None:
    """Returns the recording of the program being traced in this context; None where programs run."""
    return _recording.get()


@contextmanager
def recorded(by: Recording) -> Iterator[None]:
    """Sets the recording while a body is traced."""
    token = _recording.set(by)
    try:
        yield
    finally:
        _recording.reset(token)


def not_while_recording(what: str, instead: str) -> None:
    """Raises TraceError inside a traced program, for `what` with `instead` to write."""
    recorder = _recording.get()
    if recorder is not None:
        raise recorder.refuse(what, instead)
