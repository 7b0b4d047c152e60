"""Expressions cut to texts of certain lengths, where counters can say it.

A pattern beside minLength and maxLength is the most frequent intersection. A product would have a state for every
length; most patterns have one part of variable length, and its counter can take the bounds over.
"""

from .algebra import ANY_CHARACTER, ANY_TEXT, concat, repeat, union
from .language import EMPTY_TEXT, NOTHING, Concat, Language, Repeat, Union
from .text_lengths import Lengths, lengths


def as_length_limit(node: Language) -> Lengths | None:
    """Least and most, of an expression that admits every text of certain lengths and says so by its form."""
    match node:
        case Repeat(body, least, most) if body == ANY_CHARACTER:
            return least, most
        case _:
            return (1, 1) if node == ANY_CHARACTER else None


def with_length(node: Language, least: int, most: int | None) -> Language | None:
    """The texts with at least `least` and at most `most` characters; None where counters cannot say it."""
    if most is not None and most < least:
        return NOTHING
    bounds = lengths(node)
    if bounds is None or (most is not None and bounds[0] > most) or (bounds[1] is not None and bounds[1] < least):
        return NOTHING
    if bounds[0] >= least and (most is None or (bounds[1] is not None and bounds[1] <= most)):
        return node
    match node:
        case Union(options):
            cut = [with_length(option, least, most) for option in options]
            return None if None in cut else union(option for option in cut if option is not None)
        case Concat(parts):
            return _concat_with_length(parts, least, most)
        case Repeat():
            return _repeat_with_length(node, least, most)
        case _:
            return None


def _concat_with_length(parts: tuple[Language, ...], least: int, most: int | None) -> Language | None:
    """Where one part only has texts of several lengths, its bounds are what the others leave."""
    variable, fixed = None, 0
    for at, part in enumerate(parts):
        bounds = lengths(part)
        assert bounds is not None, "a part without texts leaves the whole without, which was asked before"
        if bounds[0] == bounds[1]:
            fixed += bounds[0]
        elif variable is None:
            variable = at
        else:
            return None
    assert variable is not None, "fixed lengths lie within the bounds or outside, which was asked before"
    cut = with_length(parts[variable], max(least - fixed, 0), None if most is None else most - fixed)
    return None if cut is None else concat((*parts[:variable], cut, *parts[variable + 1 :]))


def _repeat_with_length(node: Repeat, least: int, most: int | None) -> Language | None:
    bounds = lengths(node.body)
    if node == ANY_TEXT:
        return repeat(ANY_CHARACTER, least, most)
    if bounds is None:
        return None
    if bounds[0] == bounds[1] and bounds[0] > 0:
        each = bounds[0]
        fewest = max(node.least, -(-least // each))
        allowed = [count for count in (node.most, None if most is None else most // each) if count is not None]
        return NOTHING if allowed and min(allowed) < fewest else repeat(node.body, fewest, min(allowed, default=None))
    if (node.least, node.most) == (0, 1):
        body = with_length(node.body, least, most)
        return None if body is None else union((EMPTY_TEXT, body)) if not least else body
    return None
