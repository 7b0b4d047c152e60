"""The radix tree of the waiting requests, walked depth first, heaviest subtree first (policy dfs-weight).

    "You are …" ─┬─ "Hello" ─┬─ 3 requests         weight of a subtree: requests that wait in it
                 │           └─ 1 request          here: the 4 below "Hello", 3 then 1, then the 2 below "What"
                 └─ "What" ──── 2 requests

A request that ends inside the tree comes before those that go on from there. Equal weights: the subtree of the oldest
request first. A subtree that has been begun is finished first, or admissions, which make it lighter, would send the
walk to and fro between subtrees and lose what depth first gains.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...cache.radix_node import common_length
from ..request import Request

Tokens = NDArray[np.int32]

_NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)


def heaviest_first(waiting: Sequence[Request], begun: Tokens = _NO_TOKENS) -> list[Request]:
    """The walk. `begun`: tokens of the last admitted request; subtrees on its path come before heavier ones.

    Cost: sorting, then O(tokens compared) for every inner node.
    """
    ordered = sorted(waiting, key=_lexical)
    walk: list[Request] = []
    stack = [(0, len(ordered), True)] if ordered else []  # (range of `ordered`, it may lie on the path of `begun`)
    while stack:
        first, last, on_path = stack.pop()
        # Sorted neighbours differ least, so the first and the last of a range share what all of it shares.
        depth = common_length(ordered[first].tokens, ordered[last - 1].tokens)
        inner = first
        while inner < last and ordered[inner].length == depth:
            inner += 1
        walk.extend(ordered[first:inner])  # they end here: equal sequences, by arrival
        on_path = on_path and len(begun) > depth == common_length(begun[:depth], ordered[first].tokens)
        followed = int(begun[depth]) if on_path else None
        children = [
            (_token(ordered[start], depth) == followed, end - start, -_oldest(ordered[start:end]), start, end)
            for start, end in _children(ordered, inner, last, depth)
        ]
        stack.extend((start, end, begins) for begins, _, _, start, end in sorted(children))  # the last is walked next
    return walk


def _token(request: Request, position: int) -> int:
    return int(request.tokens[position])


def _oldest(requests: Sequence[Request]) -> int:
    return min(request.number for request in requests)


def _children(ordered: Sequence[Request], first: int, last: int, depth: int) -> list[tuple[int, int]]:
    """Ranges of [first, last) whose requests agree on the token behind `depth`."""
    children = []
    start = first
    for i in range(first + 1, last + 1):
        if i == last or _token(ordered[i], depth) != _token(ordered[start], depth):
            children.append((start, i))
            start = i
    return children


def _lexical(request: Request) -> tuple[bytes, int]:
    """Bytes that sort as the tokens do."""
    return (request.tokens.astype(">u4").tobytes(), request.number)
