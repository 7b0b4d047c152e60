"""Steps: the entries of a stream's queue. An operation of the program with the bindings it resolves.

Apart from the operations of the language there are some of the interpreter's own, which tie streams
together, and those of agents. A stream runs its steps in order, so "everything said so far" is a place in the queue.
"""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..lang.agents.dialogue import Dialogue
from ..lang.errors import UmbelError, shown
from ..lang.ops import Op
from ..lang.prompt import Part, Source, shown_name
from ..lang.protocol import Backend, Completion, ConstraintSpec
from ..lang.sampling import SamplingParams
from .reasoning import ReasoningTags
from .variables import Binding

if TYPE_CHECKING:
    from .executor import Executor, StepQueue
    from .position import Position


@dataclass(frozen=True, slots=True)
class BranchOff(Op):
    """Starts branches, which take over the prompt as it is here."""

    branches: tuple["StepQueue", ...]


@dataclass(frozen=True, slots=True)
class Mark(Op):
    """Resolves its binding with the stream's position: all steps before it have run."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The branches of a join, in order: the mark at the end of each, and its queue.

    Attributes:
        queues: none where no branch can be cancelled alone, in compiled programs.
        quorum: so many that end first are enough, and the others are cancelled; None: all that are not cancelled.
    """

    marks: tuple[Binding, ...]
    queues: tuple["StepQueue", ...] = ()
    quorum: int | None = None

    def leaves_out(self, index: int) -> bool:
        """Returns whether a branch was cancelled."""
        return bool(self.queues) and self.queues[index].stopped is not None


@dataclass(frozen=True, slots=True)
class Gather(Op):
    """Waits for branches, then resolves one list per column: (list, a binding or None per branch)."""

    branches: Joined
    columns: tuple[tuple[Binding, tuple[Binding | None, ...]], ...]


@dataclass(frozen=True, slots=True)
class Concatenate(Op):
    """Waits for branches, then appends the text of each."""

    branches: Joined


@dataclass(frozen=True, slots=True)
class Late(Op):
    """An operation of the language that is known later: a text or choices with values of other steps in it."""

    known: Callable[[], Awaitable[Op]]


@dataclass(frozen=True, slots=True)
class Elsewhere(Op):
    """Runs the stream's text in another executor.

    Attributes:
        play: runs to the end, and moves the stream's executor to the position reached.
        failed: called with the error if `play` does not run.
    """

    play: Callable[["Executor"], Awaitable[None]]
    failed: Callable[[BaseException], None]


@dataclass(frozen=True, slots=True)
class Converse(Op):
    """Generates the answer of a conversation that is written as a whole, and appends it to the open turn.

    Attributes:
        name: of the variable that the answer is for, in records.
        write: makes the prompt and the constraint of the conversation for a backend, at this position.
        answered: gets the whole answer, before the binding has its text.
    """

    name: str | None
    write: Callable[["Backend", "Position"], Awaitable["Written"]]
    answered: Callable[[Completion], None]


@dataclass(frozen=True, slots=True)
class Written:
    """A conversation as a request.

    Attributes:
        stops: texts that begin another turn.
        dialogue: the same conversation as data, for a backend with the capability `tools`.
    """

    prompt: tuple[Part, ...]
    constraint: ConstraintSpec | None = None
    stops: tuple[str, ...] = ()
    dialogue: Dialogue | None = None


@dataclass(frozen=True, slots=True)
class Recall(Op):
    """Looks for results of calls of tools in the journal: its binding becomes a list, None for what is to be called."""

    calls: tuple[str, ...]  # tool and arguments


@dataclass(frozen=True, slots=True)
class Keep(Op):
    """Writes results of calls of tools into the journal, under the numbers that `Recall` gave."""

    results: tuple[tuple[str, str, str], ...]  # number, tool and arguments, result


@dataclass(frozen=True, slots=True)
class Step:
    """One operation, the bindings it resolves or fails, and the settings in force at its place."""

    op: Op
    binding: Binding | None = None
    sampling: SamplingParams | None = None  # of a Gen and a Select: all layers merged
    reasoning: Binding | None = None  # of a Gen inside separate_reasoning
    tags: ReasoningTags | None = None
    source: Source | None = None  # where the program says it
    ahead: int = 0  # of a call: see `protocol.Origin`
    captured: tuple[Binding, ...] = ()  # of a Gen, what its constraint captures
    after_read: str = ""  # the variable that the body had read last when it said this; "" for none

    @property
    def bindings(self) -> Iterator[Binding]:
        """Yields all that the operation sets."""
        for binding in (self.binding, self.reasoning, *self.captured):
            if binding is not None:
                yield binding

    def note_place(self, error: BaseException) -> None:
        """Notes at an error of the operation where the program says it: it is raised where a variable is read."""
        place = None if self.source is None else self.source.place
        if place is None or self.binding is None or not isinstance(error, UmbelError):
            return
        where = f"{shown_name(place.file)}:{place.number}"
        if not hasattr(error, "__notes__") and where not in str(error):  # else an earlier operation has noted it
            error.add_note(f"in {type(self.op).__name__.lower()}({shown(self.binding.name)}), {where}")

    def fail(self, error: BaseException) -> None:
        for binding in self.bindings:
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
