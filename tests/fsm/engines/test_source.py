"""GBNF grammars become Lark grammars of the same language."""

import pytest
from umbel.fsm.engines.source import lark_of_gbnf
from umbel.fsm.errors import ConstraintRefused
from umbel.interpreter.guarantees import expressions
from umbel.lang.errors import ConstraintError
from umbel.lang.generation import demand_of
from umbel.lang.protocol import ConstraintSpec
from umbel.srt.constraints.compiler import Compiled, Refused, compile_constraint

pytest.importorskip("llguidance")

JSON = r"""
# objects and arrays of JSON
root   ::= object
value  ::= object | array | string
         | [0-9]+
object ::= "{" (string ":" value ("," string ":" value)*)? "}"
array  ::= "[" (value ("," value)*)? "]"
string ::= "\"" [a-z\-]* "\""
"""


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        ('root ::= "yes" | "no"', ["yes", "no"], ["", "yesno", "maybe"]),
        ('root ::= "a"\n  | "b"\n | [c/]', ["a", "b", "c", "/"], ["d", "ab"]),
        (r"root ::= number{3}" + "\n" + r"number ::= [0-9\-]", ["1-2"], ["12", "1-23"]),
        (r'root ::= "\u00e9\x41\\x41"', ["éA\\x41"], ["éAA"]),
        (r"root ::= [\u4e00-\u9fff]{2,4}", ["中文"], ["中", "ab"]),
        (r'root ::= "\U0001F600"', ["😀"], ["\U0001f601"]),
        (r'root ::= "# no comment" [^\n\"]* # a comment', ["# no comment", "# no comment here"], ['# no comment"', ""]),
        ('root ::= "(" inner-most ")"\ninner-most ::= root | ""', ["()", "((()))"], ["(", "())"]),
        ('root ::= ("ab" | "c")? [^x]+', ["abz", "z"], ["", "x"]),
        (JSON, ['{"a-b":["c",{}]}', "{}", '{"a":12}'], ["[]", '{"A":1}']),
    ],
)
def test_a_grammar_keeps_its_language(grammar, texts, others):
    for text in texts:
        assert expressions.walk("gbnf", grammar, text).accepted == len(text)
    for text in others:
        assert expressions.walk("gbnf", grammar, text).accepted != len(text)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('rule ::= "a"', "root"),
        ("root ::= missing", "'missing' not found"),
        ("root ::= (", r"Expected '\)' at line 1"),
        ('root ::= "a', "end of input"),
        ("root ::= 'a'", "Expected name at line 1"),
        (r'root ::= "\ud800"', "no character"),
        ("root ::= " + '("a" | "c" ' * 65 + '"b"' + ")*" * 65, "nested too deeply: at most 64 groups"),
        ("root ::= " + "(" * 5000, "nested too deeply"),
        ('root ::= "a" | unknown' + "x" * 100_000, "Rule 'unknownx"),
    ],
)
def test_what_is_no_grammar_is_refused_in_words(grammar, message):
    answer = compile_constraint(ConstraintSpec("gbnf", grammar), "auto")
    if isinstance(answer, Refused):
        assert answer.message.startswith("grammar: ")
        assert len(answer.message) < 2_000
    with pytest.raises(ConstraintError, match=message) as raised:
        expressions.check("gbnf", grammar)
    assert len(str(raised.value)) < 2_000


def test_groups_that_nest_64_deep_are_converted():
    deep = '("a" | "c" ' * 64 + '"b"' + ")*" * 64
    assert lark_of_gbnf(f'root ::= {deep} [(] "(((" # (((').count('"c"') == 64


def test_the_runtime_enforces_the_converted_grammar():
    compiled = compile_constraint(ConstraintSpec("gbnf", JSON), "auto")
    assert isinstance(compiled, Compiled)
    assert (compiled.constraint.engine, compiled.constraint.kind) == ("llguidance", "lark")
    assert compiled.constraint.data.decode() == lark_of_gbnf(JSON)


@pytest.mark.parametrize("argument", ["ebnf", "grammar"])
def test_a_rule_with_two_colons_is_gbnf_and_all_else_lark(argument):
    def kind(text: str) -> str:
        return demand_of({argument: text}).spec.kind

    assert kind('root ::= "a"') == kind('\n  value   ::= "1"\nroot ::= value') == "gbnf"
    assert kind('start: "a"') == kind('start: NAME "::=" NAME\nNAME: /[a-z]+/') == "lark"


def test_a_missing_converter_is_a_missing_engine(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance.gbnf_to_lark", None)
    with pytest.raises(ConstraintRefused, match="pip install llguidance"):
        lark_of_gbnf('root ::= "a"')
