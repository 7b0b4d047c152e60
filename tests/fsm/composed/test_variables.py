"""Captures become variables of the state: in programs, branches and batches, on backends that enforce and others."""

import dataclasses
from pathlib import Path
from typing import Any

import pydantic
import pytest
import umbel as ul
from umbel.fsm.composed.expression import Expression


@dataclasses.dataclass
class Book:
    title: str
    year: int


FRUIT = ul.regex("[0-9]+").capture("count") + " " + (ul.choice(["apples", "pears"]) | ul.json(Book)).capture("what")
SHELF = ul.json(Book).capture("book").repeat(1, 3, separator=", ") + ul.regex("!+").capture("shout").optional()


@ul.function
def said(s: ul.State, constraint: Expression, **options: Any) -> None:  # Any: options of gen
    s += "Well: " + ul.gen("x", constraint=constraint, **options) + "."


def test_captures_are_variables_next_to_the_text() -> None:
    state = said.run(constraint=FRUIT, backend=ul.Echo(["12 pears"]))
    assert (state["x"], state["count"], state["what"]) == ("12 pears", "12", "pears")
    assert state.text() == "Well: 12 pears."
    assert state.variables() == ["x", "count", "what"]
    assert state.meta("count")["guarantee"] == "enforced"


def test_repeated_captures_are_lists_of_texts_and_of_objects() -> None:
    answer = '{"title": "A", "year": 1}, {"title": "B", "year": 2}'
    state = said.run(constraint=SHELF, backend=ul.Echo([answer]))
    assert state["book"] == [*answer.split(", {")[:1], '{"title": "B", "year": 2}']
    assert state.value("book") == [Book("A", 1), Book("B", 2)]
    assert (state["shout"], state.value("shout")) == (None, None)


def test_a_capture_of_a_whole_constraint_has_its_type() -> None:
    state = said.run(constraint=ul.json(Book).capture("book"), backend=ul.Echo(['{"year": 3, "title": "C"}']))
    assert state.value("book") == state.value("x") == Book("C", 3)


def test_several_continuations_have_a_capture_each() -> None:
    state = said.run(constraint=FRUIT, n=2, backend=ul.Echo([["1 pears", "2 apples"]]))
    assert state["count"] == ["1", "2"]
    assert state.value("what") == ["pears", "apples"]


def test_branches_and_batches_have_captures() -> None:
    @ul.function
    def branches(s: ul.State) -> None:
        forks = s.fork(2)
        forks += ul.gen("x", constraint=FRUIT)
        forks.join()

    assert branches.run(backend=ul.Echo(["1 pears", "2 apples"]))["what"] == ["pears", "apples"]
    states = said.run_batch([{"constraint": FRUIT}] * 2, backend=ul.Echo({"Well": "7 pears"}))
    assert [state["count"] for state in states] == ["7", "7"]


def test_a_text_that_was_cut_has_no_captures_and_says_why() -> None:
    state = said.run(constraint=FRUIT, max_tokens=1, backend=ul.Echo(["12 pears"]))
    assert state["x"] == "12"
    with pytest.raises(ul.ResultError, match=r"'count' is captured from the text of gen\('x'\).*raise max_tokens"):
        _ = state["count"]


def test_echo_makes_a_text_up_that_fits_and_refuses_a_script_that_does_not() -> None:
    state = said.run(constraint=FRUIT, backend=ul.Echo())
    assert FRUIT.match(state["x"]) is not None
    with pytest.raises(ul.RequestError, match="is no text of the expression"):
        _ = said.run(constraint=FRUIT, backend=ul.Echo(["many pears"]))["x"]


def test_a_name_stands_for_one_thing() -> None:
    with pytest.raises(ul.ParameterError, match="rename one of them"):
        ul.gen("count", constraint=FRUIT)
    with pytest.raises(ul.ParameterError, match="different types"):
        ul.json(Book).capture("a") + ul.regex("b").capture("a")
    with pytest.raises(ul.ParameterError, match="another name"):
        ul.regex("b").capture("a").capture("a")


def test_a_compiled_program_has_a_constraint_without_captures() -> None:
    @ul.function
    def plain(s: ul.State) -> None:
        s += ul.gen("x", constraint=ul.regex("[0-9]+") + " pears")

    assert plain.compile().run(backend=ul.Echo(["3 pears"]))["x"] == "3 pears"


def test_a_journal_gives_the_captures_of_a_finished_call_again(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first = said.run(constraint=FRUIT, backend=ul.Echo(["12 pears"]), journal=path)
    assert first["what"] == "pears"
    again = said.run(constraint=FRUIT, backend=ul.Echo([]), journal=path)
    assert (again["count"], again["what"]) == ("12", "pears")


def test_a_text_is_judged_by_its_own_reading_of_json_with_any_blanks() -> None:
    """Echo looks at no blanks, as for a schema; offline, and on a runtime, JSON is spelled as asked."""
    answer = 'Book: {"year":3,"title":"C"}'
    constraint = "Book: " + ul.json(Book).capture("book")
    assert constraint.match(answer) is None
    assert said.run(constraint=constraint, backend=ul.Echo([answer])).value("book") == Book("C", 3)


def test_a_type_with_code_of_its_own_judges_its_part() -> None:
    class Even(pydantic.BaseModel):
        n: int

        @pydantic.field_validator("n")
        @classmethod
        def even(cls, n: int) -> int:
            if n % 2:
                raise ValueError("must be even")
            return n

    echo = ul.Echo(['n: {"n": 1}', 'n: {"n": 2}'])
    state = said.run(constraint="n: " + ul.json(Even).capture("even"), backend=echo)
    assert state.value("even") == Even(n=2)
    assert state["x"] == state.value("x") == 'n: {"n": 2}'
    assert state.meta("even")["tries"] == 2


def test_a_listing_spells_an_expression_as_people_read_it() -> None:
    @ul.function
    def plain(s: ul.State) -> None:
        s += ul.gen("x", constraint=ul.regex("[0-9]+") + " pears")

    assert '/[0-9]+/ " pears"' in plain.trace().text().replace("\\", "")


def test_a_capture_streams_as_one_piece_once_its_text_is_there() -> None:
    state = said.run(
        constraint=FRUIT + ul.regex("!+").capture("shout").optional(), stream=True, backend=ul.Echo(["1 pears"])
    )
    assert list(state.text_iter("what")) == ["pears"]
    assert list(state.text_iter("shout")) == []


def test_reasoning_before_an_expression_is_split_off_and_captures_stay() -> None:
    @ul.function
    def thinks(s: ul.State) -> None:
        answer = "<think>" + ul.until("</think>") + "\n" + ul.regex("[a-z]+").capture("word")
        s += ul.separate_reasoning(ul.gen("x", constraint=answer), "qwen3")

    state = thinks.run(backend=ul.Echo(["<think>hm</think>\nyes"]))
    assert (state["x"], state["x_reasoning_content"], state["word"]) == ("yes", "hm", "yes")
