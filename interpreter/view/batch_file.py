"""Writes the view of a batch while it runs: a file of JSON lines, each complete by itself, which a page follows.

    {"umbel_batch": 1, "program": "classify", "backend": "echo", "began": "2026-01-05T12:00:00+00:00", "total": 1000}
    {"backend": "runtime gemma3-270m"}                         where it has another name since it has started
    {"row": 7, "from": 0.21, "input": "review='Good.'"}                                         a program has begun
    {"of": 7, "run": [...]}                                                    its record: a list of lines of data.py
    {"row": 7, "to": 0.93, "values": {...}, "prompt_tokens": 41, ...}           it has ended; "error" if it failed
    {"ended": 64.0, "resumed": 12}                                                                       last

Times are seconds from the beginning of the batch. The page keeps records as text until one is opened. Records beyond
MOST_BYTES are left out; the rows of their programs are there.
"""

import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from ...lang import checks
from ...lang.errors import ParameterError, shown
from .data import BATCH_BEGINNING, BATCH_VERSION, Line, lines_so_far, shortened_words, usage_line, written

if TYPE_CHECKING:
    from ..run import Run

MOST_BYTES = 256 * 2**20  # of records
MOST_ERROR = 4000  # characters of an error; the record of its row has all of it


class BatchFile:
    """The view of one batch. Its methods may be called on any thread.

    Args:
        path: of a new file, or of one that an earlier batch wrote: it is begun anew.
        program, backend: names, for the page.
        total: programs of the batch, or None.
        clock: in seconds.

    Raises:
        ParameterError: a path that cannot be written, or a file of something else.
    """

    def __init__(
        self,
        path: object,
        program: str,
        backend: str,
        total: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = checks.path("view", path)
        self._clock = clock
        self._began = clock()
        self._recorded = 0
        self._backend = backend
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ParameterError(f"view={shown(path)} cannot be written: {error.strerror}") from None
        if os.fstat(self._file).st_size and not os.read(self._file, 16).startswith(BATCH_BEGINNING.encode()):
            os.close(self._file)
            raise ParameterError(f"view={shown(path)} is a file of something else; write the path of a new one")
        os.ftruncate(self._file, 0)
        began = datetime.now(UTC).isoformat(timespec="milliseconds")
        head = {"umbel_batch": BATCH_VERSION, "program": program, "backend": backend, "began": began, "total": total}
        self._write(head)

    def note_begin(self, row: int, inputs: Mapping[str, Any]) -> None:
        words = ", ".join(f"{name}={shown(value)}" for name, value in inputs.items())
        self._write({"row": row, "from": self._seconds(), "input": shortened_words(words)})

    def note_end(self, row: int, run: "Run", values: Mapping[str, str], error: BaseException | None) -> None:
        """`values`: variables in words."""
        name = run.backend.capabilities.name
        if name != self._backend:  # it knows the model since it has started
            self._backend = name
            self._write({"backend": name})
        if run.record is not None and self._recorded < MOST_BYTES:
            self._recorded += self._write({"of": row, "run": lines_so_far(run)})
        line: Line = {"row": row, "to": self._seconds(), **usage_line(run.ledger.cost.usage)}
        line["values"] = {name: shortened_words(value) for name, value in values.items()}
        if error is not None:
            line["error"] = shortened_words(f"{type(error).__name__}: {error}", MOST_ERROR)
        self._write(line)

    def close(self, resumed: int) -> None:
        """`resumed`: rows that an earlier run had done."""
        self._write({"ended": self._seconds(), "resumed": resumed})
        os.close(self._file)

    def _seconds(self) -> float:
        return round(self._clock() - self._began, 6)

    def _write(self, line: Line) -> int:
        """Appends a line by one call, so that lines of several threads do not mix. Returns its bytes."""
        return os.write(self._file, written([line]).encode())
