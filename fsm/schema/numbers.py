"""Numbers of a range as expressions over their digits, and multiples of a number as automata over remainders.

Plain decimal notation: no leading zeros, no "-0". Lengths are bounded, so that a model cannot go on for ever, and so
that different texts stay different as doubles near a bound: a validator that reads doubles must agree with the digits.

A tail is the digits after the point, read as 0.tail: it may end early, zeros may follow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction

from ..algebra import concat, difference, intersection, repeat
from ..boolean.character_automata import minimal, trimmed
from ..errors import Unsupported
from ..language import EMPTY_TEXT, NOTHING, Dfa, Language
from .expressions import DIGIT, NONZERO, digits, literal, optional, union

INTEGER_DIGITS = 19  # of an integer without bounds: 64 bits
LONGEST_BOUND = 40  # digits of a bound that is honoured as written

Number = int | Decimal


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit of a range. Open: the value itself is outside."""

    value: Number
    open: bool


def integers(low: int | None, high: int | None) -> Language:
    """Admits integers between two, both included."""
    if (low is not None and low > 10**LONGEST_BOUND) or (high is not None and high < -(10**LONGEST_BOUND)):
        raise Unsupported(f"a bound of more than {LONGEST_BOUND} digits; write a smaller one", keyword="minimum")
    if low is not None and low < -(10**LONGEST_BOUND):
        low = None
    if high is not None and high > 10**LONGEST_BOUND:
        high = None
    options: list[Language] = []
    if low is None or low < 0:
        options.append(concat([literal("-"), _naturals(max(1, -high if high is not None else 1), low and -low)]))
    if high is None or high >= 0:
        options.append(_naturals(max(0, low or 0), high))
    return union([option for option in options if option != NOTHING])


def _naturals(low: int, high: int | None) -> Language:
    """Admits integers from `low` ≥ 0; without `high`, of at most INTEGER_DIGITS digits or one more than `low` has."""
    if high is None:
        most = max(INTEGER_DIGITS, len(str(low)) + 1)
        if low <= 1:
            numbers = concat([NONZERO, repeat(DIGIT, 0, most - 1)])
            return numbers if low else union([literal("0"), numbers])
        length = len(str(low))
        return union([_naturals(low, 10**length - 1), concat([NONZERO, repeat(DIGIT, length, most - 1)])])
    if low > high:
        return NOTHING
    first, last = str(low), str(high)
    if len(first) == len(last):
        return _same_length(first, last)
    options = [_same_length(first, "9" * len(first))]
    if len(first) + 1 < len(last):
        options.append(concat([NONZERO, repeat(DIGIT, len(first), len(last) - 2)]))
    options.append(_same_length("1" + "0" * (len(last) - 1), last))
    return union(options)


def _same_length(low: str, high: str) -> Language:
    """Digits of one length between two, as texts."""
    if low == high:
        return literal(low)
    if low.strip("0") == "" and high.strip("9") == "":
        return repeat(DIGIT, len(low), len(low))
    first, last = int(low[0]), int(high[0])
    rest = len(low) - 1
    if first == last:
        return concat([literal(low[0]), _same_length(low[1:], high[1:])])
    options: list[Language] = []
    full_low, full_high = low[1:].strip("0") == "", high[1:].strip("9") == ""
    if not full_low:
        options.append(concat([literal(low[0]), _same_length(low[1:], "9" * rest)]))
    begin, end = first + (not full_low), last - (not full_high)
    if begin <= end:
        options.append(concat([digits(begin, end), repeat(DIGIT, rest, rest)]))
    if not full_high:
        options.append(concat([literal(high[0]), _same_length("0" * rest, high[1:])]))
    return union(options)


class Decimals:
    """Writes numbers with a bounded count of digits before and after the point."""

    def __init__(self, whole_digits: int, fraction_digits: int) -> None:
        self.whole_digits = whole_digits
        self.fraction_digits = fraction_digits

    def between(self, least: Bound | None, most: Bound | None) -> Language:
        zero = Bound(0, False)
        options: list[Language] = []
        if least is None or least.value < 0:
            low = Bound(0, True)
            if most is not None and most.value < 0:
                low = Bound(-most.value, most.open)
            high = Bound(-least.value, least.open) if least is not None else None
            options.append(concat([literal("-"), self._magnitudes(low, high)]))
        if most is None or most.value >= 0:
            options.append(self._magnitudes(least if least is not None and least.value >= 0 else zero, most))
        return union([option for option in options if option != NOTHING])

    def _magnitudes(self, least: Bound, most: Bound | None) -> Language:
        """Admits numbers from `least` ≥ 0."""
        low, low_tail = split(least.value)
        if len(str(low)) > LONGEST_BOUND:
            raise Unsupported(f"a bound of more than {LONGEST_BOUND} digits; write a smaller one", keyword="minimum")
        if most is not None and most.value > 10**LONGEST_BOUND:
            most = None
        count = self.fraction_digits
        high, high_tail = split(most.value) if most is not None else (None, "")
        if high is not None and low > high:
            return NOTHING
        if high is not None and most is not None and low == high:
            tail = self._tails_between(low_tail, least.open, high_tail, most.open, count)
            return concat([literal(str(low)), tail])
        options = [concat([literal(str(low)), self._tails_from(low_tail, least.open, count)])]
        last = high - 1 if high is not None else 10 ** max(self.whole_digits, len(str(low))) - 1
        if low + 1 <= last:
            options.append(concat([_naturals(low + 1, last), self._any_tail()]))
        if most is not None:
            options.append(concat([literal(str(high)), self._tails_to(high_tail, most.open, count)]))
        return union([option for option in options if option != NOTHING])

    def _any_tail(self) -> Language:
        if not self.fraction_digits:
            return EMPTY_TEXT
        return optional(concat([literal("."), repeat(DIGIT, 1, self.fraction_digits)]))

    def _tails_from(self, tail: str, is_open: bool, count: int) -> Language:
        if not tail and not is_open:
            return self._any_tail()
        return concat([literal("."), _from(tail, is_open, count)])

    def _tails_to(self, tail: str, is_open: bool, count: int) -> Language:
        if not tail and is_open:
            return NOTHING
        return union([EMPTY_TEXT, *self._pointed(_to(tail, is_open, count, True))])

    def _tails_between(self, low: str, low_open: bool, high: str, high_open: bool, count: int) -> Language:
        if not low and not low_open:
            return self._tails_to(high, high_open, count)
        return union(self._pointed(_between(low, low_open, high, high_open, count)))

    @staticmethod
    def _pointed(tail: Language) -> list[Language]:
        return [] if tail == NOTHING else [concat([literal("."), tail])]


def _from(tail: str, is_open: bool, count: int) -> Language:
    """Admits at most `count` digits that are, as a tail, at least `tail` (more than it, when open)."""
    if not tail and not is_open:
        return repeat(DIGIT, 0, count)
    if not count:
        return NOTHING
    first = int(tail[0]) if tail else 0
    options = [
        concat([digits(first + 1, 9), repeat(DIGIT, 0, count - 1)]),
        concat([digits(first, first), _from(tail[1:], is_open, count - 1)]),
    ]
    return union([option for option in options if option != NOTHING])


def _to(tail: str, is_open: bool, count: int, some: bool) -> Language:
    """Admits at most `count` digits (`some`: not none) that, as a tail, are at most `tail` (less, when open)."""
    if not tail:
        return NOTHING if is_open else repeat(literal("0"), int(some), count)
    options: list[Language] = [] if some else [EMPTY_TEXT]
    if count:
        first = int(tail[0])
        options.append(concat([digits(0, first - 1), repeat(DIGIT, 0, count - 1)]))
        options.append(concat([digits(first, first), _to(tail[1:], is_open, count - 1, False)]))
    return union([option for option in options if option != NOTHING])


def _between(low: str, low_open: bool, high: str, high_open: bool, count: int) -> Language:
    """Digits between two tails; nothing is not among them, since `low` is above it."""
    if not high or not count:
        return NOTHING
    first, last = int(low[0]) if low else 0, int(high[0])
    if first == last:
        if not low[1:] and not low_open:
            rest = _to(high[1:], high_open, count - 1, False)
        else:
            rest = _between(low[1:], low_open, high[1:], high_open, count - 1)
        return concat([digits(first, first), rest])
    options = [
        concat([digits(first, first), _from(low[1:], low_open, count - 1)]),
        concat([digits(first + 1, last - 1), repeat(DIGIT, 0, count - 1)]),
        concat([digits(last, last), _to(high[1:], high_open, count - 1, False)]),
    ]
    return union([option for option in options if option != NOTHING])


def split(value: Number) -> tuple[int, str]:
    """Splits a number ≥ 0 into its whole part and the digits after its point, as a double has them."""
    if isinstance(value, int):
        return value, ""
    whole, _, tail = format(_as_double(value), "f").partition(".")
    return int(whole), tail.rstrip("0")


def _as_double(value: Decimal) -> Decimal:
    if value == value.to_integral_value():
        return value
    return Decimal(repr(float(value)))


MOST_REMAINDERS = 10_000  # states of the automaton of a multipleOf


def scaled(step: Number) -> tuple[int, int]:
    """Scales a step to (decimals, units of the last decimal)."""
    fraction = Fraction(step)
    decimals = 0
    while fraction.denominator != 1:
        fraction *= 10
        decimals += 1
    return decimals, fraction.numerator


def multiples(step: Number) -> Language:
    """Admits every decimal text of a multiple, with leading zeros and all: an automaton whose states are remainders.

        phase 0 before the point (remainder of the digits), phase 1+n after n digits that follow it
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
    """Admits every plain decimal text of one number."""
    whole, tail = split(-value if value < 0 else value)
    ending = concat([literal("." + tail), repeat(literal("0"), 0, None)]) if tail else zeros()
    sign = literal("-") if value < 0 else EMPTY_TEXT if value else optional(literal("-"))
    return concat([sign, literal(str(whole)), ending])


WHOLE_DIGITS = 15  # before the point of a number without bounds
FRACTION_DIGITS = 17  # after it
EXACT_DIGITS = 15  # that every double keeps

_EXACT = Context(prec=2_000)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of a range, and of some multiples. `whole`: True only integers, False none, None both."""

    least: Bound | None = None
    most: Bound | None = None
    multiple: Number | None = None
    not_multiples: tuple[Number, ...] = ()
    excluded: tuple[Number, ...] = ()
    whole: bool | None = None

    @property
    def empty(self) -> bool:
        """Tells whether the bounds leave nothing."""
        if self.whole:
            low, high = self._integers()
            return low is not None and high is not None and low > high
        if self.least is None or self.most is None:
            return False
        if self.least.value == self.most.value:
            return self.least.open or self.most.open
        return self.least.value > self.most.value

    @property
    def exact(self) -> bool:
        """Tells whether every number that is asked for has a text here: integers between two bounds do."""
        return self.whole is True and self.least is not None and self.most is not None

    def _integers(self) -> tuple[int | None, int | None]:
        """Returns the bounds as integers, both included."""
        low = high = None
        if self.least is not None:
            low = _rounded(self.least.value, ROUND_CEILING)
            low += self.least.open and low == self.least.value
        if self.most is not None:
            high = _rounded(self.most.value, ROUND_FLOOR)
            high -= self.most.open and high == self.most.value
        return low, high

    def few_integers(self, most: int) -> list[int] | None:
        """Lists all integers of these, ascending; None where the bounds have more than `most` between them."""
        low, high = self._integers()
        if low is None or high is None or high - low >= most:
            return None
        return [value for value in range(low, high + 1) if self.holds(value)]

    def holds(self, value: Number) -> bool:
        """Tells whether a number is one of these."""
        if self.whole is not None and (value == _rounded(value, ROUND_FLOOR)) != self.whole:
            return False
        if self.least is not None and (value < self.least.value or (self.least.open and value == self.least.value)):
            return False
        if self.most is not None and (value > self.most.value or (self.most.open and value == self.most.value)):
            return False
        if self.multiple is not None and not _divides(self.multiple, value):
            return False
        return value not in self.excluded and not any(_divides(step, value) for step in self.not_multiples)

    def language(self) -> Language:
        """Returns the numbers as texts.

        Raises:
            Unsupported: a multipleOf with too many remainders to follow, a bound with too many digits.
        """
        if self.empty:
            return NOTHING
        whole = self.whole or (self.multiple is not None and Fraction(self.multiple).denominator == 1)
        language = self._whole_numbers() if whole else self._decimals()
        if whole and self.whole is False:
            return NOTHING
        barred: list[Language] = [spellings(value) for value in self.excluded]
        barred += [multiples(step) for step in self.not_multiples]
        if self.whole is False:
            barred.append(concat([optional(literal("-")), repeat(DIGIT, 1, None), zeros()]))
        return difference(language, union(barred))

    def _whole_numbers(self) -> Language:
        low, high = self._integers()
        if self.multiple is None or (step := Fraction(self.multiple).numerator) == 1:
            return integers(low, high)
        # Remainders times digits are states; without bounds there are as many digits as leave few of them.
        edge = 10 ** max(len(str(step)) + 1, min(INTEGER_DIGITS, MOST_REMAINDERS // step)) - 1
        low = -max(edge, -10 * (high or 0)) if low is None else low
        high = max(edge, 10 * low) if high is None else high
        return intersection(integers(low, high), multiples(step))

    def _decimals(self) -> Language:
        bounds = [bound.value for bound in (self.least, self.most) if bound is not None]
        plain = bool(self.not_multiples or self.excluded) or self.whole is False
        fraction_digits = FRACTION_DIGITS
        if bounds or plain:
            largest = max((abs(_rounded(value, ROUND_FLOOR)) for value in bounds), default=0)
            fraction_digits = max(0, EXACT_DIGITS - (len(str(largest)) if largest else 0))
        whole_digits = WHOLE_DIGITS
        step = None
        if self.multiple is not None:
            decimals, step = scaled(self.multiple)
            fraction_digits = min(fraction_digits, decimals)
            whole_digits = EXACT_DIGITS - min(decimals, EXACT_DIGITS - 1)
        found = Decimals(whole_digits, fraction_digits).between(self.least, self.most)
        if step is not None and step != 1:
            assert self.multiple is not None, "a step is made of it"
            return intersection(found, multiples(self.multiple))
        if not bounds and not plain and step is None:
            sign = optional(union([literal("+"), literal("-")]))
            exponent = concat([union([literal("e"), literal("E")]), sign, repeat(DIGIT, 1, 2)])
            return concat([found, optional(exponent)])
        return found


def meet(left: Bound | None, right: Bound | None, larger: bool) -> Bound | None:
    """Returns the stricter of two bounds; `larger`: they are lower ones."""
    if left is None or right is None:
        return left or right
    if left.value == right.value:
        return left if left.open else right
    return left if (left.value > right.value) == larger else right


def common_multiple(left: Number | None, right: Number | None) -> Number | None:
    """Returns the smallest number that is a multiple of both."""
    if left is None or right is None:
        return left if right is None else right
    one, other = Fraction(left), Fraction(right)
    found = Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))
    if found.denominator == 1:
        return found.numerator
    return _EXACT.divide(Decimal(found.numerator), Decimal(found.denominator))


def _divides(step: Number, value: Number) -> bool:
    return (Fraction(value) / Fraction(step)).denominator == 1


def _rounded(value: Number, rounding: str) -> int:
    return value if isinstance(value, int) else int(value.to_integral_value(rounding))
