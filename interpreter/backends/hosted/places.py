"""Finds the places of conversations before which everything is sent again and again, so a provider should keep it.

    user    │ Here is the document.   │ cache point    Places   the prefix up to here, by its length and hash
            │ Question 3: ...         │                cut      the turn as two blocks, the first of which ends there

A place is found in any prompt that begins with its text, whichever program or branch says it.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ....lang.prompt import Media
from ....lang.tool_calls import ToolCall

IMAGE_TOKENS = 1000  # of an image of a megapixel or so; it decides only whether a prefix is long enough to be stored
REMEMBERED = 1024  # places


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call of a tool, in a user turn."""

    call_id: str
    text: str


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of one turn: text, a picture, a call of a tool or its result.

    Attributes:
        opens: it is the first of its turn.
        closes: it ends a turn that the program has closed.
        cached: how long the provider is asked to store the prefix that ends here; "": not at all.
    """

    role: str
    content: str | Media | ToolCall | ToolResult
    opens: bool
    closes: bool
    cached: str = ""

    @property
    def spelling(self) -> str:
        """Text that is unique for a sequence of blocks with their roles, turns and contents."""
        head = f"\x02{self.role}\x03" if self.opens else ""
        match self.content:
            case str(text):
                return head + text
            case Media(digest=digest):
                return f"{head}\x04{digest}\x05"
            case ToolCall(name, arguments, number):
                return f"{head}\x06{number}\x06{name}\x06{arguments}\x05"
            case ToolResult(number, text):
                return f"{head}\x07{number}\x07{text}\x05"

    @property
    def tokens(self) -> int:
        """Estimate of its tokens."""
        if isinstance(self.content, Media):
            return IMAGE_TOKENS
        text = self.content if isinstance(self.content, str) else self.spelling
        return len(text.encode("utf-8", "replace")) // 4


class Places:
    """Prefixes that other prompts extend: where a program forked, its cache points, and its earlier prompts.

    A place is the length and the hash of a prefix, so that it is found again in any prompt that begins with it. The
    places used longest ago are forgotten.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, bytes], str] = OrderedDict()
        self._at: dict[int, int] = {}  # length → how many places are so long

    def remember(self, blocks: Sequence[Block], lifetime: str = "") -> None:
        """Adds the end of `blocks` as a place. `lifetime`: of a cache point, until another one is set there."""
        text = _spelled(blocks)
        if text:
            self._use((len(text), _hash(text)), lifetime)
        while len(self._known) > REMEMBERED:
            length = self._known.popitem(last=False)[0][0]
            self._at[length] -= 1
            if not self._at[length]:
                del self._at[length]

    def within(self, blocks: Sequence[Block]) -> dict[int, str]:
        """Returns the lengths of known prefixes of `blocks`, in characters of their spelling, shortest first. Cache
        points have a lifetime."""
        text = _spelled(blocks)
        found: dict[int, str] = {}
        state, done = hashlib.blake2b(digest_size=16), 0
        for length in sorted(length for length in self._at if length <= len(text)):
            state.update(text[done:length].encode("utf-8", "surrogatepass"))
            done = length
            if (length, state.digest()) in self._known:
                found[length] = self._use((length, state.digest()))
        return found

    def _use(self, place: tuple[int, bytes], lifetime: str = "") -> str:
        if place not in self._known:
            self._at[place[0]] = self._at.get(place[0], 0) + 1
        found = self._known[place] = lifetime or self._known.get(place, "")
        self._known.move_to_end(place)
        return found


def cut(blocks: Sequence[Block], lengths: Collection[int]) -> tuple[list[Block], dict[int, int]]:
    """Cuts texts so that prefixes of these lengths end with a block.

    A text is not cut where one side would be blank (the provider refuses blank texts), nor in an answer.

    Returns: the blocks, and the indices of those that end such a prefix, with its length.
    """
    result: list[Block] = []
    ends: dict[int, int] = {}
    start = 0  # of the block, in the spelling of all
    for block in blocks:
        head = len(block.spelling) - len(block.content) if isinstance(block.content, str) else 0
        stop = start + len(block.spelling)
        rest, base = block, start + head
        for length in lengths:
            if not (base < length < stop) or block.role == "assistant" or not isinstance(rest.content, str):
                continue
            before, after = rest.content[: length - base], rest.content[length - base :]
            if before.strip() and after.strip():
                ends[len(result)] = length
                result.append(replace(rest, content=before, closes=False))
                rest, base = replace(rest, content=after, opens=False), length
        if stop in lengths:
            ends[len(result)] = stop
        result.append(rest)
        start = stop
    return result, ends


def _spelled(blocks: Sequence[Block]) -> str:
    return "".join(block.spelling for block in blocks)


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
