"""Keeps the programs that a server offers, by name.

    PUT /v1/programs/NAME ──► read in a thread, checked ──► put(name, program)
    --program FILE:PARAMETER ───────────────────────────────► the same, at start

A name stands for one program at a time. One that is put again is replaced for later runs; runs in flight keep the
program they began with. Count and bytes are bounded, and nothing is evicted: a client whose PUT was answered finds its
program. Programs live as long as the server; those of `--program` are there again after a restart.

The workers of `--http-workers` keep programs for each other in a folder. One that changes it waits until the others
have taken that over, so a client that has its answer finds the program at any of them.
"""

import asyncio
import contextlib
import fcntl
import mmap
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..compiler.running.hosted import HostedGraph
from ..lang.errors import GraphError, ParameterError, shown
from ..lang.programs import MAX_GRAPH_BYTES
from .errors import HttpError
from .limits import MAX_PROGRAM_BYTES, MAX_PROGRAMS

SUFFIX = ".umbel.json"
LOOK = 0.1  # seconds between two looks for changes of other workers
LONGEST_WAIT = 30.0  # seconds for the others; one that hangs is not waited for, and one that starts reads all of it
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class OfferedProgram:
    """A program under its name.

    Attributes:
        created: seconds since 1970 when it was put.
        parameter: takes the last message of a client to which the program is a model; "" for one that is none.
    """

    name: str
    graph: HostedGraph
    created: int
    parameter: str = ""


class SharedFile(msgspec.Struct, frozen=True):
    """A program in the folder of the workers. `graph`: its bytes; None for one of `--program` that was deleted."""

    created: int
    parameter: str
    graph: bytes | None


class SharedPrograms:
    """The folder in which the workers of a server keep programs for each other, as one of them sees it.

        changes     the number of the last change, and for each worker that of the last one that it has taken over
        7-judge     the program "judge", which the seventh change has put

    Args:
        folder: that `open_folder` has made.
        row: that of this worker.
    """

    def __init__(self, folder: Path, row: int) -> None:
        self._folder = folder
        self._file = (folder / _CHANGES).open("r+b")
        self._cells = memoryview(mmap.mmap(self._file.fileno(), 0)).cast("q")
        self._row = 1 + row
        self._cells[self._row] = 0

    @property
    def changes(self) -> int:
        return self._cells[0]

    @property
    def taken(self) -> int:
        """The number of the last change that this worker has taken over."""
        return self._cells[self._row]

    @taken.setter
    def taken(self, number: int) -> None:
        self._cells[self._row] = number

    def files(self) -> dict[str, str]:
        """Returns the name of each program → its file, the last one."""
        found: dict[str, str] = {}
        numbered = (path.name for path in self._folder.iterdir() if "-" in path.name)
        for file in sorted(numbered, key=lambda name: int(name.partition("-")[0])):
            found[file.partition("-")[2]] = file
        return found

    def read(self, file: str) -> SharedFile | None:
        """Reads a program; None where another change has replaced it meanwhile."""
        try:
            return msgspec.msgpack.decode((self._folder / file).read_bytes(), type=SharedFile)
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other workers from changing the folder; for milliseconds."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def write(self, name: str, content: SharedFile | None) -> None:
        """Puts a program in place of the one of the same name, or nothing. The folder is locked."""
        before, number = self.files().get(name), self.changes + 1
        if content is not None:
            new = self._folder / "new"
            new.write_bytes(msgspec.msgpack.encode(content))
            new.rename(self._folder / f"{number}-{name}")
        if before is not None:
            (self._folder / before).unlink()
        self._cells[0] = number

    async def known(self, number: int) -> None:
        """Waits until every worker has taken over a change."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_WAIT):
                while min(self._cells[1:]) < number:
                    await asyncio.sleep(LOOK / 4)


_CHANGES = "changes"


def open_folder(workers: int) -> Path:
    """Makes the folder, of this user alone, in which workers keep programs for each other."""
    folder = Path(tempfile.mkdtemp(prefix="umbel-programs-"))
    (folder / _CHANGES).write_bytes(bytes(8 * (1 + workers)))
    return folder


class ProgramStore:
    """Keeps the programs of one server process.

    Args:
        programs: that are there from the start.
        shared: with the other workers of the server.
    """

    def __init__(self, programs: Iterable[OfferedProgram] = (), shared: SharedPrograms | None = None) -> None:
        self._programs: dict[str, OfferedProgram] = {}
        self._reading = asyncio.Lock()
        self._shared = shared
        self._files: dict[str, str] = {}  # of the shared programs that were taken over
        self._taking = asyncio.Lock()
        for each in programs:
            self.put(each)
        self._first = frozenset(self._programs)  # of `--program`, which a worker that starts later has, too

    def __iter__(self) -> Iterator[OfferedProgram]:
        return iter(tuple(self._programs.values()))

    def find(self, name: str) -> OfferedProgram | None:
        return self._programs.get(name)

    def get(self, name: str) -> OfferedProgram:
        """Returns a program. Raises HttpError 404 for a name without one."""
        found = self._programs.get(name)
        if found is None:
            known = f"known are {', '.join(self._programs)}" if self._programs else "none is kept so far"
            raise HttpError(
                404, f"there is no program {name[:64]!r}; {known}; PUT /v1/programs/NAME keeps one", "program_not_found"
            )
        return found

    async def read(self, data: bytes, *, source: str) -> HostedGraph:
        """Reads a graph in a thread, one at a time: the largest take seconds.

        Raises:
            GraphError, ParameterError: the bytes are no graph that can run here.
        """
        if len(data) > MAX_GRAPH_BYTES:
            raise GraphError(f"{source} has {len(data)} bytes, and {MAX_GRAPH_BYTES} are the most of one program")
        async with self._reading:
            return await asyncio.to_thread(HostedGraph.read, data, source=source)

    async def keep(self, program: OfferedProgram, data: bytes) -> bool:
        """Keeps a program in every worker → whether there was none of its name. Raises as `put`."""
        fresh = False

        def change() -> None:
            nonlocal fresh
            fresh = self.put(program)

        await self._change(program.name, change, SharedFile(program.created, program.parameter, data))
        return fresh

    async def forget(self, name: str) -> None:
        """Forgets a program in every worker. Raises as `remove`."""
        left = SharedFile(0, "", None) if name in self._first else None
        await self._change(name, lambda: self.remove(name), left)

    async def _change(self, name: str, change: Callable[[], None], content: SharedFile | None) -> None:
        """Makes a change here, and lets the other workers know of it. Raises what `change` does, and changes nothing
        then."""
        shared = self._shared
        if shared is None:
            change()
            return
        while True:
            await self.take_over()
            with shared.locked():
                if shared.changes != shared.taken:
                    continue
                change()
                shared.write(name, content)
                self._files, shared.taken = shared.files(), shared.changes
            await shared.known(shared.taken)
            return

    async def follow(self) -> None:
        """Takes over the changes of other workers, until it is cancelled."""
        while self._shared is not None:
            await self.take_over()
            await asyncio.sleep(LOOK)

    async def take_over(self) -> None:
        """Takes over the changes that other workers have made so far."""
        shared = self._shared
        if shared is None:
            return
        async with self._taking:
            while (number := shared.changes) != shared.taken:
                files = shared.files()
                for name in self._files.keys() - files.keys():
                    self._programs.pop(name, None)
                for name in files:
                    if self._files.get(name) != files[name]:
                        await self._take(name, shared.read(files[name]))
                self._files, shared.taken = files, number

    async def _take(self, name: str, found: SharedFile | None) -> None:
        if found is None:
            return
        if found.graph is None:
            self._programs.pop(name, None)
            return
        graph = await self.read(found.graph, source=f"program {name}")
        self._programs[name] = OfferedProgram(name, graph, found.created, found.parameter)

    def put(self, program: OfferedProgram) -> bool:
        """Keeps a program, in place of one of the same name → whether there was none.

        Raises:
            ParameterError: a name that is none; a parameter that cannot take a message.
            HttpError: 409 for more programs, or more bytes of them, than are kept.
        """
        check_name(program.name)
        if program.parameter:
            program.graph.check_answers(program.parameter)
        others = [each for each in self if each.name != program.name]
        if len(others) >= MAX_PROGRAMS:
            raise HttpError(409, f"{MAX_PROGRAMS} programs are kept, the most; delete one", "too_many_programs")
        size = program.graph.size + sum(each.graph.size for each in others)
        if size > MAX_PROGRAM_BYTES:
            raise HttpError(
                409,
                f"with this program all of them have {size} bytes, and {MAX_PROGRAM_BYTES} are the most; delete one",
                "too_many_programs",
            )
        fresh = program.name not in self._programs
        self._programs[program.name] = program
        return fresh

    def remove(self, name: str) -> None:
        """Forgets a program; its runs in flight go on. Raises HttpError 404 for a name without one."""
        self.get(name)
        del self._programs[name]


def check_name(name: str) -> None:
    """Raises ParameterError for a name that no program may have."""
    if not _NAME.fullmatch(name):
        raise ParameterError(f"a program cannot be called {shown(name)}; write 1 to 64 of A-Z, a-z, 0-9 and _.-")


def open_program(given: str, created: int) -> OfferedProgram:
    """Opens the program of an option `--program FILE.umbel.json:PARAMETER`, or without a parameter.

    Raises:
        ParameterError: the file cannot be read or is Python, or its program cannot take a message; the error names the
            option.
        GraphError: the file is no graph that can run here.
    """
    path, colon, parameter = given.rpartition(":")
    if not colon:
        path, parameter = given, ""
    if path.endswith(".py"):
        raise ParameterError(
            f"--program {given}: a server runs graphs, not Python; write umbel compile {path}:NAME -o NAME{SUFFIX}, "
            f"then --program NAME{SUFFIX}:PARAMETER"
        )
    name = Path(path).name.removesuffix(SUFFIX)
    try:
        check_name(name)
        with open(path, "rb") as file:
            data = file.read(MAX_GRAPH_BYTES + 1)
    except OSError as error:
        raise ParameterError(
            f"--program {given}: {error.strerror or error}; write FILE{SUFFIX}, as umbel compile -o makes it, or "
            f"FILE{SUFFIX}:PARAMETER"
        ) from None
    graph = HostedGraph.read(data, source=path)
    if parameter:
        graph.check_answers(parameter)
    return OfferedProgram(name, graph, created, parameter)
