"""Steps that overlap: the same texts, in the time of the longer of scheduling and forward pass."""

from dataclasses import replace
from itertools import product

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.lang.protocol import RequestTimes
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.batch import Allowed
from umbel.srt.core.instruments import FailAt
from umbel.srt.core.messages import ControlEnded, Ended, EngineAbort, EngineControl, EngineFailed, ScoreEnded
from umbel.srt.scheduler import step
from umbel.srt.scheduler.request import Request
from umbel.srt.testing.launched_oracle import Computes, _Launched
from umbel.srt.testing.oracle import OracleError

from ..engine_harness import GREEDY, Engine
from ..toy_constraint import TOKENIZER, texts, toy_shelf
from .test_scheduler_properties import Arrival, arrivals, configs, drive

LONG = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def period(forward: float, scheduling: float, **settings: object) -> float:
    """Virtual seconds of a decode step of three texts."""
    engine: Engine | None = None

    def pass_time(point: str) -> None:
        if point == "engine.forward" and engine is not None:
            engine.clock.advance(scheduling)

    engine = Engine(faults=pass_time, forward_seconds=forward, **settings)  # type: ignore[arg-type]
    for first in (1, 2, 3):
        engine.generate([first, 5, 5], LONG)
    started = engine.clock.now()
    engine.run()
    return (engine.clock.now() - started) / engine.count("steps")


@pytest.mark.parametrize(("forward", "scheduling"), [(8.0, 2.0), (3.0, 3.0), (2.0, 5.0)])
def test_a_step_takes_the_longer_of_forward_and_scheduling(forward: float, scheduling: float) -> None:
    alone = period(forward, scheduling)
    together = period(forward, scheduling, overlap=True)
    assert alone == pytest.approx(forward + scheduling)
    assert together == pytest.approx(max(forward, scheduling), rel=0.1)


@pytest.mark.parametrize("computes", ["when asked", "when launched"])
def test_texts_are_those_of_steps_that_wait(computes: Computes) -> None:
    engine = Engine(overlap=True, computes=computes)
    prompts = [[1, 2, 3, branch] for branch in range(4, 9)]
    samplings = [
        GREEDY,
        SamplingParams(temperature=0.8, seed=3, max_tokens=12),
        SamplingParams(temperature=0.8, top_p=0.7, top_k=9, min_p=0.05, seed=3, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=9, stop=("ab", "cca"), ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.4, ignore_eos=True),
    ]
    ids = [engine.generate(prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
    engine.run()
    for message_id, prompt, sampling in zip(ids, prompts, samplings, strict=True):
        engine.assert_equals_reference(message_id, prompt, sampling)


@pytest.mark.parametrize(("overlap", "running"), [(True, [1, 2, 3, 4, 5, 6]), (False, [5, 5, 5, 6, 6, 6])])
def test_a_device_does_not_wait_until_all_of_many_are_admitted(overlap: bool, running: list[int]) -> None:
    """Each takes a second of planning, so a step admits one; without overlap it admits all. The sixth comes late."""
    engine: Engine | None = None

    def pass_time(point: str) -> None:
        if point == "engine.plan" and engine is not None:
            engine.clock.advance(1.0)

    engine = Engine(faults=pass_time, overlap=overlap)
    ids = [engine.generate([first, 5, 5], LONG) for first in range(1, 6)]
    seen = []
    for number in range(6):
        if number == 3:
            ids.append(engine.generate([6, 5, 5], LONG))
        engine.step()
        seen.append(engine.scheduler.running)
    assert seen == running
    engine.run()
    for first, message_id in enumerate(ids, 1):
        engine.assert_equals_reference(message_id, [first, 5, 5], LONG)


def test_a_row_behind_the_end_of_a_text_is_wasted_and_counted() -> None:
    engine = Engine(overlap=True)
    stop = SamplingParams(temperature=0.0, max_tokens=30, stop=("ab",), ignore_eos=True)
    message_id = engine.generate([1, 2, 3], stop)
    engine.run()
    engine.assert_equals_reference(message_id, [1, 2, 3], stop)
    assert engine.count("wasted_rows") == 1
    engine.generate([1, 2, 3], GREEDY)
    engine.run()
    assert engine.count("wasted_rows") == 1, "the end by max_tokens is known beforehand"


def test_overlapped_steps_are_counted() -> None:
    engine = Engine(overlap=True)
    engine.generate([1, 2, 3], LONG)
    engine.run()
    assert engine.count("steps") == 30
    assert engine.count("overlapped_steps") == 29


def test_the_key_of_a_last_token_is_kept() -> None:
    """It was computed in the row that was wasted."""
    engine = Engine(overlap=True)
    stop = SamplingParams(temperature=0.0, max_tokens=30, stop=("ab",), ignore_eos=True)
    first = engine.generate([1, 2, 3], stop)
    engine.run()
    said = [1, 2, 3, *engine.tokens(first)]
    second = engine.generate([*said, 7], GREEDY)
    engine.run()
    assert engine.cached(second) == len(said)
    engine.assert_equals_reference(second, [*said, 7], GREEDY)


def test_an_abort_ends_a_text_in_flight_at_once() -> None:
    engine = Engine(overlap=True)
    aborted = engine.generate([1, 2, 3], LONG)
    other = engine.generate([1, 2, 4], LONG)
    for _ in range(4):
        engine.step()
    engine.scheduler.handle_message(EngineAbort(aborted))
    engine.step()
    engine.assert_equals_reference(aborted, [1, 2, 3], LONG)
    assert isinstance(engine.endings[aborted], Ended)
    engine.run()
    engine.assert_equals_reference(other, [1, 2, 4], LONG)


def test_an_engine_with_a_step_in_flight_is_not_idle() -> None:
    engine = Engine(overlap=True)
    message_id = engine.generate([1, 2, 3], LONG)
    engine.step()
    engine.scheduler.handle_message(EngineAbort(message_id))
    engine.step()
    assert message_id in engine.endings
    engine.run()
    assert engine.scheduler.idle
    assert engine.count("wasted_rows") > 0


def test_a_cache_is_flushed_beside_a_step_in_flight() -> None:
    engine = Engine(overlap=True)
    message_id = engine.generate([1, 2, 3], LONG)
    for _ in range(3):
        engine.step()
    engine.scheduler.handle_message(EngineControl(99, "flush_cache"))
    engine.run()
    engine.assert_equals_reference(message_id, [1, 2, 3], LONG)


@pytest.mark.parametrize("point", ["engine.forward", "engine.sample"])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_a_failed_step_ends_its_requests_and_a_failed_row_its_own(point: str, k: int) -> None:
    engine = Engine(overlap=True, faults=FailAt(point, k, OracleError("injected")), max_running=3, max_step_tokens=6)
    prompts = [[stem, 2, 3, 4, 5, 6, 7] for stem in range(1, 9)]
    ids = [engine.generate(prompt, GREEDY) for prompt in prompts]
    engine.run()
    failed = [message_id for message_id in ids if isinstance(engine.endings[message_id], EngineFailed)]
    whole_step = point == "engine.forward"
    assert 1 <= len(failed) <= (3 if whole_step else 1)
    assert engine.count("failed_steps") == engine.count("pool_rebuilds") == whole_step
    for message_id, prompt in zip(ids, prompts, strict=True):
        if message_id not in failed:
            engine.assert_equals_reference(message_id, prompt, GREEDY)


def test_log_probabilities_come_with_tokens_of_overlapped_steps() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=True, top_logprobs=2)
    endings = []
    for overlap in (False, True):
        engine = Engine(overlap=overlap)
        message_id = engine.generate([1, 2, 3], sampling)
        engine.run()
        endings.append(engine.endings[message_id])
        assert engine.count("overlapped_steps") == (7 if overlap else 0)
    one, other = endings
    assert isinstance(one, Ended)
    assert isinstance(other, Ended)
    assert one.logprobs == other.logprobs


def constraining(**settings: object) -> Engine:
    return Engine(
        vocabulary=TOKENIZER.vocab_size,
        token_bytes=TOKENIZER.token_bytes,
        eos_ids=TOKENIZER.eos_ids,
        constraints=toy_shelf(),
        **{"overlap": True, **settings},  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("jump_forward", [False, True])
def test_a_token_that_a_constraint_may_overrule_is_waited_for(jump_forward: bool) -> None:
    engine = constraining(jump_forward=jump_forward)
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=30)
    message_id = engine.constrain([256], texts("the only one", "the other one"), sampling)
    free = engine.generate([256, 5], LONG)
    engine.run()
    assert b"".join(map(TOKENIZER.token_bytes, engine.tokens(message_id))) in (b"the only one", b"the other one")
    assert len(engine.tokens(free)) == 30
    assert engine.count("overlapped_steps") > 0


# Texts of letters in which every letter is a choice, and none is forced.
CHOICES = tuple("".join(letters) for letters in product("ab", repeat=6))


@pytest.mark.parametrize("computes", ["when asked", "when launched"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.sampled(4)
def test_a_constrained_text_runs_in_every_step(temperature: float, computes: Computes) -> None:
    """Its masks are made while its rows run."""
    sampling = SamplingParams(temperature=temperature, seed=5, max_tokens=30)
    said = []
    for overlap in (False, True):
        engine = constraining(overlap=overlap, computes=computes)
        ids = [engine.constrain([256, first], texts(*CHOICES), sampling) for first in range(4)]
        engine.run()
        said.append([engine.tokens(message_id) for message_id in ids])
        steps = [len(tokens) for tokens in said[-1]]
        if overlap:
            assert engine.count("steps") in (max(steps), max(steps) + 1), "one may run after the last token"
            assert engine.count("overlapped_steps") == engine.count("steps") - 1
            assert engine.count("late_rows") == sum(steps) - len(ids), "all but the first token of each"
            assert engine.count("dropped_rows") == 0
    assert said[0] == said[1]


def test_a_row_whose_mask_is_late_runs_again() -> None:
    """A mask takes more than one step's fuel, so each second row counts as not computed."""
    said = []
    for overlap in (False, True):
        engine = constraining(overlap=overlap, constraint_fuel=20)
        message_id = engine.constrain([256, 1], texts(*CHOICES, cost=15), SamplingParams(max_tokens=30, seed=2))
        engine.run()
        said.append(engine.tokens(message_id))
        assert (engine.count("dropped_rows") > 2) is overlap
    assert said[0] == said[1]


def test_a_row_that_ran_with_an_overruled_token_runs_again() -> None:
    """Without jump-forward the end that fits comes in steps of its own, the first of which follows a token that would
    not have left enough for it."""
    said = []
    for overlap in (False, True):
        engine = constraining(overlap=overlap, jump_forward=False)
        allowed = ["a" * 20 + "z", *("a" * n + "end" for n in range(1, 19))]
        sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=9)
        ids = [engine.constrain([256, first], texts(*allowed), sampling) for first in range(8)]
        engine.run()
        said.append([engine.tokens(message_id) for message_id in ids])
        assert (engine.count("dropped_rows") > 0) is overlap
    assert said[0] == said[1]


def test_a_row_whose_late_request_cannot_be_built_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = constraining()
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=30)
    ids = [engine.constrain([256, first], texts(*CHOICES), sampling) for first in range(4)]
    engine.step()
    allowed_of = step.allowed_of

    def failing(request: Request, *rest: object) -> Allowed | None:
        if request.message_id == ids[1]:
            raise OracleError("injected")
        return allowed_of(request, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(step, "allowed_of", failing)
    engine.step()
    monkeypatch.undo()
    engine.run()
    said = [engine.tokens(message_id) for message_id in ids if message_id != ids[1]]
    assert isinstance(engine.endings[ids[1]], EngineFailed)
    alone = constraining(overlap=False)
    again = [alone.constrain([256, first], texts(*CHOICES), sampling) for first in (0, 2, 3)]
    alone.run()
    assert said == [alone.tokens(message_id) for message_id in again]


def test_a_step_that_cannot_choose_late_fails_with_its_requests() -> None:
    engine = constraining()
    message_id = engine.constrain([256, 1], texts(*CHOICES), SamplingParams(max_tokens=30, seed=2))
    engine.step()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_Launched, "choose", _lost)
        engine.step()
    engine.run()
    assert isinstance(engine.endings[message_id], EngineFailed)
    assert engine.count("failed_steps") == 1
    again = engine.constrain([256, 1], texts(*CHOICES), SamplingParams(max_tokens=30, seed=2))
    engine.run()
    assert b"".join(map(TOKENIZER.token_bytes, engine.tokens(again))).decode() in CHOICES


def _lost(*_: object) -> None:
    raise OracleError("the device is lost")


def test_the_row_of_a_last_token_is_not_run_for_log_probabilities_that_are_on_their_way() -> None:
    engine = constraining(max_step_tokens=1)
    sampling = SamplingParams(temperature=0.0, max_tokens=11, logprobs=True)
    message_id = engine.constrain([256], texts("the only one"), sampling)
    engine.run()
    ending = engine.endings[message_id]
    assert isinstance(ending, Ended)
    assert len(ending.logprobs) == ending.completion_tokens == 11


def _asked(message_id: int, engine: Engine) -> object:
    """All of an ending but what may differ: how much was cached, and when it was read."""
    ending = engine.endings[message_id]
    if isinstance(ending, Ended):
        sent = engine.tokens(message_id)
        return msgspec.structs.replace(ending, cached_tokens=0, token_ids=sent, logprobs=[], times=RequestTimes())
    if isinstance(ending, ScoreEnded):
        return [[round(value, 4) for value in values] for values in ending.logprobs]
    return ending


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=configs, events=st.lists(arrivals, min_size=1, max_size=8))
def test_overlap_changes_no_ending(config: dict[str, object], events: list[Arrival]) -> None:
    """A request that is admitted while a step runs does not find what that step ends; all else is the same."""
    events = [replace(event, abort_after=None, timeout=None) for event in events]
    engines = [Engine(**{**config, "overlap": overlap}) for overlap in (False, True)]  # type: ignore[arg-type]
    for engine in engines:
        drive(engine, events)
    alone, together = engines
    for message_id, ending in alone.endings.items():
        if not isinstance(ending, ControlEnded):  # what a flush evicts depends on what has ended
            assert _asked(message_id, together) == _asked(message_id, alone)


def test_one_call_behind_the_other_finds_as_much() -> None:
    cached = []
    for overlap in (False, True):
        engine = Engine(overlap=overlap)
        said = [1, 2, 3]
        found = []
        for word in (7, 8, 9):
            message_id = engine.generate(said, GREEDY)
            engine.run()
            found.append(engine.cached(message_id))
            said = [*said, *engine.tokens(message_id), word]
        cached.append(found)
    assert cached[0] == cached[1]


@pytest.mark.parametrize("computes", ["when asked", "when launched"])
def test_a_pool_that_is_too_small_sends_requests_back_and_loses_nothing(computes: Computes) -> None:
    engine = Engine(overlap=True, computes=computes, pool=40, headroom=0, max_step_tokens=8)
    prompts = [[1, 2, stem, stem + 1] for stem in range(3, 11)]
    samplings = [
        SamplingParams(temperature=0.0, max_tokens=20 + i, ignore_eos=True, stop=("abca",) if i % 3 else ())
        for i in range(len(prompts))
    ]
    ids = [engine.generate(prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
    engine.run()
    assert engine.count("retractions") > 0
    assert engine.count("overlapped_steps") > 0
    for message_id, prompt, sampling in zip(ids, prompts, samplings, strict=True):
        engine.assert_equals_reference(message_id, prompt, sampling)


@pytest.mark.parametrize(("waiting", "overlaps"), [(1, True), (4, False)])
def test_many_texts_that_wait_for_landings_are_not_left_behind(waiting: int, overlaps: bool) -> None:
    """Their next tokens need penalties. One of eight runs in every other step; with four nobody runs ahead."""
    engine = Engine(overlap=True, pool=600)
    penalised = SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.3, ignore_eos=True)
    plain = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    slow = [engine.generate([stem, 2, 3], penalised) for stem in range(1, 1 + waiting)]
    fast = [engine.generate([stem, 2, 3], plain) for stem in range(1 + waiting, 9)]
    while not all(message_id in engine.endings for message_id in slow):
        engine.step()
    steps = engine.count("steps")
    assert (engine.count("overlapped_steps") > steps - 3) is overlaps
    assert steps == pytest.approx(24 if overlaps else 12, abs=2)
    engine.run()
    for message_id, stem in zip([*slow, *fast], range(1, 9), strict=True):
        engine.assert_equals_reference(message_id, [stem, 2, 3], penalised if message_id in slow else plain)
