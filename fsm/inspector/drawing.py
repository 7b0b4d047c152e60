"""Draws a graph: DOT for Graphviz, or SVG with the states in layers.

Edges that stand for one text are drawn in another colour than edges of which the model chooses the first character.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from unicodedata import east_asian_width
from xml.sax.saxutils import escape

from ..language import CharSet, Ranges
from ..regex.classes import digit, space, word
from .compress import Edge, Graph

_SHORT = {0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r"}


def quoted(text: str) -> str:
    """Writes `"text"`, or `'text'` where that needs fewer escapes; an escape for what is not printable."""
    quote = "'" if '"' in text and "'" not in text else '"'
    return quote + "".join(_character(ord(character), f"{quote}\\") for character in text) + quote


def character_set(ranges: Ranges) -> str:
    """Writes `[0-9a-f]`, or `[^"]` where that is shorter, with the classes of `re` that are inside, such as `\\d` or
    `[\\w.]`; `.` for every character."""
    given = CharSet(ranges)
    others = ~given
    if not others:
        return "."
    classes, rest = _without_classes(given)
    other_classes, other_rest = _without_classes(others)
    if len(other_classes) + len(other_rest) < len(classes) + len(rest):
        listed = "".join(other_classes) + _listed(other_rest)
        return listed.upper() if other_classes == [listed] else f"[^{listed}]"
    listed = "".join(classes) + _listed(rest)
    return listed if classes == [listed] else f"[{listed}]"


def _without_classes(characters: CharSet) -> tuple[list[str], Ranges]:
    """Returns the classes that are inside of a set, and what is left of it."""
    found = []
    for name, members in (("\\w", word()), ("\\d", digit()), ("\\s", space())):
        if characters & members == members:
            found.append(name)
            characters -= members
    return found, characters.ranges


def _listed(ranges: Ranges) -> str:
    pieces = []
    for first, last in ranges:
        pieces.append(_character(first, "\\]-^"))
        if last > first + 1:
            pieces.append("-")
        if last > first:
            pieces.append(_character(last, "\\]-^"))
    return "".join(pieces)


def _character(code: int, escaped: str) -> str:
    character = chr(code)
    if code in _SHORT:
        return _SHORT[code]
    if character in escaped:
        return f"\\{character}"
    if character.isprintable():
        return character
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def edge_label(edge: Edge, longest: int | None = None) -> str:
    """Returns the label of an edge, cut in the middle when it is longer than `longest` characters."""
    if edge.text is not None:
        label = quoted(edge.text)
    else:
        label = character_set(edge.first) + (f" {quoted(edge.then)}" if edge.then else "")
    if longest is None or len(label) <= longest:
        return label
    end = longest // 3
    return f"{label[: longest - 1 - end]}…{label[-end:]}"


_LONGEST = 34  # characters of a label
_LINES = 5  # labels of parallel edges that are written out
_CHARACTER = 7.3  # width of one character of the labels, in pixels
_LINE = 15.0
_RADIUS = 17.0
_GAP = 44.0  # between a label and the states next to it
_MARGIN = 28.0
_HOVER = 2000  # characters of labels that hovering over them shows
_INK, _FORCED, _QUIET, _PAPER, _NOTE = "#1f2328", "#0b57d0", "#8b949e", "#ffffff", "#57606a"


def dot(graph: Graph) -> str:
    """Writes a graph for `dot -Tsvg`. Accepting states have a double border, unexplored ones a dashed one."""
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


def svg(graph: Graph, title: str, notes: Sequence[str] = ()) -> str:
    """Draws a picture of at most some hundred states that a browser shows as it is, with a legend.

    Args:
        title: shown by browsers for the whole picture.
        notes: written below the legend, a line each.
    """
    arrows: dict[tuple[int, int], list[Edge]] = {}
    for edge in graph.edges:
        arrows.setdefault((edge.source, edge.target), []).append(edge)
    layout = layered(graph.start, graph.states, arrows)
    return _Picture(graph, arrows, layout).text(title, notes)


@dataclass(frozen=True, slots=True)
class _Point:
    x: float
    y: float


class _Picture:
    """Works out where things are when it is made; `text` writes them down, edges below states."""

    def __init__(self, graph: Graph, arrows: dict[tuple[int, int], list[Edge]], layout: Layout) -> None:
        self._graph = graph
        self._arrows = arrows
        self._layout = layout
        self._labels = {pair: _lines(edges) for pair, edges in arrows.items()}
        tallest = max((len(lines) for lines in self._labels.values()), default=1)
        self._row = max(3.4 * _RADIUS, _LINE * (tallest + 1), self._below_a_state())
        self._circles = sorted(
            (pair for pair in layout.backward if pair[0] != pair[1]), key=lambda pair: abs(pair[0] - pair[1])
        )
        loops = max((len(self._labels[pair]) for pair in layout.backward if pair[0] == pair[1]), default=0)
        self._head = _MARGIN + (len(self._circles) + loops) * (_LINE + 8) + (_RADIUS if layout.backward else 0)
        self._points = self._places()

    def _below_a_state(self) -> float:
        """Returns the distance of rows at which no loop of a state covers the state above it; 0 without such loops."""
        crowded = (
            state for layer in self._layout.layers if len(layer) > 1 for state in layer if isinstance(state, int)
        )
        lines = [len(self._labels[state, state]) for state in crowded if (state, state) in self._layout.backward]
        return 2 * _RADIUS + 24 + _LINE * max(lines) if lines else 0.0

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

    def text(self, title: str, notes: Sequence[str]) -> str:
        width = max(point.x for point in self._points.values()) + _RADIUS + _MARGIN
        for source, target in self._layout.backward:
            if source == target:
                reach = self._points[source].x + _width(self._labels[source, target]) / 2
                width = max(width, reach + _MARGIN)
        height = max(point.y for point in self._points.values()) + _RADIUS + _MARGIN
        height = max(height, self._head + self._row)
        below = [*self._legend(), *(("", note) for note in notes)]
        top = height
        height += _LINE * 1.2 * len(below) + _MARGIN / 2
        width = max([width, *(_MARGIN * 2 + 40 + len(said) * _CHARACTER for _, said in below)])
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
                *(_explained(top + _LINE * 1.2 * place, mark, said) for place, (mark, said) in enumerate(below)),
                "</svg>",
                "",
            ]
        )

    def _legend(self) -> Iterator[tuple[str, str]]:
        """Yields the marks that the picture has, and their meanings."""
        forced = {self._forced(pair) for pair in self._arrows}
        if False in forced:
            yield "choice", "one character of a set, and the text after it"
        if True in forced:
            yield "forced", "one text; where no other edge leaves a state, the model is not asked"
        yield "end", "a text may end here"
        if self._graph.open_states:
            yield "open", "goes on, not drawn"

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
        """Draws over the top, each circle at a height of its own; up and down next to the layers, not through them."""
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
        whole = "\n".join(edge_label(edge, _HOVER) for edge in self._arrows[pair])
        width, height = _width(lines), _LINE * len(lines)
        top = middle.y - height / 2
        parts = [
            f"<g><title>{escape(_shortened(whole))}</title>"
            f'<rect x="{middle.x - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{_PAPER}" fill-opacity="0.9"/>'
        ]
        for place, (line, forced) in enumerate(lines):
            parts.append(
                f'<text x="{middle.x:.1f}" y="{top + _LINE * place + 11.5:.1f}" text-anchor="middle" '
                f'xml:space="preserve" fill="{_FORCED if forced else _INK}">{escape(line)}</text>'
            )
        return "".join([*parts, "</g>"])


def _shortened(text: str) -> str:
    return text if len(text) <= _HOVER else f"{text[: _HOVER * 2 // 3]}…{text[-_HOVER // 3 :]}"


def _explained(top: float, mark: str, said: str) -> str:
    """Draws a line of the legend: the mark, and what it means. A note has no mark."""
    x, y = _MARGIN, top + _LINE / 2
    match mark:
        case "choice" | "forced":
            drawn = _line(f"M {x:.1f} {y:.1f} H {x + 26:.1f}", mark == "forced")
        case "end":
            drawn = _ring(x + 14, y, 7, _INK, "") + _ring(x + 14, y, 4.5, _INK, "")
        case "open":
            drawn = _ring(x + 14, y, 7, _QUIET, ' stroke-dasharray="3 3"')
        case _:
            drawn = ""
    left = x + 38 if mark else x
    return f'{drawn}<text x="{left:.1f}" y="{y + 4:.1f}" fill="{_NOTE}">{escape(said)}</text>'


def _ring(x: float, y: float, radius: float, colour: str, dashed: str) -> str:
    arc = f"a {radius} {radius} 0 1 1 {2 * radius} 0 a {radius} {radius} 0 1 1 {-2 * radius} 0"
    return f'<path d="M {x - radius:.1f} {y:.1f} {arc}" fill="none" stroke="{colour}"{dashed}/>'


def _lines(edges: Sequence[Edge]) -> list[tuple[str, bool]]:
    """Gives one line for each parallel edge: its label, and whether it is one text."""
    shown = edges if len(edges) <= _LINES else edges[: _LINES - 1]
    lines = [(edge_label(edge, _LONGEST), edge.text is not None) for edge in shown]
    return lines if len(shown) == len(edges) else [*lines, (f"and {len(edges) - len(shown)} more", False)]


def _width(lines: Sequence[tuple[str, bool]]) -> float:
    columns = max(sum(2 if east_asian_width(character) in "WF" else 1 for character in line) for line, _ in lines)
    return columns * _CHARACTER + 6


def _eased(along: float) -> float:
    """Returns the height of a cubic with level ends, that far along."""
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


_SWEEPS = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """Places the states of a graph in layers from left to right (Sugiyama, Tagawa and Toda, 1981).

    1  edges that close a circle are set aside (depth first search)
    2  a state's layer is the longest way to it
    3  an edge across several layers passes a joint in each, so that it does not cross states
    4  states of a layer are ordered by where their neighbours stand, in sweeps back and forth

    layers: of items from top to bottom, each a state (an int) or a joint of an edge (a tuple).

    backward: pairs that close a circle, a state with itself among them. Every other pair leads from a layer to a
    later one, over the joints `(source, target, layer)`.
    """

    layers: tuple[tuple[Item, ...], ...]
    backward: frozenset[tuple[int, int]]


Item = int | tuple[int, int, int]


def layered(start: int, states: Sequence[int], pairs: Iterable[tuple[int, int]]) -> Layout:
    """Lays out a graph in which every state is reached from the start."""
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
    """Finds edges back to a state that the search is inside of, and the states in the order in which it left them."""
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
    """Orders each layer by the middle of its neighbours in the layer before, then in the layer after, and again."""
    before: dict[Item, list[Item]] = {}
    after: dict[Item, list[Item]] = {}
    for source, target in links:
        after.setdefault(source, []).append(target)
        before.setdefault(target, []).append(source)
    place = {item: float(index) for layer in layers for index, item in enumerate(layer)}
    for sweep in range(_SWEEPS):
        forward = sweep % 2 == 0
        neighbours = before if forward else after
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
