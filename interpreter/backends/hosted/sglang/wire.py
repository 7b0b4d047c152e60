"""Answers of SGLang's own API, as types, and read as pieces of an answer. Fields that are not used are not read.

`/generate` answers with one object for each continuation (a list of them for n above 1):

    {"text": ..., "index": 0, "meta_info": {"prompt_tokens": 9, "finish_reason": {"type": "stop", "matched": "."}, ...}}

An event of a stream is such an object, whose text is all of the text so far, or only what is new, as the server was
started. Log-probabilities are triples (logprob, token id, text).
"""

from typing import Annotated, Any

import msgspec

from .....lang.errors import BackendError
from .....lang.protocol import TokenLogprob
from ..errors import Provider
from ..openai.wire import Choice, Counted, Details, Piece
from ..stops import stop_begun

_Count = Annotated[int, msgspec.Meta(ge=0)]
Token = tuple[float | None, int, str | None]


class _Finish(msgspec.Struct):
    type: str
    matched: Any = None  # Any: the stop string, the id of a token, or for some ends a list
    message: str = ""


class Meta(msgspec.Struct):
    prompt_tokens: _Count = 0
    completion_tokens: _Count = 0
    cached_tokens: _Count = 0
    finish_reason: _Finish | None = None
    input_token_logprobs: list[Token] | None = None
    input_top_logprobs: list[list[Token] | None] | None = None
    output_token_logprobs: list[Token] | None = None
    output_top_logprobs: list[list[Token] | None] | None = None


class Told(msgspec.Struct):
    """One continuation, or one event of it."""

    text: str = ""
    index: _Count = 0
    meta_info: Meta = msgspec.field(default_factory=Meta)


def told(data: object, provider: Provider) -> list[Told]:
    """Parses JSON of `/generate` into its continuations, in order.

    Raises:
        BackendError: it is no answer.
    """
    try:
        if isinstance(data, list):
            return msgspec.convert(data, list[Told])
        return [msgspec.convert(data, Told)]
    except msgspec.ValidationError as error:
        raise BackendError(f"{provider.name}: {provider.host} sent what is no answer of /generate: {error}") from None


class Reader:
    """Reads the answer to one call into pieces, event by event.

    Args:
        stops: of the request. The server takes a stop off a text when it ends, so what may be the beginning of one
            is held back until then.
        n: continuations.
        incremental: the server streams what is new, instead of all of the text so far.
    """

    def __init__(self, stops: tuple[str, ...], n: int, *, incremental: bool) -> None:
        self._stops, self._incremental = stops, incremental
        self._texts = [""] * n
        self._given = [0] * n  # characters of each text that are given out
        self._tokens = [0] * n  # of each text whose log-probabilities are given out
        self._completion_tokens = [0] * n
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()

    def __call__(self, data: object, provider: Provider) -> Piece:
        """Reads one event. Raises BackendError for invalid data, and for a request that the server aborted."""
        if isinstance(data, dict) and data.get("error") is not None:
            return Piece(error=data["error"])
        pieces = told(data, provider)
        if isinstance(data, list):
            for index, each in enumerate(pieces):
                each.index = index
        if any(each.index >= len(self._texts) for each in pieces):
            raise BackendError(f"{provider.name}: {provider.host} sent more than {len(self._texts)} continuations")
        choices = [self._choice(each, provider) for each in pieces]
        meta = pieces[-1].meta_info if pieces else Meta()
        counted = Counted(meta.prompt_tokens, sum(self._completion_tokens), Details(meta.cached_tokens))
        return Piece(choices, counted)

    def _choice(self, told: Told, provider: Provider) -> Choice:
        index, meta = told.index, told.meta_info
        self._completion_tokens[index] = meta.completion_tokens
        if meta.input_token_logprobs and not self.prompt_logprobs:
            self.prompt_logprobs = logprobs_of(meta.input_token_logprobs, meta.input_top_logprobs)
        finish = meta.finish_reason
        if finish is not None and finish.type == "abort":
            said = provider.scrub(finish.message) or "no reason given"
            raise BackendError(f"{provider.name}: {provider.host} gave the request up: {said}")
        matched = finish.matched if finish is not None and isinstance(finish.matched, str | int) else None
        return Choice(
            index,
            text=self._new_text(index, told.text, ended=finish is not None),
            finish_reason=finish.type if finish is not None else None,
            logprobs=self._new_logprobs(index, meta),
            stop_reason=matched,
        )

    def _new_text(self, index: int, said: str, *, ended: bool) -> str:
        whole = self._texts[index] + said if self._incremental else said
        self._texts[index] = whole
        certain = len(whole) if ended else len(whole) - stop_begun(whole, self._stops)
        new = whole[self._given[index] : certain]
        self._given[index] += len(new)
        return new

    def _new_logprobs(self, index: int, meta: Meta) -> tuple[TokenLogprob, ...]:
        """Returns new log-probabilities. Lists hold all tokens so far or the new ones, independently of the text."""
        tokens = logprobs_of(meta.output_token_logprobs or [], meta.output_top_logprobs)
        seen = self._tokens[index]
        if len(tokens) >= meta.completion_tokens:
            tokens = tokens[seen:]
        self._tokens[index] = seen + len(tokens)
        return tokens


def logprobs_of(tokens: list[Token], tops: list[list[Token] | None] | None) -> tuple[TokenLogprob, ...]:
    """Reads log-probabilities. The first token of a prompt has none: it gets 0.0, as in our own runtime."""
    alternatives = tops or [None] * len(tokens)
    return tuple(
        TokenLogprob(token, text or "", 0.0 if value is None else value, _ranked(top))
        for (value, token, text), top in zip(tokens, alternatives, strict=False)
    )


def _ranked(top: list[Token] | None) -> tuple[tuple[int, str, float], ...]:
    ranked = sorted((each for each in top or [] if each[0] is not None), key=lambda each: -(each[0] or 0.0))
    return tuple((token, text or "", value or 0.0) for value, token, text in ranked)
