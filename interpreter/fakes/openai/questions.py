"""From requests of the OpenAI dialect to questions for a script: what the provider refuses, and what it reads."""

import base64
import binascii
import hashlib
import re
from typing import TypeVar

import msgspec

from ....lang.prompt import Media, Text
from ...backends.hosted.conversation import Content, Message
from ..provider import Refused
from ..structured import strictness
from .bodies import (
    EXTRAS,
    ChatBody,
    ChatMessage,
    CompletionBody,
    ImagePart,
    ObjectFormat,
    OpenAIFeatures,
    SchemaFormat,
    TextPart,
)

B = TypeVar("B", ChatBody, CompletionBody)

MOST_LOGPROBS = 5  # alternatives in completion mode, at OpenAI

_DATA_URL = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,(.*)", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_PLACE = re.compile(r" - at `\$\.?(.*)`$")


def read(body: object, kind: type[B], features: OpenAIFeatures, models: tuple[str, ...]) -> B:
    """A request with everything checked that a field alone can get wrong.

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
    """As `read`, and what fields of a chat request say together."""
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
    """As `read`, and what fields of a completion request say together."""
    request = read(body, CompletionBody, features, models)
    if request.logprobs is not None and request.logprobs > MOST_LOGPROBS and not features.extras:
        raise Refused(400, f"Invalid 'logprobs': the maximum is {MOST_LOGPROBS}.", parameter="logprobs")
    if request.echo and request.logprobs is not None and not features.prompt_logprobs:
        raise Refused(400, "Setting 'echo' and 'logprobs' at the same time is not supported for this model.")
    return request


def messages(request: ChatBody, features: OpenAIFeatures) -> tuple[Message, ...]:
    """Turns with their content."""
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
