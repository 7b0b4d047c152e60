"""Holds the bodies of the Anthropic dialect: messages of blocks, tools, and how the answer is generated."""

from typing import Annotated, Any, Literal

import msgspec

from ..bodies import Body, Json, Label, Name, Salt, Seed, Stops, TokenCount, ToolName, TopP, UmbelBody
from ..limits import MAX_MESSAGES, MAX_TOOLS
from ..marks import CacheControl

NOT_OFFERED = {
    "type": (
        "this kind is not offered here; blocks are text, image, tool_use, tool_result, thinking and redacted_thinking, "
        "tools are your own (type custom)"
    ),
    "citations": "citations are not offered; leave them out",
    "role": "write user, assistant or system",
    "container": "containers are not offered; leave it out",
    "mcp_servers": "the server calls no other server; offer their tools as your own",
    "inference_geo": "the model runs on this machine; leave it out",
    "service_tier": "there is one tier; leave it out",
    "speed": "there is one speed; leave it out",
    "defer_loading": "all tools are shown to the model; leave it out",
    "allowed_callers": "only the model calls tools; leave it out",
    "input_examples": "examples are not shown to the model; write them into the tool's description",
    "toolset_name": "toolsets are not offered; leave it out",
    "transformations": "pictures are seen as they are; leave it out",
}


class TextContent(Body, frozen=True, tag_field="type", tag="text"):
    """A text. It is never read as special tokens."""

    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[tuple[Any, ...], msgspec.Meta(max_length=0)] | None = None  # Any: there is none


class Base64Source(Body, frozen=True, tag_field="type", tag="base64"):
    """The bytes of a picture."""

    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: Annotated[bytes, msgspec.Meta(min_length=1)]


class UrlSource(Body, frozen=True, tag_field="type", tag="url"):
    """A picture on another server, which is refused: nothing is fetched."""

    url: str


class ImageContent(Body, frozen=True, tag_field="type", tag="image"):
    """A picture."""

    source: Base64Source | UrlSource
    cache_control: CacheControl | None = None
    transformations: None = None


class DirectCaller(Body, frozen=True, tag_field="type", tag="direct"):
    """Says that the model itself made a call."""


class ToolUseContent(Body, frozen=True, tag_field="type", tag="tool_use"):
    """A call that the model made."""

    id: Name
    name: Name
    input: Json
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None
    toolset_name: None = None


class ToolResultContent(Body, frozen=True, tag_field="type", tag="tool_result"):
    """The result of a call.

    Attributes:
        is_error: writes so before the content.
    """

    tool_use_id: Name
    content: str | Annotated[tuple[TextContent | ImageContent, ...], msgspec.Meta(max_length=MAX_MESSAGES)] | None = (
        None
    )
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


class ThinkingContent(Body, frozen=True, tag_field="type", tag="thinking"):
    """The model's reasoning in an earlier turn. The chat template decides whether it is shown to the model again.

    Attributes:
        signature: any: the text may come from another server.
    """

    thinking: str
    signature: str = ""


class RedactedContent(Body, frozen=True, tag_field="type", tag="redacted_thinking"):
    """Reasoning that only its own server can read. It is left out of the prompt."""

    data: str


ContentBlock = TextContent | ImageContent | ToolUseContent | ToolResultContent | ThinkingContent | RedactedContent
Blocks = Annotated[tuple[ContentBlock, ...], msgspec.Meta(max_length=MAX_MESSAGES)]


class TurnMessage(Body, frozen=True):
    """One message. Neighbours of one role are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class ClientTool(Body, frozen=True):
    """A tool of the caller. Its arguments always fit the schema; `strict` adds nothing to that.

    Attributes:
        eager_input_streaming: has no effect: arguments are always streamed as they are generated.
    """

    name: ToolName
    input_schema: Json
    description: str = ""
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: tuple[Literal["direct"], ...] | None = None
    input_examples: Annotated[tuple[Json, ...], msgspec.Meta(max_length=0)] | None = None


class ChooseAuto(Body, frozen=True, tag_field="type", tag="auto"):
    """The model may call tools."""

    disable_parallel_tool_use: bool = False


class ChooseAny(Body, frozen=True, tag_field="type", tag="any"):
    """The model calls a tool."""

    disable_parallel_tool_use: bool = False


class ChooseTool(Body, frozen=True, tag_field="type", tag="tool"):
    """The model calls this tool, once."""

    name: Name
    disable_parallel_tool_use: bool = False


class ChooseNone(Body, frozen=True, tag_field="type", tag="none"):
    """The model calls no tool."""


Display = Literal["summarized", "omitted"]


class ThinkEnabled(Body, frozen=True, tag_field="type", tag="enabled"):
    """The model thinks before it answers, where its chat template has a switch for that.

    Attributes:
        budget_tokens: a wish. Thinking counts towards max_tokens, which limits both.
        display: "omitted" gives the signature without the text.
    """

    budget_tokens: Annotated[int, msgspec.Meta(ge=1024, le=1 << 20)]
    display: Display | None = None


class ThinkAdaptive(Body, frozen=True, tag_field="type", tag="adaptive"):
    """The model decides whether it thinks."""

    display: Display | None = None


class ThinkDisabled(Body, frozen=True, tag_field="type", tag="disabled"):
    """The model does not think, where its chat template has a switch for that."""


class ThinkBetweenTools(Body, frozen=True, tag_field="type", tag="between_tools"):
    """As adaptive: where thinking stands among calls is up to the model."""


class OutputFormat(Body, frozen=True):
    """The answer is JSON of this schema."""

    type: Literal["json_schema"]
    schema: Json


class OutputConfig(Body, frozen=True):
    """Says how much work an answer is worth, and its format.

    Attributes:
        effort: is given to chat templates that know of it.
        format: of the text; calls of tools have their own schemas.
    """

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextManagement(Body, frozen=True):
    """Edits of a long context. They are allowed to be left undone, and are."""

    edits: tuple[Json, ...] = ()


class RequestMetadata(Body, frozen=True):
    """Has no effect: nothing is kept of a user."""

    user_id: Label | None = None


class DiagnosticsWish(Body, frozen=True):
    """Asks why the prompt of an earlier message could not be reused; null keeps this one for later questions."""

    previous_message_id: Label | None = None


class MessageFields(UmbelBody, frozen=True):
    """Fields that make the prompt, and those that only some clients send.

    Next to Anthropic's own: temperature, top_p, top_k and seed as of `gen()`, and `cache_salt`, a namespace of the
    prefix cache.
    """

    told_as = {"prompt": "messages", "json_schema": "output_config.format", "stop": "stop_sequences"}

    model: Name
    messages: Annotated[tuple[TurnMessage, ...], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[tuple[TextContent, ...], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[tuple[ClientTool, ...], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ChooseAuto | ChooseAny | ChooseTool | ChooseNone | None = None
    thinking: ThinkEnabled | ThinkAdaptive | ThinkDisabled | ThinkBetweenTools | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    seed: Seed | None = None
    cache_salt: Salt | None = None
    user_profile_id: Label | None = None
    workspace_id: Label | None = None
    # At their defaults only.
    speed: Literal["standard"] | None = None
    inference_geo: None = None
    container: None = None
    mcp_servers: Annotated[tuple[Json, ...], msgspec.Meta(max_length=0)] | None = None

    @property
    def schema(self) -> Json | None:
        """The JSON schema of the answer's text."""
        given = self.output_config
        return None if given is None or given.format is None else given.format.schema


class MessagesBody(MessageFields, frozen=True, kw_only=True):
    """Asks for the next message.

    Attributes:
        max_tokens: of the answer, thinking included; 0 computes the prompt and generates nothing.
        stop_sequences: end the answer, and are not part of it.
    """

    max_tokens: TokenCount
    stop_sequences: Stops | None = None
    stream: bool | None = None
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: DiagnosticsWish | None = None


class CountBody(MessageFields, frozen=True):
    """Asks how many tokens a prompt has. Fields that do not make the prompt are accepted and change nothing."""
