"""Requests of the OpenAI dialect: their types, what the provider refuses of them, and the turns that they hold."""

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from ....lang import checks
from ....lang.prompt import Media, Text
from ....lang.sampling import SamplingParams
from ...backends.hosted.conversation import Content, Message
from ..provider import Refused
from ..structured import strictness

Count = Annotated[int, Meta(ge=1)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = dict[str, Annotated[float, Meta(ge=-100, le=100)]]
Schema = dict[str, Any]  # Any: JSON Schema


@dataclass(frozen=True, slots=True)
class OpenAIFeatures:
    """The abilities of a server of the OpenAI dialect; the defaults are OpenAI's own recent models.

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


class _OpenAIBody(msgspec.Struct, forbid_unknown_fields=True):
    """Base of everything a client sends."""


class StreamOptions(_OpenAIBody):
    include_usage: bool = False


class StructuredOutputs(_OpenAIBody):
    """vLLM's; exactly one of them."""

    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    json: Schema | str | None = None
    json_object: bool | None = None
    grammar: str | None = None


class JsonSchema(_OpenAIBody):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: Schema
    strict: bool | None = None
    description: str | None = None


class TextFormat(_OpenAIBody, tag="text"):
    pass


class ObjectFormat(_OpenAIBody, tag="json_object"):
    schema: Schema | None = None  # llama.cpp's


class SchemaFormat(_OpenAIBody, tag="json_schema"):
    json_schema: JsonSchema


class TextPart(_OpenAIBody, tag="text"):
    text: str


class ImageUrl(_OpenAIBody):
    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(_OpenAIBody, tag="image_url"):
    image_url: ImageUrl


class ChatMessage(_OpenAIBody):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart | ImagePart]
    name: str | None = None


class _Sampled(_OpenAIBody, kw_only=True):
    """The fields that both routes have in common."""

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
        """Returns the request's parameters that end an answer."""
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
        """True if only the prompt's log-probabilities are requested; a generated token is ignored."""
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

B = TypeVar("B", ChatBody, CompletionBody)

MOST_LOGPROBS = 5  # alternatives in completion mode, at OpenAI

_DATA_URL = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,(.*)", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_PLACE = re.compile(r" - at `\$\.?(.*)`$")


def read(body: object, kind: type[B], features: OpenAIFeatures, models: tuple[str, ...]) -> B:
    """Parses a request and checks each field.

    Raises:
        Refused: with the provider's words, and the parameter that is wrong.
    """
    try:
        request = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        unknown, place = _UNKNOWN.search(str(error)), _PLACE.search(str(error))
        if unknown is not None and place is None:
            raise _unknown(unknown[1]) from None
        parameter = place[1] if place is not None else None
        message = _PLACE.sub("", str(error))
        raise Refused(400, f"Invalid value for '{parameter}': {message}", parameter=parameter) from None
    if request.model not in models:
        message = f"The model `{request.model}` does not exist or you do not have access to it."
        raise Refused(404, message, parameter="model", code="model_not_found")
    given = {name for name in kind.__struct_fields__ if getattr(request, name) is not None}
    for name in sorted(given & (EXTRAS - features.extras)):
        raise _unknown(name)
    if "stream_options" in given and not request.stream:
        raise Refused(400, "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
                      parameter="stream_options")  # fmt: skip
    if "" in request.stops:
        raise Refused(400, "Invalid 'stop': empty string.", parameter="stop")
    if request.stops and not features.stops:
        raise _unsupported("stop")
    if len(request.stops) > features.stops:
        message = f"Invalid 'stop': array too long. Expected an array with maximum length {features.stops}."
        raise Refused(400, message, parameter="stop", code="array_above_max_length")
    if request.logprobs and not features.logprobs:
        raise _unsupported("logprobs")
    if not features.temperature:
        for name, default in (
            ("temperature", 1),
            ("top_p", 1),
            ("presence_penalty", 0),
            ("frequency_penalty", 0),
        ):
            if name in given and getattr(request, name) != default:
                raise _only_default(name, getattr(request, name))
    return request


def read_chat(body: object, features: OpenAIFeatures, models: tuple[str, ...]) -> ChatBody:
    """Parses a chat request as `read` does, and checks its fields together."""
    request = read(body, ChatBody, features, models)
    if request.max_tokens is not None and not features.max_tokens:
        raise Refused(
            400,
            "Unsupported parameter: 'max_tokens' is not supported with this model. "
            "Use 'max_completion_tokens' instead.",
            parameter="max_tokens",
            code="unsupported_parameter",
        )
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise Refused(400, "Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported.",
                      parameter="max_tokens")  # fmt: skip
    if request.top_logprobs is not None and not request.logprobs:
        raise Refused(400, "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.",
                      parameter="top_logprobs")  # fmt: skip
    if request.continue_final_message and request.add_generation_prompt is not False:
        raise Refused(400, "Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    if request.continue_final_message and request.messages[-1].role != "assistant":
        raise Refused(400, "Cannot set `continue_final_message` when the last message is not from the assistant.")
    _check_format(request, features)
    return request


def read_completion(body: object, features: OpenAIFeatures, models: tuple[str, ...]) -> CompletionBody:
    """Parses a completion request as `read` does, and checks its fields together."""
    request = read(body, CompletionBody, features, models)
    if request.logprobs is not None and request.logprobs > MOST_LOGPROBS and not features.extras:
        raise Refused(400, f"Invalid 'logprobs': the maximum is {MOST_LOGPROBS}.", parameter="logprobs")
    if request.echo and request.logprobs is not None and not features.prompt_logprobs:
        raise Refused(400, "Setting 'echo' and 'logprobs' at the same time is not supported for this model.")
    return request


def messages(request: ChatBody, features: OpenAIFeatures) -> tuple[Message, ...]:
    """Returns the turns with their content."""
    return tuple(Message(said.role, _content(said, features)) for said in request.messages)


def _check_format(request: ChatBody, features: OpenAIFeatures) -> None:
    asked = request.response_format
    if asked is not None and not features.response_format:
        raise _unsupported("response_format")
    match asked:
        case ObjectFormat(schema) if schema is None:
            said = " ".join(str(message.content) for message in request.messages).lower()
            if "json" not in said:
                raise Refused(
                    400,
                    "'messages' must contain the word 'json' in some form, to use 'response_format' of type "
                    "'json_object'.",
                    parameter="messages",
                )
        case SchemaFormat(form) if form.strict:
            problem = strictness(form.schema)
            if problem is not None:
                raise Refused(
                    400,
                    f"Invalid schema for response_format '{form.name}': {problem}",
                    parameter="response_format",
                )


def _content(said: ChatMessage, features: OpenAIFeatures) -> Content:
    if isinstance(said.content, str):
        return (Text(said.content),) if said.content else ()
    parts: list[Text | Media] = []
    for part in said.content:
        match part:
            case TextPart(text):
                if text:
                    parts.append(Text(text))
            case ImagePart(image):
                if not features.images or said.role != "user":
                    raise Refused(400, f"Invalid content type. image_url is not supported for {said.role} messages.")
                parts.append(_image(image.url))
    return tuple(parts)


def _image(url: str) -> Media:
    found = _DATA_URL.fullmatch(url)
    if found is None:
        raise Refused(400, "Invalid image URL: this server takes data URLs of png, jpeg, gif and webp in base64.",
                      parameter="messages", code="invalid_image_url")  # fmt: skip
    try:
        data = base64.b64decode(found[1], validate=True)
    except binascii.Error:
        raise Refused(400, "Invalid base64 image_url.", parameter="messages", code="invalid_base64") from None
    return Media("image", hashlib.sha256(data).hexdigest(), data)


def _unknown(name: str) -> Refused:
    return Refused(400, f"Unrecognized request argument supplied: {name}", parameter=name, code="unknown_parameter")


def _unsupported(name: str) -> Refused:
    return Refused(
        400,
        f"Unsupported parameter: '{name}' is not supported with this model.",
        parameter=name,
        code="unsupported_parameter",
    )


def _only_default(name: str, value: object) -> Refused:
    return Refused(
        400,
        f"Unsupported value: '{name}' does not support {value} with this model. Only the default (1) value is "
        "supported.",
        parameter=name,
        code="unsupported_value",
    )
