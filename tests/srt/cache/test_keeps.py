"""Kept prefixes (explicit caching): no flood takes them, no request waits for them for ever, and their end is known."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.batch import Batch, Logits
from umbel.srt.core.messages import Ended, EngineAbort, EngineControl

from ..engine_harness import Engine

HEAD = list(range(1, 21))  # 20 tokens
NONE = SamplingParams(temperature=0.0, max_tokens=0)
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def kept(engine: Engine) -> int:
    return engine.scheduler.kv.cache.kept_tokens


def cached(engine: Engine, tokens: list[int], salt: str = "") -> int:
    return engine.scheduler.kv.cache.peek(np.array(tokens, dtype=np.int32), salt)


def flood(engine: Engine, tokens: int) -> None:
    """Computes so many tokens, none of them of HEAD."""
    for number in range(tokens // 15):
        engine.generate([21, 22, 1 + number % 20, 1 + number // 20, *([2] * 11)], ONE)
        engine.run()


# -------------------------------------------------------------------------------- what is kept


def test_a_flood_of_ten_times_the_pool_leaves_a_kept_prefix_in_place() -> None:
    engine = Engine(pool=80, context=40)
    message, _ = engine.mark([*HEAD, 5], 20, sampling=ONE)
    engine.run()
    flood(engine, 800)
    reader = engine.generate([*HEAD, 21], ONE)
    engine.run()
    assert (engine.marks(message), engine.cached(reader), kept(engine)) == ([True], 20, 20)


def test_marks_keep_exactly_their_tokens() -> None:
    engine = Engine(pool=80, context=40)
    message, (short, long) = engine.mark([*HEAD, 5, 6, 7], 7, 15)
    engine.run()
    assert (engine.marks(message), kept(engine)) == ([True, True], 15)
    engine.release(long)
    assert kept(engine) == 7
    engine.release(short)
    assert (kept(engine), engine.count("keeps_released")) == (0, 2)


@pytest.mark.parametrize("sampling", [NONE, ONE])
@pytest.mark.parametrize("step_tokens", [None, 3])
def test_a_prompt_that_is_cached_whole_or_comes_in_chunks_is_kept(
    sampling: SamplingParams, step_tokens: int | None
) -> None:
    engine = Engine(pool=80, context=40, max_step_tokens=step_tokens)
    for _ in range(2):  # the second one finds all of it
        message, (mark,) = engine.mark(HEAD, 20, sampling=sampling)
        engine.run()
        assert (engine.marks(message), kept(engine)) == ([True], 20)
        engine.release(mark)


def test_a_retracted_request_keeps_its_marks_once() -> None:
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine = Engine(pool=100, context=60, headroom=0)
    engine.generate([9] * 10, long)
    message, _ = engine.mark(HEAD[:10], 8, sampling=long)
    engine.mark([7] * 10, 8, sampling=long)
    engine.run()
    assert engine.count("retractions") > 0
    assert (engine.marks(message), engine.count("keeps_placed")) == ([True], 2)


def test_a_prefix_is_kept_for_its_salt() -> None:
    engine = Engine(pool=80, context=40)
    engine.mark(HEAD, 20, sampling=ONE, salt="mine")
    engine.run()
    flood(engine, 200)
    assert (cached(engine, HEAD, "mine"), cached(engine, HEAD)) == (20, 0)


def test_without_a_tree_nothing_is_kept() -> None:
    engine = Engine(pool=80, context=40, radix_cache=False)
    message, _ = engine.mark(HEAD, 20)
    engine.run()
    assert (engine.marks(message), engine.count("keeps_refused")) == ([False], 1)


# -------------------------------------------------------------------------------- the share


def test_beyond_the_share_nothing_is_kept() -> None:
    engine = Engine(pool=100, context=40, pin_share=0.3)
    first, _ = engine.mark(HEAD, 5, 20)
    second, _ = engine.mark([9] * 20, 10, 11, 12)
    engine.run()
    assert (engine.marks(first), engine.marks(second)) == ([True, True], [True, False, False])
    assert (kept(engine), engine.count("keeps_refused")) == (30, 2)


def test_tokens_that_are_kept_twice_count_once() -> None:
    engine = Engine(pool=100, context=40, pin_share=0.2)
    messages = [engine.mark([*HEAD, last], 20)[0] for last in (5, 6, 7)]
    engine.run()
    assert ([engine.marks(message) for message in messages], kept(engine)) == ([[True]] * 3, 20)


def test_pins_of_hints_give_way_to_kept_prefixes_and_not_the_other_way() -> None:
    engine = Engine(pool=100, context=40, pin_share=0.3)
    engine.hint([9] * 20, pin=600.0)
    engine.run()
    engine.mark(HEAD, 20)
    engine.run()
    assert (kept(engine), engine.count("pins_given_way")) == (20, 1)
    engine.hint([9] * 20, pin=600.0)
    engine.hint([8] * 10, pin=600.0)
    engine.run()
    assert (kept(engine), engine.count("pins_refused"), len(engine.scheduler.kv.pins)) == (20, 1, 1)


def test_the_longest_request_fits_next_to_everything_that_is_kept() -> None:
    """Law of Pins: longest + kept ≤ pool. Two requests of the full length take turns next to a full share."""
    engine = Engine(pool=90, context=60, pin_share=0.5, max_wait=5.0)
    assert engine.scheduler.kv.pins.most_kept == 30
    message, _ = engine.mark([*HEAD, *[9] * 15], 30)
    engine.run()
    assert engine.marks(message) == [True]
    long = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    requests = [(engine.generate([first] * 10, long), [first] * 10) for first in (7, 8)]
    engine.run()
    for number, prompt in requests:
        engine.assert_equals_reference(number, prompt, long)
    assert kept(engine) == 30


def test_a_pool_that_holds_one_sequence_keeps_nothing() -> None:
    engine = Engine(pool=60, context=120)
    message, _ = engine.mark(HEAD, 20)
    whole = engine.generate([7] * 59, ONE)
    engine.run()
    assert engine.marks(message) == [False]
    engine.assert_equals_reference(whole, [7] * 59, ONE)


# -------------------------------------------------------------------------------- the end


def test_a_kept_prefix_ends_with_its_seconds_and_the_engine_says_so() -> None:
    engine = Engine(pool=80, context=40)
    _, (mark,) = engine.mark(HEAD, 20, seconds=5.0)
    engine.run()
    engine.generate([*HEAD, 21], ONE)  # a use renews no kept prefix: the gateway does
    engine.run()
    engine.clock.advance(4.9)
    engine.renew(mark, 5.0)
    engine.renew(mark, 1.0)  # never shorter
    engine.clock.advance(4.9)
    engine.step()
    assert (kept(engine), engine.lost_keeps) == (20, [])
    engine.clock.advance(0.1)
    engine.step()
    assert (kept(engine), engine.lost_keeps, engine.count("keeps_expired")) == (0, [mark], 1)
    engine.renew(mark, 5.0)
    engine.release(mark)
    assert engine.count("keeps_released") == 0


def test_flushing_the_cache_ends_kept_prefixes_also_of_running_requests() -> None:
    engine = Engine(pool=80, context=40)
    first, (one,) = engine.mark(HEAD, 20)
    engine.run()
    second, (two,) = engine.mark([7, 8, 9], 3, sampling=SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    engine.step()
    engine.step()
    engine.scheduler.handle_message(EngineControl(99, "flush_cache"))
    engine.run()
    assert (engine.marks(first), engine.marks(second), engine.lost_keeps) == ([True], [True], [one, two])
    assert (kept(engine), engine.count("keeps_lost")) == (0, 2)


def test_a_failed_step_ends_kept_prefixes_and_the_engine_says_so() -> None:
    engine = Engine(pool=80, context=40)
    _, (mark,) = engine.mark(HEAD, 20)
    engine.run()
    healthy, failures = engine.runner.forward, iter([True])

    def forward(batch: Batch) -> Logits:
        if next(failures, False):
            raise RuntimeError("the first step fails")
        return healthy(batch)

    engine.runner.forward = forward  # type: ignore[method-assign]
    engine.generate([3, 4], ONE)
    engine.run()
    assert (kept(engine), engine.lost_keeps) == (0, [mark])


def test_a_request_that_is_aborted_before_its_prompt_is_computed_keeps_nothing() -> None:
    engine = Engine(pool=80, context=40, max_step_tokens=4)
    message, _ = engine.mark(HEAD, 20)
    engine.step()
    engine.scheduler.handle_message(EngineAbort(message))
    engine.run()
    assert (engine.marks(message), kept(engine)) == ([], 0)


# -------------------------------------------------------------------------------- anything at any time

stems = st.sampled_from([(1, 2, 3, 4, 5, 6), (1, 2, 3, 9, 9), (4, 4, 4, 4), (7,)])
prompts = st.builds(lambda stem, rest: [*stem, *rest], stems, st.lists(st.integers(1, 3), max_size=5))
kinds = ["mark", "mark", "mark", "pin", "release", "renew", "generate", "generate", "score", "flush", "abort"]
events = st.lists(
    st.tuples(st.sampled_from(kinds), prompts, st.integers(0, 9), st.sampled_from(["", "", "s"])), max_size=25
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events,
    st.sampled_from([(22, 20), (40, 25), (120, 40)]),
    st.sampled_from([0.3, 0.5, 1.0]),
    st.sampled_from([2, 16, None]),
    st.booleans(),
)
def test_whatever_is_kept_every_request_ends_and_nothing_kept_is_lost(
    history: list[tuple[str, list[int], int, str]],
    sizes: tuple[int, int],
    share: float,
    step_tokens: int | None,
    overlap: bool,
) -> None:
    pool, context = sizes
    engine = Engine(pool, context, pin_share=share, max_step_tokens=step_tokens, max_wait=20.0, overlap=overlap)
    asked: dict[int, tuple[list[int], SamplingParams]] = {}
    marks: dict[int, tuple[list[int], str]] = {}  # → the kept tokens and their salt
    owners: dict[int, list[int]] = {}
    given_back: set[int] = set()

    def step() -> None:
        engine.step()  # which checks all slots
        engine.clock.advance(1.0)
        assert kept(engine) <= min(share * pool, pool - min(context, pool))

    for kind, tokens, number, salt in history:
        sampling = SamplingParams(temperature=0.0, max_tokens=number, ignore_eos=True)
        match kind:
            case "mark":
                lengths = sorted({1 + number % len(tokens), len(tokens)})
                message, ids = engine.mark(tokens, *lengths, sampling=sampling, seconds=4.0 + number, salt=salt)
                asked[message], owners[message] = (tokens, sampling), ids
                marks |= {mark: (tokens[:length], salt) for mark, length in zip(ids, lengths, strict=True)}
            case "pin":
                engine.hint(tokens, pin=float(1 + number), salt=salt)
            case "release" | "renew" if marks:
                mark = list(marks)[number % len(marks)]
                if kind == "release":
                    engine.release(mark)
                    given_back.add(mark)
                else:
                    engine.renew(mark, 9.0)
            case "generate":
                asked[engine.generate(tokens, sampling, salt=salt)] = (tokens, sampling)
            case "score":
                engine.score([tokens], 1, salt=salt)
            case "flush":
                engine.scheduler.handle_message(EngineControl(engine._id(), "flush_cache"))
            case "abort" if asked:
                engine.scheduler.handle_message(EngineAbort(list(asked)[number % len(asked)]))
        for _ in range(number % 3):
            step()
    while not engine.scheduler.idle:
        step()
        assert engine.steps < 3000, "a request never ends"
    for message, (tokens, sampling) in asked.items():
        ending = engine.endings[message]
        assert isinstance(ending, Ended)
        engine.assert_equals_reference(message, tokens, sampling)
        for mark, held in zip(owners.get(message, ()), engine.marks(message), strict=False):
            if held and mark not in given_back and mark not in engine.lost_keeps:
                prefix, salt = marks[mark]
                assert cached(engine, prefix, salt) == len(prefix)
    space = engine.scheduler.kv
    ended = sum(engine.count(f"keeps_{how}") for how in ("released", "expired", "lost"))
    assert engine.count("keeps_placed") == ended + space.pins.keeps
    for mark in marks:
        engine.release(mark)
    engine.clock.advance(100.0)
    engine.step()
    assert space.cache.evictable_tokens == space.cache.total_tokens
    assert space.pool.free + space.cache.total_tokens == pool
