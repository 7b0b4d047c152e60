"""A model that is not there: a backend for replays, with the capabilities and the chat template of a journal.

Every call is answered from the journal before a backend is asked, so this one only tells what prompts depend on.
"""

from collections.abc import AsyncIterator
from functools import cached_property

import msgspec

from ...lang.chat_template import ChatTemplate
from ...lang.errors import JournalError
from ...lang.prompt import Part, tokens_at_most
from ...lang.protocol import (
    Backend,
    Capabilities,
    Chunk,
    ConstraintSpec,
    Done,
    Final,
    GenRequest,
    Hint,
    Scored,
    ScoreRequest,
)
from .file import JournalFile, JournalModel


class OfflineModel:
    """Takes the place of a backend in a replay.

    Args:
        model: as the journal describes it.
        constraints: that calls of the journal were sent with: those the model enforced.
    """

    def __init__(self, model: JournalModel, constraints: frozenset[ConstraintSpec]) -> None:
        self._model = model
        self._constraints = constraints

    @property
    def capabilities(self) -> Capabilities:
        """The recorded ones, without what needs a runtime: hints, pins, whole programs."""
        return msgspec.structs.replace(self._model.capabilities, hint=False, pins=False, programs=False)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        model = self._model
        return ChatTemplate(model.template, tokens=model.tokens, options=model.options, name=model.called)

    async def start(self) -> None:
        return

    async def generate(self, request: GenRequest) -> AsyncIterator[Chunk | Final]:
        raise self._absent(request.id)
        yield  # makes it a generator

    async def score(self, request: ScoreRequest) -> Scored:
        raise self._absent(request.id)

    def hint(self, hint: Hint) -> None:
        raise AssertionError("a backend without the capability is given no hints")

    def enforces(self, constraint: ConstraintSpec) -> bool:
        """Returns whether a recorded call had this constraint; of a model that is not asked again, all are enforced."""
        return constraint in self._constraints or not self.capabilities.asks_again

    def tokens_at_most(self, prompt: tuple[Part, ...]) -> int:
        return tokens_at_most(prompt, self.capabilities.image_tokens)

    async def control(self, verb: str) -> Done:
        raise self._absent(verb)

    async def close(self) -> None:
        return

    def _absent(self, what: str) -> JournalError:
        return JournalError(f"{self.capabilities.name} is not there: a replay makes no call ({what})")


def offline(file: JournalFile, item: str) -> Backend:
    """Returns the model that answered the calls of an item; one of which nothing is known, where there were none."""
    model = file.model_of(item) or JournalModel(Capabilities(file.path))
    return OfflineModel(model, frozenset(file.constraints))
