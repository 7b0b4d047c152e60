"""Cuts the radix tree of one engine into blocks of 16 tokens, and names them, for routers that count in blocks.

    nodes    ── "You are helpful." ──┬── "Hello, how are" ── "you?"
    blocks   [      0      |       1 ┴     |      2      |     .        a block is stored by the node of its last token;
                                                                       what fills no block is not stored

A block is named by chained SHA-256 over length-prefixed fields: the name of the block before it, its tokens, and what
else tells its keys from others (the adapter, hashes of salts and namespaces, digests of pictures). So two blocks of one
name have the same content, and a tree has each name once: a node that splits, or whose tokens move to its parent,
changes no block. The events are those of vLLM (distributed/kv_events.py there, version 0.26), where hashes are the last
8 bytes of a name as a number.
"""

from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256

import msgspec
import numpy as np

from ...lang.prompt import adapter_of
from ..core.batch import PICTURE_BASE
from ..core.messages import (
    CacheCleared,
    CacheEvent,
    NodeAdded,
    NodeExtended,
    NodeRemoved,
    NodeSplit,
    NodeTookUp,
)

BLOCK_TOKENS = 16
DEVICE = "GPU"  # the medium of the engine's own pool, whatever device that is
_TOKEN_BYTES = 4

ExtraKey = str | tuple[str, int]  # a name, or one with the place in its block from which on it counts


class _Event(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    pass


class BlockStored(_Event, frozen=True):
    """Blocks that follow each other on a path came into the cache. Fields without a default are always sent."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[ExtraKey, ...] | None] | None = None


class BlockRemoved(_Event, frozen=True):
    """Blocks left the cache."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(_Event, frozen=True):
    """All blocks left the cache."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


class _BlockNode:
    """A node of the tree, with the blocks whose last tokens it has."""

    __slots__ = ("names", "parent", "root", "salt", "start", "tokens")

    def __init__(self, parent: "_BlockNode | None", root: str, salt: str, tokens: bytes, start: int) -> None:
        self.parent = parent  # None: it is below the root
        self.root = root  # salt of the root
        self.salt = salt  # the namespace
        self.tokens = tokens
        self.start = start  # place of its first token on the path
        self.names: list[bytes] = []

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // _TOKEN_BYTES

    @property
    def opens(self) -> str:
        """The namespace that the edge to it opens; "": none."""
        above = self.root if self.parent is None else self.parent.salt
        return self.salt if self.salt != above else ""


class KVBlocks:
    """The blocks of one engine. It reads all events of the engine, in order, from an empty tree on.

    Args:
        digest_of: a picture's number → what names its pixels everywhere.
    """

    def __init__(self, digest_of: Callable[[int], str]) -> None:
        self._digest_of = digest_of
        self._nodes: dict[int, _BlockNode] = {}

    def __len__(self) -> int:
        return sum(len(node.names) for node in self._nodes.values())

    def follow(self, events: Iterable[CacheEvent]) -> list[BlockEvent]:
        """Reads what changed in the tree → what changed of the blocks.

        Raises:
            KeyError: an event does not fit; earlier ones were lost.
        """
        told: list[BlockEvent] = []
        for event in events:
            match event:
                case NodeAdded():
                    told += self._added(event)
                case NodeExtended(number, tokens):
                    node = self._nodes[number]
                    first = node.end // BLOCK_TOKENS
                    node.tokens += tokens
                    told += self._stored(node, first)
                case NodeSplit(number, upper, length):
                    node = self._nodes[number]
                    cut = length * _TOKEN_BYTES
                    above = _BlockNode(node.parent, node.root, node.salt, node.tokens[:cut], node.start)
                    self._nodes[upper], node.parent = above, above
                    self._move_boundary(above, node, node.tokens[cut:], length)
                case NodeTookUp(number, child, count):
                    node, below = self._nodes[number], self._nodes[child]
                    cut = count * _TOKEN_BYTES
                    node.tokens += below.tokens[:cut]
                    self._move_boundary(node, below, below.tokens[cut:], count)
                case NodeRemoved(number):
                    names = self._nodes.pop(number).names
                    if names and told and isinstance(told[-1], BlockRemoved):
                        told[-1].block_hashes.extend(map(_hash, names))
                    elif names:
                        told.append(BlockRemoved([_hash(name) for name in names], DEVICE))
                case CacheCleared():
                    self._nodes.clear()
                    told = [AllBlocksCleared()]
        return told

    def snapshot(self) -> Iterator[BlockStored]:
        """Yields all blocks, those before others on a path first."""
        for node in sorted(self._nodes.values(), key=lambda node: node.start):
            yield from self._stored(node, node.start // BLOCK_TOKENS)

    # ------------------------------------------------------------------------------------------ inside

    def _added(self, event: NodeAdded) -> list[BlockStored]:
        parent = self._nodes[event.parent] if event.parent else None
        if parent is not None:
            root, start = parent.root, parent.end
        else:
            root, start = event.salt if event.root is None else event.root, 0
        node = self._nodes[event.id] = _BlockNode(parent, root, event.salt, event.tokens, start)
        return self._stored(node, start // BLOCK_TOKENS)

    @staticmethod
    def _move_boundary(upper: _BlockNode, lower: _BlockNode, rest: bytes, count: int) -> None:
        """Gives the blocks that end in the first `count` tokens of a node to the node above it."""
        moved = (lower.start + count) // BLOCK_TOKENS - lower.start // BLOCK_TOKENS
        upper.names += lower.names[:moved]
        lower.names = lower.names[moved:]
        lower.tokens, lower.start = rest, lower.start + count

    def _stored(self, node: _BlockNode, first: int) -> list[BlockStored]:
        """Tells the blocks from number `first` on that end in a node, and names those that have no name."""
        count = node.end // BLOCK_TOKENS - first
        if count <= 0:
            return []
        tokens, opened, parent = _read_back(node, first)
        ids = np.frombuffer(tokens, dtype="<i4")[: count * BLOCK_TOKENS]
        shown = self._pictures(ids)
        ids = np.minimum(ids, PICTURE_BASE) if shown else ids
        adapter = adapter_of(node.salt)
        described = _keys_by_block(first, node.root, opened, shown)
        known = node.names[first - node.start // BLOCK_TOKENS :]
        data = ids.tobytes()
        size = BLOCK_TOKENS * _TOKEN_BYTES
        name, keys = parent, []
        for index in range(count):
            extra = described.get(index, ())
            if index < len(known):
                name = known[index]
            else:
                name = block_name(name, data[index * size : (index + 1) * size], adapter, extra)
                node.names.append(name)
            keys.append(((adapter, *extra) if adapter else extra) or None)
        names = node.names[first - node.start // BLOCK_TOKENS :]
        return [
            BlockStored(
                [_hash(each) for each in names],
                _hash(parent) if parent else None,
                ids.tolist(),
                BLOCK_TOKENS,
                None,
                DEVICE,
                adapter or None,
                keys if any(keys) else None,
            )
        ]

    def _pictures(self, ids: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> list[tuple[int, str]]:
        """Returns for each block with tokens of a picture: the place of the first of them, and its digest."""
        if int(ids.max()) < PICTURE_BASE:
            return []
        found = []
        for place in np.flatnonzero(ids >= PICTURE_BASE).tolist():
            begins = place % BLOCK_TOKENS == 0 or ids[place] != ids[place - 1]
            if begins:
                found.append((place, self._digest_of(int(ids[place]) - PICTURE_BASE)))
        return found


def _read_back(node: _BlockNode, first: int) -> tuple[bytes, list[tuple[int, str]], bytes]:
    """Returns the tokens of a path from block `first` to the end of a node, the namespaces that open there (place after
    those tokens' beginning, name), and the name of the block before; b"" where there is none."""
    begin = first * BLOCK_TOKENS
    pieces: list[bytes] = []
    opened: list[tuple[int, str]] = []
    above: _BlockNode | None = node
    while above is not None and above.end > begin:
        pieces.append(above.tokens[max(0, begin - above.start) * _TOKEN_BYTES :])
        if above.opens and above.start >= begin:
            opened.append((above.start - begin, above.opens))
        above = above.parent if above.start > begin else None
    before: _BlockNode | None = node
    parent = b""
    while before is not None and first:
        held = before.start // BLOCK_TOKENS  # number of its first block
        if held < first and before.names:
            parent = before.names[min(first - held, len(before.names)) - 1]
            break
        before = before.parent
    return b"".join(reversed(pieces)), opened[::-1], parent


def _keys_by_block(
    first: int, salt: str, opened: list[tuple[int, str]], shown: list[tuple[int, str]]
) -> dict[int, tuple[ExtraKey, ...]]:
    """Returns number of a block, counted from `first` → what tells it from another of the same tokens.

    Salts and namespaces enter as hashes. The namespace of an adapter alone has no key: the adapter is one.
    """
    keys: dict[int, list[ExtraKey]] = {}
    if not first and salt:
        keys[0] = [hashed(salt)]
    placed = [(place, hashed(name)) for place, name in opened if "/" in name] + shown
    for place, text in placed:
        keys.setdefault(place // BLOCK_TOKENS, []).append((text, place % BLOCK_TOKENS))
    return {index: tuple(found) for index, found in keys.items()}


def hashed(name: str) -> str:
    """Returns the hash by which a salt or a namespace is published."""
    return sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def block_name(parent: bytes, tokens: bytes, adapter: str, extra: tuple[ExtraKey, ...]) -> bytes:
    """Returns the name of a block after the block `parent`. tokens: int32, little-endian."""
    fields = [_FORMAT, parent, tokens]
    if adapter or extra:
        fields.append(adapter.encode("utf-8", "surrogatepass"))
        for key in extra:
            text, place = (key, 0) if isinstance(key, str) else key
            fields += [b"at" if isinstance(key, tuple) else b"of", text.encode(), place.to_bytes(4, "little")]
    return sha256(b"".join(part for field in fields for part in (len(field).to_bytes(8, "little"), field))).digest()


_FORMAT = b"umbel block 1"


def _hash(name: bytes) -> int:
    return int.from_bytes(name[-8:], "big")
