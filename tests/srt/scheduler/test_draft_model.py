"""A draft guesses next tokens. It changes no text, and its keys are right wherever those of the model are."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.batch import Batch, Logits, picture_tokens
from umbel.srt.core.instruments import FailAt
from umbel.srt.core.messages import Ended, EngineFailed
from umbel.srt.scheduler.constrained import ConstrainedTexts
from umbel.srt.scheduler.draft_model import DraftModel
from umbel.srt.scheduler.guesses import MOST_GUESSES, Guesser, StepCosts
from umbel.srt.testing.oracle import OracleError, OracleRunner

from ..engine_harness import POINTS, VOCABULARY, Engine
from ..guessing import Free
from ..toy_constraint import TOKENIZER, texts
from . import test_constrained_properties as constrained
from . import test_scheduler_properties as plain
from .test_guesses import LONG, asked, assert_switched_off
from .test_scheduler_pictures import engine_with

SLOTS = 4096


class Draft(OracleRunner):
    """The oracle itself, which fails where a key of its own pool is wrong. Every `wrong`-th token is another one.

    `passes`: the batches that it ran.
    """

    def __init__(self, wrong: int | None = None, vocabulary: int = VOCABULARY, context: int = SLOTS) -> None:
        super().__init__(vocabulary, context, SLOTS)
        self.wrong = wrong
        self.passes: list[Batch] = []
        self._chosen = 0

    def forward(self, batch: Batch) -> Logits:
        self.passes.append(batch)
        logits = super().forward(batch)
        tokens = logits.tokens.copy()
        for row in range(len(tokens)):
            self._chosen += 1
            if self.wrong is not None and self._chosen % self.wrong == 0:
                tokens[row] = (self._best(logits, row) + 1) % self.vocab_size
        return replace(logits, tokens=tokens)

    @staticmethod
    def _best(logits: Logits, row: int) -> int:
        return int(logits.tokens[row]) if logits.tokens[row] >= 0 else int(logits.values[logits.places[row]].argmax())


def drafting(draft: Draft, costs: type[StepCosts] = Free, vocabulary: int = VOCABULARY) -> Guesser:
    return Guesser([], costs, vocabulary, DraftModel(draft, vocabulary))


@pytest.mark.parametrize(
    "sampling",
    [
        LONG,
        SamplingParams(temperature=0.9, seed=5, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=6, max_tokens=40, top_k=7, min_p=0.05, ignore_eos=True),
    ],
)
def test_a_draft_that_says_the_same_is_always_right(sampling: SamplingParams) -> None:
    """Its draws are the model's, its keys are those of the text, and the last of its guesses needs none."""
    draft = Draft()
    engine, without = Engine(guesser=drafting(draft)), Engine()
    for one in (engine, without):
        one.generate([1, 2, 3], sampling)
        one.run()
    assert asked(engine, 1) == asked(without, 1)
    assert engine.count("guessed_draft_rows") == engine.count("accepted_draft_rows") == 37
    assert engine.count("steps") == 3, "40 tokens: each step chooses one, and one after each of 16 guesses"
    rows = (3 + MOST_GUESSES - 1) + (2 + MOST_GUESSES - 1) + (2 + 4)
    assert engine.count("draft_rows") == sum(batch.rows for batch in draft.passes) == rows
    assert engine.count("guess_failures") == 0


def test_branches_share_what_the_draft_has_computed() -> None:
    draft = Draft()
    engine = Engine(guesser=drafting(draft))
    shared = [token % 20 + 1 for token in range(50)]
    ids = [engine.generate([*shared, last], LONG) for last in range(1, 5)]
    engine.run()
    for last, message_id in enumerate(ids, 1):
        engine.assert_equals_reference(message_id, [*shared, last], LONG)
    assert draft.passes[0].rows == 50 + 4
    engine.generate([*shared, 9], LONG)
    engine.run()
    assert max(batch.rows for batch in draft.passes[1:]) == 4 * 2, "the prompt was there, but for its last token"
    assert engine.count("guessed_draft_rows") == engine.count("accepted_draft_rows")


def test_a_long_prompt_is_drafted_in_parts() -> None:
    draft = Draft()
    engine = Engine(guesser=drafting(draft), max_step_tokens=10)
    prompt = [token % 20 + 1 for token in range(34)]
    message_id = engine.generate(prompt, LONG)
    engine.run()
    engine.assert_equals_reference(message_id, prompt, LONG)
    assert [batch.rows for batch in draft.passes[:4]] == [10, 10, 10, 4 + 3]
    assert [len(batch.logit_rows) for batch in draft.passes[:4]] == [0, 0, 0, 1]
    assert engine.count("accepted_draft_rows") == engine.count("guessed_draft_rows") > 30


def test_only_what_is_right_stays() -> None:
    """A wrong guess's key is computed again, once the token after it is known."""
    draft = Draft(wrong=3)
    engine = Engine(guesser=drafting(draft))
    message_id = engine.generate([1, 2, 3], LONG)
    engine.run()
    engine.assert_equals_reference(message_id, [1, 2, 3], LONG)
    assert 0 < engine.count("accepted_draft_rows") < engine.count("guessed_draft_rows")
    assert engine.count("guess_failures") == 0, "the draft finds every key of its pool as it must be"


wrongs = st.sampled_from([None, 2, 3, 5])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=plain.configs, events=st.lists(plain.arrivals, min_size=1, max_size=12), wrong=wrongs)
def test_texts_equal_those_without_cache(
    config: dict[str, object], events: list[plain.Arrival], wrong: int | None
) -> None:
    """Whatever is evicted, retracted, aborted or shared: no text changes, and the draft reads no wrong key."""
    engine = Engine(guesser=drafting(Draft(wrong)), **{**config, "overlap": False})  # type: ignore[arg-type]
    plain.judge(engine, plain.drive(engine, events))
    assert engine.count("guess_failures") == 0


@pytest.mark.parametrize("layers", ["windows", "blocks", "states"])
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), events=st.lists(plain.arrivals, min_size=1, max_size=12), wrong=wrongs)
def test_texts_of_other_layers_equal_those_without_cache(
    layers: str, data: st.DataObject, events: list[plain.Arrival], wrong: int | None
) -> None:
    config = {**data.draw(plain.OTHER_LAYERS[layers]), "overlap": False}
    engine = Engine(guesser=drafting(Draft(wrong)), **config)  # type: ignore[arg-type]
    plain.judge(engine, plain.drive(engine, events))
    assert engine.count("guess_failures") == 0


def test_texts_that_are_equal_so_far_write_the_key_of_their_last_token_once() -> None:
    draft = Draft(vocabulary=TOKENIZER.vocab_size)
    engine = constrained.machine(
        guesser=drafting(draft, vocabulary=TOKENIZER.vocab_size), max_step_tokens=3, max_running=2, constraint_fuel=7
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=2, seed=0)
    arrival = constrained.Arrival(0, 0, 0, sampling, heal=False, stream=False, abort_after=None)
    constrained.judge(engine, constrained.drive(engine, [arrival, arrival]))
    assert (engine.count("guess_failures"), len(draft.passes) > 0) == (0, True)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=constrained.configs, events=st.lists(constrained.arrivals, min_size=1, max_size=10), wrong=wrongs)
def test_constrained_texts_are_those_that_their_requests_would_get_alone(
    config: dict[str, object], events: list[constrained.Arrival], wrong: int | None
) -> None:
    draft = Draft(wrong, TOKENIZER.vocab_size)
    engine = constrained.machine(
        guesser=drafting(draft, vocabulary=TOKENIZER.vocab_size), **{**config, "overlap": False}
    )
    constrained.judge(engine, constrained.drive(engine, events))
    assert engine.count("guess_failures") == 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    config=plain.configs,
    events=st.lists(plain.arrivals, min_size=2, max_size=8),
    point=st.sampled_from(POINTS),
    k=st.integers(1, 40),
    wrong=wrongs,
)
def test_a_fault_anywhere_costs_no_other_text_anything(
    config: dict[str, object], events: list[plain.Arrival], point: str, k: int, wrong: int | None
) -> None:
    fault = FailAt(point, k, OracleError("injected"))
    engine = Engine(faults=fault, guesser=drafting(Draft(wrong)), **{**config, "overlap": False})  # type: ignore[arg-type]
    plain.judge(engine, plain.drive(engine, events), injected=True)
    failed = [e for e in engine.endings.values() if isinstance(e, EngineFailed) and e.message == "injected"]
    if point != "engine.forward":
        assert len(failed) <= 1, "one request ends, the others do not notice"


def test_a_constraint_that_fails_ahead_of_its_text_costs_the_draft_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(ConstrainedTexts, "allowed_after", fail)
    draft = Draft(vocabulary=TOKENIZER.vocab_size)
    engine = constrained.machine(guesser=drafting(draft, vocabulary=TOKENIZER.vocab_size))
    sampling = SamplingParams(temperature=0.0, max_tokens=20)
    engine.constrain([256], texts("a text", "another text"), sampling)
    free = engine.generate([256, 97], LONG)
    engine.run()
    assert all(isinstance(ending, Ended) for ending in engine.endings.values())
    assert len(engine.tokens(free)) == 40
    assert engine.count("guess_failures") == 0
    assert engine.count("accepted_draft_rows") > 30


def test_a_draft_keeps_to_the_constraint() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=40)
    constraint = texts(*(f"{one} {other} {third}" for one in "abc" for other in "defg" for third in ("no", "yes")))
    draft = Draft(vocabulary=TOKENIZER.vocab_size)
    engine = constrained.machine(guesser=drafting(draft, vocabulary=TOKENIZER.vocab_size))
    engine.constrain([256], constraint, sampling)
    engine.run()
    assert engine.count("accepted_draft_rows") == engine.count("guessed_draft_rows") > 2


@pytest.mark.parametrize("vocabulary", [VOCABULARY - 4, VOCABULARY + 40])
def test_a_draft_may_have_fewer_or_more_rows_of_padding(vocabulary: int) -> None:
    """What it guesses beyond the model's vocabulary is left out."""
    draft = Draft(vocabulary=vocabulary)
    engine = Engine(guesser=drafting(draft))
    message_id = engine.generate([1, 2, 3], LONG)
    engine.run()
    engine.assert_equals_reference(message_id, [1, 2, 3], LONG)
    assert engine.count("guess_failures") == 0
    assert draft.passes


def test_a_draft_may_have_a_shorter_context() -> None:
    draft = Draft(context=25)
    engine = Engine(guesser=drafting(draft))
    message_id = engine.generate([1, 2, 3], LONG)
    engine.run()
    engine.assert_equals_reference(message_id, [1, 2, 3], LONG)
    assert max(int(batch.positions.max()) for batch in draft.passes) == 23, "the token after the last key has none"
    assert engine.count("accepted_draft_rows") == 16 + 5


class Broken(Draft):
    def forward(self, batch: Batch) -> Logits:
        if len(self.passes) == 3:
            raise RuntimeError("a secret of the text")
        return super().forward(batch)


@pytest.mark.parametrize("faulty", ["draft", "hook"])
def test_a_draft_that_fails_is_switched_off(faulty: str, caplog: pytest.LogCaptureFixture) -> None:
    draft, hook = (Broken(), None) if faulty == "draft" else (Draft(), FailAt("engine.guess", 2, OracleError("no")))
    engine = Engine(guesser=drafting(draft), **({} if hook is None else {"faults": hook}))
    assert_switched_off(engine, "draft", caplog)


class Timed(Draft):
    """Each of its passes takes so long on the engine's clock."""

    def __init__(self, seconds: float, wrong: int | None) -> None:
        super().__init__(wrong)
        self.seconds = seconds
        self.engine: Engine | None = None

    def forward(self, batch: Batch) -> Logits:
        assert self.engine is not None
        self.engine.clock.advance(self.seconds)
        return super().forward(batch)


def timed(seconds: float, wrong: int | None) -> tuple[Engine, Draft]:
    """A text of 1,000 tokens of an engine whose steps take 1 s each, beside a draft whose passes take so long."""
    draft = Timed(seconds, wrong)
    guesser = drafting(draft, StepCosts)
    engine = Engine(pool=3000, context=2500, guesser=guesser, forward_seconds=1.0, check_every_step=False)
    draft.engine = engine
    engine.generate([1, 2, 3], msgspec.structs.replace(LONG, max_tokens=1000))
    engine.run()
    return engine, draft


def test_a_cheap_draft_that_is_right_guesses_as_far_as_it_may() -> None:
    engine, _ = timed(0.01, None)
    assert engine.count("steps") < 100, "1,000 without a draft"


@pytest.mark.parametrize(("seconds", "wrong"), [(2.0, None), (0.6, 1)])
@pytest.mark.nightly
def test_a_draft_that_costs_more_than_it_brings_hardly_runs(seconds: float, wrong: int | None) -> None:
    """One that is slow, or wrong: it runs to be measured, and ever less often."""
    engine, draft = timed(seconds, wrong)
    assert len(draft.passes) < 20
    assert engine.count("draft_seconds") < 0.03 * engine.count("step_seconds")


def test_the_time_of_the_draft_is_not_that_of_its_steps() -> None:
    engine, _ = timed(0.25, None)
    guesser = engine.scheduler._guesser
    assert guesser is not None
    assert guesser._costs[False].seconds(1) == pytest.approx(1.0)
    assert guesser._draft_costs.seconds(1) == pytest.approx(0.25)


def test_texts_with_pictures_are_not_drafted() -> None:
    """The draft sees none."""
    draft = Draft()
    engine = engine_with(both_ways=False, guesser=drafting(draft))
    engine.generate([1, *picture_tokens(2, 3), 4], LONG)
    engine.run()
    assert not draft.passes
    engine.generate([1, 2, 4], LONG)
    engine.run()
    assert draft.passes
