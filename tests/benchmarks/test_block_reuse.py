"""The comparison of caches: the tree finds the most, blocks a little less, and no text depends on it."""

from benchmarks.block_reuse import SIZES, TREE, compare, row


def test_blocks_find_less_than_the_tree_which_finds_all() -> None:
    found = dict(zip(SIZES, compare("mmlu_5shot", 6, 200_000), strict=True))
    tree, *blocks = [one.reuse.achieved for one in found.values()]
    assert found[TREE].reuse.achieved == found[TREE].reuse.optimal > 0.3
    assert tree > blocks[0] > blocks[1] > 0
    assert row("mmlu_5shot", list(found.values())).startswith("| mmlu_5shot | ")


def test_a_small_pool_evicts_from_every_cache() -> None:
    found = compare("mmlu_5shot", 12, 6_000)
    assert all(one.evicted for one in found)
    assert max(one.reuse.achieved for one in found) <= found[0].reuse.optimal
