"""A conversation as the blocks of a Messages request, and the places where its prefix may be stored.

    system  ┃ You are ...            ┃            ┐
    user    ┃ Here is the document.  ┃ fork here  │ prefixes: everything from the beginning to the end of a block
            ┃ Question 3: ...        ┃            │
    assistant ...                                 ┘

Blocks can be cut at places that the program shares among branches, so that a prefix ends there.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .....lang.prompt import Media

Role = Literal["system", "user", "assistant"]

IMAGE_TOKENS = 1000  # of an image of a megapixel or so; it decides only whether a prefix is long enough to be stored
REMEMBERED = 1024  # places


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of one turn.

    Attributes:
        opens: it is the first of its turn.
        closes: it ends a turn that the program has closed.
        cached: the provider is asked to store the prefix that ends here.
    """

    role: Role
    content: str | Media
    opens: bool
    closes: bool
    cached: bool = False

    @property
    def spelling(self) -> str:
        """Text that tells blocks of different role, turn and content apart, one after the other as well."""
        head = f"\x02{self.role}\x03" if self.opens else ""
        return head + (self.content if isinstance(self.content, str) else f"\x04{self.content.digest}\x05")

    @property
    def tokens(self) -> int:
        """About so many."""
        return len(self.content.encode("utf-8", "replace")) // 4 if isinstance(self.content, str) else IMAGE_TOKENS


class Places:
    """Ends of prompts that others go on from: where a program forked, and what it has asked before.

    A place is the length and the hash of a prefix, so that it is found again in any prompt that begins with it. The
    places used longest ago are forgotten.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self._at: dict[int, int] = {}  # length → how many places are so long

    def remember(self, blocks: Sequence[Block]) -> None:
        """The end of `blocks` is a place."""
        text = _spelled(blocks)
        if text:
            self._use((len(text), _hash(text)))
        while len(self._known) > REMEMBERED:
            length = self._known.popitem(last=False)[0][0]
            self._at[length] -= 1
            if not self._at[length]:
                del self._at[length]

    def within(self, blocks: Sequence[Block]) -> list[int]:
        """Lengths of the known prefixes of `blocks`, in characters of their spelling, shortest first."""
        text = _spelled(blocks)
        found: list[int] = []
        state, done = hashlib.blake2b(digest_size=16), 0
        for length in sorted(length for length in self._at if length <= len(text)):
            state.update(text[done:length].encode("utf-8", "surrogatepass"))
            done = length
            if (length, state.digest()) in self._known:
                self._use((length, state.digest()))
                found.append(length)
        return found

    def _use(self, place: tuple[int, bytes]) -> None:
        if place not in self._known:
            self._at[place[0]] = self._at.get(place[0], 0) + 1
        self._known[place] = None
        self._known.move_to_end(place)


def cut(blocks: Sequence[Block], lengths: Sequence[int]) -> tuple[list[Block], list[int]]:
    """Cut texts so that prefixes of these lengths end with a block.

    A text is not cut where one side would be blank (the provider refuses blank texts), nor in an answer.

    Returns: the blocks, and the indices of those that end such a prefix.
    """
    result: list[Block] = []
    ends: list[int] = []
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
                ends.append(len(result))
                result.append(replace(rest, content=before, closes=False))
                rest, base = replace(rest, content=after, opens=False), length
        if stop in lengths:
            ends.append(len(result))
        result.append(rest)
        start = stop
    return result, ends


def prefix_hashes(blocks: Sequence[Block]) -> list[bytes]:
    """One for each block that ends a stored prefix, in order. Where texts are cut is part of what is hashed."""
    state = hashlib.blake2b(digest_size=16)
    hashes: list[bytes] = []
    for block in blocks:
        state.update(f"{block.spelling}\x06".encode("utf-8", "surrogatepass"))
        if block.cached:
            hashes.append(state.digest())
    return hashes


def _spelled(blocks: Sequence[Block]) -> str:
    return "".join(block.spelling for block in blocks)


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
