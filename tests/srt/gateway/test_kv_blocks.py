"""The blocks of a tree: those that the tokens of its paths fill, with names that anybody can compute."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.srt.cache.radix_cache import RadixCache
from umbel.srt.core.batch import PICTURE_BASE, picture_tokens
from umbel.srt.core.messages import (
    CacheCleared,
    CacheEvents,
    NodeAdded,
    NodeExtended,
    NodeRemoved,
    NodeSplit,
    NodeTookUp,
)
from umbel.srt.gateway import kv_blocks
from umbel.srt.gateway.kv_blocks import AllBlocksCleared, BlockRemoved, BlockStored, KVBlocks, hashed

from ...kv_subscriber import published_name
from ..engine_harness import Engine
from ..scheduler.test_scheduler_properties import Arrival, arrivals, configs, drive
from ..tree_copy import nodes_of

B = 16
ONE, TWO = tuple(range(1, 17)), tuple(range(17, 33))


def digest_of(number: int) -> str:
    return f"pixels {number}"


def told(tokens: tuple[int, ...]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def number_of(name: bytes) -> int:
    return int.from_bytes(name[-8:], "big")


def names_of(cache: RadixCache, size: int = B) -> set[int]:
    """Computes the blocks of every path of a tree, from its salts, namespaces and tokens alone."""
    found = set()
    nodes = nodes_of(cache)
    for number in nodes:
        path: list[tuple[str, int]] = []  # (namespace, token)
        at, root = number, nodes[number][1]
        while at:
            parent, _, salt, tokens = nodes[at]
            path[:0] = [(salt, token) for token in tokens]
            at = parent
        parent_name = b""
        for first in range(0, len(path) - size + 1, size):
            fields: list[bytes] = []
            if first == 0 and root:
                fields += [b"of", hashed(root).encode(), bytes(4)]
            for place in range(first, first + size):
                above = path[place - 1][0] if place else root
                if path[place][0] != above:
                    fields += [b"at", hashed(path[place][0]).encode(), (place - first).to_bytes(4, "little")]
            tokens = tuple(token for _, token in path[first : first + size])
            parent_name = published_name(parent_name, tokens, *([b"", *fields] if fields else []))
            found.add(number_of(parent_name))
    return found


def test_a_block_is_stored_when_its_tokens_are_full() -> None:
    blocks = KVBlocks(digest_of)
    assert blocks.follow([NodeAdded(2, 0, "", told(ONE[:15]))]) == []
    (stored,) = blocks.follow([NodeExtended(2, told((*ONE[15:], *TWO, 5)))])
    first = published_name(b"", ONE)
    second = published_name(first, TWO)
    assert stored == BlockStored([number_of(first), number_of(second)], None, [*ONE, *TWO], B, None, "GPU", None, None)


def test_a_split_changes_no_block_and_a_block_goes_with_the_node_of_its_last_token() -> None:
    blocks = KVBlocks(digest_of)
    (stored,) = blocks.follow([NodeAdded(2, 0, "", told(ONE + TWO))])
    assert blocks.follow([NodeSplit(2, 3, 20)]) == []  # in the middle of the second block
    (other,) = blocks.follow([NodeAdded(4, 3, "", told(tuple(range(100, 112))))])
    assert isinstance(stored, BlockStored)
    assert isinstance(other, BlockStored)
    assert other.parent_block_hash == stored.block_hashes[0]
    assert other.token_ids == [*TWO[:4], *range(100, 112)]
    assert blocks.follow([NodeRemoved(2)]) == [BlockRemoved(stored.block_hashes[1:], "GPU")]
    assert blocks.follow([NodeRemoved(4), NodeRemoved(3)]) == [
        BlockRemoved([*other.block_hashes, stored.block_hashes[0]], "GPU")
    ]
    assert len(blocks) == 0


def test_tokens_that_move_up_take_their_blocks_along() -> None:
    blocks = KVBlocks(digest_of)
    blocks.follow([NodeAdded(2, 0, "", told(ONE[:10])), NodeAdded(3, 2, "", told((*ONE[10:], *TWO, 7, 8)))])
    before = next(blocks.snapshot()).block_hashes
    assert blocks.follow([NodeTookUp(2, 3, 7)]) == []
    assert blocks.follow([NodeRemoved(3)]) == [BlockRemoved(before[1:], "GPU")]
    assert blocks.follow([NodeRemoved(2)]) == [BlockRemoved(before[:1], "GPU")]


def test_salts_adapters_and_namespaces_are_told_by_hashes_and_names() -> None:
    blocks = KVBlocks(digest_of)
    (salted, adapted, private) = blocks.follow(
        [
            NodeAdded(2, 0, "acme", told(ONE)),
            NodeAdded(3, 0, "acme@sql", told(ONE), "acme"),
            NodeAdded(4, 2, "acme/eve", told(TWO)),
        ]
    )
    assert isinstance(salted, BlockStored)
    assert isinstance(adapted, BlockStored)
    assert isinstance(private, BlockStored)
    assert (salted.lora_name, salted.extra_keys) == (None, [(hashed("acme"),)])
    assert (adapted.lora_name, adapted.extra_keys) == ("sql", [("sql", hashed("acme"))])
    assert private.extra_keys == [((hashed("acme/eve"), 0),)]
    assert len({*salted.block_hashes, *adapted.block_hashes, *private.block_hashes}) == 3


def test_a_picture_is_named_by_its_pixels_in_all_gateways() -> None:
    prompt = (*ONE[:4], *picture_tokens(7, 12))
    again = (*ONE[:4], *picture_tokens(8, 12))
    one, two, other = KVBlocks(digest_of), KVBlocks(lambda number: "pixels 7"), KVBlocks(digest_of)
    (stored,) = one.follow([NodeAdded(2, 0, "", told(prompt))])
    assert isinstance(stored, BlockStored)
    assert stored.extra_keys == [(("pixels 7", 4),)]
    assert stored.token_ids == [*ONE[:4], *[PICTURE_BASE] * 12]
    assert two.follow([NodeAdded(2, 0, "", told(again))]) == [stored]
    assert other.follow([NodeAdded(2, 0, "", told(again))]) != [stored]


def test_a_cleared_tree_has_no_blocks() -> None:
    blocks = KVBlocks(digest_of)
    assert blocks.follow([NodeAdded(2, 0, "", told(ONE)), CacheCleared()]) == [AllBlocksCleared()]
    assert list(blocks.snapshot()) == []


def test_an_event_that_does_not_fit_is_noticed() -> None:
    with pytest.raises(KeyError):
        KVBlocks(digest_of).follow([NodeRemoved(3)])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=configs, events=st.lists(arrivals, min_size=1, max_size=10), size=st.sampled_from([1, 2, 4]))
def test_the_blocks_are_those_of_the_tree_after_every_step(
    config: dict[str, object], events: list[Arrival], size: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_blocks, "BLOCK_TOKENS", size)
        engine = Following(**config)  # type: ignore[arg-type]
        drive(engine, events)
        again = {name for stored in engine.blocks.snapshot() for name in stored.block_hashes}
        assert again == names_of(engine.scheduler.kv.cache, size) == engine.published


class Following(Engine):
    """An engine whose blocks are followed by a router, which is right after every step."""

    def __init__(self, **config: object) -> None:
        super().__init__(**config)  # type: ignore[arg-type]
        self.blocks = KVBlocks(digest_of)
        self.published: set[int] = set()

    def _follow(self, events: list) -> list:  # type: ignore[type-arg]
        for message in events:
            for event in self.blocks.follow(message.events) if isinstance(message, CacheEvents) else ():
                match event:
                    case AllBlocksCleared():
                        self.published.clear()
                    case BlockRemoved(names):
                        assert self.published.issuperset(names)
                        self.published.difference_update(names)
                    case BlockStored(names, parent):
                        assert parent is None or parent in self.published
                        assert not self.published.intersection(names), "a block is stored once"
                        self.published.update(names)
        rest = super()._follow(events)
        assert self.published == names_of(self.scheduler.kv.cache, kv_blocks.BLOCK_TOKENS)
        return rest
