"""Guesses of next tokens change no text, whatever they are, and right ones save steps."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.lang.protocol import RequestTimes
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.batch import PICTURE_BASE
from umbel.srt.core.instruments import FailAt
from umbel.srt.core.messages import Ended, EngineControl, EngineFailed, Tokens
from umbel.srt.scheduler.guesses import (
    MOST_GUESSES,
    Guess,
    Guesser,
    HistorySource,
    PromptSource,
    StepCosts,
)
from umbel.srt.scheduler.request import Generation, Request
from umbel.srt.testing.oracle import OracleError

from ..engine_harness import GREEDY, VOCABULARY, Engine
from ..guessing import Free, Told, told
from ..toy_constraint import TOKENIZER, texts
from . import test_constrained_properties as constrained
from . import test_scheduler_properties as plain

LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def guessing(said: Mapping[int, Sequence[int]], wrong: int | str | None, vocabulary: int = VOCABULARY) -> Guesser:
    """A guesser that knows what was said, or ("sources") one with the sources of a runtime."""
    if isinstance(wrong, str):
        return Guesser([PromptSource(), HistorySource()], Free, vocabulary)
    return told(said, wrong, vocabulary)


def said_by(engine: Engine) -> dict[int, list[int]]:
    return {number: engine.tokens(number) for number, ending in engine.endings.items() if isinstance(ending, Ended)}


def asked(engine: Engine, message_id: int) -> object:
    """All of an ending but when it was read, in which pieces, and which tokens were guessed."""
    ending = engine.endings[message_id]
    if not isinstance(ending, Ended):
        return ending
    return msgspec.structs.replace(
        ending, token_ids=engine.tokens(message_id), logprobs=[], times=RequestTimes(), runs=[]
    )


def guessed(engine: Engine, message_id: int) -> int:
    """Counts the tokens of a text that were told as guessed."""
    ending = engine.endings[message_id]
    assert isinstance(ending, Ended), ending
    return sum(run.end - run.first for run in ending.runs if run.origin == "guessed")


# -- what guesses save


def test_right_guesses_save_steps() -> None:
    truth = Engine().reference([1, 2, 3], LONG).token_ids
    engine = Engine(guesser=told({1: truth}))
    message_id = engine.generate([1, 2, 3], LONG)
    engine.run()
    engine.assert_equals_reference(message_id, [1, 2, 3], LONG)
    assert engine.count("steps") == 3, "40 tokens: each step chooses one, and one after each of 16 guesses"
    assert engine.count("guessed_prompt_rows") == engine.count("accepted_prompt_rows") == 37
    assert engine.count("forward_rows") == 3 + 2 + 37
    assert guessed(engine, message_id) == 37


def test_wrong_guesses_cost_rows_and_nothing_else() -> None:
    truth = Engine().reference([1, 2, 3], LONG).token_ids
    wrong = [(token + 1) % VOCABULARY for token in truth]
    engine, without = Engine(guesser=told({1: wrong})), Engine()
    for one in (engine, without):
        one.generate([1, 2, 3], LONG)
        one.run()
    assert asked(engine, 1) == asked(without, 1)
    assert engine.count("steps") == without.count("steps")
    assert engine.count("accepted_prompt_rows") == 0 < engine.count("guessed_prompt_rows")
    assert guessed(engine, 1) == 0
    assert engine.count("computed_prompt_tokens") == without.count("computed_prompt_tokens")


def test_one_guess_runs_beside_a_row_without_logits() -> None:
    """Two sequences, two rows of logits, and three rows."""
    short = SamplingParams(temperature=0.0, max_tokens=2)
    truth = Engine().reference([1], short).token_ids
    engine = Engine(guesser=told({2: truth}), in_step_sharing=False)
    engine.generate([1], SamplingParams(temperature=0.0, max_tokens=0))
    message_id = engine.generate([1], short)
    engine.run()
    engine.assert_equals_reference(message_id, [1], short)
    assert engine.count("accepted_prompt_rows") == 1
    assert engine.count("forward_rows") == 3


def test_a_call_after_guesses_finds_as_much_in_the_cache() -> None:
    cached = []
    for guesses in (False, True):
        said = Engine().reference([1, 2, 3], LONG).token_ids
        engine = Engine(guesser=told({1: said}) if guesses else None)
        engine.generate([1, 2, 3], LONG)
        engine.run()
        following = engine.generate([1, 2, 3, *said, 7], GREEDY)
        engine.run()
        cached.append(engine.cached(following))
    assert cached[0] == cached[1] == 42


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.9, seed=5, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=5, max_tokens=30, top_k=7, min_p=0.05, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=5, max_tokens=30, top_p=0.8),
        SamplingParams(temperature=0.0, max_tokens=30, repetition_penalty=1.4, min_tokens=12),
        SamplingParams(temperature=0.7, seed=2, max_tokens=30, frequency_penalty=0.6, presence_penalty=0.4),
        SamplingParams(temperature=0.0, max_tokens=30, stop=("ab", "cca"), min_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0.0, max_tokens=30, logit_bias={4: 3.0}, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=9, max_tokens=30, logprobs=True, top_logprobs=3),
        SamplingParams(temperature=0.0, max_tokens=30, logprobs=True, prompt_logprobs_from=1, ignore_eos=True),
    ],
)
@pytest.mark.parametrize("wrong", [None, 3, 5])
@pytest.mark.parametrize("settings", [{}, {"partial_logits": False}, {"overlap": True}])
def test_everything_asked_of_a_text_is_the_same(
    sampling: SamplingParams, wrong: int | None, settings: dict[str, object]
) -> None:
    without = Engine(**settings)  # type: ignore[arg-type]
    prompts = [[1, 2, 3], [1, 2, 9], [4, 4]]
    for prompt in prompts:
        without.generate(prompt, sampling)
    without.run()
    engine = Engine(guesser=told(said_by(without), wrong), **settings)  # type: ignore[arg-type]
    ids = [engine.generate(prompt, sampling) for prompt in prompts]
    engine.run()
    assert engine.count("accepted_prompt_rows") > 0
    assert engine.count("steps") < without.count("steps")
    for message_id in ids:
        assert asked(engine, message_id) == asked(without, message_id)
        one, other = engine.endings[message_id], without.endings[message_id]
        assert isinstance(one, Ended)
        assert isinstance(other, Ended)
        assert [entry.token_id for entry in one.logprobs] == [entry.token_id for entry in other.logprobs]
        assert [entry.logprob for entry in one.logprobs] == [entry.logprob for entry in other.logprobs]
        assert one.prompt_logprobs == other.prompt_logprobs


def test_the_tokens_of_a_step_are_sent_together_and_share_its_time() -> None:
    truth = Engine().reference([1, 2, 3], LONG).token_ids
    engine = Engine(guesser=told({1: truth}))
    message_id = engine.generate([1, 2, 3], LONG, stream=True)
    pieces = []
    while not engine.scheduler.idle:
        pieces += [len(event.token_ids) for event in engine.step() if isinstance(event, Tokens)]
        engine.clock.advance(1.0)
    assert pieces == [1 + MOST_GUESSES, 1 + MOST_GUESSES]
    assert engine.tokens(message_id) == truth
    counters = engine.scheduler.counters
    assert counters["token_seconds"] == pytest.approx(2.0), "from the first to the last of three steps"
    assert counters["first_token_seconds"] == 0.0


# -- whatever happens

wrongs = st.sampled_from([None, 2, 4, 9, "sources"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=plain.configs, events=st.lists(plain.arrivals, min_size=1, max_size=12), wrong=wrongs)
def test_texts_equal_those_without_cache(
    config: dict[str, object], events: list[plain.Arrival], wrong: int | str | None
) -> None:
    """Guesses may be right by the run before this one, in which the same was sent."""
    before = Engine(**config)  # type: ignore[arg-type]
    plain.drive(before, [replace(event, abort_after=None, timeout=None) for event in events])
    engine = Engine(guesser=guessing(said_by(before), wrong), **config)  # type: ignore[arg-type]
    plain.judge(engine, plain.drive(engine, events))


@pytest.mark.parametrize("layers", ["windows", "blocks", "states"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), events=st.lists(plain.arrivals, min_size=1, max_size=12), wrong=wrongs)
def test_texts_of_other_layers_equal_those_without_cache(
    layers: str, data: st.DataObject, events: list[plain.Arrival], wrong: int | str | None
) -> None:
    config = data.draw(plain.OTHER_LAYERS[layers])
    before = Engine(**config)  # type: ignore[arg-type]
    plain.drive(before, [replace(event, abort_after=None, timeout=None) for event in events])
    engine = Engine(guesser=guessing(said_by(before), wrong), **config)  # type: ignore[arg-type]
    plain.judge(engine, plain.drive(engine, events))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    config=constrained.configs,
    events=st.lists(constrained.arrivals, min_size=1, max_size=10),
    wrong=wrongs,
)
def test_constrained_texts_are_those_that_their_requests_would_get_alone(
    config: dict[str, object], events: list[constrained.Arrival], wrong: int | str | None
) -> None:
    before = constrained.machine(**config)
    constrained.drive(before, [replace(event, abort_after=None) for event in events])
    engine = constrained.machine(guesser=guessing(said_by(before), wrong, TOKENIZER.vocab_size), **config)
    constrained.judge(engine, constrained.drive(engine, events))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    config=plain.configs,
    events=st.lists(plain.arrivals, min_size=2, max_size=8),
    point=st.sampled_from(["engine.plan", "engine.forward", "engine.sample", "engine.commit", "memory.allocate"]),
    k=st.integers(1, 40),
    wrong=st.sampled_from([5, "sources"]),
)
def test_a_fault_anywhere_costs_no_other_text_anything(
    config: dict[str, object], events: list[plain.Arrival], point: str, k: int, wrong: int | str
) -> None:
    before = Engine(**config)  # type: ignore[arg-type]
    plain.drive(before, [replace(event, abort_after=None, timeout=None) for event in events])
    fault = FailAt(point, k, OracleError("injected"))
    engine = Engine(faults=fault, guesser=guessing(said_by(before), wrong), **config)  # type: ignore[arg-type]
    plain.judge(engine, plain.drive(engine, events), injected=True)
    failed = [e for e in engine.endings.values() if isinstance(e, EngineFailed) and e.message == "injected"]
    if point != "engine.forward":
        assert len(failed) <= 1, "one request ends, the others do not notice"


def test_forced_tokens_among_the_guesses_are_verified_with_them() -> None:
    """The constraint appends them once the token before is settled: their rows have run already."""
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    constraint = texts(*(f'{{"a": "{one}", "the end": "{other}"}}' for one in ("in", "he") for other in ("in", "no")))
    without = constrained.machine()
    without.constrain([256], constraint, sampling)
    without.run()
    engine = constrained.machine(guesser=told(said_by(without), None, TOKENIZER.vocab_size))
    engine.constrain([256], constraint, sampling)
    engine.run()
    assert asked(engine, 1) == asked(without, 1)
    assert engine.count("forced_tokens") == without.count("forced_tokens") > 0
    assert without.count("steps") - engine.count("steps") == guessed(engine, 1) > 0


def test_a_guess_that_its_constraint_forbids_costs_no_row() -> None:
    constraint = texts("yes", "no", "not in the end")
    sampling = SamplingParams(temperature=0.0, max_tokens=30)
    endings = []
    for guesser in (None, told({1: [5] * 40}, None, TOKENIZER.vocab_size)):
        engine = constrained.machine(guesser=guesser)
        engine.constrain([256], constraint, sampling)
        engine.run()
        endings.append(asked(engine, 1))
        assert engine.count("guessed_prompt_rows") == 0
    assert endings[0] == endings[1]


# -- sources


class Throwing(Told):
    def guess(self, request: Request, most: int) -> Guess | None:
        if request.generated > 3:
            raise RuntimeError("a secret of the text")
        return super().guess(request, most)


class Lying(Told):
    def guess(self, request: Request, most: int) -> Guess | None:
        return Guess([VOCABULARY + 5], 0)


class Endless(Told):
    def guess(self, request: Request, most: int) -> Guess | None:
        return Guess([1] * (most + 1), 0)


@pytest.mark.parametrize("source", [Throwing, Lying, Endless])
def test_a_source_that_throws_or_lies_is_switched_off(source: type[Told], caplog: pytest.LogCaptureFixture) -> None:
    truth = Engine().reference([1, 2, 3], LONG).token_ids
    assert_switched_off(Engine(guesser=Guesser([source({1: truth}, 2)], Free, VOCABULARY)), "prompt", caplog)


def assert_switched_off(engine: Engine, source: str, caplog: pytest.LogCaptureFixture) -> None:
    """One warning, without what is in the texts, which are right."""
    with caplog.at_level(logging.WARNING, logger="umbel.engine"):
        for prompt in ([1, 2, 3], [1, 2, 4]):
            message_id = engine.generate(prompt, LONG)
            engine.run()
            engine.assert_equals_reference(message_id, prompt, LONG)
    (record,) = caplog.records
    assert f"no more guesses come from {source!r}" in record.getMessage()
    assert "secret" not in record.getMessage()
    assert engine.count("guess_failures") == 1


def test_a_fault_of_a_source_changes_no_text(caplog: pytest.LogCaptureFixture) -> None:
    truth = Engine().reference([1, 2, 3], LONG).token_ids
    engine = Engine(faults=FailAt("engine.guess", 2, OracleError("injected")), guesser=told({1: truth}))
    message_id = engine.generate([1, 2, 3], LONG)
    engine.run()
    engine.assert_equals_reference(message_id, [1, 2, 3], LONG)
    assert engine.count("guess_failures") == 1
    assert 0 < engine.count("accepted_prompt_rows") < 37


def request_with(tokens: Sequence[int], *, prompt: int | None = None, salt: str = "") -> Request:
    """A request; tokens after the first `prompt` were generated."""
    engine = Engine(pool=4096)
    engine.generate(list(tokens[:prompt]), LONG, salt=salt)
    (request,) = engine.scheduler._table.waiting.values()
    for token in tokens[len(tokens[:prompt]) :]:
        request.append(int(token))
    return request


@pytest.mark.parametrize(
    ("tokens", "most", "guess"),
    [
        ([1, 2, 3], 4, None),
        ([1, 2, 3, 1], 2, Guess([2, 3], 1)),
        ([1, 2, 3, 9, 2, 5, 1, 2], 3, Guess([3, 9, 2], 2)),
        ([9, 2, 5, 1, 2, 3, 7, 2], 2, Guess([3, 7], 1)),  # the latest of equals
        ([4, 4], 3, Guess([4, 4, 4], 1)),
        ([6, 7, 8, 7, 8], 5, Guess([7, 8, 7, 8, 7], 2)),
        ([*range(1, 13), *range(1, 12)], 1, Guess([12], 8)),
    ],
)
def test_a_prompt_is_repeated_from_where_most_tokens_agree(tokens: list[int], most: int, guess: Guess | None) -> None:
    assert PromptSource().guess(request_with(tokens), most) == guess


def test_no_guess_holds_a_picture() -> None:
    """Neither one from the prompt nor one from an earlier text, whose last prompt tokens may be a picture's."""
    picture = [PICTURE_BASE + 7, PICTURE_BASE + 8]
    text = [3, 4, 5, *picture, 6]
    assert PromptSource().guess(request_with([*text, 3, 4], prompt=1), 8) == Guess([5], 2)
    assert PromptSource().guess(request_with([3, 4, *picture, 6, 3, 4], prompt=1), 8) is None
    assert history_of([1, *text]).guess(request_with([9, 3, 4]), 8) == Guess([5], 2)
    assert history_of([1, 3, 4, *picture, 6]).guess(request_with([9, 3, 4]), 8) is None
    assert history_of([1, 2, *picture, 6, 7]).guess(request_with([9, *picture], prompt=1), 8) == Guess([6, 7], 2)


def history_of(*texts: Sequence[int], salts: Sequence[str] = ()) -> HistorySource:
    """A history of texts whose first two tokens are prompts."""
    source = HistorySource()
    for text, salt in zip(texts, salts or [""] * len(texts), strict=True):
        source.learn(request_with(text, prompt=2, salt=salt))
    return source


@pytest.mark.parametrize(
    ("texts", "tokens", "guess"),
    [
        ([], [1, 2], None),
        ([[1, 2, 3, 4, 5]], [2, 3], Guess([4, 5], 2)),
        ([[1, 2, 3, 4, 5]], [9, 4, 5], None),  # nothing followed
        ([[1, 2, 3, 4, 5]], [1, 2], Guess([3, 4, 5], 2)),  # a prompt's end counts
        ([[1, 2, 3, 4, 5]], [7, 3], None),  # one token is too few
        ([[1, 2, 3, 4], [5, 2, 3, 6]], [8, 2, 3], Guess([6], 2)),  # the latest of equals
        ([[*range(10, 20)], [17, 18, 5, 5]], [*range(11, 19)], Guess([19], 8)),  # more than the latest shares
        ([[1, 2, 3], [4, 5, 6]], [2, 3], None),  # no text goes on in the next one
        ([[1, 2, 3, 4, 5, 6, 7]], [2, 3], Guess([4, 5, 6], 2)),
    ],
)
def test_an_earlier_text_is_repeated_from_where_most_tokens_agree(
    texts: list[list[int]], tokens: list[int], guess: Guess | None
) -> None:
    assert history_of(*texts).guess(request_with(tokens), 3) == guess


def test_a_history_is_of_its_namespace() -> None:
    source = history_of([1, 2, 3, 4, 5], [1, 2, 3, 7, 7], salts=["a", "b"])
    assert source.guess(request_with([1, 2, 3], salt="a"), 4) == Guess([4, 5], 3)
    assert source.guess(request_with([1, 2, 3], salt="b"), 4) == Guess([7, 7], 3)
    assert source.guess(request_with([1, 2, 3]), 4) is None
    source.forget()
    assert source.guess(request_with([1, 2, 3], salt="a"), 4) is None


def test_a_history_forgets_the_oldest_texts_and_namespaces() -> None:
    source = HistorySource()
    source.learn(request_with([1, 2, 3, 4, 5], prompt=2))
    for start in range(500):
        source.learn(request_with([1, 2, *((start + place) % 1000 + 1000 for place in range(200))], prompt=2))
    assert source.guess(request_with([1, 2, 3]), 4) is None, "100,000 tokens came after it"
    seen = request_with([1, 1400, 1401], prompt=1)
    assert source.guess(seen, 2) == Guess([1402, 1403], 2)
    for number in range(20):
        source.learn(request_with([1, 2, 3, 4, 5], prompt=2, salt=f"{number}"))
    assert source.guess(seen, 2) is None
    assert source.guess(request_with([1, 2], salt="19"), 4) == Guess([3, 4, 5], 2)


@given(
    texts=st.lists(st.lists(st.integers(1, 3), min_size=4, max_size=30), min_size=1, max_size=8),
    tokens=st.lists(st.integers(1, 3), min_size=2, max_size=12),
)
def test_what_a_history_guesses_followed_the_same_tokens(texts: list[list[int]], tokens: list[int]) -> None:
    guess = history_of(*texts).guess(request_with(tokens), 4)
    places = [
        (text, place) for text in texts for place in range(2, len(text)) if text[place - 2 : place] == tokens[-2:]
    ]
    if guess is None:
        assert not places or texts[-1] not in [text for text, _ in places] or len(tokens) < 2
        return
    before = tokens[-guess.kind :]
    assert any(
        text[:place][-guess.kind :] == before and text[place : place + 4] == guess.tokens for text, place in places
    )


def test_a_text_that_was_said_before_takes_few_steps() -> None:
    sampling = SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True)
    engine = Engine(guesser=Guesser([HistorySource()], Free, VOCABULARY))
    steps = []
    for _ in range(2):
        before = engine.count("steps")
        message_id = engine.generate([1, 2, 3], sampling)
        engine.run()
        engine.assert_equals_reference(message_id, [1, 2, 3], sampling)
        steps.append(engine.count("steps") - before)
    assert steps == [40, 3]
    assert engine.count("guessed_history_rows") == engine.count("accepted_history_rows") == 37


def test_a_flushed_cache_remembers_no_text() -> None:
    engine = Engine(guesser=Guesser([HistorySource()], Free, VOCABULARY))
    for control in (98, 99):
        engine.generate([1, 2, 3], LONG)
        engine.run()
        engine.scheduler.handle_message(EngineControl(control, "flush_cache"))
        engine.run()
    assert engine.count("guessed_history_rows") == 0


def test_a_source_that_cannot_learn_is_switched_off() -> None:
    class Forgetful(HistorySource):
        def learn(self, request: Request) -> None:
            raise RuntimeError("full")

    engine = Engine(guesser=Guesser([Forgetful()], Free, VOCABULARY))
    message_id = engine.generate([1, 2, 3], LONG)
    engine.run()
    engine.assert_equals_reference(message_id, [1, 2, 3], LONG)
    assert engine.count("guess_failures") == 1


def test_the_first_rates_cover_every_kind() -> None:
    for source in (PromptSource(), history_of([1, 2] * 20)):
        found = source.guess(request_with([1, 2] * 20), 1)
        assert found is not None
        assert found.kind == len(source.first_rates) - 1


# -- what is worth its time


def measured(*points: tuple[int, float]) -> StepCosts:
    costs = StepCosts()
    for rows, seconds in points:
        for disturbance in (40.0, 1.0, 1.0):
            costs.measured(rows, seconds * disturbance)
    return costs


def test_costs_are_linear_between_what_was_measured_and_beyond() -> None:
    costs = measured((1, 10.0), (4, 13.0), (8, 21.0))
    assert [costs.seconds(rows) for rows in (1, 2, 4, 6, 8, 10)] == pytest.approx([10, 11, 13, 17, 21, 25])
    assert costs.knows(1)
    assert costs.knows(7)
    assert not costs.knows(2)
    assert measured((1, 10.0)).seconds(3) == pytest.approx(12.0)


def test_more_rows_never_take_less_time() -> None:
    costs = measured((1, 10.0), (2, 8.0), (8, 9.0))
    assert costs.seconds(2) == costs.seconds(8) == 10.0


def guessed_by(costs: StepCosts, right: bool) -> tuple[Engine, float]:
    truth = Engine().reference([1, 2, 3], LONG).token_ids
    said = truth if right else [(token + 1) % VOCABULARY for token in truth]
    engine = Engine(guesser=Guesser([Told({1: said})], lambda: costs, VOCABULARY))
    message_id = engine.generate([1, 2, 3], LONG)
    engine.run()
    engine.assert_equals_reference(message_id, [1, 2, 3], LONG)
    return engine, engine.count("guessed_prompt_rows")


class Linear(StepCosts):
    """A step of one row takes a second, and each further row as much as is said."""

    def __init__(self, further: float) -> None:
        self._further = further

    def knows(self, rows: int) -> bool:
        return True

    def covers(self, rows: int) -> bool:
        return True

    def seconds(self, rows: int) -> float:
        return 1.0 + (rows - 1) * self._further

    def measured(self, rows: int, seconds: float) -> None:
        pass


@pytest.mark.parametrize(("further", "right", "most"), [(1.0, True, 0), (0.2, False, 12), (0.02, False, 200)])
def test_guesses_that_cost_more_than_they_bring_do_not_run(further: float, right: bool, most: int) -> None:
    _, guessed = guessed_by(Linear(further), right)
    assert guessed <= most


def test_cheap_and_right_guesses_run_in_numbers() -> None:
    engine, guessed = guessed_by(Linear(0.05), right=True)
    assert guessed > 20
    assert engine.count("steps") < 15


@pytest.mark.parametrize(("tokens", "tried"), [(60, 0), (90, 1), (180, 1), (210, 2), (440, 2), (470, 3)])
@pytest.mark.sampled(4)
def test_a_text_that_is_never_guessed_right_is_tried_again_and_ever_less_often(tokens: int, tried: int) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    guesser = Guesser([Told({1: [0] * 500}, None)], lambda: Linear(1.0), VOCABULARY)
    engine = Engine(guesser=guesser, pool=600, context=500)
    engine.generate([1, 2, 3], sampling)
    engine.run()
    assert engine.count("guessed_prompt_rows") == tried


# -- with recurrent states


@pytest.mark.parametrize("wrong", [None, 3, 5])
@pytest.mark.parametrize(("states", "again"), [(8, 3), (40, 3), (160, 0)])
@pytest.mark.sampled(4)
def test_a_state_goes_on_from_the_last_right_guess(wrong: int | None, states: int, again: int) -> None:
    """A following call begins with a snapshot near the end of the text, or at it where slots are many."""
    ends = []
    for guesser in (None, told({1: Engine().reference([1, 2, 3], LONG).token_ids}, wrong)):
        engine = Engine(guesser=guesser, states=states, snapshot_gap=1)
        message_id = engine.generate([1, 2, 3], LONG)
        engine.run()
        engine.assert_equals_reference(message_id, [1, 2, 3], LONG)
        said = engine.tokens(message_id)
        steps = engine.count("steps")
        following = engine.generate([1, 2, 3, *said, 7], GREEDY)
        engine.run()
        engine.assert_equals_reference(following, [1, 2, 3, *said, 7], GREEDY)
        ends.append((engine.cached(following), steps))
    (plain_cached, plain_steps), (cached, steps) = ends
    assert plain_cached == 42
    assert 42 - again <= cached <= 42
    assert steps < plain_steps
    if wrong is None and states > 8:
        assert steps == 3, "16 guesses in each"


def test_states_of_guesses_take_the_place_of_old_snapshots() -> None:
    """All slots hold snapshots after many texts; guesses go on, and a text that has a pin keeps its own."""
    truth = Engine().reference([1, 2, 3], LONG).token_ids
    engine = Engine(guesser=told({20: truth}), states=32, snapshot_gap=1, pool=1000)
    for first in range(1, 20):
        engine.generate([first, 5], GREEDY)
        engine.run()
    message_id = engine.generate([1, 2, 3], LONG)
    assert message_id == 20
    engine.run()
    engine.assert_equals_reference(message_id, [1, 2, 3], LONG)
    assert engine.count("accepted_prompt_rows") > 25


# -- with overlap


class Late(Told):
    """Knows of nothing before three tokens are known."""

    def guess(self, request: Request, most: int) -> Guess | None:
        return super().guess(request, most) if len(request.known_tokens) >= request.prompt_length + 3 else None


def test_the_token_that_is_still_chosen_is_guessed_with_those_after_it() -> None:
    truth = Engine().reference([1, 2, 3], LONG).token_ids
    engine = Engine(guesser=Guesser([Late({1: truth})], Free, VOCABULARY), overlap=True)
    message_id = engine.generate([1, 2, 3], LONG)
    engine.run()
    engine.assert_equals_reference(message_id, [1, 2, 3], LONG)
    assert engine.count("steps") == 4 + 3, "those of the first four tokens, then 17, 17, 2"
    assert engine.count("overlapped_steps") == 4, "the fifth has the guesses after the fourth token"
    assert engine.count("guessed_prompt_rows") == engine.count("accepted_prompt_rows") == 16 + 16 + 1


@pytest.mark.parametrize(("texts_of", "guessed"), [(4, True), (12, False)])
def test_texts_with_guesses_hold_few_others_up(texts_of: int, guessed: bool) -> None:
    """One text of so many is guessed: the next step would wait for this one."""
    truth = Engine().reference([1, 9], LONG).token_ids
    engine = Engine(guesser=told({1: truth}), overlap=True, pool=1000)
    ids = [engine.generate([first, 9], LONG) for first in range(1, texts_of + 1)]
    engine.run()
    for first, message_id in enumerate(ids, 1):
        engine.assert_equals_reference(message_id, [first, 9], LONG)
    assert (engine.count("guessed_prompt_rows") > 0) is guessed


@pytest.mark.parametrize(("scheduling", "pays"), [(0.05, True), (4.0, False)])
def test_what_a_step_without_overlap_takes_longer_counts_against_its_guesses(scheduling: float, pays: bool) -> None:
    """Every second guess is right. It saves a step of four seconds, and the step that waits loses the scheduling."""
    engine: Engine | None = None

    def pass_time(point: str) -> None:
        if point == "engine.forward" and engine is not None:
            engine.clock.advance(scheduling)

    sampling = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    truth = Engine(pool=300, context=200).reference([1, 2, 3], sampling).token_ids
    guesser = Guesser([Told({1: truth}, wrong=2)], StepCosts, VOCABULARY)
    engine = Engine(guesser=guesser, overlap=True, forward_seconds=4.0, faults=pass_time, pool=300, context=200)
    message_id = engine.generate([1, 2, 3], sampling)
    engine.run()
    engine.assert_equals_reference(message_id, [1, 2, 3], sampling)
    assert (engine.count("guessed_prompt_rows") > 30) is pays


def test_guesses_wait_until_a_step_without_them_was_measured() -> None:
    truth = Engine().reference([1, 2, 3], LONG).token_ids
    engine = Engine(guesser=Guesser([Told({1: truth})], StepCosts, VOCABULARY))
    engine.generate([1, 2, 3], LONG)
    for _ in range(4):  # the prompt, and three
        engine.step()
    assert engine.count("guessed_prompt_rows") == 0
    engine.step()
    assert engine.count("guessed_prompt_rows") == 3, "not far more rows than were measured"
    engine.step()
    assert engine.count("guessed_prompt_rows") == 3 + 15


def test_the_switch() -> None:
    prompt = [1, 2, 3] * 8
    counts = []
    for switched_on in (False, True):
        engine = Engine(token_guesses=switched_on)
        message_id = engine.generate(prompt, LONG)
        engine.run()
        engine.assert_equals_reference(message_id, prompt, LONG)
        counts.append(engine.count("guessed_prompt_rows"))
    assert counts[0] == 0 < counts[1]


def test_no_guess_reaches_beyond_a_text() -> None:
    """Neither beyond max_tokens nor beyond the context: the last row chooses the last token."""
    for prompt, sampling in (
        ([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)),
        ([5] * 117, LONG),
    ):
        engine = Engine(guesser=told({1: [7] * 60}))
        message_id = engine.generate(prompt, sampling)
        engine.run()
        engine.assert_equals_reference(message_id, prompt, sampling)
        assert all(rows <= len(prompt) + 3 for rows in engine.runner.batches)


def test_a_generation_keeps_no_slot_of_a_refused_guess() -> None:
    engine = Engine(guesser=told({1: [7] * 60}))
    engine.generate([1, 2, 3], LONG)
    for _ in range(5):
        engine.step()
    (running,) = engine.scheduler._table.running.values()
    assert isinstance(running.job, Generation)
    assert running.kv_length == running.computed == running.length - 1
    assert np.array_equal(running.slots(0, running.kv_length), np.unique(running.slots(0, running.kv_length)))
