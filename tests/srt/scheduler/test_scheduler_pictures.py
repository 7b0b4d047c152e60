"""Pictures in the scheduler: chunks, reuse, eviction, retraction, and what is refused. The oracle checks every step."""

import gc
from dataclasses import replace
from itertools import chain

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.lang.sampling import SamplingParams
from umbel.srt.constraints.matcher import ImmediateExecutor, MatcherCache
from umbel.srt.constraints.matcher_factory import VocabularyMatcherFactory, open_vocabulary
from umbel.srt.core.batch import picture_tokens
from umbel.srt.core.messages import (
    ChooseEnded,
    Ended,
    EngineAbort,
    EngineChoose,
    EngineFailed,
    EngineForget,
    EngineGenerate,
    EnginePicture,
    EngineScore,
    Schedule,
)
from umbel.srt.testing.oracle import OracleRunner

from ..engine_harness import GREEDY, Engine
from ..toy_constraint import TOKENIZER, encode, texts, toy_shelf
from .test_scheduler_properties import Arrival, arrivals, configs, drive, judge

TOKENS = {1: 1, 2: 3, 3: 5}  # by number of the picture


def send(engine: Engine, number: int, tokens: int) -> list[int]:
    """What the picture is in a prompt."""
    engine.scheduler.handle_message(EnginePicture(number, tokens, 8, 8, 0, 0, 1, 1, b"\0\0\0"))
    return picture_tokens(number, tokens)


def engine_with(*, both_ways: bool, on_axes: bool = False, **options: object) -> Engine:
    engine = Engine(**options)  # type: ignore[arg-type]
    engine.runner.pictures.both_ways = both_ways
    engine.runner.pictures.on_axes = on_axes
    for number, tokens in TOKENS.items():
        send(engine, number, tokens)
    return engine


def failure_of(engine: Engine, message_id: int) -> str:
    ending = engine.run().endings[message_id]
    assert isinstance(ending, EngineFailed)
    assert ending.kind == "RequestError"
    return ending.message


# ------------------------------------------------------------------------------------------------ chunks


@pytest.mark.parametrize(
    ("both_ways", "rows"),
    [(True, [3, 6, 2]), (False, [4, 4, 3])],
)
def test_a_picture_that_is_seen_both_ways_is_computed_in_one_step(both_ways: bool, rows: list[int]) -> None:
    engine = Engine(max_step_tokens=4)
    engine.runner.pictures.both_ways = both_ways
    prompt = [1, 2, 3, *send(engine, 9, 6), 4, 5]
    message_id = engine.generate(prompt)
    engine.run()
    assert list(engine.runner.batches)[: len(rows)] == rows
    engine.assert_equals_reference(message_id, prompt)


def test_a_step_passes_its_limit_by_less_than_one_picture() -> None:
    engine = Engine(max_step_tokens=4)
    engine.runner.pictures.both_ways = True
    prompts = [[1 + i, *send(engine, i, 6)] for i in range(4)]
    ids = [engine.generate(prompt) for prompt in prompts]
    engine.run()
    assert max(engine.runner.batches) < 4 + 6
    for message_id, prompt in zip(ids, prompts, strict=True):
        engine.assert_equals_reference(message_id, prompt)


# ------------------------------------------------------------------------------------------------ reuse


@pytest.mark.parametrize("both_ways", [True, False])
def test_questions_about_one_picture_share_its_rows(both_ways: bool) -> None:
    engine = Engine(max_step_tokens=8)
    engine.runner.pictures.both_ways = both_ways
    seen = [7, *send(engine, 1, 20)]
    first, again = [*seen, 3], [*seen, 4]
    engine.generate(first)
    engine.run()
    message_id = engine.generate(again)
    engine.run()
    assert engine.cached(message_id) == len(seen)
    engine.assert_equals_reference(message_id, again)


def test_branches_of_one_step_share_the_picture_that_it_computes() -> None:
    engine = Engine()
    engine.runner.pictures.both_ways = True
    seen = [7, *send(engine, 1, 20)]
    prompts = [[*seen, branch] for branch in range(1, 6)]
    ids = [engine.generate(prompt) for prompt in prompts]
    engine.run()
    assert engine.count("computed_prompt_tokens") == len(seen) + 5
    for message_id, prompt in zip(ids, prompts, strict=True):
        engine.assert_equals_reference(message_id, prompt)


def test_two_pictures_share_nothing() -> None:
    engine = Engine()
    engine.generate([7, *send(engine, 1, 20)])
    engine.run()
    message_id = engine.generate([7, *send(engine, 2, 20)])
    engine.run()
    assert engine.cached(message_id) == 1


@pytest.mark.parametrize("both_ways", [True, False])
def test_a_prompt_that_ends_in_its_picture_is_cached_but_for_one_row(both_ways: bool) -> None:
    engine = Engine(max_step_tokens=4)
    engine.runner.pictures.both_ways = both_ways
    prompt = [7, *send(engine, 1, 9)]
    for cached in (0, len(prompt) - 1):
        message_id = engine.generate(prompt)
        engine.run()
        assert engine.cached(message_id) == cached
        engine.assert_equals_reference(message_id, prompt)


def test_choices_behind_a_picture_are_scored() -> None:
    engine = engine_with(both_ways=True, max_step_tokens=4)
    prompt = [7, *picture_tokens(3, 5)]
    sequences = [[*prompt, *choice] for choice in ([1, 2], [3])]
    message_id = engine.score(sequences, len(prompt))
    ending = engine.run().endings[message_id]
    for mine, sequence in zip(ending.logprobs, sequences, strict=True):  # type: ignore[union-attr]
        assert mine == pytest.approx(engine.reference_score(sequence, len(prompt)), abs=1e-4)


# --------------------------------------------------------------------------------------------- constraints


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("healed", [True, False])
@pytest.mark.parametrize("cost", [0, 4000])
def test_a_constrained_text_follows_a_picture_also_when_its_mask_is_late(
    both_ways: bool, healed: bool, cost: int
) -> None:
    """The row that waits for the mask is the picture's last: the picture waits with it."""
    engine = Engine(
        context=300,
        vocabulary=TOKENIZER.vocab_size,
        token_bytes=TOKENIZER.token_bytes,
        eos_ids=TOKENIZER.eos_ids,
        constraints=toy_shelf(),
        max_step_tokens=4,
    )
    engine.runner.pictures.both_ways = both_ways
    prompt = [256, *encode("see"), *send(engine, 1, 9), *encode(" ")[:healed]]
    allowed = ("the other", "an end", "no")
    asked = SamplingParams(temperature=0.0, max_tokens=64)
    message_id = engine.constrain(prompt, texts(*allowed, cost=cost), asked, heal=healed)
    ending = engine.run().endings[message_id]
    assert isinstance(ending, Ended), ending
    said = b"".join(map(TOKENIZER.token_bytes, engine.tokens(message_id)))
    assert said[ending.healed : ending.healed + ending.text_bytes].decode() in allowed
    assert healed or (engine.count("mask_waits") > 0) == (cost > 0), "a healed boundary has a mask of its own"


@pytest.mark.parametrize("start", [0, 1])
def test_a_picture_of_one_token_at_the_beginning_has_no_log_probability_to_miss(start: int) -> None:
    """The first token of a prompt never has one."""
    engine = engine_with(both_ways=True)
    prompt = [*picture_tokens(1, 1), 4, 5, 6]
    message_id = engine.generate(prompt, msgspec.structs.replace(GREEDY, prompt_logprobs_from=start))
    ending = engine.run().endings[message_id]
    assert isinstance(ending, Ended), ending
    assert [entry.token_id for entry in ending.prompt_logprobs] == prompt[1:]
    mine = [entry.logprob for entry in ending.prompt_logprobs]
    assert mine == pytest.approx(engine.reference_score(prompt, 1), abs=1e-4)


def test_a_search_for_choices_begins_behind_a_picture() -> None:
    engine = Engine(
        vocabulary=TOKENIZER.vocab_size,
        token_bytes=TOKENIZER.token_bytes,
        eos_ids=TOKENIZER.eos_ids,
        constraints=MatcherCache(
            lambda: VocabularyMatcherFactory(open_vocabulary(lambda: TOKENIZER, None, TOKENIZER.vocab_size), None),
            ImmediateExecutor(),
            ImmediateExecutor(),
            entries=4,
        ),
        max_step_tokens=4,
    )
    engine.runner.pictures.both_ways = True
    prompt = [256, *send(engine, 1, 9)]
    choices = [encode("the"), encode("in")]
    engine.scheduler.handle_message(EngineChoose(1000, prompt, choices, len(prompt), heal=False, search=True))
    ending = engine.run().endings[1000]
    assert isinstance(ending, ChooseEnded), ending
    for mine, choice in zip(ending.logprobs, choices, strict=True):
        assert mine == pytest.approx(engine.reference_score([*prompt, *choice], len(prompt)), abs=1e-4)


# ---------------------------------------------------------------------------------------------- forgetting


def test_a_hint_keeps_its_picture_though_it_is_forgotten() -> None:
    engine = Engine(max_step_tokens=4)
    seen = [7, *send(engine, 1, 20)]
    engine.hint(seen)
    engine.step()
    engine.scheduler.handle_message(EngineForget(1))
    engine.run()
    assert engine.count("failed_steps") == 0
    assert engine.scheduler.kv.cache.total_tokens == len(seen)
    gc.collect()
    assert engine.runner.pictures.tokens(1) is None


def test_a_forgotten_picture_is_unknown_to_later_messages() -> None:
    engine = Engine()
    seen = send(engine, 1, 3)
    engine.scheduler.handle_message(EngineForget(1))
    assert "picture 1 is unknown; send a picture before what holds it" in failure_of(engine, engine.generate(seen))


def test_a_picture_without_tokens_is_not_taken() -> None:
    engine = Engine()
    send(engine, 1, 0)
    assert "write 1 or more" in str(engine.scheduler.last_failure)
    assert "unknown" in failure_of(engine, engine.generate(picture_tokens(1, 1)))


# ------------------------------------------------------------------------------------------------ refusals


def test_a_picture_that_is_not_whole_is_refused() -> None:
    engine = engine_with(both_ways=False)
    assert "picture 3 has 5 tokens" in failure_of(engine, engine.generate([1, *picture_tokens(3, 4), 2]))


def test_ids_between_vocabulary_and_pictures_and_behind_them_are_no_tokens() -> None:
    engine = engine_with(both_ways=False)
    for token in (24, (1 << 30) - 1, 1 << 31, 1 << 70):
        assert "outside the vocabulary" in failure_of(engine, engine.generate([1, *picture_tokens(3, 5), token]))


def test_a_model_of_text_refuses_pictures() -> None:
    class TextOnly(OracleRunner):
        pictures = property(lambda self: None, lambda self, value: None)  # type: ignore[assignment]

    engine = Engine()
    runner = TextOnly(24, 120, 200)
    scheduler = type(engine.scheduler)(runner, engine.token_bytes, frozenset(), engine.scheduler.config, engine.clock)
    scheduler.handle_message(EnginePicture(1, 2, 8, 8, 0, 0, 1, 1, b"\0\0\0"))
    assert "reads text only" in str(scheduler.last_failure)
    scheduler.handle_message(EngineGenerate(1, picture_tokens(1, 2), GREEDY, False))
    (answer,) = scheduler.step()
    assert isinstance(answer, EngineFailed)
    assert answer.kind == "EngineError"  # no gateway of such a model sends it


def test_tokens_after_a_picture_have_log_probabilities() -> None:
    engine = engine_with(both_ways=False)
    prompt = [1, *picture_tokens(3, 5), 2, 3]
    good = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs_from=6)
    message_id = engine.generate(prompt, good)
    ending = engine.run().endings[message_id]
    assert [entry.logprob for entry in ending.prompt_logprobs] == pytest.approx(  # type: ignore[union-attr]
        engine.reference_score(prompt, 6), abs=1e-4
    )


@pytest.mark.parametrize(
    "message",
    [
        EngineScore(1000, [[1, *picture_tokens(3, 5), 2]], 5),
        EngineChoose(1000, [1, *picture_tokens(3, 5), 2], [[2, 3]], 4, heal=False, search=False),
        EngineGenerate(1000, picture_tokens(3, 5), GREEDY, False, Schedule(), None, True),
        *(
            EngineGenerate(
                1000,
                [1, *picture_tokens(3, 5), 2],
                SamplingParams(temperature=0.0, prompt_logprobs_from=first),
                False,
                Schedule(),
            )
            for first in (0, 1, 5)
        ),
        EngineGenerate(1000, [1, 2], SamplingParams(max_tokens=1), False, Schedule()),
        EngineChoose(1000, [1, 2], [], 2, heal=False, search=False),
        EngineChoose(1000, [1, 2], [[2], []], 2, heal=False, search=False),
        EngineChoose(1000, [1, 2], [[2]], 0, heal=False, search=False),
    ],
    ids=[
        *("a score from inside a picture", "a search from inside a picture", "a picture that is healed"),
        *("log-probabilities from 0", "log-probabilities from 1", "log-probabilities from 5"),
        *("no seed", "no choices", "an empty choice", "a search from 0"),
    ],
)
def test_what_no_gateway_sends_fails_alone(message: EngineScore | EngineChoose | EngineGenerate) -> None:
    engine = engine_with(both_ways=False)
    engine.scheduler.handle_message(message)
    text = engine.generate([1, 2, 3])
    ending = engine.run().endings[1000]
    assert isinstance(ending, EngineFailed)
    assert ending.kind == "EngineError"
    assert engine.tokens(text)


# ------------------------------------------------------------------------------------------------ anything


def _flat(parts: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


# Parts are cut between pictures, never inside: so prompts share prefixes of every length that whole pictures have.
_PICTURES = {number: picture_tokens(number, tokens) for number, tokens in TOKENS.items()}
stems = st.sampled_from(
    [
        [[1, 2], _PICTURES[2], [3], _PICTURES[3]],
        [[1, 2], _PICTURES[2], [3, 3]],
        [_PICTURES[3], [1]],
        [_PICTURES[3], _PICTURES[3]],
        [_PICTURES[1], _PICTURES[2], _PICTURES[1], [4]],
        [[1], [2], [3]],
    ]
)
prompts = st.builds(
    lambda stem, cut, rest: [*_flat(stem[: 1 + cut]), *rest],
    stems,
    st.integers(0, 3),
    st.lists(st.integers(1, 3), max_size=4),
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    config=configs,
    both_ways=st.booleans(),
    on_axes=st.booleans(),
    windows=st.sampled_from([None, (18, 3), (20, 5), (40, 6)]),  # with room for a window and two pictures
    events=st.lists(st.tuples(arrivals, prompts), min_size=1, max_size=10),
)
def test_every_request_with_pictures_equals_the_run_without_cache(
    config: dict[str, object],
    both_ways: bool,
    on_axes: bool,
    windows: tuple[int, int] | None,
    events: list[tuple[Arrival, list[int]]],
) -> None:
    engine = engine_with(both_ways=both_ways, on_axes=on_axes, windows=windows, **config)
    shown = [replace(arrival, prompt=prompt) for arrival, prompt in events]
    judge(engine, drive(engine, shown))


def test_a_retracted_request_sees_its_picture_again() -> None:
    engine = engine_with(both_ways=True, on_axes=True, pool=30, max_running=2, headroom=0)
    long = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [[stem, *picture_tokens(3, 5), 1] for stem in (4, 5)]
    ids = [engine.generate(prompt, long) for prompt in prompts]
    engine.run()
    assert engine.count("retractions") > 0
    for message_id, prompt in zip(ids, prompts, strict=True):
        engine.assert_equals_reference(message_id, prompt, long)


def test_an_aborted_request_lets_go_of_its_picture() -> None:
    engine = Engine(max_step_tokens=2)
    message_id = engine.generate([7, *send(engine, 1, 20)])
    engine.step()
    engine.scheduler.handle_message(EngineAbort(message_id))
    engine.scheduler.handle_message(EngineForget(1))
    engine.run()
    engine.generate([3])
    engine.run()
    gc.collect()
    assert engine.runner.pictures._held.find(1) is None
