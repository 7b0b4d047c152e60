"""Records the operations of one run while it runs: which stream ran what, when, and what it appended.

stream 0  ──text──gen──fork──────────────join──gen──     an operation is recorded when it has ended
stream 1              └─text──gen──┘                     a stream is a number, given when it is made
stream 2              └─text──gen──┘

Written on the streams' loop: one small object an operation, with references to texts that the prompt has anyway. All
else (lines, origins of characters, places of tokens) is computed when a page is asked for (`data.py`). Bounded: a run
beyond MOST_OPERATIONS or MOST_CHARACTERS goes on, and its record counts what it has left out.
"""

import itertools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import cast

import msgspec

from ...lang.ops import Op
from ...lang.prompt import Media, Prompt, Source, told_apart
from ..cache_explain.history import Intent
from ..position import Reached
from ..steps import BranchOff, Concatenate, Gather, Mark, Step
from ..variables import Binding, Facts

MOST_OPERATIONS = 100_000
MOST_CHARACTERS = 32 * 2**20  # of text that operations appended
MOST_LOGPROBS = 200_000  # tokens whose log-probabilities are kept

Said = tuple[tuple[str, Source | None], ...]  # texts with their sources; a picture is named


class Operation(msgspec.Struct, eq=False, gc=False):  # no cycle goes through it: errors are kept as text
    """One operation that has ended.

    Attributes:
        stream: number of the stream that ran it.
        kind: the class of the operation.
        began, ended: by the clock of the run, in seconds.
        said: the texts it appended.
        intent: of a gen or a select, under which its calls are in the run's log.
        facts: of its variable: see `State.get_meta_info`.
        others: streams that it forked off, or that it joined.
        error: its class and message; "" for none.
        after_read: the variable that the body had read last when it said this; "" for none, and for the whole text.
    """

    stream: int
    kind: type[Op]
    name: str
    source: Source | None
    began: float
    ended: float
    said: Said
    intent: Intent | None = None
    facts: Facts | None = None
    others: tuple[int, ...] = ()
    error: str = ""
    after_read: str = ""


class Record:
    """The operations of one run.

    Args:
        clock: of the run, in seconds.
        program: its name; "" for a run without one.

    Attributes:
        began, date: when the run was opened, by its clock and by the calendar.
        operations: those that have ended, in the order of their ends.
        start_seconds: for which a stream waited until the backend had started; None: it had before.
        left_out: operations that were not kept, for want of room.
        last_read: the variable that the body has read last; "" for none.
        logprobs_left_out: tokens without their log-probabilities.
    """

    __slots__ = (
        "_characters",
        "_logprobs",
        "_streams",
        "began",
        "clock",
        "date",
        "last_read",
        "left_out",
        "logprobs_left_out",
        "operations",
        "program",
        "start_seconds",
    )

    def __init__(self, clock: Callable[[], float], program: str = "") -> None:
        self.clock = clock
        self.began = clock()
        self.date = datetime.now(UTC)
        self.program = program
        self.operations: list[Operation] = []
        self.start_seconds: float | None = None
        self.left_out = 0
        self.last_read = ""
        self.logprobs_left_out = 0
        self._streams = itertools.count()
        self._characters = MOST_CHARACTERS
        self._logprobs = MOST_LOGPROBS

    def number(self) -> int:
        """Returns the number of a new stream, counted from 0. Called on any thread."""
        return next(self._streams)

    def add(
        self,
        stream: int,
        step: Step,
        began: float,
        before: Prompt,
        after: Prompt,
        intent: Intent | None,
        error: BaseException | None = None,
    ) -> None:
        """Records an operation that has ended. Called on the streams' loop.

        Args:
            before, after: the prompt of its stream.
        """
        ended = self.clock()
        kind, binding = type(step.op), step.binding
        if kind is Mark:  # a read: nothing of the program
            return
        said = () if after is before else _said(before, after)
        for text, _ in said:
            self._characters -= len(text)
        if self._characters < 0 or len(self.operations) >= MOST_OPERATIONS:
            self.left_out += 1
            return
        name = "" if binding is None else binding.name
        operation = Operation(stream, kind, name, step.source, began, ended, said)
        operation.after_read = step.after_read
        if intent is not None:
            operation.intent = intent
            operation.facts = None if binding is None else self._kept(binding.meta)
        elif kind is BranchOff:
            operation.others = tuple([branch.number for branch in cast(BranchOff, step.op).branches])
        elif kind is Gather or kind is Concatenate:
            operation.others = _joined(cast(Gather | Concatenate, step.op).branches.marks)
        if error is not None:
            operation.error = f"{type(error).__name__}: {error}"
        self.operations.append(operation)

    def _kept(self, facts: Facts) -> Facts:
        """Returns the facts; without log-probabilities where there is no more room for them."""
        for one in facts if isinstance(facts, list) else (facts,):
            tokens = len(one.get("output_token_logprobs", ()))
            self._logprobs -= tokens
            if tokens and self._logprobs < 0:
                self.logprobs_left_out += tokens
                names = ("id", "prompt_tokens", "cached_tokens", "completion_tokens", "finish_reason", "guarantee")
                return {name: one[name] for name in names if name in one}
        return facts


def _said(before: Prompt, after: Prompt) -> Said:
    """Returns the texts between two prompts of one stream."""
    found: list[tuple[str, Source | None]] = []
    prompt: Prompt | None = after
    while prompt is not before and prompt is not None and prompt.part is not None:
        part = prompt.part
        found.append((told_apart(part) if isinstance(part, Media) else part.text, prompt.source))
        prompt = prompt.parent
    return tuple(found if len(found) < 2 else reversed(found))


def _joined(marks: tuple[Binding, ...]) -> tuple[int, ...]:
    """Returns the streams whose ends these marks are; of a failed join, of the branches that did not fail."""
    found = (mark.value() for mark in marks if mark.done and mark.error is None)
    return tuple(reached.stream for reached in found if isinstance(reached, Reached))
