"""Writes a request as the body of a request to SGLang's own API."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .....lang.errors import CapabilityError, ParameterError, RequestError
from .....lang.prompt import Media, Part
from .....lang.protocol import ConstraintSpec, GenRequest
from .....lang.sampling import SamplingParams
from ..constraint_params import Fields
from ..content import in_base64, media_type
from ..openai import requests
from ..openai.requests import Plan

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
        case "lark" | "choices":
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
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt holds {text[error.start]!r}, half of a character, which cannot be sent to {self.backend}; "
                "decode its source with errors='replace'"
            ) from None
        pictures = [self._picture(part) for part in parts if isinstance(part, Media)]
        return {"text": text, **({"image_data": pictures} if pictures else {})}

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
        if request.origin.salt:
            raise self._lacks(f"salt={request.origin.salt!r}", "its prefix cache cannot be kept apart; leave it out")

    def _lacks(self, what: str, instead: str) -> CapabilityError:
        return CapabilityError(f"{self.backend} does not take {what}; {instead}, or run the program on a Runtime")
