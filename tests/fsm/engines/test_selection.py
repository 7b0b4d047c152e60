"""Other implementations as oracles: the same texts, and the same masks where both enforce them."""

import importlib
import itertools
import json
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from umbel.fsm.automaton.automaton import DEAD, Automaton
from umbel.fsm.engines.llguidance import Ends, LlguidanceState
from umbel.fsm.engines.llguidance_tokens import LlguidanceTokens, MatcherLimits, rehearse
from umbel.fsm.engines.selection import Engines, TextConstraint, TextState, compile_source
from umbel.fsm.engines.source import Engine, KeyOrder, MissingEngine, Source
from umbel.fsm.errors import ConstraintRefused, LimitExceeded, Unsupported
from umbel.fsm.language import Grammar
from umbel.fsm.tokens.constraint import JumpCounters
from umbel.fsm.tokens.masks import Masks
from umbel.fsm.tokens.vocabulary import Vocabulary, unpack

from ..regex.test_random import PLAIN, trees
from ..tokens.test_constraint import Pairs
from ..vocabularies import SINGLE

FUEL = 1_000_000
WORDS = [b" the", b"name", b'": ', b'", "', b"ab", b"12", b"},", b' "', "é".encode(), b"true", b"null", b"\\n", b"a\n"]
TABLE = [*SINGLE, *WORDS, b"b", b"</s>", b"<end>"]  # "b" has two ids
VOCABULARY = Vocabulary(TABLE, [len(TABLE) - 2, len(TABLE) - 1], size=len(TABLE) + 5)
ENGLISH = Pairs([(b"n", b"a"), (b"m", b"e"), (b"na", b"me"), (b'"', b":"), (b" ", b'"'), (b'"', b","), (b"{", b'"')])

REGEXES = [
    r"a(bc)?",
    r"[0-9]{5}(-[0-9]{4})?",
    r"(1|10|positive|positively)",
    r"[a-z]{2,5}@[a-z]+\.(com|org)",
    r"(é|è|ab)*x?",
    r"[^,\n]*,[^,\n]*",
    r'"(ab|12)*"',
    r"(true|null|name)( the)?",
    r"(0|1)*1(0|1){3}",
]
# In the spelling that is common to both: strings without escapes, no free numbers, closed objects.
SCHEMAS: list[dict[str, object]] = [
    {"type": "object", "properties": {"name": {"enum": ["ab", "a", "the"]}, "b": {"type": "boolean"}},
     "required": ["name", "b"], "additionalProperties": False},
    {"type": "array", "items": {"enum": [1, 12, None, "é"]}, "minItems": 1, "maxItems": 3},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]{1,3}$"}, "b": {"const": "12"}},
     "required": ["a"], "additionalProperties": False},
    {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^ab*$"}]},
]  # fmt: skip


@pytest.fixture(scope="module")
def engines() -> Engines:
    return Engines(Masks(VOCABULARY))


def mask_of(state: TextState) -> list[int]:
    assert state.prepare(FUEL) is not None
    return unpack(state.mask).tolist()


def agree(ours: list[int], theirs: list[int]) -> bool:
    """Where llguidance knows the canonical token, it allows that one only; we allow whatever spells the text."""
    return theirs == ours or (len(theirs) == 1 and theirs[0] in ours)


def walks(first: TextState, second: TextState, *, seed: int, most: int = 12) -> Iterator[tuple[list[int], list[int]]]:
    """Both masks along a random text."""
    choose = random.Random(seed)
    for _ in range(most):
        one, other = mask_of(first), mask_of(second)
        yield one, other
        token = choose.choice(one)
        if token in VOCABULARY.eos_ids:
            return
        first.advance(token)
        second.advance(token)
        if first.finished:
            assert second.finished
            return


@pytest.mark.parametrize("regex", REGEXES)
def test_llguidance_and_we_allow_the_same_tokens_of_a_regex(engines: Engines, regex: str) -> None:
    source = Source("regex", regex)
    ours, theirs = engines.open(source, "fsm"), engines.open(source, "llguidance")
    for seed in range(8):
        for one, other in walks(ours.begin(), theirs.begin(), seed=seed):
            assert agree(one, other)


@pytest.mark.parametrize("whitespace", ["spaced", "compact"])
@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_llguidance_and_we_allow_the_same_tokens_of_a_schema(
    engines: Engines, schema: dict[str, object], whitespace: str
) -> None:
    source = Source("json_schema", json.dumps(schema), whitespace)  # type: ignore[arg-type]
    ours, theirs = engines.open(source, "fsm"), engines.open(source, "llguidance")
    for seed in range(8):
        for one, other in walks(ours.begin(), theirs.begin(), seed=seed, most=40):
            assert agree(one, other)


@pytest.mark.parametrize("engine", ["interegular", "outlines-core"])
@pytest.mark.parametrize("regex", REGEXES)
def test_other_readings_of_a_regex_are_the_same_language(engine: str, regex: str) -> None:
    """Walked together: no text of up to twelve bytes tells the two automata apart."""
    ours, theirs = (compile_source(Source("regex", regex), name) for name in ("fsm", engine))  # type: ignore[arg-type]
    assert isinstance(ours, Grammar)
    assert isinstance(theirs, Grammar)
    one, other = Automaton(ours), Automaton(theirs)
    waiting, seen = [(one.start, other.start)], {(one.start, other.start)}
    for _ in range(12):
        pairs = [(one.step(a, byte), other.step(b, byte)) for a, b in waiting for byte in range(1, 256)]
        assert all((a == DEAD) == (b == DEAD) for a, b in pairs)
        waiting = [pair for pair in dict.fromkeys(pairs) if pair[0] != DEAD and pair not in seen]
        seen.update(waiting)
    assert all(one.accepting(a) == other.accepting(b) for a, b in seen)


def test_outlines_core_reads_compact_json() -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})
    grammar = compile_source(Source("json_schema", schema, "compact"), "outlines-core")
    assert isinstance(grammar, Grammar)
    automaton = Automaton(grammar)
    assert automaton.accepting(automaton.run(automaton.start, b'{"a":true}'))
    with pytest.raises(Unsupported, match="json_whitespace='compact'"):
        compile_source(Source("json_schema", schema), "outlines-core")


EXPRESSION = r"""
start: sum
sum: product ("+" product)*
product: /[0-9]+/ | "(" sum ")"
"""


def test_lark_grammars_are_llguidances(engines: Engines) -> None:
    source = Source("lark", EXPRESSION)
    assert compile_source(source) == source
    constraint = engines.open(source)
    assert constraint.minimum_tokens == 1
    state = constraint.begin()
    for byte in b"((1+2)":
        assert byte in mask_of(state)
        assert not state.accepting
        state.advance(byte)
    assert VOCABULARY.spell(state.closing_tokens()) == b")"
    with pytest.raises(Unsupported, match="Lark"):
        compile_source(source, "fsm")


def test_a_text_of_llguidance_rolls_back_and_copies(engines: Engines) -> None:
    state = engines.open(Source("lark", EXPRESSION)).begin()
    before = mask_of(state)
    for byte in b"(1":
        state.advance(byte)
    other = state.copy()
    other.advance(ord(")"))
    assert other.accepting
    other.advance(VOCABULARY.eos_ids[1])
    assert other.finished
    other.rollback(1)
    assert not other.finished
    assert set(VOCABULARY.eos_ids) <= set(mask_of(other))
    state.rollback(2)
    assert mask_of(state) == before
    with pytest.raises(ConstraintRefused, match="not allowed here"):
        state.advance(ord(")"))
    assert mask_of(state) == before


AMBIGUOUS = Source("lark", 'start: s\ns: s s | "a" | "b" | s "c" s')


@pytest.mark.parametrize(
    ("limits", "source", "text"),
    [
        (MatcherLimits(row_items=40), AMBIGUOUS, b"ab" * 20),
        (MatcherLimits(step_items=40), AMBIGUOUS, b"ab" * 20),
        (MatcherLimits(step_fuel=50), Source("regex", "(a|b)*a(a|b){9}c"), b"ab" * 20),
        (MatcherLimits(lexer_states=40), Source("regex", "(a|b)*a(a|b){9}c"), b"ababbabaaababbbabaaaababbb" * 20),
    ],
)
def test_a_text_that_goes_beyond_llguidances_limits_ends_with_an_error(
    engines: Engines, limits: MatcherLimits, source: Source, text: bytes
) -> None:
    tokens = LlguidanceTokens(VOCABULARY, engines.masks.trie, None, limits)
    state = LlguidanceState(
        tokens.matcher(source), tokens, Ends(VOCABULARY, engines.masks.trie), None, JumpCounters(), b""
    )

    def write() -> None:
        for byte in text:
            assert state.prepare(FUEL) is not None
            state.advance(byte)

    with pytest.raises(LimitExceeded, match="llguidance: "):
        write()


def test_a_mask_of_llguidance_takes_fuel_by_its_cpu_time(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    state = engines.open(AMBIGUOUS).begin()
    clock = itertools.count(0.0, 0.01)
    monkeypatch.setattr("umbel.fsm.engines.llguidance.time.thread_time", lambda: next(clock))
    assert state.prepare(250) == 250 - 1000  # 10 ms: the step has no fuel left for others, and owes some
    assert state.prepare(0) == 0, "it is made"
    clock = itertools.count(0.0, 1.0)
    state.advance(ord("a"))
    with pytest.raises(LimitExceeded, match="less ambiguous"):
        state.prepare(250)


def test_llguidance_reads_with_limits_wherever_it_is_asked(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    library = importlib.import_module("llguidance")
    given: list[object] = []

    class Matcher:
        grammar_from_regex = staticmethod(library.LLMatcher.grammar_from_regex)
        made = library.LLMatcher

        def __new__(cls, *arguments: object, **options: object) -> Any:
            given.append(options.get("limits"))
            return cls.made(*arguments, **options)

    monkeypatch.setattr(library, "LLMatcher", Matcher)
    source = Source("regex", "a+")
    engines.open(source, "llguidance")
    rehearse(source)
    assert len(given) == 2
    assert all(isinstance(limits, library.LLParserLimits) for limits in given)
    assert {limits.max_lexer_states for limits in given} == {MatcherLimits().lexer_states}  # type: ignore[attr-defined]


def test_llguidance_forces_canonical_tokens() -> None:
    engines = Engines(Masks(ENGLISH.vocabulary), encode=ENGLISH.encode)
    schema = {
        "type": "object",
        "properties": {"name": {"type": "boolean"}},
        "required": ["name"],
        "additionalProperties": False,
    }
    for engine in ("fsm", "llguidance"):
        state = engines.open(Source("json_schema", json.dumps(schema)), engine).begin()  # type: ignore[arg-type]
        forced = state.forced_tokens()
        assert [ENGLISH.vocabulary.token_bytes(token) for token in forced] == [b'{"', b"name", b'":', b" "]
        assert mask_of(state) == forced[:1]
        for token in forced:
            state.advance(token)
        assert state.forced_tokens() == []
        for byte in b"true":
            assert byte in mask_of(state)
            state.advance(byte)
        assert state.forced_tokens() == [ord("}")]
        state.advance(ord("}"))
        assert state.finished


ENGINES: tuple[Engine, ...] = ("auto", "fsm", "llguidance", "interegular", "outlines-core")
# Read differently, or refused, by one syntax or another.
DIALECTS = [
    "a++a", "a*+a", "a?+a", "a{1,2}+a", "[[:alpha:]]+", "[[:^alpha:]]", "[a&&b]+", "[a--b]+", "[a~~b]+", "[[a]b]+",
    r"\w+", r"\W", r"\s*", r"\S", r"\d+", r"a\bc", r"a\Z", r"a\z", "a$", "(?:a$|b)\n?", "^a|b$", "a{,2}", "a{,}",
    "a{2",
    "a{1}{2}", "a**", ".", "(?s:.)", "(?i:k)", "(?i:[^k])", "(?x)a b", "(?>a+)a", r"(a)\1", "(?<=a)b", "(?<a>b)",
    "(?P<a>b)", r"\x41", r"\x{41}", r"\u0041", r"\pL+", r"\h", r"\R", r"\Qa+\E", r"[\w-]+", r"[]a]", r"[^]a]", "a|",
    "()",
    r"\0", r"\101", "(?-u:a)", "(?U)a", "(?#c)a", "(?a:\\w)", "[ -~]", "\t#\"-/",
]  # fmt: skip
TEXTS = [
    "", "a", "aa", "aaa", "aaaa", "b", "ab", "ac", "c", "a\n", "b\n", "\n", "a]", "b]", "&", "a&", "-", "[", "[]", ":]",
    "l]", "k", "K", "\u212a", "A", "é", "²", "٣", "_", " ", "\x1c", "\u2028", "\ufeff", "a+", "+", "a++a", "{", "a{2",
    "a{,}",
    "z", "Z", "h", "R", "Q", "Qa+E", "pL", "\0", "\t#\"-/", "0", "12", "a b", "ab]", "a~", "]", "x{41}", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def of_bytes() -> Engines:
    return Engines(Masks(Vocabulary([*SINGLE, b""], [256])))


def takes(constraint: TextConstraint, text: str) -> bool:
    """Byte by byte: over a vocabulary of bytes, so that no longer token is the canonical one."""
    state = constraint.begin()
    for byte in text.encode():
        if state.prepare(FUEL) is None or not state.mask[byte >> 5] >> np.uint32(byte & 31) & 1:
            return False
        state.advance(byte)
    return state.accepting


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("regex", DIALECTS)
@pytest.mark.sampled(5)
def test_every_engine_takes_what_python_matches_or_refuses_the_expression(
    of_bytes: Engines, regex: str, engine: Engine
) -> None:
    if engine == "interegular" and any(large in regex for large in (r"\w", r"\W", r"\pL")):
        pytest.skip("it lists every character of a class: seconds")
    try:
        constraint = of_bytes.open(Source("regex", regex), engine)
    except ConstraintRefused:
        return
    if regex == r"\pL+":  # of ours: `re` has no properties
        assert [text for text in TEXTS if takes(constraint, text)] == [text for text in TEXTS if text.isalpha()]
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sets within sets
        matched = re.compile(regex)
    texts = TEXTS if engine != "outlines-core" else [text for text in TEXTS if "\0" not in text]  # its end of text
    assert [text for text in texts if takes(constraint, text)] == [text for text in texts if matched.fullmatch(text)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("regex", ["a++a", "[[:alpha:]]+", r"a\bc", r"(a)\1", "(?>a)a", "(?<=a)b"])
def test_an_expression_that_our_parser_refuses_is_refused_with_place_and_remedy(
    of_bytes: Engines, regex: str, engine: Engine
) -> None:
    with pytest.raises(Unsupported, match=r"^position \d+: .* is not supported; .") as refusal:
        of_bytes.open(Source("regex", regex), engine)
    assert refusal.value.keyword


@pytest.mark.parametrize(  # large classes are interegular's slow side
    "engine", ["llguidance", pytest.param("outlines-core", marks=pytest.mark.nightly)]
)
@settings(max_examples=40, deadline=None)
@given(pattern=trees(PLAIN, looking=False))
def test_random_expressions_mean_the_same_to_every_engine(of_bytes: Engines, engine: Engine, pattern: str) -> None:
    try:
        constraint = of_bytes.open(Source("regex", pattern), engine)
    except ConstraintRefused:
        return
    for text in ["", "a", "b", "ab", "ba", "\n", "a\n", "aa", "abab", "A"]:
        assert takes(constraint, text) == bool(re.fullmatch(pattern, text)), (pattern, text)


@pytest.mark.parametrize("engine", ["auto", "llguidance"])
@pytest.mark.parametrize(
    ("pattern", "accepted", "refused"),
    [(r"^\w+$", "ab", "é"), (r"^[^\s]$", "a", "\ufeff"), ("^a|b$", "ac", "c"), (r"\d", "a1", "٣"), ("^.$", "a", "\\n")],
)
def test_patterns_of_schemas_are_ecmascripts_with_every_engine(
    of_bytes: Engines, engine: Engine, pattern: str, accepted: str, refused: str
) -> None:
    constraint = of_bytes.open(Source("json_schema", json.dumps({"type": "string", "pattern": pattern})), engine)
    assert takes(constraint, f'"{accepted}"')
    assert not takes(constraint, f'"{refused}"')


@pytest.mark.parametrize(
    "more",
    [
        {"pattern": "^[[:alpha:]]+$"},
        {"format": "hostname"},
        {"patternProperties": {"[[:alpha:]]": {}}, "type": "object"},
    ],
    ids=["pattern", "format", "patternProperties"],
)
def test_schemas_that_llguidance_reads_otherwise_do_not_fall_to_it(of_bytes: Engines, more: dict[str, object]) -> None:
    large = {"type": "integer", "multipleOf": 1_000_003}
    assert compile_source(Source("json_schema", json.dumps(large))) == Source("json_schema", json.dumps(large))
    with pytest.raises(Unsupported) as refusal:
        of_bytes.open(Source("json_schema", json.dumps({"anyOf": [large, {"type": "string", **more}]})))
    assert refusal.value.where.startswith("#/anyOf/")


def test_a_constraint_that_is_none_is_refused(engines: Engines) -> None:
    with pytest.raises(ConstraintRefused):
        engines.open(Source("lark", "start: %%"))
    with pytest.raises(ConstraintRefused):
        engines.open(Source("json_schema", "{"), "llguidance")
    with pytest.raises(ConstraintRefused):
        engines.open(Source("regex", "a("), "llguidance")
    for engine in ("interegular", "outlines-core"):
        with pytest.raises(Unsupported):
            compile_source(Source("regex", r"(a)\1"), engine)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("engine", "module"),
    [("llguidance", "llguidance"), ("outlines-core", "outlines_core"), ("interegular", "interegular")],
)
def test_an_engine_that_is_not_installed_names_its_package(
    monkeypatch: pytest.MonkeyPatch, engine: str, module: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    engines = Engines(Masks(VOCABULARY))
    with pytest.raises(MissingEngine, match=f"pip install {engine}"):
        engines.open(Source("regex", "a"), engine)  # type: ignore[arg-type]


def test_no_engine_allows_control_tokens_or_padding(engines: Engines) -> None:
    for engine in ("fsm", "llguidance"):
        state = engines.open(Source("regex", "(?s:.)*"), engine).begin()  # type: ignore[arg-type]
        tokens = np.array(mask_of(state))
        assert set(VOCABULARY.eos_ids) <= set(tokens.tolist())
        assert not (tokens >= len(TABLE)).any()


OPEN = '{"properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"], "additionalProperties": false}'


@pytest.mark.parametrize(("order", "reached"), [("declared", False), ("any", True)])
def test_members_come_in_the_order_that_was_asked_for(order: KeyOrder, reached: bool) -> None:
    compiled = compile_source(Source("json_schema", OPEN, key_order=order))
    assert isinstance(compiled, Grammar)
    automaton = Automaton(compiled)
    assert automaton.accepting(automaton.run(automaton.start, b'{"a": 1, "b": 2}'))
    assert (automaton.run(automaton.start, b'{"b": 2, "a": 1}') >= 0) == reached


def test_engines_that_know_one_order_of_members_refuse_another() -> None:
    with pytest.raises(Unsupported, match="leave json_key_order or constraint_engine out"):
        compile_source(Source("json_schema", OPEN, key_order="any"), "llguidance")


def test_the_oracles_are_loaded_when_one_is_asked_for_by_name() -> None:
    code = """
import sys
from umbel.fsm.engines.selection import compile_source
from umbel.fsm.engines.source import Source

for engine in ("auto", "fsm", "llguidance"):
    compile_source(Source("regex", "[ab]{3}"), engine)
print([name for name in ("umbel.fsm.engines.oracles", "interegular", "outlines_core") if name in sys.modules])
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
