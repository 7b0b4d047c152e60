"""Multiples of a number, and all spellings of one, as languages of plain decimal texts."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from ..errors import Unsupported
from ..language import EMPTY_TEXT, Dfa, Language, Ranges
from .decimals import Number, split
from .expressions import concat, literal, optional, repeat

MOST_REMAINDERS = 4_000  # states of the automaton of a multipleOf


def scaled(step: Number) -> tuple[int, int]:
    """A step as (decimals, units of the last decimal)."""
    fraction = Fraction(step)
    decimals = 0
    while fraction.denominator != 1:
        fraction *= 10
        decimals += 1
    return decimals, fraction.numerator


def multiples(step: Number) -> Language:
    """Every decimal text of a multiple: an automaton over the digits whose states are remainders.

    phase 0 before the point (remainder of the digits), phase 1+n after n digits behind it
    start, after the sign
    """
    decimals, units = scaled(step)
    phases = decimals + 2
    if units * phases > MOST_REMAINDERS:
        raise Unsupported(f"{step} has too many remainders to follow ({units}); write a smaller number, or its bounds")
    signed, first = 1, 2  # after the start, which is 0

    def state(phase: int, remainder: int) -> int:
        return first + phase * units + remainder

    accepting = [False, False]
    edges: list[Sequence[tuple[Ranges, int]]] = []
    opening = [(_one(str(digit)), state(0, digit % units)) for digit in range(10)]
    edges.append((*opening, (_one("-"), signed)))
    edges.append(opening)
    for phase in range(phases):
        for remainder in range(units):
            missing = decimals - max(0, phase - 1)
            accepting.append(phase != 1 and remainder * 10**missing % units == 0)
            out: list[tuple[Ranges, int]] = []
            if phase == 0:
                out += [(_one(str(d)), state(0, (remainder * 10 + d) % units)) for d in range(10)]
                out.append((_one("."), state(1, remainder)))
            elif phase <= decimals:
                out += [(_one(str(d)), state(phase + 1, (remainder * 10 + d) % units)) for d in range(10)]
            else:
                out.append((_one("0"), state(phase, remainder)))
            edges.append(out)
    return _trimmed(accepting, edges)


def _one(character: str) -> Ranges:
    return ((ord(character), ord(character)),)


def _trimmed(accepting: Sequence[bool], edges: Sequence[Sequence[tuple[Ranges, int]]]) -> Language:
    """Without the states from which no accepting one is reached, or that the start does not reach."""
    before: list[list[int]] = [[] for _ in edges]
    for source, out in enumerate(edges):
        for _, target in out:
            before[target].append(source)
    live = {state for state, accepts in enumerate(accepting) if accepts}
    pending = list(live)
    while pending:
        for source in before[pending.pop()]:
            if source not in live:
                live.add(source)
                pending.append(source)
    number: dict[int, int] = {0: 0}
    order = [0]
    for source in order:
        for _, target in edges[source]:
            if target in live and target not in number:
                number[target] = len(order)
                order.append(target)
    return Dfa(
        tuple(accepting[state] for state in order),
        tuple(tuple((ranges, number[to]) for ranges, to in edges[state] if to in live) for state in order),
    )


def zeros() -> Language:
    return optional(concat([literal("."), repeat(literal("0"), 1, None)]))


def spellings(value: Number) -> Language:
    """Every plain decimal text of one number."""
    whole, tail = split(-value if value < 0 else value)
    behind = concat([literal("." + tail), repeat(literal("0"), 0, None)]) if tail else zeros()
    sign = literal("-") if value < 0 else EMPTY_TEXT if value else optional(literal("-"))
    return concat([sign, literal(str(whole)), behind])
