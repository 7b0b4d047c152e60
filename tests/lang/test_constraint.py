"""What a gen demands: spelled as the program gave it, checked as far as that can be seen without a compiler."""

import enum
import json
import re
import subprocess
import sys
from types import MappingProxyType
from typing import Any, Literal

import pytest
from umbel.lang.errors import ConstraintError, ParameterError, ResultError, UmbelError
from umbel.lang.generation import Demand, demand_of
from umbel.lang.protocol import ConstraintSpec
from umbel.lang.result import Result


class Size(enum.Enum):
    S = "small"
    L = 40


def demand(**given: object) -> Demand:
    made = demand_of(given)
    assert made is not None
    return made


def test_nothing_demanded_is_no_demand() -> None:
    assert demand_of({"regex": None, "choices": ["a"]}) is None


@pytest.mark.parametrize(
    ("dtype", "text", "value"),
    [
        (int, "-12", -12),
        ("int", "0", 0),
        (float, "1.50", 1.5),
        ("float", "-3", -3.0),
        (bool, "True", True),
        ("bool", "False", False),
        (Literal["a.b", "c|d"], "c|d", "c|d"),
        (Literal[1, "x"], "1", 1),
        (Literal["y", None], "None", None),
        (Size, "40", Size.L),
        (str, '"a \\"word\\""', 'a "word"'),
        (list[int], "[1, 2]", [1, 2]),
        (int | None, "null", None),
    ],
)
def test_a_type_is_written_plainly_and_read_back(dtype: Any, text: str, value: object) -> None:
    made = demand(dtype=dtype)
    if made.spec.kind == "regex":
        assert re.fullmatch(made.spec.source, text)
    assert made.result.read("x", text, {}) == value


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (int, "-0"),
        (int, "007"),
        (int, "+1"),
        (int, "1" * 20),
        (int, ""),
        (float, "1."),
        (float, ".5"),
        (float, "1e5"),
    ],
)
def test_other_spellings_are_not_admitted(dtype: Any, text: str) -> None:
    assert re.fullmatch(demand(dtype=dtype).spec.source, text) is None


@pytest.mark.parametrize(
    ("dtype", "texts"),
    [(bool, ["True", "False"]), (Literal["a.b", "é", None], ["a.b", "é", "None"]), (Size, ["small", "40"])],
)
def test_one_of_some_values_is_a_choice_of_texts(dtype: Any, texts: list[str]) -> None:
    spec = demand(dtype=dtype).spec
    assert (spec.kind, json.loads(spec.source)) == ("choices", texts)


def test_a_schema_travels_as_text_with_the_order_of_its_keys() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {"const": "é"}}}
    text = demand(json_schema=schema).spec.source
    assert json.loads(text) == schema
    assert text.index('"z"') < text.index('"a"')
    assert demand(json_schema=text).spec == demand(json_schema=MappingProxyType(schema)).spec
    assert demand(json_schema=True).spec.source == "true"
    assert demand(json_schema=False).spec.source == "false"
    assert demand(json_schema=int).spec.source == '{"type": "integer"}'


def test_options_go_with_the_constraint() -> None:
    made = demand(json_schema={}, json_whitespace="flexible", allow_unenforced=True, constraint_engine="fsm")
    assert made.spec == ConstraintSpec("json_schema", "{}", "flexible", True, "fsm")
    assert demand(json_schema={}, json_key_order="any").spec == ConstraintSpec("json_schema", "{}", key_order="any")
    assert demand(regex="a", constraint_engine="llguidance").spec.engine == "llguidance"
    assert demand(ebnf='start: "a"').spec == demand(grammar='start: "a"').spec == ConstraintSpec("lark", 'start: "a"')


WRONG: list[tuple[dict[str, object], type[UmbelError], str]] = [
    ({"regex": ""}, ParameterError, "regex=''; write a non-empty string"),
    ({"regex": re.compile(b"a")}, ParameterError, "compile a pattern of text"),
    ({"regex": re.compile("")}, ParameterError, "write a non-empty string"),
    ({"constraint": "[ab]"}, ParameterError, r"write an expression such as ul\.regex"),
    ({"regex": 3}, ParameterError, "regex=3"),
    ({"regex": "a\ud800"}, ConstraintError, "character at 1 is half of a surrogate pair"),
    ({"ebnf": []}, ParameterError, r"ebnf=\[\]"),
    ({"ebnf": "a", "grammar": "a"}, ParameterError, "got ebnf= and grammar="),
    ({"regex": "a", "json_schema": {}}, ParameterError, "got regex= and json_schema="),
    ({"json_schema": "{"}, ConstraintError, "no JSON text.*column 2"),
    ({"json_schema": "[" * 100_000}, ConstraintError, "no JSON text"),
    ({"json_schema": '"text"'}, ConstraintError, "an object, true or false"),
    ({"json_schema": ""}, ConstraintError, "no JSON text"),
    ({"json_schema": 3}, ParameterError, "json_schema=3; write a schema as a dict"),
    ({"json_schema": [1]}, ParameterError, "write a schema as a dict"),
    ({"json_schema": {"const": {1: "a"}}}, ConstraintError, "key 1 at #/const is no string"),
    ({"json_schema": {"const": float("nan")}}, ConstraintError, "not JSON compliant"),
    ({"json_schema": {"const": object()}}, ConstraintError, "not JSON serializable"),
    ({"json_schema": complex}, ParameterError, "complex cannot be generated"),
    ({"dtype": "integer"}, ParameterError, "dtype='integer'; write int, float, bool, str"),
    ({"dtype": 3}, ParameterError, "3 cannot be generated"),
    ({"dtype": Literal[1, "1"]}, ParameterError, "'1' is written like another one; write json_schema=Literal"),
    ({"dtype": Literal[b"a"]}, ParameterError, "neither text nor a number"),
    ({"dtype": enum.Enum("Odd", [("X", "x"), ("Y", ("t", 1))])}, ParameterError, "give each member one of these"),
    ({"dtype": enum.Enum("Empty", [])}, ParameterError, "Empty has no members"),
    ({"json_whitespace": "compact"}, ParameterError, "needs json_schema="),
    ({"regex": "a", "allow_unenforced": True}, ParameterError, "needs json_schema="),
    ({"constraint_engine": "fsm"}, ParameterError, "needs a constraint"),
    ({"json_key_order": "any"}, ParameterError, "needs json_schema="),
    ({"json_schema": {}, "json_key_order": "sorted"}, ParameterError, "'declared', 'any'"),
    ({"json_schema": {}, "json_whitespace": "wide"}, ParameterError, "'spaced', 'compact', 'flexible'"),
    ({"regex": "a", "constraint_engine": "fast"}, ParameterError, "'fsm', 'llguidance'"),
    ({"json_schema": {}, "allow_unenforced": 1}, ParameterError, "True or False, got 1"),
]


@pytest.mark.parametrize(("given", "kind", "problem"), WRONG, ids=[w[2][:40] for w in WRONG])
def test_what_is_wrong_is_said_at_the_call(given: dict[str, object], kind: type[UmbelError], problem: str) -> None:
    with pytest.raises(kind, match=problem):
        demand_of(given)


def test_a_schema_that_contains_itself_is_refused() -> None:
    schema: dict[str, object] = {}
    schema["not"] = schema
    with pytest.raises(ConstraintError, match="contains itself"):
        demand_of({"json_schema": schema})


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"finish_reason": "length", "completion_tokens": 4}, r"cut off after 4 tokens .* raise max_tokens: '\{\"a'"),
        ({"finish_reason": "abort"}, "aborted before its end"),
        ({"finish_reason": "stop", "matched_stop": "\n"}, r"ended at stop='\\n'; remove that stop"),
        ({"finish_reason": "stop", "matched_stop": 1}, r"variable 'x' holds no JSON: '\{\"a'"),
        ({"violations": ["$: not unique"]}, r"holds no JSON: \$: not unique"),
    ],
)
def test_an_incomplete_text_says_what_ended_it(facts: dict[str, object], why: str) -> None:
    with pytest.raises(ResultError, match=why):
        Result("JSON", json.loads).read("x", '{"a', facts)


def test_neither_pydantic_nor_jsonschema_is_imported_for_those_who_do_not_use_them() -> None:
    program = (
        "import sys, umbel as ul; ul.gen('x', json_schema=list[int]); ul.function; "
        "print({'pydantic', 'jsonschema', 'numpy', 'torch'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
