"""Replays which tokens of a text came together in a recorded step: guesses, right and wrong, and forced tokens.

A simulated text has neither guesses nor constraints of its own. Where the recorded one ran rows after that of its
newest token, the simulated one runs as many: rows of guesses, the first of them as right as they were. So its steps
have the rows that they had, and it takes as many of them.
"""

from collections.abc import Mapping

import numpy as np

from ..sampling.sampler import draw_keys
from ..scheduler.guesses import Guesser, StepCosts
from ..scheduler.request import Generation, Request
from ..scheduler.step import Guessed, PlannedRows, StepPlan
from .answers import AnswerTokens, hash_rows, mix
from .calls import RowsAhead


class ReplayedGuesses(Guesser):
    """Gives texts the rows that they had in a recording.

    Args:
        tokens: choose those of the answers, as the runner does.
    """

    def __init__(self, tokens: AnswerTokens, vocab_size: int) -> None:
        super().__init__([], StepCosts, vocab_size)
        self._tokens = tokens
        self._calls: dict[int, Mapping[int, RowsAhead]] = {}
        self._forced: dict[int, int] = {}  # of the step that runs, by the number of the request

    def add(self, message: int, ahead: Mapping[int, RowsAhead]) -> None:
        """Adds a call. ahead: tokens of the text in its newest row → the rows after it."""
        if ahead:
            self._calls[message] = ahead

    @property
    def forced_rows(self) -> int:
        """The rows of forced tokens in the step that runs: of these no logits are computed."""
        return sum(self._forced.values())

    def extend(self, plan: StepPlan) -> None:
        """Adds the rows of all texts of a plan, as far as there are slots for them."""
        self._forced.clear()
        if not self._calls:
            return
        chosen: dict[int, Guessed] = {}
        for index, rows in enumerate(plan.planned):
            request = rows.request
            ahead = self._calls.get(request.message_id, {}).get(request.length - request.prompt_length)
            if ahead is None or rows.end != request.length or not request.samples:
                continue
            count = self._kv.stretch(request, ahead.forced + ahead.guessed)
            if count > 0:
                self._forced[request.number] = min(ahead.forced, count)
                tokens = self._following(request, count, ahead.forced + ahead.right)
                chosen[index] = Guessed(ahead.source, tokens, 0, 1.0)
        if chosen:
            plan.guess(chosen)

    def learn(self, rows: PlannedRows, accepted: int) -> None:
        """Counts guesses as the recorded runtime did: forced tokens are none."""
        guessed = rows.guessed
        assert guessed is not None, "it had some"
        forced = self._forced[rows.request.number]
        if guessed.source:
            self._counters.add_guesses(guessed.source, len(guessed.tokens) - forced, max(0, accepted - forced))

    def _following(self, request: Request, count: int, right: int) -> list[int]:
        """Returns `count` tokens after a text, of which the first `right` are those that will be chosen."""
        generation = request.job
        assert isinstance(generation, Generation), "only generations have rows ahead"
        text = request.known_tokens
        sums = hash_rows(text, np.arange(len(text))).sum(dtype=np.uint64, keepdims=True)
        found: list[int] = []
        for place in range(len(text), len(text) + count):
            drawn = sums if generation.sampling.greedy else sums ^ draw_keys([generation.seed], [place])
            token = int(self._tokens.pick(mix(drawn))[0])
            if len(found) == right:  # the others come after a wrong one, so they are wrong, whatever they are
                return found + [token ^ 1] * (count - right)
            found.append(token)
            sums = sums + hash_rows(np.array([token]), np.array([place]))
        return found
