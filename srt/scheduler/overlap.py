"""Defines steps in flight: with overlap, a step is planned and launched while the previous one runs.

    the scheduler   plan 1, launch 1 ─ plan 2, launch 2 ─ done 1 ─ plan 3, launch 3 ─ done 2 ─ plan 4, launch 4 ─ …
    the runner                        [════════ step 1 ════════] [════════ step 2 ════════] [════════ step 3 ══ …

To complete a step (done) is to wait for it and to commit its result. So a step takes the longer of forward pass and
scheduling, not their sum. Plan 2 does not know these results of step 1:

    the new token of a text         its row is planned all the same. While step 2 is planned the sequence ends in
                                    PENDING_TOKEN, and the batch names the logit row of step 1 that chooses the token
    whether the text ends with it   at max_tokens: that is known, and no further row is planned. By a stop: it is not.
                                    The row in step 2 is wasted: it runs, and is left out when step 2 completes
    a token that the runner does    penalties and biases need the logits, and a constraint's next mask needs the token.
    not choose by itself            The next row waits until step 1 completes (`delays_too_many`)
    the answers to a search, and    their next rows, if there are any, wait until step 1 completes
    scores

Slots. A row's slot is assigned when it is planned, and `computed` counts the row when it is launched. Steps run
in the order of their launches, so the reads and writes of a slot happen in that order:

    plan 1      prompt P of A enters the tree: step 2, and requests admitted to it, may read P
    launch 2    A's row of step 2 writes slot s, after P
    done 1      A ends with the token of step 1. The tree takes the key of that token, in s, which step 2 computes: the
                token is part of A. Slots that only A held are free now, though step 2 may still read them
    plan 3      gives free slots to B, whose rows of step 3 write there after step 2 has read

So pool and tree are consistent between any two calls, with or without a running step. No request is retracted while a
step runs, because requests that end with that step may free slots. A plan that lacks slots leaves rows out instead, and
the step after it is planned with no step running (`Planner.short`).

A step that fails empties the tree. The step launched after it has read wrong keys, so its result is discarded: its
requests, unless they were in the failed step too, wait again with all their tokens. A row for which no token can be
chosen fails alone: its row in the next step reads an arbitrary token, and is left out when that step completes.

Texts, their ends, log-probabilities and scores are the same as without overlap. Cached lengths may differ: a request
admitted while step 1 runs does not find the tokens of a text that ends with it, and a later one finds its last token
too. The number of steps may differ as well, and which requests are retracted when slots are short.

Overlap pays where the forward pass leaves the CPU free. It is off on the CPU, where both use the same cores: there
scheduling is 0.3 to 1.5 ms of 36 to 44 ms (the default model, 1 to 32 texts), and steps in a thread took as long as
steps without overlap.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ..core.batch import Logits, Pending, RowNeed
from .request import Phase, Request
from .row_requests import NO_REQUESTS, StepRequests
from .step_plan import StepPlan

_HINDRANCE = 4  # other texts for each waiting one: see `InFlightStep.delays_too_many`


class FinishedStep:
    """A step that ran when it was launched. A `batch.Pending`."""

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

    `coming`: texts that continue, with the logit rows from which the runner chooses their next tokens. `blocked`: the
    number of texts that continue and whose token the runner does not choose. Both are empty without overlap.
    """

    plan: StepPlan
    asked: StepRequests
    pending: Pending
    coming: tuple[tuple[Request, int], ...] = ()
    blocked: int = 0

    @classmethod
    def launched(cls, plan: StepPlan, asked: StepRequests, pending: Pending) -> "InFlightStep":
        """Makes the step. Called while the plan's sequences are as they were when it was made."""
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
        """Returns whether so many texts are blocked that the next step is better planned after this one completes.

        A blocked text runs in every other step only. The other texts gain the time of scheduling, a tenth to a quarter
        of a step. With a fifth of the texts blocked both ways give about as many tokens, and waiting is fair.
        """
        return self.blocked * _HINDRANCE >= len(self.coming) and self.blocked > 0

    def drop(self) -> None:
        """Waits and discards the result or the exception: the previous step has failed, and with it this one."""
        with suppress(Exception):
            self.pending.result()


@contextmanager
def pending_tokens(step: InFlightStep | None) -> Iterator[None]:
    """Appends PENDING_TOKEN to the sequences whose next token the step chooses, and removes it at exit."""
    expecting = [] if step is None else [entry for entry in step.coming if entry[0].phase is not Phase.ENDED]
    for request, row in expecting:
        request.append_pending(row)
    try:
        yield
    finally:
        for request, _ in expecting:
            request.remove_pending()
