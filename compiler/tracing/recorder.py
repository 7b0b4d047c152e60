"""Records one stream of a program that is traced: operations become nodes, reads give symbols."""

import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from ...interpreter import media
from ...interpreter.stream import REASONING_SUFFIX, Grammar
from ...interpreter.variables import Binding, VariableTable
from ...lang import ops, sampling
from ...lang.agents.plan import AgentPlan, AgentResult
from ...lang.protocol import Cost
from ...lang.state import JoinMode, Race, Sink, Value
from ..graph import Line, Node
from ..operations import (
    Append,
    Choose,
    Fork,
    Generate,
    GetForkItem,
    Isolate,
    Join,
    Look,
    Object,
    Options,
    StreamOperation,
    StreamText,
    Variable,
    captured_names,
)
from .lines import current_line
from .tape import Tape

Tags = tuple[str, str]


@dataclass(frozen=True, slots=True)
class SetByCall:
    """A name that a stream node binds.

    Attributes:
        count: of texts.
        typed: the text stands for an object that is none.
        captured: it is a part of a text; `certain`: which every text holds exactly once.
    """

    name: str
    setter: Node
    count: int = 1
    typed: bool = False
    captured: bool = False
    certain: bool = True


@dataclass(frozen=True, slots=True)
class SetByProgram:
    """A name that the program binds to what it has."""

    value: Any  # the user's


@dataclass(frozen=True, slots=True)
class SetByBranches:
    """A name bound by a join: its value in each branch, None where a branch has none."""

    branches: "tuple[Bound | None, ...]"


Bound = SetByCall | SetByProgram | SetByBranches


class Recorder(Sink):
    """Records one stream.

    Args:
        tape: of the trace.
        last: where the stream begins.
        program_options: sampling defaults of the program that speaks.
        run_options: sampling defaults of the run, which win over the program's. They are those of a run inside of the
            program; what the program itself is run with is not known when it is traced.
        streams: all of the trace; this one is put after them.
        base: what the stream it was forked off had bound.
        grammar: what is open where it begins.
    """

    def __init__(
        self,
        tape: Tape,
        last: Node,
        program_options: Options,
        run_options: Options,
        streams: "list[Recorder]",
        base: Mapping[str, Bound] | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        self.tape = tape
        self.last = last
        self._program_options = program_options
        self._run_options = run_options
        self._streams = streams
        self._base: Mapping[str, Bound] = base or {}
        self._own: dict[str, Bound] = {}
        self._grammar = grammar or Grammar()
        streams.append(self)

    # -------------------------------------------------------------------------------- saying

    def submit(self, op: ops.Op) -> None:
        self.tape.check_usable()
        line = current_line()
        leaves = list(_leaves(op, None))
        grammar = self._grammar
        for leaf, _ in leaves:  # raises before anything is recorded
            grammar = self._checked(leaf, grammar)
        self._grammar = grammar
        for leaf, tags in leaves:
            self._record(leaf, tags, line)

    def _checked(self, op: ops.Op, grammar: Grammar) -> Grammar:
        """Returns the grammar after `op`, by the rules of the interpreter."""
        match op:
            case ops.ConstantText():
                return grammar
            case ops.Image(source) | ops.Video(source) | ops.PrivateBegin(source):
                if not self.tape.is_constant(source):
                    return grammar
            case ops.Select():
                self.tape.check_constant(replace(op, choices=()), "select()")
            case _:
                self.tape.check_constant(op, f"{type(op).__name__.lower()}()")
        return grammar.read(op, self._sampling)[0]

    def _record(self, op: ops.Op, tags: Tags | None, line: Line | None) -> None:
        match op:
            case ops.ConstantText(text):
                for piece in self.tape.pieces(text):
                    self._say(Append(), line, piece)
            case ops.Gen(name):
                self._say(Generate(op, self._defaults, tags), line)
                count = self._sampling(op.options).n
                if name:
                    self._own[name] = SetByCall(name, self.last, count, op.result is not None)
                if name and tags is not None:
                    thinking = name + REASONING_SUFFIX
                    self._own[thinking] = SetByCall(thinking, self.last, count)
                for captured, certain in captured_names(op).items():
                    self._own[captured] = SetByCall(captured, self.last, count, True, True, certain)
            case ops.Select(name, choices):
                nodes = [self.tape.text(choice) for choice in choices]
                self._say(Choose(replace(op, choices=()), self._defaults), line, *nodes)
                if name:
                    self._own[name] = SetByCall(name, self.last)
            case ops.VarScopeEnd(name):
                self._say(op, line)
                self._own[name] = SetByCall(name, self.last)
            case ops.Image():
                self._say(Look(), line, self._source(op))
            case ops.Video(num_frames=num_frames):
                self._say(Look(num_frames), line, self._source(op))
            case ops.PrivateBegin(tenant):
                self._say(Isolate(), line, self.tape.value(tenant, "a tenant"))
            case ops.RoleBegin() | ops.RoleEnd() | ops.VarScopeBegin() | ops.CachePoint():
                self._say(op, line)
            case _:
                raise self.tape.refuse(f"a graph has no {type(op).__name__}", "operations of umbel only")

    def _source(self, op: ops.Image | ops.Video) -> Node:
        """Records a picture. A path is read when the graph runs; what a program holds of a picture is kept as it is
        now."""
        match op.source:
            case str():
                return self.tape.text(op.source)
            case os.PathLike():
                return self.tape.text(os.fspath(op.source))
            case _:
                return self.tape.value(media.load(op).data, "a picture")

    def _say(self, op: StreamOperation, line: Line | None, *inputs: Node) -> None:
        self.last = self.tape.node(op, (self.last, *inputs), line)

    @property
    def _defaults(self) -> dict[str, Any]:
        return {**self._program_options, **self._run_options}

    def _sampling(self, given: Options) -> sampling.SamplingParams:
        return sampling.merge(self._program_options, self._run_options, given)

    @contextmanager
    def options(self, program_options: Options, /) -> Iterator[None]:
        """Sets the options while a nested program speaks: its own sampling defaults go before those of the program
        around it."""
        outer = self._program_options
        self._program_options = {**outer, **program_options}
        try:
            yield
        finally:
            self._program_options = outer

    # -------------------------------------------------------------------------------- branches

    def fork(self, size: int) -> list[Sink]:
        self.tape.check_usable()
        line = current_line()
        self._say(Fork(size), line)
        base = self._bound()
        return [
            Recorder(
                self.tape,
                self.tape.node(GetForkItem(index), (self.last,), line),
                self._program_options,
                self._run_options,
                self._streams,
                base,
                self._grammar,
            )
            for index in range(size)
        ]

    def join(self, children: list[Sink], mode: JoinMode, quorum: int | None = None) -> None:
        if quorum is not None:
            self._only_of_a_run(
                "which branches end first is known in a run", "join() of all branches, or program.run()"
            )
        self.tape.check_usable()
        branches = [self._branch(child) for child in children]
        if mode == "concate_and_append":
            for index, branch in enumerate(branches):
                branch._grammar.check_same_turn(self._grammar, index)
        self._say(Join(mode), current_line(), *(branch.last for branch in branches))
        if mode == "gather_variable":
            for name in dict.fromkeys(name for branch in branches for name in branch._own):
                self._own[name] = SetByBranches(
                    tuple(branch._own.get(name) or branch._base.get(name) for branch in branches)
                )

    def _branch(self, child: Sink) -> "Recorder":
        if isinstance(child, Recorder) and child.tape is self.tape:
            return child
        raise self.tape.refuse("a branch of another program is joined", "s.fork(...) for branches of this state")

    # -------------------------------------------------------------------------------- variables

    def assign(self, name: str, value: Value) -> None:
        self.tape.check_usable()
        self._check_name(name)
        self._own[name] = SetByProgram(value)

    def has(self, name: str) -> bool:
        self._check_name(name)
        return name in self._own or name in self._base

    def names(self) -> list[str]:
        return list(self._bound())

    def read(self, name: str, timeout: float | None) -> Value:
        bound = self._find(name)
        if self.tape.is_given(name):
            return self.tape.given_text(name)
        self._check_certain(name, bound)
        return self._text_of(bound)

    def _check_certain(self, name: str, bound: Bound) -> None:
        """Refuses a capture that holds None or a list in some texts: a graph says texts."""
        match bound:
            case SetByBranches(branches):
                for branch in branches:
                    if branch is not None:
                        self._check_certain(name, branch)
            case SetByCall(captured=True, certain=False):
                raise self.tape.refuse(
                    f"s[{name!r}] is captured from a part that may be left out, or come several times, and is a text "
                    "in some runs only",
                    "what needs it after the run, or .capture() on a part that every text holds once",
                )

    async def read_async(self, name: str, timeout: float | None) -> Value:
        return self.read(name, timeout)

    def value(self, name: str, timeout: float | None) -> Any:
        bound = self._find(name)
        return self.tape.given(name) if self.tape.is_given(name) else self._object_of(bound)

    async def value_async(self, name: str, timeout: float | None) -> Any:
        return self.value(name, timeout)

    def text(self, timeout: float | None) -> str:
        self.tape.check_usable()
        return self.tape.symbol(self.tape.node(StreamText(), (self.last,)))

    async def text_async(self, timeout: float | None) -> str:
        return self.text(timeout)

    def variables(self) -> list[tuple[str, Node]]:
        """Returns every name of the stream and the node of its value, in order of first use."""
        return [(name, self._node_of(name, bound)) for name, bound in self._bound().items()]

    def _bound(self) -> dict[str, Bound]:
        return {**self._base, **self._own}

    def _find(self, name: str) -> Bound:
        """Raises VariableError for a name that the program does not set."""
        self.tape.check_usable()
        self._check_name(name)
        bound = self._own.get(name) or self._base.get(name)
        if bound is None:
            raise VariableTable({known: Binding(known) for known in self._bound()}).unknown(name)
        return bound

    def _check_name(self, name: object) -> None:
        self.tape.check_constant(name, "the name of a variable")

    def _text_of(self, bound: Bound) -> Any:  # a symbol, a list, or what the program assigned
        match bound:
            case SetByProgram(value):
                return value
            case SetByBranches(branches):
                return [self._text_of(branch) if branch is not None else None for branch in branches]
            case SetByCall(name, setter, 1):
                return self.tape.symbol(self.tape.node(Variable(name), (setter,)))
            case SetByCall(name, setter, count):
                nodes = (self.tape.node(Variable(name, index), (setter,)) for index in range(count))
                return [self.tape.symbol(node) for node in nodes]

    def _object_of(self, bound: Bound) -> Any:  # an opaque symbol, a list, or what `_text_of` gives
        match bound:
            case SetByBranches(branches):
                return [self._object_of(branch) if branch is not None else None for branch in branches]
            case SetByCall(name, setter, count, True):
                node = self.tape.node(Object(name), (setter,))
                whole = self.tape.opaque(node)
                return whole if count == 1 else [self.tape.item(node, index) for index in range(count)]
            case _:
                return self._text_of(bound)

    def _node_of(self, name: str, bound: Bound) -> Node:
        return self.tape.value(self._text_of(bound), f"variable {name!r}")

    # -------------------------------------------------------------------------------- what only a run has

    def meta(self, name: str, timeout: float | None) -> dict[str, Any]:
        self._only_of_a_run("get_meta_info() tells of a call", "state.get_meta_info(...) for the state of a run")

    async def meta_async(self, name: str, timeout: float | None) -> dict[str, Any]:
        return self.meta(name, timeout)

    def messages(self, timeout: float | None) -> list[dict[str, str]]:
        self._only_of_a_run("messages() has the text of a run", "s.text(), which a graph has")

    async def messages_async(self, timeout: float | None) -> list[dict[str, str]]:
        return self.messages(timeout)

    def sync(self, timeout: float | None) -> None:
        """Returns at once: there is nothing to wait for."""
        self.tape.check_usable()

    async def sync_async(self, timeout: float | None) -> None:
        self.sync(timeout)

    def error(self) -> BaseException | None:
        self._only_of_a_run("the error of a state", "state.error() for the state of a run")

    def cost(self) -> Cost:
        self._only_of_a_run("the cost of a run", "state.cost for the state of a run")

    async def cost_async(self) -> Cost:
        return self.cost()

    def cost_so_far(self) -> Cost:
        return self.cost()

    def cancel(self) -> None:
        self._only_of_a_run("cancel() stops a run", "state.cancel() for the state of a run")

    @property
    def cancelled(self) -> bool:
        return False

    def race(self, children: list[Sink], timeout: float | None) -> Race:
        self._only_of_a_run("which branches end first is known in a run", "join() of all branches, or program.run()")

    def call_tools(self, plan: AgentPlan) -> AgentResult:
        self._only_of_a_run("call_tools() runs tools and looks at answers", "program.run()")

    def iterate(self, name: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
        self._only_of_a_run("the pieces of a text come while it runs", "program.run(..., stream=True)")

    def iterate_async(self, name: str | None) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        self._only_of_a_run("the pieces of a text come while it runs", "program.run(..., stream=True)")

    def grow(self, name: str) -> Iterator[Any]:
        self._only_of_a_run("the parts of a value come while it runs", "program.run(..., stream=True)")

    def grow_async(self, name: str) -> AsyncIterator[Any]:
        self._only_of_a_run("the parts of a value come while it runs", "program.run(..., stream=True)")

    def _only_of_a_run(self, what: str, instead: str) -> NoReturn:
        raise self.tape.refuse(f"{what}, and a graph is none", instead)


def _leaves(op: ops.Op, tags: Tags | None) -> Iterator[tuple[ops.Op, Tags | None]]:
    """Yields operations one by one, each with the tags of the thinking around it."""
    match op:
        case ops.Sequence(members):
            for member in members:
                yield from _leaves(member, tags)
        case ops.SeparateReasoning(inner, open_tag, close_tag):
            yield from _leaves(inner, (open_tag, close_tag))
        case _:
            yield op, tags
