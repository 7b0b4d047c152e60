"""Multiples of a number, and all spellings of one, as languages of plain decimal texts."""

from __future__ import annotations

from fractions import Fraction

from ..algebra import concat, repeat
from ..boolean.character_dfa import minimal, trimmed
from ..errors import Unsupported
from ..language import EMPTY_TEXT, Dfa, Language
from .decimals import Number, split
from .expressions import literal, optional

MOST_REMAINDERS = 10_000  # states of the automaton of a multipleOf


def scaled(step: Number) -> tuple[int, int]:
    """A step as (decimals, units of the last decimal)."""
    fraction = Fraction(step)
    decimals = 0
    while fraction.denominator != 1:
        fraction *= 10
        decimals += 1
    return decimals, fraction.numerator


def multiples(step: Number) -> Language:
    """Every decimal text of a multiple, with leading zeros and all: an automaton whose states are remainders.

        phase 0 before the point (remainder of the digits), phase 1+n after n digits behind it
        start, after the sign

    Raises:
        Unsupported: there are too many remainders.
    """
    decimals, units = scaled(step)
    phases = decimals + 2
    if units * phases > MOST_REMAINDERS:
        raise Unsupported(
            f"{step} has too many remainders to follow ({units}); write a smaller number, or an enum of its multiples",
            keyword="multipleOf",
        )

    def state(phase: int, remainder: int) -> int:
        return 2 + phase * units + remainder

    def digits(phase: int, remainder: int) -> dict[int, int]:
        return {0x30 + digit: state(phase, (remainder * 10 + digit) % units) for digit in range(10)}

    accepting = [False, False]
    rows = [digits(0, 0) | {ord("-"): 1}, digits(0, 0)]
    for phase in range(phases):
        missing = 10 ** (decimals - max(0, phase - 1))
        for remainder in range(units):
            accepting.append(phase != 1 and remainder * missing % units == 0)
            if phase == 0:
                rows.append(digits(0, remainder) | {ord("."): state(1, remainder)})
            elif phase <= decimals:
                rows.append(digits(phase + 1, remainder))
            else:
                rows.append({ord("0"): state(phase, remainder)})
    live = trimmed(accepting, rows)
    assert live is not None, "0 is a multiple of everything"
    accepting, rows = minimal(*live)
    edges = (tuple((((point, point),), target) for point, target in row.items()) for row in rows)
    return Dfa(tuple(accepting), tuple(edges))


def zeros() -> Language:
    return optional(concat([literal("."), repeat(literal("0"), 1, None)]))


def spellings(value: Number) -> Language:
    """Every plain decimal text of one number."""
    whole, tail = split(-value if value < 0 else value)
    behind = concat([literal("." + tail), repeat(literal("0"), 0, None)]) if tail else zeros()
    sign = literal("-") if value < 0 else EMPTY_TEXT if value else optional(literal("-"))
    return concat([sign, literal(str(whole)), behind])
