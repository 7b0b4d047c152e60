"""Plans and launches a step while the one before it runs.

    the scheduler   plan 1, launch 1 ─ plan 2, launch 2 ─ done 1 ─ plan 3, launch 3 ─ done 2 ─ plan 4, launch 4 ─ …
    the runner                        [════════ step 1 ════════] [════════ step 2 ════════] [════════ step 3 ══ …

To complete a step (done) is to wait for it, and to commit what it says. So a step takes the longer of the two, the
forward pass or the scheduling, and no longer their sum. What plan 2 would like to know of step 1 and does not:

    the new token of a text         its row is planned all the same. While step 2 is planned the sequence ends in
                                    PENDING_TOKEN, and the batch tells by which logit row of step 1 it is chosen
    whether the text ends with it   at max_tokens: that is known, and no further row is planned. By a stop: it is not.
                                    The row in step 2 is wasted: it runs, and is left out when step 2 completes
    a text whose token the runner   penalties and biases look at it first, the mask of a constraint follows from it. Its
    does not choose by itself       next row waits until step 1 completes (`delays_too_many`)
    the answers to a search, and    their next rows, if there are any, wait until step 1 completes
    scores

Slots. A row's slot is assigned when it is planned, and `computed` counts the row when it is launched. Steps run
in the order of their launches, so all that is said about a slot holds in that order:

    plan 1      prompt P of A enters the tree: step 2, and requests admitted to it, may read P
    launch 2    A's row of step 2 writes slot s, after P
    done 1      A ends with the token of step 1. The tree takes the key of that token, in s, which step 2 computes: it
                is the key of a token that A has. What A alone held is free, though step 2 may read it now
    plan 3      gives free slots to B, whose rows of step 3 write there after step 2 has read

So pool and tree are whole at any time between two calls, with a running step or without. No request is retracted while
a step runs, because what ends with it may give the room; the plan that would have to leaves rows out instead, and the
step after it is planned with no step running (`Planner.short`).

A step that fails empties the tree. The step launched after it has read the wrong keys, so its answer is thrown away:
its requests, unless they were in the failed step too, wait again with all their tokens. A row for which no token can be
chosen fails alone: its row in the next step reads any token, and is left out when that step completes.

Texts, their ends, log-probabilities and scores are those of steps that wait. What was cached may differ: a request
admitted while step 1 runs does not find the tokens of a text that ends with it, and one that comes after finds its
last token too. So may the number of steps, and which requests are retracted where memory is short.

It pays where the forward pass leaves the CPU free. On one, where the same cores compute, scheduling is 0.3 to 1.5 ms of
36 to 44 ms (the default model, 1 to 32 texts), and steps in a thread took as long as steps that wait: there it is off.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ..core.batch import Logits, Pending, RowNeed
from .request import Phase, Request
from .row_requests import NO_REQUESTS, StepRequests
from .step_plan import StepPlan

_HINDRANCE = 4  # one waiting text for so many others: see `InFlightStep.delays_too_many`


class FinishedStep:
    """A step that had run when it was launched. A `batch.Pending`."""

    def __init__(self, logits: Logits) -> None:
        self._logits = logits

    def result(self) -> Logits:
        return self._logits


class FailedStep:
    """A step that could not be launched. A `batch.Pending`."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> Logits:
        raise self._error


@dataclass(frozen=True, slots=True, eq=False)
class InFlightStep:
    """A step that was launched and is not complete.

    `coming`: texts that go on, and the logit rows by which the runner chooses their next tokens. `blocked`: the number
    of those that go on and whose token it does not choose. Both are empty where steps complete at once.
    """

    plan: StepPlan
    asked: StepRequests
    pending: Pending
    coming: tuple[tuple[Request, int], ...] = ()
    blocked: int = 0

    @classmethod
    def launched(cls, plan: StepPlan, asked: StepRequests, pending: Pending) -> "InFlightStep":
        """Called while the plan's sequences are as they were when it was made."""
        row_requests = asked.row_requests
        coming: list[tuple[Request, int]] = []
        blocked = 0
        picked = (
            [] if row_requests is None else (row_requests.kinds != RowNeed.LOGITS).tolist()
        )  # asking numpy row by row is slow
        for rows in plan.planned:
            request, row = rows.request, rows.logits_of_last
            if rows.end < request.length or not request.goes_on:
                continue
            if picked and picked[row] and not request.constrained:  # a constraint may overrule the runner's token
                coming.append((request, row))
            else:
                blocked += 1
        return cls(plan, asked, pending, tuple(coming), blocked)

    @classmethod
    def crashed(cls, plan: StepPlan, error: Exception) -> "InFlightStep":
        return cls(plan, NO_REQUESTS, FailedStep(error))

    @property
    def failed(self) -> bool:
        return isinstance(self.pending, FailedStep)

    @property
    def delays_too_many(self) -> bool:
        """So many texts wait until this step completes that the next one is better planned after it.

        A text that waits runs in every other step, and one that does not gains the scheduling, which takes a tenth to a
        quarter of a step. At a fifth of waiting texts both give about as many tokens, and waiting is fair.
        """
        return self.blocked * _HINDRANCE >= len(self.coming) and self.blocked > 0

    def drop(self) -> None:
        """Waits, and throws the answer away, or the exception: the step before has failed, and with it this one."""
        with suppress(Exception):
            self.pending.result()


@contextmanager
def pending_tokens(step: InFlightStep | None) -> Iterator[None]:
    """Inside, the tokens that a step chooses are in their sequences, as PENDING_TOKEN."""
    expecting = [] if step is None else [entry for entry in step.coming if entry[0].phase is not Phase.ENDED]
    for request, row in expecting:
        request.append_pending(row)
    try:
        yield
    finally:
        for request, _ in expecting:
            request.remove_pending()
