"""Matches texts against expressions: regular expressions, grammars, and the patterns of schemas.

The only module of the interpreter that imports the automata (`fsm`). Texts of hosted models are validated with the
automata that the runtime enforces with, so an expression has one meaning. Nothing backtracks; every automaton has
limits.
"""

import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from ...fsm.composed import nodes
from ...lang.errors import CapabilityError, ConstraintError, MissingExtraError

if TYPE_CHECKING:
    from ...fsm.engines.llguidance_tokens import LlguidanceTokens
    from ...fsm.engines.source import Source
    from ...fsm.language import Grammar

Kind = Literal["regex", "json_schema", "lark", "gbnf", "expression"]

# Kind of constraint → what its errors begin with, as the runtime's do.
NAMES = {
    "regex": "regex",
    "json_schema": "json_schema",
    "lark": "grammar",
    "gbnf": "grammar",
    "choices": "choices",
    "expression": "constraint",
}


@dataclass(frozen=True, slots=True)
class Walk:
    """The result of matching an expression along a text.

    Attributes:
        read: characters of the longest prefix that is a prefix of some text of the language.
        accepted: characters of the longest prefix that is a text of the language; None without one.
        extendable: some text of the language goes on after the last character read.
    """

    read: int
    accepted: int | None
    extendable: bool


def check_installed() -> None:
    """Raises MissingExtraError without numpy, which holds the automata's tables."""
    if importlib.util.find_spec("numpy") is None:
        raise MissingExtraError("numpy", "openai")


def check(kind: Kind, source: str) -> None:
    """Compiles an expression, which may take a while; the result is cached.

    Raises:
        ConstraintError: it is invalid, or beyond the limits.
        CapabilityError: no installed engine reads it.
    """
    walk(kind, source, "")


def walk(kind: Kind, source: str, text: str) -> Walk:
    """Matches `text` against an expression from its beginning.

    Raises:
        ConstraintError, CapabilityError: as `check`.
    """
    from ...fsm.errors import ConstraintRefused

    check_installed()
    if kind in ("lark", "gbnf") and importlib.util.find_spec("llguidance") is None:
        raise CapabilityError(
            "a grammar is looked at by llguidance, which is not installed; run: pip install llguidance, or write "
            "allow_best_effort=True to take the text as it comes"
        )
    try:
        grammar = _compiled(kind, source)
        if grammar is not None:
            return _along(_by_automaton(grammar), text)
        assert kind != "expression", "our own automata read it"
        return _along(_by_matcher(kind, source), text)
    except ConstraintRefused as error:
        raise ConstraintError(f"{NAMES[kind]}: {error}") from None
    except RecursionError:
        raise ConstraintError(f"{NAMES[kind]}: it is nested too deeply; write a flatter one") from None


def stands_in(pattern: str, text: str) -> bool:
    """Returns whether the `pattern` of a schema matches somewhere in a text.

    Raises:
        ConstraintError: the pattern is invalid or not supported.
    """
    from ...fsm.errors import ConstraintRefused

    check_installed()
    try:
        found = _along(_by_automaton(_searching(pattern)), text)
    except ConstraintRefused as error:
        raise ConstraintError(f"pattern {pattern!r}: {error}") from None
    return found.accepted == len(text)


def common_pattern(pattern: str) -> str:
    """Rewrites the `pattern` of a schema in a syntax that all dialects share, anchored to the whole text.

    Raises:
        ConstraintError: the pattern is invalid, or cannot be written in this syntax.
    """
    from ...fsm.engines.source import written
    from ...fsm.errors import ConstraintRefused
    from ...fsm.regex.parser import search_regex

    check_installed()
    try:
        return f"^(?:{written(search_regex(pattern))})$"
    except ConstraintRefused as error:
        raise ConstraintError(f"pattern {pattern!r}: {error}") from None


def spelled(source: str) -> str:
    """Writes an expression for people and for models. Raises ConstraintError: the source is no expression."""
    return nodes.spelled(nodes.read(source))


@lru_cache(maxsize=256)
def as_regex(source: str) -> str | None:
    """Writes an expression as one regular expression that all dialects read alike; None where it cannot be written.

    Raises:
        ConstraintError: the expression is wrong, or beyond the limits.
    """
    from ...fsm.composed.reading import opened_grammar
    from ...fsm.engines.source import written
    from ...fsm.errors import ConstraintRefused, Unsupported

    check_installed()
    try:
        return written(opened_grammar(source, lenient=False).start)
    except Unsupported:
        return None
    except ConstraintRefused as error:
        raise ConstraintError(f"constraint: {error}") from None


@lru_cache(maxsize=256)
def as_gbnf(source: str) -> str | None:
    """Writes an expression as a GBNF grammar of exactly its texts; None where it has none, or a very long one.

    Raises:
        ConstraintError: the expression is wrong, or beyond the limits.
    """
    from ...fsm.composed.reading import opened_grammar
    from ...fsm.engines.gbnf import gbnf_of
    from ...fsm.errors import ConstraintRefused, Unsupported

    check_installed()
    try:
        return gbnf_of(opened_grammar(source, lenient=False))
    except Unsupported:
        return None
    except ConstraintRefused as error:
        raise ConstraintError(f"constraint: {error}") from None
    except RecursionError:
        raise ConstraintError("constraint: it is nested too deeply; write a flatter one") from None


def first_match(patterns: Iterable[str], text: str) -> tuple[int, int, str] | None:
    """Finds the match of a `stop_regex` that ends first: (start, end, pattern), in characters; the longest of those
    that end together.

    Raises:
        ConstraintError: an expression that cannot be used.
    """
    from ...fsm.errors import ConstraintRefused
    from ...fsm.stops import StopPatterns

    try:
        matcher = StopPatterns(patterns).matcher()
    except ConstraintRefused as error:
        raise ConstraintError(str(error)) from None
    data = text.encode("utf-8", "replace")  # half a surrogate pair becomes one character, which no stop is about
    found = matcher.feed(data)
    if found is None:
        return None
    return len(data[: found.start].decode()), len(data[: found.end].decode()), found.stop


def shortest(kind: Kind, source: str) -> str:
    """Returns a shortest text of a language, always the same one.

    Raises:
        ConstraintError: as `check`.
        CapabilityError: the expression is not read by our automata.
    """
    from ...fsm.automaton.automaton import Automaton
    from ...fsm.errors import ConstraintRefused

    check_installed()
    try:
        grammar = _compiled(kind, source)
        if grammar is None:
            raise CapabilityError(
                f"{NAMES[kind]}: our automata do not read it, so no text of it can be made up; say what the model "
                "answers, as in Echo(['...']), or write another constraint"
            )
        automaton = Automaton(grammar)
        return automaton.close(automaton.start).decode("utf-8")
    except ConstraintRefused as error:
        raise ConstraintError(f"{NAMES[kind]}: {error}") from None
    except RecursionError:
        raise ConstraintError(f"{NAMES[kind]}: it is nested too deeply; write a flatter one") from None


# ------------------------------------------------------------------------------------------------ languages


@lru_cache(maxsize=256)
def _compiled(kind: Kind, source: str) -> "Grammar | None":
    """Compiles a grammar for our automaton; None: llguidance reads it. Raises ConstraintRefused."""
    from ...fsm.composed.reading import opened_grammar
    from ...fsm.engines.selection import compile_source
    from ...fsm.language import Grammar

    if kind == "expression":
        return opened_grammar(source, lenient=True)
    compiled = compile_source(_source(kind, source))
    return compiled if isinstance(compiled, Grammar) else None


@lru_cache(maxsize=256)
def _searching(pattern: str) -> "Grammar":
    """Compiles the language of all texts in which a pattern matches. Raises ConstraintRefused."""
    from ...fsm.boolean.resolution import resolve
    from ...fsm.errors import Limits
    from ...fsm.language import Grammar
    from ...fsm.regex.parser import search_regex

    return resolve(Grammar(search_regex(pattern)), Limits())


def _source(kind: Literal["regex", "json_schema", "lark", "gbnf"], source: str) -> "Source":
    """Parses an expression; JSON with free white space, which is not validated."""
    from ...fsm.engines.source import Source, lark_of_gbnf

    if kind == "gbnf":
        return Source("lark", lark_of_gbnf(source))
    return Source(kind, source, "flexible")


@lru_cache(maxsize=1)
def _bytes_as_tokens() -> "LlguidanceTokens":
    """Builds a vocabulary of the 256 bytes, so that a matcher of tokens reads text."""
    from ...fsm.engines.llguidance_tokens import LlguidanceTokens
    from ...fsm.tokens.trie import build_trie
    from ...fsm.tokens.vocabulary import Vocabulary

    vocabulary = Vocabulary([*(bytes([byte]) for byte in range(256)), b""], [256])
    return LlguidanceTokens(vocabulary, build_trie(vocabulary), None)


# ---------------------------------------------------------------------------------------------- walking


class _Automaton:
    """Our automaton at one state. Made for one text: its states are not cached, nor shared between threads."""

    def __init__(self, grammar: "Grammar") -> None:
        from ...fsm.automaton.automaton import Automaton

        self._automaton = Automaton(grammar)
        self._state = self._automaton.start

    def advance(self, byte: int) -> bool:
        following = self._automaton.step(self._state, byte)
        if following < 0:
            return False
        self._state = following
        return True

    @property
    def accepting(self) -> bool:
        return self._automaton.accepting(self._state)

    @property
    def extendable(self) -> bool:
        self._automaton.expand(self._state)
        return bool((self._automaton.table[self._state] >= 0).any())


class _Matcher:
    """llguidance's matcher at one state."""

    def __init__(self, matcher: Any) -> None:  # Any: llguidance.LLMatcher, a compiled class
        self._matcher = matcher

    def advance(self, byte: int) -> bool:
        if self._matcher.is_stopped() or self._matcher.validate_tokens([byte]) != 1:
            return False
        return bool(self._matcher.consume_token(byte))

    @property
    def accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def extendable(self) -> bool:
        return not self._matcher.is_stopped()


def _by_automaton(grammar: "Grammar") -> _Automaton:
    return _Automaton(grammar)


def _by_matcher(kind: Literal["regex", "json_schema", "lark", "gbnf"], source: str) -> _Matcher:
    """Builds llguidance's matcher. Raises ConstraintRefused, with our reason if our automata refused it too."""
    from ...fsm.engines.selection import own_grammar
    from ...fsm.errors import ConstraintRefused, Limits

    read = _source(kind, source)
    try:
        return _Matcher(_bytes_as_tokens().matcher(read))
    except ConstraintRefused:
        if kind not in ("lark", "gbnf"):
            own_grammar(read, Limits())
        raise


def _along(place: _Automaton | _Matcher, text: str) -> Walk:
    read, accepted = 0, 0 if place.accepting else None
    for character in _encoded(text):
        if not all(map(place.advance, character)):
            return Walk(read, accepted, True)
        read += 1
        if place.accepting:
            accepted = read
    return Walk(read, accepted, place.extendable)


def _encoded(text: str) -> Iterator[bytes]:
    """Encodes each character. Half a surrogate pair is encoded too: no language has it."""
    return (character.encode("utf-8", "surrogatepass") for character in text)
