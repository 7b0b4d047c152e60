"""A copy of an engine's radix tree, made of its cache events by nothing but their definition: the judge of them."""

import struct
from dataclasses import dataclass

from umbel.srt.cache.radix_cache import RadixCache
from umbel.srt.core.messages import (
    CacheCleared,
    CacheEvents,
    NodeAdded,
    NodeExtended,
    NodeRemoved,
    NodeSplit,
    NodeTookUp,
)

Tokens = tuple[int, ...]
Place = tuple[int, str, str, Tokens]  # id of the parent (0: a root), salt of the root, namespace, tokens


def nodes_of(cache: RadixCache) -> dict[int, Place]:
    """Returns node id → its place and tokens."""
    return {
        node.id: (
            0 if node.parent is None or node.parent.is_root else node.parent.id,
            node.root.salt,
            node.salt,
            tuple(node.tokens.tolist()),
        )
        for _, node in cache.walk()
    }


@dataclass
class _Node:
    parent: int
    root: str
    salt: str
    tokens: Tokens


def read(tokens: bytes) -> Tokens:
    assert tokens, "an event that brings tokens brings some"
    return struct.unpack(f"<{len(tokens) // 4}i", tokens)


class TreeCopy:
    """Follows the events of one engine. It asserts that each fits the tree that the events before it have made."""

    def __init__(self) -> None:
        self._nodes: dict[int, _Node] = {}
        self.counts: dict[str, int] = {}  # events by their kind

    def nodes(self) -> dict[int, Place]:
        return {number: (node.parent, node.root, node.salt, node.tokens) for number, node in self._nodes.items()}

    def apply(self, message: CacheEvents) -> None:
        nodes = self._nodes
        assert message.events, "a message says something"
        for event in message.events:
            self.counts[type(event).__name__] = self.counts.get(type(event).__name__, 0) + 1
            match event:
                case NodeAdded(number, parent, salt, tokens, root):
                    assert number not in nodes, "ids are used once"
                    above = salt if root is None else root
                    if parent:
                        assert root is None, "it names the root where the parent is a root"
                        above = nodes[parent].root
                    nodes[number] = _Node(parent, above, salt, read(tokens))
                case NodeExtended(number, tokens):
                    nodes[number].tokens += read(tokens)
                case NodeSplit(number, upper, length):
                    lower = nodes[number]
                    assert upper not in nodes, "ids are used once"
                    assert 0 < length < len(lower.tokens), "both halves have tokens"
                    nodes[upper] = _Node(lower.parent, lower.root, lower.salt, lower.tokens[:length])
                    lower.parent, lower.tokens = upper, lower.tokens[length:]
                case NodeTookUp(number, child, count):
                    node, lower = nodes[number], nodes[child]
                    assert lower.parent == number, "tokens come from a child"
                    assert 0 < count < len(lower.tokens), "the child keeps some"
                    node.tokens, lower.tokens = node.tokens + lower.tokens[:count], lower.tokens[count:]
                case NodeRemoved(number):
                    assert all(node.parent != number for node in nodes.values()), "leaves go first"
                    del nodes[number]
                case CacheCleared():
                    nodes.clear()
