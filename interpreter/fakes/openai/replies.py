"""Answers of the OpenAI dialect: at once and as events, in both modes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ....lang.protocol import Completion, FinishReason, TokenLogprob, Usage
from ...backends.echo_answers import scores_of
from ...backends.echo_tokens import pieces
from ..server import DONE, AnswerEvents, event

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


def usage_of(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Mode(Protocol):
    """Writes a choice of one of the two modes. `name`, `event`: what its objects are called."""

    @property
    def name(self) -> str: ...

    @property
    def event(self) -> str: ...

    def whole(self, said: Said) -> Json: ...

    def opening(self) -> list[Json]: ...

    def pieces(self, said: Said) -> list[Json]: ...

    def closing(self) -> Json: ...


@dataclass(frozen=True, slots=True)
class Telling:
    """Writes what both modes have around their choices.

    Attributes:
        modes: how each choice is written; all of one kind.
        usage: of the request.
        include_usage: streams end with it.
        names_stop: choices say which stop ended them.
    """

    model: str
    modes: Sequence[Mode]
    usage: Usage
    include_usage: bool
    names_stop: bool

    def whole(self, said: Sequence[Said]) -> Json:
        choices = [
            {"index": index, **mode.whole(one), **self._ending(one)}
            for index, (mode, one) in enumerate(zip(self.modes, said, strict=True))
        ]
        return {**self._head(self.modes[0].name), "choices": choices, "usage": usage_of(self.usage)}

    def events(self, said: Sequence[Said]) -> AnswerEvents:
        """Makes the events of the continuations, token by token in turn, as if computed in one batch."""
        opening = [self._event(index, opening) for index, mode in enumerate(self.modes) for opening in mode.opening()]
        told = [mode.pieces(one) for mode, one in zip(self.modes, said, strict=True)]
        between = [
            self._event(index, piece[place])
            for place in range(max(map(len, told), default=0))
            for index, piece in enumerate(told)
            if place < len(piece)
        ]
        closing = [
            self._event(index, {**mode.closing(), **self._ending(one)})
            for index, (mode, one) in enumerate(zip(self.modes, said, strict=True))
        ]
        if self.include_usage:
            closing.append(event({**self._head(self.modes[0].event), "choices": [], "usage": usage_of(self.usage)}))
        return AnswerEvents(tuple(opening), tuple(between), tuple(closing), (DONE,))

    def _event(self, index: int, choice: Json) -> bytes:
        choices = [{"index": index, "finish_reason": None, **choice}]
        return event({**self._head(self.modes[0].event), "choices": choices})

    def _ending(self, said: Said) -> Json:
        reason = "length" if said.completion.finish_reason is FinishReason.LENGTH else "stop"
        return {"finish_reason": reason} | ({"stop_reason": said.completion.matched_stop} if self.names_stop else {})

    def _head(self, name: str) -> Json:
        return {"id": "fake-1", "object": name, "created": _MADE, "model": self.model}


@dataclass(frozen=True, slots=True)
class ChatChoices:
    """Choices of a chat request. `logprobs`: they are asked for."""

    logprobs: bool
    name: str = "chat.completion"
    event: str = "chat.completion.chunk"

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

    prompt: str
    echo: Sequence[tuple[str, float | None]] | None
    logprobs: int | None
    name: str = "text_completion"
    event: str = "text_completion"

    def whole(self, said: Said) -> Json:
        head = "" if self.echo is None else self.prompt
        return {"text": head + said.completion.text, "logprobs": self._logprobs(said, with_prompt=True)}

    def opening(self) -> list[Json]:
        return [] if self.echo is None else [{"text": self.prompt, "logprobs": self._logprobs(None, with_prompt=True)}]

    def pieces(self, said: Said) -> list[Json]:
        start = len(self.prompt)
        told: list[Json] = []
        for text, seen, token in said.tokens:
            told.append({"text": seen, "logprobs": self._told([(text, token)], start)})
            start += len(text)
        return told

    def closing(self) -> Json:
        return {"text": "", "logprobs": None}

    def _logprobs(self, said: Said | None, *, with_prompt: bool) -> Json | None:
        """Writes log-probabilities of the prompt, where it is echoed, and of the answer."""
        if self.logprobs is None:
            return None
        told = self._told([(text, token) for text, _, token in said.tokens] if said else [], len(self.prompt))
        assert told is not None, "log-probabilities are asked for"
        if self.echo is None or not with_prompt:
            return told
        place, offsets = 0, []
        for text, _ in self.echo:
            offsets.append(place)
            place += len(text)
        top = [None if own is None else {text: own} for text, own in self.echo]
        before: Json = {
            "tokens": [text for text, _ in self.echo],
            "token_logprobs": [own for _, own in self.echo],
            "top_logprobs": top if self.logprobs else None,
            "text_offset": offsets,
        }
        return {key: _joined(before[key], told[key]) for key in before}

    def _told(self, tokens: Sequence[tuple[str, TokenLogprob | None]], start: int) -> Json | None:
        if self.logprobs is None:
            return None
        offsets, top = [], []
        for text, token in tokens:
            assert token is not None, "log-probabilities are asked for"
            offsets.append(start)
            top.append({other: own for _, other, own in token.top})
            start += len(text)
        return {
            "tokens": [text for text, _ in tokens],
            "token_logprobs": [token.logprob for _, token in tokens if token is not None],
            "top_logprobs": top if self.logprobs else None,
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


def _joined(before: object, after: object) -> object:
    return [*before, *after] if isinstance(before, list) and isinstance(after, list) else None
