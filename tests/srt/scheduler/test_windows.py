"""Requests of a model with window layers: whatever shares, waits, retracts or fails, each row finds all that it sees in
these layers, which the oracle checks; and what is cached is computed again only where no whole window is near.
"""

import pytest
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.instruments import FailAt
from umbel.srt.core.messages import Ended, EngineControl
from umbel.srt.testing.oracle import OracleError

from ..engine_harness import Engine
from . import test_choice_search as choosing

PREFIX = [1 + i * i % 19 for i in range(400)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def long_engine(*, windows: tuple[int, int] = (200, 32), **config: object) -> Engine:
    return Engine(pool=4000, context=1000, windows=windows, **{"max_step_tokens": 64, **config})  # type: ignore[arg-type]


def computed_again(engine: Engine) -> float:
    return engine.count("window_misses") + engine.count("recomputed_tokens")


def others(engine: Engine, count: int = 4) -> None:
    """Runs other texts, which take window slots away."""
    for other in range(count):
        engine.generate([20, 1 + other, *PREFIX[:60]], GREEDY)
        engine.run()


def test_the_pool_keeps_more_tokens_than_windows() -> None:
    engine = long_engine()
    for text in range(5):
        engine.generate([text, *PREFIX], GREEDY)
        engine.run()
    assert engine.scheduler.kv.cache.total_tokens > 5 * len(PREFIX)
    assert engine.count("window_slots_reclaimed") > 4 * len(PREFIX)


def test_a_turn_goes_on_from_the_end_of_the_one_before() -> None:
    engine = long_engine()
    first = engine.generate(PREFIX, GREEDY)
    engine.run()
    others(engine)
    ending = engine.endings[first]
    assert isinstance(ending, Ended)
    again = [*PREFIX, *ending.token_ids, 1, 2, 3]
    second = engine.generate(again, GREEDY)
    engine.run()
    engine.assert_equals_reference(second, again, GREEDY)
    assert engine.cached(second) == len(PREFIX) + 4 - 1, "all but the last token, whose row never ran"
    assert computed_again(engine) == 0


def test_a_fork_computes_its_prefix_once() -> None:
    engine = long_engine()
    prompts = [[*PREFIX, 1 + branch, 2, 3, 4] for branch in range(8)]
    ids = [engine.generate(prompt, GREEDY) for prompt in prompts]
    engine.run()
    for message_id, prompt in zip(ids, prompts, strict=True):
        engine.assert_equals_reference(message_id, prompt, GREEDY)
    assert computed_again(engine) == 0
    assert engine.count("computed_prompt_tokens") == len(PREFIX) + 8 * 4


def test_a_prompt_that_cuts_a_text_goes_back_to_a_whole_window_and_leaves_one_at_the_cut() -> None:
    engine = long_engine(snapshot_stride=32, windows=(300, 8))
    engine.generate(PREFIX, GREEDY)
    engine.run()
    others(engine, 8)
    misses = []
    for branch in range(2):
        prompt = [*PREFIX[:300], 1 + branch, 9, 9]
        cut = engine.generate(prompt, GREEDY)
        engine.run()
        engine.assert_equals_reference(cut, prompt, GREEDY)
        misses.append(engine.count("window_misses"))
    assert misses == [300 - 256, 300 - 256], "from the last interval once, then from the fork"


def test_pinned_windows_stay_while_others_can_go() -> None:
    engine = long_engine()
    engine.hint(PREFIX[:60], pin=1e6)
    engine.run()
    others(engine, 12)
    before = engine.count("computed_prompt_tokens")
    engine.generate([*PREFIX[:60], 8, 8], GREEDY)
    engine.run()
    assert engine.count("computed_prompt_tokens") - before == 2


def test_requests_run_together_as_far_as_their_windows_fit() -> None:
    engine = long_engine(windows=(130, 32), max_step_tokens=32, headroom=0)
    prompts = [[branch, *PREFIX[:90]] for branch in range(8)]
    ids = [engine.generate(prompt, GREEDY) for prompt in prompts]
    running = 0
    while not engine.scheduler.idle:
        engine.step()
        running = max(running, engine.scheduler.running)
    assert 2 <= running <= 4, "not more than there are windows for"
    for message_id, prompt in zip(ids, prompts, strict=True):
        engine.assert_equals_reference(message_id, prompt, GREEDY)


def test_a_prompt_goes_on_in_chunks_that_fit() -> None:
    engine = long_engine(windows=(40, 32), max_step_tokens=None)
    message_id = engine.generate(PREFIX, GREEDY)
    engine.run()
    engine.assert_equals_reference(message_id, PREFIX, GREEDY)
    assert max(engine.runner.batches) == 40 - 31


def test_rows_that_are_planned_keep_their_window_slots_in_the_step() -> None:
    engine = long_engine(windows=(20, 4), max_step_tokens=None, headroom=0)
    prompts = [[branch, *PREFIX[:11]] for branch in range(2)]
    ids = [engine.generate(prompt, GREEDY) for prompt in prompts]
    engine.run()
    assert engine.runner.batches[0] == 20, "the second prompt begins with a chunk of what is left"
    for message_id, prompt in zip(ids, prompts, strict=True):
        engine.assert_equals_reference(message_id, prompt, GREEDY)


@pytest.mark.parametrize("verb", ["flush", "failed step"])
def test_forgetting_the_cache_forgets_its_windows(verb: str) -> None:
    fault = FailAt("engine.forward", 9 if verb == "failed step" else 1 << 30, OracleError("injected"))
    engine = long_engine(faults=fault)
    engine.generate(PREFIX[:100], GREEDY)
    engine.run()
    if verb == "flush":
        engine.scheduler.handle_message(EngineControl(99, "flush_cache"))
        engine.run()
    else:
        while fault.visits.get("engine.forward", 0) < 9:
            engine.generate([9, 9], GREEDY)
            engine.run()
    gauges = engine.scheduler.kv.gauges
    assert gauges.window_free == gauges.window_total == 200
    last = engine.generate([*PREFIX[:100], 4], GREEDY)
    engine.run()
    engine.assert_equals_reference(last, [*PREFIX[:100], 4], GREEDY)


def test_a_search_over_choices_gives_the_same_with_windows() -> None:
    choices = [" the thing", "ingesting", "in"]
    plain, small = choosing.engine(), choosing.engine(windows=(9, 6), max_step_tokens=3, pool=60)
    ids = [choosing.choose(engine, choices) for engine in (plain, small)]
    for engine in (plain, small):
        engine.run()
    truth, found = (choosing.answer(engine, number) for engine, number in zip((plain, small), ids, strict=True))
    assert found.lower == pytest.approx(truth.lower, abs=1e-6)
    assert found.upper == pytest.approx(truth.upper, abs=1e-6)
    assert small.count("window_slots_reclaimed") > 0
