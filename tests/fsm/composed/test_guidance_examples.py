"""The examples of constraints in guidance's README (July 2025), written here in no more lines.

Counted are lines that are not blank, without imports, the choice of a model, and what is printed.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import umbel as ul
from pydantic import BaseModel, ConfigDict, Field
from umbel.fsm.composed.expression import Expression


class BloodPressure(BaseModel):
    systolic: int = Field(gt=300, le=400)
    diastolic: int = Field(gt=0, le=20)
    location: str = Field(max_length=50)
    model_config = ConfigDict(extra="forbid")


@ul.function
def age(s: ul.State) -> None:
    s += ul.system("You are a teenager")
    s += ul.user("How old are you?")
    s += ul.assistant(ul.gen("age", regex=r"\d+", temperature=0.8))


@ul.function
def capital(s: ul.State) -> None:
    s += ul.system("You are a geography expert")
    s += ul.user("""What is the capital of Sweden? Answer with the correct letter.
    A) Helsinki
    B) Reykjavík
    C) Stockholm
    D) Oslo
    """)
    s += ul.assistant(ul.select("model_selection", ["A", "B", "C", "D"]))


@ul.function
def multiple_choice(s: ul.State, question: str, choices: Sequence[str]) -> None:
    letters = [chr(ord("a") + i) for i in range(len(choices))]
    options = "".join(f"{letter} : {choice}\n" for letter, choice in zip(letters, choices, strict=True))
    s += ul.user(f"{question}\n{options}")
    s += ul.assistant(ul.select("string_choice", letters))


def html() -> Expression:
    def tagged(tag: str) -> Expression:
        return f"<{tag}>" + text + f"</{tag}>"

    text = ul.regex("[^<>]+")
    heading = ul.choice([tagged("h1"), tagged("h2"), tagged("h3")]) + "\n"
    paragraph = "<p>" + ul.choice([text, tagged("em"), tagged("strong"), "<br />"]).repeat(1) + "</p>\n"
    body = "<body>\n" + (heading | paragraph.repeat(1)).repeat(1) + "</body>\n"
    return "<html>\n<head>\n" + tagged("title") + "\n</head>\n" + body + "</html>\n"


@ul.function
def page(s: ul.State) -> None:
    s += ul.system("You are an expert in HTML")
    s += ul.user("Create a simple and short web page about your life story.")
    s += ul.assistant(ul.gen("html_text", constraint=html(), temperature=0.7, max_tokens=1_000))


@ul.function
def pressure(s: ul.State) -> None:
    s += ul.system("You are a doctor taking a patient's blood pressure taken from their arm")
    s += ul.user("Report the blood pressure")
    s += ul.assistant(ul.gen("bp", constraint=ul.json(BloodPressure)))


def source(code: Any) -> str:  # Any: a program, a function or a class
    return inspect.getsource(inspect.unwrap(code) if isinstance(code, ul.Program) else code)


LINES: list[tuple[str, tuple[Any, ...], int]] = [
    ("a regular expression", (age,), 7),
    ("a selection", (capital,), 12),
    ("a function", (multiple_choice,), 15),
    ("functions that compose to a grammar", (html, page), 68),
    ("JSON of a Pydantic model", (BloodPressure, pressure), 12),
]


@pytest.mark.parametrize(("code", "theirs"), [line[1:] for line in LINES], ids=[line[0] for line in LINES])
def test_an_example_of_guidance_takes_no_more_lines(code: tuple[Any, ...], theirs: int) -> None:
    ours = [line for each in code for line in source(each).splitlines() if line.strip()]
    assert len(ours) <= theirs


PAGE = (
    "<html>\n<head>\n<title>Me</title>\n</head>\n<body>\n<h1>Early</h1>\n<p>I was <em>made</em><br /></p>\n"
    "<p>Now <strong>here</strong></p>\n</body>\n</html>\n"
)
RUNS: list[tuple[Callable[[ul.Echo], ul.State], str, str, Any]] = [
    (lambda echo: age.run(backend=echo), "13", "age", "13"),
    (lambda echo: page.run(backend=echo), PAGE, "html_text", PAGE),
    (
        lambda echo: pressure.run(backend=echo),
        '{"systolic": 301, "diastolic": 15, "location": "arm"}',
        "bp",
        BloodPressure(systolic=301, diastolic=15, location="arm"),
    ),
]


@pytest.mark.parametrize(("run", "answer", "name", "value"), RUNS, ids=[run[2] for run in RUNS])
def test_the_examples_run(run: Callable[[ul.Echo], ul.State], answer: str, name: str, value: Any) -> None:
    assert run(ul.Echo([answer])).value(name) == value


def test_the_selections_run() -> None:
    letters = dict.fromkeys("ABDbc", -1.0) | {"C": -0.1, "a": -0.1}
    assert capital.run(backend=ul.Echo(scores=letters))["model_selection"] == "C"
    asked = multiple_choice.run(
        question="Which is venomous?", choices=["Platypus", "Koala"], backend=ul.Echo(scores=letters)
    )
    assert asked["string_choice"] == "a"
    assert "b : Koala" in asked.text()


@pytest.mark.parametrize("change", [("<h1>", "<h4>"), ("</em>", "</strong>"), ("<p>I", "<p><I"), ("</html>\n", "")])
def test_the_page_is_held_to_its_grammar(change: tuple[str, str]) -> None:
    assert html().match(PAGE) is not None
    assert html().match(PAGE.replace(*change, 1)) is None


def test_elements_nest_and_close_with_the_tag_that_opened_them() -> None:
    """A grammar that calls itself, which takes a function for each tag elsewhere."""
    tags = ("b", "i", "ul", "li")
    element = ul.recursive(
        lambda e: ul.choice([f"<{tag}>" + (e | ul.regex("[^<>]+")).repeat() + f"</{tag}>" for tag in tags])
    )
    assert element.match("<ul><li>one <b>and</b></li><li></li></ul>") is not None
    assert element.match("<ul><li>one <b>and</li></b></ul>") is None
    assert element.match(re.sub("x", "<b>", "x" * 60) + "</b>" * 60) is not None
