"""Compares a conversation with an earlier one: the first place at which its prompt changed, and the tokens it cost.

    tools ─▶ system ─▶ messages        blocks by their digests: which part changed first, in the order of the prompt
    ══════════════▷ shared             tokens that both prompts begin with, counted by the backend
                   ░░░░░░░░ missed     the rest of the earlier prompt, which lies in the cache and is of no use

Both prompts are tokenized for that, so it is done only for requests that ask.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import msgspec

from ...lang.cache_report import CacheCause
from ...lang.protocol import Backend, Locate, Locating, Placed, Usage
from ..conversation import Dialogue
from ..http import Asked
from .exchanges import Exchange, digests_of_messages, digests_of_tools


class Change(Enum):
    """The first part of a prompt that differs from an earlier one."""

    NONE = auto()  # it goes on where the earlier one ended
    MODEL = auto()  # a program, in place of the model or of another program
    TOOLS = auto()
    SYSTEM = auto()
    MESSAGES = auto()
    OPTIONS = auto()  # variables of the chat template: thinking, or an effort
    UNKNOWN = auto()  # no earlier request of this salt has that id
    UNCOMPARED = auto()


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prompt next to an earlier one.

    Attributes:
        shared: tokens that both begin with.
        missed: tokens of the earlier prompt after these.
        keeps: the backend keeps prefixes at all.
    """

    change: Change
    shared: int = 0
    missed: int = 0
    keeps: bool = True

    @property
    def counted(self) -> bool:
        """True if something changed, so that `missed` tokens of the earlier prompt were of no use."""
        return self.change in (Change.MODEL, Change.TOOLS, Change.SYSTEM, Change.MESSAGES)

    def lost(self, usage: Usage) -> CacheCause | None:
        """Returns why less than the shared tokens was found in the cache; None where all of them were.

        The last token of a prompt is always computed.
        """
        if usage.cached_tokens >= min(self.shared, usage.prompt_tokens) - 1:
            return None
        return CacheCause.EVICTED if self.keeps else CacheCause.OFF


class PlacedFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Says which of several engines computed a request, and why that one. It says nothing of the load of other callers.

    Attributes:
        replica: its number, from 0 on, as in `/metrics`.
        reason: in words.
        cached_tokens: of the prompt, were cached there when the engine was chosen.
        moved: how often the request went elsewhere because its engine was lost.
    """

    replica: int
    reason: str
    cached_tokens: int
    moved: int = 0


def placed_facts(placed: Placed | None) -> PlacedFacts | msgspec.UnsetType:
    """Writes the place of a request; nothing where there is one engine."""
    if placed is None:
        return msgspec.UNSET
    return PlacedFacts(placed.replica, placed.kind.words, placed.cached, placed.moved)


async def compare(asked: Asked[Any], dialogue: Dialogue, name: str, earlier: str | None) -> Comparison | None:
    """Keeps a conversation under the id of its answer, and compares it with an earlier one.

    Args:
        name: the id of the answer.
        earlier: the id of an earlier answer; None compares nothing.

    Returns:
        None where nothing was to be compared.
    """
    front, salt = asked.front, dialogue.request.origin.salt
    if front.workers > 1:
        if earlier is None:
            return None
        asked.warnings.append(
            f"diagnostics: {front.workers} processes serve this address, and none knows the requests of the others; "
            "start umbel serve with --http-workers 1 to compare requests"
        )
        return Comparison(Change.UNCOMPARED)
    before = None if earlier is None else front.exchanges.find(salt, earlier)
    exchange = _exchange(dialogue, front.model(asked.body.model).program)
    front.exchanges.keep(salt, name, exchange)
    if earlier is None:
        return None
    if before is None:
        return Comparison(Change.UNKNOWN)
    if not front.exchanges.takes(exchange) or before.program:
        return Comparison(Change.MODEL if before.program != exchange.program else Change.UNCOMPARED)
    with front.open():
        return await _compared(front.backend, dialogue, before, exchange)


async def _compared(backend: Backend, dialogue: Dialogue, before: Exchange, exchange: Exchange) -> Comparison:
    request = dialogue.request
    others = () if exchange.program else (exchange.prompt,)
    assert isinstance(backend, Locating), "a runtime knows its tokens"
    located = await backend.locate(Locate(f"{request.id}-compare", before.prompt, (), others, request.origin))
    shared = sum(located.shared)
    change = _change(before, exchange)
    if change is not Change.MODEL and shared >= located.tokens - 1:  # what changed is not in the prompt
        change = Change.NONE
    return Comparison(change, shared, located.tokens - shared, backend.capabilities.prefix_cache)


def _exchange(dialogue: Dialogue, program: str) -> Exchange:
    question, conversation = dialogue.question, dialogue.conversation
    leading = next((n for n, each in enumerate(question.messages) if each.role != "system"), len(question.messages))
    tools = [end for end in conversation.tool_ends if end is not None]
    system = [end for (message, _), end in conversation.ends.items() if message < leading]
    return Exchange(
        program,
        digests_of_tools(question.tools),
        digests_of_messages(question.messages[:leading]),
        digests_of_messages(question.messages[leading:]),
        dict(question.options),
        not tools or not system or tools[0] < max(system),
        dialogue.request.prompt,
    )


def _change(before: Exchange, now: Exchange) -> Change:
    """Returns the first part that differs, in the order of the prompt. Messages may have been added."""
    if before.program != now.program:
        return Change.MODEL
    parts = [(Change.TOOLS, before.tools != now.tools), (Change.SYSTEM, before.system != now.system)]
    shown_first = (now if now.tools else before).tools_first
    for change, differs in parts if shown_first else reversed(parts):
        if differs:
            return change
    if any(one != other for one, other in zip(before.messages, now.messages, strict=False)):
        return Change.MESSAGES
    return Change.OPTIONS if before.options != now.options else Change.NONE
