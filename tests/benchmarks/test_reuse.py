"""The optimum that a run is compared with: against brute force on small trees, and against the engine itself."""

import itertools
from collections.abc import Sequence

import umbel as ul
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.srt.in_process import LocalBackend
from umbel.srt.simulator.workload import Fork, Gen, Program, Select, Text
from umbel.srt.tokenizer.prompt import PromptEncoder
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from benchmarks.replay.program import play
from benchmarks.replay.recorder import Chosen, Generated, Recorder
from benchmarks.replay.reuse import Asked, least_computed, prompt_tokens, sequences_of

Tokens = tuple[int, ...]
tokens = st.lists(st.integers(1, 2), min_size=1, max_size=5).map(tuple)


def prompts(*batch: Tokens) -> list[Asked]:
    return [Asked(prompt) for prompt in batch]


def computed_in_order(batch: Sequence[Tokens], cached: set[Tokens]) -> int:
    """What an unlimited cache computes, one request after the other; the last token of a prompt always runs."""
    known = set(cached)
    total = 0
    for prompt in batch:
        prefixes = {prompt[: i + 1] for i in range(len(prompt))}
        total += max(1, len(prefixes - known))
        known |= prefixes
    return total


@settings(max_examples=80, deadline=None)
@given(batch=st.lists(tokens, min_size=1, max_size=5), before=st.lists(tokens, max_size=2))
def test_no_order_computes_less(batch: list[Tokens], before: list[Tokens]) -> None:
    cached = {prompt[: i + 1] for prompt in before for i in range(len(prompt))}
    best = min(computed_in_order(order, cached) for order in itertools.permutations(batch))
    least = least_computed(prompts(*batch), prompts(*before))
    # Phases are told apart by a difference: a prompt inside an earlier one may be taken to have come before it.
    assert best - len(batch) <= least <= best
    assert before or least == best


def test_an_equal_prompt_costs_its_last_token() -> None:
    assert least_computed(prompts((1, 2, 3), (1, 2, 3), (1, 2, 3))) == 5
    assert least_computed(prompts((1, 2, 3)), prompts((1, 2, 3))) == 1


def test_keys_that_decoding_left_behind_cost_nothing() -> None:
    first = Asked((1, 2), (7, 8, 9))  # 9 was sampled last and never fed
    second = Asked((1, 2, 7, 8, 9, 5))
    assert least_computed([first, second]) == 2 + 2
    assert least_computed([second], [first]) == 2


def test_a_prompt_inside_a_longer_one_costs_nothing_more() -> None:
    assert least_computed(prompts((1, 2, 3), (1, 2))) == 3


# ------------------------------------------------------------------------------- against the engine

PROGRAMS = [
    Program(
        str(number),
        (
            Text(f"A beginning for all of them. Question {number % 3}. "),
            Gen("a", 5),
            Text(" and so "),
            Fork(((Text("x"), Gen("b", 3)), (Text("y"), Gen("b", 3)))),
            Select("c", ("yes", "no")),
        ),
    )
    for number in range(4)
]


def ask(backend: LocalBackend | Recorder, programs: Sequence[Program]) -> None:
    for program in programs:
        play.run(program.ops, backend=backend)


def test_one_program_after_the_other_reaches_the_optimum_on_the_engine() -> None:
    """All but the row before the choices, which each choice runs again for its own logits."""
    backend = LocalBackend(seed=1)
    recorder = Recorder(backend, hints=False)
    ask(recorder, PROGRAMS[:3])
    calls = sequences_of(recorder.take(), PromptEncoder(ByteTokenizer()))
    facts = ul.get_server_info(recorder)
    assert prompt_tokens(calls) == facts["prompt_tokens"]
    again = facts["computed_prompt_tokens"] - least_computed(calls)
    assert 0 <= again <= 2 * 3


def test_recorded_prompts_are_those_of_the_engine() -> None:
    backend = LocalBackend(seed=1)
    recorder = Recorder(backend)
    ask(recorder, PROGRAMS[:1])
    calls = recorder.take()
    encoder = PromptEncoder(ByteTokenizer())
    for call in calls:
        sequences = [sequence.prompt for sequence in sequences_of([call], encoder)]
        repeated = 0
        if isinstance(call, Chosen):  # what its choices share counts once
            yes, no = sequences
            repeated = next(place for place, (a, b) in enumerate(zip(yes, no, strict=False)) if a != b)
        assert call.usage.prompt_tokens == sum(map(len, sequences)) - repeated
    assert {type(call) for call in calls} == {Generated, Chosen}
    assert recorder.take() == []


# --------------------------------------------------------------------------------------- the recorder


def test_salted_calls_find_nothing() -> None:
    backend = LocalBackend(seed=1)
    ask(Recorder(backend), PROGRAMS[:1])
    salted = Recorder(backend, salted_share=1.0)
    ask(salted, PROGRAMS[:1])
    assert all(
        call.usage.cached_tokens == 0 for call in salted.take() if call.usage.calls == 1 and "choices" not in dir(call)
    )


def test_without_hints_none_are_sent() -> None:
    for hints, sent in ((True, True), (False, False)):
        backend = LocalBackend(seed=1)
        ask(Recorder(backend, hints=hints), PROGRAMS[:1])
        assert bool(ul.get_server_info(backend)["hints"]) is sent


def test_the_time_to_the_first_token_is_known_when_it_is_asked_for() -> None:
    recorder = Recorder(LocalBackend(seed=1), first_tokens=True)
    play.run((Text("x"), Gen("a", 5)), backend=recorder)
    (call,) = recorder.take()
    assert call.first_token is not None
    assert 0 < call.first_token <= call.seconds
