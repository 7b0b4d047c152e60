"""Collects the steps queued after a `gen`: constant text, and gens to be answered with it.

gen("name") │ "\\nJob: "  gen("job")  "\\nAge: "  gen("age") │ end of the turn
              before      op          before      op
"""

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...lang import ops
from ...lang.errors import DeadlineError
from ...lang.sampling import SamplingParams
from ..loop import wait_until_async
from ..steps import BranchOff, Gather, Mark, Step
from .fields import Field

if TYPE_CHECKING:
    from ..executor import StepQueue
    from ..run import Run

PATIENCE = 0.05  # seconds that a program has to say what follows, when it neither waits nor ends; a call takes more


@dataclass(frozen=True, slots=True)
class Coming:
    """A following gen, and the constant text between it and the previous one."""

    before: str
    name: str
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Outlook:
    """The steps that follow a gen.

    Attributes:
        literal: the constant text next in the queue.
        coming: the gens that follow with only constant text between them.
        closed: no later step can join them: a turn begins or ends, or unknown text comes.
    """

    literal: str
    coming: tuple[Coming, ...]
    closed: bool

    @property
    def says(self) -> bool:
        """True if anything follows."""
        return bool(self.literal or self.coming)

    def can_follow(self, field: Field) -> bool:
        """Returns whether a reply's text after `field` can match the program's next text. A stop string is no part of
        the field's text, so the next text has to begin with it."""
        if not self.coming:
            return not self.closed
        literal = self.coming[0].before
        if not literal or field.sampling.stop_regex or field.constraint is not None:
            return True
        return any(stop.startswith(literal) or literal.startswith(stop) for stop in field.sampling.stop)


# The parameters of a step that could be answered from the same reply, else None.
Takes = Callable[[Step], SamplingParams | None]

# Steps that append no text and ask nothing.
_SILENT = (ops.VarScopeBegin, ops.VarScopeEnd, BranchOff, Mark, Gather)


def read(steps: Iterable[Step], takes: Takes) -> Outlook:
    """Reads a stream's queued steps."""
    coming: list[Coming] = []
    literal = before = ""
    for step in steps:
        match step.op:
            case ops.ConstantText(text):
                before += text
                if not coming:
                    literal = before
            case ops.Gen(name) | ops.Select(name):
                sampling = takes(step)
                if sampling is None:
                    return Outlook(literal, tuple(coming), closed=True)
                coming.append(Coming(before, name or "", sampling))
                before = ""
            case op if isinstance(op, _SILENT):
                continue
            case _:
                return Outlook(literal, tuple(coming), closed=True)
    return Outlook(literal, tuple(coming), closed=False)


async def look(queue: "StepQueue", run: "Run", takes: Takes, enough: Callable[[Outlook], bool]) -> Outlook:
    """Waits until `enough` of the following steps are queued, or the program adds none, and returns them."""
    assert run.speculation is not None, "only streams of runs that speculate look ahead"
    waits = run.speculation.waits

    def ready() -> bool:
        return run.ended or waits.waiting or enough(read(queue.upcoming(), takes))

    with suppress(DeadlineError):
        signals = (queue.pushed, run.changed, waits.changed)
        await wait_until_async(ready, signals, time.monotonic() + PATIENCE, "what follows")
    seen = read(queue.upcoming(), takes)
    return Outlook(seen.literal, seen.coming, seen.closed or run.ended)
