"""An eviction policy of one's own: the tree keeps its sums, whatever order leaves go in."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.srt.cache.radix_cache import LeastRecentlyUsed, RadixCache, RadixNode
from umbel.srt.cache.slot_allocator import SlotAllocator


class NewestFirst:
    """A fake: the leaf that became evictable last goes first. `operations` counts nothing here."""

    operations = 0

    def __init__(self) -> None:
        self._nodes: dict[int, RadixNode] = {}

    def add(self, node: RadixNode) -> None:
        self._nodes.pop(node.id, None)
        self._nodes[node.id] = node

    def pop(self) -> RadixNode | None:
        while self._nodes:
            _, node = self._nodes.popitem()
            if node.evictable:
                return node
        return None

    def knows(self, node: RadixNode) -> bool:
        return node.id in self._nodes

    def clear(self) -> None:
        self._nodes.clear()


def serve(cache: RadixCache, pool: SlotAllocator, tokens: list[int]) -> None:
    sequence = np.array(tokens, dtype=np.int32)
    match = cache.match(sequence, "")
    cache.lock(match)
    missing = len(sequence) - match.length
    if missing:
        cache.evict(missing - pool.free)
        match = cache.extend(match, sequence[match.length :], pool.allocate(missing))
    cache.unlock(match)


def left_after_one_eviction(cache: RadixCache, pool: SlotAllocator) -> list[list[int]]:
    for tokens in ([1, 1], [2, 2], [3, 3]):
        serve(cache, pool, tokens)
    cache.evict(1)
    return sorted(node.tokens.tolist() for _, node in cache.walk())


def test_the_policy_says_which_leaf_goes() -> None:
    pool = SlotAllocator(20)
    assert left_after_one_eviction(RadixCache(pool, LeastRecentlyUsed()), pool) == [[2, 2], [3, 3]]
    pool = SlotAllocator(20)
    assert left_after_one_eviction(RadixCache(pool, NewestFirst()), pool) == [[1, 1], [2, 2]]


@settings(max_examples=100, deadline=None)
@given(batch=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), max_size=20), size=st.integers(6, 20))
def test_tree_and_pool_agree_under_any_policy(batch: list[list[int]], size: int) -> None:
    pool = SlotAllocator(size + 1)
    cache = RadixCache(pool, NewestFirst())
    for tokens in batch:
        serve(cache, pool, tokens)
        cache.check([])
        pool.check([node.slots for _, node in cache.walk()])
    cache.clear()
    assert (cache.total_tokens, pool.free) == (0, size)


def test_a_node_knows_the_pool_of_its_slots() -> None:
    pool = SlotAllocator(20)
    cache = RadixCache(pool)
    serve(cache, pool, [1, 2, 3])
    serve(cache, pool, [1, 2, 9])
    assert {node.pool for _, node in cache.walk()} == {pool}
