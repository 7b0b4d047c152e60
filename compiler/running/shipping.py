"""Runs a program by shipping it: the graph goes to the runtime in one message, and its variables come back.

    Execution         all steps here, a call to the backend for each gen
    RemoteExecution   one step here: it sends the graph, and settles the bindings with what the runtime reports

Everything else is the same object. The state reads the same bindings, the place where the body would have ended is
found in the same way, lists of joins and what the program assigns and returns are made here, of the same values.
"""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, cast

from ...interpreter import media
from ...interpreter.executor import Executor
from ...interpreter.position import Position, Reached
from ...interpreter.run import Run
from ...interpreter.steps import Elsewhere, Step
from ...interpreter.stream import Stream
from ...lang import ops
from ...lang.chat_template import Turn
from ...lang.errors import BackendError, CapabilityError, DeadlineError, GraphError, ParameterError
from ...lang.programs import (
    MAX_GRAPH_BYTES,
    OWN_STREAM,
    ProgramEnded,
    ProgramEvent,
    ProgramPiece,
    ProgramRunner,
    ProgramValue,
    RunProgram,
    digest_of,
    pack_values,
    unpack_values,
)
from ...lang.prompt import EMPTY, Private, Prompt, Text
from ...lang.protocol import Backend, Usage
from ..files import serialise
from ..graph import Builder, Graph, Node, reachable, rebuilt
from ..operations import Argument, Choose, Generate, Look, Object, Options
from . import service
from .actions import AppendText, RunLateSelect
from .execution import Execution
from .plan import Plan
from .service import ReportedSlots, TextLimit

Server = Literal["auto"] | bool  # whether a program is shipped: where it gains, always, never

_NONE: Options = {}
_WORTH = 2  # calls of a program from which on the ways between them are saved


class OutgoingProgram:
    """A plan as it is shipped. Each part is computed once, when a run first needs it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @cached_property
    def reported(self) -> ReportedSlots:
        return ReportedSlots(self.plan)

    @cached_property
    def text_limit(self) -> TextLimit:
        return TextLimit(self.plan.graph)

    @cached_property
    def pictures(self) -> frozenset[str]:
        """Names of arguments that are shown as pictures."""
        sources = (node.inputs[1].op for node in self.plan.graph.nodes if isinstance(node.op, Look))
        return frozenset(op.name for op in sources if isinstance(op, Argument))

    @cached_property
    def worth(self) -> bool:
        """True if it makes more than one call."""
        return sum(isinstance(node.op, Generate | Choose) for node in self.plan.graph.nodes) >= _WORTH

    @cached_property
    def data(self) -> bytes:
        """The graph's bytes.

        Raises:
            GraphError: it holds what cannot travel, or more than a server takes.
        """
        graph = self.plan.graph
        grammar = self.plan.grammar
        if grammar.open_role is not None or grammar.open_scopes:
            raise GraphError(f"program {graph.name!r} leaves a role or a scope open at its end")
        service.check_sizes(graph)
        self._check_pictures(graph)
        _check_judges(graph)
        data = serialise.encode(_without_results(graph))
        if len(data) > MAX_GRAPH_BYTES:
            raise GraphError(f"the graph of {graph.name!r} has {len(data)} bytes, {MAX_GRAPH_BYTES} are accepted")
        return data

    @cached_property
    def digest(self) -> str:
        return digest_of(self.data)

    @cached_property
    def obstacle(self) -> str | None:
        """The reason why the graph cannot be sent; None if it can. Computed once: writing a graph takes time."""
        try:
            _ = self.digest
        except GraphError as error:
            return str(error)
        return None

    def _check_pictures(self, graph: Graph) -> None:
        """Checks arguments that are pictures: the bytes of a picture stand in for its path, so nothing else may be made
        of the path."""
        for name in self.pictures:
            for node in graph.nodes:
                if node.op == Argument(name) and any(not isinstance(user.op, Look) for user in graph.users[node]):
                    raise GraphError(f"argument {name!r} is shown as a picture, and used for something else, too")


def execution(
    program: OutgoingProgram,
    arguments: Mapping[str, Any],
    run: Run,
    *,
    stream: Stream | None = None,
    options: Options = _NONE,
    server: Server = "auto",
) -> Execution:
    """Makes an execution on the runtime, or here: as `server` says, and as it can be.

    Raises:
        CapabilityError, GraphError, ParameterError: with server=True, why it cannot be shipped.
        What `Execution` raises.
    """
    if server is not False and (server is True or (program.worth and run.backend.capabilities.programs)):
        try:
            packed = _packed(program, run.backend, arguments)
        except (CapabilityError, GraphError, ParameterError):
            if server is True:
                raise
        else:
            return RemoteExecution(program, packed, arguments, run, stream=stream, options=options)
    return Execution(program.plan, arguments, run, stream=stream, options=options)


def _packed(program: OutgoingProgram, backend: Backend, arguments: Mapping[str, Any]) -> bytes:
    """Packs the arguments as they travel, without those that are pictures. Raises where the program cannot be
    shipped."""
    if not backend.capabilities.programs or not isinstance(backend, ProgramRunner):
        raise CapabilityError(
            f"{backend.capabilities.name} runs no programs itself; leave server=True out, or run it on a Runtime that "
            "uses its model's own chat template"
        )
    if program.obstacle is not None:
        raise GraphError(program.obstacle)
    program.text_limit.check(arguments)
    packed = pack_values({name: value for name, value in arguments.items() if name not in program.pictures})
    if len(packed) > service.MOST_ARGUMENT_BYTES:
        raise ParameterError(
            f"the arguments have {len(packed)} bytes, and {service.MOST_ARGUMENT_BYTES} can be shipped; write "
            "server=False"
        )
    return packed


class RemoteExecution(Execution):
    """Runs a plan on the runtime, with the interface of `Execution`; made by `execution`.

    Args:
        packed: the arguments.
    """

    __slots__ = ("_arguments", "_options", "_packed_arguments", "_program", "_usage")

    def __init__(
        self,
        program: OutgoingProgram,
        packed: bytes,
        arguments: Mapping[str, Any],
        run: Run,
        *,
        stream: Stream | None,
        options: Options,
    ) -> None:
        self._program = program
        self._packed_arguments = packed
        self._arguments = arguments
        self._options = options
        self._usage = Usage()  # as far as the runtime has reported it
        super().__init__(program.plan, arguments, run, stream=stream, options=options)

    def launch(self) -> None:
        self.queues[self._plan.root].launch()

    def _load(self) -> None:
        for planned in self._plan.streams:
            for action in planned.actions:
                if isinstance(action, AppendText | RunLateSelect):
                    action.step(self)  # an argument that does not fit is refused here and now
        self._load_own([Step(Elsewhere(self._play, self._fail_rest))])

    # -------------------------------------------------------------------------------- on the loop

    async def _play(self, executor: Executor) -> None:
        run = self._run
        before = run.ledger.cost
        held, budget = run.ledger.hold_rest()
        try:
            request = RunProgram(
                run.request_id(),
                self._program.digest,
                len(self.bindings),
                self._program.data,
                await self._all_arguments(),
                pack_values(dict(self._options)),
                stream=run.streaming or self.queues[self._plan.root].streaming,
                origin=run.origin("", run.adapter),
                budget=budget,
            )
            runner = cast(ProgramRunner, run.backend)
            span = nullcontext() if run.spans is None else run.spans.shipped(lambda: self._usage)
            with span:
                async with aclosing(runner.run_program(request)) as events:
                    async for event in events:
                        await self._on_event(event, executor)
                        run.ledger.note_others(before, self._usage)
        except DeadlineError as error:
            if run.is_late:
                raise run.lateness() from error
            raise
        finally:
            run.ledger.settle_rest(held, self._usage)
        self._fail_rest(BackendError(f"{run.backend.capabilities.name} ended the program without all of its variables"))

    async def _all_arguments(self) -> bytes:
        """Packs all arguments, with the bytes of pictures, which are read now."""
        pictures = self._program.pictures
        if not pictures:
            return self._packed_arguments
        shown = {name: (await asyncio.to_thread(_loaded, self._arguments[name])) for name in pictures}
        return pack_values({**self._arguments, **shown})

    async def _on_event(self, event: ProgramEvent, executor: Executor) -> None:
        match event:
            case ProgramPiece(slot=slot, text=text, facts=facts):
                feed = executor.spoken if slot == OWN_STREAM else self._named(slot, event.name).feed
                feed.append(text, unpack_values(facts))
            case ProgramValue():
                self._usage = event.usage
                await self._settle(event)
            case ProgramEnded():
                self._usage = event.usage
                self._finish(event, executor)

    async def _settle(self, event: ProgramValue) -> None:
        slot, binding = event.slot, self._named(event.slot, event.name)
        reported = self._program.reported
        if event.error is not None:
            binding.fail(event.error.error())
        elif slot in reported.lists:
            branches = tuple(None if branch is None else self.bindings[branch] for branch in reported.lists[slot])
            for branch in branches:
                if branch is not None:
                    await branch.settled_here()
            binding.resolve_gathered(branches)
        elif slot in reported.places:
            text = "".join(event.value)
            binding.resolve(Reached(EMPTY, 0, Position(EMPTY.append(Text(text)) if text else EMPTY)))
        else:
            value = list(event.value) if isinstance(event.value, tuple) else event.value
            binding.resolve(value, unpack_values(event.facts) if event.facts else None)

    def _finish(self, ended: ProgramEnded, executor: Executor) -> None:
        """Ends the program's own stream. Raises why it did not come to its end."""
        if ended.error is not None:
            raise ended.error.error()
        prompt: Prompt = EMPTY
        for part in ended.prompt:
            prompt = prompt.append(part)
        position = executor.position
        position.prompt, position.owed = prompt, ended.owed
        position.coming_private = tuple(map(Private, ended.private))
        position.turns = tuple(Turn(role, content) for role, content in ended.turns)
        executor.spoken.append(prompt.text[executor.spoken.length :], {})

    def _named(self, slot: int, name: str) -> Any:
        """Returns the binding in a slot. Raises BackendError where the other side names another one."""
        if not 0 <= slot < len(self.bindings) or self.bindings[slot].name != name or self.bindings[slot].done:
            raise BackendError(f"{self._run.backend.capabilities.name} told of a variable {name!r} that is not to come")
        return self.bindings[slot]

    def _fail_rest(self, error: BaseException) -> None:
        """Fails the bindings that will not be reported any more."""
        for slot in self._program.reported.slots:
            self.bindings[slot].fail(error)


def _loaded(source: Any) -> bytes:  # Any: a path, bytes or a picture
    shown = ops.Image(source)
    media.check(shown)
    return media.load(shown).data


def _check_judges(graph: Graph) -> None:
    """Checks that no result type judges answers: it does so by code, and code does not travel. Captures are read here,
    too: what comes back is one text for each call."""
    for node in graph.nodes:
        if isinstance(node.op, Generate) and node.op.gen.captures is not None:
            names = ", ".join(map(repr, node.op.gen.captures.results))
            raise GraphError(f"gen({node.op.gen.name!r}) captures {names}, which is read here; write server=False")
        if isinstance(node.op, Generate) and node.op.gen.result is not None and node.op.gen.result.judges:
            raise GraphError(
                f"gen({node.op.gen.name!r}): its type {node.op.gen.result.wanted} or validate= may refuse what was "
                "generated, which is then asked for again from here; write server=False, or a TypedDict of plain types "
                "without validate="
            )


def _without_results(graph: Graph) -> Graph:
    """Removes result types: objects are made here, of the texts that come back, so their classes need not travel;
    unless the program writes what is made of them."""
    written = reachable(node for node in graph.nodes if node.in_stream)
    if any(isinstance(node.op, Object) for node in written):
        return graph
    return rebuilt(graph, _without_result)


def _without_result(builder: Builder, node: Node, inputs: tuple[Node, ...]) -> Node:
    op = node.op
    if isinstance(op, Generate) and op.gen.result is not None:
        op = replace(op, gen=replace(op.gen, result=None))
    return builder.node(op, inputs, node.line)
