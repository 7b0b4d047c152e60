"""Estimates: what a program may cost, before a model is asked."""

import enum
from dataclasses import dataclass

import pytest
import umbel as ul
from umbel.interpreter.backends.echo import Echo
from umbel.interpreter.budget import prices
from umbel.interpreter.estimate import Estimate
from umbel.lang.protocol import Capabilities, ConstraintSpec

from .conftest import PATIENCE


@ul.function
def two_questions(s, topic):
    s += ul.user(f"About {topic}") + ul.assistant(ul.gen("first", max_tokens=20))
    s += ul.user("More") + ul.assistant(ul.gen("second", max_tokens=30))
    return s["second"]


def test_nothing_is_sent_and_the_most_is_counted() -> None:
    echo = Echo(lambda prompt: "word " * 100)
    estimate = two_questions.estimate("umbels", backend=echo)
    assert echo.calls == 0
    state = two_questions.run("umbels", backend=echo, timeout=PATIENCE)
    usage = state.usage
    assert estimate == Estimate(2, usage.prompt_tokens, usage.completion_tokens, 0.0)
    assert estimate.total_tokens == usage.total_tokens


def test_a_run_fits_a_budget_of_its_estimate() -> None:
    @ul.function
    def many(s):
        s += "one two three"
        forks = s.fork(5)
        forks += ul.gen("x", max_tokens=17, n=2)
        forks.join()
        s += "four" + ul.select("y", ["yes", "no no"]) + ul.gen("z", max_tokens=3)

    estimate = many.estimate(backend=Echo())
    budget = ul.Budget(tokens=estimate.total_tokens, calls=estimate.calls)
    state = many.run(backend=Echo(lambda prompt: "word " * 50), budget=budget, timeout=PATIENCE)
    state.sync()
    assert estimate.calls == state.usage.calls == 7
    with pytest.raises(ul.BudgetError):
        many.estimate(backend=Echo(), budget=ul.Budget(tokens=estimate.total_tokens - 1))


def test_dollars_are_those_of_the_backends_model() -> None:
    echo = Echo(capabilities=Capabilities("shop", model="shop-tiny"))
    assert two_questions.estimate("umbels", backend=echo).dollars is None
    prices["shop-tiny"] = ul.Price(1.0, 10.0, cache_write=2.0)
    try:
        estimate = two_questions.estimate("umbels", backend=echo)
    finally:
        del prices["shop-tiny"]
    assert estimate.dollars == pytest.approx((estimate.prompt_tokens * 2 + 50 * 10) / 1e6)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Plant:
    name: str
    heights: list[float]
    colour: Colour


def test_made_up_answers_are_objects_where_the_program_asks_for_them() -> None:
    @ul.function
    def typed(s):
        s += (
            "plant" + ul.gen("plant", dtype=Plant) + ul.gen("number", dtype=int) + ul.gen("code", regex=r"[A-Z]{3}-\d+")
        )
        s += ul.gen("colour", choices=["red", "blue"]) + ul.select("best", ["first", "second"], method="exact")
        return (s.value("plant"), s.value("number"), s["code"], s["colour"], s["best"])

    estimate = typed.estimate(backend=Echo(probabilities={}))
    assert estimate.calls == 5

    @ul.function
    def checks(s):
        plant, number, code, colour, best = typed(s)
        assert isinstance(plant, Plant)
        assert isinstance(number, int)
        assert len(code) == 5
        assert (colour, best) == ("red", "first")
        return plant

    checks.estimate(backend=Echo(probabilities={}))


def test_log_probabilities_are_there_where_the_program_asks_for_them() -> None:
    @ul.function
    def confident(s):
        s += "one two" + ul.gen("x", max_tokens=4, top_logprobs_num=2, logprob_start_len=0)
        meta = s.meta("x")
        assert len(meta["output_token_logprobs"]) == len(meta["output_top_logprobs"]) == 4
        assert len(meta["input_token_logprobs"]) == 2

    assert confident.estimate(backend=Echo()).completion_tokens == 4


def test_what_a_model_is_told_about_a_constraint_counts() -> None:
    class Asked(Echo):
        def enforces(self, constraint: ConstraintSpec) -> bool:
            return len(constraint.source) < 10

    @ul.function
    def code(s, pattern):
        s += ul.user("A code") + ul.assistant(ul.gen("x", regex=pattern))

    capabilities = Capabilities("asked", constraints=("regex",), asks_again=True)
    enforced = code.estimate("[a-z]+", backend=Asked(capabilities=capabilities))
    validated = code.estimate("[a-z]{100,200}", backend=Asked(capabilities=capabilities))
    assert validated.prompt_tokens > enforced.prompt_tokens + 20
    assert validated.calls == enforced.calls == 1


def test_what_a_backend_refuses_is_refused() -> None:
    @ul.function
    def code(s):
        s += ul.gen("x", regex="[a-z]+")

    with pytest.raises(ul.CapabilityError) as caught:
        code.estimate(backend=Echo(capabilities=Capabilities("plain")))
    place, made_up = caught.value.__notes__
    assert place.startswith("in gen('x'), ")
    assert "made up" in made_up


def test_an_error_of_the_body_says_that_the_answers_were_made_up() -> None:
    @ul.function
    def fragile(s):
        s += ul.gen("x", max_tokens=3)
        return int(s["x"])

    with pytest.raises(ValueError, match="invalid literal") as caught:
        fragile.estimate(backend=Echo())
    assert caught.value.__notes__ == ["estimate(): no model was asked; the answers that the body read were made up"]


def test_programs_that_the_body_runs_count_too() -> None:
    echo = Echo(lambda prompt: "ja")

    @ul.function
    def outer(s):
        inner = two_questions.run("umbels")
        s += inner["second"] + ul.gen("x", max_tokens=5)

    with ul.default_backend(echo):
        estimate = outer.estimate()
    assert (estimate.calls, echo.calls) == (3, 0)


def test_async_programs_and_streams_of_pieces_have_estimates() -> None:
    @ul.function
    async def asks(s):
        s += "one" + ul.gen("x", max_tokens=6)
        return [piece async for piece in s.text_async_iter("x")]

    assert asks.estimate(backend=Echo()) == Estimate(1, 1, 6, 0.0)
    with pytest.raises(ul.ParameterError, match="no stream and no verbose"):
        asks.estimate(backend=Echo(), stream=True)
