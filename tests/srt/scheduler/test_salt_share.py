"""The share of a salt: what one holds of the pool never exceeds it, and costs no other salt anything.

The harness checks after every step that each salt owns at most its share, counted anew (`KVManager.check`).
"""

import asyncio
from collections.abc import Iterable

import numpy as np
import pytest
from umbel.lang.errors import ContextLengthError, ParameterError
from umbel.lang.prompt import Text
from umbel.lang.protocol import GenRequest
from umbel.lang.runtime_options import most_of_salt
from umbel.lang.sampling import SamplingParams
from umbel.srt.cache.radix_cache import RadixCache
from umbel.srt.cache.slot_allocator import IntegrityError, SlotAllocator
from umbel.srt.core.messages import Ended, EngineFailed
from umbel.srt.in_process import LocalBackend

from ..engine_harness import Engine

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
HEAD = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def cached(engine: Engine, tokens: Iterable[int], salt: str) -> int:
    return engine.scheduler.kv.cache.peek(np.array(list(tokens), dtype=np.int32), salt)


def owned(engine: Engine, salt: str) -> int:
    return next((root.owned for root in engine.scheduler.kv.cache.salts if root.salt == salt), 0)


def flood(engine: Engine, salt: str, requests: int, **schedule: object) -> None:
    """Runs prompts of 14 tokens that share none."""
    for number in range(requests):
        engine.generate([11 + number % 10, 1 + number // 10, *([2] * 12)], ONE, salt=salt, **schedule)
        engine.run()


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_flood_of_one_salt_leaves_the_prefix_of_another(share: float) -> None:
    engine = Engine(pool=80, context=30, salt_share=share)
    engine.generate(HEAD, ONE, salt="b")
    engine.run()
    flood(engine, "a", 60)
    assert cached(engine, HEAD, "b") == (len(HEAD) if share < 1 else 0), "without a share it is gone"
    assert (owned(engine, "a") <= 40) == (share < 1)


def test_private_parts_count_for_their_salt() -> None:
    engine = Engine(pool=80, context=30, salt_share=0.5)
    engine.generate(HEAD, ONE, salt="b")
    engine.run()
    for number in range(20):
        flood(engine, "a", 3, private=((2, f"a/{number}"),))
    assert owned(engine, "a") <= 40
    assert cached(engine, HEAD, "b") == len(HEAD)


def test_a_salt_at_its_share_evicts_what_it_used_least_recently_itself() -> None:
    engine = Engine(pool=80, context=30, salt_share=0.5)
    oldest, older, used = ([number, *([3] * 9)] for number in (11, 12, 13))
    for salt, tokens in (("b", HEAD), ("a", oldest), ("a", older), ("a", used), ("a", oldest)):
        engine.generate(tokens, ONE, salt=salt)
        engine.run()
    engine.generate([14, *([3] * 14)], ONE, salt="a")
    engine.run()
    assert [cached(engine, tokens, "a") for tokens in (older, used, oldest)] == [0, 10, 10]
    assert cached(engine, HEAD, "b") == len(HEAD), "it is the oldest of all"


def test_a_request_that_is_longer_than_the_share_is_refused() -> None:
    engine = Engine(pool=80, context=60, salt_share=0.25)
    refused, fits = engine.generate([1] * 20, ONE), engine.generate([1] * 19, ONE)
    scored, hinted = engine.score([[1] * 21], 5), engine.hint([1] * 30)
    engine.run()
    for message in (refused, scored):
        failure = engine.endings[message]
        assert isinstance(failure, EngineFailed)
        assert failure.kind == "ContextLengthError"
        assert "the 20 tokens of the KV pool that one salt may hold; shorten it, or start with" in failure.message
        assert "salt_share" in failure.message
    assert isinstance(engine.endings[fits], Ended)
    assert hinted not in engine.endings


def test_a_text_ends_where_its_salt_has_no_more() -> None:
    engine = Engine(pool=80, context=60, salt_share=0.25)
    message = engine.generate([1] * 10, SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    engine.run()
    assert len(engine.tokens(message)) == 10


LONG = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("max_wait", [1e9, 0.0])
@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_a_request_that_waits_for_its_salt_holds_up_no_other(policy: str, max_wait: float) -> None:
    engine = Engine(pool=120, context=30, salt_share=0.25, headroom=0, policy=policy, max_wait=max_wait)
    first = engine.generate([11] * 16, LONG, salt="a")
    waits = [engine.generate([number] * 16, LONG, salt="a") for number in (12, 13)]
    other = engine.generate([14] * 16, LONG, salt="b")
    for _ in range(4):
        engine.step()
    assert (engine.scheduler.running, engine.scheduler.waiting) == (2, 2)
    engine.run()
    assert engine.ended_in[other] == engine.ended_in[first] < engine.ended_in[waits[0]] < engine.ended_in[waits[1]]
    for number, message in zip((11, 12, 13, 14), (first, *waits, other), strict=True):
        engine.assert_equals_reference(message, [number] * 16, LONG)


def test_running_requests_of_a_salt_that_outgrow_it_retract_each_other_only() -> None:
    """Admission looks at prompts; texts grow. The other salt, of the lowest rank, runs on."""
    engine = Engine(pool=120, context=30, salt_share=0.25, headroom=0)
    mine = [engine.generate([number] * 12, LONG, salt="a") for number in (11, 12)]
    other = engine.generate([13] * 12, LONG, salt="b")
    while other not in engine.endings:
        engine.step()
    before = engine.count("retractions")
    engine.run()
    assert before >= 1
    assert engine.ended_in[other] == 12, "a step for each token"
    for number, message in zip((11, 12, 13), (*mine, other), strict=True):
        engine.assert_equals_reference(message, [number] * 12, LONG)


def test_the_pins_of_a_salt_make_room_in_its_share_and_those_of_others_stay() -> None:
    engine = Engine(pool=80, context=40, salt_share=0.5)
    for salt in ("b", "a"):
        engine.hint(HEAD, pin=60.0, salt=salt)
        engine.run()
    message = engine.generate([11] * 35, ONE, salt="a")
    engine.run()
    engine.assert_equals_reference(message, [11] * 35, ONE)
    assert (cached(engine, HEAD, "a"), cached(engine, HEAD, "b")) == (0, len(HEAD))
    assert engine.count("pins_given_way") == 1


def test_kept_prefixes_of_a_salt_leave_room_for_one_sequence_in_its_share() -> None:
    engine = Engine(pool=100, context=24, salt_share=0.34)  # 34 slots, so 10 may be kept
    first, _ = engine.mark(HEAD, 10, sampling=ONE, salt="a")
    second, _ = engine.mark([11, *HEAD], 10, sampling=ONE, salt="a")
    other, _ = engine.mark(HEAD, 10, sampling=ONE, salt="b")
    engine.run()
    assert [engine.marks(message) for message in (first, second, other)] == [[True], [False], [True]]
    longest = engine.generate([12] * 23, ONE, salt="a")
    engine.run()
    engine.assert_equals_reference(longest, [12] * 23, ONE)


# ------------------------------------------------------------------------------------ what it costs


def test_without_a_share_no_order_is_kept_for_a_salt() -> None:
    engine = Engine(pool=80, context=30)
    flood(engine, "a", 3)
    assert [root.leaves for root in engine.scheduler.kv.cache.salts] == [None]


def test_an_eviction_of_a_salt_looks_at_none_of_the_other_leaves() -> None:
    """And the orders forget the leaves that the other one has evicted, or they would grow without end."""
    cache = RadixCache(pool := SlotAllocator(4001), by_salt=True)

    def serve(salt: str, token: int) -> None:
        match = cache.match(np.array([token], dtype=np.int32), salt)
        cache.lock(match)
        cache.unlock(cache.extend(match, np.array([token], dtype=np.int32), pool.allocate(1)))

    for number in range(2000):
        serve("b", number)
    for number in range(100):
        serve("a", number)
    root = next(root for root in cache.salts if root.salt == "a")
    assert root.leaves is not None
    before = root.leaves.operations
    assert cache.evict_of(root, 10) == 10
    assert root.leaves.operations - before == 10
    for number in range(3000):
        serve("a", 1000 + number)
        cache.evict_of(root, 1)
    cache.check([])
    assert len(cache.eviction) < 5000  # type: ignore[arg-type]
    for number in range(3000):
        serve("b", 5000 + number)
        cache.evict(1)
    assert sum(len(root.leaves) for root in cache.salts if root.leaves is not None) < 5000


def test_a_count_that_is_wrong_is_found() -> None:
    engine = Engine(pool=80, context=30, salt_share=0.5)
    flood(engine, "a", 1)
    (root,) = engine.scheduler.kv.cache.salts
    for name in ("cached", "private_slots", "held_tokens", "kept_tokens"):
        setattr(root, name, getattr(root, name) + 1)
        with pytest.raises(IntegrityError, match="salt 'a'"):
            engine.scheduler.check()
        setattr(root, name, getattr(root, name) - 1)


# ------------------------------------------------------------------------------------ as an option


def test_the_slots_of_a_share() -> None:
    assert [most_of_salt(share, 1000) for share in (1.0, 0.5, 0.001)] == [1000, 500, 2]


def test_the_runtime_takes_it_and_tells_what_fits() -> None:
    async def scenario() -> None:
        backend = LocalBackend(pool_tokens=100, context_length=90, salt_share=0.25)
        await backend.start()
        assert backend.capabilities.max_context == 25
        with pytest.raises(ContextLengthError, match="salt_share"):
            [event async for event in backend.generate(GenRequest("r", (Text("a" * 40),)))]
        await backend.close()

    asyncio.run(scenario())
    with pytest.raises(ParameterError, match=r"salt_share.*0\.001 to 1"):
        LocalBackend(salt_share=0.0)
