"""Requests of the Anthropic dialect, as types: what the provider takes, and within which bounds."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ....lang import checks

Schema = dict[str, Any]  # Any: JSON Schema
Text = Annotated[str, Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class AnthropicFeatures:
    """What a model of the Anthropic dialect can do.

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


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    """Base of everything a client sends."""


class CacheControl(_Body):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class TextBlock(_Body, tag="text"):
    text: str
    cache_control: CacheControl | None = None


class ImageSource(_Body):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class ImageBlock(_Body, tag="image"):
    source: ImageSource
    cache_control: CacheControl | None = None


class ClaudeMessage(_Body):
    role: Literal["user", "assistant"]
    content: str | list[TextBlock | ImageBlock]


class Tool(_Body):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    input_schema: Schema
    description: str = ""
    type: Literal["custom"] = "custom"
    cache_control: CacheControl | None = None


class ToolChoice(_Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(_Body):
    type: Literal["json_schema"]
    schema: Schema


class OutputConfig(_Body):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Thinking(_Body):
    type: Literal["disabled"]


class Metadata(_Body):
    user_id: str | None = None


class MessagesBody(_Body, kw_only=True):
    """POST /v1/messages"""

    model: str
    messages: list[ClaudeMessage]
    max_tokens: Annotated[int, Meta(ge=0)]  # 0 stores the prompt and says nothing
    system: str | list[TextBlock] | None = None
    stop_sequences: list[Text] | None = None
    stream: bool = False
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
