"""Compression takes states without a choice away and nothing else."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.fsm.automaton.automaton import DEAD, Automaton
from umbel.fsm.errors import Limits
from umbel.fsm.inspector.compress import Graph, compress, explore, forced_share
from umbel.fsm.inspector.drawing import character_set, edge_label, quoted
from umbel.fsm.language import Chars, CharSet, Concat, Grammar, Language, Literal, Repeat, Spelled, Union
from umbel.fsm.regex.classes import digit, space, word
from umbel.fsm.regex.parser import parse_regex

from ..languages import FEW_LETTERS, LANGUAGES

ANY = Chars(((0, 0x10FFFF),))
SOME = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

# The character sheet of SGLang's appendix, cut short.
SHEET = Concat(
    (
        Literal(b'{"name": "'),
        Repeat(Chars(((0x61, 0x7A),)), 1, 8),
        Literal(b'", "house": "'),
        Union((Literal(b"Gryffindor"), Literal(b"Slytherin"))),
        Literal(b'"}'),
    )
)


def admits(graph: Graph, text: str) -> bool:
    """Follows the edges as they are labelled."""
    state, at = graph.start, 0
    while at < len(text):
        code = ord(text[at])
        edge = next(
            (
                edge
                for edge in graph.edges
                if edge.source == state and any(first <= code <= last for first, last in edge.first)
            ),
            None,
        )
        if edge is None or not text.startswith(edge.then, at + 1):
            return False
        state, at = edge.target, at + 1 + len(edge.then)
    return state in graph.accepting


@SOME
@given(st.one_of(LANGUAGES, FEW_LETTERS), st.lists(st.text(alphabet='ab"\\\né€😀', max_size=5)), st.randoms())
def test_both_graphs_admit_what_the_automaton_admits(
    language: Language, texts: list[str], chance: random.Random
) -> None:
    automaton = Automaton(Grammar(language))
    explored = explore(automaton, 300)
    if not explored.characters.complete:
        return
    graphs = compress(explored.characters)
    for state in range(min(automaton.states, 20)):
        texts.append(automaton.close(state).decode(errors="replace"))
    for text in [*texts, automaton.close(automaton.start).decode()]:
        state = automaton.run(automaton.start, text.encode())
        expected = state != DEAD and automaton.accepting(state)
        assert admits(graphs.before, text) == admits(graphs.after, text) == expected


@SOME
@given(LANGUAGES)
def test_what_stays_is_a_choice_an_end_or_a_meeting_point(language: Language) -> None:
    graphs = compress(explore(Automaton(Grammar(language)), 300).characters)
    after = graphs.after
    for state in after.states:
        leaving = [edge for edge in after.edges if edge.source == state]
        arriving = [edge for edge in after.edges if edge.target == state]
        single = len(leaving) == 1 and leaving[0].text is not None
        assert not single or state in after.accepting or state == after.start or len(arriving) != 1
    assert len(graphs.before.states) - len(after.states) == len(graphs.before.edges) - len(after.edges)


def test_the_character_sheet_loses_most_of_its_states() -> None:
    graphs = compress(explore(Automaton(Grammar(SHEET)), 1000).characters)
    assert graphs.before.complete
    assert [edge_label(edge) for edge in graphs.after.edges][:2] == ["""'{"name": "'""", "[a-z]"]
    assert {'"Gryffindor"', '"Slytherin"'} <= {edge_label(edge) for edge in graphs.after.edges}
    assert graphs.removed_share > 0.7


def test_bytes_inside_characters_are_no_states_of_the_graph() -> None:
    explored = explore(Automaton(Grammar(Concat((Literal("é€".encode()), ANY)))), 100)
    assert len(explored.characters.states) == 4
    assert explored.byte_states > 8
    assert [edge.text for edge in explored.characters.edges] == ["é", "€", None]
    assert explored.characters.edges[-1].first == ((0, 0xD7FF), (0xE000, 0x10FFFF))


def test_exploring_ends_at_the_bound_and_says_so() -> None:
    explored = explore(Automaton(Grammar(Repeat(Literal(b"a"), 0, 1000))), 10)
    assert not explored.characters.complete
    assert len(explored.characters.states) == 11
    assert compress(explored.characters).after.open_states == explored.characters.open_states


def test_exploring_ends_at_the_limit_of_the_automaton() -> None:
    automaton = Automaton(Grammar(Repeat(Chars(((0x61, 0x62),)), 0, 1000)), Limits(states=20))
    assert not explore(automaton, 1000).characters.complete


def test_the_forced_share_is_that_of_the_shortest_text() -> None:
    share = forced_share(Automaton(Grammar(SHEET)))
    assert share.text == b'{"name": "a", "house": "Slytherin"}'
    assert share.forced == len(share.text) - len("a") - len('"') - len("S")


def test_a_text_without_bytes_has_no_forced_ones() -> None:
    assert forced_share(Automaton(Grammar(Repeat(ANY)))).share == 0.0


@pytest.mark.parametrize(
    ("ranges", "label"),
    [
        (((0x30, 0x39), (0x61, 0x62)), "[0-9ab]"),
        (digit().ranges, "\\d"),
        ((~digit()).ranges, "\\D"),
        ((word() | CharSet.of([(0x2D, 0x2E)])).ranges, "[\\w\\-.]"),
        ((~(space() | digit())).ranges, "[^\\d\\s]"),
        (((0x0A, 0x0A), (0x5D, 0x5D)), r"[\n\]]"),
        (((0x00, 0x21), (0x23, 0xD7FF), (0xE000, 0x10FFFF)), '[^"]'),
        (((0x00, 0xD7FF), (0xE000, 0x10FFFF)), "."),
        (((0x7F, 0x7F), (0x200B, 0x200B)), r"[\x7f\u200b]"),
    ],
)
def test_sets_are_written_as_expressions_write_them(ranges: tuple[tuple[int, int], ...], label: str) -> None:
    written = character_set(ranges)
    assert written == label


@pytest.mark.parametrize(
    "expression",
    [
        r"\d",
        r"\W",
        r"\S",
        r"[\w.+-]",
        r"[^\w\s]",
        r"[\D\s]",
        r"[^a-z\d]",
        r"[\d\D]",
        "[^\\]]",
        "(?a:\\w)",
    ],
)
def test_a_set_that_is_read_again_is_the_same(expression: str) -> None:
    read = parse_regex(expression, Limits())
    assert isinstance(read, Chars)
    assert parse_regex("(?s)" + character_set(read.ranges), Limits()) == read


def test_texts_are_quoted_with_few_escapes() -> None:
    assert quoted('say "é"\n') == """'say "é"\\n'"""
    assert quoted("it's") == '"it\'s"'
    assert quoted("""'"\x00""") == r'''"'\"\x00"'''


def test_long_labels_are_cut_in_the_middle() -> None:
    graph = compress(explore(Automaton(Grammar(Literal(b"abcdefghijklmnopqrstuvwxyz"))), 100).characters).after
    assert edge_label(graph.edges[0], 12) == '"abcdef…xyz"'


def test_spelled_characters_share_the_state_behind_them() -> None:
    graph = explore(Automaton(Grammar(Concat((Spelled(Repeat(ANY)), Literal(b'"'))))), 100).characters
    loops = [edge for edge in graph.edges if edge.source == edge.target == graph.start]
    assert [character_set(edge.first) for edge in loops] == ['[^\\x00-\\x1f"\\\\]']
