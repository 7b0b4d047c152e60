"""Programs that run where the model is: what goes down in one message, and what comes back while they run.

A `RunProgram` is the graph of a program, what this run gives it, and nothing else: no code, no files, no addresses. It
ends exactly once, with `ProgramEnded` or `Failure`. Before that, in the order in which they become known:

    ProgramPiece    more text of a variable, or of the program's own stream (when `stream`)
    ProgramValue    what a node of the graph bound to a name, or why it did not

A node is named by its place in the graph's list of nodes, which both sides read from the same bytes.
"""

import hashlib
from collections.abc import AsyncIterator
from typing import Protocol, runtime_checkable

import msgspec

from .errors import WIRE_ERRORS, BackendError, UmbelError
from .protocol import Backend, Failure, Origin, Usage, _Wire

OWN_STREAM = -1  # in the place of a node: the text of the program's own stream


def digest_of(graph: bytes) -> str:
    """By which a graph is known: SHA-256 of its bytes, hexadecimal. Whoever keeps graphs computes it himself."""
    return hashlib.sha256(graph).hexdigest()


class ProgramBudget(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What all calls of the program may take together; None: no limit. See `interpreter.budget.Budget`."""

    tokens: int | None = None
    calls: int | None = None


class RunProgram(_Wire, frozen=True):
    """Run a graph.

    Attributes:
        digest: of the graph's bytes.
        graph: the bytes, as `compiler.serialise` writes them; empty when the receiver is believed to have them. One
            that has not asks with `GraphWanted`, and the message is sent once more, whole.
        arguments: name → value, packed by `plain.pack`. Pictures are bytes.
        sampling: defaults of the run, as `sampling.overrides` gives them, packed.
        stream: pieces are told as they come.
        origin: `timeout` is for all of the program; `program_id` names the run at its sender.
    """

    id: str
    digest: str
    graph: bytes = b""
    arguments: bytes = b""
    sampling: bytes = b""
    stream: bool = False
    origin: Origin = Origin()
    budget: ProgramBudget | None = None


class Trouble(msgspec.Struct, frozen=True):
    """An error on its way: `kind` names a class of `errors.WIRE_ERRORS`, or one of Python's own that functions of text
    raise."""

    kind: str
    message: str

    def error(self) -> Exception:
        if self.kind in PYTHON_ERRORS:
            return PYTHON_ERRORS[self.kind](self.message)
        return WIRE_ERRORS.get(self.kind, BackendError)(self.message)


# What the functions that a graph can name raise, of Python's own.
PYTHON_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (IndexError, KeyError, TypeError, ValueError)
}


def trouble_of(error: BaseException) -> Trouble:
    """What is told of an error; one that is nobody's business but ours is told as such."""
    kind = type(error)
    if kind is KeyError:
        return Trouble("KeyError", str(error.args[0]) if error.args else "")
    if kind.__name__ in PYTHON_ERRORS or isinstance(error, UmbelError):
        return Trouble(kind.__name__, str(error))
    return Trouble(BackendError.__name__, f"internal error while running the program: {kind.__name__}; see the log")


class GraphWanted(_Wire, frozen=True):
    """The graph of this digest is not here (any more): send the request again, with its bytes."""

    id: str


class ProgramPiece(_Wire, frozen=True):
    """More text. `node` and `name`: of the variable; `OWN_STREAM`: of the program's own stream. `facts`: packed."""

    id: str
    node: int
    name: str
    text: str
    facts: bytes = b""


class ProgramValue(_Wire, frozen=True):
    """What a node has bound to a name: one text, or with n above 1 several; or, with `error`, none.

    `facts`: about the call, packed; of several texts a list. `usage`: of the run so far.
    """

    id: str
    node: int
    name: str
    value: str | tuple[str, ...] = ""
    facts: bytes = b""
    error: Trouble | None = None
    usage: Usage = Usage()


class ProgramEnded(_Wire, frozen=True):
    """The end of a program: where its own stream stands, and what it cost.

    `error`: why the program's own stream did not come to its end; then text and messages are empty.
    """

    id: str
    text: str = ""
    messages: tuple[dict[str, str], ...] = ()
    usage: Usage = Usage()
    error: Trouble | None = None


ProgramEvent = ProgramPiece | ProgramValue | ProgramEnded
FromPrograms = GraphWanted | ProgramEvent | Failure


@runtime_checkable
class ProgramBackend(Backend, Protocol):
    """A backend that runs whole programs. `Capabilities.programs` says whether it does now."""

    def run_program(self, request: RunProgram) -> AsyncIterator[ProgramEvent]:
        """Events, the last of which is a `ProgramEnded`. Raises an UmbelError instead of it.

        Closing the iterator early aborts the program.
        """
