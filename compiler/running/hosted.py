"""Runs programs for a server: bytes of a graph and arguments of JSON in, values of JSON and their pieces out.

    HostedGraph.read(bytes) ──► start(arguments, options) ──► HostedRun.outcome()    all of it, at its end
      checked once, kept              one `RunProgram`         HostedRun.events()     pieces, then all of it
                                                               HostedRun.answer()     pieces of what it returns

A run lives on the caller's event loop and is shipped to the runtime as one request. There is no second way: a graph
that cannot be shipped is refused when it is read, and a backend that runs no programs when a run begins. So the cost of
a run never changes in silence from one request to one for every call.

The graph comes from a client. It holds no code and opens no file: a picture is the bytes that a run is given, and one
value may not make an answer larger than `MOST_ANSWER`, however often a graph puts it into others.
"""

import asyncio
import base64
import binascii
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any, cast

import msgspec

from ...interpreter.body import RunOptions
from ...interpreter.budget import allowance_of
from ...interpreter.cache_explain.history import History
from ...interpreter.loop import RunningLoop
from ...interpreter.run import Run
from ...interpreter.stream import REASONING_SUFFIX
from ...interpreter.variables import Binding, Meta
from ...lang.errors import GraphError, ParameterError, ProgramError, ResultError, UmbelError, remedy, shown
from ...lang.ops import RoleBegin, VarScopeEnd
from ...lang.programs import digest_of, pack_values
from ...lang.protocol import Usage
from ..files import serialise
from ..graph import Graph, Node, Parameter
from ..operations import Append, Argument, Begin, Choose, Concat, Constant, Generate, Variable, captured_names
from .actions import GatherVariables
from .execution import Execution
from .plan import Plan
from .service import FeedFollower, check_sizes
from .shipping import OutgoingProgram, execution

MOST_PARAMETERS = 256
MOST_VARIABLES = 4_096  # of the program's own stream
MOST_ANSWER = 1 << 24  # characters of the values of one run, and of what stands around them
MAX_DEPTH = 64  # of lists in lists in an answer
_LARGEST_INTEGER = 2**64 - 1  # of those that JSON readers take
_SMALLEST_INTEGER = -(2**63)
_FAULTS = (ArithmeticError, LookupError, TypeError, ValueError, RecursionError, MemoryError)  # of a graph's functions
_JSON_TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    tuple: "array",
    dict: "object",
}

Json = Any  # None, bool, int, float, str, list or dict


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More text of a variable.

    Attributes:
        slot: of the variable among the bindings of the run.
        variable: its name.
        branch: where it is set: "" in the program's own stream, "1" in the branch of this index, "1.0" in the first
            branch of that one, and "run1" in the first program that runs inside of this one.
        text: what is new.
    """

    slot: int
    variable: str
    branch: str
    text: str


@dataclass(frozen=True, slots=True)
class VariableSet:
    """The value of a variable, or the error for which it has none. `slot`, `variable`, `branch`: as of `TextPiece`."""

    slot: int
    variable: str
    branch: str
    value: Json = None
    error: UmbelError | None = None


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The end of a run. All values are of JSON.

    Attributes:
        variables: name → text, or list of texts, of the program's own stream: `state[name]`.
        objects: those whose `state.value(name)` is another object than the text.
        unreadable: name → why its text is not the object that was asked for.
        result: what the program returned.
        text: the answer as text: the result, or the program's last assistant turn when it returns nothing.
        usage: of all calls.
        error: why the program did not come to its end; then `variables` are those that were known before.
    """

    variables: Mapping[str, Json]
    objects: Mapping[str, Json]
    unreadable: Mapping[str, str]
    result: Json
    text: str
    usage: Usage
    error: UmbelError | None = None


HostedEvent = TextPiece | VariableSet | RunOutcome


class HostedGraph:
    """A program that a server offers: read, checked and planned once, then run many times. Immutable.

    Attributes:
        digest: SHA-256 of the bytes it was read from, hexadecimal.
        size: of those bytes.
        parameters: JSON Schema of the arguments: an object with a property for each parameter.
        variables: name → the type that the program asked for, "text", "texts" for n above 1, "list" for what branches
            set, "value" for what the program assigns.
        branches: slot of each variable that a call or a join sets → its branch, as `TextPiece` has it.

    Raises:
        GraphError: it cannot be shipped, with the reason.
        ParameterError: its sampling fields do not fit together.
    """

    def __init__(self, graph: Graph, *, digest: str, size: int) -> None:
        self.digest = digest
        self.size = size
        check_sizes(graph)
        for what, count, most in (
            ("parameters", len(graph.parameters), MOST_PARAMETERS),
            ("variables", len(graph.variables), MOST_VARIABLES),
        ):
            if count > most:
                raise GraphError(f"program {graph.name!r:.80} has {count} {what}, and {most} are the most of one")
        self.outgoing = OutgoingProgram(Plan(graph))
        if self.outgoing.obstacle is not None:
            raise GraphError(f"program {graph.name!r:.80} cannot run in one request: {self.outgoing.obstacle}")
        self._check_defaults()
        self.branches = _branches(self.plan)
        self.parameters = self._parameters()
        self.variables = {name: self._kind(slot) for name, slot in self.plan.variables}

    @classmethod
    def read(cls, data: bytes, *, source: str) -> "HostedGraph":
        """Reads the file of a graph; nothing of it runs. `source`: where the bytes come from, for messages.

        Takes seconds for the largest graphs: call it in a thread.

        Raises:
            GraphError, ParameterError: the bytes are no graph, or one that cannot run here.
        """
        try:
            return cls(serialise.decode(data, source=source), digest=digest_of(data), size=len(data))
        except _FAULTS as error:
            raise _as_umbel_error(error) from None

    @property
    def plan(self) -> Plan:
        return self.outgoing.plan

    @property
    def graph(self) -> Graph:
        return self.plan.graph

    @property
    def name(self) -> str:
        """Returns the name that its author gave the program."""
        return self.graph.name

    # -------------------------------------------------------------------------------- described

    def _parameters(self) -> dict[str, Json]:
        users = {node.op.name: self.graph.users[node] for node in self.graph.nodes if isinstance(node.op, Argument)}
        return {
            "type": "object",
            "properties": {
                each.name: self._parameter_schema(each, users.get(each.name, ())) for each in self.graph.parameters
            },
            "required": [each.name for each in self.graph.parameters if each.required],
            "additionalProperties": False,
        }

    def check_answers(self, parameter: str) -> None:
        """Checks that the program can answer a message: `parameter` takes it, and the program returns a value or ends
        with an assistant turn.

        Raises:
            ParameterError: it cannot; the message says what to write.
        """
        named = {each.name: each for each in self.graph.parameters}
        if parameter not in named:
            raise ParameterError(
                f"program {self.name} has no parameter {shown(parameter)} for a message; {remedy(parameter, named)}"
            )
        if parameter in self.outgoing.pictures:
            raise ParameterError(f"parameter {parameter!r} of program {self.name} is a picture; name one that is text")
        missing = [each.name for each in self.graph.parameters if each.required and each.name != parameter]
        if missing:
            raise ParameterError(
                f"program {self.name} needs {', '.join(missing)} next to {parameter}; give every other parameter a "
                "default, for a message is one text"
            )
        turns = (node.op for node in self.graph.streams[self.plan.root])
        if self.graph.result.op == Constant(None) and RoleBegin("assistant") not in turns:
            raise ParameterError(
                f"program {self.name} returns nothing and has no assistant turn; write return s[...] at its end, which "
                "is the answer to a message"
            )

    def _kind(self, slot: int) -> str:
        typed = self.plan.slots.bindings[slot][1]
        if typed is not None:
            return typed.wanted
        if slot in self.outgoing.reported.lists:
            return "list"
        call = self.plan.gens.get(slot)
        if call is not None and self.plan.sampling({})[call].n > 1:
            return "texts"
        return "text" if slot in self.branches else "value"

    def _parameter_schema(self, parameter: Parameter, users: Iterable[Node]) -> dict[str, Json]:
        schema: dict[str, Json] = {}
        if parameter.name in self.outgoing.pictures:
            schema = {"type": "string", "contentEncoding": "base64"}
        elif type(parameter.default) in _JSON_TYPES:
            schema = {"type": _JSON_TYPES[type(parameter.default)]}
        elif parameter.required and any(isinstance(user.op, Append | Concat | Choose) for user in users):
            schema = {"type": ["string", "number", "boolean"]}  # what is said is text, or has one
        return schema if parameter.required else {**schema, "default": as_json(parameter.default)}

    # -------------------------------------------------------------------------------- run

    def start(self, arguments: Mapping[str, Json], options: RunOptions) -> "HostedRun":
        """Makes a run on the running loop. It sends its request when its outcome or its events are awaited.

        Args:
            arguments: by name, as JSON has them; pictures are base64, or data URLs of it.
            options: as `run_options` has checked them; its backend is the one that serves the run.

        Raises:
            ParameterError: an argument is missing, unknown, or does not fit; speculation or verbose is asked for.
            CapabilityError: the backend runs no programs.
            GraphError: with these arguments the program may make more text than a server makes.
        """
        if options.verbose or options.speculation is not None or options.journal is not None:
            raise ParameterError("a run on a server takes no verbose, no speculation and no journal; leave them out")
        return HostedRun(self, self._arguments(arguments), options)

    def _arguments(self, given: Mapping[str, Json]) -> dict[str, Any]:
        known = [each.name for each in self.graph.parameters]
        for name in given:
            if name not in known:
                raise ParameterError(f"program {self.name} has no parameter {shown(name)}; {_listed(known)}")
        arguments: dict[str, Any] = {}
        for each in self.graph.parameters:
            if each.name in given:
                value = given[each.name]
                arguments[each.name] = _picture(each.name, value) if each.name in self.outgoing.pictures else value
            elif each.required:
                raise ParameterError(f"program {self.name} misses its argument {each.name!r}; {_listed(known)}")
            else:
                arguments[each.name] = each.default
        return arguments

    def _check_defaults(self) -> None:
        """Checks that the defaults can travel, and that none of them is a file of this machine."""
        for each in self.graph.parameters:
            if each.required:
                continue
            if each.name in self.outgoing.pictures and not isinstance(each.default, bytes):
                raise GraphError(
                    f"the default of parameter {each.name!r} is a picture that is no bytes; a server opens no files"
                )
            try:
                pack_values(each.default)
            except ParameterError as error:
                raise GraphError(f"the default of parameter {each.name!r} cannot be sent: {error}") from None


class HostedRun:
    """One run. `outcome` or `events` is awaited once; cancelling it ends the run everywhere.

    Raises:
        As `HostedGraph.start`.
    """

    def __init__(self, program: HostedGraph, arguments: Mapping[str, Any], options: RunOptions) -> None:
        self._program = program
        self._plan = program.plan
        self._run = Run(
            options.backend,
            timeout=options.timeout,
            allowance=allowance_of(options.budget),
            streaming=options.stream,
            salt=options.salt,
            priority=options.priority,
            home=RunningLoop(),
            history=History(prompts=1),  # the run's own: prompts of clients are not kept
        )
        try:
            self._execution = execution(program.outgoing, arguments, self._run, options=options.sampling, server=True)
        except Exception as error:
            self._run.end(error)
            raise _as_umbel_error(error) from None

    async def outcome(self) -> RunOutcome:
        """Runs the program to the end of all its streams. An error of the program is part of the outcome."""
        result: Any = None
        error: Exception | None = None
        try:
            result = await self._execution.run()
        except Exception as failed:
            error = failed
        writer = JsonWriter()
        variables: dict[str, Json] = {}
        objects: dict[str, Json] = {}
        unreadable: dict[str, str] = {}
        for name, slot in self._plan.variables:
            binding = self._execution.bindings[slot]
            try:
                variables[name] = writer.write(binding.value())
                made = _object_of(binding)
                if made is not binding:
                    objects[name] = writer.write(made)
            except ResultError as failed:
                unreadable[name] = str(failed)
            except Exception as failed:
                error = error or failed
        text = ""
        if error is None:
            try:
                result = writer.write(result)
                text = await self._text(result)
            except Exception as failed:
                error = failed
        return RunOutcome(
            variables,
            objects,
            unreadable,
            None if error is not None else result,
            text,
            self._run.ledger.cost.usage,
            None if error is None else _as_umbel_error(error),
        )

    async def events(self) -> AsyncGenerator[list[HostedEvent], None]:
        """Runs the program. Yields what became known since the last time, in order; the last event of all is the
        outcome. Closing the generator early ends the run."""
        waiting: list[HostedEvent] = []
        news = asyncio.Event()

        def note(event: HostedEvent) -> None:
            waiting.append(event)
            news.set()

        self._follow(note)
        running = asyncio.create_task(self.outcome(), name=f"program {self._run.id}")
        running.add_done_callback(lambda _: news.set())
        try:
            while not running.done() or waiting:
                await news.wait()
                news.clear()
                if waiting:
                    taken, waiting[:] = waiting[:], ()
                    yield taken
            yield [running.result()]
        finally:
            running.cancel()
            await asyncio.wait((running,))

    async def answer(self) -> AsyncGenerator[str | RunOutcome, None]:
        """Yields the text of the answer in pieces, then the outcome. Pieces come while the program runs as far as its
        result is made of variables and constant text, and the rest at the end."""
        growing, sent = GrowingResult(self._plan, self._execution), 0
        async with aclosing(self.events()) as batches:
            async for events in batches:
                end = events[-1]
                if not isinstance(end, RunOutcome):
                    piece = growing.more()
                elif end.error is None:
                    piece = end.text[sent:]
                else:
                    piece = ""
                if piece:
                    sent += len(piece)
                    yield piece
                if isinstance(end, RunOutcome):
                    yield end

    # -------------------------------------------------------------------------------- how

    async def _text(self, result: Json) -> str:
        """Returns the answer as text. Raises the error of the program's own stream."""
        position = (await self._execution.stream.reached()).position
        if result is None:
            return next((turn.content or "" for turn in reversed(position.turns) if turn.role == "assistant"), "")
        return result if isinstance(result, str) else msgspec.json.encode(result).decode()

    def _follow(self, note: Callable[[HostedEvent], None]) -> None:
        for slot, branch in self._program.branches.items():
            binding = self._execution.bindings[slot]
            if self._run.streaming:
                FeedFollower(binding.feed, partial(self._note_piece, note, slot, branch))
            if binding.done:
                self._note_value(note, slot, branch)
            else:
                binding.settled.add(partial(self._note_value, note, slot, branch))

    def _note_piece(self, note: Callable[[HostedEvent], None], slot: int, branch: str, text: str, _: Meta) -> None:
        note(TextPiece(slot, self._execution.bindings[slot].name, branch, text))

    def _note_value(self, note: Callable[[HostedEvent], None], slot: int, branch: str) -> None:
        binding = self._execution.bindings[slot]
        try:
            note(VariableSet(slot, binding.name, branch, as_json(binding.value())))
        except Exception as error:
            note(VariableSet(slot, binding.name, branch, error=_as_umbel_error(error)))


class GrowingResult:
    """Follows the text that a program returns while it is made: as much of its beginning as is certain.

    return f"{s['verdict']} Grade:{s['grade']}"
             as it grows   known  when it is settled
    """

    def __init__(self, plan: Plan, execution: Execution) -> None:
        result = plan.graph.result
        self._plan = plan
        self._execution = execution
        self._waiting = deque(result.inputs if isinstance(result.op, Concat) else (result,))
        self._texts = isinstance(result.op, Concat | Variable)
        self._given = 0  # characters of the first that waits
        self._taken = 0  # pieces of it

    def more(self) -> str:
        """Returns what has become certain since the last time."""
        found = ""
        while self._waiting and self._texts:
            node = self._waiting[0]
            bindings = [self._execution.bindings[slot] for slot in self._plan.sources[node]]
            if not all(binding.done for binding in bindings):
                return found + self._grown(node)
            try:
                text = _with_pairs(self._execution.values.text(node))
            except Exception:  # the outcome has it
                self._texts = False
                return found
            found += text[self._given :]
            self._waiting.popleft()
            self._given = self._taken = 0
        return found

    def _grown(self, node: Node) -> str:
        """Returns the new text of a variable that is one text, while it is generated."""
        slot = self._plan.slots.values.get(node)
        call = None if slot is None else self._plan.gens.get(slot)
        if slot is None or call is None or node.op != Variable(self._execution.bindings[slot].name):
            return ""
        if self._execution.sampling[call].n > 1:
            return ""
        pieces = self._execution.bindings[slot].feed.pieces[self._taken :]
        text = "".join(text for text, _ in pieces)
        self._taken += len(pieces)
        self._given += len(text)
        return text


# ------------------------------------------------------------------------------------------ of the graph


def _setters(graph: Graph) -> Iterator[tuple[Node, str]]:
    """Yields the nodes that set variables, with the names: calls, and ends of scopes."""
    for node in graph.nodes:
        match node.op:
            case Generate(gen, _, tags) if gen.name:
                yield node, gen.name
                if tags is not None:
                    yield node, gen.name + REASONING_SUFFIX
                yield from ((node, name) for name in captured_names(gen))
            case Choose(select) if select.name:
                yield node, select.name
            case VarScopeEnd(name):
                yield node, name


def _branches(plan: Plan) -> dict[int, str]:
    """Returns the branch of every variable that a call or a join sets: slot → its path, as `TextPiece` has it."""
    graph = plan.graph
    paths: list[str] = []
    for number, stream in enumerate(graph.streams):
        parents = graph.parents(number)
        begin = stream[0].op
        if parents is not None:
            paths.append(f"{paths[parents[0]]}.{parents[1]}".lstrip("."))
        else:
            paths.append(f"run{begin.number}" if isinstance(begin, Begin) and begin.number else "")
    branches = {plan.slots.variable(node, name): paths[graph.stream_of[node]] for node, name in _setters(graph)}
    for number, planned in enumerate(plan.streams):
        for action in planned.actions:
            if isinstance(action, GatherVariables):
                branches |= {slot: paths[number] for slot, _ in action.columns if plan.slots.bindings[slot][0]}
    return branches


def _object_of(binding: Binding) -> Any:
    """Returns the object of a variable; the binding itself where it is the value."""
    made = binding.object()
    return binding if made == binding.value() else made


# --------------------------------------------------------------------------------------- arguments


def _listed(names: list[str]) -> str:
    return f"its parameters are {', '.join(names)}" if names else "it has none"


def _picture(name: str, value: Json) -> bytes:
    """Reads the bytes of a picture: base64, or a data URL of it. A path stays unread: a server opens no files."""
    if isinstance(value, str):
        head, comma, tail = value.partition(",")
        text = tail if comma and head.startswith("data:") and head.endswith(";base64") else value
        try:
            return base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            pass
    raise ParameterError(
        f"argument {name!r} is shown as a picture, and {shown(value)} is no base64; send the bytes of a PNG, JPEG or "
        "WebP file in base64, or as data:image/png;base64,..."
    )


# ------------------------------------------------------------------------------------------ answers


class JsonWriter:
    """Makes JSON of the values of one run, up to `MOST_ANSWER` characters of them together."""

    def __init__(self) -> None:
        self._left = MOST_ANSWER

    def write(self, value: Any, depth: int = 0) -> Json:
        """Returns the value of JSON: bytes as base64, sets in the order of their texts, dates as text, a number that is
        none as null, an integer beyond 64 bits as text, and a "?" for half of a surrogate pair.

        Raises:
            ResultError: it is nested too deep, or too large.
        """
        if depth > MAX_DEPTH:
            raise ResultError(f"a value has lists in lists, more than {MAX_DEPTH} deep; return a flatter one")
        match value:
            case None | bool():
                return self._charged(value, 4)
            case str():
                return self._charged(value if value.isascii() else _with_pairs(value), len(value))
            case int() if _SMALLEST_INTEGER <= value <= _LARGEST_INTEGER:
                return self._charged(value, 20)
            case int():
                return self._charged(_digits(value), value.bit_length() // 3)
            case float():
                return self._charged(value if math.isfinite(value) else None, 20)
            case bytes():
                return self._charged(base64.b64encode(value).decode(), len(value) * 4 // 3)
            case dict():
                return {self._key(key): self.write(member, depth + 1) for key, member in value.items()}
            case set() | frozenset():
                return [self.write(member, depth + 1) for member in sorted(value, key=repr)]
            case list() | tuple():
                self._charged(None, 2)
                return [self.write(member, depth + 1) for member in value]
            case PurePath():
                return self.write(str(value), depth)
        return self.write(msgspec.to_builtins(value), depth + 1)  # dates, UUIDs

    def _key(self, key: Any) -> str:
        return cast(str, self.write(key if isinstance(key, str) else str(key)))

    def _charged(self, value: Json, characters: int) -> Json:
        self._left -= characters + 1
        if self._left < 0:
            raise ResultError(f"the answer has more than {MOST_ANSWER} characters; return less of what was made")
        return value


def as_json(value: Any) -> Json:
    """Returns one value as `JsonWriter.write` does."""
    return JsonWriter().write(value)


def _with_pairs(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _digits(value: int) -> str:
    try:
        return str(value)
    except ValueError:  # Python writes no more than 4300 digits
        raise ResultError(f"a number has {value.bit_length()} bits; return a smaller one") from None


def _as_umbel_error(error: Exception) -> UmbelError:
    """Returns the error of a program in umbel's words: a function of text raises Python's own."""
    if isinstance(error, UmbelError):
        return error
    if isinstance(error, _FAULTS):
        return ProgramError(f"the program ended with {type(error).__name__}: {shown(str(error))}")
    raise error
