"""A node of the radix tree, and a place in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .slot_allocator import Slots

if TYPE_CHECKING:
    from .radix_cache import RadixCache

Tokens = NDArray[np.int32]


class RadixNode:
    """One edge of the tree with the point it leads to. Changed only by RadixCache."""

    __slots__ = (
        "children",
        "id",
        "last_use",
        "locks",
        "parent",
        "pins",
        "priority",
        "queued",
        "salt",
        "slots",
        "tokens",
        "tree",
    )

    def __init__(
        self, tree: RadixCache, node_id: int, salt: str, parent: RadixNode | None, tokens: Tokens, slots: Slots
    ) -> None:
        self.tree = tree
        self.id = node_id
        self.salt = salt
        self.parent = parent  # None: a root, or no longer in the tree
        self.tokens = tokens
        self.slots = slots
        self.children: dict[int, RadixNode] = {}
        self.locks = 0
        self.pins = 0
        self.last_use = 0
        self.priority = 0  # lower ones are evicted first
        self.queued = False  # has its one entry in the eviction queue

    @property
    def is_root(self) -> bool:
        return not len(self.tokens)

    @property
    def held(self) -> bool:
        """By a request or a pin."""
        return bool(self.locks or self.pins)

    @property
    def evictable(self) -> bool:
        return not self.held and not self.children and self.parent is not None


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: it ends at the end of `node`. Lock it before anything else changes the tree.

    `fresh`: the holder made `node` itself, so while nobody else uses it, it may grow in place.
    """

    node: RadixNode
    length: int  # tokens from the root to the end of node
    fresh: bool = False

    @property
    def path(self) -> tuple[tuple[int, int, int], ...]:
        """Root first: (node id, position of its first token, number of tokens). It stays until `tree.splits` grows."""
        steps = []
        end = self.length
        for node in ascend(self.node):
            steps.append((node.id, end - len(node.tokens), len(node.tokens)))
            end -= len(node.tokens)
        return tuple(reversed(steps))

    def slots(self, start: int = 0) -> Slots:
        """The slots of tokens [start, length)."""
        runs = []
        end = self.length
        for node in ascend(self.node):
            if end <= start:
                break
            first = end - len(node.tokens)
            runs.append(node.slots[max(0, start - first) :])
            end = first
        return np.concatenate(runs[::-1]) if runs else np.empty(0, dtype=np.int32)


def ascend(node: RadixNode) -> Iterator[RadixNode]:
    """The node and its ancestors, without the root."""
    current: RadixNode | None = node
    while current is not None and not current.is_root:
        yield current
        current = current.parent


def common_length(left: Tokens, right: Tokens) -> int:
    """How many first tokens two sequences share."""
    length = min(len(left), len(right))
    if not length:
        return 0
    different = left[:length] != right[:length]
    first = int(different.argmax())  # 0 where nothing differs
    return first if different[first] else length
