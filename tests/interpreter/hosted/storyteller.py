"""A model that knows its texts by heart, for every backend alike: as a script of Echo and of the fakes."""

from collections.abc import Mapping
from typing import Any

from umbel.interpreter.backends.echo import Echo
from umbel.interpreter.backends.echo_tokens import prompt_text
from umbel.lang.protocol import Scored, ScoreRequest
from umbel.testing import FakeSGLang

Story = Mapping[str, str]


class Storyteller:
    """Goes on from the phrase that stands last in a text, with what the story has behind it.

    It is a model of texts: having said a part of an answer, in whatever request, it says the rest of it.
    """

    def __init__(self, story: Story) -> None:
        self._story = dict(story)
        for phrase, answer in story.items():  # a request may leave white space at its end to the model
            shown = phrase.rstrip()
            self._story.setdefault(shown, phrase[len(shown) :] + answer)

    def __call__(self, text: str) -> str:
        ends = {place + len(phrase): phrase for phrase in self._story if (place := text.rfind(phrase)) >= 0}
        for end in sorted(ends, reverse=True):
            said, answer = text[end:], self._story[ends[end]]
            if answer.startswith(said):
                return answer[len(said) :]
            if answer.lstrip().startswith(said):  # a chat model that does not begin with a blank
                return answer.lstrip()[len(said) :]
        raise AssertionError(f"the story does not go on behind {text[-80:]!r}")


class StorytellingEcho(Echo):
    """Echo with the same model: it scores best what it would say."""

    def __init__(self, story: Story, **options: Any) -> None:
        self._model = Storyteller(story)
        super().__init__(self._model, **options)

    async def score(self, request: ScoreRequest) -> Scored:
        said = self._model(prompt_text(request.prompt))
        self._scores = {choice: -0.1 if said.startswith(choice) else -5.0 for choice in request.choices}
        return await super().score(request)


class StorytellingSGLang(FakeSGLang):
    """A server with the same model, whose texts are likelier than all others, token by token."""

    def __init__(self, story: Story, **options: Any) -> None:
        self._model_of_texts = Storyteller(story)
        super().__init__(self._model_of_texts, **options)

    def _row(self, text: str, asked: Any) -> Any:  # Any: the fake's own types, as below
        self._know(text)
        return super()._row(text, asked)

    def _text_choices(self, body: Any) -> Any:
        self._know(body.prompt)
        return super()._text_choices(body)

    def _know(self, text: str) -> None:
        try:
            self._model_of_texts(text)
        except AssertionError:
            self._scores = {text: -5.0}
        else:
            self._scores = {text: -0.1}
