"""Expressions equal an independent recogniser: which texts they admit, and what is captured in them."""

import itertools
import random
from collections import Counter

import msgspec
import pytest
from umbel.fsm.automaton.automaton import Automaton
from umbel.fsm.composed.expression import Expression
from umbel.fsm.composed.nodes import repeating
from umbel.fsm.language import Grammar
from umbel.lang.protocol import ConstraintSpec
from umbel.srt.constraints.compiler import Compiled, compile_constraint

from .random_expressions import Part, Reference, built, composition, member, mutated

COMPOSITIONS, TEXTS = 200, 20


def enforced(expression: Expression) -> Automaton:
    """Returns the automaton that a runtime enforces an expression with."""
    compiled = compile_constraint(ConstraintSpec("expression", expression.source), "auto")
    assert isinstance(compiled, Compiled), compiled
    return Automaton(msgspec.msgpack.decode(compiled.constraint.data, type=Grammar))


def admits(automaton: Automaton, text: str) -> bool:
    state = automaton.run(automaton.start, text.encode())
    return state >= 0 and automaton.accepting(state)


def check(part: Part, expression: Expression, automaton: Automaton, text: str) -> bool:
    """Compares all three on one text; returns whether it is admitted."""
    wanted = Reference(text).read(part)
    assert admits(automaton, text) == (wanted is not None), (part, text)
    match = expression.match(text)
    assert (match is None) == (wanted is None), (part, text)
    if match is None or wanted is None:
        return False
    many = repeating(expression._tree())
    for name in expression.captures:
        texts = [held for captured, held in wanted if captured == name]
        assert match[name] == (texts if name in many else texts[0] if texts else None), (part, text, name)
        assert name in many or len(texts) <= 1, (part, text, name)
    return True


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.sampled(4)
def test_random_compositions_equal_the_reference(seed: int) -> None:
    """200 compositions in all, 20 texts each: members and texts that differ from one in a character."""
    met: Counter[str] = Counter()
    for number in range(COMPOSITIONS // 10):
        dice = random.Random(1_000 * seed + number)
        part = composition(dice, (f"c{count}" for count in itertools.count()))
        expression = built(part)
        automaton = enforced(expression)
        for index in range(TEXTS):
            text = member(dice, part)
            if index % 2:
                text = mutated(dice, text)
            met["admitted" if check(part, expression, automaton, text) else "others"] += 1
    assert met["admitted"] >= 150, met
    assert met["others"] >= 50, met
