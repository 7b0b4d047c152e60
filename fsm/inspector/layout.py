"""Where the states of a graph are drawn: in layers from left to right (Sugiyama, Tagawa and Toda, 1981).

1  edges that close a circle are set aside (depth first search)
2  a state's layer is the longest way to it
3  an edge across several layers passes a joint in each, so that it does not cross states
4  states of a layer are ordered by where their neighbours stand, in sweeps back and forth
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_SWEEPS = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """layers: of items from top to bottom, each a state (an int) or a joint of an edge (a tuple).

    backward: pairs that close a circle, a state with itself among them. Every other pair leads from a layer to a
    later one, over the joints `(source, target, layer)`.
    """

    layers: tuple[tuple[Item, ...], ...]
    backward: frozenset[tuple[int, int]]


Item = int | tuple[int, int, int]


def layered(start: int, states: Sequence[int], pairs: Iterable[tuple[int, int]]) -> Layout:
    """Of a graph in which every state is reached from the start."""
    after: dict[int, list[int]] = {state: [] for state in states}
    for source, target in pairs:
        after[source].append(target)
    backward, finished = _circles(start, after)
    depth = dict.fromkeys(states, 0)
    for source in reversed(finished):  # sources before targets
        for target in after[source]:
            if (source, target) not in backward:
                depth[target] = max(depth[target], depth[source] + 1)
    layers: list[list[Item]] = [[] for _ in range(max(depth.values()) + 1)]
    for state in states:
        layers[depth[state]].append(state)
    links: list[tuple[Item, Item]] = []
    for source, targets in after.items():
        for target in targets:
            if (source, target) in backward:
                continue
            way: list[Item] = [source]
            for layer in range(depth[source] + 1, depth[target]):
                way.append((source, target, layer))
                layers[layer].append(way[-1])
            way.append(target)
            links += itertools.pairwise(way)
    _order(layers, links)
    return Layout(tuple(map(tuple, layers)), frozenset(backward))


def _circles(start: int, after: dict[int, list[int]]) -> tuple[set[tuple[int, int]], list[int]]:
    """Edges back to a state that the search is inside of, and the states in the order in which it left them."""
    backward: set[tuple[int, int]] = set()
    finished: list[int] = []
    inside, seen = {start}, {start}
    path = [(start, iter(after[start]))]
    while path:
        state, targets = path[-1]
        target = next(targets, None)
        if target is None:
            path.pop()
            inside.discard(state)
            finished.append(state)
        elif target in inside:
            backward.add((state, target))
        elif target not in seen:
            seen.add(target)
            inside.add(target)
            path.append((target, iter(after[target])))
    return backward, finished


def _order(layers: list[list[Item]], links: Sequence[tuple[Item, Item]]) -> None:
    """Each layer by the middle of its neighbours in the layer before, then in the layer behind, and again."""
    before: dict[Item, list[Item]] = {}
    behind: dict[Item, list[Item]] = {}
    for source, target in links:
        behind.setdefault(source, []).append(target)
        before.setdefault(target, []).append(source)
    place = {item: float(index) for layer in layers for index, item in enumerate(layer)}
    for sweep in range(_SWEEPS):
        forward = sweep % 2 == 0
        neighbours = before if forward else behind
        for layer in layers if forward else reversed(layers):
            middles = {
                item: sum(place[other] for other in neighbours[item]) / len(neighbours[item])
                if item in neighbours
                else place[item]
                for item in layer
            }
            layer.sort(key=middles.__getitem__)
            shift = (len(layer) - 1) / 2  # layers are drawn around one middle line
            place.update({item: index - shift for index, item in enumerate(layer)})
