"""Requests of the Anthropic dialect: their types, what the provider refuses of them, and its prompt cache.

blocks       [tools][system][turn 1]*[turn 2][turn 3]*        * a breakpoint: the prefix up to here is stored
read         the longest stored prefix that ends with one of the blocks, at most 20 before a breakpoint
written      what lies between that and the last breakpoint
"""

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ....lang import checks
from ....lang.prompt import Media, Part, Text
from ...backends.echo_tokens import prompt_tokens
from ...backends.hosted.conversation import Content, Message
from ..provider import Refused

Schema = dict[str, Any]  # Any: JSON Schema
NonEmpty = Annotated[str, Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class AnthropicFeatures:
    """The abilities of a model of the Anthropic dialect.

    Attributes:
        prefill: an assistant message at the end of a request is continued; newer models refuse it.
        structured_outputs: answers can be held to a JSON Schema.
        images: parts of messages.
        sampling: "all", "one" (temperature or top_p, not both), or "none" of temperature, top_p and top_k.
        thinks: thoughts come before the answer, unless the request switches them off.
        cache_minimum: tokens of the shortest prefix that is stored.
        models: GET /v1/models is there.
    """

    prefill: bool = True
    structured_outputs: bool = True
    images: bool = True
    sampling: Literal["all", "one", "none"] = "one"
    thinks: bool = False
    cache_minimum: int = 0
    models: bool = True

    def __post_init__(self) -> None:
        checks.record(self)


CLAUDE = AnthropicFeatures()


class _AnthropicBody(msgspec.Struct, forbid_unknown_fields=True):
    """Base of everything a client sends."""


class CacheControl(_AnthropicBody):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class TextBlock(_AnthropicBody, tag="text"):
    text: str
    cache_control: CacheControl | None = None


class ImageSource(_AnthropicBody):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageBlock(_AnthropicBody, tag="image"):
    source: ImageSource
    cache_control: CacheControl | None = None


class ClaudeMessage(_AnthropicBody):
    role: Literal["user", "assistant"]
    content: str | list[TextBlock | ImageBlock]


class Tool(_AnthropicBody):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    input_schema: Schema
    description: str = ""
    type: Literal["custom"] = "custom"
    cache_control: CacheControl | None = None


class ToolChoice(_AnthropicBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(_AnthropicBody):
    type: Literal["json_schema"]
    schema: Schema


class OutputConfig(_AnthropicBody):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class ThinkingField(_AnthropicBody):
    type: Literal["disabled"]


class Metadata(_AnthropicBody):
    user_id: str | None = None


class MessagesBody(_AnthropicBody, kw_only=True):
    """POST /v1/messages"""

    model: str
    messages: list[ClaudeMessage]
    max_tokens: Annotated[int, Meta(ge=0)]  # 0 stores the prompt and says nothing
    system: str | list[TextBlock] | None = None
    stop_sequences: list[NonEmpty] | None = None
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: ThinkingField | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


_LOOKBACK = 20  # blocks before a breakpoint in which an earlier prefix is found


@dataclass(frozen=True, slots=True)
class PromptBlock:
    """A piece of a prompt. `ids`: of its tokens, the scaffolding before it included."""

    ids: tuple[int, ...]
    breakpoint: bool = False


class PrefixStore:
    """Prefixes that were stored, for as long as the server runs.

    Args:
        minimum: tokens of the shortest prefix that is stored.
    """

    def __init__(self, minimum: int) -> None:
        self._minimum = minimum
        self._stored: set[tuple[int, ...]] = set()

    def charge(self, blocks: Sequence[PromptBlock]) -> tuple[int, int]:
        """Returns the tokens a prompt reads from and writes to the cache, and stores its breakpoints."""
        ids: list[int] = []
        read = last = 0
        ends: list[int] = []
        stored: list[tuple[int, ...]] = []
        for index, block in enumerate(blocks):
            ids.extend(block.ids)
            ends.append(len(ids))
            if not block.breakpoint or len(ids) < self._minimum:
                continue
            last = len(ids)
            stored.append(tuple(ids))
            for end in ends[max(0, index - _LOOKBACK) :]:
                if end > read and tuple(ids[:end]) in self._stored:
                    read = end
        self._stored.update(stored)
        return read, last - read


MOST_BREAKPOINTS = 4

_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_PLACE = re.compile(r" - at `(?:key in )?\$\.?(.*)`$")


def read(body: object, features: AnthropicFeatures, models: Sequence[str]) -> MessagesBody:
    """Parses and checks a request as the provider does before it runs its model.

    Raises:
        Refused: with the provider's words.
    """
    try:
        request = msgspec.convert(body, MessagesBody)
    except msgspec.ValidationError as error:
        raise Refused(400, _said(str(error))) from None
    if request.model not in models:
        raise Refused(404, f"model: {request.model}")
    _check_sampling(request, features)
    _check_messages(request, features)
    if any(not stop.strip() for stop in request.stop_sequences or ()):
        raise Refused(400, "stop_sequences: each stop sequence must contain non-whitespace")
    breakpoints = sum(block.breakpoint for block in blocks(request))
    if breakpoints > MOST_BREAKPOINTS:
        raise Refused(
            400, f"A maximum of {MOST_BREAKPOINTS} blocks with cache_control may be provided. Found {breakpoints}."
        )
    forms = request.output_config is not None and request.output_config.format is not None
    if forms and not features.structured_outputs:
        raise Refused(400, "output_config.format: This model does not support structured outputs.")
    if forms and request.messages[-1].role == "assistant":
        raise Refused(400, "Prefilling assistant messages is not supported together with output_config.format.")
    return request


def conversation(request: MessagesBody, features: AnthropicFeatures) -> tuple[tuple[Message, ...], Content | None]:
    """Returns the turns, system first, and the content that the answer continues: None without a last answer."""
    turns: list[Message] = []
    if request.system:
        blocks = [TextBlock(request.system)] if isinstance(request.system, str) else request.system
        turns.append(Message("system", tuple(Text(block.text) for block in blocks)))
    turns.extend(Message(said.role, content(said, features)) for said in request.messages)
    if turns[-1].role == "assistant":
        return tuple(turns[:-1]), turns[-1].content
    return tuple(turns), None


def content(said: ClaudeMessage, features: AnthropicFeatures) -> Content:
    """Returns a turn's content. Raises Refused for images that the model does not take."""
    if isinstance(said.content, str):
        return (Text(said.content),) if said.content else ()
    return tuple(_part(block, said, features) for block in said.content)


def blocks(request: MessagesBody) -> list[PromptBlock]:
    """Returns the prompt's blocks in cache order: tools, system, messages."""
    told: list[PromptBlock] = []
    before = ""  # scaffolding that stands before the next block
    for tool in request.tools or ():
        written = json.dumps([tool.name, tool.description, tool.input_schema])
        told.append(_block((Text(written),), tool.cache_control))
    if request.system:
        system = [TextBlock(request.system)] if isinstance(request.system, str) else request.system
        before = "<|im_start|>system\n"
        for block in system:
            told.append(_block((Text(before, control=True), Text(block.text)), block.cache_control))
            before = ""
        before = "<|im_end|>\n"
    for said in request.messages:
        before += f"<|im_start|>{said.role}\n"
        for part, cached in _pieces(said):
            told.append(_block((Text(before, control=True), part), cached))
            before = ""
        before += "<|im_end|>\n" if said is not request.messages[-1] or said.role == "user" else ""
    ending = "<|im_start|>assistant\n" if request.messages[-1].role == "user" else ""
    return [*told, _block((Text(before + ending, control=True),), None)]


def _block(parts: Sequence[Part], cached: CacheControl | None) -> PromptBlock:
    return PromptBlock(tuple(token for token, _ in prompt_tokens(parts)), cached is not None)


def _pieces(said: ClaudeMessage) -> Iterator[tuple[Part, CacheControl | None]]:
    if isinstance(said.content, str):
        yield Text(said.content), None
        return
    for block in said.content:
        match block:
            case TextBlock(text, cached):
                yield Text(text), cached
            case ImageBlock(source, cached):
                yield Media("image", hashlib.sha256(source.data.encode()).hexdigest(), b""), cached


def _part(block: TextBlock | ImageBlock, said: ClaudeMessage, features: AnthropicFeatures) -> Text | Media:
    if isinstance(block, TextBlock):
        return Text(block.text)
    if not features.images or said.role != "user":
        raise Refused(400, f"messages: images are not supported in {said.role} messages of this model")
    try:
        data = base64.b64decode(block.source.data, validate=True)
    except binascii.Error:
        raise Refused(400, "messages: image source data is no valid base64") from None
    return Media("image", hashlib.sha256(data).hexdigest(), data)


def _check_sampling(request: MessagesBody, features: AnthropicFeatures) -> None:
    given = [name for name in ("temperature", "top_p", "top_k") if getattr(request, name) is not None]
    if features.sampling == "none" and given:
        raise Refused(400, f"`{given[0]}` is not supported for this model.")
    if features.sampling == "one" and {"temperature", "top_p"} <= set(given):
        raise Refused(400, "`temperature` and `top_p` cannot both be specified for this model. Please use only one.")


def _check_messages(request: MessagesBody, features: AnthropicFeatures) -> None:
    if not request.messages:
        raise Refused(400, "messages: at least one message is required")
    if request.messages[0].role != "user":
        raise Refused(400, 'messages: first message must use the "user" role')
    system = request.system if isinstance(request.system, list) else []
    for block in (*system, *(b for said in request.messages if isinstance(said.content, list) for b in said.content)):
        if isinstance(block, TextBlock) and not block.text:
            raise Refused(400, "messages: text content blocks must be non-empty")
        if isinstance(block, TextBlock) and not block.text.strip():
            raise Refused(400, "messages: text content blocks must contain non-whitespace text")
    last = request.messages[-1]
    for index, said in enumerate(request.messages):
        if not said.content and (said is not last or said.role != "assistant"):
            raise Refused(
                400,
                f"messages.{index}: all messages must have non-empty content except for the optional final assistant "
                "message",
            )
    if last.role != "assistant":
        return
    if not features.prefill:
        raise Refused(
            400,
            "This model does not support assistant message prefill. The conversation must end with a user message.",
        )
    ending = last.content if isinstance(last.content, str) else getattr(last.content[-1], "text", "") or ""
    if ending != ending.rstrip():
        raise Refused(400, "messages: final assistant content cannot end with trailing whitespace")


def _said(problem: str) -> str:
    """Rewrites msgspec's message as the provider's."""
    found = _PLACE.search(problem)
    place = re.sub(r"\[(\d+|\.\.\.)\]", r".\1", found[1]) if found is not None else ""
    if (unknown := _UNKNOWN.search(problem)) is not None:
        return f"{place}.{unknown[1]}: Extra inputs are not permitted".lstrip(".")
    if (missing := _MISSING.search(problem)) is not None:
        return f"{place}.{missing[1]}: Field required".lstrip(".")
    return f"{place}: {_PLACE.sub('', problem)}"
