"""Caches prefixes in blocks that are found by a chained hash, as vLLM does, to compare the tree with.

A block holds the keys of a fixed number of tokens. When it is full it gets a hash: SHA-256 of its parent's hash, of its
tokens, and of what else tells it apart (the salt in the first block, pictures, the private namespaces that begin in
it). A table in memory maps hashes to blocks, and there is no tree.

    tables of requests       [0 ABCD][1 EFGH][2 I]     only grow at their end: block 3 has the same tokens and hash as
                             [0 ABCD][3 EFGH][4 I]     block 1, and stays until both requests have ended
    cached                   hash(ABCD) → 0    hash(hash(ABCD), EFGH) → 1, 3
    free queue               5 - 6 - 7 - 8 - 9         blocks of no request; those with a hash are still found there

A new request looks its full blocks up, one hash after the other, and takes those that it finds out of the queue. New
blocks come from the head of the queue, where a hash is forgotten: the block is evicted. A request that ends puts its
blocks at the tail, the last one first. So least recently used blocks go first, and of those used together the one with
the most tokens before it.

What differs from vLLM: the last token of a prompt that is cached whole is computed without its block, because rows may
be computed whose keys are there.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ...lang.prompt import Borders
from ..core.batch import PICTURE_BASE
from ..core.instruments import FaultHook, no_faults
from .prefix_cache import Seen
from .radix_cache import Match, RadixNode, RadixRoot, Tokens
from .slot_allocator import FIRST_SLOT, IntegrityError, Slots

NO_PARENT = bytes(32)  # the hash before the first block of a sequence


def block_hash(parent: bytes, tokens: bytes, extra: tuple[bytes, ...] = ()) -> bytes:
    """Returns the hash of a full block. Blocks of one cache have as many tokens each, so nothing can be cut otherwise.

    Args:
        parent: the hash of the block before, or NO_PARENT.
        tokens: little-endian int32.
    """
    digest = hashlib.sha256(parent + tokens)
    for part in extra:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


class HashBlock:
    """The slots of one block. All blocks are made with the pool, and changed only by it.

    Attributes:
        hash: None: it is not full, or evicted.
        parent: the hash of the block before, where it has a hash.
        references: requests that have it in their table, pins and keeps.
        previous, next: its neighbours in the free queue; None outside it.
    """

    __slots__ = ("hash", "id", "keeps", "last_use", "next", "parent", "pins", "previous", "references", "slots")

    def __init__(self, number: int, slots: Slots) -> None:
        self.id = number
        self.slots = slots
        self.hash: bytes | None = None
        self.parent = NO_PARENT
        self.references = self.pins = self.keeps = 0
        self.last_use = 0
        self.previous: HashBlock | None = None
        self.next: HashBlock | None = None


class FreeQueue:
    """The blocks of no request in the order in which they are taken: a list whose links are in the blocks."""

    def __init__(self, blocks: Iterable[HashBlock]) -> None:
        self._ends = HashBlock(-1, np.empty(0, dtype=np.int32))  # before the first block and after the last
        self._ends.previous = self._ends.next = self._ends
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[HashBlock]:
        block = self._ends.next
        while block is not self._ends:
            assert block is not None, "the list is a ring"
            yield block
            block = block.next

    def append(self, block: HashBlock) -> None:
        last = self._ends.previous
        assert last is not None, "the list is a ring"
        assert block.next is None, "a block is in the queue once"
        block.previous, block.next = last, self._ends
        last.next = self._ends.previous = block
        self._length += 1

    def remove(self, block: HashBlock) -> None:
        before, after = block.previous, block.next
        assert before is not None, "it is in the queue"
        assert after is not None, "it is in the queue"
        before.next, after.previous = after, before
        block.previous = block.next = None
        self._length -= 1

    def pop(self) -> HashBlock:
        first = next(iter(self))
        self.remove(first)
        return first


class BlockPool:
    """Owns the blocks, the free queue and the table of hashes. Slots of its blocks follow the dummy slot.

    Args:
        num_slots: size of the runner's pool, the dummy slot included. Those after the last whole block are not used.
        block_size: tokens of a block.
        faults: visited at `memory.allocate`.
    """

    def __init__(self, num_slots: int, block_size: int = 16, faults: FaultHook = no_faults) -> None:
        assert num_slots - FIRST_SLOT >= block_size > 0, "a pool holds a block"
        self.block_size = block_size
        self._faults = faults
        starts = range(FIRST_SLOT, num_slots - block_size + 1, block_size)
        self.blocks = [
            HashBlock(number, np.arange(start, start + block_size, dtype=np.int32))
            for number, start in enumerate(starts)
        ]
        self.clear()

    def clear(self) -> None:
        """Frees all blocks, and forgets their hashes."""
        for block in self.blocks:
            block.hash = block.previous = block.next = None
            block.references = block.pins = block.keeps = 0
        self.queue = FreeQueue(self.blocks)
        self._cached: dict[bytes, dict[int, HashBlock]] = {}  # duplicates in the order in which they were filled
        self.hashed = 0  # blocks with a hash
        self.evictable = 0  # those of them that are in the queue

    @property
    def total(self) -> int:
        return len(self.blocks) * self.block_size

    @property
    def free(self) -> int:
        return (len(self.queue) - self.evictable) * self.block_size

    def allocate(self, count: int) -> Slots:
        """Takes whole blocks of `count` slots from the head of the queue; those with a hash lose it."""
        self._faults("memory.allocate")
        number, rest = divmod(count, self.block_size)
        assert not rest, "slots are given to requests in whole blocks"
        assert number <= len(self.queue), f"{number} blocks asked for, {len(self.queue)} are free"
        taken = []
        for _ in range(number):
            block = self.queue.pop()
            if block.hash is not None:
                self.evictable -= 1
                self.forget(block)
            block.references = 1
            taken.append(block.slots)
        return np.concatenate(taken) if taken else np.empty(0, dtype=np.int32)

    def release(self, slots: Slots) -> None:
        """Takes whole blocks back from their only holder, the last one first."""
        for block in reversed(self.blocks_of(slots)):
            if block.references != 1 or block.hash is not None:
                raise IntegrityError("a block was released twice, never handed out, or is cached")
            self.drop(block)

    def blocks_of(self, slots: Slots) -> list[HashBlock]:
        """Returns the blocks of these slots, which are those of whole blocks."""
        assert len(slots) % self.block_size == 0, "slots are held in whole blocks"
        return [self.blocks[(int(slot) - FIRST_SLOT) // self.block_size] for slot in slots[:: self.block_size]]

    def touch(self, block: HashBlock) -> None:
        """Adds a reference; a block without one leaves the queue."""
        if not block.references:
            self.queue.remove(block)
            self.evictable -= block.hash is not None
        block.references += 1

    def drop(self, block: HashBlock) -> None:
        """Takes a reference away; without one the block goes to the tail of the queue."""
        assert block.references > 0, "a reference is dropped once"
        block.references -= 1
        if not block.references:
            self.queue.append(block)
            self.evictable += block.hash is not None

    def find(self, digest: bytes) -> HashBlock | None:
        """Returns the oldest block with this hash."""
        same = self._cached.get(digest)
        return None if same is None else next(iter(same.values()))

    def fill(self, block: HashBlock, parent: bytes, digest: bytes) -> None:
        """Gives a block that is full its hash."""
        assert block.hash is None, "a block is filled once"
        assert block.references, "a request has filled it"
        block.hash, block.parent = digest, parent
        self._cached.setdefault(digest, {})[block.id] = block
        self.hashed += 1

    def forget(self, block: HashBlock) -> None:
        """Takes the hash of a block away, so that it is not found any more. One in the queue stays there."""
        assert block.hash is not None, "only full blocks are cached"
        same = self._cached[block.hash]
        del same[block.id]
        if not same:
            del self._cached[block.hash]
        block.hash = None
        self.hashed -= 1

    def evict(self, block: HashBlock) -> int:
        """Takes the hash of a block in the queue away; returns the number of tokens."""
        self.evictable -= 1
        self.forget(block)
        return self.block_size

    def check(self, held: Iterable[Slots]) -> None:
        """Checks queue and table, and that free and held slots together are all slots, none twice.

        Raises:
            IntegrityError: says what contradicts what.
        """
        queued = Counter(block.id for block in self.queue)
        if len(self.queue) != queued.total() or queued.keys() != {b.id for b in self.blocks if not b.references}:
            raise IntegrityError("the free queue does not have the blocks of no request, each once")
        hashed = [block for block in self.blocks if block.hash is not None]
        table = sorted((digest, number) for digest, same in self._cached.items() for number in same)
        if table != sorted((block.hash, block.id) for block in hashed) or len(hashed) != self.hashed:
            raise IntegrityError("the table of hashes does not have the full blocks")
        free = [block.slots for block in self.queue if block.hash is None]
        if self.evictable != len(self.queue) - len(free):
            raise IntegrityError(f"{len(self.queue) - len(free)} blocks can be evicted; {self.evictable} are counted")
        slots = np.concatenate([*free, *held, np.empty(0, dtype=np.int32)])
        uses = np.bincount(slots, minlength=FIRST_SLOT + self.total)
        if uses[:FIRST_SLOT].any() or len(uses) != FIRST_SLOT + self.total or (uses[FIRST_SLOT:] != 1).any():
            raise IntegrityError(
                f"of {self.total} slots {int((uses[FIRST_SLOT:] == 0).sum())} are lost, and "
                f"{int((uses[FIRST_SLOT:] > 1).sum())} are held twice"
            )


@dataclass(frozen=True, slots=True)
class BlockMatch(Match):
    """The longest prefix that is cached in blocks. `node` is the root of its salt."""

    blocks: tuple[HashBlock, ...] = ()

    @property
    def last_use(self) -> int:
        return self.blocks[-1].last_use if self.blocks else 0

    @property
    def path(self) -> tuple[tuple[int, int, int], ...]:
        size = self.length // max(1, len(self.blocks))
        return tuple((block.id, place * size, size) for place, block in enumerate(self.blocks))

    def slots(self, start: int = 0) -> Slots:
        runs = [block.slots for block in self.blocks]
        return np.concatenate(runs)[start:] if runs else np.empty(0, dtype=np.int32)


class BlockCache:
    """Finds full blocks by their hash, for KVManager (prefix_cache.PrefixCache).

    It has no counts for each salt, so shares of salts are not enforced, and no nodes, so a survey is empty.

    Costs: a hash for each block that is looked up, some 2 µs; O(1) for each block that is allocated or released.
    """

    splits = 0  # blocks are never split

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.page = pool.block_size
        self._roots: dict[str, RadixRoot] = {}
        self._next_id = 0
        self._time = 0  # counts uses; the order is all that matters
        self.forget()

    def forget(self) -> None:
        """Forgets pins and keeps; the caller clears the pool."""
        self._roots.clear()
        self._pinned = self._kept = 0  # blocks with a pin or a keep; with a keep

    @property
    def total_tokens(self) -> int:
        return self._pool.hashed * self.page

    @property
    def evictable_tokens(self) -> int:
        return self._pool.evictable * self.page

    @property
    def pinned_tokens(self) -> int:
        return self._pinned * self.page

    @property
    def kept_tokens(self) -> int:
        return self._kept * self.page

    @property
    def node_count(self) -> int:
        return 0

    # ------------------------------------------------------------------------------------------ find

    def hashes(
        self, tokens: Tokens, salt: str, borders: Borders = (), start: int = 0, parent: bytes = NO_PARENT
    ) -> Iterator[bytes]:
        """Yields the hashes of the full blocks of a sequence.

        Args:
            tokens: those from place `start` on.
            parent: the hash of the block that ends there.
        """
        pictures = bool(len(tokens)) and int(tokens.max()) >= PICTURE_BASE
        data = np.minimum(tokens, PICTURE_BASE).astype("<i4", copy=False).tobytes()
        for first in range(0, len(tokens) - self.page + 1, self.page):
            place, end = start + first, start + first + self.page
            extra = [salt.encode()] if not place else []
            extra += [f"{border - place} {name}".encode() for border, name in borders if place <= border < end]
            if pictures:
                extra += _pictures(tokens[first : first + self.page])
            parent = block_hash(parent, data[4 * first : 4 * (first + self.page)], tuple(extra))
            yield parent

    def peek(self, tokens: Tokens, salt: str, borders: Borders = (), seen: Seen | None = None) -> int:
        """See `PrefixCache`."""
        del seen  # blocks are found by their digests, whatever was found before
        return len(self._find(tokens, salt, borders)) * self.page

    def _find(self, tokens: Tokens, salt: str, borders: Borders) -> list[HashBlock]:
        found: list[HashBlock] = []
        for digest in self.hashes(tokens, salt, borders):
            block = self._pool.find(digest)
            if block is None:
                break
            found.append(block)
        return found

    def match(self, tokens: Tokens, salt: str, borders: Borders = ()) -> BlockMatch:
        """Finds the longest prefix that is cached in full blocks; this counts as a use."""
        blocks = self._find(tokens, salt, borders)
        self._time += 1
        for block in blocks:
            block.last_use = self._time
        return BlockMatch(self._root(salt), len(blocks) * self.page, blocks=tuple(blocks))

    def advance(self, match: Match, tokens: Tokens, borders: Borders = ()) -> Match:
        """Returns the match: blocks that are in the table of a request are never replaced by those of others."""
        return match

    def _root(self, salt: str) -> RadixRoot:
        if salt not in self._roots:
            self._next_id += 1
            self._roots[salt] = RadixRoot(self, self._next_id, salt, self._pool, ordered=False)
        return self._roots[salt]

    # ---------------------------------------------------------------------------------------- change

    def extend(self, match: Match, tokens: Tokens, slots: Slots, *, borders: Borders = (), priority: int = 0) -> Match:
        """Gives the blocks of a request that are full now their hashes; the rest stays with the request."""
        full = len(tokens) // self.page
        if not full:
            return match
        self._time += 1
        held = _blocks(match)
        parent = held[-1].hash if held else NO_PARENT
        assert parent is not None, "blocks of a match are full"
        filled = self._pool.blocks_of(slots[: full * self.page])
        hashes = self.hashes(tokens, match.node.salt, borders, match.length, parent)
        for block, digest in zip(filled, hashes, strict=True):
            self._pool.fill(block, parent, digest)
            block.last_use = self._time
            parent = digest
        return BlockMatch(match.node, match.length + full * self.page, blocks=(*held, *filled))

    def lock(self, match: Match) -> None:
        """Takes the blocks out of the queue, for one more request."""
        for block in _blocks(match):
            self._pool.touch(block)
        match.node.root.locks += 1
        self._roots[match.node.salt] = match.node.root

    def unlock(self, match: Match) -> None:
        """Ends a request's hold of its blocks, the last one first."""
        for block in reversed(_blocks(match)):
            self._pool.drop(block)
        root = match.node.root
        assert root.locks > 0, "unlock without lock"
        root.locks -= 1
        if not root.locks:
            self._roots.pop(root.salt, None)

    def move_lock(self, held: Match, wanted: Match) -> None:
        if held is not wanted:
            self.lock(wanted)
            self.unlock(held)

    def pin(self, match: Match) -> None:
        for block in _blocks(match):
            self._pool.touch(block)
            self._pinned += not (block.pins or block.keeps)
            block.pins += 1

    def unpin(self, match: Match) -> None:
        for block in reversed(_blocks(match)):
            assert block.pins > 0, "unpin without pin"
            block.pins -= 1
            self._pinned -= not (block.pins or block.keeps)
            self._pool.drop(block)

    def keep(self, match: Match) -> None:
        for block in _blocks(match):
            self._pool.touch(block)
            self._pinned += not (block.pins or block.keeps)
            self._kept += not block.keeps
            block.keeps += 1

    def end_keep(self, match: Match) -> None:
        for block in reversed(_blocks(match)):
            assert block.keeps > 0, "end of a keep that was not put"
            block.keeps -= 1
            self._kept -= not block.keeps
            self._pinned -= not (block.pins or block.keeps)
            self._pool.drop(block)

    def unkept(self, match: Match) -> int:
        return self.page * sum(not block.keeps for block in _blocks(match))

    def make_room(self, count: int) -> int:
        """Evicts the blocks that the next allocation of `count` slots takes; returns the number of evicted tokens."""
        return sum(
            self._pool.evict(block)
            for block in islice(self._pool.queue, -(-count // self.page))
            if block.hash is not None
        )

    def evict_of(self, root: RadixRoot, count: int) -> int:
        raise AssertionError("blocks are not counted by salt: launch refuses shares of salts")

    def discard(self, match: Match) -> int:
        """Forgets the blocks of a path that nothing holds, and all that were computed after them."""
        wrong = {block.hash for block in _blocks(match) if block.hash and not block.references}
        given = 0
        while wrong:
            here = [
                block for block in self._pool.queue if block.hash and (block.hash in wrong or block.parent in wrong)
            ]
            wrong = {block.hash for block in here if block.hash and block.hash not in wrong}
            given += sum(self._pool.evict(block) for block in here)
        return given

    def clear(self) -> int:
        """Evicts all blocks that are not held."""
        return self.make_room(self._pool.total)

    # ------------------------------------------------------------------------------------------ look

    @property
    def salts(self) -> Iterable[RadixRoot]:
        """The salts that have running requests."""
        return self._roots.values()

    def survey(self, most: int) -> tuple[list[RadixNode], int]:
        return [], self._time

    def held_slots(self) -> list[Slots]:
        """Returns the slots of all blocks with a hash."""
        return [block.slots for block in self._pool.blocks if block.hash is not None]

    def check_some(self, pinned: Iterable[Match], kept: Iterable[Match] = ()) -> bool:
        """Checks everything while no request runs.

        Raises:
            IntegrityError: says what contradicts what.
        """
        self.check([], pinned, kept)
        self._pool.check(self.held_slots())
        return True

    def check(self, holders: list[Match], pinned: Iterable[Match] = (), kept: Iterable[Match] = ()) -> None:
        """Checks the references, pins and keeps of all full blocks, and the hashes of those in tables.

        Raises:
            IntegrityError: names the block.
        """
        pins, keeps = _counted(pinned), _counted(kept)
        holds = _counted(holders) + pins + keeps
        for block in self._pool.blocks:
            if block.hash is None:
                if holds[block.id] or block.pins or block.keeps:
                    raise IntegrityError(f"block {block.id} is held as cached, and has no hash")
            elif (block.references, block.pins, block.keeps) != (holds[block.id], pins[block.id], keeps[block.id]):
                raise IntegrityError(f"block {block.id} has references, pins or keeps that its holders do not explain")
        sums = (sum(count > 0 for count in (pins + keeps).values()), len(keeps))
        if sums != (self._pinned, self._kept):
            raise IntegrityError(f"(pinned, kept) blocks are {sums}; the sums say {(self._pinned, self._kept)}")
        for match in holders:
            parent = NO_PARENT
            for block in _blocks(match):
                if block.parent != parent or block.hash is None:
                    raise IntegrityError(f"block {block.id} does not follow the block before it in a table")
                parent = block.hash


def _blocks(match: Match) -> tuple[HashBlock, ...]:
    assert isinstance(match, BlockMatch), "a match goes back to the cache it is from"
    return match.blocks


def _counted(matches: Iterable[Match]) -> Counter[int]:
    """Returns block → number of matches that have it."""
    return Counter(block.id for match in matches for block in _blocks(match))


def _pictures(tokens: Tokens) -> list[bytes]:
    """Returns which pictures a block has where: in its tokens all pictures are the same placeholder.

    Their numbers stand for their pixels: no other picture of the engine's life has the same one.
    """
    places = np.flatnonzero(tokens >= PICTURE_BASE)
    begin = places[np.flatnonzero(np.diff(tokens[places], prepend=-1))]
    return [f"{place} {int(tokens[place]) - PICTURE_BASE}".encode() for place in begin]
