"""The syntax of `re`, construct by construct, and what is refused where."""

import itertools
import re
import warnings

import pytest
from umbel.fsm.algebra import ANY_TEXT
from umbel.fsm.boolean.resolution import resolve
from umbel.fsm.errors import ConstraintRefused, LimitExceeded, Limits, Unsupported
from umbel.fsm.language import EMPTY_TEXT, NOTHING, Grammar, Language, Literal, Repeat
from umbel.fsm.regex.parser import parse_regex, search_regex

from ..matcher import matches

LETTERS = "ab-]^\\{}1,\n\tAé ſ#"
TEXTS = ["", *LETTERS, *map("".join, itertools.product("ab\n-]{1}, A", repeat=2)), "aaa", "a{1}", "a{1,2", "a b", "aba"]

PATTERNS = [
    "", "a", "ab|ba", "a|", "()", "(a)(b)", "(?:a|b)b", "(?P<name>a)b", "a(?#comment)b", "a(?#comment)*", ".", "..",
    "(?s).", "(?s:.)a", "(?-s:.)", "(?s:(?-s:.).)", "a*", "a+", "a?", "a*?", "a+?b", "a??b", "a{2}", "a{1,}", "a{,2}",
    "a{0}", "a{1,2}?", "(ab?)*", "(a{2}){1,2}", "a{,}", "a{", "a{1", "a{1,2", "a{}", "a{x}", "{", "a{-1}", "}", "]",
    "a{1}b{1}", "a{01}", "[ab]", "[^ab]", "[a-b]", "[]a]", "[^]a]", "[-a]", "[a-]", r"[a\-b]", r"[\]]", r"[\^a]",
    "[a^]", r"[\d]", r"[\D]", r"[^\W]", r"[\w-]", r"[a\s]", r"[\x61]", r"[\101]", r"[\n\t]", r"[\b]", "[.]", "[(]",
    "[a|b]", "[{]", "[$]", "[#]", "[--a]", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"(?a)\w", r"(?a:\W)", r"(?a)\s",
    r"\.", "\\\\", r"\-", r"\ ", r"\]", r"\{", r"\#", r"\x61", r"\u0061", r"\U00000061", r"\N{LATIN SMALL LETTER A}",
    r"\n", r"\t", r"\07", r"\0", r"\141", r"\é", "é", "(?i)a", "(?i)A", "(?i)[a]", "(?i)[^a]", "(?i:a)b", "(?i)s",
    "(?ai)s", r"(?i)\w", "(?i)[A-B]", r"(?i)[\w]", "(?i:(?-i:a)b)", "(?x) a b ", "(?x)a # comment\nb", "(?x)[a ]",
    r"(?x)a\ b", "(?x)a +", "(?x: a )b", "(?x)#", r"(?x)\#", "(?i)(?s)a.", "(?si)a.", "(?u)a", "(?m)a", "(?m)^a$",
    "^a$", r"\Aa\Z", "$", "^", "^$", r"a$\n", r"$\n", r"\n$", "a$b", "a^b", "(^a|b$)b", "(^a|b)b", "(a|b$)b?",
    r"a(\n|$)", "(?:^|a)b", "(?:^|-)(a(-|$))*", "(^)*a", "(a$|b)*", "x*^a", "a?^b", "(?:a|^)b", r"(?m)a$\nb",
    r"(?m)a\n^b", r"(?m)$\n", r"(?m).*$\n?.*", "(?=a)ab", "(?=a).*", "(?!a).*", "a(?=b)b", "a(?!b).",
    "(?=.*b)(?=.*a).*", "(?!.*aa).*", "(?!a$).*", "(?=a|$).*", "(?=a)", "(?!)", "(?=)a", "(?!^a).", r"a(?=\n$)\n",
    "(?:(?=a)a|b)b", "((?=a)a)?b", "(?!(?!a)).*", "(?=a(?=b)).*", "(?i)(?=A).",
    "(?:(?!ab).)*", "(?:(?!ab).)*b", "((?=a).b?)*", "((?=a).b)*", "(?:a(?!b)|b)*", "(a|$){2}", "(a$){2}",
    "(?:a|b(?=$))*", r"(?m)(a$\n?)*", r"(?m)(?:a$|\n)*", "(?:(?!a$).){1,2}", "(?:(?=.*b)a)*b*", "(?:(?!(?!a)).)+",
    "(?:(?=)a|(?!)b)*",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.sampled(5)
def test_a_pattern_means_what_it_means_to_re(pattern: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        compiled = re.compile(pattern)
    language = language_of(pattern)
    for text in TEXTS:
        assert matches(language, text.encode()) == bool(compiled.fullmatch(text)), text


def language_of(pattern: str) -> Language:
    try:
        return resolve(Grammar(parse_regex(pattern)), Limits()).start
    except ConstraintRefused as refusal:
        if "admits nothing" in refusal.why:
            return NOTHING
        raise


MISTAKES = [
    ("a)", 1), ("(a", 0), ("((a)", 0), ("[a", 0), ("x[a", 1), ("[]", 0), ("[^]", 0), ("*a", 0), ("a|*", 2),
    ("(+)", 1), ("{1}", 0), ("a**", 2), ("a{2}{3}", 4), ("a+*", 2), ("a??*", 3), ("^*", 1), ("a$?", 2), (r"\A+", 2),
    ("a\\", 1), (r"\q", 0), (r"[\q]", 1), (r"\x1", 0), (r"\u12", 0), (r"\U0011ffff", 0),
    (r"\N{no such character}", 0), (r"\N", 0), ("[b-a]", 1), (r"[a-\d]", 1), (r"[\d-a]", 1), (r"\777", 0),
    (r"[\8]", 1), ("a{3,2}", 1), (r"\p{L", 0), (r"\z", 0), ("(?", 0), ("(?q)", 0), ("(?i", 0), ("a(?i)b", 1),
    ("(?P<1>a)", 0), ("(?P<n>a)(?P<n>b)", 8), ("(?<n>a)", 0), ("(?-i)a", 0), ("(?au)a", 0), ("(?i-i:a)", 0),
    ("(?#a", 0), ("(?L)a", 0), ("(?P<n", 0), ("(?i-:a)", 0),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "position"), MISTAKES)
def test_a_mistake_is_refused_where_it_is(pattern: str, position: int) -> None:
    with pytest.raises(re.error):
        re.compile(pattern)
    with pytest.raises(ConstraintRefused) as refusal:
        parse_regex(pattern)
    assert refusal.value.where == f"position {position}"
    assert not isinstance(refusal.value, Unsupported | LimitExceeded)


UNSUPPORTED = [
    (r"(a)b\1", 4, "backreference"), ("(?P<n>a)(?P=n)", 8, "backreference"), (r"\b", 0, r"\b"), (r"a\B", 1, r"\B"),
    ("(?<=a)b", 0, "lookbehind"), ("a(?<!b)", 1, "lookbehind"), ("(?>a)", 0, "atomic group"),
    ("a++", 2, "possessive quantifier"), ("a{2}+", 4, "possessive quantifier"),
    ("(a)?(?(1)b|c)", 4, "conditional group"), ("[[:alpha:]]", 1, "[:alpha:]"), (r"\p{Greek}", 0, r"\p{Greek}"),
    (r"(?m)(^a\n)*", 5, "^ in a repeat"), ("(a(?=b)|^)*", 8, "^ in a repeat"), ("(a|^){2}", 3, "^ in a repeat"),
    (r"(?m)[a\n]^b", 9, "^ of the flag m after text that may or may not end a line"),
    ("a?(?!^b).", 2, "a negative lookahead with ^ inside, after other text,"),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "position", "keyword"), UNSUPPORTED)
def test_what_is_not_honoured_is_named_with_a_way_out(pattern: str, position: int, keyword: str) -> None:
    with pytest.raises(Unsupported) as refusal:
        parse_regex(pattern)
    assert (refusal.value.where, refusal.value.keyword) == (f"position {position}", keyword)
    assert "; " in refusal.value.why


ECMA = [
    (r"\d", "1", "٣"), (r"\w", "a", "é"), (r"\s", "\ufeff", "\x1c"), (r"\/", "/", "a"), ("[^]", "\n", ""),
    ("[^][^]", "a]", "a"), (r"\cJ", "\n", "J"), (r"\u{1F44D}", "👍", "u"), (r"\ud83d\udc4d", "👍", "x"),
    (r"[\ud83d\udc4d]", "👍", "x"), (r"\u00e9", "é", "e"), (r"\x41", "A", "x"), (r"\0", "\x00", "0"),
    (".", "é", "\u2028"), ("a$", "a", "a\n"), ("(?<n>a)", "a", "b"), (r"[\w-.]", "-", ","),
    ('\\-\\_\\@\\"', '-_@"', "-"), (r"\p{Lu}", "É", "é"), (r"\P{L}", "1", "a"), (r"[\p{L}\d]", "é", "-"),
    ("{", "{", "}"), ("(?i)ab", "aB", "ac"), ("[a-z&&]", "&", "-"), (r"\v\f", "\x0b\x0c", "v"),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "taken", "left"), ECMA)
def test_what_schemas_use_of_ecmascript(pattern: str, taken: str, left: str) -> None:
    language = parse_regex(pattern, dialect="ecma")
    assert matches(language, taken.encode())
    assert not matches(language, left.encode())


@pytest.mark.parametrize(
    "pattern", [r"\Aa", r"a\Z", r"\z", r"\a", r"\07", r"[\1]", r"\k<n>", r"\1", "a{,3}", r"\U00000061", "a++", "(?<=a)"]
)
def test_what_ecmascript_reads_differently_is_refused(pattern: str) -> None:
    with pytest.raises(ConstraintRefused, match="position"):
        parse_regex(pattern, dialect="ecma")


SEARCHED = [
    "a", "^a", "a$", "^a$", "^a|b$", "^(a|b)$", "(^a|b)", "", "^", "$", "^$", "a*", "^a*b", "(?!a)b", "^(?!a)",
    "^(?!.*ab).*$", "a(?=b)", "(?=.*a)(?=.*b)", "^[^a]+$", "b(?!a)", "(?:^|b)a(?:b|$)", r"\n", ".", "^.*$", "(a$|^b)",
    "a|", "(?!)", "^a.b$|^b",
]  # fmt: skip


@pytest.mark.parametrize("pattern", SEARCHED)
def test_a_search_looks_anywhere(pattern: str) -> None:
    compiled = re.compile(pattern.replace("$", "\\Z"))
    try:
        language = resolve(Grammar(search_regex(pattern)), Limits()).start
    except ConstraintRefused:
        language = NOTHING
    for text in map("".join, itertools.chain.from_iterable(itertools.product("ab\n", repeat=n) for n in range(5))):
        assert matches(language, text.encode()) == bool(compiled.search(text)), text


def test_searches_come_to_small_expressions() -> None:
    assert search_regex("") == search_regex("a*") == search_regex("^") == ANY_TEXT
    assert search_regex("^abc$") == Literal(b"abc")
    assert search_regex("^.*$", dialect="python") != ANY_TEXT  # the dot is not the line feed


def test_equal_languages_are_built_in_one_way() -> None:
    a = Literal(b"a")
    assert parse_regex("(a+)+") == parse_regex("(a|a)+") == parse_regex("a+?") == Repeat(a, 1)
    assert parse_regex("((a{0,10}){0,10}){0,10}") == Repeat(a, 0, 1000)
    assert parse_regex("(a)?(a)?(a)?a{24}") == Repeat(a, 24, 27)
    assert parse_regex("a|b|[cd]|e") == parse_regex("[a-e]")
    assert parse_regex("(?:(?:))*") == parse_regex("(|)") == EMPTY_TEXT


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(" * 8_000 + ")" * 8_000, "deeper than 64"),
        ("a" * 20_000, "20000 bytes"),
        ("é" * 10_000, "20000 bytes"),
        ("((a{1000}){1000}){1000}", "1000000000 characters"),
        ("(ab?){1048576}c", "1048577 characters"),
        ("a{1048577}", "1048576"),
        ("a{99999999999999999999}", "1048576"),
        ("(?:(?=a).|(?=b).)" * 30, "multiply"),
        ("(?=a)" * 100, "position 320: more than 64"),
    ],
)
def test_what_is_too_large_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(LimitExceeded, match=why):
        parse_regex(pattern)


def test_sizes_that_are_fine() -> None:
    assert parse_regex("a{0,65535}") == Repeat(Literal(b"a"), 0, 65535)
    assert parse_regex("(a{1000}){1000}") == Repeat(Literal(b"a"), 1_000_000, 1_000_000)
    parse_regex("(" * 64 + ")" * 64)
    parse_regex("$a" * 8000)
    parse_regex("a|" * 8000)
