"""Texts against constraints that nobody enforced."""

import importlib.util
import json
import random
import re
import subprocess
import sys

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from umbel.interpreter.guarantees import guarantee
from umbel.lang.errors import CapabilityError, ConstraintError, MissingExtraError
from umbel.lang.generation import INTEGER, NUMBER
from umbel.lang.protocol import ConstraintSpec

from ..srt.random_schemas import random_schema

LARK = 'start: "yes" | "no" | "(" start ")"'


def regex(source: str) -> ConstraintSpec:
    return ConstraintSpec("regex", source)


def schema(source: str) -> ConstraintSpec:
    return ConstraintSpec("json_schema", source)


def choices(source: str) -> ConstraintSpec:
    return ConstraintSpec("choices", source)


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (regex("[ab]+"), "abba"),
        (regex("(a+)+"), "a" * 5_000),
        (regex("ü{2}"), "üü"),
        (regex(INTEGER), "-42"),
        (schema('{"type": "integer"}'), "7"),
        (schema('{"properties": {"a": {"pattern": "^x"}}}'), '{"a": "xy"}'),
        (schema('{"patternProperties": {"^x": {"type": "null"}}, "additionalProperties": false}'), '{"xa": null}'),
        (schema('{"patternProperties": {"a": {}}, "unevaluatedProperties": false}'), '{"ab": 1}'),
        (schema('{"pattern": "^(?=.*b)a"}'), '"ab"'),
        (choices('["a", "b"]'), "b"),
        (ConstraintSpec("lark", LARK), "((no))"),
    ],
)
def test_a_text_that_holds_breaks_nothing(constraint: ConstraintSpec, text: str) -> None:
    guarantee.check_validatable(constraint)
    assert guarantee.holds(constraint, text) == []
    assert guarantee.begins(constraint, text)


@pytest.mark.parametrize(
    ("constraint", "text", "problem"),
    [
        (regex("[ab]+"), "", "the text is empty"),
        (regex("[ab]+"), "xa", "no such text begins with 'xa'"),
        (regex("[ab]+"), "abc", "no such text goes on with 'c' after 'ab'"),
        (regex("abc"), "ab", "the text ends too early, after 'ab'"),
        (regex("(a+)+b"), "a" * 5_000, "the text ends too early"),
        (regex("."), "\ud800", "no such text begins"),
        (schema('{"type": "integer"}'), "seven", "the text is no JSON"),
        (schema('{"type": "integer"}'), '"7"', r'\$: "7" is not of type "integer"'),
        (schema('{"pattern": "(a+)+$"}'), '"' + "a" * 500 + 'b"', "does not match"),
        (schema('{"patternProperties": {"^x": {"type": "null"}}}'), '{"xa": 1}', r'\$\.xa: 1 is not of type "null"'),
        (schema('{"additionalProperties": false}'), '{"xa": 1}', "no such value or member: 1"),
        (schema('{"additionalProperties": {"type": "null"}}'), '{"xa": 1}', r'\$\.xa: 1 is not of type "null"'),
        (choices('["a", "b"]'), "c", "the text is none of the choices"),
        (ConstraintSpec("lark", LARK), "((no)", "the text ends too early"),
    ],
)
def test_what_a_text_breaks_is_told(constraint: ConstraintSpec, text: str, problem: str) -> None:
    (told,) = guarantee.holds(constraint, text)
    assert re.search(problem, told)


@pytest.mark.parametrize(
    ("constraint", "problem"),
    [
        (regex("(a"), r"regex: position \d"),
        (regex(r"\bno\b"), r"regex: position 0: "),
        (regex("a" * 20_000), "regex: the expression has 20000 bytes"),
        (schema('{"type": "number", "minimum": "x"}'), "json_schema: "),
        (schema('{"$ref": "http://127.0.0.1:9/s.json"}'), "leads to nothing in the schema, and nothing is fetched"),
        (
            schema('{"items": {"$ref": "#/$defs/b"}, "$defs": {"a": {}}}'),
            r"leads to nothing .*'/\$defs/b' does not exist",
        ),
        (schema('{"pattern": "(a"}'), r"pattern '\(a': position"),
        (schema('{"patternProperties": {"(?=a)b": {}}}'), r"pattern '\(\?=a\)b': "),
        (ConstraintSpec("lark", "start: nobody"), "grammar: "),
    ],
)
def test_a_wrong_constraint_is_refused(constraint: ConstraintSpec, problem: str) -> None:
    with pytest.raises(ConstraintError, match=problem):
        guarantee.check_validatable(constraint)


def test_references_inside_a_schema_are_followed() -> None:
    for source in (
        '{"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "integer"}}}',
        '{"$id": "http://x.y/s", "items": {"$ref": "#a"}, "$defs": {"b": {"$anchor": "a", "type": "integer"}}}',
        '{"items": {"$ref": "inner"}, "$defs": {"b": {"$id": "inner", "type": "integer"}}}',
    ):
        guarantee.check_validatable(schema(source))
        assert guarantee.holds(schema(source), "[1]") == []
        assert len(guarantee.holds(schema(source), '["a"]')) == 1


def test_data_in_a_schema_is_not_taken_for_patterns() -> None:
    guarantee.check_validatable(schema('{"enum": [{"pattern": "(a"}], "properties": {"pattern": {"type": "string"}}}'))


@pytest.mark.parametrize("name", ["patternProperties", "pattern", "enum", "const", "default", "examples", "properties"])
@pytest.mark.parametrize("place", ["properties", "$defs", "definitions", "dependentSchemas", "dependencies"])
def test_names_in_a_schema_are_not_taken_for_keywords(place: str, name: str) -> None:
    inner: dict[str, object] = {"type": "integer"} if place == "properties" else {"pattern": "^x+$"}
    if place.startswith("dependen"):
        inner = {"properties": {name: inner}}
    written: dict[str, object] = {place: {name: inner}}
    if place in ("$defs", "definitions"):
        written["properties"] = {name: {"$ref": f"#/{place}/{name}"}}
    if place == "dependencies":
        written["$schema"] = "http://json-schema.org/draft-07/schema#"
    constraint = schema(json.dumps(written))
    guarantee.check_validatable(constraint)
    good, bad = (7, "seven") if place == "properties" else ("xx", "y")
    assert guarantee.holds(constraint, json.dumps({name: good})) == []
    assert len(guarantee.holds(constraint, json.dumps({name: bad}))) == 1


def test_patterns_below_a_name_that_is_a_keyword_are_ours() -> None:
    source = '{"properties": {"enum": {"pattern": "(a"}}}'
    with pytest.raises(ConstraintError, match=r"pattern '\(a': position"):
        guarantee.check_validatable(schema(source))


@pytest.mark.parametrize(
    ("constraint", "text", "end"),
    [
        (regex("[0-9]+"), "12 years", 2),
        (regex("[0-9]+"), "12", None),
        (regex("[0-9]{2}"), "12", 2),
        (regex("[0-9]{2}"), "1", None),
        (regex("[0-9]{2}"), "1x", None),
        (regex("a(bc)?"), "abx", 1),
        (regex("a(bc)?"), "ab", None),
        (regex("a*"), "b", 0),
        (regex("é+"), "éé!", 2),
        (regex(NUMBER), "1.5 and", 4),
        (choices('["a", "ab", "c"]'), "a", None),
        (choices('["a", "ab", "c"]'), "abc", 2),
        (choices('["a", "ab", "c"]'), "ax", 1),
        (choices('["a", "ab", "c"]'), "x", None),
        (choices('["abc"]'), "ab", None),
        (schema('{"type": "object"}'), '{"a": 1} and', 8),
        (schema('{"type": "object"}'), '{"a": 1', None),
        (schema('{"type": "object"}'), "[1] and", None),
        (schema("true"), "12", None),
        (schema("true"), "12 ", 2),
        (schema("true"), "true", 4),
        (ConstraintSpec("lark", LARK), "(no) and", 4),
        (ConstraintSpec("lark", LARK), "(no", None),
    ],
)
def test_the_longest_beginning_that_holds_and_is_complete(
    constraint: ConstraintSpec, text: str, end: int | None
) -> None:
    assert guarantee.longest(constraint, text) == end


@pytest.mark.parametrize(
    ("constraint", "text", "found"),
    [
        (regex("[a-z ]+[.]"), "hello the", True),
        (regex("[a-z ]+[.]"), "Hello", False),
        (choices('["abc"]'), "ab", True),
        (choices('["abc"]'), "b", False),
        (schema('{"type": "array", "items": {"type": "integer"}}'), "[1, 2", True),
        (schema('{"type": "array", "items": {"type": "integer"}}'), '["1', False),
    ],
)
def test_the_beginning_of_a_text(constraint: ConstraintSpec, text: str, found: bool) -> None:
    assert guarantee.begins(constraint, text) is found


@pytest.mark.parametrize(
    ("constraint", "text", "tidy"),
    [
        (schema('{"type": "object"}'), '```json\n{"a": 1}\n```', '{"a": 1}'),
        (schema('{"type": "object"}'), '\n```\n{"a": 1}\n```\n', '{"a": 1}'),
        (schema('{"type": "object"}'), ' {"a": 1}\n', '{"a": 1}'),
        (schema('{"type": "object"}'), 'Here:\n```json\n{"a": 1}\n```', 'Here:\n```json\n{"a": 1}\n```'),
        (schema('{"type": "object"}'), "```json\n[]\n```", "```json\n[]\n```"),
        (choices('["a"]'), " a\n", "a"),
        (choices('["a", " a"]'), " a", " a"),
        (regex("[a-z]+"), "\nabc ", "abc"),
        (regex("[a-z ]+"), "abc ", "abc "),
    ],
)
def test_what_stands_around_an_answer_is_taken_off_if_the_answer_holds(
    constraint: ConstraintSpec, text: str, tidy: str
) -> None:
    assert guarantee.tidied(constraint, text) == tidy


@given(st.text("ab0 é\n", max_size=8))
@settings(max_examples=60)
def test_expressions_are_read_as_fullmatch_reads_them(text: str) -> None:
    for pattern in ("[ab]*", "(a|b0)+", ".é?", INTEGER, "a{2,4}[^0]*"):
        assert (guarantee.holds(regex(pattern), text) == []) == (re.fullmatch(pattern, text) is not None)


@given(st.text("ab0", max_size=6), st.text("ab0", max_size=3))
@settings(max_examples=60)
def test_the_longest_beginning_stays_the_longest(text: str, more: str) -> None:
    for pattern in ("[ab]*0", "a(bb)?", "(a|b0)+", "a{2,4}"):
        end = guarantee.longest(regex(pattern), text)
        if end is not None:
            assert guarantee.longest(regex(pattern), text + more) == end
            assert guarantee.holds(regex(pattern), text[:end]) == []


@pytest.mark.parametrize(
    ("package", "constraint", "error", "problem"),
    [
        ("numpy", regex("a"), MissingExtraError, "'numpy' is not installed"),
        ("jsonschema_rs", schema("true"), MissingExtraError, "'jsonschema-rs' is not installed"),
        ("llguidance", ConstraintSpec("lark", "start: /never asked/"), CapabilityError, "allow_best_effort=True"),
    ],
)
def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, package: str, constraint: ConstraintSpec, error: type[Exception], problem: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else found(name))
    with pytest.raises(error, match=problem):
        guarantee.check_validatable(constraint)


def test_no_optional_checker_is_imported_on_the_way_to_an_answer() -> None:
    """jsonschema imports whatever checkers of formats are installed beside it, which may take a minute."""
    program = (
        "import sys\n"
        "from umbel.interpreter.guarantees import guarantee\n"
        "from umbel.lang.protocol import ConstraintSpec\n"
        'spec = ConstraintSpec(\'json_schema\', \'{"type": "string", "format": "uri"}\')\n'
        "guarantee.check_validatable(spec)\n"
        "assert guarantee.holds(spec, '\"http://a.b\"') == []\n"
        "assert guarantee.holds(spec, '\"no uri\"')\n"
        "print({'jsonschema', 'referencing', 'rfc3987', 'webcolors', 'fqdn', 'interegular'} & set(sys.modules))"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "set()"


_FORMATS = jsonschema.FormatChecker()  # without a further package it takes anything for a date-time


@_FORMATS.checks("date-time")
def _date_time(value: object) -> bool:
    return not isinstance(value, str) or re.fullmatch(r"[-0-9]{10}T[:.0-9]{8,}(Z|[+-][:0-9]{5})", value) is not None


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 200))
@example(27, 0)
def test_what_holds_is_what_an_independent_validator_says(seed: int, choice: int) -> None:
    dice = random.Random(seed)
    known = random_schema(dice)
    value = dice.choice(
        [None, 1, 1.5, "a", [], [1, "a"], {}, {"name": 1}, {"name": "x", "age": 3}, choice, [choice] * 2]
    )
    judge = jsonschema.Draft202012Validator(known, format_checker=_FORMATS)
    spec = ConstraintSpec("json_schema", json.dumps(known))
    assert (guarantee.holds(spec, json.dumps(value)) == []) == judge.is_valid(value)
