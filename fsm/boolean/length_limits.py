"""Expressions cut to texts of certain lengths, where counters can say it.

A pattern beside minLength and maxLength is the most frequent intersection. A product would have a state for every
length; most patterns have one part whose length varies much, and its counter can take the bounds over.
"""

import itertools
import math

from ..algebra import ANY_CHARACTER, ANY_TEXT, concat, repeat, union
from ..language import EMPTY_TEXT, NOTHING, Concat, Language, Repeat, Union
from .text_lengths import Lengths, lengths

_MOST_CHOICES = 16  # of lengths of the parts beside the one whose counter takes the bounds
_ENDLESS = math.inf


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
    """Bounds for the part that varies most, for every length that the others together can have.

    https?://.+ of at most 20 characters is http://.{1,13} or https://.{1,12}.
    """
    spans: list[Lengths] = []
    for part in parts:
        bounds = lengths(part)
        assert bounds is not None, "a part without texts leaves the whole without, which was asked before"
        spans.append(bounds)
    main = max(range(len(parts)), key=lambda at: _ENDLESS if (end := spans[at][1]) is None else end - spans[at][0])
    others = [(at, span) for at, span in enumerate(spans) if at != main]
    if any(end is None for _, (_, end) in others):
        return None
    choices = [range(begin, (end or 0) + 1) for _, (begin, end) in others]
    if math.prod(map(len, choices)) > _MOST_CHOICES:
        return None
    options: list[Language] = []
    for lengths_of_others in itertools.product(*choices):
        rest = sum(lengths_of_others)
        exact = [with_length(parts[at], each, each) for (at, _), each in zip(others, lengths_of_others, strict=True)]
        if most is not None and most < rest:
            continue
        cut = with_length(parts[main], max(least - rest, 0), None if most is None else most - rest)
        chosen = [each for each in (*exact[:main], cut, *exact[main:]) if each is not None]
        if len(chosen) < len(parts):
            return None
        options.append(concat(chosen))
    return union(options)


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
