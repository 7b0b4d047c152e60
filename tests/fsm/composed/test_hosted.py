"""Expressions on hosted models: enforced as a regular expression or a grammar where taken, else validated."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import umbel as ul
from umbel.fsm.composed.expression import Expression
from umbel.interpreter.fakes.anthropic import AnthropicFeatures, FakeAnthropic
from umbel.interpreter.fakes.openai import FakeOpenAI
from umbel.interpreter.fakes.sglang import FakeSGLang
from umbel.lang.protocol import Backend, Capabilities
from umbel.testing import LLAMA_CPP, VLLM

pytestmark = pytest.mark.filterwarnings("ignore::umbel.TemplateWarning")


@dataclasses.dataclass
class Book:
    title: str
    year: int


COUNTED = ul.regex("[0-9]{1,3}").capture("count") + " " + ul.choice(["apples", "pears"]).capture("kind")
LISTED = "Books: " + ul.json(Book).capture("book").repeat(1, 2, separator="; ")
BOOKS = 'Books: {"title":"A",\n"year":1}; {"year": 2, "title": "B"}'  # blanks and order as models write them

Serve = Callable[[Any], Any]  # Any: a script; a fake server
SPELLED = 'Books: {"title": "A", "year": 1}; {"title": "B", "year": 2}'  # as a grammar admits them
GRAMMARS = ("sglang", "vllm", "llama.cpp")  # servers that take GBNF
PLACES: dict[str, tuple[Serve, Callable[[Any], Backend], bool]] = {
    "gpt-4o": (
        lambda script: FakeOpenAI(script, models=["gpt-4o"]),
        lambda server: ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key, profile="openai"),
        True,
    ),
    "gpt-4-turbo": (
        lambda script: FakeOpenAI(script, models=["gpt-4-turbo"]),
        lambda server: ul.OpenAI("gpt-4-turbo", base_url=server.base_url, api_key=server.api_key, profile="openai"),
        False,
    ),
    "sglang": (
        FakeSGLang,
        lambda server: ul.RuntimeEndpoint(server.address, api_key=server.api_key),
        True,
    ),
    "vllm": (
        lambda script: FakeOpenAI(script, features=VLLM),
        lambda server: ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key),
        True,
    ),
    "llama.cpp": (
        lambda script: FakeOpenAI(script, features=LLAMA_CPP),
        lambda server: ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key),
        True,
    ),
    "claude": (
        lambda script: FakeAnthropic(script, models=["claude-haiku-4-5"], features=AnthropicFeatures()),
        lambda server: ul.Anthropic("claude-haiku-4-5", base_url=server.base_url, api_key=server.api_key),
        False,
    ),
}


@ul.function
def asked(s: ul.State, constraint: Expression, **options: Any) -> None:  # Any: options of gen
    s += ul.user("What is there?") + ul.assistant(ul.gen("x", constraint=constraint, **options))


@pytest.mark.parametrize("place", PLACES)
def test_an_expression_of_characters_is_enforced_where_expressions_are(place: str) -> None:
    serve, connect, enforces = PLACES[place]
    with serve(["12 pears"] if enforces else ["many pears", "12 pears"]) as server:
        state = asked.run(constraint=COUNTED, backend=connect(server))
        assert (state["count"], state["kind"]) == ("12", "pears")
        assert state.meta("x")["guarantee"] == ("enforced" if enforces else "validated")
        assert state.meta("kind")["tries"] == (1 if enforces else 2)


@pytest.mark.parametrize("place", GRAMMARS)
def test_an_expression_with_json_inside_is_enforced_where_grammars_are(place: str) -> None:
    serve, connect, _ = PLACES[place]
    with serve([SPELLED, "((7))"]) as server:
        backend = connect(server)
        state = asked.run(constraint=LISTED, backend=backend)
        assert state.value("book") == [Book("A", 1), Book("B", 2)]
        assert (state.meta("x")["guarantee"], state.meta("x")["tries"]) == ("enforced", 1)
        nested = ul.recursive(lambda e: "(" + (ul.json(int) | e) + ")")
        state = asked.run(constraint=nested, backend=backend)
        assert (state["x"], state.meta("x")["guarantee"]) == ("((7))", "enforced")
        bodies = [str(request.body) for request in server.requests]
    assert all("root ::= " in body for body in bodies)


def test_a_server_that_reads_a_grammar_refuses_what_the_expression_does() -> None:
    serve, connect, _ = PLACES["llama.cpp"]
    with serve(lambda text: "Books: none") as server:
        with pytest.raises(ul.EngineError, match="breaks the form"):
            _ = asked.run(constraint=LISTED, backend=connect(server))["x"]
        server.errors.clear()


@pytest.mark.parametrize("place", [place for place in PLACES if place not in GRAMMARS])
def test_an_expression_with_json_inside_is_validated_and_asked_for_again(place: str) -> None:
    serve, connect, _ = PLACES[place]
    with serve(["Books: none", BOOKS]) as server:
        state = asked.run(constraint=LISTED, backend=connect(server))
        assert state.value("book") == [Book("A", 1), Book("B", 2)]
        assert (state.meta("x")["guarantee"], state.meta("x")["tries"]) == ("validated", 2)


@pytest.mark.parametrize("place", PLACES)
def test_a_lone_part_is_what_gen_has_for_it(place: str) -> None:
    serve, connect, _ = PLACES[place]
    with serve(["pears"]) as server:
        state = asked.run(constraint=ul.choice(["apples", "pears"]).capture("kind"), backend=connect(server))
        assert (state["kind"], state.meta("x")["tries"]) == ("pears", 1)


def test_the_model_is_told_the_form_and_what_is_wrong() -> None:
    echo = ul.Echo(["no books", BOOKS], capabilities=Capabilities("hosted", asks_again=True))
    state = asked.run(constraint=LISTED, backend=echo)
    assert state["book"] == ['{"title":"A",\n"year":1}', '{"year": 2, "title": "B"}']
    first, again = ("".join(getattr(part, "text", "") for part in request.prompt) for request in echo.requests)
    assert "a text of this form" in first
    assert '"Books: " JSON({' in first
    assert "no such text begins with 'no books'" in again


def test_what_is_not_asked_again_is_refused_and_a_kept_text_has_no_captures() -> None:
    with pytest.raises(ul.CapabilityError, match="does not enforce constraint="):
        _ = asked.run(constraint=LISTED, backend=ul.Echo([], capabilities=Capabilities("plain")))["x"]
    echo = ul.Echo(["no books"], capabilities=Capabilities("plain"))
    state = asked.run(constraint=LISTED, allow_best_effort=True, backend=echo)
    assert state["x"] == "no books"
    with pytest.raises(ul.ResultError, match="guarantee 'best_effort'"):
        _ = state["book"]


def test_a_wrong_expression_costs_no_call() -> None:
    with FakeOpenAI(["a"], models=["gpt-4o"]) as server:
        backend = PLACES["gpt-4o"][1](server)
        left = ul.recursive(lambda e: "a" | e + "b")
        for constraint, words in ((left, "begins with itself"), (ul.regex("(a") + "b", r"regex '\(a', position")):
            with pytest.raises(ul.ConstraintError, match=words):
                _ = asked.run(constraint=constraint, backend=backend)["x"]
        assert server.calls == 0


def test_one_call_answers_an_expression_and_the_field_after_it() -> None:
    @ul.function(temperature=0, stop="\n", num_api_spec_tokens=64)
    def card(s: ul.State) -> None:
        s += "Name: Robin\nBasket: " + ul.gen("x", constraint=COUNTED, max_tokens=24)
        s += "\nHome:" + ul.gen("home", max_tokens=24)

    with FakeOpenAI({"Basket: ": "31 pears\nHome: Sherwood\n"}) as server:
        model = ul.OpenAI("gpt-3.5-turbo-instruct", base_url=server.base_url, api_key=server.api_key)
        state = card.run(backend=model)
        assert (state["count"], state["home"], server.calls) == ("31", " Sherwood", 1)
