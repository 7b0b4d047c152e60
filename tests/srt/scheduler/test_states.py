"""Requests of a model with a recurrent state: whatever shares, waits, retracts or fails, every token is fed to the
state once and in order, which the oracle checks; and what is cached is computed again only where no snapshot is near.
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


def long_engine(**config: object) -> Engine:
    return Engine(pool=4000, context=1000, **{"states": 40, "max_step_tokens": 64, **config})  # type: ignore[arg-type]


def computed_again(engine: Engine) -> float:
    return engine.count("snapshot_misses") + engine.count("recomputed_tokens")


def test_a_fork_computes_its_prefix_once() -> None:
    engine = long_engine()
    prompts = [[*PREFIX, 1 + branch, 2, 3, 4] for branch in range(8)]
    ids = [engine.generate(prompt, GREEDY) for prompt in prompts]
    engine.run()
    for message_id, prompt in zip(ids, prompts, strict=True):
        engine.assert_equals_reference(message_id, prompt, GREEDY)
    assert computed_again(engine) == 0
    assert engine.count("computed_prompt_tokens") == len(PREFIX) + 8 * 4


def test_a_branch_that_comes_late_leaves_a_snapshot_for_the_next() -> None:
    engine = long_engine(snapshot_stride=128)
    misses = []
    for branch in range(3):
        engine.generate([*PREFIX[:300], 1 + branch, 2, 3, 4], GREEDY)
        engine.run()
        misses.append(engine.count("snapshot_misses"))
    assert misses == [0, 300 - 256, 300 - 256], "from the last interval once, then from the fork"


def test_a_turn_goes_on_from_the_end_of_the_one_before() -> None:
    engine = long_engine()
    first = engine.generate(PREFIX[:50], GREEDY)
    engine.run()
    ending = engine.endings[first]
    assert isinstance(ending, Ended)
    second = engine.generate([*PREFIX[:50], *ending.token_ids, 1, 2, 3], GREEDY)
    engine.run()
    again = engine.endings[second]
    assert isinstance(again, Ended)
    assert again.cached_tokens == 50 + 4 - 1, "all but the last token, whose row never ran"
    assert computed_again(engine) == 0


def test_a_prompt_that_cuts_a_turn_goes_back_to_a_snapshot_before_the_cut() -> None:
    engine = long_engine(snapshot_stride=32)
    engine.generate(PREFIX[:100], GREEDY)
    engine.run()
    cut = engine.generate([*PREFIX[:70], 9, 9], GREEDY)
    engine.run()
    engine.assert_equals_reference(cut, [*PREFIX[:70], 9, 9], GREEDY)
    ending = engine.endings[cut]
    assert isinstance(ending, Ended)
    assert ending.cached_tokens == 64
    assert engine.count("snapshot_misses") == 6


def test_a_hint_leaves_a_snapshot_at_its_end() -> None:
    engine = long_engine()
    engine.hint(PREFIX, pin=60.0)
    engine.run()
    engine.generate([*PREFIX, 5, 6], GREEDY)
    engine.run()
    assert engine.count("computed_prompt_tokens") == len(PREFIX) + 2


def test_marks_have_snapshots() -> None:
    engine = long_engine()
    engine.mark(PREFIX, 100, 211)
    engine.run()
    for end in (100, 211):
        engine.generate([*PREFIX[:end], 20, 21, 22], GREEDY)
        engine.run()
    assert computed_again(engine) == 0


def test_a_score_computes_what_its_choices_share_once() -> None:
    engine = long_engine()
    sequences = [[*PREFIX[:90], 3 + choice, 7] for choice in range(5)]
    engine.score(sequences, 90)
    engine.run()
    assert engine.count("computed_prompt_tokens") == 90 + 5 * 2 + 4, "each choice runs the row before its first token"
    assert computed_again(engine) == 0


def test_running_requests_take_the_slots_of_snapshots() -> None:
    engine = long_engine(states=4, snapshot_stride=16)
    engine.generate(PREFIX[:100], GREEDY)
    engine.run()
    prompts = [[7, 7, 1 + branch] for branch in range(6)]
    ids = [engine.generate(prompt, GREEDY) for prompt in prompts]
    running = 0
    while not engine.scheduler.idle:
        engine.step()
        running = max(running, engine.scheduler.running)
    assert running == 4, "as many as there are slots"
    for message_id, prompt in zip(ids, prompts, strict=True):
        engine.assert_equals_reference(message_id, prompt, GREEDY)


def test_one_long_prompt_leaves_slots_to_others() -> None:
    engine = long_engine(states=16, snapshot_stride=8)
    engine.generate(PREFIX, GREEDY)
    engine.run()
    assert engine.count("snapshots_taken") <= 16 // 4 + 1, "at intervals, and at the end of the text"


def test_a_pinned_snapshot_stays_while_others_can_go() -> None:
    engine = long_engine(states=5)
    engine.hint(PREFIX[:60], pin=1e6)
    engine.run()
    for other in range(8):
        engine.generate([20, 1 + other, *PREFIX[:30]], GREEDY)
        engine.run()
    before = engine.count("computed_prompt_tokens")
    engine.generate([*PREFIX[:60], 8, 8], GREEDY)
    engine.run()
    assert engine.count("computed_prompt_tokens") - before == 2


def test_a_search_over_choices_gives_the_same_with_states() -> None:
    choices = [" the thing", "ingesting", "in"]
    plain, small = choosing.engine(), choosing.engine(states=4, snapshot_gap=2, max_step_tokens=3, pool=60)
    ids = [choosing.choose(engine, choices) for engine in (plain, small)]
    for engine in (plain, small):
        engine.run()
    truth, found = (choosing.answer(engine, number) for engine, number in zip((plain, small), ids, strict=True))
    assert found.lower == pytest.approx(truth.lower, abs=1e-6)
    assert found.upper == pytest.approx(truth.upper, abs=1e-6)
    assert small.count("snapshot_hits") > 0


@pytest.mark.parametrize("verb", ["flush", "failed step"])
def test_forgetting_the_cache_forgets_its_snapshots(verb: str) -> None:
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
    states = engine.scheduler.kv.states
    assert states is not None
    assert states.slots.free == states.slots.total
    last = engine.generate([*PREFIX[:100], 4], GREEDY)
    engine.run()
    engine.assert_equals_reference(last, [*PREFIX[:100], 4], GREEDY)
