"""Pinned prefixes: they outlive a flood, cost no request its place, and end when they should."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.lang.errors import ParameterError
from umbel.lang.runtime_options import RuntimeOptions
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.batch import Batch, Logits
from umbel.srt.core.messages import Ended, EngineControl, ScoreEnded

from ..engine_harness import Engine

HEAD = list(range(1, 21))  # 20 tokens
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def pinned(engine: Engine) -> int:
    return engine.scheduler.kv.cache.pinned_tokens


def flood(engine: Engine, prompts: int = 12, length: int = 15) -> None:
    """More tokens than the pool holds, none of them of HEAD."""
    for number in range(prompts):
        engine.generate([21, 22, 1 + number, *([2] * (length - 3))], ONE)
        engine.run()


def found(engine: Engine, **schedule: object) -> int:
    """Lets a request read HEAD → its tokens that were there; what a hint computed is found, and not cached for it."""
    before = engine.count("cached_tokens")
    engine.generate([*HEAD, 21], ONE, **schedule)
    engine.run()
    return engine.count("cached_tokens") - before


# -------------------------------------------------------------------------------- what pins keep


def test_a_pinned_head_survives_a_flood_and_an_unpinned_one_does_not() -> None:
    for pin, cached in ((60.0, len(HEAD)), (None, 0)):
        engine = Engine(pool=60)
        engine.hint(HEAD, pin=pin)
        engine.run()
        flood(engine)
        assert found(engine) == cached


def test_a_released_pin_is_evicted_like_everything_else() -> None:
    engine = Engine(pool=60)
    pin = engine.hint(HEAD, pin=60.0)
    engine.run()
    engine.release(pin)
    flood(engine)
    assert (pinned(engine), engine.count("pins_released")) == (0, 1)
    assert engine.scheduler.kv.cache.peek(np.array(HEAD, dtype=np.int32), "") == 0


def test_a_pin_ends_with_its_seconds() -> None:
    engine = Engine()
    engine.hint(HEAD, pin=5.0)
    engine.run()
    engine.clock.advance(4.9)
    engine.step()
    assert pinned(engine) == len(HEAD)
    engine.clock.advance(0.1)
    engine.step()
    assert (pinned(engine), engine.count("pins_expired")) == (0, 1)


def test_the_seconds_begin_again_when_the_whole_prefix_is_used() -> None:
    engine = Engine()
    engine.hint(HEAD, pin=5.0)
    engine.run()
    engine.clock.advance(4.0)
    engine.generate([*HEAD, 21], ONE)
    engine.run()
    engine.clock.advance(4.0)
    engine.generate([*HEAD[:10], 21], ONE)  # not all of it
    engine.run()
    assert pinned(engine) == len(HEAD)
    engine.clock.advance(1.5)
    engine.step()
    assert (pinned(engine), engine.count("pins_expired")) == (0, 1)


def test_a_release_that_comes_before_the_prefix_is_computed_leaves_no_pin() -> None:
    engine = Engine(max_step_tokens=4)
    pin = engine.hint(HEAD, pin=60.0)
    engine.step()
    engine.release(pin)
    engine.run()
    assert (pinned(engine), engine.count("pins_placed")) == (0, 0)


def test_two_pins_of_one_prefix_hold_it_until_both_have_ended() -> None:
    engine = Engine()
    first, second = engine.hint(HEAD, pin=60.0), engine.hint(HEAD[:10], pin=60.0)
    engine.run()
    assert pinned(engine) == len(HEAD)
    engine.release(first)
    assert pinned(engine) == 10
    engine.release(second)
    assert pinned(engine) == 0


def test_a_pin_is_of_its_salt() -> None:
    engine = Engine(pool=60)
    engine.hint(HEAD, pin=60.0, salt="mine")
    engine.run()
    flood(engine)
    assert (found(engine), found(engine, salt="mine")) == (0, len(HEAD))


def test_flushing_the_cache_drops_the_pins() -> None:
    engine = Engine()
    engine.hint(HEAD, pin=60.0)
    engine.run()
    engine.scheduler.handle_message(EngineControl(99, "flush_cache"))
    engine.run()
    assert engine.scheduler.kv.cache.total_tokens == 0
    assert engine.count("pins_lost") == 1


def test_a_request_that_grows_behind_a_pinned_end_does_not_lengthen_the_pin() -> None:
    engine = Engine()
    engine.hint(HEAD, pin=60.0)
    reader = engine.generate([*HEAD, 21, 22], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    engine.run()
    assert engine.count("cached_tokens") == len(HEAD)
    assert engine.cached(reader) == 0, "the pin computed it for this request"
    assert pinned(engine) == len(HEAD)


def test_a_failed_step_loses_pins_and_nothing_else() -> None:
    engine = Engine()
    engine.hint(HEAD, pin=60.0)
    engine.run()
    healthy, failures = engine.runner.forward, iter([True])

    def forward(batch: Batch) -> Logits:
        if next(failures, False):
            raise RuntimeError("the first step fails")
        return healthy(batch)

    engine.runner.forward = forward  # type: ignore[method-assign]
    engine.generate([3, 4], ONE)
    engine.run()
    assert (pinned(engine), engine.count("pins_lost")) == (0, 1)


# -------------------------------------------------------------------------------- what pins give


def test_a_request_that_fits_the_pool_takes_the_place_of_pins() -> None:
    engine = Engine(pool=60)
    engine.hint(HEAD, pin=60.0)
    engine.run()
    request = engine.generate([21] * 55, ONE)
    engine.run()
    engine.assert_equals_reference(request, [21] * 55, ONE)
    assert engine.count("pins_given_way") == 1


def test_the_oldest_pin_gives_way_when_all_together_hold_too_much() -> None:
    engine = Engine(pool=80, pin_share=0.5)
    for first in (1, 2, 3):
        engine.hint([first] * 16, pin=60.0)
        engine.run()
    assert (pinned(engine), engine.count("pins_given_way")) == (32, 1)
    assert engine.scheduler.kv.pins.matches is not None
    assert {int(match.node.tokens[0]) for match in engine.scheduler.kv.pins.matches} == {2, 3}


def test_a_pin_longer_than_the_share_is_refused_and_computed_all_the_same() -> None:
    engine = Engine(pool=60, pin_share=0.25)
    engine.hint(HEAD, pin=60.0)
    assert (found(engine), pinned(engine), engine.count("pins_refused")) == (len(HEAD), 0, 1)


def test_pins_wait_for_running_requests_but_not_for_aged_ones() -> None:
    """A second request would fit only in the place of the pin: it waits while one runs, until it has waited long."""
    long = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    engine = Engine(pool=100, max_wait=5.0, headroom=0)
    engine.hint([1] * 40, pin=600.0)
    engine.run()
    engine.generate([2] * 20, long)
    engine.step()
    engine.generate([3] * 45, long)
    engine.step()
    assert (engine.scheduler.waiting, engine.count("pins_given_way")) == (1, 0)
    engine.clock.advance(6.0)
    for _ in range(17):  # a queue that did not fit is looked at again after a while
        engine.step()
    assert (engine.scheduler.waiting, engine.count("pins_given_way")) == (0, 1)
    engine.run()


def test_a_pin_gives_way_before_anybody_is_retracted() -> None:
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine = Engine(pool=100, headroom=0)
    engine.hint([1] * 30, pin=600.0)
    engine.run()
    for first in (2, 3):
        engine.generate([first] * 10, long)
    engine.run()
    assert (engine.count("pins_given_way"), engine.count("retractions")) == (1, 0)


def test_without_a_tree_nothing_is_pinned() -> None:
    engine = Engine(radix_cache=False)
    engine.hint(HEAD, pin=60.0)
    engine.run()
    assert (pinned(engine), engine.count("pins_refused")) == (0, 1)


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_the_share_is_a_part_of_the_pool(share: float) -> None:
    with pytest.raises(ParameterError, match="pin_share"):
        RuntimeOptions(pin_share=share)


# -------------------------------------------------------------------------------- anything at any time

stems = st.sampled_from([(1, 2, 3, 4, 5, 6), (1, 2, 3, 9, 9), (4, 4, 4, 4), (7,)])
prompts = st.builds(lambda stem, rest: [*stem, *rest], stems, st.lists(st.integers(1, 3), max_size=5))
events = st.lists(
    st.tuples(
        st.sampled_from(["pin", "pin", "release", "generate", "generate", "score", "flush", "wait"]),
        prompts,
        st.integers(0, 9),
        st.sampled_from(["", "", "s"]),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(events, st.sampled_from([22, 30, 120]), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([2, 16, None]))
def test_whatever_is_pinned_every_request_ends_right_and_every_slot_has_one_owner(
    history: list[tuple[str, list[int], int, str]], pool: int, share: float, step_tokens: int | None
) -> None:
    engine = Engine(pool=pool, pin_share=share, max_step_tokens=step_tokens, max_wait=20.0)
    generated: dict[int, tuple[list[int], SamplingParams]] = {}
    scored: dict[int, list[int]] = {}
    pins: list[int] = []
    for kind, tokens, number, salt in history:
        match kind:
            case "pin":
                pins.append(engine.hint(tokens, pin=float(1 + number), salt=salt))
            case "release" if pins:
                engine.release(pins.pop(number % len(pins)))
            case "generate":
                sampling = SamplingParams(temperature=0.0, max_tokens=number, ignore_eos=True)
                generated[engine.generate(tokens, sampling, salt=salt)] = (tokens, sampling)
            case "score":
                scored[engine.score([tokens], 1, salt=salt)] = tokens
            case "flush":
                engine.scheduler.handle_message(EngineControl(engine._id(), "flush_cache"))
        for _ in range(number % 3):
            engine.step()  # which checks all slots
            engine.clock.advance(1.0)
            assert pinned(engine) <= share * pool
    engine.run()
    for message_id, (tokens, sampling) in generated.items():
        assert isinstance(engine.endings[message_id], Ended)
        engine.assert_equals_reference(message_id, tokens, sampling)
    for message_id, tokens in scored.items():
        ending = engine.endings[message_id]
        assert isinstance(ending, ScoreEnded)
        assert ending.logprobs[0] == pytest.approx(engine.reference_score(tokens, 1), abs=1e-5)
    ended = sum(engine.count(f"pins_{how}") for how in ("released", "expired", "given_way", "lost"))
    assert engine.count("pins_placed") == ended + len(engine.scheduler.kv.pins)
    for message_id in pins:
        engine.release(message_id)
    space = engine.scheduler.kv
    assert space.cache.evictable_tokens == space.cache.total_tokens
    assert space.pool.free + space.cache.total_tokens == pool
