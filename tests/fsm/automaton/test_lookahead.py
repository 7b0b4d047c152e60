"""What masks rely on instead of walking: plain runs, their limits, and states that short texts cannot tell apart."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.fsm.automaton.automaton import DEAD, Automaton
from umbel.fsm.language import Chars, Concat, Dfa, Grammar, Literal, Repeat, Spelled

from ..languages import ANY, LANGUAGES, recursive_grammars

PLAIN = ["a", "b", "é", "😀"]
BYTES = [bytes([byte]) for byte in b'ab"\\()[]\n'] + [b"\xc3", b"\xa9"]
COUNTED = st.builds(
    lambda body, least, more, after: Concat((Repeat(body, least, least + more), after)),
    st.sampled_from([Chars(ANY), Literal(b"ab"), Spelled(Chars(ANY)), Chars(((97, 98),))]),
    st.integers(0, 6),
    st.integers(0, 6),
    LANGUAGES,
)
ANY_THEN_LETTER = Dfa((False, False, True), (((ANY, 1),), ((((97, 122),), 2),), ()))
GRAMMARS = st.one_of(st.one_of(LANGUAGES, COUNTED).map(Grammar), recursive_grammars())


def explored(automaton: Automaton, depth: int) -> list[int]:
    states = {automaton.start: None}
    for _ in range(depth):
        for state in list(states):
            states.update({automaton.step(state, byte[0]): None for byte in BYTES})
        states.pop(DEAD, None)
    return list(states)


@settings(max_examples=150, deadline=None)
@given(GRAMMARS)
def test_plain_runs_go_on_and_what_is_longer_than_the_limit_does_not(grammar: Grammar) -> None:
    automaton = Automaton(grammar)
    for state in explored(automaton, 2):
        run, limit = automaton.plain_run(state), automaton.plain_limit(state)
        assert run <= limit
        for length in range(1, 4):
            lives = [
                automaton.run(state, "".join(text).encode()) != DEAD for text in itertools.product(PLAIN, repeat=length)
            ]
            assert all(lives) or length > run
            assert not any(lives) or length <= limit


def test_a_run_inside_a_character_automaton_ends_with_it() -> None:
    automaton = Automaton(Grammar(Concat((ANY_THEN_LETTER, Repeat(Chars(ANY))))))
    assert automaton.plain_run(automaton.start) == 1
    assert automaton.run(automaton.start, b"xA") == DEAD


def test_a_json_string_takes_as_many_plain_characters_as_it_may_have() -> None:
    automaton = Automaton(Grammar(Concat((Spelled(Repeat(Chars(ANY), 3, 20)), Literal(b'"')))))
    assert automaton.plain_run(automaton.start) == automaton.plain_limit(automaton.start) == 20


@settings(max_examples=100, deadline=None)
@given(GRAMMARS, st.integers(0, 3))
def test_a_state_and_its_lookahead_admit_the_same_short_texts(grammar: Grammar, reach: int) -> None:
    automaton = Automaton(grammar)
    for state in explored(automaton, 4)[:40]:
        seen = automaton.lookahead(state, reach)
        for length in range(reach + 1):
            for text in itertools.product(BYTES[:8] if reach > 2 else BYTES, repeat=length):
                one, other = (automaton.run(start, b"".join(text)) for start in (state, seen))
                assert (one == DEAD) == (other == DEAD)
                assert one == DEAD or automaton.accepting(one) == automaton.accepting(other)
        assert automaton.lookahead(seen, reach) == seen


def test_far_from_its_ends_a_repeat_looks_the_same() -> None:
    for least, different in ((0, 1), (60, 51)):  # with 60: 50 turns and more that are due, 49, ..., 1, none
        automaton = Automaton(Grammar(Repeat(Chars(((97, 122),)), least, 65_535)))
        states = [automaton.start]
        for _ in range(99):
            states.append(automaton.step(states[-1], ord("a")))
        assert len({automaton.lookahead(state, 48) for state in states}) == different


def test_far_from_its_ends_a_repeat_has_few_states() -> None:
    automaton = Automaton(Grammar(Repeat(Chars(((97, 122), (0xE0, 0x2FF), (0x4E00, 0x9FFF))), 100, 200)))
    seen = automaton.lookahead(automaton.start, 48)
    assert automaton.run(seen, ("aé漢" * 8).encode()) == seen
    assert automaton.states < 10
