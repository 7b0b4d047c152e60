"""Writes languages as GBNF grammars (`root ::= ...`), as llama.cpp, XGrammar and llguidance read them.

    r1 ::= "[" r2 "]"           texts, sequences, `|`, repeats {2,5} and * of what is in parentheses
    r2 ::= [a-c] r2 | ""        an automaton over characters: a rule for each state, which ends with the next state

Characters of classes are written by \\u and \\U with four and eight digits, whose length every reader knows. llama.cpp
and XGrammar read the grammar character by character. llguidance makes words of rules without recursion, and takes the
longest word at each place: it may admit fewer texts, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..automaton.characters import ESCAPES, spell
from ..errors import Unsupported
from ..language import (
    EMPTY_TEXT,
    AnyOrder,
    Call,
    Chars,
    CharSet,
    Concat,
    Dfa,
    Grammar,
    Language,
    Literal,
    Ranges,
    Repeat,
    Spelled,
    Union,
)

MOST_BYTES = 64 << 10  # of a grammar: servers compile it for each request that is new to them
MOST_TURNS = 1_000  # of a bounded repeat: llama.cpp writes it out
_ESCAPED = CharSet.of((code, code) for code in ESCAPES)


def gbnf_of(grammar: Grammar) -> str:
    """Returns a grammar of exactly the texts of `grammar`, which `boolean.resolution.resolve` has been through.

    Raises:
        Unsupported: it would be too long, or some part has no such form.
    """
    return _Writer(grammar.rules).whole(grammar.start)


class _Writer:
    """Writes one grammar. `rules`: that the language calls."""

    def __init__(self, rules: Mapping[str, Language]) -> None:
        self._called = rules
        self._lines: dict[str, str] = {}  # name → what stands after ::=
        self._names: dict[object, str] = {}  # rule, state of an automaton (by its id), place of members → name
        self._nullable = _nullable_rules(rules)
        self._waiting: list[Callable[[], None]] = []
        self._bytes = 0

    def whole(self, start: Language) -> str:
        root = self._options(start)
        while self._waiting:
            self._waiting.pop()()
        lines = [f"root ::= {root}", *(f"{name} ::= {self._lines[name]}" for name in self._lines)]
        text = "\n".join(lines) + "\n"
        if len(text.encode()) > MOST_BYTES:
            raise _too_long()
        return text

    # -------------------------------------------------------------------------------- expressions

    def _options(self, node: Language) -> str:
        """Writes a language as alternatives."""
        if isinstance(node, Union):
            return " | ".join(dict.fromkeys(map(self._sequence, node.options)))
        return self._sequence(node)

    def _sequence(self, node: Language) -> str:
        if isinstance(node, Concat):
            return " ".join(self._item(part) for part in node.parts if part != EMPTY_TEXT) or '""'
        return self._item(node)

    def _item(self, node: Language) -> str:
        """Writes a language as one item of a sequence."""
        match node:
            case Literal(data):
                return self._text(data)
            case Chars(ranges):
                return _class(ranges)
            case Concat() | Union():
                return f"({self._options(node)})"
            case Repeat(body, least, most):
                return self._repeat(body, least, most)
            case Call(rule):
                return self._rule(rule, lambda: self._options(self._called[rule]))
            case Dfa():
                return self._state(node, 0, spelled=False)
            case Spelled(Dfa() as body):
                return self._state(body, 0, spelled=True)
            case Spelled(body):
                return self._item(_in_string(body))
            case AnyOrder():
                return self._members(node, *node.arrangement.start, first=True)
        raise Unsupported(f"{type(node).__name__} has no GBNF", keyword="gbnf")

    def _text(self, data: bytes) -> str:
        try:
            return _quoted(data.decode())
        except UnicodeDecodeError:
            raise Unsupported("a text that ends inside a character has no GBNF", keyword="gbnf") from None

    def _repeat(self, body: Language, least: int, most: int | None) -> str:
        if most is None and self._is_nullable(body):
            raise Unsupported("a repeat of what may be empty has no GBNF that every server reads", keyword="gbnf")
        if max(least, most or 0) > MOST_TURNS:
            raise Unsupported(f"a repeat of more than {MOST_TURNS} has no GBNF", keyword="gbnf")
        short = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}.get((least, most))
        counted = f"{{{least}}}" if least == most else f"{{{least},{'' if most is None else most}}}"
        item = self._item(body)
        if short == "":
            return item
        return f"({item}){short or counted}" if isinstance(body, Literal | Repeat) else f"{item}{short or counted}"

    # -------------------------------------------------------------------------------- rules

    def _rule(self, key: object, write: Callable[[], str]) -> str:
        """Returns the name of a rule, which is written once."""
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"r{len(self._names) + 1}"
            self._lines[name] = ""
            self._waiting.append(lambda: self._define(name, write()))
        return name

    def _define(self, name: str, body: str) -> None:
        self._lines[name] = body
        self._bytes += len(name) + len(body)
        if self._bytes > MOST_BYTES:
            raise _too_long()

    def _state(self, dfa: Dfa, state: int, *, spelled: bool) -> str:
        """Writes the texts from a state on: a class where a state leads to itself alone, else a rule."""
        edges = dfa.edges[state]
        if dfa.accepting[state] and not edges:
            return '""'
        if dfa.accepting[state] and len(edges) == 1 and edges[0][1] == state:
            return f"{self._item(_characters(edges[0][0], spelled))}*"
        return self._rule((id(dfa), state, spelled), lambda: self._of_state(dfa, state, spelled))

    def _of_state(self, dfa: Dfa, state: int, spelled: bool) -> str:
        options = []
        for ranges, target in dfa.edges[state]:
            following = self._state(dfa, target, spelled=spelled)
            first = self._item(_characters(ranges, spelled))
            options.append(first if following == '""' else f"{first} {following}")
        return " | ".join([*options, *(['""'] if dfa.accepting[state] else [])])

    def _members(self, order: AnyOrder, left: int, others: int, *, first: bool) -> str:
        """Writes what may follow at a place among parts in any order; before the first one there is no separator."""
        return self._rule((id(order), left, others, first), lambda: self._of_members(order, left, others, first))

    def _of_members(self, order: AnyOrder, left: int, others: int, first: bool) -> str:
        arrangement = order.arrangement
        separator = "" if first else self._item(order.separator) + " "
        options = []
        for index, *after in arrangement.following(left, others):
            part = order.others if index == len(order.parts) else order.parts[index]
            assert part is not None, "others follow where there are some"
            rest = self._members(order, after[0], after[1], first=False)
            options.append(f"{separator}{self._item(part)} {rest}")
        if not first and arrangement.missing(left, others) == 0:
            options.append('""')
        return " | ".join(options)

    # -------------------------------------------------------------------------------- empty texts

    def _is_nullable(self, node: Language) -> bool:
        return _nullable(node, self._nullable)


def _in_string(body: Language) -> Language:
    """Returns the texts of a language as they stand inside a JSON string."""
    match body:
        case Literal(data):
            return Literal(spell(data))
        case Chars(ranges):
            return _characters(ranges, spelled=True)
        case Concat(parts):
            return Concat(tuple(map(_in_string, parts)))
        case Union(options):
            return Union(tuple(map(_in_string, options)))
        case Repeat(inner, least, most):
            return Repeat(_in_string(inner), least, most)
        case Dfa():
            return Spelled(body)
        case Spelled(inner):
            return _in_string(_in_string(inner))
    raise Unsupported(f"{type(body).__name__} in a string has no GBNF", keyword="gbnf")


def _characters(ranges: Ranges, spelled: bool) -> Language:
    """Returns one character of a set, by its escape where a JSON string has one."""
    members = CharSet(ranges)
    escaped = members & _ESCAPED
    if not spelled or not escaped:
        return Chars(ranges)
    codes = [code for first, last in escaped.ranges for code in range(first, last + 1)]
    options: list[Language] = [Literal(ESCAPES[code]) for code in codes]
    plain = members - _ESCAPED
    return Union((Chars(plain.ranges), *options) if plain else tuple(options))


def _nullable_rules(rules: Mapping[str, Language]) -> frozenset[str]:
    """Returns the rules that admit the empty text."""
    found: frozenset[str] = frozenset()
    while True:
        more = frozenset(name for name, body in rules.items() if _nullable(body, found))
        if more == found:
            return found
        found = more


def _nullable(node: Language, rules: frozenset[str]) -> bool:
    match node:
        case Literal(data):
            return not data
        case Concat(parts):
            return all(_nullable(part, rules) for part in parts)
        case Union(options):
            return any(_nullable(option, rules) for option in options)
        case Repeat(body, least):
            return not least or _nullable(body, rules)
        case Call(rule):
            return rule in rules
        case Dfa(accepting):
            return accepting[0]
        case Spelled(body):
            return _nullable(body, rules)
    return False


def _quoted(text: str) -> str:
    return f'"{"".join(map(_character, text))}"'


def _character(character: str) -> str:
    short = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(character)
    if short is not None:
        return short
    return _member(ord(character)) if ord(character) < 0x20 or ord(character) == 0x7F else character


def _class(ranges: Ranges) -> str:
    return f"[{''.join(_range(first, last) for first, last in ranges)}]"


def _range(first: int, last: int) -> str:
    return _member(first) if first == last else f"{_member(first)}-{_member(last)}"


def _member(code: int) -> str:
    """Writes a member of a class: letters and digits as they are, all else by their number."""
    if code < 0x80 and chr(code).isalnum():
        return chr(code)
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def _too_long() -> Unsupported:
    return Unsupported(f"its GBNF grammar would have more than {MOST_BYTES} bytes", keyword="gbnf")
