"""A graph as a picture: DOT for Graphviz, or SVG drawn here.

Edges that stand for one text are drawn in another colour than edges of which the model chooses the first character.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from unicodedata import east_asian_width
from xml.sax.saxutils import escape

from .compress import Edge, Graph
from .labels import edge_label
from .layout import Item, Layout, layered

_LONGEST = 34  # characters of a label
_LINES = 5  # labels of parallel edges that are written out
_CHARACTER = 7.3  # width of one character of the labels, in pixels
_LINE = 15.0
_RADIUS = 17.0
_GAP = 44.0  # between a label and the states beside it
_MARGIN = 28.0
_INK, _FORCED, _QUIET, _PAPER = "#1f2328", "#0b57d0", "#8b949e", "#ffffff"


def dot(graph: Graph) -> str:
    """For `dot -Tsvg`. Accepting states have a double border, states that were not explored a dashed one."""
    lines = ["digraph constraint {", "  rankdir=LR;", '  node [shape=circle, fontname="monospace"];']
    lines += ['  edge [fontname="monospace"];', '  "" [shape=point];', f'  "" -> {graph.start};']
    for state in graph.states:
        shape = "doublecircle" if state in graph.accepting else "circle"
        lines.append(f"  {state} [shape={shape}{', style=dashed' if state in graph.open_states else ''}];")
    for edge in graph.edges:
        label = edge_label(edge, _LONGEST).replace("\\", "\\\\").replace('"', '\\"')
        colour = f', color="{_FORCED}", fontcolor="{_FORCED}"' if edge.text is not None else ""
        lines.append(f'  {edge.source} -> {edge.target} [label="{label}"{colour}];')
    return "\n".join([*lines, "}", ""])


def svg(graph: Graph, title: str) -> str:
    """A picture of at most some hundred states that a browser shows as it is."""
    arrows: dict[tuple[int, int], list[Edge]] = {}
    for edge in graph.edges:
        arrows.setdefault((edge.source, edge.target), []).append(edge)
    layout = layered(graph.start, graph.states, arrows)
    return _Picture(graph, arrows, layout).text(title)


@dataclass(frozen=True, slots=True)
class _Point:
    x: float
    y: float


class _Picture:
    """Where things are is worked out when it is born; `text` writes them down, edges below states."""

    def __init__(self, graph: Graph, arrows: dict[tuple[int, int], list[Edge]], layout: Layout) -> None:
        self._graph = graph
        self._arrows = arrows
        self._layout = layout
        self._labels = {pair: _lines(edges) for pair, edges in arrows.items()}
        tallest = max((len(lines) for lines in self._labels.values()), default=1)
        self._row = max(3.4 * _RADIUS, _LINE * (tallest + 1))
        self._circles = sorted(
            (pair for pair in layout.backward if pair[0] != pair[1]), key=lambda pair: abs(pair[0] - pair[1])
        )
        loops = max((len(self._labels[pair]) for pair in layout.backward if pair[0] == pair[1]), default=0)
        self._head = _MARGIN + (len(self._circles) + loops) * (_LINE + 8) + (_RADIUS if layout.backward else 0)
        self._points = self._places()

    def _places(self) -> dict[Item, _Point]:
        rows = max(len(layer) for layer in self._layout.layers)
        middle = self._head + (rows - 1) * self._row / 2 + _RADIUS
        points: dict[Item, _Point] = {}
        x = _MARGIN + 30 + _RADIUS
        for index, layer in enumerate(self._layout.layers):
            top = middle - (len(layer) - 1) * self._row / 2
            points.update({item: _Point(x, top + place * self._row) for place, item in enumerate(layer)})
            x += self._step(index, set(layer))
        return points

    def _step(self, index: int, layer: set[Item]) -> float:
        """From a layer to the next: room for the labels of the edges and of the loops between them."""
        beginning = [pair for pair in self._arrows if pair not in self._layout.backward and pair[0] in layer]
        turning = [pair for pair in self._layout.backward if pair[0] == pair[1] and pair[0] in layer]
        widest = max((_width(self._labels[pair]) for pair in (*beginning, *turning)), default=0.0)
        return 2 * _RADIUS + widest + _GAP

    def text(self, title: str) -> str:
        width = max(point.x for point in self._points.values()) + _RADIUS + _MARGIN
        for source, target in self._layout.backward:
            if source == target:
                reach = self._points[source].x + _width(self._labels[source, target]) / 2
                width = max(width, reach + _MARGIN)
        height = max(point.y for point in self._points.values()) + _RADIUS + _MARGIN
        height = max(height, self._head + self._row)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
                f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="ui-monospace, Menlo, Consolas, monospace" '
                'font-size="12">',
                f"<title>{escape(title)}</title>",
                "<defs>",
                *(_arrow_head(name, colour) for name, colour in (("choice", _INK), ("forced", _FORCED))),
                "</defs>",
                f'<rect width="100%" height="100%" fill="{_PAPER}"/>',
                *(self._forward(pair) for pair in self._arrows if pair not in self._layout.backward),
                *(self._backward(pair, place) for place, pair in enumerate(self._circles)),
                *(self._loop(state) for state in self._graph.states if (state, state) in self._layout.backward),
                self._entry(),
                *(self._state(state) for state in self._graph.states),
                "</svg>",
                "",
            ]
        )

    def _entry(self) -> str:
        point = self._points[self._graph.start]
        return _line(f"M {point.x - _RADIUS - 30:.1f} {point.y:.1f} H {point.x - _RADIUS - 3:.1f}", False)

    def _state(self, state: int) -> str:
        point = self._points[state]
        dashed = ' stroke-dasharray="3 3"' if state in self._graph.open_states else ""
        parts = [_circle(point, _RADIUS, dashed)]
        if state in self._graph.accepting:
            parts.append(_circle(point, _RADIUS - 3.5, dashed))
        parts.append(f'<text x="{point.x:.1f}" y="{point.y + 4:.1f}" text-anchor="middle" fill="{_INK}">{state}</text>')
        return "".join(parts)

    def _forward(self, pair: tuple[int, int]) -> str:
        source, target = pair
        joints = [
            (source, target, layer)
            for layer in range(len(self._layout.layers))
            if (source, target, layer) in self._points
        ]
        items: list[Item] = [source, *joints, target]
        way = [self._points[item] for item in items]
        first = _Point(way[0].x + _RADIUS, way[0].y)
        last = _Point(way[-1].x - _RADIUS - 3, way[-1].y)
        way = [first, *way[1:-1], last]
        path = f"M {first.x:.1f} {first.y:.1f}"
        for start, end in itertools.pairwise(way):
            bend = (end.x - start.x) / 2
            path += f" C {start.x + bend:.1f} {start.y:.1f} {end.x - bend:.1f} {end.y:.1f} {end.x:.1f} {end.y:.1f}"
        leaving = sum(1 for arrow in self._arrows if arrow[0] == source)
        arriving = sum(1 for arrow in self._arrows if arrow[1] == target)
        along = 0.5 if leaving == arriving else 0.36 if leaving < arriving and not joints else 0.64
        start, end = way[0], way[1]
        label = _Point(start.x + (end.x - start.x) * 0.5, start.y + (end.y - start.y) * _eased(along))
        if abs(start.y - end.y) < 1:  # above a straight line, on a bent one
            label = _Point(label.x, label.y - _LINE * len(self._labels[pair]) / 2 - 2)
        return _line(path, self._forced(pair)) + self._label(pair, label)

    def _backward(self, pair: tuple[int, int], place: int) -> str:
        """Over the top, each circle at a height of its own; up and down beside the layers and not through them."""
        source, target = self._points[pair[0]], self._points[pair[1]]
        top = _MARGIN / 2 + (len(self._circles) - 1 - place) * (_LINE + 8) + _LINE
        side = 0.7 * _RADIUS
        up, down = source.x + _RADIUS + 12, target.x - _RADIUS - 12
        path = (
            f"M {source.x + side:.1f} {source.y - side:.1f} Q {up:.1f} {source.y - side - 10:.1f} "
            f"{up:.1f} {source.y - side - 24:.1f} V {top + 12:.1f} Q {up:.1f} {top:.1f} {up - 12:.1f} {top:.1f} "
            f"H {down + 12:.1f} Q {down:.1f} {top:.1f} {down:.1f} {top + 12:.1f} V {target.y - side - 24:.1f} "
            f"Q {down:.1f} {target.y - side - 10:.1f} {target.x - side - 2:.1f} {target.y - side - 2:.1f}"
        )
        middle = _Point((source.x + target.x) / 2, top)
        return _line(path, self._forced(pair)) + self._label(pair, middle)

    def _loop(self, state: int) -> str:
        point = self._points[state]
        top = point.y - _RADIUS
        path = (
            f"M {point.x - 8:.1f} {top + 2:.1f} C {point.x - 22:.1f} {top - 26:.1f} "
            f"{point.x + 22:.1f} {top - 26:.1f} {point.x + 9:.1f} {top - 1:.1f}"
        )
        height = _LINE * len(self._labels[state, state])
        label = _Point(point.x, top - 20 - height / 2)
        return _line(path, self._forced((state, state))) + self._label((state, state), label)

    def _forced(self, pair: tuple[int, int]) -> bool:
        return all(edge.text is not None for edge in self._arrows[pair])

    def _label(self, pair: tuple[int, int], middle: _Point) -> str:
        lines = self._labels[pair]
        width, height = _width(lines), _LINE * len(lines)
        top = middle.y - height / 2
        parts = [
            f'<rect x="{middle.x - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{_PAPER}" fill-opacity="0.9"/>'
        ]
        for place, (line, forced) in enumerate(lines):
            parts.append(
                f'<text x="{middle.x:.1f}" y="{top + _LINE * place + 11.5:.1f}" text-anchor="middle" '
                f'xml:space="preserve" fill="{_FORCED if forced else _INK}">{escape(line)}</text>'
            )
        return "".join(parts)


def _lines(edges: Sequence[Edge]) -> list[tuple[str, bool]]:
    """One line for each parallel edge: its label, and whether it is one text."""
    shown = edges if len(edges) <= _LINES else edges[: _LINES - 1]
    lines = [(edge_label(edge, _LONGEST), edge.text is not None) for edge in shown]
    return lines if len(shown) == len(edges) else [*lines, (f"and {len(edges) - len(shown)} more", False)]


def _width(lines: Sequence[tuple[str, bool]]) -> float:
    columns = max(sum(2 if east_asian_width(character) in "WF" else 1 for character in line) for line, _ in lines)
    return columns * _CHARACTER + 6


def _eased(along: float) -> float:
    """How far up or down a cubic with level ends is, that far along."""
    return 3 * along**2 - 2 * along**3


def _line(path: str, forced: bool) -> str:
    name, colour = ("forced", _FORCED) if forced else ("choice", _INK)
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.3" marker-end="url(#{name})"/>'


def _circle(point: _Point, radius: float, dashed: str) -> str:
    return (
        f'<circle cx="{point.x:.1f}" cy="{point.y:.1f}" r="{radius:.1f}" fill="{_PAPER}" '
        f'stroke="{_QUIET if dashed else _INK}" stroke-width="1.3"{dashed}/>'
    )


def _arrow_head(name: str, colour: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M 0 0.5 L 7 4 L 0 7.5 z" fill="{colour}"/></marker>'
    )
