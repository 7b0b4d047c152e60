"""Guesses that the tests tell: right ones, and wrong ones among them."""

from collections.abc import Mapping, Sequence

from umbel.srt.scheduler.guesses import Guess, Guesser, GuessSource, StepCosts
from umbel.srt.scheduler.request import Request

from .engine_harness import VOCABULARY


class Free(StepCosts):
    """Rows of guesses cost nothing."""

    def knows(self, rows: int) -> bool:
        return True

    def covers(self, rows: int) -> bool:
        return True

    def seconds(self, rows: int) -> float:
        return 0.0


class Told(GuessSource):
    """Knows texts by message. Every `wrong`-th token that it tells is another one."""

    name = "prompt"
    first_rates = (0.5,)

    def __init__(
        self, said: Mapping[int, Sequence[int]], wrong: int | None = None, vocabulary: int = VOCABULARY
    ) -> None:
        self._said = said
        self._wrong = wrong
        self._vocabulary = vocabulary

    def guess(self, request: Request, most: int) -> Guess | None:
        said = list(self._said.get(request.message_id, ()))
        if self._wrong is not None:
            for place in range(request.message_id % self._wrong, len(said), self._wrong):
                said[place] = (said[place] + 1) % self._vocabulary
        following = said[len(request.known_tokens) - request.prompt_length :][:most]
        return Guess(following, 0) if following else None


def told(said: Mapping[int, Sequence[int]], wrong: int | None = None, vocabulary: int = VOCABULARY) -> Guesser:
    """A guesser whose rows are free, so that it guesses as far as it may."""
    return Guesser([Told(said, wrong, vocabulary)], Free, vocabulary)
