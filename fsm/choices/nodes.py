"""Texts of a search for choices, sorted, and the nodes of its tree: tokens that lie inside some text.

Texts that go on after some bytes are a range:

    A   A+   A++   B          "A" is chosen when the text goes on with it and not with "A+", the next longer choice
    └────┴────┘
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Log = NDArray[np.float64]  # natural logarithms
NOTHING = -np.inf


class Texts:
    """The texts of a search, each once, in order; a place is an index into them.

    Args:
        choices: what each spells; several may spell the same.
        condition: a text that is no choice and that all choices begin with; b"" for none.
    """

    def __init__(self, choices: Sequence[bytes], condition: bytes = b"") -> None:
        self._texts = sorted({*choices, condition} - {b""})
        self.of_choices = [bisect.bisect_left(self._texts, text) for text in choices]
        self.of_condition = bisect.bisect_left(self._texts, condition) if condition else None
        self._longer = self._next_longer(set(self.of_choices))

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, place: int) -> bytes:
        return self._texts[place]

    def extending(self, done: bytes) -> tuple[int, int]:
        """Returns the texts [first, last) that begin with these bytes and are longer."""
        first = bisect.bisect_right(self._texts, done)
        return first, bisect.bisect_left(self._texts, True, lo=first, key=lambda text: not text.startswith(done))

    def exclusive(self, lower: Log, upper: Log) -> tuple[Log, Log]:
        """Bounds for "begins with it" → bounds for "and with no longer choice". Both: [texts]"""
        if not self._longer:
            return lower, upper
        only_lower, only_upper = lower.copy(), upper.copy()
        for place, longer in self._longer.items():
            only_lower[place] = _less(lower[place], np.logaddexp.reduce(upper[longer]))
            only_upper[place] = _less(upper[place], np.logaddexp.reduce(lower[longer]))
        return only_lower, only_upper

    def _next_longer(self, choices: set[int]) -> dict[int, list[int]]:
        """Maps a choice to those that begin with it, and with no other choice between; only where there are some."""
        longer: dict[int, list[int]] = {}
        stack: list[int] = []  # each begins with the one before it
        for place in sorted(choices):
            while stack and not self._texts[place].startswith(self._texts[stack[-1]]):
                stack.pop()
            if stack:
                longer.setdefault(stack[-1], []).append(place)
            stack.append(place)
        return longer


def _less(whole: float, part: float) -> float:
    """Computes log(exp(whole) − exp(part)); nothing when that is not positive."""
    return whole + float(np.log1p(-np.exp(part - whole))) if part < whole else NOTHING


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Asks for the log-probabilities of `ids` after a node.

    ids     [ reaching text first | … | reaching text last − 1 | tokens to go on with | usual tokens ]
    bounds    ^0                    ^                          ^ one more than texts
    places                                                       of each: a text that it goes on with
    """

    ids: NDArray[np.int32]
    bounds: NDArray[np.int64]
    places: list[int]


@dataclass(slots=True, eq=False)
class Usual:
    """Marks a node on the usual tokens of some texts: which texts, and what comes next: another node, or their end."""

    texts: set[int] = field(default_factory=set)
    children: dict[int, SearchNode | None] = field(default_factory=dict)  # by token
    logprobs: dict[int, float] = field(default_factory=dict)  # of those tokens, when they are known


@dataclass(slots=True, eq=False)
class SearchNode:
    """Some tokens after those that all texts share: one more than its parent has.

    Texts [first, last) begin with their `length` bytes, and are longer.
    """

    parent: SearchNode | None  # None: the root, without tokens
    token: int
    length: int
    first: int
    last: int
    usual: Usual | None = None
    mass: float | None = None  # log-probability; None until the parent has its answer
    depth: int = field(init=False)  # tokens
    question: Question | None = None
    answer: Log | None = None

    def __post_init__(self) -> None:
        self.depth = 0 if self.parent is None else self.parent.depth + 1

    @property
    def tokens(self) -> list[int]:
        """All of them, in order."""
        tokens = []
        node = self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tokens[::-1]
