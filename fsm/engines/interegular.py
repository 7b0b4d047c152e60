"""Regular expressions read by interegular, an independent implementation: an oracle for ours, and for comparison.

Its classes \\w, \\d and \\s are ASCII. What it gives is an automaton over characters, which our own automaton runs.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..charset import CharSet
from ..errors import ConstraintRefused, LimitExceeded, Unsupported
from ..language import Grammar
from ..limits import Limits
from .source import MissingEngine, Source
from .trimmed_dfa import trimmed_dfa


def interegular_grammar(source: Source, limits: Limits) -> Grammar:
    """The texts that interegular matches. It may take exponential time: run it where it can be killed.

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
    """The characters of each symbol; one symbol also stands for all characters that are not named."""
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
