"""The actions of a compiled program's streams: the part of a step that is the same in all runs.

`step` makes the step for the interpreter's executor, with the bindings of one run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ...interpreter import media
from ...interpreter.reasoning import ReasoningTags
from ...interpreter.steps import BranchOff, Concatenate, Gather, Joined, Late, Mark, Step
from ...lang import generation, ops
from ...lang.prompt import Source, checked_tenant
from ..graph import Node
from ..values import Values

if TYPE_CHECKING:
    from .execution import Execution


class Action(Protocol):
    def step(self, execution: "Execution") -> Step:
        """Makes the step of a run. Raises ParameterError where an argument of the run does not fit."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same step in every run: constant text, roles, the beginnings of scopes."""

    made: Step

    def step(self, execution: "Execution") -> Step:
        return self.made


@dataclass(frozen=True, slots=True)
class AppendText:
    """Text that is known when a run begins: constants and what is made of arguments, one after the other."""

    texts: tuple[Node, ...]
    source: Source | None

    def step(self, execution: "Execution") -> Step:
        return Step(ops.ConstantText("".join(map(execution.values.text, self.texts))), source=self.source)


@dataclass(frozen=True, slots=True)
class AppendLateText:
    """Text that needs variables."""

    text: Node
    source: Source | None

    def step(self, execution: "Execution") -> Step:
        return Step(Late(partial(self._known, execution.values)), source=self.source)

    async def _known(self, values: Values) -> ops.Op:
        await values.known(self.text)
        return ops.ConstantText(values.text(self.text))


@dataclass(frozen=True, slots=True)
class RunGen:
    """A `gen`.

    Attributes:
        call: its place among the calls of the plan, which have sampling parameters.
        slot, thinking, captured: of its bindings.
    """

    gen: ops.Gen
    call: int
    slot: int
    thinking: int | None
    tags: ReasoningTags | None
    source: Source | None
    captured: tuple[int, ...] = ()

    def step(self, execution: "Execution") -> Step:
        bindings = execution.bindings
        thinking = None if self.thinking is None else bindings[self.thinking]
        sampling, ahead = execution.sampling[self.call], execution.ahead.get(self.slot, 0)
        captured = tuple(bindings[slot] for slot in self.captured)
        return Step(self.gen, bindings[self.slot], sampling, thinking, self.tags, self.source, ahead, captured)


@dataclass(frozen=True, slots=True)
class RunSelect:
    """A `select` with constant choices. `call`: as of RunGen."""

    select: ops.Select
    call: int
    slot: int
    source: Source | None

    def step(self, execution: "Execution") -> Step:
        sampling, ahead = execution.sampling[self.call], execution.ahead.get(self.slot, 0)
        return Step(self.select, execution.bindings[self.slot], sampling, source=self.source, ahead=ahead)


@dataclass(frozen=True, slots=True)
class RunLateSelect:
    """A `select` whose choices are known in a run. `late`: not when it begins."""

    choose: RunSelect
    choices: tuple[Node, ...]
    late: bool

    def step(self, execution: "Execution") -> Step:
        step = self.choose.step(execution)
        if self.late:
            return replace(step, op=Late(partial(self._known, execution.values)))
        return replace(step, op=self._select(execution.values))

    async def _known(self, values: Values) -> ops.Op:
        for choice in self.choices:
            await values.known(choice)
        return self._select(values)

    def _select(self, values: Values) -> ops.Op:
        select = self.choose.select
        return generation.select(
            select.name,
            [values.value(choice) for choice in self.choices],
            select.temperature,
            method=select.method,
            max_tries=select.max_tries,
            allow_best_effort=select.allow_best_effort,
            adapter=select.adapter,
        )


@dataclass(frozen=True, slots=True)
class ShowMedia:
    """An `image`, or with `num_frames` a `video`. `late`: its source is not known when a run begins."""

    source: Node
    num_frames: int | None
    late: bool
    origin: Source | None

    def step(self, execution: "Execution") -> Step:
        if self.late:
            return Step(Late(partial(self._known, execution.values)), source=self.origin)
        return Step(self._shown(execution.values), source=self.origin)

    async def _known(self, values: Values) -> ops.Op:
        await values.known(self.source)
        return self._shown(values)

    def _shown(self, values: Values) -> ops.Op:
        source: Any = values.value(self.source)  # a path, bytes or a picture
        shown = ops.Image(source) if self.num_frames is None else ops.Video(source, self.num_frames)
        media.check(shown)
        return shown


@dataclass(frozen=True, slots=True)
class OpenPrivate:
    """`private`. `late`: its tenant is not known when a run begins."""

    tenant: Node
    late: bool
    origin: Source | None

    def step(self, execution: "Execution") -> Step:
        if self.late:
            return Step(Late(partial(self._known, execution.values)), source=self.origin)
        return Step(self._opened(execution.values), source=self.origin)

    async def _known(self, values: Values) -> ops.Op:
        await values.known(self.tenant)
        return self._opened(values)

    def _opened(self, values: Values) -> ops.Op:
        return ops.PrivateBegin(checked_tenant(values.value(self.tenant)))


@dataclass(frozen=True, slots=True)
class EndScope:
    op: ops.VarScopeEnd
    slot: int

    def step(self, execution: "Execution") -> Step:
        return Step(self.op, execution.bindings[self.slot])


@dataclass(frozen=True, slots=True)
class StartBranches:
    """A fork. `branches`: the numbers of the streams that begin here."""

    size: int
    branches: tuple[int, ...]

    def step(self, execution: "Execution") -> Step:
        return Step(BranchOff(tuple(execution.queues[branch] for branch in self.branches)))


@dataclass(frozen=True, slots=True)
class ReachMark:
    """A place of the stream that others wait for."""

    slot: int

    def step(self, execution: "Execution") -> Step:
        return Step(_MARK, execution.bindings[self.slot])


@dataclass(frozen=True, slots=True)
class GatherVariables:
    """A join of variables. `awaited`: what has to be settled; `columns`: a list, and what the branches found."""

    awaited: tuple[int, ...]
    columns: tuple[tuple[int, tuple[int | None, ...]], ...]

    def step(self, execution: "Execution") -> Step:
        bindings = execution.bindings
        columns = tuple(
            (bindings[slot], tuple(None if found is None else bindings[found] for found in branches))
            for slot, branches in self.columns
        )
        return Step(Gather(Joined(_at(bindings, self.awaited)), columns))


@dataclass(frozen=True, slots=True)
class AppendBranches:
    """A join of texts."""

    awaited: tuple[int, ...]

    def step(self, execution: "Execution") -> Step:
        return Step(Concatenate(Joined(_at(execution.bindings, self.awaited))))


_MARK = Mark()


def _at(bindings: Sequence[Any], slots: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(bindings[slot] for slot in slots)
