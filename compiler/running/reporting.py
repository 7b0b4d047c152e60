"""Reports a shipped program to its client while it runs: its bindings when they are settled, and pieces of them.

variables   what a gen, a select or a scope has set: the text, or several, with facts; or the error
lists       what joins gather: that they are known. Both sides make them from what the branches found
places      whose text is read: the text
assigned    nothing: the client computes what the program assigned, and what it returns
"""

from collections.abc import Callable
from functools import partial

from ...interpreter.position import Reached
from ...interpreter.run import Run
from ...interpreter.variables import Binding, Feed, Meta
from ...lang.programs import OWN_STREAM, ProgramEvent, ProgramPiece, ProgramValue, trouble_of
from ...lang.transport import packing
from ..operations import StreamText
from .actions import GatherVariables
from .execution import Execution
from .plan import Plan

Notify = Callable[[ProgramEvent], None]


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
        self._notify(ProgramValue(self._label, slot, binding.name, value, facts, trouble, self._run.ledger.cost.usage))

    def _piece(self, slot: int, name: str, text: str, facts: Meta) -> None:
        self._notify(ProgramPiece(self._label, slot, name, text, packing.pack(facts)))


class _Pieces:
    """Sends what is new in a feed whenever it grows."""

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
