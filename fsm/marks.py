"""Builds the languages of free text around marks: texts without them, and texts up to the first of them.

    up_to("<b>") · body · without("<b>")       free text, a body after the mark, free text again

A text of such a sequence can be read in one way only as far as marks go: the first place where one ends is the mark.
"""

from collections.abc import Iterable

from .algebra import ANY_CHARACTER, ANY_TEXT, concat, difference, union
from .boolean.resolution import settled
from .errors import Limits
from .language import NOTHING, Language, Literal


def without(marks: Iterable[str], limits: Limits, unlike: Language = NOTHING) -> Language:
    """Returns the texts in which no mark occurs, and that are not in `unlike`.

    Raises:
        LimitExceeded: the automaton is larger than the limits.
    """
    occurring = concat((ANY_TEXT, _any_of(marks), ANY_TEXT))
    return settled(difference(ANY_TEXT, union((occurring, unlike))), limits)


def up_to(mark: str, limits: Limits, among: Iterable[str] = (), unlike: Language = NOTHING) -> Language:
    """Returns the texts that end with `mark` where no mark has ended before, and that are not in `unlike`.

    Args:
        among: the marks that may not end before; `mark` may not, either.

    Raises:
        LimitExceeded: the automaton is larger than the limits.
    """
    ended = concat((ANY_TEXT, Literal(mark.encode())))
    longer = concat((ANY_TEXT, _any_of((mark, *among)), ANY_CHARACTER, ANY_TEXT))
    return settled(difference(ended, union((longer, unlike))), limits)


def _any_of(marks: Iterable[str]) -> Language:
    return union(Literal(mark.encode()) for mark in dict.fromkeys(marks))
