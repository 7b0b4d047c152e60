"""Calls whose answer is made of vectors: embeddings of texts, and how relevant texts are to a query.

A call has one engine request for each text, so the engine computes them in the same batches as everything else. A model
ranks by a classifier, whose logits are the vector of a prompt, or by its next token: then the engine scores "yes" and
"no" after the prompt.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...lang.protocol import Embedded, FromBackend, Ranked, Usage, floats_of
from ..core.messages import EmbedEnded, FromEngine, ScoreEnded
from .calls import PendingCall, ProtocolBreach


@dataclass(slots=True, eq=False)
class TextsCall(PendingCall):
    """Answers a request about several texts when the engine has answered for each. `first`: see EmbedRequest."""

    first: int
    answers: dict[int, EmbedEnded | ScoreEnded] = field(default_factory=dict, init=False)

    def accept(self, event: FromEngine) -> list[FromBackend]:
        if not isinstance(event, EmbedEnded | ScoreEnded):
            raise ProtocolBreach(f"a {type(event).__name__} for a request about texts")
        self.answers[event.id] = event
        self.open.discard(event.id)
        if self.open:
            return []
        answers = [self.answers[message.id] for message in self.messages]
        usage = Usage(sum(one.prompt_tokens for one in answers), sum(one.cached_tokens for one in answers), 0, 1)
        return [self._answer(answers, usage)]

    @abstractmethod
    def _answer(self, answers: Sequence[EmbedEnded | ScoreEnded], usage: Usage) -> FromBackend:
        """Makes the answer from those for the texts, in order."""


@dataclass(slots=True, eq=False)
class EmbedCall(TextsCall):
    """Answers an EmbedRequest."""

    def _answer(self, answers: Sequence[EmbedEnded | ScoreEnded], usage: Usage) -> FromBackend:
        vectors = tuple(one.vector for one in answers if isinstance(one, EmbedEnded))
        if len(vectors) != len(answers):
            raise ProtocolBreach("a score for an embedding")
        return Embedded(self.request_id, vectors, usage)


@dataclass(slots=True, eq=False)
class RankCall(TextsCall):
    """Answers a RankRequest."""

    def _answer(self, answers: Sequence[EmbedEnded | ScoreEnded], usage: Usage) -> FromBackend:
        return Ranked(self.request_id, tuple(_sigmoid(_log_odds(one)) for one in answers), usage)


def _log_odds(answer: EmbedEnded | ScoreEnded) -> float:
    """Returns the log-odds of "relevant": of one logit, of the second of two, or of the token "yes" over "no"."""
    if isinstance(answer, ScoreEnded):
        (yes,), (no,) = answer.logprobs
        return yes - no
    logits = floats_of(answer.vector)
    return logits[0] if len(logits) == 1 else logits[1] - logits[0]


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else 1.0 - 1.0 / (1.0 + math.exp(x))
