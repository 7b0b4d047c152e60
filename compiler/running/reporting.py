"""What the one who shipped a program is told while it runs: its bindings, when they are settled, and pieces of them.

variables   what a gen, a select or a scope has set: the text, or several, with facts; or the error
lists       what joins gather: that they are known. Both sides make them from what the branches found
places      whose text is read: the text
assigned    nothing: who shipped the program computes what it assigned, and what it returns
"""

from collections.abc import Callable
from functools import partial

from ...interpreter.position import Reached
from ...interpreter.run import Run
from ...interpreter.variables import Binding, Feed, Meta
from ...lang.programs import OWN_STREAM, ProgramEvent, ProgramPiece, ProgramValue, trouble_of
from ...lang.transport import packing
from ..operations import StreamText
from .actions import Collect
from .execution import Execution
from .plan import Plan

Tell = Callable[[ProgramEvent], None]


class Told:
    """Which slots of a plan are told of. Both sides make this from the same graph.

    Attributes:
        lists: slot → slots of what the branches found, None where one found nothing.
        places: slots of places whose text is read.
        slots: all that are told of.
    """

    def __init__(self, plan: Plan) -> None:
        collected = (action for stream in plan.streams for action in stream.actions if isinstance(action, Collect))
        self.lists = {slot: branches for action in collected for slot, branches in action.columns}
        values = plan.slots.values.items()
        self.places = frozenset(slot for value, slot in values if isinstance(value.op, StreamText))
        silent = set(plan.slots.marks.values()) - self.places
        assigned = {each.slot for each in plan.known} | {read.slot for read in plan.reads}
        self.slots = tuple(slot for slot in range(len(plan.slots.bindings)) if slot not in assigned | silent)


class Reporter:
    """Of one execution.

    Args:
        label: of the request, in every message.
        told: of its plan.
        spoken: text of the program's own stream, of which pieces are told, and those of variables; None: no pieces.
    """

    def __init__(
        self, label: str, execution: Execution, told: Told, run: Run, tell: Tell, *, spoken: Feed | None
    ) -> None:
        self._label = label
        self._run = run
        self._tell = tell
        for slot in told.slots:
            binding = execution.bindings[slot]
            if slot in told.lists:
                self._when_settled(binding, partial(self._gathered, slot, binding))
                continue
            self._when_settled(binding, partial(self._settled, slot, binding))
            if spoken is not None and binding.name:
                _Pieces(binding.feed, partial(self._piece, slot, binding.name))
        if spoken is not None:
            _Pieces(spoken, partial(self._piece, OWN_STREAM, ""))

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
        facts = packing.pack(binding.meta) if binding.meta else b""
        self._value(slot, binding, tuple(value) if isinstance(value, list) else value, facts)

    def _gathered(self, slot: int, binding: Binding) -> None:
        self._value(slot, binding)

    def _value(self, slot: int, binding: Binding, value: str | tuple[str, ...] = "", facts: bytes = b"") -> None:
        trouble = None if binding.error is None else trouble_of(binding.error)
        self._tell(ProgramValue(self._label, slot, binding.name, value, facts, trouble, self._run.ledger.cost.usage))

    def _piece(self, slot: int, name: str, text: str, facts: Meta) -> None:
        self._tell(ProgramPiece(self._label, slot, name, text, packing.pack(facts)))


class _Pieces:
    """Tells what is new in a feed whenever it grows."""

    def __init__(self, feed: Feed, tell: Callable[[str, Meta], None]) -> None:
        self._feed = feed
        self._tell = tell
        self._told = 0
        self._grown()

    def _grown(self) -> None:
        self._feed.changed.add(self._grown)
        while self._told < len(self._feed.pieces):
            text, facts = self._feed.pieces[self._told]
            self._told += 1
            self._tell(text, facts)
