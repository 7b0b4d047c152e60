"""Parts in any order: the language is that of the oracle, and only the sets that texts pass are made."""

import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.fsm.algebra import any_order
from umbel.fsm.automaton.automaton import DEAD, Automaton
from umbel.fsm.boolean.resolution import resolve
from umbel.fsm.errors import ConstraintRefused, Limits
from umbel.fsm.language import NOTHING, AnyOrder, Call, Chars, Concat, Grammar, Language, Literal, Union

from ..languages import any_orders
from ..matcher import matches

TEXTS = st.lists(st.text(alphabet="ab(c, ", max_size=8).map(str.encode), max_size=4)
SOME = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
COMMA = Literal(b",")


def letters(texts: str) -> tuple[Literal, ...]:
    return tuple(Literal(letter.encode()) for letter in texts)


def admitted(language: Language, letters: str, longest: int) -> set[str]:
    """Every text of the language of single letters with commas between."""
    made = Automaton(Grammar(language))
    texts = (",".join(chosen) for count in range(longest + 1) for chosen in itertools.product(letters, repeat=count))
    return {text for text in texts if (end := made.run(made.start, text.encode())) != DEAD and made.accepting(end)}


@SOME
@given(any_orders(), TEXTS, st.randoms(use_true_random=False))
def test_the_language_is_that_of_the_oracle(language: Language, texts: list[bytes], chance: random.Random) -> None:
    made = Automaton(Grammar(language))
    for _ in range(3):
        state, text = made.start, b""
        while len(text) < 8 and (live := [byte for byte in range(256) if made.step(state, byte) >= 0]):
            text += bytes([chance.choice(live)])
            state = made.step(state, text[-1])
        closing = made.close(state)
        assert len(closing) == made.close_length(state)
        text += closing
        at = chance.randrange(len(text) + 1)
        texts += [text, text[:at] + text[at + 1 :], text[:at] + chance.choice([b"a", b",", b"("]) + text[at:]]
        assert matches(language, text), text
    for text in texts:
        end = made.run(made.start, text)
        assert (end != DEAD and made.accepting(end)) == matches(language, text), text


@SOME
@given(any_orders())
def test_the_close_is_a_shortest_one(language: Language) -> None:
    made = Automaton(Grammar(language))
    short = ("".join(letters).encode() for n in range(5) for letters in itertools.product("abc(, ", repeat=n))
    shortest = next((text for text in short if matches(language, text)), None)
    assert shortest is None or made.close_length(made.start) == len(shortest)
    assert shortest is not None or made.close_length(made.start) >= 5


def test_the_first_parts_keep_their_order_until_the_last_of_them_has_come() -> None:
    order = AnyOrder(letters("abc"), COMMA, None, required=(1,), ordered=2)
    assert admitted(order, "abc", 3) == {"b", "a,b", "b,a", "b,c", "a,b,c", "b,a,c", "b,c,a"}


def test_counts_leave_no_dead_end() -> None:
    order = AnyOrder(letters("ab"), COMMA, Literal(b"x"), required=(1,), least=2, most=3)
    # Another part counts once towards the least, and every time towards the most.
    assert "x,x,b" in admitted(order, "abx", 4)
    assert admitted(order, "abx", 4).isdisjoint({"b", "x,x", "x,x,x", "a,x", "x,x,a,b"})


def test_what_admits_nothing_goes_and_takes_along_what_needs_it() -> None:
    parts = (Literal(b"a"), NOTHING, Literal(b"c"))
    kept = any_order(AnyOrder(parts, COMMA, NOTHING, required=(2,), ordered=3))
    assert kept == AnyOrder(letters("ac"), COMMA, None, required=(1,), ordered=2)
    assert any_order(AnyOrder(parts, COMMA, required=(1,))) == NOTHING
    assert any_order(AnyOrder(parts, COMMA, least=3)) == NOTHING
    assert any_order(AnyOrder(parts, COMMA, NOTHING, others_least=1)) == NOTHING


def test_a_part_that_calls_a_barren_rule_goes() -> None:
    barren = {"endless": Concat((Literal(b"a"), Call("endless")))}
    order = AnyOrder((Literal(b"b"), Call("endless")), COMMA)
    assert resolve(Grammar(order, barren), Limits()) == Grammar(AnyOrder(letters("b"), COMMA))
    with pytest.raises(ConstraintRefused):
        resolve(Grammar(AnyOrder(order.parts, COMMA, required=(1,)), barren), Limits())


def test_parts_may_hold_the_whole_again() -> None:
    inner = Union((Literal(b"."), Concat((Literal(b"("), Call("whole"), Literal(b")")))))
    parts = tuple(Concat((letter, inner)) for letter in letters("ab"))
    made = Automaton(Grammar(Call("whole"), {"whole": AnyOrder(parts, COMMA, required=(0,))}), Limits(depth=3))
    assert made.run(made.start, b"b(b.,a.),a(a.)") != DEAD
    assert made.run(made.start, b"b(b.)") == DEAD  # a is missing inside
    assert made.close(made.run(made.start, b"b(b(")) == b"a.),a.),a."
    assert made.run(made.start, b"b(b(b(b(") == DEAD  # deeper than a text may nest


def test_only_the_sets_that_a_text_passes_are_made() -> None:
    names = tuple(Literal(f'"{number}"'.encode()) for number in range(200))
    made = Automaton(Grammar(AnyOrder(names, COMMA, Chars(((0x61, 0x7A),)))))
    state = made.run(made.start, b",".join(name.data for name in reversed(names)))
    assert made.accepting(state)
    assert made.run(state, b',"7"') == DEAD
    assert made.run(state, b",x") != DEAD
    assert made.states < 2_000
