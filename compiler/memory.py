"""Bounds how many KV slots a run can hold at once, before it runs.

    own stream   ────────┬──────────────┬───► gen          prompts are prefixes of each other: a stream holds what its
    branch 0             ├── gen ───────┤                  longest call in flight has, once; a branch adds what it says
    branch 1             └── gen ── gen ┘                  itself; and what may run at the same time adds up

Which calls run at the same time is read off forks and joins. A branch that waits for a variable of another one is
counted as running together with it: the bound is larger than it has to be then, and still a bound.

Lengths of prompts: constants and arguments are measured by the backend (`tokens_at_most`), scaffolding is that of its
template, and what a model will say is as long as `max_tokens` allows. A text that a model said and that the program
says again counts as the tokens that it took; encoding the whole may give a few more or fewer.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..interpreter.position import Position, Reached, since
from ..lang import sampling
from ..lang.errors import ParameterError
from ..lang.ops import CachePoint, RoleBegin, RoleEnd, VarScopeBegin, VarScopeEnd
from ..lang.prompt import Media, Part, Text
from ..lang.protocol import Backend
from .graph import Graph, Node
from .operations import (
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
    Isolate,
    Join,
    Look,
    Object,
    Options,
    StreamText,
    Structure,
    Variable,
)
from .values import Values

_STAND_IN = "\ue000"  # one character for a text that is not known yet; its length is counted apart from the prompt
_STAND_IN_TENANT = "tenant"
_ESCAPED = 10  # characters that repr makes of one
_ROOM = 2  # tokens of a choice that its bound may lack: those at the seam to the prompt are encoded anew


@dataclass(frozen=True, slots=True)
class Place:
    """The text of a stream after a node.

    Attributes:
        reached: the known parts.
        tokens: that the stream has said itself; `unknown`: those of them that stand in no part.
    """

    reached: Reached
    tokens: int
    unknown: int


@dataclass(frozen=True, slots=True)
class CallTokens:
    """Tokens that a call holds while it runs, in addition to its stream's prefix.

    Attributes:
        holds: of all its sequences.
        longest: of one sequence; a text that is said again counts as so many.
    """

    holds: int
    longest: int


class Lengths:
    """The most tokens that every prompt and every call of one run may have.

    Args:
        backend: started; measures text and has the template.
        arguments: by name; those of the graph's parameters without a default have to be there.
        options: sampling fields of the run.

    Attributes:
        places: after every stream node.
        calls: by `Generate` or `Choose`.

    Raises:
        ParameterError: an argument is missing, or sampling fields do not fit together.
        TemplateError: as the run would raise it.
    """

    def __init__(
        self, graph: Graph, backend: Backend, arguments: Mapping[str, Any], options: Options | None = None
    ) -> None:
        self._graph = graph
        self._backend = backend
        self._options = options or {}
        self._base = backend.tokens_at_most(())
        self._arguments = _complete(graph, arguments)
        self._values = Values({}, {}, (), self._arguments)
        self._known: set[Node] = set()  # values that are known before the run
        self._texts: dict[Node, int] = {}  # value node → tokens
        self._nested = _nested_streams(graph)
        self.places: dict[Node, Place] = {}
        self.calls: dict[Node, CallTokens] = {}
        for node in graph.nodes:
            if node.in_stream:
                self.places[node] = self._place(node)
            else:
                self._texts[node] = self._measured(node)

    @property
    def beginning(self) -> int:
        """Tokens before every prompt."""
        return self._base

    # -------------------------------------------------------------------------------- values

    def _measured(self, node: Node) -> int:
        """Counts the tokens of a value as text."""
        if isinstance(node.op, Constant | Argument) or (
            isinstance(node.op, Concat | Apply | Structure) and all(taken in self._known for taken in node.inputs)
        ):
            self._known.add(node)
            return self._count((Text(str(self._values.value(node))),))
        taken = [self._texts[value] for value in node.inputs if not value.in_stream]
        match node.op:
            case Variable() | Object():
                return self._set_by(node.inputs[0])
            case StreamText():
                return self._whole(node.inputs[0])
            case Apply(function, constants):
                return _applied(function, constants, taken[0])
            case Structure(template):
                return sum(taken) + self._count((Text(repr(template)),))
            case _:
                return sum(taken)

    def _set_by(self, setter: Node) -> int:
        if isinstance(setter.op, VarScopeEnd):
            begin = self._scope_of(setter)
            return self.places[setter].tokens - self.places[begin].tokens
        return self.calls[setter].longest

    def _scope_of(self, end: Node) -> Node:
        """Returns the node before the scope's first."""
        depth, node = 0, end.before
        while node is not None:
            if isinstance(node.op, VarScopeEnd):
                depth += 1
            elif isinstance(node.op, VarScopeBegin):
                if not depth:
                    return node
                depth -= 1
            node = node.before
        raise AssertionError("a scope that ends has begun: the verifier lets no other through")

    def _whole(self, place: Node) -> int:
        """Counts the whole prompt of a stream at a place, with what it inherited."""
        total, node = 0, place
        while True:
            total += self.places[node].tokens
            first = self._graph.streams[self._graph.stream_of[node]][0]
            if not isinstance(first.op, GetForkItem):
                return total
            node = first.inputs[0]

    def _count(self, parts: Sequence[Part]) -> int:
        return max(0, self._backend.tokens_at_most(tuple(parts)) - self._base)

    # -------------------------------------------------------------------------------- places

    def _place(self, node: Node) -> Place:
        if isinstance(node.op, Begin):
            position = Position()
            return Place(Reached(position.prompt, 0, position), 0, 0)
        before = self.places[node.inputs[0]]
        position = before.reached.position.copy()
        if isinstance(node.op, GetForkItem):
            return Place(Reached(position.prompt, len(position.turns), position, position.held), 0, 0)
        unknown = self._follow(node, position)
        said = self._count(since(before.reached.position.prompt, position.prompt))
        reached = replace(before.reached, position=position)
        return Place(reached, before.tokens + said + unknown, before.unknown + unknown)

    def _follow(self, node: Node, position: Position) -> int:
        """Appends the node's text; returns the number of its tokens that are not known yet."""
        template = self._backend.chat_template
        match node.op:
            case Append():
                text = node.inputs[1]
                if text in self._known:
                    position.append_text(str(self._values.value(text)))
                    return 0
                position.append_text(_STAND_IN)
                return self._texts[text]
            case RoleBegin(role):
                position.open_turn(template, role)
            case RoleEnd():
                position.close_turn(template)
            case Generate():
                position.settle("gen()")
                call = self.calls[node] = self._generated(node)
                return call.longest
            case Choose():
                position.settle("select()")
                call = self.calls[node] = self._chosen(node)
                return call.longest
            case Look(num_frames):
                position.settle("image()")
                kind = "image" if num_frames is None else "video"
                position.append(Media(kind, "", b"", num_frames or 0))
            case Join("concate_and_append"):
                return sum(self._take_over(self.places[end], position) for end in node.inputs[1:])
            case VarScopeBegin() | VarScopeEnd() | Fork():
                position.lead_in()
            case Isolate():
                position.open_private(_STAND_IN_TENANT)
            case Join() | CachePoint():
                pass
            case _:
                raise AssertionError(f"{type(node.op).__name__} stands in no stream")
        return 0

    @staticmethod
    def _take_over(end: Place, position: Position) -> int:
        position.take_over(end.reached)
        return end.unknown

    def _generated(self, node: Node) -> CallTokens:
        assert isinstance(node.op, Generate), "asked for a gen"
        params = self._sampling(node, node.op.defaults, node.op.gen.options)
        return CallTokens(params.n * params.max_tokens, params.max_tokens)

    def _chosen(self, node: Node) -> CallTokens:
        assert isinstance(node.op, Choose), "asked for a select"
        choices = [self._texts[choice] + _ROOM for choice in node.inputs[1:]]
        total = sum(choices)
        match node.op.select.method:
            case "unconditional_likelihood_normalized":
                total += total + len(choices)  # each choice once more, after the beginning of a text
            case "exact":
                total += total  # other spellings that the search looks at share most of their keys with the usual one
        return CallTokens(total, max(choices, default=0))

    def _sampling(self, node: Node, defaults: Options, given: Options) -> sampling.SamplingParams:
        nested = self._graph.stream_of[node] in self._nested
        return sampling.merge(defaults, {} if nested else self._options, given)


def _complete(graph: Graph, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Completes the arguments with the defaults of what is left out."""
    complete = dict(arguments)
    for parameter in graph.parameters:
        if parameter.name not in complete:
            if parameter.required:
                raise ParameterError(
                    f"program {graph.name} has no length without its argument {parameter.name!r}; write "
                    f"arguments={{{parameter.name!r}: ...}}"
                )
            complete[parameter.name] = parameter.default
    return complete


def _nested_streams(graph: Graph) -> set[int]:
    """Returns the streams of runs inside of the program, with their branches: options of the run do not reach them."""
    nested: set[int] = set()
    for number, stream in enumerate(graph.streams):
        parents = graph.parents(number)
        first = stream[0].op
        if (isinstance(first, Begin) and first.number) or (parents is not None and parents[0] in nested):
            nested.add(number)
    return nested


def _applied(function: str, constants: tuple[Any, ...], tokens: int) -> int:  # constants: as of Apply.arguments
    """Bounds the tokens of a function of an unknown text: the longest result if it may lengthen the text, else the
    text's own length."""
    match function:
        case "multiply":
            return tokens * max(0, int(constants[0]))
        case "center" | "ljust" | "rjust" | "zfill":
            return max(tokens, int(constants[0]))
        case "expandtabs":
            return tokens * max(1, int(constants[0]) if constants else 8)
        case "replace":
            old, new = constants[:2]
            return tokens if old and len(new) <= len(old) else (tokens + 1) * (len(new) + 1)
        case "format":
            return max(tokens, *(int(number[:9]) for number in re.findall(r"\d+", constants[0])), 0)
        case "repr" | "ascii":
            return _ESCAPED * tokens + 2
        case _:
            return tokens


# ------------------------------------------------------------------------------------ what a run holds at once


@dataclass(frozen=True, slots=True)
class _Held:
    """Tokens held by a stream with all its branches, without the inherited prefix.

    `peak`: at most. `rest`: at most when it has come to its end, by branches that no join took.
    """

    peak: int
    rest: int


def peak_tokens(graph: Graph, backend: Backend, arguments: Mapping[str, Any], options: Options | None = None) -> int:
    """Returns a bound of the tokens whose keys one run holds at the same time: never less than they are.

    Args:
        backend: started; it measures text (`tokens_at_most`) and has the chat template.
        arguments: of the run.
        options: sampling fields of the run, such as `max_tokens`.

    Raises:
        ParameterError: an argument is missing, or sampling fields do not fit together.
        TemplateError: as the run would raise it.
    """
    lengths = Lengths(graph, backend, arguments, options)
    branches = _branches(graph)
    held: dict[int, _Held] = {}
    for number in reversed(range(len(graph.streams))):  # branches begin after the stream that they leave
        held[number] = _held(graph, number, lengths, branches, held)
    own = [number for number, stream in enumerate(graph.streams) if isinstance(stream[0].op, Begin)]
    return lengths.beginning + sum(held[number].peak for number in own)


def _held(
    graph: Graph, number: int, lengths: Lengths, branches: Mapping[Node, list[int]], held: Mapping[int, _Held]
) -> _Held:
    """Bounds what one stream holds; `held` has its branches.

    [── anchor ──)          up to the last fork whose branches still hold something
    [──── tokens ────)      up to the call
    """
    running: dict[int, int] = {}  # branch → what it and its own branches may hold
    anchor = peak = 0
    for node in graph.streams[number]:
        if node in lengths.calls:
            before = node.inputs[0]
            peak = max(peak, lengths.places[before].tokens + lengths.calls[node].holds + sum(running.values()))
        elif isinstance(node.op, Fork):
            running |= {branch: held[branch].peak for branch in branches.get(node, ())}
            anchor = lengths.places[node].tokens
        elif isinstance(node.op, Join):
            for end in node.inputs[1:]:
                branch = graph.stream_of[end]
                if branch in running and graph.streams[branch][-1] is end:
                    running[branch] = held[branch].rest
        if any(running.values()):
            peak = max(peak, anchor + sum(running.values()))
    rest = sum(running.values())
    return _Held(peak, anchor + rest if rest else 0)


def _branches(graph: Graph) -> dict[Node, list[int]]:
    """Maps forks to the streams that begin there."""
    branches: dict[Node, list[int]] = {}
    for number, stream in enumerate(graph.streams):
        if isinstance(stream[0].op, GetForkItem):
            branches.setdefault(stream[0].inputs[0], []).append(number)
    return branches
