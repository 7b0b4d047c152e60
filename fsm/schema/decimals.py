"""Ranges of numbers as expressions over their digits.

A tail is the digits after the point, read as 0.tail: it may end early, zeros may follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from ..algebra import concat, repeat
from ..errors import Unsupported
from ..language import EMPTY_TEXT, NOTHING, Language
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
    """Integers between two, both included."""
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
    """Integers from `low` ≥ 0; without `high`, of at most INTEGER_DIGITS digits or one more than `low` has."""
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
    """Numbers with a bounded count of digits before and after the point."""

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
        """Numbers from `least` ≥ 0."""
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
    """At most `count` digits that are, as a tail, at least `tail` (more than it, when open)."""
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
    """At most `count` digits (`some`: not none) that are, as a tail, at most `tail` (less than it, when open)."""
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
    """A number ≥ 0 as its whole part and the digits after its point, as a double has them."""
    if isinstance(value, int):
        return value, ""
    whole, _, tail = format(_as_double(value), "f").partition(".")
    return int(whole), tail.rstrip("0")


def _as_double(value: Decimal) -> Decimal:
    if value == value.to_integral_value():
        return value
    return Decimal(repr(float(value)))
