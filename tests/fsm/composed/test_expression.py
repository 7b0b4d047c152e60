"""Expressions by themselves: the parts, their matches, and what is wrong said at once."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import umbel as ul
from umbel.fsm.composed import nodes
from umbel.fsm.composed.expression import Expression
from umbel.lang.protocol import ConstraintSpec


@dataclasses.dataclass
class Book:
    title: str


TEXT = "To be, or not to be"


@pytest.mark.parametrize(
    ("expression", "members", "others"),
    [
        (ul.regex(re.compile("a.c # any", re.DOTALL | re.VERBOSE)), ["a\nc"], ["abbc", "a.c # any"]),
        (ul.regex(re.compile("é+", re.IGNORECASE)), ["éÉ"], ["e", ""]),
        (ul.literal("a.c"), ["a.c"], ["abc"]),
        ("<" + ul.choice(["a", "b" + ul.regex("c*")]) + ">", ["<a>", "<b>", "<bcc>"], ["<ac>", "<>", "a"]),
        (re.compile("x") + ul.literal("y").optional(), ["x", "xy"], ["y", "xyy"]),
        (ul.literal("a").repeat(2, 3), ["aa", "aaa"], ["a", "aaaa"]),
        (ul.literal("a").repeat(separator=","), ["", "a", "a,a"], [",", "a,", "aa"]),
        (ul.literal("a").repeat(2, separator=","), ["a,a"], ["", "a"]),
        (ul.substring(TEXT), ["To", "o b", TEXT, "not"], ["", "to or", "tob"]),
        (ul.substring(TEXT, by="words"), ["To", " not to be", " be,"], ["", "T", "o be"]),
        (ul.substring("a\nbb\nc", by="lines"), ["a\nbb\n", "c", "bb\nc"], ["a", "b", ""]),
        (ul.until("</t>"), ["</t>", "<t></t>", "a\n</t>"], ["", "</t>a", "</t></t>"]),
        (ul.json(Book, whitespace="compact"), ['{"title":"a"}'], ['{"title": "a"}']),
    ],
)
def test_a_part_admits_its_texts(expression: Expression, members: list[str], others: list[str]) -> None:
    assert [text for text in members if expression.match(text) is None] == []
    assert [text for text in others if expression.match(text) is not None] == []


CALL = ul.regex("[0-9]+").capture("n")


@pytest.mark.parametrize(
    ("expression", "readings"),
    [
        (
            ul.triggered("<t>", CALL, "</t>"),
            {"": [], "<t": [], "a<t>1</t><t>2</t>b": ["1", "2"], "<t>1": None, "<t></t>": None, "<t>1</t><t>": None},
        ),
        (ul.triggered("<t>", CALL, required=True), {"": None, "a<t>1": ["1"], "<t>1 so": ["1"]}),
        (ul.triggered("<t>", CALL, once=True), {"": None, "a<t>1": "1", "<t>1 so": None}),
        (ul.triggered("<t>", CALL, once=True, required=True), {"": None, "a<t>1": "1"}),
        (
            ul.triggered({"<a>": CALL + "</a>", "<b>": "no"}),
            {"<b>no <a>7</a> <b>no": ["7"], "<b>7": None, "<a>no": None},
        ),
    ],
)
def test_text_is_held_to_a_part_after_a_trigger(expression: Expression, readings: dict[str, Any]) -> None:
    for text, held in readings.items():
        match = expression.match(text)
        if held is None and text != "":
            assert match is None, text
        elif match is not None:
            assert match["n"] == held, text
        else:
            assert text == "", text
            assert held is None


def test_where_several_readings_fit_the_first_is_taken() -> None:
    greedy = ul.regex(".*").capture("a") + ul.regex(".*?").capture("b")
    assert greedy.match("xy").captures == {"a": "xy", "b": ""}  # type: ignore[union-attr]
    options = (ul.literal("a").capture("short") | ul.literal("ab").capture("long")) + ul.regex("b?").capture("rest")
    assert options.match("ab").captures == {"short": "a", "long": None, "rest": "b"}  # type: ignore[union-attr]


def test_a_match_has_texts_objects_and_a_refusal_of_other_names() -> None:
    match = ("Read " + ul.json(Book).capture("book").capture("it")).match('Read {"title": "A"}')
    assert match is not None
    assert match["it"] == match["book"] == '{"title": "A"}'
    assert match.value("it") == Book("A")
    assert "Read" in repr(match)
    with pytest.raises(ul.ParameterError, match=r"captures no 'bok'; it captures \['it', 'book'\]"):
        match["bok"]


class Unwritten(str):
    """A text of someone's own class, whose methods fail."""

    def encode(self, encoding: str = "", errors: str = "") -> bytes:
        raise NotImplementedError


def test_a_text_is_read_without_its_own_methods() -> None:
    match = ul.regex("a+").capture("all").match(Unwritten("aa"))
    assert match is not None
    assert match["all"] == "aa"


@pytest.mark.parametrize(
    ("expression", "spec"),
    [
        (ul.regex("a+").capture("x"), ConstraintSpec("regex", "a+")),
        (ul.choice(["a", "b"]), ConstraintSpec("choices", '["a","b"]')),
        (ul.json({"type": "null"}, whitespace="compact"), ConstraintSpec("json_schema", '{"type": "null"}', "compact")),
    ],
)
def test_a_lone_part_travels_as_the_kind_that_gen_has_for_it(expression: Expression, spec: ConstraintSpec) -> None:
    assert expression.demand().spec == spec


def test_equal_expressions_have_equal_sources_which_read_back() -> None:
    def nested() -> Expression:
        return ul.recursive(lambda e: "a" | "(" + ul.recursive(lambda f: e | "[" + f + "]") + ")")

    assert nested().source == nested().source
    tree = nodes.read(nested().source)
    assert nodes.written(tree) == nested().source
    assert list(tree.rules) == ["r1", "r2"]
    assert nested().match("([[(a)]])") is not None


def leaked() -> Expression:
    kept: list[Expression] = []
    ul.recursive(lambda e: kept.append(e) or "a")  # type: ignore[func-returns-value]
    return kept[0]


def deep() -> Expression:
    expression = ul.literal("a")
    for _ in range(60):
        expression = ("(" + expression + ")") | "b"
    return expression


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        (lambda: ul.regex("a") + 3, ul.ParameterError, r"\+: 3 is no part"),
        (lambda: ul.capture("\ud800", "a"), ul.ParameterError, "a variable name has whole characters, and name="),
        (lambda: ul.choice(["a", 3]), ul.ParameterError, r"choice\(options\): option 1: 3 is no part"),
        (lambda: ul.regex("a") | ul.gen("x"), ul.ParameterError, r"\.capture\("),
        (lambda: ul.json(int) + int, ul.ParameterError, r"write ul\.json\(int\)"),
        (lambda: ul.choice("ab"), ul.ParameterError, "needs a list"),
        (lambda: ul.choice([]), ul.ParameterError, "admits nothing"),
        (lambda: ul.json(None), ul.ParameterError, "write a schema"),
        (lambda: ul.regex("a").repeat(3, 2), ul.ParameterError, r"write repeat\(2, 3\)"),
        (lambda: ul.regex("a").repeat(-1), ul.ParameterError, "low"),
        (lambda: ul.regex("a").capture(""), ul.ParameterError, "a variable name"),
        (lambda: bool(ul.regex("a")), ul.ParameterError, "is not None"),
        (lambda: ul.regex("a").match(3), ul.ParameterError, "write a str"),  # type: ignore[arg-type]
        (lambda: ul.substring("a", by="letters"), ul.ParameterError, "by='letters'"),  # type: ignore[arg-type]
        (lambda: ul.substring("ab " * 2_000), ul.ParameterError, 'write by="words"'),
        (lambda: ul.triggered({"<a": "x", "<ab": "y"}), ul.ParameterError, "'<ab' contains '<a'"),
        (lambda: ul.triggered("<a"), ul.ParameterError, "nothing is said"),
        (lambda: ul.until(""), ul.ParameterError, "write a mark"),
        (lambda: ul.literal("\ud800"), ul.ConstraintError, "surrogate"),
        (lambda: ul.recursive(3), ul.ParameterError, "takes a function"),  # type: ignore[arg-type]
        (lambda: leaked().match("a"), ul.ConstraintError, r"outside of it; use what ul\.recursive"),
        (lambda: deep().match("b"), ul.ConstraintError, "more than 100 deep"),
        (lambda: ul.recursive(lambda e: e).match(""), ul.ConstraintError, "admits nothing"),
        (lambda: ul.regex(r"\bx").match("x"), ul.ConstraintError, r"regex '.*position 0"),
        (lambda: ul.json({"type": "strin"}).match("1"), ul.ConstraintError, "json, #/type"),
    ],
)
def test_what_is_wrong_is_said(wrong: Callable[[], object], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        wrong()


def test_a_source_from_elsewhere_is_checked() -> None:
    for source, words in (
        ("[]", "Expected `object`"),
        ('{"start": {"type": "rule", "rule": "r"}}', "outside of it"),
        ('{"start": {"type": "repeat", "body": {"type": "text", "text": "a"}, "least": -1}}', "Expected `int` >= 0"),
        (f'{{"start": {{"type": "text", "text": "{"a" * (256 << 10)}"}}}}', "bytes"),
    ):
        with pytest.raises(ul.ConstraintError, match=words):
            nodes.read(source)


def test_a_text_that_can_be_read_in_too_many_ways_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbel.fsm.composed.reading.MOST_STEPS", 1_000)
    several = ul.regex("a+").capture("x").repeat() + ul.regex("a*b").capture("y")
    assert several.match("aab")["y"] == "b"  # type: ignore[index]
    with pytest.raises(ul.ConstraintError, match="too many steps"):
        several.match("a" * 1_000 + "b")
