"""A provider's prompt cache that stores where it is told to.

blocks       [tools][system][turn 1]*[turn 2][turn 3]*        * a breakpoint: the prefix up to here is stored
read         the longest stored prefix that ends with one of the blocks, at most 20 before a breakpoint
written      what lies between that and the last breakpoint
"""

from collections.abc import Sequence
from dataclasses import dataclass

_LOOKBACK = 20  # blocks before a breakpoint in which an earlier prefix is found


@dataclass(frozen=True, slots=True)
class Block:
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

    def charge(self, blocks: Sequence[Block]) -> tuple[int, int]:
        """Tokens that are read, and tokens that are written, by a prompt; its breakpoints are stored from now on."""
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
