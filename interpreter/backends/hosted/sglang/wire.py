"""Writes requests to SGLang's own API, and reads its answers as pieces of an answer.

`/generate` answers with one object for each continuation (a list of them for n above 1):

    {"text": ..., "index": 0, "meta_info": {"prompt_tokens": 9, "finish_reason": {"type": "stop", "matched": "."}, ...}}

An event of a stream is such an object, whose text is all of the text so far, or only what is new, as the server was
started. Log-probabilities are triples (logprob, token id, text). Fields that are not used are not read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from .....lang.errors import BackendError, CapabilityError, ParameterError
from .....lang.prompt import Media, Part, namespace
from .....lang.protocol import ConstraintSpec, GenRequest, ScoreRequest, TokenLogprob
from .....lang.sampling import SamplingParams
from ..constraint_params import Fields
from ..conversation import in_base64, media_type, sendable_text
from ..errors import Provider
from ..openai import requests
from ..openai.requests import Plan
from ..openai.wire import Choice, Counted, Details, Piece
from ..stops import stop_begun

PATH = "/generate"

_DEFAULTS = SamplingParams()
# Our names → the server's. The first are always sent: a server may have defaults of its own.
_ALWAYS = {"max_tokens": "max_new_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
_IF_GIVEN = {
    "min_tokens": "min_new_tokens",
    "n": "n",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "ignore_eos": "ignore_eos",
}
_ELSEWHERE = ("logprobs", "top_logprobs", "prompt_logprobs_from", "logit_bias")  # they have fields of their own
_RESERVED = frozenset({"text", "input_ids", "stream", "return_logprob", "return_text_in_logprobs", "image_data"})


def checked_extra(given: Mapping[str, Any] | None) -> Fields:
    """Checks extra fields. Raises ParameterError for reserved ones, or values that are no JSON."""
    extra = requests.checked_extra(given, _RESERVED)
    if not isinstance(extra.get("sampling_params", {}), Mapping):
        raise ParameterError("extra_body['sampling_params'] must be a dict of the server's sampling parameters")
    return extra


def constraint_fields(constraint: ConstraintSpec) -> Fields | None:
    """Writes a constraint's fields; None for one that the server does not enforce."""
    if constraint.engine not in (None, "auto"):
        return None  # the user asks for an engine of our runtime
    match constraint.kind:
        case "regex" | "json_schema":
            return {constraint.kind: constraint.source}
        case "gbnf":
            return {"ebnf": constraint.source}
        case "lark" | "choices" | "tools" | "expression":
            return None


@dataclass(frozen=True, slots=True)
class SGLangPlanner:
    """Plans the calls to one server.

    Args:
        backend: its name, for messages.
        image_token: placeholder of a picture in the model's prompts.
        seeds: the server was started with --enable-deterministic-inference; without it, it looks at no seed.
        extra: fields that the user adds to every request.
    """

    backend: str
    image_token: str
    seeds: bool
    extra: Mapping[str, Any]  # Any: JSON

    def plan(self, request: GenRequest) -> Plan:
        """Plans a call.

        Raises:
            CapabilityError: the request needs a feature that the server lacks; nothing is left out.
            RequestError: a text that cannot be sent.
        """
        sampling = request.sampling
        self._check(request)
        body = self.body(self.prompt(request.prompt), self._choosing(sampling, request.constraint))
        if sampling.logprobs or sampling.top_logprobs or sampling.prompt_logprobs_from is not None:
            body |= {"return_logprob": True, "return_text_in_logprobs": True}
            if sampling.top_logprobs:
                body["top_logprobs_num"] = sampling.top_logprobs
            if sampling.prompt_logprobs_from is not None:
                body["logprob_start_len"] = sampling.prompt_logprobs_from
        if request.stream:
            body["stream"] = True
        return Plan(PATH, body, (), "", sampling.n, sampling.max_tokens, False)

    def body(self, prompt: Fields, sampling: Fields) -> Fields:
        """Builds a body, with the fields that the user adds to every request."""
        given = dict(self.extra)
        return {**prompt, "sampling_params": {**sampling, **given.pop("sampling_params", {})}, **given}

    def prompt(self, parts: tuple[Part, ...]) -> Fields:
        text = "".join(self.image_token if isinstance(part, Media) else part.text for part in parts)
        pictures = [self._picture(part) for part in parts if isinstance(part, Media)]
        return {"text": sendable_text(text, self.backend), **({"image_data": pictures} if pictures else {})}

    # -------------------------------------------------------------------------------- how

    def _picture(self, part: Media) -> str:
        return f"data:{media_type(part, self.backend)};base64,{in_base64(part)}"

    def _choosing(self, sampling: SamplingParams, constraint: ConstraintSpec | None) -> Fields:
        fields: Fields = {theirs: getattr(sampling, ours) for ours, theirs in _ALWAYS.items()}
        for ours, theirs in _IF_GIVEN.items():
            value = getattr(sampling, ours)
            if value != getattr(_DEFAULTS, ours):
                fields[theirs] = list(value) if isinstance(value, tuple) else value
        if sampling.seed is not None:
            fields["sampling_seed"] = sampling.seed
        if sampling.logit_bias:
            fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
        if constraint is None:
            return fields
        lowered = constraint_fields(constraint)
        if lowered is None:
            raise self._lacks(f"this {constraint.kind}", "write a regex or a JSON schema")
        return fields | lowered

    def _check(self, request: GenRequest) -> None:
        """Raises CapabilityError for parameters that this server would drop."""
        sampling = request.sampling
        for field in SamplingParams.__struct_fields__:
            if field in _ALWAYS or field in _IF_GIVEN or field in _ELSEWHERE or (field == "seed" and self.seeds):
                continue
            if getattr(sampling, field) != getattr(_DEFAULTS, field):
                instead = "start it with --enable-deterministic-inference" if field == "seed" else "leave it out"
                raise self._lacks(f"{field}={getattr(sampling, field)!r}", instead)
        if request.token_healing:
            raise self._lacks("token_healing=True", "leave it out")
        self.check_shared(request)

    def check_shared(self, request: GenRequest | ScoreRequest) -> None:
        """Raises CapabilityError for a prompt that may not be shared: the server has one cache for all."""
        if namespace(request.origin.salt, request.prompt):
            what = f"salt={request.origin.salt!r}" if request.origin.salt else "private()"
            raise self._lacks(what, "its prefix cache cannot be kept apart; leave it out")

    def _lacks(self, what: str, instead: str) -> CapabilityError:
        return CapabilityError(f"{self.backend} does not take {what}; {instead}, or run the program on a Runtime")


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
        details = Details(meta.cached_tokens, cache_read_input_tokens=0)  # it keeps nothing on request
        counted = Counted(meta.prompt_tokens, sum(self._completion_tokens), details)
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
