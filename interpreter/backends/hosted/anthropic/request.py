"""Writes a `GenRequest` as the body of a Messages request, as the model's profile allows.

Parameters that the provider refuses are rewritten, or refused here with a remedy; nothing is left out unless the user
allowed it by name (`Anthropic(may_ignore=...)`).

Profiles are looked up by the model's name: the first pattern that fits counts. One can be given by hand
(`Anthropic(model, profile=...)`), for a model that is newer than this table, or is reached through a gateway. Unknown
names get a cautious profile: no prefill (the model is asked to continue) and no structured outputs (texts are validated
and asked again).

Source: the provider's pages on models, migration, structured outputs and prompt caching, as of autumn 2026.
"""

import json
import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any, Literal

from .....lang import checks
from .....lang.agents.dialogue import dialogue_of
from .....lang.chat_template import TemplateWarning
from .....lang.errors import CapabilityError, RequestError
from .....lang.prompt import Media, Part, Text
from .....lang.protocol import ConstraintSpec, GenRequest
from .....lang.sampling import SamplingParams
from .....lang.tool_calls import ToolCall
from .. import conversation
from ..constraint_params import ANSWER, WRAPPING_TOKENS, ConstraintParams, NotStrict, of_members, strict
from ..conversation import (
    Conversation,
    Message,
    PlainText,
    in_base64,
    media_type,
    read,
    read_beginning,
    sendable_text,
)
from ..places import Block, ToolResult
from ..stops import sendable
from . import tools
from .cache import LIFETIMES, Role


class Sampling(Enum):
    """The set of temperature, top_p and top_k that a model takes."""

    ALL = "temperature, top_p and top_k together"
    ONE = "temperature or top_p, not both; and top_k"
    NONE = "none of them"


class Thinking(Enum):
    """A model's thinking by default, and the handling of it in requests."""

    OFF = "the model answers at once"
    SWITCHED_OFF = "it would think first, so requests switch that off"
    ALWAYS = "it thinks first and cannot be kept from it; its thoughts count against max_tokens"


@dataclass(frozen=True, slots=True)
class AnthropicProfile:
    """The abilities of one model.

    Attributes:
        prefill: an assistant message at the end of a request is continued.
        structured: answers can be bound to a JSON Schema.
        images: takes images.
        sampling: parameters that choose among tokens.
        thinking: whether it thinks before it answers.
        cache_minimum: tokens of the shortest prefix that the provider stores.
        max_context: tokens of prompt and answer; None: not known.
        tools: takes `tools`. Models that always think have it off: they want their thoughts back with each result.

    Raises:
        ParameterError: a value of another type.
    """

    prefill: bool = False
    structured: bool = False
    images: bool = True
    sampling: Sampling = Sampling.NONE
    thinking: Thinking = Thinking.OFF
    cache_minimum: int = 1024
    max_context: int | None = None
    tools: bool = True

    def __post_init__(self) -> None:
        checks.record(self)


_THIRD = AnthropicProfile(prefill=True, sampling=Sampling.ALL, max_context=200_000)
_FOURTH = replace(_THIRD, structured=True, sampling=Sampling.ONE)
_SIXTH = AnthropicProfile(structured=True, sampling=Sampling.ONE, max_context=1_000_000)
_EIGHTH = replace(_SIXTH, sampling=Sampling.NONE)
_FIFTH_GENERATION = replace(_EIGHTH, thinking=Thinking.SWITCHED_OFF)

# Names come plain ("claude-opus-4-5"), dated, and with the prefixes and suffixes of clouds, so patterns are searched.
_TABLE: tuple[tuple[str, AnthropicProfile], ...] = (
    (r"claude-3(-5)?-haiku", replace(_THIRD, cache_minimum=2048)),
    (r"claude-3", _THIRD),
    (r"claude-opus-4-1(?!\d)", replace(_THIRD, sampling=Sampling.ONE)),
    (r"claude-sonnet-4-5(?!\d)", _FOURTH),
    (r"claude-(opus|haiku)-4-5(?!\d)", replace(_FOURTH, cache_minimum=4096)),
    (r"claude-sonnet-4-6(?!\d)", _SIXTH),
    (r"claude-opus-4-6(?!\d)", replace(_SIXTH, cache_minimum=4096)),
    (r"claude-opus-4-7(?!\d)", replace(_EIGHTH, cache_minimum=4096)),
    (r"claude-opus-4-8(?!\d)", _EIGHTH),
    (r"claude-(opus|sonnet)-4(-0)?(?!-?\d)|claude-(opus|sonnet)-4-20\d{6}", _THIRD),
    (r"claude-(opus|sonnet)-5-5(?!\d)", replace(_EIGHTH, thinking=Thinking.ALWAYS, tools=False)),
    (r"claude-haiku-5-5(?!\d)", _FIFTH_GENERATION),
    (r"claude-(opus|sonnet)-5(?!-?\d)", _FIFTH_GENERATION),
    (
        r"claude-(fable|mythos)",
        AnthropicProfile(thinking=Thinking.ALWAYS, cache_minimum=2048, max_context=1_000_000, tools=False),
    ),
    (r"claude", AnthropicProfile()),
)

# Models of others that speak this dialect take what it has always had.
_OTHERS = AnthropicProfile(sampling=Sampling.ALL)


def profile_of(model: str) -> AnthropicProfile:
    """Returns the profile of a model by its name."""
    return next((profile for pattern, profile in _TABLE if re.search(pattern, model)), _OTHERS)


_DEFINITIONS = ("$defs", "definitions")


@lru_cache(maxsize=512)
def lower(constraint: ConstraintSpec, profile: AnthropicProfile) -> ConstraintParams | None:
    """Returns the fields of a request; None for a constraint that is not enforced: expressions, grammars, and schemas
    with bounds, patterns, formats, optional members, or recursion."""
    if not profile.structured or constraint.engine not in (None, "auto"):
        return None
    match constraint.kind:
        case "json_schema":
            try:
                schema, wrapped = strict(constraint.source, exact=True)
            except NotStrict:
                return None
            return None if _recursive(schema) else ConstraintParams(_format(schema), "json" if wrapped else "")
        case "choices":
            member = {"type": "string", "enum": json.loads(constraint.source)}
            return ConstraintParams(_format(of_members({ANSWER: member})), "text")
        case "regex" | "lark" | "gbnf" | "tools" | "expression":
            return None


def _format(schema: Any) -> dict[str, Any]:  # Any: JSON
    return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}


def _recursive(schema: Any) -> bool:  # Any: JSON
    """Returns whether a definition refers to itself."""
    leads = {
        f"#/{group}/{name}": _references(definition)
        for group in _DEFINITIONS
        for name, definition in schema.get(group, {}).items()
    }
    for start in leads:
        seen: set[str] = set()
        ahead = list(leads[start])
        while ahead:
            reference = ahead.pop()
            if reference == start:
                return True
            if reference not in seen:
                seen.add(reference)
                ahead.extend(leads.get(reference, ()))
    return False


def _references(schema: Any) -> set[str]:  # Any: JSON
    match schema:
        case {"$ref": str(reference)}:
            return {reference}
        case dict():
            return set().union(*map(_references, schema.values()))
        case list():
            return set().union(*map(_references, schema))
        case _:
            return set()


# Parameters that choose among tokens and that programs can do without: they may be left out when the user says so.
IGNORABLE = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logit_bias", "seed",
)  # fmt: skip

_TAKEN = frozenset({"temperature", "top_p", "top_k"})
# What to write instead of others; every parameter that is not here is refused with "remove it".
_INSTEAD = {
    "min_tokens": "remove it and ask for a long answer in words",
    "stop_token_ids": "write stop= with the strings that may end the text",
    "stop_regex": "write stop= with the strings that may end the text",
    "min_p": "remove it, or use top_p",
    "logit_bias": "remove it, or use select() or choices= for a fixed set of answers",
    "seed": "remove it; the provider's answers cannot be repeated",
}


@dataclass(frozen=True, slots=True)
class Composed:
    """A request as it is sent, with the data to read its answer.

    Attributes:
        arguments: of the SDK's `messages.create`, without its messages. What not all versions of the SDK name is in
            `extra_body`.
        blocks: the messages and the system turns.
        lead: white space that the program has written and the request leaves out; the answer may repeat it.
        stops: strings that end the text here, as the provider does not take them.
        wrapped: the answer is a member of a JSON object.
        offers_tools: the answer may have calls of tools.
        one_call: one at most.
    """

    arguments: dict[str, Any]  # Any: JSON
    blocks: list[Block]
    lead: str
    stops: tuple[str, ...]
    wrapped: Literal["", "text", "json"]
    offers_tools: bool = False
    one_call: bool = False


class Composer:
    """Writes requests for one model.

    Args:
        name: of the backend, for messages.
        may_ignore: parameters that may be left out where the model does not take them.
    """

    def __init__(self, name: str, model: str, profile: AnthropicProfile, may_ignore: Collection[str]) -> None:
        wanted = f"some of {', '.join(IGNORABLE)}"
        given = checks.members("may_ignore", may_ignore, len(IGNORABLE), wanted)
        for parameter in given:
            checks.one_of("may_ignore", parameter, IGNORABLE)
        self._name = name
        self._model = model
        self._profile = profile
        self._may_ignore = frozenset(given)
        self._warned: set[str] = set()

    def compose(self, request: GenRequest) -> Composed:
        """Writes a request. Raises CapabilityError for unsupported features, RequestError for an unsendable prompt."""
        sampling = request.sampling
        if sampling.n > 1:
            raise CapabilityError(f"{self._name} gives one continuation a request; ask {sampling.n} times, or fork")
        dialogue = dialogue_of(request)
        blocks, lead = self._said(request) if dialogue is None else (tools.blocks(dialogue, self._name), "")
        if not any(block.role != "system" for block in blocks):
            raise RequestError(f"{self._name} needs something to answer to; write user(...) before assistant(gen(...))")
        lowered = self._lowered(request.constraint)
        wrapped = lowered.wrapped if lowered is not None else ""
        sent, here = ((), sampling.stop) if wrapped else sendable(sampling.stop, lead)
        extra: dict[str, Any] = self._choosing(sampling)
        if self._profile.thinking is Thinking.SWITCHED_OFF:
            extra["thinking"] = {"type": "disabled"}
        if lowered is not None:
            extra |= lowered.fields
        most = sampling.max_tokens + (WRAPPING_TOKENS if wrapped else 0)
        arguments: dict[str, Any] = {"model": self._model, "max_tokens": most, "extra_body": extra}
        if dialogue is not None:
            arguments |= tools.fields(dialogue)
        if sent:
            arguments["stop_sequences"] = list(sent)
        one_call = dialogue is not None and not dialogue.choice.parallel
        return Composed(arguments, blocks, lead, here, wrapped, dialogue is not None, one_call)

    def place(self, parts: Sequence[Part]) -> list[Block]:
        """Returns the blocks of a prompt without a request: the place where a program forks.

        Raises:
            CapabilityError: as for a request.
        """
        messages, _ = self._messages(read_beginning(parts, self._name), prefills=True)
        return self._blocks(messages)

    def check_lifetime(self, seconds: float) -> None:
        """Warns of a cache point that asks for more than the provider's longest time."""
        longest = LIFETIMES[-1][0]
        if seconds > longest:
            self._warn(
                f"{self._name} keeps a prefix for at most {longest:g} s after its last use, and cache_point(ttl="
                f"{seconds:g}) asks for more; write ttl={longest:g}",
                UserWarning,
            )

    # -------------------------------------------------------------------------------- messages

    def _said(self, request: GenRequest) -> tuple[list[Block], str]:
        """Returns the blocks of a request's prompt, and the white space that the answer may repeat."""
        said = read(request.prompt, self._name)
        if isinstance(said, PlainText):
            self._warn(conversation.continuation_warning(self._name))
        prefills = self._profile.prefill and request.constraint is None and isinstance(said, Conversation)
        messages, lead = self._messages(said, prefills)
        return self._blocks(messages), lead

    def _messages(self, said: Conversation | PlainText, prefills: bool) -> tuple[tuple[Message, ...], str]:
        """Returns the messages, and the white space that the answer may repeat."""
        if isinstance(said, PlainText):
            return conversation.ask_to_continue_text(said), ""
        *_, last = said.begun or (None,)
        if not isinstance(last, Text):
            return conversation.ask_to_continue_turn(said), ""
        shown = last.text.rstrip()
        lead = last.text[len(shown) :]
        before = said.begun[:-1]
        if not shown and not before:
            return said.turns, lead
        if prefills:
            kept = (*before, Text(shown)) if shown else before
            return (*said.turns, Message("assistant", kept)), lead
        return conversation.ask_to_continue_turn(said), ""

    def _blocks(self, messages: Sequence[Message]) -> list[Block]:
        """Returns the blocks, system turns first. Blank texts, which the provider refuses, are left out. An answer at
        the end is not closed: the model continues it."""
        system: list[Block] = []
        others: list[Block] = []
        for index, message in enumerate(messages):
            role = self._role(message)
            if role == "system" and others:
                self._warn(
                    f"{self._name} shows its model all system turns before the conversation; here one stands after "
                    "other turns and is moved to the front"
                )
            told = [part for part in message.content if isinstance(part, Media) or part.text.strip()]
            into = system if role == "system" else others
            for number, part in enumerate(told):
                content = part if isinstance(part, Media) else sendable_text(part.text, self._name)
                closes = number == len(told) - 1 and not (role == "assistant" and index == len(messages) - 1)
                into.append(Block(role, content, opens=number == 0, closes=closes))
        return system + others

    def _role(self, message: Message) -> Role:
        match message.role:
            case "system" | "developer":
                if any(isinstance(part, Media) for part in message.content):
                    raise CapabilityError(f"{self._name} takes no images in system turns; write them in user(...)")
                return "system"
            case "user":
                return "user"
            case "assistant":
                return "assistant"
            case role:
                raise CapabilityError(
                    f"{self._name} has no {role} turns in this conversation; write what the tool said in user(...)"
                )

    # -------------------------------------------------------------------------------- parameters

    def _choosing(self, sampling: SamplingParams) -> dict[str, Any]:
        """Returns temperature, top_p and top_k as far as they are given.

        Raises:
            CapabilityError: a parameter that the model does not take.
        """
        default = type(sampling)()
        given = {name for name in sampling.__struct_fields__ if getattr(sampling, name) != getattr(default, name)}
        given -= {"max_tokens", "n", "stop"}
        for name in sorted(given - _TAKEN):
            self._without(name, sampling, _INSTEAD.get(name, "remove it"))
        taken = sorted(given & _TAKEN)
        match self._profile.sampling:
            case Sampling.NONE:
                for name in taken:
                    self._without(name, sampling, "remove it; the model chooses its tokens in its own way")
                return {}
            case Sampling.ONE if "temperature" in taken and "top_p" in taken:
                self._without("top_p", sampling, "give temperature or top_p, not both")
                taken.remove("top_p")
        if "temperature" in taken and sampling.temperature > 1:
            self._without("temperature", sampling, "write 0 to 1")
            taken.remove("temperature")
        return {name: getattr(sampling, name) for name in taken}

    def _without(self, name: str, sampling: SamplingParams, instead: str) -> None:
        """Leaves a parameter out where the user allows it."""
        if name in self._may_ignore:
            return
        allow = f", or allow it to be left out with Anthropic(may_ignore=[{name!r}])" if name in IGNORABLE else ""
        raise CapabilityError(f"{self._name} does not take {name}={getattr(sampling, name)!r}; {instead}{allow}")

    def _lowered(self, constraint: ConstraintSpec | None) -> ConstraintParams | None:
        """Returns a constraint's fields. Raises CapabilityError for one that the model does not enforce."""
        if constraint is None:
            return None
        lowered = lower(constraint, self._profile)
        if lowered is None:
            raise CapabilityError(
                f"{self._name} does not enforce this {constraint.kind}: {constraint.source[:120]!r}; write a simpler "
                "one, or have the text looked at and asked for again"
            )
        return lowered

    def _warn(self, message: str, kind: type[Warning] = TemplateWarning) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, kind, stacklevel=2)


def payload(blocks: Sequence[Block], name: str) -> dict[str, Any]:
    """Writes `system` and `messages` of a request; consecutive turns of one role are one message.

    Raises:
        CapabilityError: an image of a kind that the provider does not take.
    """
    system: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    for block in blocks:
        written = _written(block, name)
        if block.role == "system":
            system.append(written)
        elif messages and messages[-1]["role"] == block.role:
            messages[-1]["content"].append(written)
        else:
            messages.append({"role": block.role, "content": [written]})
    return {"messages": messages} | ({"system": system} if system else {})


def _written(block: Block, name: str) -> dict[str, Any]:
    match block.content:
        case str(text):
            written: dict[str, Any] = {"type": "text", "text": text}
        case Media() as part:
            source = {"type": "base64", "media_type": media_type(part, name), "data": in_base64(part)}
            written = {"type": "image", "source": source}
        case ToolCall(called, arguments, number):
            written = {"type": "tool_use", "id": number, "name": called, "input": json.loads(arguments or "{}")}
        case ToolResult(number, text):
            written = {"type": "tool_result", "tool_use_id": number} | ({"content": text} if text.strip() else {})
    if block.cached:
        longer = {"ttl": block.cached} if block.cached != "5m" else {}  # that is what it means without
        written["cache_control"] = {"type": "ephemeral", **longer}
    return written
