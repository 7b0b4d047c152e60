"""Constraints as servers of the OpenAI dialect take them, and schemas in the strict subset."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.interpreter.backends.hosted.constraint_params import MOST_VALUES, NotStrict, beginning, strict, unwrap
from umbel.interpreter.backends.hosted.openai.profiles import SERVERS, Profile, kinds, lower, of_model
from umbel.lang.protocol import ConstraintSpec

GPT = of_model("gpt-4o")
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


def fields(constraint: ConstraintSpec, profile: Profile, mode: str = "chat") -> object:
    lowered = lower(constraint, profile, mode)  # type: ignore[arg-type]  # one of the two modes
    return lowered and lowered.fields


def schema(value: object) -> ConstraintSpec:
    return ConstraintSpec("json_schema", json.dumps(value))


def strictly(value: object, **options: bool) -> object:
    return strict(json.dumps(value), **options)


@pytest.mark.parametrize(
    ("server", "mode", "constraint", "expected"),
    [
        ("vllm", "chat", schema(POINT), {"structured_outputs": {"json": POINT}}),
        ("vllm", "completion", ConstraintSpec("regex", "a+"), {"structured_outputs": {"regex": "a+"}}),
        ("vllm", "chat", ConstraintSpec("choices", '["a"]'), {"structured_outputs": {"choice": ["a"]}}),
        ("sglang", "completion", schema(POINT), {"json_schema": json.dumps(POINT)}),
        ("sglang", "chat", ConstraintSpec("regex", "a+"), {"regex": "a+"}),
        ("sglang", "chat", ConstraintSpec("choices", '["a.b", "c d"]'), {"regex": r"(a\.b)|(c d)"}),
        ("llama.cpp", "chat", schema(POINT), {"response_format": {"type": "json_object", "schema": POINT}}),
        ("llama.cpp", "completion", schema(POINT), None),
        ("llama.cpp", "chat", schema({"type": "integer", "minimum": 3}), None),  # it would leave the bound out
        (
            "llama.cpp",
            "completion",
            ConstraintSpec("choices", '["a\\"b", "c\\n"]'),
            {"grammar": r'root ::= "a\"b" | "c\n"'},
        ),
        ("llama.cpp", "chat", ConstraintSpec("regex", "a+"), None),
        ("llama.cpp", "completion", ConstraintSpec("gbnf", "root ::= [a]+"), {"grammar": "root ::= [a]+"}),
        ("sglang", "chat", ConstraintSpec("gbnf", "root ::= [a]+"), {"ebnf": "root ::= [a]+"}),
        ("vllm", "chat", ConstraintSpec("gbnf", "root ::= [a]"), {"structured_outputs": {"grammar": "root ::= [a]"}}),
        ("compatible", "chat", schema(POINT), None),
    ],
)
def test_servers_have_ways_of_their_own(server, mode, constraint, expected):
    assert fields(constraint, SERVERS[server], mode) == expected


def test_openai_takes_a_schema_in_its_strict_form():
    sent = fields(schema(POINT), GPT)
    asked = sent["response_format"]["json_schema"]
    assert sent["response_format"]["type"] == "json_schema"
    assert asked["strict"] is True
    assert asked["schema"] == POINT
    assert fields(schema(POINT), GPT, "completion") is None


def test_a_schema_has_one_name():
    names = {fields(schema(POINT), GPT)["response_format"]["json_schema"]["name"] for _ in range(2)}
    assert len(names) == 1


@pytest.mark.parametrize(
    ("constraint", "member"),
    [
        (ConstraintSpec("regex", "a|b"), {"type": "string", "pattern": "^(?:a|b)$"}),
        (ConstraintSpec("choices", '["yes", "no"]'), {"type": "string", "enum": ["yes", "no"]}),
        (schema({"type": "array", "items": {"type": "integer"}}), {"type": "array", "items": {"type": "integer"}}),
    ],
)
def test_what_is_no_object_is_put_into_one(constraint, member):
    lowered = lower(constraint, GPT, "chat")
    assert lowered.wrapped
    asked = lowered.fields["response_format"]["json_schema"]["schema"]
    assert asked == {
        "type": "object",
        "properties": {"answer": member},
        "required": ["answer"],
        "additionalProperties": False,
    }


def test_an_engine_of_the_runtime_is_nobodys_here():
    assert lower(ConstraintSpec("regex", "a", engine="llguidance"), SERVERS["vllm"], "chat") is None
    assert lower(ConstraintSpec("lark", "start: A"), SERVERS["vllm"], "chat") is None


@pytest.mark.parametrize(
    ("profile", "mode", "expected"),
    [
        (GPT, "chat", ("regex", "json_schema", "choices")),
        (GPT, "completion", ()),
        (SERVERS["vllm"], "completion", ("regex", "json_schema", "choices", "gbnf")),
        (SERVERS["llama.cpp"], "completion", ("choices", "gbnf")),
        (SERVERS["compatible"], "chat", ()),
    ],
)
def test_kinds_are_those_with_a_way(profile, mode, expected):
    assert kinds(profile, mode) == expected


# -------------------------------------------------------------------------------------------- the strict subset


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"type": "string", "enum": ["a"]}, {"type": "string", "enum": ["a"]}),
        ({"const": 3}, {"type": "integer", "enum": [3]}),
        ({"enum": ["a", None]}, {"type": ["null", "string"], "enum": ["a", None]}),
        ({"type": ["string", "null"], "pattern": "a"},
         {"anyOf": [{"type": "string", "pattern": "a"}, {"type": "null"}]}),
        ({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}], "default": None, "title": "T"},
         {"title": "T", "anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}),
        ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
    ],
)  # fmt: skip
def test_members_keep_what_they_say(given_, expected):
    whole, wrapped = strictly({"type": "object", "properties": {"m": given_}, "required": ["m"]})
    assert not wrapped
    assert whole["properties"]["m"] == expected
    assert whole["additionalProperties"] is False


def test_the_order_of_members_is_kept():
    members = {name: {"type": "null"} for name in "zay"}
    whole, _ = strictly({"type": "object", "properties": members, "required": ["a", "y", "z"]})
    assert list(whole["properties"]) == list("zay") == whole["required"]


def test_definitions_stand_at_the_root_also_around_what_is_put_into_an_object():
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]}},
            "required": ["next"]}  # fmt: skip
    whole, wrapped = strictly({"$ref": "#/$defs/N", "$defs": {"N": node}})
    assert wrapped
    assert whole["properties"]["answer"] == {"$ref": "#/$defs/N"}
    assert whole["$defs"]["N"]["additionalProperties"] is False


@pytest.mark.parametrize(
    "member",
    [
        {},
        True,
        {"type": "object"},
        {"type": "object", "properties": {"a": {"type": "null"}}},  # may be left out
        {"type": "object", "properties": {}, "additionalProperties": True},
        {"type": "object", "properties": {}, "additionalProperties": {"type": "null"}},
        {"type": "object", "properties": {}, "patternProperties": {"a": {"type": "null"}}},
        {"type": "array"},
        {"type": "array", "items": {"type": "null"}, "uniqueItems": True},
        {"type": "array", "prefixItems": [{"type": "null"}]},
        {"type": "string", "maxLength": 3},
        {"type": "string", "format": "iri"},
        {"oneOf": [{"type": "null"}]},
        {"allOf": [{"type": "null"}]},
        {"not": {"type": "null"}},
        {"$ref": "#"},
        {"$ref": "https://example.com/schema"},
        {"enum": [{"a": 1}]},
        {"enum": []},
        {"type": "integer", "enum": ["a"]},
        {"type": "string", "enum": ["a"], "pattern": "b"},
        {"enum": [str(number) for number in range(MOST_VALUES + 1)]},
        {"type": ["string", "null"], "items": {}},
        {"properties": {}},
    ],
)
def test_what_cannot_be_said_strictly_is_refused(member):
    with pytest.raises(NotStrict):
        strictly({"type": "object", "properties": {"m": member}, "required": ["m"]})
    assert lower(schema(member), GPT, "chat") is None


def test_nesting_has_a_bound():
    deep: object = {"type": "null"}
    for _ in range(12):
        deep = {"type": "array", "items": deep}
    with pytest.raises(NotStrict):
        strictly(deep)


def test_exact_leaves_nothing_to_a_server_that_knows_little():
    assert strictly(POINT, exact=True) == (POINT, False)
    for member in ({"type": "string", "pattern": "a"}, {"type": "array", "items": {"type": "null"}, "minItems": 1}):
        with pytest.raises(NotStrict):
            strictly({"type": "object", "properties": {"m": member}, "required": ["m"]}, exact=True)


# -------------------------------------------------------------------------------------------- unwrapping


@settings(max_examples=50, deadline=None)
@given(st.text(), st.sampled_from([None, 2]), st.booleans(), st.data())
def test_a_text_is_found_in_its_object_and_its_beginning_in_a_part(text, indent, ascii_only, data):
    whole = json.dumps({"answer": text}, indent=indent, ensure_ascii=ascii_only)
    assert unwrap(whole, "text") == text
    cut = whole[: data.draw(st.integers(0, len(whole) - 2))]
    assert text.startswith(beginning(cut, "text"))


@pytest.mark.parametrize("written", ["[1,  2]", '{"a": "}"}', '"x"', "3.50", "null"])
def test_json_is_cut_out_as_it_was_written(written):
    assert unwrap(f' {{ "answer" :  {written} }} ', "json") == written


@pytest.mark.parametrize("text", ["", "Paris", '{"answer": ', '{"other": 1}', "[]", '{"answer": 3}', "7"])
def test_what_is_no_such_object_gives_nothing(text):
    assert unwrap(text, "text") is None


def test_what_was_cut_off_gives_its_beginning():
    assert beginning('{"answer": "Par\\u00', "text") == "Par"
    assert beginning('{"answer": [1, 2', "json") == "[1, 2"
    assert beginning('{"ans', "text") == ""
