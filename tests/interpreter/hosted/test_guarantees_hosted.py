"""Declared guarantees against servers: what a provider enforces, and what is validated and asked for again."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pydantic
import pytest
import umbel as ul
from umbel.interpreter.backends.echo_answers import Script
from umbel.interpreter.backends.hosted.anthropic.backend import Anthropic
from umbel.interpreter.backends.hosted.openai.backend import OpenAI
from umbel.interpreter.fakes.anthropic import AnthropicFeatures, FakeAnthropic
from umbel.interpreter.fakes.openai import FakeOpenAI
from umbel.interpreter.fakes.openai_requests import REASONING, OpenAIFeatures
from umbel.lang.protocol import Backend

from ..conftest import PATIENCE

pytestmark = pytest.mark.filterwarnings("ignore::umbel.TemplateWarning")

Server = FakeOpenAI | FakeAnthropic
KINDS = ("regex", "json_schema", "choices", "select")


@dataclass
class Shape:
    sides: int


@dataclass(frozen=True)
class Place:
    """A provider's model. `enforced`: the kinds that it enforces."""

    serve: Callable[[Script], Server]
    connect: Callable[[Server], Backend]
    enforced: tuple[str, ...] = ()


def openai(model: str, *enforced: str, features: OpenAIFeatures = OpenAIFeatures()) -> Place:  # noqa: B008 (frozen)
    def connect(server: Server) -> Backend:
        assert isinstance(server, FakeOpenAI)
        return OpenAI(model, base_url=server.base_url, api_key=server.api_key, profile="openai")

    return Place(lambda script: FakeOpenAI(script, models=[model], features=features), connect, enforced)


def claude(model: str, *enforced: str, features: AnthropicFeatures) -> Place:
    def connect(server: Server) -> Backend:
        return Anthropic(model, base_url=server.base_url, api_key=server.api_key)

    return Place(lambda script: FakeAnthropic(script, models=[model], features=features), connect, enforced)


PLACES = {
    "structured": openai("gpt-4o", *KINDS),
    "reasoning": openai("o3", *KINDS, features=REASONING),
    "older chat": openai("gpt-4-turbo"),
    "completion": openai("gpt-3.5-turbo-instruct"),
    "claude": claude("claude-haiku-4-5", "json_schema", "choices", "select", features=AnthropicFeatures()),
    "older claude": claude(
        "claude-3-haiku-20240307", features=AnthropicFeatures(structured_outputs=False, sampling="all")
    ),
    "thinking claude": claude(
        "claude-fable-5",
        features=AnthropicFeatures(structured_outputs=False, prefill=False, sampling="none"),
    ),
}

# Kind → an answer that breaks its constraint, and one that satisfies it.
ANSWERS = {
    "regex": ("nothing", "x42"),
    "json_schema": ('{"sides": "three"}', '{"sides": 3}'),
    "choices": ("maybe", "yes"),
    "select": ("purple", "blue"),
}


OPTIONS: dict[str, dict[str, Any]] = {
    "regex": {"regex": "x[0-9]+"},
    "json_schema": {"json_schema": Shape},
    "choices": {"dtype": Literal["yes", "no"]},
    "select": {"choices": ["red", "blue"]},
}


@ul.function
def conversation(s):
    for kind in KINDS:
        s += ul.user(f"{kind}?") + ul.assistant(ul.gen(kind, **OPTIONS[kind]))


@ul.function
def text(s):
    for kind in KINDS:
        s += f"\n{kind}: " + ul.gen(kind, **OPTIONS[kind])


@pytest.mark.parametrize("program", [conversation, text], ids=["conversation", "text"])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.sampled(4)
def test_every_model_gives_the_same_values_and_says_how_sure_they_are(place: Place, program: ul.Program) -> None:
    script = [a for kind in KINDS for a in (ANSWERS[kind][1:] if kind in place.enforced else ANSWERS[kind])]
    with place.serve(script) as server:
        state = program.run(backend=place.connect(server), timeout=PATIENCE)
        values = {kind: state.value(kind) for kind in KINDS}
        facts = {kind: (state.meta(kind)["guarantee"], state.meta(kind)["tries"]) for kind in KINDS}
        calls = server.calls
    assert values == {"regex": "x42", "json_schema": Shape(3), "choices": "yes", "select": "blue"}
    assert facts == {kind: ("enforced", 1) if kind in place.enforced else ("validated", 2) for kind in KINDS}
    assert calls == len(script)
    assert [state[kind] for kind in KINDS] == [ANSWERS[kind][1] for kind in KINDS]


@pytest.mark.parametrize("name", ["older chat", "older claude", "thinking claude"])
def test_a_begun_answer_is_gone_on_with(name: str) -> None:
    @ul.function
    def program(s):
        s += ul.user("Who?")
        s += ul.assistant("Name: " + ul.gen("name", regex="[A-Z][a-z]+") + ", aged " + ul.gen("n", dtype=int) + ".")

    place = PLACES[name]
    with place.serve(["nobody", "Bo", "old", "7"]) as server:
        state = program.run(backend=place.connect(server), timeout=PATIENCE)
        assert (state["name"], state.value("n")) == ("Bo", 7)
        assert state.messages()[-1]["content"] == "Name: Bo, aged 7."


@pytest.mark.parametrize("name", [name for name in PLACES if "regex" not in PLACES[name].enforced])
def test_a_wrong_constraint_costs_nothing_anywhere(name: str) -> None:
    @ul.function
    def program(s):
        s += ul.user("Well?") + ul.assistant(ul.gen("x", regex="x(["))

    place = PLACES[name]
    with place.serve(["x"]) as server:
        with pytest.raises(ul.ConstraintError, match="regex: position"):
            program.run(backend=place.connect(server), timeout=PATIENCE)["x"]
        assert server.calls == 0


@pytest.mark.parametrize("name", ["older chat", "completion", "older claude"])
def test_what_never_comes_is_an_error_or_kept(name: str) -> None:
    @ul.function
    def program(s, best_effort):
        s += ul.user("Well?") + ul.assistant(ul.gen("x", regex="x+", max_tries=2, allow_best_effort=best_effort))

    place = PLACES[name]
    with place.serve(["a", "b", "c", "d"]) as server:
        backend = place.connect(server)
        with pytest.raises(ul.GuaranteeError, match=f"{backend.capabilities.name} wrote no text for variable 'x'"):
            program.run(best_effort=False, backend=backend, timeout=PATIENCE)["x"]
        state = program.run(best_effort=True, backend=backend, timeout=PATIENCE)
        assert (state["x"], state.meta("x")["guarantee"]) == ("d", "best_effort")


class Solid(pydantic.BaseModel):
    sides: int

    @pydantic.field_validator("sides")
    @classmethod
    def check(cls, sides: int) -> int:
        if sides < 3:
            raise ValueError("a shape has three sides at least")
        return sides


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("in_turn", [True, False], ids=["conversation", "text"])
@pytest.mark.sampled(4)
def test_a_validator_of_a_class_has_every_model_asked_again(place: Place, in_turn: bool) -> None:
    @ul.function
    def program(s: ul.State) -> None:
        answer = ul.gen("x", dtype=Solid)
        s += ul.user("Shape?") + ul.assistant(answer) if in_turn else "Shape: " + answer

    prompts: list[str] = []

    def script(prompt: str) -> str:
        prompts.append(prompt)
        return '{"sides": 4}' if len(prompts) == 3 else f'{{"sides": {len(prompts)}}}'

    with place.serve(script) as server:
        backend = place.connect(server)
        state = program.run(backend=backend, timeout=PATIENCE)
        assert state.value("x") == Solid(sides=4)
        facts = state.meta("x")
        assert facts["guarantee"] == ("enforced" if "json_schema" in place.enforced else "validated")
        assert facts["tries"] == state.usage.calls == server.calls == 3
        assert state.usage.total_tokens == server.usage.total_tokens
    told = in_turn or backend.capabilities.converses  # a text that is only continued is drawn anew
    assert ["a shape has three sides at least" in prompt for prompt in prompts] == [False, told, told]
