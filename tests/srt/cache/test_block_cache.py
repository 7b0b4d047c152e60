"""The cache of blocks: vLLM's worked examples, queue by queue, and requests on it next to requests on the tree."""

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from umbel.lang.errors import ParameterError
from umbel.lang.runtime_options import DebugOptions, RuntimeOptions
from umbel.lang.sampling import SamplingParams
from umbel.srt.cache.block_cache import NO_PARENT, BlockCache, BlockMatch, BlockPool, HashBlock, block_hash
from umbel.srt.cache.slot_allocator import IntegrityError
from umbel.srt.core.batch import WindowPool, picture_tokens
from umbel.srt.core.instruments import VirtualClock, no_faults
from umbel.srt.core.messages import EnginePicture
from umbel.srt.in_process import LocalBackend
from umbel.srt.launch import LoadedModel, open_engine
from umbel.srt.testing.oracle import OracleRunner
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from ... import conformance
from ..engine_harness import Engine

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Table:
    """A request with its blocks, which it fills token by token."""

    def __init__(self, cache: BlockCache, tokens: Sequence[int], salt: str = "") -> None:
        self.cache, self.pool = cache, cache._pool
        self.tokens: list[int] = []
        self.private = np.empty(0, dtype=np.int32)
        self.match: BlockMatch = cache.match(np.array(tokens, dtype=np.int32), salt)
        cache.lock(self.match)
        self.hits = [block.id for block in self.match.blocks]
        self.cached = self.match.length
        self.tokens = list(tokens[: self.cached])
        self.grow(tokens[self.cached :])

    @property
    def blocks(self) -> list[int]:
        return [block.id for block in (*self.match.blocks, *self.pool.blocks_of(self.private))]

    def grow(self, tokens: Iterable[int]) -> None:
        """Takes the blocks that these tokens need, and gives those that are full their hash."""
        self.tokens += tokens
        size = self.cache.page
        missing = -(-(len(self.tokens) - self.match.length) // size) * size - len(self.private)
        self.cache.make_room(missing)
        self.private = np.concatenate([self.private, self.pool.allocate(missing)])
        before = self.match.length
        rest = np.array(self.tokens[before:], dtype=np.int32)
        match = self.cache.extend(self.match, rest, self.private[: len(rest)])
        assert isinstance(match, BlockMatch)
        self.match, self.private = match, self.private[match.length - before :]

    def end(self) -> None:
        self.pool.release(self.private)
        self.cache.unlock(self.match)


def block_cache(blocks: int = 10, size: int = 4) -> BlockCache:
    return BlockCache(BlockPool(blocks * size + 1, size))


def queue(cache: BlockCache) -> list[int]:
    return [block.id for block in cache._pool.queue]


def cached(cache: BlockCache) -> list[int]:
    return [block.id for block in cache._pool.blocks if block.hash is not None]


def checked(cache: BlockCache, *tables: Table) -> None:
    cache.check([table.match for table in tables])
    cache._pool.check(cache.held_slots() + [table.private for table in tables])


# ---------------------------------------------------------------------------------- the worked examples

A, KL, MN = range(100, 118), (210, 211), (212, 213)  # A … P and Q; k, l and m, n of request 1


def test_the_example_of_ten_blocks_queue_by_queue() -> None:
    cache = block_cache()
    first = Table(cache, A[:15])  # time 1: ABCD EFGH IJKL MNO
    assert (first.blocks, cached(cache)) == ([0, 1, 2, 3], [0, 1, 2])
    assert queue(cache) == [4, 5, 6, 7, 8, 9]

    first.grow(A[15:17])  # time 3: P fills block 3, Q needs another
    assert (first.blocks, cached(cache)) == ([0, 1, 2, 3, 4], [0, 1, 2, 3])

    second = Table(cache, [*A[:10], *KL, *MN])  # time 4: ABCD EFGH IJkl mn
    assert (second.hits, second.cached) == ([0, 1], 8), "of block 2 only IJ is the same"
    assert (second.blocks, cached(cache)) == ([0, 1, 5, 6], [0, 1, 2, 3, 5])
    checked(cache, first, second)

    first.end()  # time 5: 0 and 1 are still in use
    assert queue(cache) == [7, 8, 9, 4, 3, 2]
    assert cached(cache) == [0, 1, 2, 3, 5], "blocks in the queue are still found"

    second.end()  # time 6
    assert queue(cache) == [7, 8, 9, 4, 3, 2, 6, 5, 1, 0]

    prompt = np.array([*A[:12], *range(300, 317)], dtype=np.int32)  # time 7: ABCD EFGH IJKL and 17 others
    hit = cache.match(prompt, "")
    cache.lock(hit)
    assert [block.id for block in hit.blocks] == [0, 1, 2]
    assert queue(cache) == [7, 8, 9, 4, 3, 6, 5]
    cache.unlock(hit)
    assert queue(cache) == [7, 8, 9, 4, 3, 6, 5, 2, 1, 0]
    third = Table(cache, prompt.tolist())
    assert (third.hits, third.blocks) == ([0, 1, 2], [0, 1, 2, 7, 8, 9, 4, 3])
    assert queue(cache) == [6, 5]
    assert cache.peek(np.array(A[:17], dtype=np.int32), "") == 12, "block 3, A to P, was evicted"
    checked(cache, third)


def test_room_is_made_by_evicting_the_blocks_that_are_taken_next() -> None:
    cache = block_cache()
    table = Table(cache, A[:17])
    table.end()
    assert queue(cache) == [5, 6, 7, 8, 9, 4, 3, 2, 1, 0]
    assert cache.make_room(6 * 4) == 0, "the first six are not cached"
    assert cache.make_room(7 * 4) == 4
    assert cached(cache) == [0, 1, 2]
    checked(cache)
    assert cache.clear() == 12
    assert (cached(cache), cache._pool.free) == ([], 40)


def test_blocks_of_one_request_are_freed_last_first() -> None:
    cache = block_cache()
    Table(cache, range(500, 504))  # block 0
    other = Table(cache, range(504, 508))  # block 1
    request = Table(cache, range(600, 612))  # blocks 2, 3, 4
    for token in range(3):
        Table(cache, range(700 + 4 * token, 704 + 4 * token))  # blocks 5, 6, 7
    request.grow([612])
    assert request.blocks == [2, 3, 4, 8]
    request.end()
    assert queue(cache) == [9, 8, 4, 3, 2]
    other.end()
    assert queue(cache) == [9, 8, 4, 3, 2, 1]


def test_a_full_block_that_equals_a_cached_one_stays() -> None:
    """Tables only grow: ABCDEF and GHI twice. The second request keeps its block 3, which is block 1 again."""
    prompt, answer = list(range(1, 7)), [7, 8, 9]
    cache = block_cache()
    first = Table(cache, prompt)
    for token in answer:
        first.grow([token])
    assert (first.blocks, cached(cache)) == ([0, 1, 2], [0, 1])
    second = Table(cache, prompt)
    second.grow(answer[:1])
    assert (second.hits, second.blocks, cached(cache)) == ([0], [0, 3], [0, 1])
    second.grow(answer[1:2])
    assert (second.blocks, cached(cache)) == ([0, 3], [0, 1, 3])
    assert cache._pool.blocks[1].hash == cache._pool.blocks[3].hash
    checked(cache, first, second)
    second.end()
    assert Table(cache, [*prompt, *answer]).hits == [0, 1], "the older of the two is found"


def test_only_a_prefix_of_full_blocks_is_found() -> None:
    cache = block_cache()
    Table(cache, [*range(1, 8)])  # ABCD EFG: 4 + 3
    assert cached(cache) == [0]
    Table(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert Table(cache, [9, 2, 3, 4, 5, 6, 7, 8]).cached == 0, "EFGH is cached after ABCD only"
    assert Table(cache, [1, 2, 3, 9, 5, 6, 7, 8]).cached == 0


def test_what_was_computed_after_wrong_keys_is_forgotten_with_them() -> None:
    cache = block_cache()
    wrong = Table(cache, range(1, 9))  # blocks 0, 1
    after = Table(cache, [*range(1, 9), *range(20, 28)])  # blocks 2, 3, after 1
    other = Table(cache, range(30, 38))  # blocks 4, 5
    held = Table(cache, range(1, 5))  # block 0
    for table in (wrong, after, other):
        table.end()
    assert cached(cache) == [0, 1, 2, 3, 4, 5]
    assert cache.discard(wrong.match) == 3 * 4
    assert cached(cache) == [0, 4, 5], "0 is held, and 4 and 5 do not follow it"
    checked(cache, held)


# ---------------------------------------------------------------------------------- hashes


def test_a_hash_is_made_of_parent_tokens_and_the_rest() -> None:
    tokens = b"\1\0\0\0"
    hashes = [
        block_hash(NO_PARENT, tokens),
        block_hash(block_hash(NO_PARENT, tokens), tokens),
        block_hash(NO_PARENT, b"\2\0\0\0"),
        block_hash(NO_PARENT, tokens, (b"",)),
        block_hash(NO_PARENT, tokens, (b"ab", b"c")),
        block_hash(NO_PARENT, tokens, (b"a", b"bc")),
    ]
    assert len(set(hashes)) == len(hashes)
    assert {len(digest) for digest in hashes} == {32}


def test_salts_and_private_parts_share_no_block() -> None:
    tokens = np.arange(1, 13, dtype=np.int32)
    cache = block_cache()

    def hashes(salt: str = "", borders: tuple[tuple[int, str], ...] = ()) -> list[bytes]:
        return list(cache.hashes(tokens, salt, borders))

    public = hashes()
    others = [hashes("acme"), hashes(borders=((0, "adapter"),)), hashes(borders=((3, "/x"),)), hashes("ac")]
    assert len({digest for sequence in (public, *others) for digest in sequence}) == 15
    late = hashes(borders=((4, "/x"),))
    assert late[0] == public[0]
    assert not {*late[1:]} & {*public}, "what follows a private part is private"


@pytest.mark.parametrize("pieces", [[4, 8], [8, 4], [12]])
def test_hashes_are_the_same_however_a_sequence_came(pieces: list[int]) -> None:
    cache = block_cache()
    table = Table(cache, range(1, 1 + pieces[0]))
    for count in pieces[1:]:
        table.grow(range(len(table.tokens) + 1, len(table.tokens) + 1 + count))
    found = [block.hash for block in table.match.blocks]
    assert found == list(cache.hashes(np.arange(1, 13, dtype=np.int32), ""))


# ---------------------------------------------------------------------------------- requests


def engine(block_size: int, **settings: object) -> Engine:
    return Engine(**{"pool": 640, "context": 400, "block_cache": block_size, **settings})  # type: ignore[arg-type]


def second_finds(block_size: int, first: list[int], second: list[int]) -> int:
    machine = engine(block_size)
    machine.generate(first, ONE)
    machine.run()
    message_id = machine.generate(second, ONE)
    machine.run()
    machine.assert_equals_reference(message_id, second, ONE)
    return machine.cached(message_id)


def test_of_twenty_shared_tokens_blocks_find_sixteen_and_the_tree_all() -> None:
    shared = [1 + token % 20 for token in range(20)]
    assert second_finds(16, [*shared, *[21] * 20], [*shared, *[22] * 20]) == 16
    assert second_finds(0, [*shared, *[21] * 20], [*shared, *[22] * 20]) == 20


def test_an_image_is_told_apart_from_the_first_block_on() -> None:
    """8 tokens, 41 of the image and 1: three full blocks of 16; the fourth has two tokens, and is not cached."""

    def prompt(number: int) -> list[int]:
        return [1, 3, 7, 16, 12, 15, 9, 10, *picture_tokens(number, 41), 4]

    for size, other, found in ((16, 0, 48), (0, 8, 50)):
        machine = engine(size)
        for number in (1, 2):
            machine.scheduler.handle_message(EnginePicture(number, 41, 8, 8, 0, 0, 1, 1, b"\0\0\0"))
        for number in (1, 2):
            message_id = machine.generate(prompt(number), ONE)
            machine.run()
            assert machine.cached(message_id) == (0 if number == 1 else other)
        message_id = machine.generate(prompt(1), ONE)
        assert machine.scheduler.kv.cache.peek(np.array(prompt(1), dtype=np.int32), "") == found
        machine.run()
        assert machine.cached(message_id) == min(found, 49), "the last token is computed: it chooses the next"


def test_two_pictures_in_one_block_are_told_apart_by_their_places() -> None:
    cache = block_cache(size=8)

    def hashes(*numbers: int) -> bytes:
        ids = [token for number in numbers for token in picture_tokens(number, 1)]
        return next(cache.hashes(np.array([7, *ids, 5, 5], dtype=np.int32), ""))

    sequences = [(1, 1, 1, 2, 2), (1, 1, 2, 2, 2), (1, 2, 1, 2, 1), (1, 1, 1, 1, 1), (2, 2, 2, 2, 2)]
    assert len({hashes(*numbers) for numbers in sequences}) == len(sequences)


def test_requests_of_one_step_share_full_blocks() -> None:
    prompt = [1 + token % 20 for token in range(40)]
    for size, found in ((16, 32), (0, 39)):
        machine = engine(size)
        ids = [machine.generate(prompt, ONE) for _ in range(2)]
        machine.step()
        machine.run()
        assert [machine.cached(message_id) for message_id in ids] == [0, found]
        assert machine.steps <= 2


def test_equal_answers_leave_duplicates_in_blocks_and_none_in_the_tree() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=17, ignore_eos=True)
    tokens = {}
    for size in (4, 0):
        machine = engine(size)
        ids = [machine.generate([1, 2, 3, 4, 5, 6], sampling) for _ in range(2)]
        machine.run()
        assert machine.tokens(ids[0]) == machine.tokens(ids[1])
        tokens[size] = machine.scheduler.kv.cache.total_tokens
    assert tokens == {4: 4 + 2 * 16, 0: 6 + 16}


def test_pins_and_kept_prefixes_hold_whole_blocks() -> None:
    machine = engine(16, pool=160, context=100)
    prompt = [1 + token % 20 for token in range(40)]
    hint = machine.hint(prompt, pin=60.0)
    machine.run()
    assert machine.scheduler.kv.cache.pinned_tokens == 32
    _, (mark,) = machine.mark([9, *prompt], 33)
    machine.run()
    assert machine.scheduler.kv.cache.kept_tokens == 32
    for start in range(12):
        machine.generate([20 - start, *range(1, 20), *prompt])
    machine.run()
    assert machine.count("evicted_tokens") > 0
    assert machine.scheduler.kv.cache.peek(np.array(prompt, dtype=np.int32), "") == 32
    machine.release(hint)
    machine.release(mark)
    machine.run()
    assert machine.scheduler.kv.cache.pinned_tokens == machine.scheduler.kv.cache.kept_tokens == 0
    assert machine.scheduler.kv.flush() > 0
    assert machine.scheduler.kv.pool.free == machine.scheduler.kv.pool.total == 160


# ---------------------------------------------------------------------------------- integrity


def _block(machine: Engine) -> HashBlock:
    cache = machine.scheduler.kv.cache
    assert isinstance(cache, BlockCache)
    return next(block for block in cache._pool.blocks if block.hash is not None)


def _lose_a_block(machine: Engine) -> None:
    _block(machine).references += 1


def _misname_a_block(machine: Engine) -> None:
    _block(machine).hash = NO_PARENT


def _hand_out_a_block(machine: Engine) -> None:
    machine.scheduler.kv.pool.allocate(16)


def _miscount(machine: Engine) -> None:
    cache = machine.scheduler.kv.cache
    assert isinstance(cache, BlockCache)
    cache._pool.evictable -= 1


@pytest.mark.parametrize("damage", [_lose_a_block, _misname_a_block, _hand_out_a_block, _miscount])
def test_damage_is_found(damage: object) -> None:
    machine = engine(16)
    machine.generate([1 + token % 20 for token in range(40)], ONE)
    machine.run()
    damage(machine)  # type: ignore[operator]
    with pytest.raises(IntegrityError):
        machine.scheduler.check()


def test_a_released_block_is_not_released_again() -> None:
    pool = BlockPool(41, 4)
    slots = pool.allocate(8)
    pool.release(slots)
    with pytest.raises(IntegrityError):
        pool.release(slots)


# ---------------------------------------------------------------------------------- the option


# One case counts cached tokens to the token, the other looks at the tree.
OF_THE_TREE = {conformance.usage_counts_what_was_cached, conformance.a_state_can_be_read_while_requests_run}
CASES = [case for case in conformance.CASES if case not in OF_THE_TREE]


@pytest.mark.sampled(6)
@pytest.mark.filterwarnings("ignore::umbel.lang.chat_template.TemplateWarning")
@pytest.mark.parametrize("case", CASES, ids=conformance.name_of)
def test_a_runtime_on_blocks_conforms_as_a_backend(case: conformance.Case) -> None:
    conformance.check(case, lambda: LocalBackend(debug={"block_cache": 4}))


@pytest.mark.parametrize(
    ("options", "runner", "hint"),
    [
        ({"salt_share": 0.5}, OracleRunner(), "leave salt_share out"),
        ({"replicas": 2}, OracleRunner(), "leave replicas out"),
        ({"kv_events": "5557"}, OracleRunner(), "leave kv_events out"),
        ({}, OracleRunner(num_states=5), "leave block_cache out"),
        ({}, OracleRunner(window_pool=WindowPool(9, 4)), "leave block_cache out"),
        ({}, OracleRunner(num_slots=16), "a larger pool_tokens"),
    ],
)
def test_what_blocks_cannot_do_is_refused(options: dict[str, object], runner: OracleRunner, hint: str) -> None:
    given = RuntimeOptions(debug=DebugOptions(block_cache=16), **options)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=hint):
        open_engine(
            given,
            clock=VirtualClock(),
            faults=no_faults,
            phase=lambda _: None,
            loaded=LoadedModel("oracle", ByteTokenizer(), runner),
        )
