"""The device that computes nothing: when it is busy, which tokens it says, and that a scheduler runs on it."""

from itertools import product

import numpy as np
import pytest
from umbel.lang.errors import ParameterError
from umbel.lang.runtime_options import DebugOptions, RuntimeOptions
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.batch import Allowed
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.core.messages import Ended, EngineGenerate, EngineScore, Schedule, ScoreEnded
from umbel.srt.scheduler.scheduler import Scheduler, SchedulerConfig
from umbel.srt.testing.pretended import PretendedDevice, _allowed_token

from .toy_constraint import TOKENIZER, texts, toy_shelf

WORDS = [65, 66, 67]


def device(clock: VirtualClock, seconds: float = 1.0) -> PretendedDevice:
    return PretendedDevice(
        seconds,
        WORDS,
        vocab_size=TOKENIZER.vocab_size,
        context_length=200,
        num_slots=500,
        trie_walk=None,
        clock=clock.now,
        sleep=clock.advance,
    )


def scheduler_on(runner: PretendedDevice, clock: VirtualClock, planning: float) -> Scheduler:
    def pass_time(point: str) -> None:
        if point == "engine.forward":
            clock.advance(planning)

    config = SchedulerConfig(overlap=True, check_every_step=True)
    words = TOKENIZER.token_bytes, TOKENIZER.eos_ids
    return Scheduler(runner, *words, config, clock, pass_time, constraints=toy_shelf())


def generate(scheduler: Scheduler, count: int, **fields: object) -> dict[int, list[int]]:
    sampling = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "seed": 1, **fields})  # type: ignore[arg-type]
    for number in range(count):
        scheduler.handle_message(EngineGenerate(number, [256, number], sampling, False, Schedule()))
    return run(scheduler)


def run(scheduler: Scheduler) -> dict[int, list[int]]:
    said = {}
    while not scheduler.idle:
        said |= {event.id: event.token_ids for event in scheduler.step() if isinstance(event, Ended)}
    return said


@pytest.mark.parametrize(("planning", "busy"), [(0.5, True), (1.5, False)])
def test_a_step_is_back_to_back_if_it_was_launched_in_time(planning: float, busy: bool) -> None:
    clock = VirtualClock()
    runner = device(clock)
    scheduler = scheduler_on(runner, clock, planning)
    said = generate(scheduler, 3)
    assert {token for tokens in said.values() for token in tokens} == set(WORDS)
    assert len({tuple(tokens) for tokens in said.values()}) == 3, "texts differ"
    facts = runner.facts()
    assert facts["device_steps"] == 20
    assert facts["back_to_back_steps"] == (19 if busy else 0)
    assert scheduler.counters["first_steps"] == 1
    assert clock.now() == pytest.approx(20 * max(planning, 1.0) + min(planning, 1.0))


@pytest.mark.parametrize(("masks", "busy"), [(0.5, True), (1.5, False)])
def test_rows_that_choose_late_may_hold_the_device_up(masks: float, busy: bool) -> None:
    clock = VirtualClock()
    runner = device(clock)
    scheduler = scheduler_on(runner, clock, 0.1)
    ready = scheduler._constrained.ready

    def slowly(request: object) -> bool:
        clock.advance(masks)
        return ready(request)  # type: ignore[arg-type]

    scheduler._constrained.ready = slowly  # type: ignore[method-assign, assignment]
    choices = texts(*("".join(letters) for letters in product("ab", repeat=8)))
    sampling = SamplingParams(max_tokens=20, seed=1)
    scheduler.handle_message(EngineGenerate(1, [256, 1], sampling, False, Schedule(), choices))
    said = run(scheduler)
    assert set(said[1][:8]) <= {97, 98}
    steps, back_to_back = runner.facts()["device_steps"], runner.facts()["back_to_back_steps"]
    assert int(steps) >= 8
    assert (int(back_to_back) >= int(steps) - 2) is busy


def test_scores_come_from_equal_logits() -> None:
    clock = VirtualClock()
    scheduler = scheduler_on(device(clock), clock, 0.1)
    scheduler.handle_message(EngineScore(1, [[256, 1, 2], [256, 3]], 1, Schedule()))
    events = []
    while not scheduler.idle:
        events += scheduler.step()
    (ended,) = [event for event in events if isinstance(event, ScoreEnded)]
    uniform = -float(np.log(TOKENIZER.vocab_size))
    assert [value for values in ended.logprobs for value in values] == pytest.approx([uniform] * 3)


def test_an_allowed_token_is_any_of_them() -> None:
    bits = np.zeros(4, dtype=np.uint32)
    bits[1], bits[3] = 0b1001, 1 << 31
    assert {_allowed_token(Allowed(None, bits), number) for number in range(50)} == {32, 35, 127}
    few = np.array([4, 90], dtype=np.int32)
    assert {_allowed_token(Allowed(few, None), number) for number in range(4)} == {4, 90}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel": 2}, "no model computes; leave tensor_parallel out"),
        ({"draft_model": "a/b", "pool_memory": 9}, "no model computes; leave draft_model and pool_memory out"),
        ({"model": "oracle"}, "the oracle computes; name a model, whose tokenizer is taken"),
    ],
)
def test_options_that_need_a_model_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError, match=rf"pretend_step=0\.01: {message}"):
        RuntimeOptions(debug=DebugOptions(pretend_step=0.01), **given)  # type: ignore[arg-type]
