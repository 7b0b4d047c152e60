"""Tells what kind a file of a run is by how its first line begins, and reads it as a trace."""

from pathlib import Path

from ...lang.traces.calls import CallTrace
from .journal import of_journal
from .saved_run import of_saved_run

_JOURNAL, _SAVED_RUN = b'{"sum":', b'{"umbel_run":'


def read_trace(path: Path) -> CallTrace | None:
    """Returns the calls of a journal or of a run that `state.save()` wrote; None for any other file.

    Raises:
        JournalError: the journal is damaged, or has no call.
        ParameterError: the saved run is none, or has no call.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(len(_SAVED_RUN))
    except OSError:
        return None
    if begin.startswith(_JOURNAL):
        return of_journal(str(path))
    return of_saved_run(path) if begin == _SAVED_RUN else None
