"""Runs programs of clients on a server: bytes → graph → plan → execution, with nothing of the server in reach.

The gateway imports this module by name (`lang.programs.ProgramHost`). A graph that comes here holds no code. It opens
no file either: pictures have to be bytes, which the client has read. What is left is size, and each size has a limit
below. A few nodes are enough for a text of any length: `Apply` repeats and pads, and what is taken twice by each of
fifty nodes has doubled fifty times. `TextLimit` bounds how long the texts of a run can become, before it runs. What a
model generates is counted as it is usual, since it costs its sender tokens.

A `Reporter` sends the bindings of a run to its client when they are settled, and pieces of them:

variables   what a gen, a select or a scope has set: the text, or several, with facts; or the error
lists       what joins gather: that they are known. Both sides make them from what the branches found
places      whose text is read: the text
assigned    nothing: the client computes what the program assigned, and what it returns
"""

import contextlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ...interpreter.body import sampling_defaults
from ...interpreter.budget import Allowance, Budget
from ...interpreter.cache_explain.history import History
from ...interpreter.loop import RunningLoop
from ...interpreter.position import Reached
from ...interpreter.run import Run
from ...interpreter.variables import Binding, Feed, Meta
from ...lang.errors import GraphError, ParameterError
from ...lang.ops import RoleBegin, RoleEnd
from ...lang.programs import (
    OWN_STREAM,
    HostedProgram,
    ProgramEnded,
    ProgramEvent,
    ProgramPiece,
    ProgramValue,
    RunProgram,
    pack_values,
    trouble_of,
    unpack_values,
)
from ...lang.protocol import Backend
from ..files import serialise
from ..graph import Graph, Node
from ..operations import (
    Append,
    Apply,
    Argument,
    Begin,
    Choose,
    Concat,
    Constant,
    Fork,
    Generate,
    GetForkItem,
    Join,
    Look,
    StreamText,
    Structure,
)
from .actions import GatherVariables
from .execution import Execution
from .plan import Plan

MOST_NODES = 20_000  # all steps are made at once: 50 ms of a gateway's time, in which it serves no other client
MOST_STREAMS = 1_024  # each is a task, which takes as long to begin as twenty nodes
MOST_BRANCHES = 1_024  # of all forks, whether a stream begins there or not
MOST_TEXTS = 65_536  # that gens make, each counted n times
MOST_ARGUMENT_BYTES = 16 << 20  # a frame holds 32 MiB, and the graph goes with them
Notify = Callable[[ProgramEvent], None]
MOST_TEXT = 1 << 27  # characters of all texts that functions, joins and copies of streams make, together
_GENERATED = 1 << 15  # characters of what one `gen` or `select` usually gives, at most
_SCALAR = 32  # characters of a number
_SCAFFOLDING = 64  # characters around a turn
_LONGER_LETTERS = 3  # of case functions: "ΐ".upper() has three
_ESCAPED = 10  # of repr and ascii: "\U0001f600"
_MADE = ("repr", "ascii", "str", "format", "multiply", "replace", "center", "ljust", "rjust", "zfill", "expandtabs")


class IncomingProgram(HostedProgram):
    """A graph that a client sent: checked, with its plan.

    Raises:
        GraphError: it is larger than the limits, or looks at a file.
        ParameterError: its sampling fields do not fit together.
    """

    def __init__(self, graph: Graph) -> None:
        check_sizes(graph)
        self.plan = Plan(graph)
        self.reported = ReportedSlots(self.plan)
        self.text_limit = TextLimit(graph)
        self.pictures = tuple(
            op.name for op in (node.inputs[1].op for node in _looks(graph)) if isinstance(op, Argument)
        )

    async def execute(self, request: RunProgram, backend: Backend, seconds: float, notify: Notify) -> ProgramEnded:
        """Runs it on this loop, to the end of all its streams; see `lang.programs.HostedProgram`."""
        plan = self.plan
        if request.slots != len(plan.slots.bindings):
            raise GraphError(
                f"the program has {len(plan.slots.bindings)} values here and {request.slots} at its sender; both have "
                "to run the same version of umbel"
            )
        run = Run(
            backend,
            timeout=seconds,
            allowance=_allowance(request),
            streaming=request.stream,
            salt=request.origin.salt,
            priority=request.origin.priority,
            adapter=request.origin.adapter,
            home=RunningLoop(),
            history=History(prompts=1),  # no client asks here what was missed, and prompts of clients are not kept
        )
        execution = Execution(plan, _arguments(self, request), run, options=_sampling(plan, request))
        spoken = execution.queues[plan.root].spoken if request.stream else None
        Reporter(request.id, execution, self.reported, run, notify, spoken=spoken)
        with contextlib.suppress(Exception):  # of the body; its sender comes to the same one, by the same way
            await execution.run()
        return await _ending(request.id, execution, run)


def read(data: bytes) -> IncomingProgram:
    """Reads a program that a client sent; see `lang.programs.ProgramHost`.

    Raises:
        GraphError, ParameterError: the bytes are no graph that can run here.
    """
    return IncomingProgram(serialise.decode(data, source="the program that was sent"))


async def _ending(label: str, execution: Execution, run: Run) -> ProgramEnded:
    usage = run.ledger.cost.usage
    try:
        position = (await execution.stream.reached()).position
    except Exception as error:
        return ProgramEnded(label, usage=usage, error=trouble_of(error))
    turns = tuple((turn.role, turn.content) for turn in position.turns)
    private = tuple(part.tenant for part in position.coming_private)
    return ProgramEnded(label, position.prompt.parts, turns, position.owed, usage, private=private)


# ------------------------------------------------------------------------------------ what is given


def _arguments(program: IncomingProgram, request: RunProgram) -> dict[str, Any]:
    """Unpacks the arguments. Raises ParameterError for a missing or unknown one, or a picture that is no bytes."""
    arguments = _packed(request.arguments, "arguments")
    graph = program.plan.graph
    known = {parameter.name for parameter in graph.parameters}
    for name in arguments:
        if name not in known:
            raise ParameterError(f"program {graph.name} has no parameter {name!r}")
    for parameter in graph.parameters:
        if parameter.name not in arguments:
            if parameter.required:
                raise ParameterError(f"program {graph.name} misses its argument {parameter.name!r}")
            arguments[parameter.name] = parameter.default
    for name in program.pictures:
        if not isinstance(arguments[name], bytes):
            raise ParameterError(f"argument {name!r} is shown as a picture; send its bytes, a server opens no files")
    program.text_limit.check(arguments)
    return arguments


def _sampling(plan: Plan, request: RunProgram) -> Mapping[str, Any]:
    """Returns the sampling fields of the run. The adapter of the request is the default one."""
    given = {"adapter": request.origin.adapter} if request.origin.adapter else {}
    options = sampling_defaults(given | _packed(request.sampling, "sampling parameters"))
    texts = sum(parameters.n for parameters in plan.sampling(options))
    if texts > MOST_TEXTS:
        raise ParameterError(
            f"program {plan.graph.name!r:.80} generates {texts} texts, and {MOST_TEXTS} are the most that a server "
            "generates for one; lower n, or run it with server=False"
        )
    return options


def _packed(data: bytes, what: str) -> dict[str, Any]:
    values = unpack_values(data) if data else {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ParameterError(f"the program's {what} are no dict of names")
    return values


def _allowance(request: RunProgram) -> Allowance | None:
    limits = request.budget
    return None if limits is None else Allowance(Budget(tokens=limits.tokens, calls=limits.calls))


# ------------------------------------------------------------------------------------------- limits


def check_sizes(graph: Graph) -> None:
    """Checks the sizes of a graph, before anything is made for every node, stream or branch.

    Raises:
        GraphError: it is larger than the limits, or looks at a file.
    """
    for what, size, most in (
        ("nodes", len(graph.nodes), MOST_NODES),
        ("streams", len(graph.streams), MOST_STREAMS),
        ("branches", sum(node.op.size for node in graph.nodes if isinstance(node.op, Fork)), MOST_BRANCHES),
    ):
        if size > most:
            raise GraphError(
                f"program {graph.name!r:.80} has {size} {what}, and {most} are the most that a server runs; run it "
                "with server=False, or split it"
            )
    for node in _looks(graph):
        source = node.inputs[1].op
        if not isinstance(source, Argument) and not (isinstance(source, Constant) and isinstance(source.value, bytes)):
            raise GraphError(f"a picture{_at(node)} is no bytes; a server opens no files")


def _looks(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if isinstance(node.op, Look)]


def _at(node: Node) -> str:
    return f" at {node.line}" if node.line is not None else ""


# ------------------------------------------------------------------------------------------ reports


class ReportedSlots:
    """The reported slots of a plan. Client and server compute them from the same graph.

    Attributes:
        lists: slot → slots of what the branches found, None where one found nothing.
        places: slots of places whose text is read.
        slots: all that are reported.
    """

    def __init__(self, plan: Plan) -> None:
        actions = (action for stream in plan.streams for action in stream.actions)
        joins = (action for action in actions if isinstance(action, GatherVariables))
        self.lists = {slot: branches for join in joins for slot, branches in join.columns}
        values = plan.slots.values.items()
        self.places = frozenset(slot for value, slot in values if isinstance(value.op, StreamText))
        silent = set(plan.slots.marks.values()) - self.places
        assigned = {each.slot for each in plan.known} | {read.slot for read in plan.reads}
        self.slots = tuple(slot for slot in range(len(plan.slots.bindings)) if slot not in assigned | silent)


class Reporter:
    """Reports one execution.

    Args:
        label: of the request, in every message.
        reported: of its plan.
        spoken: text of the program's own stream. Its pieces are sent, and those of variables; None: no pieces.
    """

    def __init__(
        self,
        label: str,
        execution: Execution,
        reported: ReportedSlots,
        run: Run,
        notify: Notify,
        *,
        spoken: Feed | None,
    ) -> None:
        self._label = label
        self._run = run
        self._notify = notify
        for slot in reported.slots:
            binding = execution.bindings[slot]
            if slot in reported.lists:
                self._when_settled(binding, partial(self._gathered, slot, binding))
                continue
            self._when_settled(binding, partial(self._settled, slot, binding))
            if spoken is not None and binding.name:
                FeedFollower(binding.feed, partial(self._piece, slot, binding.name))
        if spoken is not None:
            FeedFollower(spoken, partial(self._piece, OWN_STREAM, ""))

    def _when_settled(self, binding: Binding, report: Callable[[], None]) -> None:
        if binding.done:
            report()
        else:
            binding.settled.add(report)

    def _settled(self, slot: int, binding: Binding) -> None:
        if binding.error is not None:
            self._value(slot, binding)
            return
        value = binding.value()
        if isinstance(value, Reached):
            value = value.position.prompt.text
        facts = pack_values(binding.meta) if binding.meta else b""
        self._value(slot, binding, tuple(value) if isinstance(value, list) else value, facts)

    def _gathered(self, slot: int, binding: Binding) -> None:
        self._value(slot, binding)

    def _value(self, slot: int, binding: Binding, value: str | tuple[str, ...] = "", facts: bytes = b"") -> None:
        trouble = None if binding.error is None else trouble_of(binding.error)
        self._notify(ProgramValue(self._label, slot, binding.name, value, facts, trouble, self._run.ledger.cost.usage))

    def _piece(self, slot: int, name: str, text: str, facts: Meta) -> None:
        self._notify(ProgramPiece(self._label, slot, name, text, pack_values(facts)))


class FeedFollower:
    """Passes what is new in a feed to `notify` whenever it grows, with what is there already."""

    def __init__(self, feed: Feed, notify: Callable[[str, Meta], None]) -> None:
        self._feed = feed
        self._notify = notify
        self._sent = 0
        self._grown()

    def _grown(self) -> None:
        self._feed.changed.add(self._grown)
        while self._sent < len(self._feed.pieces):
            text, facts = self._feed.pieces[self._sent]
            self._sent += 1
            self._notify(text, facts)


# --------------------------------------------------------------------------------- lengths of texts


class TextLimit:
    """The limit of one graph. Most graphs copy nothing, and are not checked again."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._grows = any(_grows(node) for node in graph.nodes)

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises GraphError where a run with these arguments may make more than `MOST_TEXT` characters."""
        if not self._grows:
            return
        length: dict[Node, int] = {}  # of values; of what a stream's prompt has up to a stream node
        said: dict[Node, int] = {}  # of what a stream has said itself up to a node
        made = 0
        for node in self._graph.nodes:
            if node.in_stream:
                said[node], added = self._said(node, length, said)
                before = node.inputs[0] if node.inputs else None
                length[node] = (0 if before is None else length[before]) + added
                made += added if isinstance(node.op, Join) else 0
            else:
                length[node] = self._value(node, length, arguments)
                made += length[node] if _grows(node) else 0
            if made > MOST_TEXT:
                at = f" at {node.line}" if node.line is not None else ""
                raise GraphError(
                    f"the program{at} may make texts of {made} characters, and {MOST_TEXT} are the most that a server "
                    "makes; run it with server=False"
                )

    def _said(self, node: Node, length: Mapping[Node, int], said: Mapping[Node, int]) -> tuple[int, int]:
        """Counts what the stream has said itself, and what of it the node adds."""
        match node.op:
            case Begin() | GetForkItem():
                return 0, 0
            case Append():
                added = length[node.inputs[1]]
            case Generate() | Choose():
                added = _GENERATED
            case RoleBegin() | RoleEnd():
                added = _SCAFFOLDING
            case Join("concate_and_append"):
                added = sum(said[end] for end in node.inputs[1:])
            case _:
                added = 0
        return said[node.inputs[0]] + added, added

    def _value(self, node: Node, length: Mapping[Node, int], arguments: Mapping[str, Any]) -> int:
        taken = [length[value] for value in node.inputs]
        match node.op:
            case Constant(value):
                return _size(value)
            case Argument(name):
                return _size(arguments.get(name))
            case Concat():
                return sum(taken)
            case StreamText():
                return taken[0]
            case Structure(template):
                return sum(taken) + _size(template)
            case Apply(function, constants):
                return _applied(function, constants, taken[0])
            case _:  # a variable, or the object that it stands for
                return _GENERATED


def _grows(node: Node) -> bool:
    match node.op:
        case Apply(function):
            return function in _MADE
        case Join(mode):
            return mode == "concate_and_append"
        case _:
            return isinstance(node.op, Concat | StreamText)


def _applied(function: str, constants: tuple[Any, ...], length: int) -> int:
    first: Any = constants[0] if constants else 8  # an integer or a text, as `checks/nodes.py` has looked
    match function:
        case "multiply":
            return length * max(0, int(first))
        case "center" | "ljust" | "rjust" | "zfill":
            return max(length, int(first))
        case "expandtabs":
            return length * max(1, int(first))
        case "replace":
            return (length + 1) * (len(constants[1]) + 1)
        case "format":
            return length + _SCALAR + sum(int(number[:18]) for number in re.findall(r"\d+", first))
        case "repr" | "ascii" | "str":
            return _ESCAPED * length + 2
        case _:
            return _LONGER_LETTERS * length


def _size(value: Any) -> int:
    """Counts the characters of all that is in a value. No recursion."""
    total, waiting = 0, [value]
    while waiting:
        member = waiting.pop()
        match member:
            case str() | bytes():
                total += len(member)
            case dict():
                waiting.extend(member)
                waiting.extend(member.values())
            case list() | tuple() | set() | frozenset():
                waiting.extend(member)
                total += 2
            case int():
                total += member.bit_length() // 3 + 2
            case _:
                total += _SCALAR
    return total
