"""Requests of SGLang's own API, as types: what the server takes, and within which bounds."""

from typing import Annotated

import msgspec
from msgspec import Meta

from ....lang.sampling import SamplingParams
from ..provider import Refused

_Natural = Annotated[int, Meta(ge=0)]


class Sampling(msgspec.Struct, forbid_unknown_fields=True):
    """`sampling_params` of a request; the defaults are the server's."""

    max_new_tokens: _Natural = 128
    min_new_tokens: _Natural = 0
    n: Annotated[int, Meta(ge=1)] = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: int = -1
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0, le=2)] = 1.0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None

    def ending(self, *, logprobs: bool, top_logprobs: int) -> SamplingParams:
        """What of the request says where an answer ends."""
        return SamplingParams(
            max_tokens=self.max_new_tokens,
            min_tokens=min(self.min_new_tokens, self.max_new_tokens),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
        )


class GenerateBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /generate. A list of texts or of token ids asks for all of them."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    image_data: str | list[str | list[str]] | None = None
    sampling_params: Sampling = msgspec.field(default_factory=Sampling)
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Meta(ge=-1)] = -1
    top_logprobs_num: Annotated[int, Meta(ge=0, le=20)] = 0
    return_text_in_logprobs: bool = False
    stream: bool = False
    rid: str | None = None

    @property
    def several(self) -> bool:
        """Whether a list was asked for, which is answered by a list."""
        given = self.input_ids if self.text is None else self.text
        return isinstance(given, list) and (self.text is not None or isinstance(given[0], list))


def read(body: object) -> GenerateBody:
    """
    Raises:
        Refused: with what is wrong.
    """
    try:
        request = msgspec.convert(body, GenerateBody)
    except msgspec.ValidationError as error:
        raise Refused(400, str(error)) from None
    if (request.text is None) == (request.input_ids is None):
        raise Refused(400, "Either text or input_ids should be provided.")
    if request.text == [] or request.input_ids == []:
        raise Refused(400, "The input is empty.")
    constraints = (request.sampling_params.regex, request.sampling_params.json_schema, request.sampling_params.ebnf)
    if sum(each is not None for each in constraints) > 1:
        raise Refused(400, "Only one of regex, json_schema, or ebnf can be set.")
    return request
