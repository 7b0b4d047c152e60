"""Programs that run where the model is: what goes down in one message, and what comes back while they run.

A `RunProgram` is the graph of a program, what this run gives it, and nothing else: no code, no files, no addresses. It
ends exactly once, with `ProgramEnded` or `Failure`. Before that, in the order in which they become known:

    ProgramPiece    more text of a variable, or of the program's own stream (when `stream`)
    ProgramValue    what a variable is, or why it is not

A variable is named by its slot among the bindings of a run, which both sides find in the same way from the same graph;
the compiler's `running/slots.py` lists those that are reported. What a program assigns and what it returns is made of
these, so it is computed by its sender, in whose process its objects are.

Plain values (arguments, facts about variables) are packed so that they come out exactly as they went in. Msgpack knows
no tuples and no integers beyond 64 bits; both matter, since programs write values into prompts. They travel as
extensions:

    1   a tuple: its members, packed as a list
    2   an integer: two's complement, big end first
"""

import hashlib
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol, runtime_checkable

import msgspec

from .errors import WIRE_ERRORS, BackendError, ParameterError, UmbelError, shown
from .prompt import Part
from .protocol import Backend, Failure, Origin, Usage, _Wire

MAX_GRAPH_BYTES = 8 << 20  # of one graph; its nodes have a limit of their own, so these are long texts
OWN_STREAM = -1  # in the place of a slot: the text of the program's own stream


def digest_of(graph: bytes) -> str:
    """SHA-256 of the bytes of a graph, hexadecimal. The gateway computes it itself for the graphs that it keeps."""
    return hashlib.sha256(graph).hexdigest()


class ProgramBudget(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of all calls of the program together; None: no limit. See `interpreter.budget.Budget`."""

    tokens: int | None = None
    calls: int | None = None


class RunProgram(_Wire, frozen=True):
    """Run a graph.

    Attributes:
        digest: of the graph's bytes.
        graph: the bytes, as `compiler.files.serialise` writes them; empty when the receiver is believed to have them.
            One that has not asks with `GraphWanted`, and the message is sent once more, whole.
        slots: how many bindings a run has, as the sender counts them: they have to be as many here.
        arguments: name → value, packed by `plain.pack`. Pictures are bytes.
        sampling: defaults of the run, as `sampling.overrides` gives them, packed.
        stream: pieces are sent as they come.
        origin: of the program: its timeout is for all of it. Its calls get a `program_id` that is made here.
    """

    id: str
    digest: str
    slots: int = 0
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
    """Describes an error for the sender of a program; one that is a defect of umbel is described as such."""
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
    """More text of the variable in a slot; of the program's own stream, for `OWN_STREAM`. `facts`: packed."""

    id: str
    slot: int
    name: str
    text: str
    facts: bytes = b""


class ProgramValue(_Wire, frozen=True):
    """The content of a slot now: one text, or with n above 1 several; or, with `error`, none. Of lists of joins
    only that they are known.

    `facts`: about the call, packed; of several texts a list. `usage`: of the run so far.
    """

    id: str
    slot: int
    name: str
    value: str | tuple[str, ...] = ""
    facts: bytes = b""
    error: Trouble | None = None
    usage: Usage = Usage()


class ProgramEnded(_Wire, frozen=True):
    """The end of a program: where its own stream stands, and what all of it cost.

    Attributes:
        prompt: of the own stream.
        turns: role and content of those that it has closed.
        owed: the last of them is not in the prompt yet.
        error: why the own stream did not come to its end; then the others are empty.
        private: tenants of private parts that open where the owed turn is shown.
    """

    id: str
    prompt: tuple[Part, ...] = ()
    turns: tuple[tuple[str, str | None], ...] = ()
    owed: bool = False
    usage: Usage = Usage()
    error: Trouble | None = None
    private: tuple[str, ...] = ()


ProgramEvent = ProgramPiece | ProgramValue | ProgramEnded
FromPrograms = GraphWanted | ProgramEvent | Failure


class HostedProgram(Protocol):
    """A program that a `ProgramHost` has read: checked, planned, and ready to run many times."""

    async def execute(
        self, request: RunProgram, backend: Backend, seconds: float, notify: Callable[[ProgramEvent], None]
    ) -> ProgramEnded:
        """Runs it on the caller's loop, to the end of all its streams.

        Args:
            seconds: until its deadline.
            notify: called with what becomes known meanwhile.

        Raises:
            GraphError, ParameterError: it cannot run with what the request gives; nothing has run.
            DeadlineError: the deadline passed.
        """


class ProgramHost(Protocol):
    """Runs the programs that clients ship: a module whose name the gateway is started with."""

    def read(self, data: bytes) -> HostedProgram:
        """Raises GraphError or ParameterError for bytes that are no graph that can run here."""


# The module that is a `ProgramHost`. It is named, not imported: the compiler is above the runtime and `lang`.
PROGRAM_HOST = "umbel.compiler.running.service"


@runtime_checkable
class ProgramRunner(Protocol):
    """A backend with the capability `programs`."""

    def run_program(self, request: RunProgram) -> AsyncGenerator[ProgramEvent, None]:
        """Events, the last of which is a `ProgramEnded`. Raises an UmbelError instead of it.

        Closing the iterator early aborts the program.
        """


MAX_DEPTH = 64  # of lists in lists; deeper ones are a mistake, or an attack on their reader

_TUPLE, _INTEGER = 1, 2
_SMALLEST, _LARGEST = -(2**63), 2**64 - 1  # what msgpack itself has room for

_encoder = msgspec.msgpack.Encoder()


def pack_values(value: Any) -> bytes:  # Any: a plain value, or one that is refused
    """Packs None, bool, int, float, str, bytes, and lists, tuples and dicts (with keys of str or int) of them.

    Raises:
        ParameterError: anything else, subclasses included, whose `str` may be their own; a text that holds half of a
            surrogate pair; nesting beyond `MAX_DEPTH`.
    """
    try:
        return _encoder.encode(_packable(value, MAX_DEPTH))
    except UnicodeEncodeError as error:
        raise ParameterError(
            f"the text holds {error.object[error.start]!r}, which is no character; decode the input with "
            "errors='replace'"
        ) from None


def unpack_values(data: bytes) -> Any:
    """Raises ParameterError, and nothing else, whatever the bytes are."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError, MemoryError) as error:
        raise ParameterError(f"the values cannot be read: {error}") from None


def _packable(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind is str or kind is float or kind is bool or kind is bytes or value is None:
        return value
    if kind is int:
        return value if _SMALLEST <= value <= _LARGEST else _large(value)
    if depth == 0:
        raise ParameterError(f"a value has lists in lists in lists, more than {MAX_DEPTH} deep; give a flatter one")
    if kind is list:
        return [_packable(item, depth - 1) for item in value]
    if kind is tuple:
        return msgspec.msgpack.Ext(_TUPLE, _encoder.encode([_packable(item, depth - 1) for item in value]))
    if kind is dict:
        for key in value:
            if type(key) is not str and (type(key) is not int or not _SMALLEST <= key <= _LARGEST):
                raise ParameterError(f"a dict has the key {shown(key)}; keys that travel are str or int")
        return {key: _packable(item, depth - 1) for key, item in value.items()}
    raise ParameterError(
        f"a {kind.__name__} cannot travel: {shown(value)}; give str, int, float, bool, bytes, None, or lists, tuples "
        "and dicts of them"
    )


def _large(value: int) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))


def _extension(code: int, data: memoryview) -> Any:
    match code:
        case 1:
            members = _decoder.decode(data)
            if not isinstance(members, list):
                raise ValueError("a tuple that is no list of members")
            return tuple(members)
        case 2:
            return int.from_bytes(data, "big", signed=True)
        case _:
            raise ValueError(f"an extension {code}, which stands for nothing")


_decoder = msgspec.msgpack.Decoder(ext_hook=_extension)
