"""Regular expressions as two other packages read them: oracles of the tests, and engines to compare with.

Only `constraint_engine="interegular"` and `"outlines-core"` load this module; the default engine never does. Each
package builds an automaton over characters, which our own automaton runs.

interegular: an independent implementation. Its classes \\w, \\d and \\s are ASCII.

outlines-core 0.2.14: two things are taken care of. Once an accepting position has been passed it refuses texts of its
language, and of alternatives it gives the first that matches: so a byte that ends the text is appended, `(?:RX)\\x00`,
and what its automaton does with that byte says where a text may end. And its index over a large vocabulary is slow to
build: this one is over single bytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..errors import ConstraintRefused, LimitExceeded, Limits, Unsupported
from ..language import CharSet, Dfa, Grammar
from .source import MissingEngine, Source

_END = 0  # the byte after the text; texts cannot hold it
_EOS = 256
_LEADS = ((0xC2, 0xDF, 1, 0x1F), (0xE0, 0xEF, 2, 0x0F), (0xF0, 0xF4, 3, 0x07))  # first, last, bytes after, bits

Table = Mapping[int, Mapping[int, int]]  # state → byte → state
Pieces = list[tuple[int, int, int]]  # (first, last, state after): values of the bits of continuation bytes


def interegular_grammar(source: Source, limits: Limits) -> Grammar:
    """Returns the texts that interegular matches. It may take exponential time: run it where it can be killed.

    Raises:
        MissingEngine: the package is not installed.
        Unsupported: interegular reads no such source.
        LimitExceeded: the automaton has too many states.
    """
    if source.kind != "regex":
        raise Unsupported(f"interegular reads regular expressions, not a {source.kind}", keyword=source.kind)
    try:
        library = importlib.import_module("interegular")
    except ImportError as error:
        raise MissingEngine("interegular") from error
    try:
        fsm = library.parse_pattern(source.text).to_fsm()
    except (library.Unsupported, library.InvalidSyntax) as error:
        raise Unsupported(f"interegular: {error or type(error).__name__}", keyword="regex") from error
    if len(fsm.states) > limits.dfa_states:
        raise LimitExceeded(f"interegular makes {len(fsm.states)} states, at most {limits.dfa_states} are taken")
    characters = _characters(fsm.alphabet)
    edges = {
        state: [(characters[symbol], target) for symbol, target in fsm.map.get(state, {}).items()]
        for state in fsm.states
    }
    dfa = trimmed_dfa(fsm.initial, fsm.finals, edges)
    if dfa is None:
        raise ConstraintRefused(f"regex {source.text!r} admits nothing; write one that some text matches")
    return Grammar(dfa)


def _characters(alphabet: Any) -> dict[int, CharSet]:  # Any: interegular's Alphabet, which has no types
    """Returns the characters of each symbol; one symbol also stands for all characters that are not named."""
    codes: dict[int, list[int]] = {symbol: [] for symbol in alphabet.values()}
    others = None
    for character, symbol in alphabet.items():
        if isinstance(character, str):
            codes[symbol].append(ord(character))
        else:
            others = symbol
    characters = {symbol: CharSet.of((code, code) for code in found) for symbol, found in codes.items()}
    if others is not None:
        named = CharSet.of((code, code) for symbol, found in codes.items() if symbol != others for code in found)
        characters[others] = ~named
    return characters


def outlines_grammar(source: Source, limits: Limits) -> Grammar:
    """Returns the texts that outlines-core matches. It may take exponential time: run it where it can be killed.

    Raises:
        MissingEngine: the package is not installed.
        Unsupported: outlines-core reads no such source.
        LimitExceeded: the automaton has too many states.
    """
    try:
        library = importlib.import_module("outlines_core")
        schemas = importlib.import_module("outlines_core.json_schema")
    except ImportError as error:
        raise MissingEngine("outlines-core") from error
    try:
        match source.kind, source.whitespace:
            case "regex", _:
                pattern = source.text
            case "json_schema", "compact":
                pattern = schemas.build_regex_from_schema(source.text, "")
            case "json_schema", _:
                raise Unsupported(
                    "outlines-core writes the same blanks at every place; write json_whitespace='compact'",
                    keyword="json_whitespace",
                )
            case _:
                raise Unsupported("outlines-core reads no Lark grammars", keyword=source.kind)
        index = library.Index(f"(?:{pattern})\\x00", _byte_vocabulary(library))
    except (ValueError, TypeError) as error:
        raise Unsupported(f"outlines-core: {str(error).splitlines()[0][:300]}", keyword=source.kind) from error
    table: Table = index.get_transitions()
    if len(table) > limits.dfa_states:
        raise LimitExceeded(f"outlines-core makes {len(table)} states, at most {limits.dfa_states} are taken")
    finals = {state for state, row in table.items() if _END in row and index.is_final_state(row[_END])}
    characters = _OutlinesCharacters(table)
    dfa = trimmed_dfa(index.get_initial_state(), finals, {state: characters.of(state) for state in table})
    if dfa is None:
        raise ConstraintRefused(f"{source.kind} {source.text[:80]!r} admits nothing; write one that some text matches")
    return Grammar(dfa)


def _byte_vocabulary(library: object) -> object:
    return library.Vocabulary(_EOS, {bytes([byte]): [byte] for byte in range(256)})  # type: ignore[attr-defined]


class _OutlinesCharacters:
    """Edges over characters, read off edges over the bytes of UTF-8."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._tails: dict[tuple[int, int], Pieces] = {}

    def of(self, state: int) -> list[tuple[CharSet, int]]:
        """Returns the characters that lead on, with the states after them; none in the middle of a character."""
        row = self._table.get(state, {})
        pieces = [(byte, byte, target) for byte, target in row.items() if _END < byte < 0x80]
        for first, last, tail_bytes, bits in _LEADS:
            for byte in range(first, last + 1):
                if byte in row:
                    high = (byte & bits) << 6 * tail_bytes
                    pieces += [
                        (high + low, high + top, target) for low, top, target in self._tail(row[byte], tail_bytes)
                    ]
        ranges: dict[int, list[tuple[int, int]]] = {}
        for low, top, target in pieces:
            ranges.setdefault(target, []).append((low, top))
        return [(CharSet.of(found), target) for target, found in ranges.items()]

    def _tail(self, state: int, length: int) -> Pieces:
        """Follows `length` continuation bytes to the states after them."""
        known = self._tails.get((state, length))
        if known is not None:
            return known
        pieces: Pieces = []
        for byte, target in sorted(self._table.get(state, {}).items()):
            if not 0x80 <= byte <= 0xBF:
                continue
            high = (byte & 0x3F) << 6 * (length - 1)
            inner = [(0, 0, target)] if length == 1 else self._tail(target, length - 1)
            for low, top, after in inner:
                if pieces and pieces[-1][1] == high + low - 1 and pieces[-1][2] == after:
                    pieces[-1] = (pieces[-1][0], high + top, after)
                else:
                    pieces.append((high + low, high + top, after))
        self._tails[state, length] = pieces
        return pieces


def trimmed_dfa(
    initial: int, finals: Collection[int], edges: Mapping[int, Iterable[tuple[CharSet, int]]]
) -> Dfa | None:
    """Returns the automaton without states that lead nowhere or are not reached; None when nothing is left.

    edges: of each state, characters that are disjoint with the state after them.
    """
    into: dict[int, list[int]] = {}
    outgoing: dict[int, dict[int, CharSet]] = {}
    for state, out in edges.items():
        targets = outgoing.setdefault(state, {})
        for characters, target in out:
            if characters:
                targets[target] = targets.get(target, CharSet()) | characters
                into.setdefault(target, []).append(state)
    live = _reached(finals, into)
    if initial not in live:
        return None
    forward = {state: [target for target in targets if target in live] for state, targets in outgoing.items()}
    numbers = {state: number for number, state in enumerate(_reached([initial], forward))}
    return Dfa(
        tuple(state in finals for state in numbers),
        tuple(
            tuple(
                (characters.ranges, numbers[target])
                for target, characters in outgoing.get(state, {}).items()
                if target in live
            )
            for state in numbers
        ),
    )


def _reached(starts: Iterable[int], along: Mapping[int, list[int]]) -> dict[int, None]:
    """Returns the states on ways from `starts`, in the order in which they are found."""
    found = dict.fromkeys(starts)
    waiting = list(found)
    while waiting:
        for state in along.get(waiting.pop(), []):
            if state not in found:
                found[state] = None
                waiting.append(state)
    return found
