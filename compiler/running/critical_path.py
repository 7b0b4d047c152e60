"""Computes the critical path after every call of a program: the tokens of the longest path from it to the end.

    gen 20 ─┬─ gen 100 ── gen 30 ─┐                  ahead:  170 ─┬─ 150 ── 50 ─┐
            ├─ gen 10 ────────────┼─ gen 20                      ├─  30 ────────┼─ 20
            └─ gen 10 ────────────┘                              └─  30 ────────┘

With fewer places than branches, the runtime begins the branch first that the program would wait longest for. Texts are
expected to be as long as they were in earlier runs, and before there are any, as `max_tokens` allows. Only the order of
one program's own calls depends on it, so a wrong guess costs time and nothing else.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..graph import Graph, Node
from ..operations import Choose

_CHOICE = 1  # tokens that a `select` takes as long as: its choices are scored at once


@dataclass(slots=True)
class _Mean:
    total: int = 0
    count: int = 0


class CriticalPaths:
    """The critical paths of one graph; learns over its runs, from any thread.

    Args:
        calls: slots of the `Generate` and `Choose` nodes' variables.
    """

    def __init__(self, graph: Graph, calls: Mapping[Node, int]) -> None:
        self._graph = graph
        self._calls = calls
        self._means: dict[int, _Mean] = {}  # by slot
        self._noted = 0
        self._learn_at = 1  # texts noted, when paths are computed anew: 1, 2, 4, 8, ...
        self._last: tuple[Mapping[int, int], Mapping[int, int]] | None = None  # longest → ahead

    @property
    def matter(self) -> bool:
        """True if two calls may ever wait at the same time."""
        return len(self._graph.streams) > 1

    def note(self, slot: int, tokens: int) -> None:
        """Notes how many tokens a run's text had."""
        mean = self._means.setdefault(slot, _Mean())
        mean.total += tokens
        mean.count += 1
        self._noted += 1

    def ahead(self, longest: Mapping[int, int]) -> Mapping[int, int]:
        """Returns the tokens ahead of every call, by slot. `longest`: those that the gens of a run may have, by
        slot."""
        last = self._last
        if last is None or last[0] != longest or self._noted >= self._learn_at:
            while self._learn_at <= self._noted:
                self._learn_at *= 2
            last = self._last = (longest, self._computed(longest))
        return last[1]

    def expected(self, slot: int, longest: int) -> int:
        """Returns the tokens that a text is expected to have."""
        mean = self._means.get(slot)
        return longest if mean is None else min(longest, math.ceil(mean.total / mean.count))

    def _computed(self, longest: Mapping[int, int]) -> dict[int, int]:
        graph, ways = self._graph, dict[Node, int]()
        for node in reversed(graph.nodes):  # users first
            way = max((ways[user] for user in graph.users[node]), default=0)
            slot = self._calls.get(node)
            if slot is not None:
                way += _CHOICE if isinstance(node.op, Choose) else self.expected(slot, longest[slot])
            ways[node] = way
        return {slot: ways[node] for node, slot in self._calls.items()}
