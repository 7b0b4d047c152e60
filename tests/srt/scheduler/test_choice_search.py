"""Probabilities of choices in the scheduler: every token sequence of the oracle model summed up, and no cache."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.lang.errors import WIRE_ERRORS, RequestError
from umbel.lang.sampling import SamplingParams
from umbel.srt.constraints.matcher import ImmediateExecutor, MatcherCache
from umbel.srt.constraints.matcher_factory import VocabularyMatcherFactory, open_vocabulary
from umbel.srt.core.messages import ChooseEnded, EngineAbort, EngineChoose, EngineFailed, Schedule
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from ..engine_harness import Engine

TOKENIZER = ByteTokenizer()
PROMPT = [256, *TOKENIZER.encode("who sings", first=False)]


def shelf(size: int = TOKENIZER.vocab_size) -> MatcherCache:
    return MatcherCache(
        lambda: VocabularyMatcherFactory(open_vocabulary(lambda: TOKENIZER, None, size), None),
        ImmediateExecutor(),
        ImmediateExecutor(),
        entries=4,
    )


def engine(**settings: object) -> Engine:
    return Engine(
        vocabulary=TOKENIZER.vocab_size,
        token_bytes=TOKENIZER.token_bytes,
        eos_ids=TOKENIZER.eos_ids,
        constraints=shelf(),
        **settings,  # type: ignore[arg-type]
    )


def choose(
    engine: Engine, choices: Sequence[str], *, prompt: list[int] = PROMPT, search: bool = True, heal: bool = False
) -> int:
    message_id = engine._id()
    ids = [TOKENIZER.encode(choice, first=False) for choice in choices]
    engine.scheduler.handle_message(EngineChoose(message_id, prompt, ids, len(prompt), heal, search, Schedule()))
    return message_id


def answer(engine: Engine, message_id: int) -> ChooseEnded:
    ending = engine.endings[message_id]
    assert isinstance(ending, ChooseEnded), f"request {message_id} ended with {ending}"
    return ending


def probability(engine: Engine, before: list[int], text: bytes) -> float:
    """That what follows begins with the text: every token, and every token behind it."""
    logits = engine.runner.model.reference(before).astype(np.float64)
    row = np.exp(logits - np.log(np.exp(logits).sum()))
    total = 0.0
    for token in range(TOKENIZER.vocab_size):
        data = TOKENIZER.token_bytes(token)
        if data and data.startswith(text):
            total += row[token]
        elif data and text.startswith(data):
            total += row[token] * probability(engine, [*before, token], text[len(data) :])
    return float(total)


def test_bounds_hold_the_sum_over_all_token_sequences() -> None:
    machine = engine()
    choices = [" the thing", " an ingot", "in", "other"]
    message_id = choose(machine, choices)
    machine.run()
    found = answer(machine, message_id)
    for choice, lower, upper in zip(choices, found.lower, found.upper, strict=True):
        truth = probability(machine, PROMPT, choice.encode())
        assert math.exp(lower) <= truth * (1 + 1e-6)
        assert truth <= math.exp(upper) * (1 + 1e-6)
        assert math.exp(upper) <= math.exp(lower) * (1 + 2e-4)


def test_bounds_hold_also_with_small_steps_a_small_pool_and_others() -> None:
    small = engine(max_step_tokens=3, max_step_logits=2, max_running=2, pool=60)
    whole = engine()
    choices = [" the thing", "ingesting"]
    first, other = (
        choose(small, choices),
        small.generate(PROMPT, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)),
    )
    second = choose(whole, choices)
    small.run()
    whole.run()
    for mine, theirs in ((answer(small, first).lower, answer(whole, second).lower),):
        assert mine == pytest.approx(theirs, abs=1e-6)
    assert len(small.tokens(other)) == 20


def test_overshoot_is_one_forward_pass_and_what_it_says_by_hand() -> None:
    machine = engine()
    message_id = choose(machine, [" thin", "a"], search=False)
    machine.run()
    assert machine.count("steps") == 1
    found = answer(machine, message_id)
    assert found.upper == []

    def row(tokens: list[int]) -> np.ndarray:
        logits = machine.runner.model.reference(tokens).astype(np.float64)
        return np.exp(logits - np.log(np.exp(logits).sum()))

    space, th = ord(" "), TOKENIZER.encode("th", first=False)[0]
    inner, ing = (TOKENIZER.encode(text, first=False)[0] for text in ("in", "ing"))
    usual = row(PROMPT)[space] * row([*PROMPT, space])[th] * row([*PROMPT, space, th])[[inner, ing]].sum()
    assert found.lower[0] == pytest.approx(math.log(usual), abs=1e-5)
    an = TOKENIZER.encode("an", first=False)[0]
    assert found.lower[1] == pytest.approx(math.log(row(PROMPT)[[ord("a"), an]].sum()), abs=1e-5)
    assert found.logprobs[1] == pytest.approx([math.log(row(PROMPT)[ord("a")])], abs=1e-5)


def test_the_prompts_last_token_is_taken_back_when_a_choice_may_begin_inside_it() -> None:
    machine = engine()
    prompt = [256, *TOKENIZER.encode("say t", first=False)]
    message_id = choose(machine, ["hen", "in"], prompt=prompt, heal=True)
    machine.run()
    found = answer(machine, message_id)
    said = probability(machine, prompt[:-1], b"t")
    for text, lower, upper in zip((b"then", b"tin"), found.lower, found.upper, strict=True):
        truth = probability(machine, prompt[:-1], text) / said
        assert lower - 1e-6 <= math.log(truth) <= upper + 1e-6
    assert [len(values) for values in found.logprobs] == [3, 1]


def test_paths_share_their_beginnings_in_the_cache() -> None:
    machine = engine()
    message_id = choose(machine, [" the thing"])
    machine.run()
    found = answer(machine, message_id)
    assert found.evaluations > 5
    assert machine.count("choice_searches") == 1
    assert machine.count("choice_evaluations") == found.evaluations
    assert machine.count("choice_tokens") > 0
    new = machine.count("computed_prompt_tokens") - machine.count("duplicate_rows")
    assert new <= len(PROMPT) + found.evaluations, "one row for each, behind the prompt"
    assert (found.prompt_tokens, found.cached_tokens) == (len(PROMPT) + found.evaluations - 1, 0), "shared tokens once"
    again = choose(machine, [" the thing"])
    machine.run()
    found = answer(machine, again)
    assert found.prompt_tokens == len(PROMPT) + found.evaluations - 1
    assert found.cached_tokens >= len(PROMPT) - 1


def test_a_search_ends_at_its_deadline_and_when_it_is_aborted() -> None:
    machine = engine(max_step_tokens=1)
    late = machine._id()
    ids = [TOKENIZER.encode(" the thing", first=False)]
    machine.scheduler.handle_message(EngineChoose(late, PROMPT, ids, len(PROMPT), False, True, Schedule(timeout=5.0)))
    gone = choose(machine, ["ingesting"])
    for _ in range(30):
        machine.step()
    machine.scheduler.handle_message(EngineAbort(gone))
    machine.clock.advance(6.0)
    machine.run()
    for message_id, kind in ((late, "DeadlineError"), (gone, "CancelledError")):
        ending = machine.endings[message_id]
        assert isinstance(ending, EngineFailed)
        assert ending.kind == kind


@pytest.mark.parametrize(
    ("prompt", "choices", "start", "words"),
    [
        (PROMPT, [[999]], len(PROMPT), "outside the vocabulary"),
        (PROMPT, [[97] * 5000], len(PROMPT), "shorten it"),
        (PROMPT, [[97] * 100] * 200, len(PROMPT), "have 20000 tokens, and a search takes at most 16384"),
        (PROMPT, [[97, 257]], len(PROMPT), "no text"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    prompt: list[int], choices: list[list[int]], start: int, words: str
) -> None:
    machine = engine()
    message_id = machine._id()
    machine.scheduler.handle_message(EngineChoose(message_id, prompt, choices, start, False, True))
    machine.run()
    ending = machine.endings[message_id]
    assert isinstance(ending, EngineFailed)
    assert issubclass(WIRE_ERRORS[ending.kind], RequestError)
    assert words in ending.message


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_searches_scores_and_texts_share_an_engine(data: st.DataObject) -> None:
    """Small pools and steps, hints, retractions, and a fault now and then: each message ends once, and what ends well
    is right."""
    left = data.draw(st.integers(0, 60))

    def faults(point: str) -> None:
        nonlocal left
        if point in ("engine.commit", "engine.plan"):
            left -= 1
            if left == 0:
                raise RuntimeError("by lot")

    limits = {"max_step_tokens": data.draw(st.sampled_from([2, 7, None])), "max_running": data.draw(st.integers(1, 6))}
    machine = engine(pool=data.draw(st.integers(40, 90)), faults=faults, **limits)
    texts = st.lists(st.sampled_from(["in", "ing", "a", "an e", "the", " the"]), min_size=1, max_size=3, unique=True)
    searches = {}
    for _ in range(data.draw(st.integers(1, 3))):
        wanted = data.draw(texts)
        searches[choose(machine, wanted, search=data.draw(st.booleans()))] = wanted
        machine.generate(PROMPT, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
        machine.score([[*PROMPT, 97], [*PROMPT, 98, 99]], len(PROMPT))
        machine.step()
    machine.run()
    for message_id, wanted in searches.items():
        ending = machine.endings[message_id]
        if isinstance(ending, EngineFailed):
            assert left <= 0
            continue
        found = answer(machine, message_id)
        for text, lower in zip(wanted, found.lower, strict=True):
            assert math.exp(lower) <= probability(machine, PROMPT, text.encode()) + 1e-6
        for text, upper in zip(wanted, found.upper, strict=False):
            longer = sum(
                probability(machine, PROMPT, other.encode())
                for other in wanted
                if other != text and other.startswith(text)
            )
            assert probability(machine, PROMPT, text.encode()) - longer <= math.exp(upper) + 1e-6


def test_an_engine_without_a_vocabulary_says_so() -> None:
    machine = Engine()
    message_id = machine._id()
    machine.scheduler.handle_message(EngineChoose(message_id, [1, 2], [[3]], 2, False, True))
    machine.run()
    ending = machine.endings[message_id]
    assert isinstance(ending, EngineFailed)
    assert ending.kind == "CapabilityError"
