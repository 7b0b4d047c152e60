"""Requests of the OpenAI dialect, as types: what the provider takes, and within which bounds."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ....lang import checks
from ....lang.sampling import SamplingParams

Count = Annotated[int, Meta(ge=1)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = dict[str, Annotated[float, Meta(ge=-100, le=100)]]
Schema = dict[str, Any]  # Any: JSON Schema


@dataclass(frozen=True, slots=True)
class OpenAIFeatures:
    """What a server of the OpenAI dialect can do; the defaults are OpenAI's own recent models.

    Attributes:
        chat, completions, models: which routes there are.
        response_format: structured outputs; without, the parameter is refused, as older models do.
        stops: most stop strings of a request; reasoning models take none.
        temperature: reasoning models take the default alone (and top_p, penalties).
        max_tokens: reasoning models take max_completion_tokens alone.
        logprobs: of chat requests, and of completion requests.
        images: parts of messages.
        prompt_logprobs: echo together with logprobs; OpenAI has ended it, vLLM and llama-cpp-python have it.
        extras: parameters of other servers: "structured_outputs", "continue_final_message", "top_k", "grammar", ...
        names_stop: answers say which stop ended them, as vLLM's.
        owned_by: what GET /v1/models says.
    """

    chat: bool = True
    completions: bool = True
    models: bool = True
    response_format: bool = True
    stops: int = 4
    temperature: bool = True
    max_tokens: bool = True
    logprobs: bool = True
    images: bool = True
    prompt_logprobs: bool = True
    extras: frozenset[str] = frozenset()
    names_stop: bool = False
    owned_by: str = "system"

    def __post_init__(self) -> None:
        checks.record(self)


OPENAI = OpenAIFeatures()


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    """Base of everything a client sends."""


class StreamOptions(_Body):
    include_usage: bool = False


class StructuredOutputs(_Body):
    """vLLM's; exactly one of them."""

    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    json: Schema | str | None = None
    json_object: bool | None = None
    grammar: str | None = None


class JsonSchema(_Body):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: Schema
    strict: bool | None = None
    description: str | None = None


class TextFormat(_Body, tag="text"):
    pass


class ObjectFormat(_Body, tag="json_object"):
    schema: Schema | None = None  # llama.cpp's


class SchemaFormat(_Body, tag="json_schema"):
    json_schema: JsonSchema


class TextPart(_Body, tag="text"):
    text: str


class ImageUrl(_Body):
    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(_Body, tag="image_url"):
    image_url: ImageUrl


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart | ImagePart]
    name: str | None = None


class _Sampled(_Body, kw_only=True):
    """What both routes have in common."""

    model: str
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    presence_penalty: Penalty | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    user: str | None = None
    # Of other servers; refused where `features.extras` does not name them.
    structured_outputs: StructuredOutputs | None = None
    top_k: int | None = None
    min_p: Probability | None = None
    repetition_penalty: float | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    cache_salt: str | None = None
    regex: str | None = None
    json_schema: str | None = None
    grammar: str | None = None
    ebnf: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, max_tokens: int, logprobs: bool, top_logprobs: int) -> SamplingParams:
        """What of the request says where an answer ends."""
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens or 0, max_tokens),
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            top_logprobs=top_logprobs,
        )


class ChatBody(_Sampled, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    response_format: TextFormat | ObjectFormat | SchemaFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    # Of other servers, too.
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class CompletionBody(_Sampled, kw_only=True):
    """POST /v1/completions"""

    prompt: str
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = 16

    @property
    def scores(self) -> bool:
        """The numbers of the prompt are all that is asked for; a token that must be generated is not looked at."""
        return bool(self.echo) and self.logprobs is not None and self.max_tokens is not None and self.max_tokens <= 1


_SAMPLING = {"top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"}
_CONTINUING = {"continue_final_message", "add_generation_prompt"}
EXTRAS = frozenset(
    {*_SAMPLING, *_CONTINUING, "structured_outputs", "cache_salt", "regex", "json_schema", "grammar", "ebnf"}
)

# Servers and models to play.
REASONING = OpenAIFeatures(completions=False, stops=0, temperature=False, max_tokens=False, logprobs=False)
VLLM = OpenAIFeatures(
    stops=16,
    extras=frozenset({*_SAMPLING, *_CONTINUING, "structured_outputs", "cache_salt"}),
    names_stop=True,
    owned_by="vllm",
)
SGLANG = OpenAIFeatures(
    stops=16, extras=frozenset({*_SAMPLING, *_CONTINUING, "regex", "json_schema", "ebnf"}), owned_by="sglang"
)
LLAMA_CPP = OpenAIFeatures(stops=16, extras=frozenset({"top_k", "min_p", "grammar"}), owned_by="llamacpp")
