"""Small vocabularies and slow masks: what the real ones are compared with."""

import string

from hypothesis import strategies as st
from umbel.fsm.automaton.automaton import DEAD, Automaton
from umbel.fsm.tokens.vocabulary import Vocabulary

ALPHABET = [
    b"a",
    b"b",
    b'"',
    b"\\",
    b" ",
    b"1",
    b"\n",
    "é".encode(),
    "漢".encode(),
    "😀".encode(),
    b"\xc3",
    b"\xa9",
    b"\xf0",
]
SINGLE = [bytes([byte]) for byte in range(256)]


@st.composite
def vocabularies(draw: st.DrawFn, *, spells_all: bool = False) -> Vocabulary:
    """Pieces of the alphabet in any order: duplicates, pieces of characters, tokens of no bytes, several EOS ids."""
    pieces = st.lists(st.sampled_from(ALPHABET), max_size=4).map(b"".join)
    table = draw(st.lists(pieces, min_size=1, max_size=80))
    if spells_all:
        table = SINGLE + table
    table += [b"</s>"] * draw(st.integers(1, 3))
    ends = [index for index, data in enumerate(table) if data == b"</s>"]
    control = draw(st.sets(st.integers(256 if spells_all else 0, len(table) - 1), max_size=2))
    return Vocabulary(table, ends, control=control, size=len(table) + draw(st.integers(0, 40)))


def letters(*, eos: int = 1) -> Vocabulary:
    """Printable ASCII, every token one character."""
    table = [character.encode() for character in string.printable]
    return Vocabulary(table + [b""] * eos, range(len(table), len(table) + eos))


def allowed_slowly(automaton: Automaton, state: int, vocabulary: Vocabulary) -> list[int]:
    """Every token tried, one after the other."""
    texts = [
        token
        for token in range(len(vocabulary))
        if vocabulary.token_bytes(token) and automaton.run(state, vocabulary.token_bytes(token)) != DEAD
    ]
    return sorted([*texts, *(vocabulary.eos_ids if automaton.accepting(state) else ())])
