"""Steps: what waits in a stream's queue. An operation of the program together with the bindings it resolves.

Apart from the operations of the language there are six of the interpreter's own, which tie streams
together. A stream runs its steps in order, so "everything said so far" is a place in the queue.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..lang.ops import Op
from ..lang.sampling import SamplingParams
from ..lang.source import Source
from .variables import Binding

if TYPE_CHECKING:
    from .executor import Executor
    from .queue import StepQueue


@dataclass(frozen=True, slots=True)
class BranchOff(Op):
    """Here branches begin: they take over the prompt as it is at this place."""

    branches: tuple["StepQueue", ...]


@dataclass(frozen=True, slots=True)
class Mark(Op):
    """Resolves its binding with the stream's position: all steps before it have run."""


@dataclass(frozen=True, slots=True)
class Gather(Op):
    """Wait for `marks` of the branches, then resolve one list per column: (list, a binding or None per branch)."""

    marks: tuple[Binding, ...]
    columns: tuple[tuple[Binding, tuple[Binding | None, ...]], ...]


@dataclass(frozen=True, slots=True)
class Concatenate(Op):
    """Wait for `marks` of the branches, then append what each of them said."""

    marks: tuple[Binding, ...]


@dataclass(frozen=True, slots=True)
class Late(Op):
    """An operation of the language that is known later: a text or choices with values of other steps in it."""

    known: Callable[[], Awaitable[Op]]


@dataclass(frozen=True, slots=True)
class Elsewhere(Op):
    """Everything that the stream says is said by another executor.

    Attributes:
        play: goes on until that is over, and brings the stream's executor to where it then stands.
        failed: is told why it did not come to that.
    """

    play: Callable[["Executor"], Awaitable[None]]
    failed: Callable[[BaseException], None]


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The marks of the model's thinking, inside `separate_reasoning`."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do, the bindings that it resolves or fails, and what was in force when it was said."""

    op: Op
    binding: Binding | None = None
    sampling: SamplingParams | None = None  # of a Gen, and a Select that draws: all layers merged
    reasoning: Binding | None = None  # of a Gen inside separate_reasoning
    tags: ReasoningTags | None = None
    source: Source | None = None  # where the program says it
    ahead: int = 0  # of a call: see `protocol.Origin`

    def fail(self, error: BaseException) -> None:
        for binding in (self.binding, self.reasoning):
            if binding is not None:
                binding.fail(error)
        match self.op:
            case BranchOff(branches):
                for branch in branches:
                    branch.start_failed(error)
            case Gather(_, columns):
                for gathered, _ in columns:
                    gathered.fail(error)
            case Elsewhere(_, failed):
                failed(error)
