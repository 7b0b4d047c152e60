"""Nodes of a search for choices: tokens that lie inside some text, as a tree."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .texts import Log


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """What is to be known of the model behind a node: the log-probabilities of `ids`.

    ids     [ reaching text first | … | reaching text last − 1 | tokens to go on with | usual tokens ]
    bounds    ^0                    ^                          ^ one more than texts
    places                                                       of each: a text that it goes on with
    """

    ids: NDArray[np.int32]
    bounds: NDArray[np.int64]
    places: list[int]


@dataclass(slots=True, eq=False)
class Usual:
    """Of a node on the usual tokens of some texts: which texts, and what comes next: another node, or their end."""

    texts: set[int] = field(default_factory=set)
    children: dict[int, Node | None] = field(default_factory=dict)  # by token
    logprobs: dict[int, float] = field(default_factory=dict)  # of those tokens, when they are known


@dataclass(slots=True, eq=False)
class Node:
    """Some tokens behind those that all texts share: one more than its parent has.

    Texts [first, last) begin with their `length` bytes, and are longer.
    """

    parent: Node | None  # None: the root, without tokens
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
