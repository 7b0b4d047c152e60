"""Finds the items for which a function of many items raises, so that the others still get their answers.

    together([a, b, c, d]) raises ─┬─ together([a, b]) → its answers
                                   └─ together([c, d]) raises ─┬─ together([c]) → its answer
                                                               └─ together([d]) raises: the error is d's answer

A failing item costs a number of calls that is logarithmic in the number of items. Without a failure there is one
call.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

P = TypeVar("P")
R = TypeVar("R")


def isolate(items: Sequence[P], together: Callable[[Sequence[P]], Sequence[R]]) -> list[R | Exception]:
    """Returns the answer of `together` for each item, or the exception that it raises for that item alone.

    Args:
        together: gives one answer for each item; an answer depends on its own item only. When it raises, it must leave
            all state as it was, because it is called again with a part of the items.
    """
    if not items:
        return []
    try:
        answers = together(items)
    except Exception as error:
        if len(items) == 1:
            return [error]
        middle = len(items) // 2
        return isolate(items[:middle], together) + isolate(items[middle:], together)
    assert len(answers) == len(items), "one answer for each item"
    return list(answers)
