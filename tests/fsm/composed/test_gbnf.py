"""Expressions as GBNF grammars: llguidance admits exactly the texts that `match` of the expression does.

So a server that takes such grammars (llama.cpp, vLLM, SGLang) enforces an expression, with JSON and recursion in it.
llguidance is given the grammar character by character, as llama.cpp and XGrammar read it: its own converter makes words
of rules, of which it takes the longest one at each place.
"""

import dataclasses
import itertools
import json
import random
import re
from collections import Counter

import pytest
import umbel as ul
from umbel.fsm.composed.expression import Expression
from umbel.fsm.engines.gbnf import MOST_BYTES, gbnf_of
from umbel.fsm.errors import Unsupported
from umbel.fsm.language import ANY, AnyOrder, Chars, Concat, Dfa, Grammar, Language, Literal, Repeat, Spelled, Union
from umbel.interpreter.guarantees import expressions
from umbel.lang.errors import ConstraintError

from .random_expressions import built, composition, member, mutated

pytest.importorskip("llguidance")


@dataclasses.dataclass
class Book:
    title: str
    year: int = 0
    tags: list[str] = dataclasses.field(default_factory=list)


_TOKENS = re.compile(r'"((?:\\.|[^"\\])*)"|\[((?:\\.|[^\]\\])*)\]|::=|root')


def lark_of(grammar: str) -> str:
    """The same grammar for llguidance, a terminal for each character."""

    def respelled(token: re.Match[str]) -> str:
        if token[1] is not None:
            characters = [f'"{each}"' for each in re.findall(r"\\u....|\\.|[^\\]", token[1])]
            return f"({' '.join(characters)})" if characters else '""'
        return f"/[{token[2]}]/" if token[2] is not None else {"::=": ":", "root": "start"}[token[0]]

    return "%llguidance {}\n" + _TOKENS.sub(respelled, grammar)


def admits(grammar: str, text: str) -> bool:
    return expressions.walk("lark", lark_of(grammar), text).accepted == len(text)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled(4)
def test_random_expressions_have_the_same_texts_as_their_grammars(seed: int) -> None:
    met: Counter[str] = Counter()
    for number in range(15):
        dice = random.Random(7_000 * seed + number)
        part = composition(dice, (f"c{count}" for count in itertools.count()))
        expression = built(part)
        grammar = expressions.as_gbnf(expression.source)
        if grammar is None:
            met["none"] += 1
            continue
        for index in range(10):
            text = member(dice, part)
            if index % 2:
                text = mutated(dice, text)
            wanted = expression.match(text) is not None
            assert admits(grammar, text) == wanted, (part, text, grammar)
            met["admitted" if wanted else "refused"] += 1
    assert met["admitted"] > 40
    assert met["refused"] > 20
    assert met["none"] <= 3


NESTED = ul.recursive(lambda e: "(" + (ul.json({"type": "integer"}) | e) + ")")
TALK: dict[str, tuple[Expression, list[str], list[str]]] = {
    "json in text": (
        "Books: " + ul.json(Book).repeat(1, 2, separator="; "),
        [
            'Books: {"title": "A \\"quoted\\" é", "year": 1}',
            'Books: {"title": "", "year": 0, "tags": ["x", "\\u0001"]}; {"title": "B"}',
        ],
        ['Books: {"year": 1}', 'Books: {"title":"A"}', 'Books: {"title": "A"}; ', 'Books: {"title": "A\n"}'],
    ),
    "members in any order": (
        ul.json({"properties": {"a": {"type": "boolean"}, "b": {"const": 1}}, "required": ["b"]}),
        ['{"b": 1}', '{"a": true, "b": 1}', '{"b": 1, "a": false}', '{"b": 1, "c": [null, {"d": -1.5e3}]}'],
        ['{"a": true}', '{"b": 2}', '{"b": 1, "b": 1}', '{"b": 1,}'],
    ),
    "recursion": (NESTED, ["(7)", "((-12))", "(((0)))"], ["()", "((1)", "(01)", "7"]),
    "thoughts first": (
        ul.until("</think>") + "\n" + ul.choice(["yes", "no"]),
        ["</think>\nyes", "a < b</think>\nno", "</thin</think>\nyes"],
        ["yes", "</think>yes", "</think>\nmaybe", "</think></think>\nno"],
    ),
    "an excerpt": (
        ul.substring("the cat sat", by="words") + ".",
        ["the cat.", " sat.", "the cat sat."],
        ["cat the.", ".", "sat."],
    ),
    "odd characters": (
        ul.literal('"\\[]^-\t\x07') + ul.regex(r'[\]\\^"\-\n\x01é-ü😀-😂]{1,3}'),
        ['"\\[]^-\t\x07]', '"\\[]^-\t\x07-\n"', '"\\[]^-\t\x07😁é\x01'],
        ['"\\[]^-\t\x07', '"\\[]^-\t\x07a', '"\\[]^-\t\x07😃'],
    ),
}


@pytest.mark.parametrize("name", TALK)
def test_a_grammar_admits_what_match_does(name: str) -> None:
    expression, members, others = TALK[name]
    grammar = expressions.as_gbnf(expression.source)
    assert grammar is not None
    assert grammar.startswith("root ::= ")
    for text in (*members, *others):
        assert (expression.match(text) is not None) == (text in members), text
        # `match` reads JSON with any blanks; what is sent admits the spelling that a runtime writes.
        assert admits(grammar, text) == (text in members), (text, grammar)


def accepted(language: Language, text: str) -> bool:
    return admits(gbnf_of(Grammar(language)), text)


def test_every_kind_of_node_is_written() -> None:
    either = Dfa((False, True), (((((97, 98),), 1),), ((((97, 97),), 0),)))
    quoted = Spelled(Concat((Repeat(Chars(((9, 10), (34, 34), (97, 98)))), Union((Literal(b"\\"), Literal(b"x"))))))
    members = AnyOrder((Literal(b"a"), Literal(b"b")), Literal(b","), Literal(b"o"), required=(1,))
    cases: list[tuple[Language, list[str], list[str]]] = [
        (either, ["a", "b", "aab"], ["", "aa", "ba"]),
        (Spelled(either), ["a", "aab"], ["aa"]),
        (quoted, ["\\\\", "\\n\\tax", '\\"x'], ["\\", "\nx", '"x']),
        (members, ["b", "a,b", "b,a", "o,b,o", "b,o,a"], ["a", "o", "a,a,b", "b,", ""]),
        (Repeat(Literal(b"a"), 2, 3), ["aa", "aaa"], ["a", "aaaa"]),
        (Repeat(Chars(ANY.ranges), 1), ["\x00", "é\n\U0010ffff"], [""]),
    ]
    for language, members_of, others in cases:
        for text in (*members_of, *others):
            assert accepted(language, text) == (text in members_of), (language, text)


def test_what_has_no_grammar_is_said_by_none() -> None:
    assert expressions.as_gbnf((ul.choice(["a" * 40_000, "b" * 40_000]) + "c").source) is None
    with pytest.raises(Unsupported, match="may be empty"):
        gbnf_of(Grammar(Repeat(Repeat(Literal(b"a"), 0, 1))))
    with pytest.raises(Unsupported, match="more than 1000"):
        gbnf_of(Grammar(Repeat(Literal(b"a"), 0, 5_000)))
    with pytest.raises(ConstraintError, match="begins with itself"):
        expressions.as_gbnf(ul.recursive(lambda e: "a" | e + "b").source)
    assert MOST_BYTES == 64 << 10


def test_a_grammar_is_json_free_of_surprises() -> None:
    """Rules are named by letters and digits, which every reader takes, and no line is empty."""
    grammar = expressions.as_gbnf(TALK["json in text"][0].source)
    assert grammar is not None
    names = [line.partition(" ::= ")[0] for line in grammar.splitlines()]
    assert all(name.isalnum() and name.islower() for name in names)
    assert len(names) == len(set(names))
    assert json.loads(json.dumps(grammar)) == grammar
