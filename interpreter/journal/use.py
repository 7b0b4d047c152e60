"""The use that a run or a batch makes of a journal: opens the file, checks that it is theirs, begins their runs.

    RESUME     journal="run.jsonl": the file has to be of this program, these arguments and this version; calls that it
               has are read, others are made and appended
    EXTEND     as RESUME without the checks: a test that records
    REPLAY     calls are read; one that is not there is an error. Needs no backend
    COMPARE    as REPLAY, but a call whose prompt has changed is noted, and answered as it was: `umbel replay`

A run that a body starts has its calls in the journal of the run around it.
"""

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from enum import Enum
from inspect import BoundArguments
from typing import TYPE_CHECKING, Any, Protocol

from ...lang import __version__
from ...lang.errors import JournalError, shown
from ...lang.protocol import Backend
from ...lang.state import State
from ..loop import wait_for
from ..run import Run
from .file import FORMAT, LONGEST_END, JournalEnd, JournalFile, JournalHeader, JournalProgram, closing_file
from .identity import arguments_of, given_of, json_of
from .offline import offline
from .stored import StoredCalls

if TYPE_CHECKING:
    from ..body import RunOptions


class JournalMode(Enum):
    RESUME = "resume"
    EXTEND = "extend"
    REPLAY = "replay"
    COMPARE = "compare"

    @property
    def makes_calls(self) -> bool:
        return self in (JournalMode.RESUME, JournalMode.EXTEND)

    @property
    def compares(self) -> bool:
        return self is JournalMode.COMPARE


class Journaled(Protocol):
    """A program as its journal sees it."""

    @property
    def name(self) -> str: ...

    def parts(self) -> Mapping[str, str]:
        """Returns what the program consists of → digest."""


class JournalUse:
    """One run's, or one batch's, use of a journal.

    Args:
        path: of the file.
        mode: says what becomes of calls that are not in it.
        file: open already; None opens it in `opened`, and checks it.
        item: of the run; those of a batch are numbered after it. "" for a run or batch that has the file alone.
        backend: in place of the run's, where no calls are made.
        remedy: said with a call that a replay does not find.
        inner: the body of another program has started the run.

    Attributes:
        differences: of a comparison, a text each.
        begun: runs of a comparison.
    """

    def __init__(
        self,
        path: str,
        mode: JournalMode,
        *,
        file: JournalFile | None = None,
        item: str = "",
        backend: Backend | None = None,
        remedy: str = "",
        inner: bool = False,
    ) -> None:
        self.path = path
        self.mode = mode
        self.backend = backend
        self.remedy = remedy
        self.differences: list[str] = []
        self.begun: list[StoredCalls] = []
        self._file = file
        self._item = item
        self._inner = inner
        self._shared = file is not None
        self._run: Run | None = None  # that is no member of a batch

    @property
    def strict(self) -> bool:
        """True where the journal has to be of this program, version, model and arguments."""
        return self.mode is JournalMode.RESUME and not self._inner

    def inner(self, file: JournalFile, item: str) -> "JournalUse":
        """Returns the use of a run that a body starts."""
        backend = None if self.mode.makes_calls else offline(file, item)
        use = JournalUse(self.path, self.mode, file=file, item=item, backend=backend, remedy=self.remedy, inner=True)
        use.differences, use.begun = self.differences, self.begun
        return use

    # -------------------------------------------------------------------------------- the file

    @contextlib.contextmanager
    def opened(self, program: Journaled) -> Iterator[JournalFile]:
        """Holds the file open until the block ends, and for the runs that were begun in it until they end.

        Raises:
            JournalError: the file is damaged, in use, or of another program or version.
        """
        file = self._file
        if file is not None:
            file.retain()
        else:
            file = self._file = JournalFile(self.path, writes=True)
        try:
            if self.strict:
                self._check_program(file, program)
            elif file.header is None and self.mode.makes_calls:
                file.append(JournalHeader(FORMAT, __version__, draws=secrets.randbits(32)))
            yield file
        except BaseException as error:
            if self._run is not None and not self._run.ended:  # it has not begun
                self._run.end(error)
            raise
        finally:
            file.release()

    @contextlib.contextmanager
    def kept(self, program: Journaled, *, waits: bool) -> Iterator[None]:
        """As `opened`. `waits`: at the end of the block for the ends of all runs: then the file is closed."""
        with self.opened(program) as file:
            yield
        if waits and not self._shared:
            wait_for(file.closed)

    @contextlib.asynccontextmanager
    async def kept_async(self, program: Journaled, *, waits: bool) -> AsyncIterator[None]:
        """As `kept`, on the caller's loop."""
        ending = closing_file(self.path) if self._file is None else None
        if ending is not None:  # its body may be on this loop
            await asyncio.to_thread(wait_for, ending.closed, LONGEST_END)
        with self.opened(program) as file:
            yield
        if waits and not self._shared:
            await asyncio.to_thread(file.closed.wait)

    def _check_program(self, file: JournalFile, program: Journaled) -> None:
        header, parts = file.header, dict(program.parts())
        if header is None:
            file.append(JournalHeader(FORMAT, __version__, program.name, parts, secrets.randbits(32)))
            return
        if header.umbel != __version__:
            raise JournalError(
                f"{self.path} is of umbel {header.umbel}, and this is {__version__}; write journal= with the path of a "
                "new file, or use that version"
            )
        changed = [name for name in sorted({*header.parts, *parts}) if header.parts.get(name) != parts.get(name)]
        if header.program != program.name or changed:
            named = f"program {header.program!r}" if header.program else "a test"
            differs = f"{named}, and this is {program.name!r}" if header.program != program.name else "another program"
            if changed and header.program == program.name:
                differs = f"{named} as it was before {', '.join(changed[:8])} changed"
            raise JournalError(
                f"{self.path} is of {differs}; write journal= with the path of a new file. umbel replay {self.path} "
                f"FILE.py:{program.name} says which prompts changed"
            )

    # -------------------------------------------------------------------------------- its runs

    def check(self, calls: Iterable[BoundArguments], options: "RunOptions") -> None:
        """Checks the arguments of all programs of a batch, before any of them runs. Raises as `begin`."""
        if self.strict and self._file is not None and self._file.programs:
            for number, call in enumerate(calls):
                self._check_arguments(self._named(number), _digests(call, options))

    def begin(
        self,
        run: Run,
        state: State,
        program: Journaled,
        options: "RunOptions",
        call: BoundArguments,
        number: int | None,
    ) -> None:
        """Gives a run its calls in the journal. `number`: of the program in its batch.

        Raises:
            JournalError: the journal has this item with other arguments.
        """
        file = self._file
        assert file is not None, "runs begin inside `opened`"
        item, digests = self._named(number), _digests(call, options)
        if self.strict:
            self._check_arguments(item, digests)
        known = file.programs.get(item)
        if self.mode.makes_calls and (known is None or known[0] != digests):
            tokens = None if options.speculation is None else options.speculation.tokens
            speculate = "auto" if options.speculation is not None and tokens is None else tokens
            sampling = json_of(options.sampling) or {}
            positions, given = given_of(call)
            line = JournalProgram(item, program.name, digests, given, sampling, speculate, positions)
            file.append(line, later=True)
        stored = run.stored = StoredCalls(run, self, file, item, inner=self._inner)
        if self.mode.compares:
            self.begun.append(stored)
        if number is None:
            self._run = run

        def ended() -> bool:
            return run.finished or (run.reason is not None and not run.is_inside)

        file.retain(ended)
        run.when_finished(self._end_of(stored, state, file, ended))

    def _end_of(
        self, stored: StoredCalls, state: State, file: JournalFile, ended: Callable[[], bool]
    ) -> Callable[[], None]:
        def end() -> None:
            if self.mode.makes_calls and state._sink.error() is None and stored.item not in file.finished:
                file.append(JournalEnd(stored.item), later=True)
            stored.end()
            file.release(ended)

        return end

    def _named(self, number: int | None) -> str:
        if number is None:
            return self._item or "0"
        return f"{self._item}.{number}" if self._item else str(number)

    def _check_arguments(self, item: str, digests: Mapping[str, str]) -> None:
        assert self._file is not None, "checked inside `opened`"
        known = self._file.programs.get(item)
        if known is None or known[0] == digests:
            return
        names = [n for n in sorted({*known[0], *digests}) if known[0].get(n) != digests.get(n)]
        raise JournalError(
            f"{self.path} has item {item} with other arguments: {', '.join(map(shown, names[:8]))}; write the "
            "arguments of the journal, or journal= with the path of a new file"
        )


def _digests(call: BoundArguments, options: "RunOptions") -> dict[str, str]:
    """Returns the digests of arguments, and of the run's options that requests depend on."""
    given: dict[str, Any] = {f"option {name}": value for name, value in options.sampling.items()}
    if options.speculation is not None:
        given["option speculation"] = options.speculation.tokens
    return arguments_of(call.arguments) | arguments_of(given)


def use_of(given: object) -> JournalUse:
    """Returns the use of the file that a run names. A replay gives its use itself. Raises JournalError for what is no
    path."""
    if isinstance(given, JournalUse):
        return given
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise JournalError(f'journal={shown(given)}; write the path of a file, such as journal="run.jsonl"')
    return JournalUse(os.fsdecode(given), JournalMode.RESUME)
