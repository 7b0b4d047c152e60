"""Numbers of a range as expressions over their digits.

Plain decimal notation: no leading zeros, no "-0". Lengths are bounded, so that a model cannot go on for ever, and so
that different texts stay different as doubles near a bound: a validator that reads doubles must agree with the digits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction

from ..algebra import concat, difference, intersection, repeat
from ..language import NOTHING, Language
from .decimals import INTEGER_DIGITS, Bound, Decimals, Number, integers
from .expressions import DIGIT, literal, optional, union
from .multiples import MOST_REMAINDERS, multiples, scaled, spellings, zeros

WHOLE_DIGITS = 15  # before the point of a number without bounds
FRACTION_DIGITS = 17  # after it
EXACT_DIGITS = 15  # that every double keeps

_EXACT = Context(prec=2_000)


@dataclass(frozen=True, slots=True)
class Numbers:
    """What is asked of a number. `whole`: True only integers, False none, None both."""

    least: Bound | None = None
    most: Bound | None = None
    multiple: Number | None = None
    not_multiples: tuple[Number, ...] = ()
    excluded: tuple[Number, ...] = ()
    whole: bool | None = None

    @property
    def empty(self) -> bool:
        """Whether the bounds leave nothing."""
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
        """Whether every number that is asked for has a text here: integers between two bounds do."""
        return self.whole is True and self.least is not None and self.most is not None

    def _integers(self) -> tuple[int | None, int | None]:
        """The bounds as integers, both included."""
        low = high = None
        if self.least is not None:
            low = _rounded(self.least.value, ROUND_CEILING)
            low += self.least.open and low == self.least.value
        if self.most is not None:
            high = _rounded(self.most.value, ROUND_FLOOR)
            high -= self.most.open and high == self.most.value
        return low, high

    def few_integers(self, most: int) -> list[int] | None:
        """All integers of these, ascending; None where the bounds have more than `most` between them."""
        low, high = self._integers()
        if low is None or high is None or high - low >= most:
            return None
        return [value for value in range(low, high + 1) if self.holds(value)]

    def holds(self, value: Number) -> bool:
        """Whether a number is one of these."""
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
        """The numbers as texts.

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
    """The stricter of two bounds; `larger`: they are lower ones."""
    if left is None or right is None:
        return left or right
    if left.value == right.value:
        return left if left.open else right
    return left if (left.value > right.value) == larger else right


def common_multiple(left: Number | None, right: Number | None) -> Number | None:
    """The smallest number that is a multiple of both."""
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
