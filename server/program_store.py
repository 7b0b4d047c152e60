"""Keeps the programs that a server offers, by name.

    PUT /v1/programs/NAME ──► read in a thread, checked ──► put(name, program)
    --program FILE:PARAMETER ───────────────────────────────► the same, at start

A name stands for one program at a time. One that is put again is replaced for later runs; runs in flight keep the
program they began with. Count and bytes are bounded, and nothing is evicted: a client that was told that its program is
kept finds it. Programs live as long as the server; those of `--program` are there again after a restart.
"""

import asyncio
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..compiler.running.hosted import HostedGraph
from ..lang.errors import GraphError, ParameterError, shown
from ..lang.programs import MAX_GRAPH_BYTES
from .errors import HttpError
from .limits import MAX_PROGRAM_BYTES, MAX_PROGRAMS

SUFFIX = ".umbel.json"
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


class ProgramStore:
    """Keeps the programs of one server process.

    Args:
        programs: that are there from the start.
    """

    def __init__(self, programs: Iterable[OfferedProgram] = ()) -> None:
        self._programs: dict[str, OfferedProgram] = {}
        self._reading = asyncio.Lock()
        for each in programs:
            self.put(each)

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
