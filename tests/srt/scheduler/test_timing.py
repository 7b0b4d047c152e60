"""Times of generations under a virtual clock: a step is a second."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.lang.protocol import RequestTimes
from umbel.lang.sampling import SamplingParams
from umbel.lang.status import BOUNDS, EngineState, Histogram, RuntimeStatus
from umbel.srt.core.batch import Batch
from umbel.srt.core.messages import Ended, EngineAbort, EngineFailed
from umbel.srt.scheduler.request_table import Durations

from ..engine_harness import GREEDY, Engine
from ..toy_constraint import texts
from .test_constrained_properties import Arrival, arrivals, configs, drive, machine


def run(engine: Engine) -> None:
    while not engine.scheduler.idle:
        engine.step()
        engine.clock.advance(1.0)


def times(engine: Engine, message_id: int) -> RequestTimes:
    ending = engine.endings[message_id]
    assert isinstance(ending, Ended), ending
    return ending.times


def histogram(counters: dict[str, float], name: str) -> Histogram:
    return RuntimeStatus("m", "0", EngineState.READY, counters=counters).histogram(name)  # type: ignore[arg-type]


def test_a_request_that_waits_for_another_says_so() -> None:
    engine = Engine(max_running=1)
    first, second = (engine.generate([token, 5, 5], GREEDY) for token in (1, 2))
    run(engine)
    assert times(engine, first) == RequestTimes(0.0, 0.0, 3.0)
    assert times(engine, second) == RequestTimes(4.0, 4.0, 7.0)
    queue = histogram(engine.scheduler.counters, "queue_seconds")
    assert (queue.seconds, queue.count, dict(queue.up_to)[2.0], dict(queue.up_to)[5.0]) == (4.0, 2, 1, 2)


def test_the_first_token_comes_after_all_chunks_of_the_prompt() -> None:
    engine = Engine(max_step_tokens=1)
    message_id = engine.generate([1, 2, 3, 4, 5], GREEDY)
    run(engine)
    assert times(engine, message_id) == RequestTimes(0.0, 4.0, 7.0)


def test_a_request_that_is_aborted_in_the_queue_has_waited_until_then() -> None:
    engine = Engine(max_running=1)
    engine.generate([1, 5, 5], GREEDY)
    waiting = engine.generate([2, 5, 5], GREEDY)
    engine.step()
    engine.clock.advance(1.5)
    engine.scheduler.handle_message(EngineAbort(waiting))
    engine.step()
    assert times(engine, waiting) == RequestTimes(1.5)


def test_a_prompt_without_a_continuation_has_no_token() -> None:
    engine = Engine()
    message_id = engine.generate([1, 2, 3], SamplingParams(max_tokens=0, temperature=0.0))
    run(engine)
    assert times(engine, message_id) == RequestTimes(0.0)


def test_steps_that_only_prefill_or_only_decode_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    runner = engine.scheduler._runner
    forward = runner.forward

    def slow(batch: Batch) -> object:
        engine.clock.advance(2.0)
        return forward(batch)

    monkeypatch.setattr(runner, "forward", slow)
    for message_id in range(2):
        engine.generate([message_id] + 39 * [5], GREEDY)
    run(engine)  # and a second between two steps, in which nothing runs
    engine.generate(5 * [7], GREEDY)
    run(engine)
    counters = engine.scheduler.counters
    names = ("prompt_step_rows", "prompt_step_seconds", "decode_step_rows", "decode_step_seconds", "steps")
    assert [counters[name] for name in names] == [80, 2.0, 9, 12.0, 8]


def test_a_text_of_forced_tokens_comes_at_once() -> None:
    engine = machine()
    engine.clock.advance(3.0)
    message_id = engine.constrain([256, 97], texts("the only one"), SamplingParams(temperature=0.0, max_tokens=20))
    run(engine)
    assert times(engine, message_id) == RequestTimes(0.0, 0.0, 0.0)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=configs, events=st.lists(arrivals, min_size=1, max_size=6))
def test_gaps_between_tokens_add_up_to_the_time_from_the_first_to_the_last(
    config: dict[str, object], events: list[Arrival]
) -> None:
    engine = machine(**config)
    drive(engine, events)
    if any(isinstance(ending, EngineFailed) for ending in engine.endings.values()):
        return  # its tokens count, and no ending tells their times
    ended = [ending for ending in engine.endings.values() if isinstance(ending, Ended)]
    told = [ending.times for ending in ended]
    assert all(one.queued <= one.first_token <= one.last_token for one in told if one.first_token is not None)
    counters = engine.scheduler.counters
    first_token, token = (histogram(counters, name) for name in ("first_token_seconds", "token_seconds"))
    with_text = [ending for ending in ended if ending.completion_tokens]
    assert first_token.count == len(with_text)
    assert first_token.seconds == sum(one.first_token or 0.0 for one in told)
    assert token.count == sum(ending.completion_tokens - 1 for ending in with_text)
    assert token.seconds == pytest.approx(sum((one.last_token or 0.0) - (one.first_token or 0.0) for one in told))


def test_hints_and_scores_are_not_measured() -> None:
    engine = Engine()
    engine.score([[1, 2, 3], [1, 2, 4]], 2)
    engine.hint([5, 6, 7], pin=60.0)
    run(engine)
    assert histogram(engine.scheduler.counters, "queue_seconds").count == 0


def test_durations_are_counted_up_to_and_with_a_bound() -> None:
    durations = Durations("queue_seconds")
    durations.add(BOUNDS[0])
    durations.add(BOUNDS[0] * 1.01, times=2)
    durations.add(2 * BOUNDS[-1])
    found = histogram(dict(durations.counters()), "queue_seconds")
    assert [count for _, count in found.up_to] == [1] + [3] * (len(BOUNDS) - 1)
    assert found.count == 4
    assert found.seconds == pytest.approx(BOUNDS[0] * 3.02 + 2 * BOUNDS[-1])


def test_counters_begin_anew_after_the_warm_up() -> None:
    engine = Engine()
    fresh = engine.scheduler.counters
    engine.generate([1, 2, 3], GREEDY)
    run(engine)
    assert engine.scheduler.counters != fresh
    engine.scheduler.reset_counters()
    assert engine.scheduler.counters == fresh
