"""Marks of explicit caching in the bodies of requests.

A mark stands on a block: a tool, or a text or picture of a message. It keeps the prompt up to the block's end; the
engine finds how many of its tokens stay the same whatever follows (`lang/caching.py`).

    cache_control             of a block, a tool or the body; 5m or 1h; looks back 20 blocks
    prompt_cache_breakpoint   of a block, with prompt_cache_options; 30m; looks back to the beginning
"""

from typing import Literal

from ..lang.caching import COUNTED_MARKS, LOOK_BACK, CacheMark, Caching
from ..lang.conversations.messages import BlockKey, Conversation
from .bodies import Body, Label, wrong

TOOLS = -1  # in a BlockKey, in place of a message's number: the block is a tool
CONTROL_TTLS = {"5m": 300.0, "1h": 3_600.0}  # of cache_control, in seconds
BREAKPOINT_TTL = 1_800.0  # of prompt_cache_breakpoint


class CacheControl(Body, frozen=True):
    """A mark that keeps the prompt up to its block.

    Attributes:
        scope: a label of coding agents, without effect: what a mark keeps is of the request's salt.
    """

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"
    scope: Label | None = None

    @property
    def seconds(self) -> float:
        return CONTROL_TTLS[self.ttl]


class Breakpoint(Body, frozen=True):
    """A mark that keeps the prompt up to its block for 30 minutes."""

    mode: Literal["explicit"] = "explicit"
    ttl: Literal["30m"] = "30m"


class CacheOptions(Body, frozen=True):
    """The use of breakpoints: "implicit" puts one more at the end of the prompt, "explicit" does not."""

    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m"] = "30m"


class Marks:
    """The blocks of a body, and the marks on them.

    Attributes:
        blocks: each with the seconds of its mark, or None.
    """

    def __init__(self) -> None:
        self.blocks: list[tuple[BlockKey, float | None]] = []
        self._controls = self._breakpoints = 0

    def add(self, key: BlockKey, control: CacheControl | None, point: Breakpoint | None = None) -> None:
        """Notes a block. Raises HttpError where it has marks of both kinds."""
        self._controls += control is not None
        self._breakpoints += point is not None
        if self._controls and self._breakpoints:
            raise wrong("cache_control", "one request has marks of one kind; leave prompt_cache_breakpoint out")
        seconds = control.seconds if control else BREAKPOINT_TTL if point else None
        self.blocks.append((key, seconds))

    def last(self, conversation: Conversation) -> int:
        """Returns the place in the prompt at which the last block ends."""
        return max((place for key, _ in self.blocks if (place := _place(conversation, key))), default=0)

    def caching(
        self,
        conversation: Conversation,
        minimum: int,
        *,
        whole: CacheControl | None = None,
        options: CacheOptions | None = None,
        kept: CacheMark | None = None,
    ) -> Caching | None:
        """Returns the marks as places in the prompt; None without any.

        Args:
            minimum: tokens of the shortest prefix that is kept.
            whole: the mark of the body itself, which stands on its last block.
            options: of breakpoints.
            kept: the place at which a cache ends that the prompt begins with.
        """
        places: dict[int, float | None] = {}
        for key, seconds in self.blocks:
            place = _place(conversation, key)
            if place:  # the template shows the block
                places[place] = seconds if seconds is not None else places.get(place)
        if kept is not None:
            places[kept.place] = kept.ttl
        implicit = options is not None and options.mode == "implicit" and not self._controls
        if places and (whole is not None or implicit):
            last = max(places)
            if places[last] is None:
                places[last] = BREAKPOINT_TTL if whole is None else whole.seconds
        marks = tuple(CacheMark(place, seconds) for place, seconds in sorted(places.items()) if seconds is not None)
        if not marks:
            return None
        anywhere = bool(self._breakpoints) or (implicit and whole is None)
        return Caching(marks, tuple(sorted(places)), None if anywhere else LOOK_BACK, minimum)


def _place(conversation: Conversation, key: BlockKey) -> int | None:
    """Returns the number of parts up to a block's end; None for a block that the template leaves out, as all are where
    a program answers: its own calls make prompts."""
    message, index = key
    if message != TOOLS:
        return conversation.ends.get(key)
    return conversation.tool_ends[index] if index < len(conversation.tool_ends) else None


def warn_of_marks(caching: Caching | None, warnings: list[str]) -> None:
    """Warns of marks that do not count."""
    if caching is not None and len(caching.marks) > COUNTED_MARKS:
        warnings.append(f"{len(caching.marks)} cache marks; the last {COUNTED_MARKS} count")
