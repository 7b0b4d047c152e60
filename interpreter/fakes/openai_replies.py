"""Writes answers of the OpenAI dialect, at once and as events, for both of its APIs."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from ...lang.protocol import Completion, FinishReason, TokenLogprob, Usage
from ...lang.sampling import SamplingParams
from ..backends.echo_answers import cut, hashed_logprobs, scores_of
from ..backends.echo_tokens import pieces
from .provider import Form
from .server import DONE, AnswerEvents, at_once, event

Json = dict[str, object]
Scores = Mapping[str, float | Sequence[float]]

_MADE = 1_700_000_000  # seconds since 1970, of every answer


@dataclass(frozen=True, slots=True)
class Said:
    """One continuation.

    Attributes:
        completion: what is left of the script's answer.
        texts: of its tokens.
    """

    completion: Completion
    texts: list[str]

    @property
    def tokens(self) -> list[tuple[str, str, TokenLogprob | None]]:
        """Returns (text, visible part, log-probability) of the tokens that are visible at least in part."""
        kept, logprobs = self.completion.kept, self.completion.logprobs
        seen = [(text, text) for text in self.texts[:kept]]
        if self.completion.tail:
            seen.append((self.texts[kept], self.completion.tail))
        return [(text, part, logprobs[i] if logprobs else None) for i, (text, part) in enumerate(seen)]


def said_of(text: str, prompt: str, form: Form | None, sampling: SamplingParams) -> Said:
    """Cuts a script's answer as the server does, with log-probabilities where they are asked for.

    Args:
        prompt: seeds the log-probabilities.
    """
    completion, texts = cut(text if form is None else form.shaped(text, sampling), sampling)
    if sampling.logprobs:
        seed = zlib.crc32(prompt.encode("utf-8", "surrogatepass"))
        tokens = zip(completion.token_ids, texts, strict=True)
        logprobs = hashed_logprobs(seed, tokens, sampling.top_logprobs)
        completion = msgspec.structs.replace(completion, logprobs=logprobs)
    return Said(completion, texts)


@dataclass(frozen=True, slots=True)
class Telling:
    """Writes what both APIs have around their choices.

    Attributes:
        mode: how each choice is written.
        usage: of the request.
        include_usage: streams end with it.
        names_stop: choices say which stop ended them.
    """

    model: str
    mode: "ChatChoices | TextChoices"
    usage: Usage
    include_usage: bool
    names_stop: bool

    def whole(self, said: Sequence[Said]) -> AnswerEvents:
        choices = [{"index": index, **self.mode.whole(one), **self._ending(one)} for index, one in enumerate(said)]
        return at_once({**self._head(self.mode.NAME), "choices": choices, "usage": self._usage})

    def events(self, said: Sequence[Said]) -> AnswerEvents:
        """Makes the events of the continuations, token by token in turn, as if computed in one batch."""
        mode = self.mode
        opening = [self._event(index, each) for index in range(len(said)) for each in mode.opening()]
        told = [mode.pieces(one) for one in said]
        between = [
            self._event(index, piece[place])
            for place in range(max(map(len, told), default=0))
            for index, piece in enumerate(told)
            if place < len(piece)
        ]
        closing = [self._event(index, {**mode.closing(), **self._ending(one)}) for index, one in enumerate(said)]
        if self.include_usage:
            closing.append(event({**self._head(mode.EVENT), "choices": [], "usage": self._usage}))
        return AnswerEvents(tuple(opening), tuple(between), tuple(closing), (DONE,))

    def _event(self, index: int, choice: Json) -> bytes:
        return event({**self._head(self.mode.EVENT), "choices": [{"index": index, "finish_reason": None, **choice}]})

    def _ending(self, said: Said) -> Json:
        reason = "length" if said.completion.finish_reason is FinishReason.LENGTH else "stop"
        return {"finish_reason": reason} | ({"stop_reason": said.completion.matched_stop} if self.names_stop else {})

    def _head(self, name: str) -> Json:
        return {"id": "fake-1", "object": name, "created": _MADE, "model": self.model}

    @property
    def _usage(self) -> Json:
        usage = self.usage
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class ChatChoices:
    """Choices of a chat request. `logprobs`: they are asked for."""

    NAME: ClassVar[str] = "chat.completion"
    EVENT: ClassVar[str] = "chat.completion.chunk"
    logprobs: bool

    def whole(self, said: Said) -> Json:
        message = {"role": "assistant", "content": said.completion.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs([token for *_, token in said.tokens])}

    def opening(self) -> list[Json]:
        return [{"delta": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None}]

    def pieces(self, said: Said) -> list[Json]:
        return [{"delta": {"content": seen}, "logprobs": self._logprobs([token])} for _, seen, token in said.tokens]

    def closing(self) -> Json:
        return {"delta": {}, "logprobs": None}

    def _logprobs(self, tokens: Sequence[TokenLogprob | None]) -> Json | None:
        if not self.logprobs:
            return None
        content = [
            {**_token(token.text, token.logprob), "top_logprobs": [_token(text, own) for _, text, own in token.top]}
            for token in tokens
            if token is not None
        ]
        return {"content": content, "refusal": None}


@dataclass(frozen=True, slots=True)
class TextChoices:
    """Choices of a completion request.

    Attributes:
        prompt: its text; offsets count from its beginning.
        echo: the prompt's tokens and their log-probabilities (None for the first), where they are given back.
        logprobs: how many alternatives are told; None for no log-probabilities at all.
    """

    NAME: ClassVar[str] = "text_completion"
    EVENT: ClassVar[str] = "text_completion"
    prompt: str
    echo: Sequence[tuple[str, float | None]] | None
    logprobs: int | None

    def whole(self, said: Said) -> Json:
        told = self._logprobs([(text, token) for text, _, token in said.tokens], len(self.prompt), self.echo or ())
        return {"text": ("" if self.echo is None else self.prompt) + said.completion.text, "logprobs": told}

    def opening(self) -> list[Json]:
        if self.echo is None:
            return []
        return [{"text": self.prompt, "logprobs": self._logprobs([], len(self.prompt), self.echo)}]

    def pieces(self, said: Said) -> list[Json]:
        start = len(self.prompt)
        told: list[Json] = []
        for text, seen, token in said.tokens:
            told.append({"text": seen, "logprobs": self._logprobs([(text, token)], start)})
            start += len(text)
        return told

    def closing(self) -> Json:
        return {"text": "", "logprobs": None}

    def _logprobs(
        self,
        tokens: Sequence[tuple[str, TokenLogprob | None]],
        start: int,
        echo: Sequence[tuple[str, float | None]] = (),
    ) -> Json | None:
        """Writes log-probabilities of tokens from the character `start` on, after those of an echoed prompt."""
        if self.logprobs is None:
            return None
        rows = [(text, own, None if own is None else {text: own}) for text, own in echo]
        rows += [
            (text, own.logprob, {each: its for _, each, its in own.top}) for text, own in tokens if own is not None
        ]
        offsets = []
        place = 0 if echo else start
        for text, _, _ in rows:
            offsets.append(place)
            place += len(text)
        return {
            "tokens": [text for text, _, _ in rows],
            "token_logprobs": [own for _, own, _ in rows],
            "top_logprobs": [top for *_, top in rows] if self.logprobs else None,
            "text_offset": offsets,
        }


def prompt_logprobs(prompt: str, hashed: Sequence[float], scores: Scores) -> list[tuple[str, float | None]]:
    """Returns the tokens of a prompt with their log-probabilities; None for the first.

    Args:
        hashed: one for each token, where nothing else is known.
        scores: of choices, as Echo has them; the longest one that the prompt ends with counts, for its tokens.
    """
    texts = pieces(prompt)
    logprobs = list(hashed)
    choice = max((choice for choice in scores if choice and prompt.endswith(choice)), key=len, default="")
    if choice:
        given = scores_of(scores[choice], choice, 0)
        logprobs[-len(given) :] = given  # a choice's first token may begin before it, and is one token all the same
    return [(text, own if i else None) for i, (text, own) in enumerate(zip(texts, logprobs, strict=True))]


def _token(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "surrogatepass"))}
