"""`select` over all tokens through the whole runtime: text in, bounds out, with the oracle model."""

import asyncio
import math

import numpy as np
import pytest
import umbel as ul
from umbel.lang.prompt import Generated, Part, Text
from umbel.lang.protocol import Failure, Scored, ScoreRequest
from umbel.srt.core.messages import ChooseEnded, EngineChoose
from umbel.srt.in_process import LocalBackend
from umbel.srt.testing.oracle import OracleRunner
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from ..gateway_harness import Harness

TOKENIZER = ByteTokenizer()
PATIENCE = 60.0


def truth(backend: LocalBackend, before: list[int], text: bytes) -> float:
    """That what follows begins with the text: the sum over every sequence of tokens."""
    runner = backend.engine.runner
    assert isinstance(runner, OracleRunner)
    logits = runner.model.reference(before).astype(np.float64)
    row = np.exp(logits - np.log(np.exp(logits).sum()))
    total = 0.0
    for token in range(TOKENIZER.vocab_size):
        data = TOKENIZER.token_bytes(token)
        if data and data.startswith(text):
            total += float(row[token])
        elif data and text.startswith(data):
            total += float(row[token]) * truth(backend, [*before, token], text[len(data) :])
    return total


def score(request: ScoreRequest) -> tuple[LocalBackend, Scored]:
    backend = LocalBackend()

    async def ask() -> Scored:
        return await backend.score(request)

    return backend, asyncio.run(ask())


@pytest.mark.parametrize(
    ("prompt", "last", "choices"),
    [
        ("Is it? ", [], ["in", "ther"]),  # no token begins with a space and "i"; " the" with a space and "t"
        ("Is i", [], ["nges", "t"]),  # the boundary itself changes: "in"
        ("Is it", [], ["th", "the"]),  # one begins with the other
    ],
)
def test_the_prompts_end_is_a_condition(prompt: str, last: list[int], choices: list[str]) -> None:
    backend, scored = score(ScoreRequest("a", (Text(prompt),), tuple(choices), probability="exact"))
    tokens = [256, *TOKENIZER.encode(prompt, first=False)]
    before, said = tokens[:-1], TOKENIZER.token_bytes(tokens[-1])
    grows = prompt != "Is it"
    whole = [
        truth(backend, before, said + choice.encode()) / truth(backend, before, said)
        if grows
        else truth(backend, tokens, choice.encode())
        for choice in choices
    ]
    if choices[1].startswith(choices[0]):
        whole[0] -= whole[1]
    for choice, value in zip(scored.choices, whole, strict=True):
        assert choice.lower is not None
        assert choice.upper is not None
        assert choice.lower - 1e-6 <= math.log(value) <= choice.upper + 1e-6
    assert scored.evaluations > 1


def test_what_the_model_said_is_not_taken_apart() -> None:
    parts = (Text("Is "), Generated("it t", tuple(TOKENIZER.encode("it t", first=False))))
    backend, scored = score(ScoreRequest("a", parts, ("he",), probability="exact"))
    tokens = [256, *TOKENIZER.encode("Is ", first=False), *TOKENIZER.encode("it t", first=False)]
    (choice,) = scored.choices
    assert choice.lower is not None
    assert choice.lower == pytest.approx(math.log(truth(backend, tokens, b"he")), abs=2e-4)


def test_overshoot_has_no_upper_bound_and_goes_with_unconditional_scores() -> None:
    _, scored = score(ScoreRequest("a", (Text("Is it "),), ("so", "not"), unconditional=True, probability="overshoot"))
    assert [choice.upper for choice in scored.choices] == [None, None]
    assert all(choice.lower is not None and choice.lower >= sum(choice.logprobs) - 1e-6 for choice in scored.choices)
    assert all(len(choice.unconditional) == len(choice.logprobs) for choice in scored.choices)


@pytest.mark.parametrize(
    ("parts", "heal"),
    [
        ((Text("It is "),), True),
        ((Text("It is "), Text("<|im_end|>", control=True)), False),
        ((Text("It is "), Generated("so", (115, 111))), False),
        ((Generated("so", (115, 111)), Text(" ")), True),
        ((), False),
    ],
)
def test_only_text_of_the_program_is_taken_back(parts: tuple[Part, ...], heal: bool) -> None:
    harness = Harness()
    harness.send(ScoreRequest("a", parts, ("the", "no"), probability="exact"))
    (message,) = harness.to_engine
    assert isinstance(message, EngineChoose)
    assert (message.heal, message.search) == (heal, True)
    assert len(message.prompt) >= message.start >= 1
    assert [TOKENIZER.token_bytes(ids[-1])[-1:] for ids in message.choices] == [b"e", b"o"]


def test_bounds_go_to_their_choices() -> None:
    harness = Harness()
    harness.send(ScoreRequest("a", (Text("It is "),), ("q", "no"), probability="exact"))
    (message,) = harness.to_engine
    assert isinstance(message, EngineChoose)
    logprobs = [[-1.0] * len(ids) for ids in message.choices]
    harness.gateway.engine_event(ChooseEnded(message.id, [-1.0, -2.0], [-0.5, -1.5], logprobs, 9, 20, 5))
    (scored,) = harness.answers()
    assert isinstance(scored, Scored)
    assert [(choice.lower, choice.upper) for choice in scored.choices] == [(-1.0, -0.5), (-2.0, -1.5)]
    assert (scored.evaluations, scored.usage.prompt_tokens, scored.usage.cached_tokens) == (9, 20, 5)


def test_an_answer_that_does_not_fit_ends_its_own_call() -> None:
    harness = Harness()
    harness.send(ScoreRequest("a", (Text("It is "),), ("q", "no"), probability="exact"))
    (message,) = harness.to_engine
    assert isinstance(message, EngineChoose)
    logprobs = [[-1.0] * len(ids) for ids in message.choices]
    harness.gateway.engine_event(ChooseEnded(message.id, [-1.0], [-0.5], logprobs, 9, 20, 5))
    (failure,) = harness.answers()
    assert isinstance(failure, Failure)
    assert harness.gateway.in_flight == 0


@ul.function
def program(s, method):
    s += "Who sings?" + ul.select("who", [" an owl", " the owl", " the"], method=method)
    s += ", and " + ul.gen("rest", max_tokens=4, ignore_eos=True)


def test_programs_choose_and_go_on() -> None:
    backend = LocalBackend()
    bounds = {}
    for method in ("overshoot", "exact"):
        state = program.run(method=method, backend=backend, timeout=PATIENCE)
        facts = state.get_meta_info("who")
        assert state["who"] == max(facts["probabilities"], key=facts["probabilities"].get)
        assert sum(facts["probabilities"].values()) == pytest.approx(1.0)
        assert state.get_meta_info("rest")["completion_tokens"] == 4
        bounds[method] = facts.get("bounds")
    assert bounds["overshoot"] is None
    for low, high in bounds["exact"].values():
        assert 0.0 <= low <= high <= 1.0
    facts = state.get_meta_info("who")
    assert all(low <= facts["probabilities"][choice] <= high for choice, (low, high) in facts["bounds"].items())
    assert facts["evaluations"] > 3


def test_a_choice_is_drawn_with_the_seed_of_the_run() -> None:
    backend = LocalBackend()

    @ul.function
    def draw(s):
        s += "Who sings?" + ul.select("who", [" an", " o"], 1.0, method="exact")

    drawn = [draw.run(backend=backend, timeout=PATIENCE, seed=seed)["who"] for seed in range(20)]
    assert drawn == [draw.run(backend=backend, timeout=PATIENCE, seed=seed)["who"] for seed in range(20)]
    assert len(set(drawn)) == 2
