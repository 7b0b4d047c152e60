"""A backend is called with a prompt and gives the text, with the errors of a gen."""

import asyncio
import warnings
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter.backends.echo_tokens import prompt_text
from umbel.testing import FakeAnthropic, FakeOpenAI


def test_a_call_gives_the_text() -> None:
    echo = ul.Echo(lambda prompt: f"{prompt} and more")
    assert echo("hello", 2) == "hello and"
    assert echo("hello", max_tokens=8) == echo.complete("hello", {"max_tokens": 8}) == "hello and more"
    assert [prompt_text(request.prompt) for request in echo.requests] == ["hello"] * 3


def test_a_call_is_awaited_next_to_others() -> None:
    async def main() -> list[str]:
        echo = ul.Echo(lambda prompt: f"{prompt}!")
        return await asyncio.gather(*(echo.complete_async(name, max_tokens=4) for name in ("one", "two")))

    assert asyncio.run(main()) == ["one!", "two!"]


def test_constraints_choices_and_names_of_sglang_are_taken() -> None:
    echo = ul.Echo(["2024", "other text"], scores={"grey": -0.1, "blue": -1.0})
    assert echo("The year is ", regex="[0-9]{4}") == "2024"
    assert echo("The sky is ", choices=["blue", "grey"]) == "grey"
    assert echo("x", max_new_tokens=1) == "other"


def test_options_of_a_run_are_taken(tmp_path: Any) -> None:
    echo = ul.Echo(["text"])
    journal = tmp_path / "calls.journal"
    assert echo("x", journal=journal, timeout=30) == "text"
    assert echo("x", journal=journal) == "text"
    assert echo.calls == 1
    with pytest.raises(ul.BudgetError):
        echo("x" * 100, budget=ul.Budget(tokens=3))


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ("x", {"tools": []}, r"gen\(\) has no option 'tools'; in a program, write s.call_tools"),
        ("x", {"max_tokens": -1}, "max_tokens=-1 is out of range"),
        ("x", {"n": 2}, "gives one text, not n=2"),
        ("x", {"regex": "a", "dtype": int}, "takes one constraint"),
        ("x", {"name": "y"}, "no option 'name'"),
        ("x", {"timeout": 0}, "timeout=0"),
        (["x"], {}, "takes one prompt, a string; got list"),
        (None, {}, "takes one prompt, a string; got NoneType"),
    ],
)
def test_a_wrong_call_is_refused_before_the_backend_is_asked(prompt: Any, options: dict[str, Any], says: str) -> None:
    echo = ul.Echo()
    with pytest.raises(ul.ParameterError, match=says):
        echo(prompt, **options)
    with pytest.raises(ul.ParameterError, match=says):
        asyncio.run(echo.complete_async(prompt, **options))
    assert echo.calls == 0


def test_a_parameter_is_given_once() -> None:
    with pytest.raises(ul.ParameterError, match="is given max_tokens twice"):
        ul.Echo().complete("x", {"max_tokens": 1}, max_tokens=2)


def test_an_error_of_the_backend_is_raised_as_it_is() -> None:
    echo = ul.Echo(faults=ul.FailCall(1, ul.OverloadedError("full")))
    with pytest.raises(ul.OverloadedError, match="full"):
        echo("x")


def test_a_chat_model_gets_the_prompt_as_a_message() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with FakeOpenAI(lambda *_: "four") as server:
            hosted = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
            assert hosted("2 + 2 is", max_tokens=4) == "four"
        with FakeAnthropic(lambda *_: "four") as server:
            claude = ul.Anthropic("claude-haiku-4-5", base_url=server.base_url, api_key=server.api_key)
            assert asyncio.run(claude.complete_async("2 + 2 is", max_tokens=4, temperature=0)) == "four"


def test_a_traced_program_does_not_call_a_backend() -> None:
    echo = ul.Echo()

    @ul.function
    def program(s):
        s += echo("x")

    with pytest.raises(ul.TraceError, match=r"a call of a backend"):
        program.trace()


def test_a_backend_is_no_function_of_a_branch_number() -> None:
    @ul.function
    def program(s):
        forks = s.fork(2)
        forks += ul.Echo()

    with pytest.raises(ul.ParameterError, match="cannot append"):
        program.run(backend=ul.Echo())
