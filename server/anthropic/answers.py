"""Writes answers of the Anthropic dialect, streamed and whole by one code.

    pieces of the answer ─▶ AnswerBlocks ─▶ events          a stream sends them
                                         └▶ .content        a whole answer is made of it

One block is open at a time, and its index is its place in the content.
"""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from ...lang.cache_report import CacheCause
from ...lang.protocol import Placed, Usage
from ..conversation import complete_members
from ..diagnosis.comparison import Change, Comparison, PlacedFacts, placed_facts
from ..http import sse
from .fields import DirectCaller

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
Event = dict[str, Any]  # Any: JSON values
PING = sse({"type": "ping"}, "ping")


class TextAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A text of the answer."""

    text: str
    citations: None = None


class ThinkingAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """The model's reasoning."""

    thinking: str
    signature: str


class ToolUseAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call of a tool. The input of a call that was cut has what was complete of it."""

    id: str
    name: str
    input: dict[str, Any]  # Any: JSON values
    caller: DirectCaller = DirectCaller()


AnswerBlock = TextAnswer | ThinkingAnswer | ToolUseAnswer


class CacheCreation(msgspec.Struct, frozen=True):
    """Tokens that marks have made the cache keep, by how long."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class ThinkingDetails(msgspec.Struct, frozen=True):
    """Parts of the generated tokens."""

    thinking_tokens: int = 0


class ReusedTokens(msgspec.Struct, frozen=True):
    """Further facts.

    Attributes:
        cached_tokens: were reused from the cache by whatever right, marked or not.
        cache_cause: why less was found than this prompt shares with the one of `diagnostics`: "evicted", or "off" for a
            server that keeps nothing; left out otherwise.
        placed: the engine that computed the answer, of several, where `diagnostics` was asked for: each has a cache of
            its own. Known at the end.
    """

    cached_tokens: int = 0
    cache_cause: CacheCause | msgspec.UnsetType = msgspec.UNSET
    placed: PlacedFacts | msgspec.UnsetType = msgspec.UNSET


class MessageUsage(msgspec.Struct, frozen=True):
    """Tokens of one request. `input_tokens` are those of the prompt that marks have neither written nor read."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    cache_creation: CacheCreation = CacheCreation()
    output_tokens_details: ThinkingDetails = ThinkingDetails()
    service_tier: Literal["standard"] = "standard"
    umbel: ReusedTokens = ReusedTokens()


def message_usage(
    usage: Usage, thinking_tokens: int, comparison: Comparison | None = None, placed: Placed | None = None
) -> MessageUsage:
    """Writes usage in Anthropic's shape. `placed`: told where there is a comparison."""
    cause = None if comparison is None else comparison.lost(usage)
    told = None if comparison is None else placed
    read, written, longer = usage.cache_read_tokens, usage.cache_write_tokens, usage.long_write_tokens
    return MessageUsage(
        usage.prompt_tokens - read - written,
        usage.completion_tokens,
        written,
        read,
        CacheCreation(written - longer, longer),
        output_tokens_details=ThinkingDetails(thinking_tokens),
        umbel=ReusedTokens(usage.cached_tokens, cause or msgspec.UNSET, placed_facts(told)),
    )


MissType = Literal[
    "model_changed",
    "system_changed",
    "tools_changed",
    "messages_changed",
    "previous_message_not_found",
    "unavailable",
]
_MISS_TYPES: dict[Change, MissType] = {
    Change.MODEL: "model_changed",
    Change.SYSTEM: "system_changed",
    Change.TOOLS: "tools_changed",
    Change.MESSAGES: "messages_changed",
    Change.UNKNOWN: "previous_message_not_found",
    Change.OPTIONS: "unavailable",
    Change.UNCOMPARED: "unavailable",
}


class MissReason(msgspec.Struct, frozen=True):
    """The first part of the prompt that changed, and the tokens of the earlier prompt that were of no use for it."""

    type: MissType
    cache_missed_input_tokens: int | msgspec.UnsetType = msgspec.UNSET


class Diagnostics(msgspec.Struct, frozen=True):
    """Says why the prompt of an earlier message could not be reused."""

    cache_miss_reason: MissReason


def diagnostics_of(comparison: Comparison | None) -> Diagnostics | None:
    """Writes a comparison in Anthropic's shape; None where nothing was asked or nothing changed."""
    if comparison is None or comparison.change is Change.NONE:
        return None
    missed = comparison.missed if comparison.counted else msgspec.UNSET
    return Diagnostics(MissReason(_MISS_TYPES[comparison.change], missed))


class AppliedEdits(msgspec.Struct, frozen=True):
    """Edits of the context that were made."""

    applied_edits: tuple[()] = ()


class MessageAnswer(msgspec.Struct, frozen=True):
    """A whole answer, or the beginning of a streamed one."""

    id: str
    model: str
    content: list[AnswerBlock]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    stop_details: None = None
    container: None = None
    diagnostics: Diagnostics | None = None
    context_management: AppliedEdits | None = None


class AnswerBlocks:
    """Makes blocks of the pieces of an answer. Each method returns the events that its piece adds to a stream.

    Args:
        sign: the signature of a thinking text.
        call_id: the beginning of the ids of calls.
        shows_thinking: False leaves out the text of thinking; its signature stays.
    """

    def __init__(self, sign: Callable[[str], str], call_id: str, *, shows_thinking: bool = True) -> None:
        self.content: list[AnswerBlock] = []  # blocks that have ended
        self._sign = sign
        self._call_id = call_id
        self._shows_thinking = shows_thinking
        self._open: Literal["text", "thinking", "tool_use"] | None = None
        self._pieces: list[str] = []  # of the block that is open
        self._name = ""  # of its tool

    def think(self, text: str) -> list[Event]:
        events = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        self._pieces.append(text)
        if text and self._shows_thinking:
            events.append(self._delta({"type": "thinking_delta", "thinking": text}))
        return events

    def say(self, text: str) -> list[Event]:
        events = self._begin("text", {"type": "text", "text": "", "citations": None})
        self._pieces.append(text)
        return [*events, self._delta({"type": "text_delta", "text": text})]

    def begin_call(self, name: str) -> list[Event]:
        ended = self.end()
        self._name = name
        block = {"type": "tool_use", "id": self._next_call_id(), "name": name, "input": {}, "caller": DirectCaller()}
        return [*ended, *self._begin("tool_use", block)]

    def add_arguments(self, text: str) -> list[Event]:
        assert self._open == "tool_use", "arguments come after the call's name"
        self._pieces.append(text)
        return [self._delta({"type": "input_json_delta", "partial_json": text})]

    def end(self) -> list[Event]:
        """Ends the block that is open, if one is."""
        text, events = "".join(self._pieces), list[Event]()
        match self._open:
            case None:
                return []
            case "text":
                block: AnswerBlock = TextAnswer(text)
            case "thinking":
                block = ThinkingAnswer(text if self._shows_thinking else "", self._sign(text))
                events.append(self._delta({"type": "signature_delta", "signature": block.signature}))
            case "tool_use":
                block = ToolUseAnswer(self._next_call_id(), self._name, complete_members(text))
        events.append({"type": "content_block_stop", "index": len(self.content)})
        self.content.append(block)
        self._open, self._pieces = None, []
        return events

    def _begin(self, kind: Literal["text", "thinking", "tool_use"], block: Event) -> list[Event]:
        """Opens a block, unless one of the kind is open: neighbouring pieces of a kind are one block."""
        if self._open == kind:
            return []
        ended = self.end()
        self._open = kind
        return [*ended, {"type": "content_block_start", "index": len(self.content), "content_block": block}]

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": len(self.content), "delta": delta}

    def _next_call_id(self) -> str:
        return f"{self._call_id}_{sum(isinstance(block, ToolUseAnswer) for block in self.content)}"
