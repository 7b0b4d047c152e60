"""Tells what kind a file of a run is by how its first line begins, and reads it as a trace."""

from pathlib import Path

from ...lang.errors import ParameterError
from ...lang.traces.calls import CallTrace
from .journal import of_journal
from .saved_run import of_saved_run

_JOURNAL, _SAVED_RUN, _VIEW = b'{"sum":', b'{"umbel_run":', b'{"umbel_batch":'


def read_trace(path: Path) -> CallTrace | None:
    """Returns the calls of a journal or of a run that `state.save()` wrote; None for any other file.

    Raises:
        JournalError: the journal is damaged, or has no call.
        ParameterError: the saved run is none, or has no call; or the file is the view of a batch.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(len(_VIEW))
    except OSError:
        return None
    if begin.startswith(_JOURNAL):
        return of_journal(str(path))
    if begin == _VIEW:
        raise ParameterError(
            f"{path} is the view= file of a batch, which has no calls; write run_batch(..., journal=FILE), and give "
            "that file"
        )
    return of_saved_run(path) if begin.startswith(_SAVED_RUN) else None
