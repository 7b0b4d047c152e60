"""What a program may say, and what it hears when it says something else."""

import pytest
from umbel.lang.errors import ParameterError
from umbel.lang.generation import gen, gen_int, gen_string, select
from umbel.lang.ops import (
    ConstantText,
    Gen,
    RoleBegin,
    RoleEnd,
    Select,
    Sequence,
    assistant,
    expression,
    role,
    separate_reasoning,
    user,
    video,
)
from umbel.lang.protocol import ConstraintSpec
from umbel.lang.result import Result


def test_strings_and_operations_add_up_in_order() -> None:
    assert "Q: " + gen("a") + "\n" == Sequence((ConstantText("Q: "), Gen("a"), ConstantText("\n")))
    assert gen("a") + gen("b") + ["x", gen("c")] == Sequence((Gen("a"), Gen("b"), ConstantText("x"), Gen("c")))


def test_a_role_wraps_its_content() -> None:
    assert user("hi") == Sequence((RoleBegin("user"), ConstantText("hi"), RoleEnd("user")))
    assert assistant(gen("x")) == Sequence((RoleBegin("assistant"), Gen("x"), RoleEnd("assistant")))
    assert role("tool", "42") == Sequence((RoleBegin("tool"), ConstantText("42"), RoleEnd("tool")))


@pytest.mark.parametrize("value", [None, 5, {"a": 1}, object()])
def test_what_cannot_be_appended_says_what_can(value: object) -> None:
    with pytest.raises(ParameterError, match="cannot append"):
        expression(value)


def test_typed_shortcuts_are_the_same_constraint() -> None:
    assert gen_int("x", 8) == gen("x", 8, dtype=int)
    assert gen_string("x", 8, json_whitespace="compact") == gen("x", 8, dtype=str, json_whitespace="compact")


def test_a_gen_carries_its_constraint_and_nothing_else_changes() -> None:
    made = gen("x", 8, regex="a+", temperature=0, token_healing=False)
    assert made == Gen(
        "x",
        {"max_tokens": 8, "temperature": 0},
        constraint=ConstraintSpec("regex", "a+"),
        result=Result("text", str),
        token_healing=False,
    )
    with pytest.raises(ParameterError, match="token_healing=False is for constrained text"):
        gen("x", token_healing=False)
    with pytest.raises(ParameterError, match="token_healing=True is for constrained text"):
        gen("x", token_healing=True)


def test_a_number_ends_at_a_blank_beside_the_stops_of_the_program() -> None:
    made = gen("x", dtype=int, stop=[",", " "])
    assert isinstance(made, Gen)
    assert made.options["stop"] == (",", " ", "\n")


def test_one_constraint_is_taken_and_two_are_named() -> None:
    with pytest.raises(ParameterError, match="one constraint, got regex= and dtype="):
        gen("x", regex="a", dtype=int)
    with pytest.raises(ParameterError, match="one constraint, got json_schema= and choices="):
        gen("x", json_schema={}, choices=["a"])
    with pytest.raises(ParameterError, match="takes no token_healing"):
        gen("x", choices=["a"], token_healing=True)
    with pytest.raises(ParameterError, match="token_healing must be True or False, got 1"):
        gen("x", token_healing=1)


def test_an_unknown_option_suggests_the_nearest() -> None:
    with pytest.raises(ParameterError, match="did you mean 'temperature'"):
        gen("x", temprature=0)


def test_values_are_checked_when_the_operation_is_made() -> None:
    with pytest.raises(ParameterError, match="max_tokens=-1"):
        gen("x", max_tokens=-1)
    with pytest.raises(ParameterError, match="return_text_in_logprobs must be True or False, got 'no'"):
        gen("x", return_text_in_logprobs="no")
    assert gen("x", return_text_in_logprobs=None) == Gen("x")  # SGLang's spelling of "not given"
    assert gen("x", min_tokens=500) == Gen("x", {"min_tokens": 500})  # max_tokens may come from the run


def test_choices_make_gen_a_select() -> None:
    assert gen("x", choices=["a", "b"]) == Select("x", ("a", "b"))
    assert gen("x", choices=["a"], temperature=0) == Select("x", ("a",))
    assert gen("x", choices=["a"], temperature=0.7) == Select("x", ("a",), temperature=0.7)
    with pytest.raises(ParameterError, match=r"temperature=-1"):
        gen("x", choices=["a"], temperature=-1)
    with pytest.raises(ParameterError, match=r"choices=\.\.\.\) takes no max_tokens"):
        gen("x", choices=["a"], max_tokens=3)
    with pytest.raises(ParameterError, match="needs choices"):
        gen("x", choices_method="greedy_token_selection")


@pytest.mark.parametrize(
    ("choices", "problem"),
    [
        ([], "empty"),
        (None, "needs choices"),
        ("ab", "list of strings"),
        (5, "list of strings"),
        ({"a": 1}, "list of strings"),
        (["a", ""], "non-empty"),
        (["a", "a"], "repeat"),
        ([1], "non-empty string"),
    ],
)
def test_bad_choices_are_named(choices: object, problem: str) -> None:
    with pytest.raises(ParameterError, match=problem):
        select("x", choices=choices)


def test_how_select_chooses() -> None:
    assert select("x", choices=["a"]) == Select("x", ("a",), "token_length_normalized", 0.0)
    assert select("x", choices=["a"], method="exact", temperature=1) == Select("x", ("a",), "exact", 1.0)
    assert select("x", choices=["a"], choices_method="overshoot").method == "overshoot"
    assert select("x", choices=["a"], method="exact", choices_method="exact").method == "exact"


@pytest.mark.parametrize("temperature", [-0.1, 101, float("nan"), float("inf"), True, "1"])
def test_a_temperature_that_is_none_is_named(temperature: object) -> None:
    with pytest.raises(ParameterError, match="write 0 for the best choice"):
        select("x", choices=["a"], temperature=temperature)


def test_a_method_that_does_not_exist_or_two_of_them_are_named() -> None:
    with pytest.raises(ParameterError, match=r"choices_method=.best. is not known; write one of .*exact"):
        select("x", choices=["a"], choices_method="best")
    with pytest.raises(ParameterError, match="method='best' is not known"):
        select("x", choices=["a"], method="best")
    with pytest.raises(ParameterError, match="two names of one parameter"):
        select("x", choices=["a"], method="exact", choices_method="overshoot")


def test_names_and_counts_are_checked() -> None:
    for name in ("", 3):
        with pytest.raises(ParameterError, match="variable name"):
            gen(name)
    with pytest.raises(ParameterError, match="num_frames"):
        video("clip.mp4", 0)
    with pytest.raises(ParameterError, match="model_type='nobody' is not known"):
        separate_reasoning(gen("x"), model_type="nobody")
    with pytest.raises(ParameterError, match="needs its content"):
        user()
