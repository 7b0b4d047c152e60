"""Runs programs of clients on a server: bytes → graph → plan → execution, with nothing of the server in reach.

The gateway imports this module by name (`lang.programs.ProgramHost`). A graph that comes here holds no code. It opens
no file either: pictures have to be bytes, which the client has read. What is left is size, and each size has a limit
below.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

from ...interpreter.body import sampling_defaults
from ...interpreter.budgets.budget import Allowance, Budget
from ...interpreter.cache_explain.history import History
from ...interpreter.loop import RunningLoop
from ...interpreter.run import Run
from ...lang.errors import GraphError, ParameterError
from ...lang.programs import HostedProgram, ProgramEnded, RunProgram, trouble_of
from ...lang.protocol import Backend
from ...lang.transport import packing
from ..files import serialise
from ..graph import Graph, Node
from ..operations import Argument, Constant, Fork, Look
from .execution import Execution
from .plan import Plan
from .reporting import Notify, ReportedSlots, Reporter
from .text_limit import TextLimit

MOST_NODES = 20_000  # all steps are made at once: 50 ms of a gateway's time, in which it serves no other client
MOST_STREAMS = 1_024  # each is a task, which takes as long to begin as twenty nodes
MOST_BRANCHES = 1_024  # of all forks, whether a stream begins there or not
MOST_TEXTS = 65_536  # that gens make, each counted n times
MOST_ARGUMENT_BYTES = 16 << 20  # a frame holds 32 MiB, and the graph goes with them


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
    return ProgramEnded(label, position.prompt.parts, turns, position.owed, usage)


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
    options = sampling_defaults(_packed(request.sampling, "sampling parameters"))
    texts = sum(parameters.n for parameters in plan.sampling(options))
    if texts > MOST_TEXTS:
        raise ParameterError(
            f"program {plan.graph.name!r:.80} generates {texts} texts, and {MOST_TEXTS} are the most that a server "
            "generates for one; lower n, or run it with server=False"
        )
    return options


def _packed(data: bytes, what: str) -> dict[str, Any]:
    values = packing.unpack(data) if data else {}
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
