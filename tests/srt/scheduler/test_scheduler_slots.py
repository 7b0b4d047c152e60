"""Where the keys of decoding requests lie, and what their spare slots cost others."""

import numpy as np
from umbel.lang.sampling import SamplingParams

from ..engine_harness import Engine


def adjacent(engine: Engine) -> float:
    """Share of generated tokens whose key lies right behind the one before."""
    steps = [
        np.diff(request.slots(request.prompt_length, request.kv_length)) == 1
        for request in engine.scheduler._table.running.values()
    ]
    return float(np.concatenate(steps).mean())


def decoding(pool: int, *, prompts: int = 4, steps: int = 40, **settings: object) -> Engine:
    engine = Engine(pool=pool, max_running=prompts, **settings)  # type: ignore[arg-type]
    for first in range(prompts):
        engine.generate([1 + first, 2, 3], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    for _ in range(steps):
        engine.step()
    return engine


def test_requests_that_decode_in_turns_have_their_keys_in_runs() -> None:
    assert adjacent(decoding(2000)) > 0.9


def test_a_small_pool_gives_no_slots_ahead() -> None:
    engine = decoding(60 * 4 + 20)
    assert all(r.slot_end - r.kv_length <= 4 for r in engine.scheduler._table.running.values())
    tiny = decoding(63, prompts=1)
    assert all(r.slot_end == r.kv_length for r in tiny.scheduler._table.running.values())


def test_runs_stay_long_when_the_pool_is_full_of_evictable_cache() -> None:
    engine = Engine(pool=800, max_running=4, headroom=0)
    dice = np.random.default_rng(0)
    for _ in range(60):  # many short leaves in many places
        engine.generate(dice.integers(1, 24, 12).tolist(), SamplingParams(temperature=0.0, max_tokens=3))
    engine.run()
    assert engine.scheduler.kv.pool.free < 100
    for first in range(4):
        engine.generate([1 + first, 2, 3], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    for _ in range(40):
        engine.step()
    assert engine.count("evicted_tokens") > 0
    assert adjacent(engine) > 0.6


def test_no_more_is_taken_ahead_than_may_be_generated() -> None:
    engine = Engine(pool=2000, max_running=1)
    engine.generate([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    for _ in range(2):
        engine.step()
    (request,) = engine.scheduler._table.running.values()
    assert request.slot_end <= request.prompt_length + 4
    engine.run()
    assert engine.scheduler.kv.pool.free + engine.scheduler.kv.cache.total_tokens == 2000


def test_spare_slots_are_taken_back_before_anybody_is_retracted() -> None:
    engine = decoding(400, prompts=3, steps=10)
    kv = engine.scheduler.kv
    running = list(engine.scheduler._table.running.values())
    spare = sum(request.slot_end - request.kv_length for request in running)
    assert spare > 0
    free = kv.pool.free
    assert kv.take_back_spare(running)
    assert kv.pool.free == free + spare
    assert not kv.take_back_spare(running)
    engine.run()
    assert engine.count("retractions") == 0
