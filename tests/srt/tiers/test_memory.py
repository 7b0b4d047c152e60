"""The tier in host memory: least recently used pages leave first, tails before heads."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st
from umbel.srt.tiers.memory import HostMemory

from .pages import PAGE, chain, pages

ENTRY = 256


def test_what_is_stored_is_found_from_the_head_on() -> None:
    tier = HostMemory(1 << 20)
    names = chain("a", 3)
    tier.store(names, pages(3, 5))
    assert tier.longest(names) == 3
    assert [int(page[0]) for page in tier.load(names) if page is not None] == [5, 6, 7]
    assert tier.load([b"x", names[1]])[0] is None
    tier.forget([names[1], b"x"])
    assert tier.longest(names) == 1
    facts = tier.facts()
    assert (facts.pages, facts.hits, facts.misses, facts.stored) == (2, 4, 1, 3)


def test_a_page_after_a_gap_is_not_stored() -> None:
    tier = HostMemory(1 << 20)
    names = chain("a", 3)
    tier.store(names, pages(1))
    assert tier.facts().pages == 0
    assert tier.facts().dropped == 1
    tier.store(names[:2], pages(2))
    tier.store(names, pages(1))
    assert tier.longest(names) == 3


def test_tails_leave_before_heads_and_used_sequences_last() -> None:
    tier = HostMemory(4 * (PAGE + ENTRY))
    tier.store(chain("a", 2), pages(2))
    tier.store(chain("b", 2), pages(2))
    tier.longest(chain("a", 2))
    tier.store(chain("c", 1), pages(1))
    assert (tier.longest(chain("b", 2)), tier.longest(chain("a", 2)), tier.longest(chain("c", 1))) == (1, 2, 1)


def test_a_sequence_larger_than_the_tier_leaves_its_head_there() -> None:
    tier = HostMemory(3 * (PAGE + ENTRY))
    tier.store(chain("a", 10), pages(10))
    assert tier.longest(chain("a", 10)) == 3


def test_a_page_larger_than_the_tier_is_not_stored() -> None:
    tier = HostMemory(PAGE)
    tier.store([b"a"], pages(1))
    assert tier.facts().pages == tier.facts().bytes == 0


def test_a_lent_payload_outlives_its_eviction() -> None:
    tier = HostMemory(PAGE + ENTRY)
    tier.store([b"a"], pages(1, 7))
    (lent,) = tier.load([b"a"])
    tier.store([b"b"], pages(1, 9))
    assert tier.longest([b"a"]) == 0
    assert lent is not None
    assert lent.tolist() == [7] * PAGE


@given(st.lists(st.tuples(st.sampled_from("slf"), st.sampled_from("abc"), st.integers(1, 4)), max_size=40))
def test_it_never_holds_more_than_its_size_and_counts_what_it_holds(moves: list[tuple[str, str, int]]) -> None:
    tier = HostMemory(5 * (PAGE + ENTRY))
    truth: OrderedDict[bytes, None] = OrderedDict()
    for move, letter, count in moves:
        names = chain(letter, count)
        if move == "s":
            tier.store(names, pages(count))
            truth.update(dict.fromkeys(names))
        elif move == "l":
            assert all(page is None or name in truth for name, page in zip(names, tier.load(names), strict=True))
        else:
            tier.forget(names)
        facts = tier.facts()
        assert facts.bytes == facts.pages * (PAGE + ENTRY) <= facts.limit
    tier.close()
    assert tier.facts().bytes == 0
