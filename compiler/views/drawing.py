"""Draws a graph: SVG that a browser or a notebook shows as it is, on light and on dark ground.

A box is a thing that a stream says, with its number in `Graph.nodes`; hovering shows all of its text and its line.
Lines lead down a stream, blue ones to other streams and back, dashed ones from where a value is generated. Streams are
columns, time goes down:

    column 0     column 1          column 2
    Begin
    Append
    Fork ──────┬─────────────────┐
      │        GetForkItem 0     GetForkItem 1
      │        Generate          Generate
    Join ◄─────┴─────────────────┘
    Append     another fork's branch takes the column again

A node stands below all that it needs, so what can run at the same time stands side by side. A stream keeps its column
until it is joined, and stands right of the stream that it left, and of the branch before it with its own branches.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from unicodedata import east_asian_width
from xml.sax.saxutils import escape

from ..graph import Graph, Node
from ..operations import Begin, Fork, GetForkItem, Join
from . import listing
from .listing import Edge, Label, Labels, edges, folded, place, signature

_LONGEST = 34  # characters of a label
_HOVER = 2000  # characters of a text that hovering shows
_CHARACTER = 7.25  # width of one, in pixels
_BOX, _STRIP, _LANE = 26.0, 14.0, 6.0  # heights: of a box, from it to the next one, and of what a further lane takes
_GAP = 44.0  # between columns
_MARGIN, _HEAD, _LEGEND, _NOTE = 24.0, 44.0, 26.0, 16.0  # heights: title, legend, and each of the notes

# What a node is → its class. Calls of a model stand out; marks without text of their own keep back.
_CLASSES = {
    "ConstantText": "text",
    "Text": "text",
    "Argument": "argument",
    "Gen": "call",
    "Select": "call",
    "Image": "call",
    "Video": "call",
    "Variable": "value",
    "Object": "value",
    "StreamText": "value",
    "Concat": "value",
    "Apply": "value",
}
_COLOURS = {  # class → ink and ground on light paper, and on dark
    "text": ("#3d444d", "#f6f8fa", "#d1d7e0", "#1c2129"),
    "argument": ("#1a7f37", "#eefbf1", "#57d375", "#12261a"),
    "call": ("#0b57d0", "#e8f0fe", "#7cb0ff", "#13233f"),
    "value": ("#8a5a00", "#fff6e0", "#e3b341", "#2a210c"),
    "mark": ("#6e7781", "#ffffff", "#8b949e", "#0d1117"),
}
_MEANINGS = {"text": "text", "argument": "argument", "call": "call of a model", "value": "value", "mark": "structure"}
_PAPER = ("#ffffff", "#0d1117")
_LINE = ("#8b949e", "#6e7681")
_BETWEEN = ("#0b57d0", "#7cb0ff")


def svg(graph: Graph) -> str:
    """Draws a picture of some hundred nodes; more are drawn, and are much to look at."""
    short, whole = Labels(graph, _LONGEST), Labels(graph, _HOVER)
    nodes = [node for node in graph.nodes if node.in_stream]
    labels = {node: short.of(node) for node in nodes}
    return Picture(graph, signature(graph), labels, {node: str(whole.of(node)) for node in nodes}).text()


class Picture:
    """A picture: computes where things are when it is made; `text` writes them, lines below boxes.

    Args:
        title: above all.
        labels: of stream nodes.
        full: what hovering over a node shows.
        dashed: nodes whose boxes are dashed.
        notes: lines below the legend.
    """

    def __init__(
        self,
        graph: Graph,
        title: str,
        labels: Mapping[Node, Label],
        full: Mapping[Node, str],
        dashed: Collection[Node] = (),
        notes: Sequence[str] = (),
    ) -> None:
        self._graph = graph
        self._title = title
        self._places = places(graph)
        self._full = full
        self._dashed = dashed
        self._notes = notes
        self._labels = {node: _cut(labels[node]) for node in self._places.rows}
        found = {self._shade(node) for node in self._places.rows}
        self._legend = [shade for shade in _MEANINGS if shade in found]
        self._widths = self._column_widths()
        self._tops = self._row_tops()
        self._lefts = [_MARGIN + sum(self._widths[:column]) + column * _GAP for column in range(len(self._widths))]

    def _column_widths(self) -> list[float]:
        widths = [0.0] * (max(self._places.columns) + 1)
        for node in self._places.rows:
            column = self._column(node)
            widths[column] = max(widths[column], self._width(node))
        return widths

    def _row_tops(self) -> list[float]:
        """Returns the top of every row, and where another row would begin."""
        tops = [_HEAD + _LEGEND + _NOTE * len(self._notes) + _MARGIN / 2]
        for lanes in self._places.strips:
            tops.append(tops[-1] + _BOX + _STRIP + max(lanes - 1, 0) * _LANE)
        return tops

    def _width(self, node: Node) -> float:
        return _columns(f"{self._graph.numbers[node]}  {self._labels[node]}") * _CHARACTER + 16

    def _column(self, node: Node) -> int:
        return self._places.columns[self._graph.stream_of[node]]

    def _left(self, node: Node) -> float:
        return self._lefts[self._column(node)]

    def _spine(self, node: Node) -> float:
        """Returns where the line of its stream goes down."""
        return self._left(node) + 18

    def _top(self, node: Node) -> float:
        return self._tops[self._places.rows[node]]

    # -------------------------------------------------------------------------------- writing

    def text(self) -> str:
        title = self._title
        widest = max([_columns(title) * 1.1, *(_columns(note) for note in self._notes)]) * _CHARACTER + _MARGIN
        legend = sum(_legend_width(shade) for shade in self._legend) + _MARGIN
        width = max(self._lefts[-1] + self._widths[-1], widest, legend) + _MARGIN
        height = self._tops[-1] + _MARGIN - _STRIP
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" class="umbel-graph" width="{width:.0f}" '
                f'height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">',
                f"<title>{escape(title)}</title>",
                f"<style>{_style()}</style>",
                "<defs>",
                *(_arrow_head(name) for name in ("line", "between")),
                "</defs>",
                '<rect width="100%" height="100%" class="umbel-paper"/>',
                f'<text x="{_MARGIN}" y="{_MARGIN + 8}" class="umbel-title">{escape(title)}</text>',
                *self._legend_boxes(),
                *(
                    f'<text x="{_MARGIN}" y="{_HEAD + _LEGEND + 10 + _NOTE * place:.1f}" class="umbel-note">'
                    f"{escape(note)}</text>"
                    for place, note in enumerate(self._notes)
                ),
                *(self._line(edge) for edge in self._places.edges),
                *(self._box(node) for node in self._places.rows),
                "</svg>",
                "",
            ]
        )

    def _shade(self, node: Node) -> str:
        return _CLASSES.get(self._labels[node].kind, "mark")

    def _legend_boxes(self) -> Iterable[str]:
        x, y = _MARGIN, _HEAD + 2
        for shade in self._legend:
            yield (
                f'<g class="umbel-{shade}"><rect x="{x:.1f}" y="{y:.1f}" width="14" height="12" rx="3"/>'
                f'<text x="{x + 20:.1f}" y="{y + 10:.1f}">{_MEANINGS[shade]}</text></g>'
            )
            x += _legend_width(shade)

    def _box(self, node: Node) -> str:
        label = self._labels[node]
        left, top = self._left(node), self._top(node)
        where = f"\n{place(node.line)}" if node.line is not None else ""
        dashes = ' stroke-dasharray="5 3"' if node in self._dashed else ""
        hover = visible(f"{self._graph.numbers[node]}  {self._full[node]}{where}")
        return (
            f'<g class="umbel-{self._shade(node)}"><title>{escape(hover)}</title>'
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{self._width(node):.1f}" height="{_BOX}" rx="6"{dashes}/>'
            f'<text x="{left + 8:.1f}" y="{top + 17:.1f}" xml:space="preserve">'
            f'<tspan class="umbel-number">{self._graph.numbers[node]}  </tspan>'
            f"<tspan>{escape(label.kind)}</tspan>"
            f'<tspan class="umbel-said"> {escape(label.text)}</tspan></text></g>'
        )

    def _line(self, edge: Edge) -> str:
        source, target = edge.source, edge.target
        if edge.kind == "intra":
            x = self._spine(source)
            return _path(f"M {x:.1f} {self._top(source) + _BOX:.1f} V {self._top(target) - 1:.1f}", "line")
        if isinstance(source.op, Fork) and isinstance(target.op, GetForkItem):
            return _path(self._across(source, target, source), "between")
        if isinstance(target.op, Join) and source in target.inputs:
            return _path(self._across(source, target, target), "between")
        return _path(self._sideways(source, target), "between", dashed=True)

    def _across(self, source: Node, target: Node, owner: Node) -> str:
        """Draws down, along the owner's lane of the strip between two rows, and down to the target."""
        above = self._places.rows[owner] - isinstance(owner.op, Join)
        level = self._tops[above] + _BOX + _STRIP / 2 + self._places.lanes[owner] * _LANE
        start, end = self._spine(source), self._spine(target)
        if end < start:  # back to the stream that it left, whose own line comes down next to it
            end += 10
        bend = 5 if end > start else -5
        return (
            f"M {start:.1f} {self._top(source) + _BOX:.1f} V {level - 5:.1f} "
            f"Q {start:.1f} {level:.1f} {start + bend:.1f} {level:.1f} H {end - bend:.1f} "
            f"Q {end:.1f} {level:.1f} {end:.1f} {level + 5:.1f} V {self._top(target) - 1:.1f}"
        )

    def _sideways(self, source: Node, target: Node) -> str:
        """Draws from side to side, or around the right side of a column that both stand in."""
        start_y, end_y = self._top(source) + _BOX / 2, self._top(target) + _BOX / 2
        right, left = self._left(source) + self._width(source), self._left(target)
        reach = _GAP * 0.7
        if self._column(source) < self._column(target):
            return self._curve(right, start_y, reach, left - 1, end_y, -reach)
        end = self._left(target) + self._width(target) + 1
        if self._column(source) > self._column(target):
            return self._curve(self._left(source), start_y, -reach, end, end_y, reach)
        return self._curve(right, start_y, reach, end, end_y, reach)

    def _curve(
        self, start_x: float, start_y: float, leaving: float, end_x: float, end_y: float, arriving: float
    ) -> str:
        return (
            f"M {start_x:.1f} {start_y:.1f} C {start_x + leaving:.1f} {start_y:.1f} "
            f"{end_x + arriving:.1f} {end_y:.1f} {end_x:.1f} {end_y:.1f}"
        )


def _cut(label: Label) -> Label:
    """Shortens a label to its beginning and its end, by the columns that its characters take."""
    room = _LONGEST - _columns(label.kind)
    text = label.text
    longest = room
    while _columns(text) > room:
        text = folded(label.text, longest)
        longest -= 1
    return Label(label.kind, text)


def _legend_width(shade: str) -> float:
    return 20 + _columns(_MEANINGS[shade]) * _CHARACTER + 18


def visible(text: str) -> str:
    """Writes characters that XML does not allow as escapes. Line breaks stay."""
    return "".join(
        character if character.isprintable() or character == "\n" else repr(character)[1:-1] for character in text
    )


def _columns(text: str) -> int:
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)


def _path(path: str, kind: str, *, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="4 4"' if dashed else ""
    return f'<path d="{path}" class="umbel-{kind}"{dashes} marker-end="url(#umbel-{kind}-head)"/>'


def _arrow_head(name: str) -> str:
    return (
        f'<marker id="umbel-{name}-head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M 0 0.5 L 7 4 L 0 7.5 z" class="umbel-{name}-head"/></marker>'
    )


def _style() -> str:
    """Returns the styles. Classes begin with the project's name: in a notebook, styles hold for the whole page."""
    return (
        ".umbel-graph{font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace}"
        ".umbel-title{font-size:13px;font-weight:bold}.umbel-note{opacity:.8}"
        ".umbel-number{opacity:.55}.umbel-line,.umbel-between{fill:none;stroke-width:1.3}"
        f"{_scheme(0)}@media(prefers-color-scheme:dark){{{_scheme(1)}}}"
    )


def _scheme(dark: int) -> str:
    """Returns the colours on light paper (0) or on dark (1)."""
    rules = [
        f".umbel-paper{{fill:{_PAPER[dark]}}}",
        f".umbel-title,.umbel-note,.umbel-graph .umbel-said{{fill:{_COLOURS['text'][2 * dark]}}}",
        f".umbel-line{{stroke:{_LINE[dark]}}}.umbel-line-head{{fill:{_LINE[dark]}}}",
        f".umbel-between{{stroke:{_BETWEEN[dark]}}}.umbel-between-head{{fill:{_BETWEEN[dark]}}}",
    ]
    for name, colours in _COLOURS.items():
        ink, ground = colours[2 * dark : 2 * dark + 2]
        rules.append(f".umbel-{name} rect{{fill:{ground};stroke:{ink}}}.umbel-{name} text{{fill:{ink}}}")
    return "".join(rules)


def html(graph: Graph) -> str:
    """Writes what a notebook shows: the picture, scrolled where it is large, and the listing to unfold."""
    return (
        f'<div style="max-height:80vh;overflow:auto">{svg(graph)}</div>'
        f"<details><summary>listing</summary><pre>{escape(listing.text(graph))}</pre></details>"
    )


@dataclass(frozen=True, slots=True)
class Places:
    """Rows and columns, counted from 0.

    Attributes:
        rows: of every stream node.
        columns: of every stream, by its number.
        lanes: of forks and joins: in which lane of the strip below or above them their lines run sideways, counted
            from the top.
        strips: how many lanes there are below every row.
        edges: all of `edges.edges`.
    """

    rows: dict[Node, int]
    columns: tuple[int, ...]
    lanes: dict[Node, int]
    strips: tuple[int, ...]
    edges: tuple[Edge, ...]


def places(graph: Graph) -> Places:
    found = edges(graph)
    rows = _rows(graph, found)
    columns = _stream_columns(graph, rows)
    lanes, strips = _lanes(graph, rows, columns)
    return Places(rows, columns, lanes, strips, found)


def _rows(graph: Graph, found: tuple[Edge, ...]) -> dict[Node, int]:
    needs: dict[Node, list[Node]] = {}
    for edge in found:
        needs.setdefault(edge.target, []).append(edge.source)
    rows: dict[Node, int] = {}
    for node in graph.nodes:
        if node.in_stream:
            rows[node] = max((rows[source] + 1 for source in needs.get(node, ())), default=0)
    _move_down(graph, found, rows)
    return rows


def _move_down(graph: Graph, found: tuple[Edge, ...], rows: dict[Node, int]) -> None:
    """Moves streams of runs inside of the program down to where they are needed: else they would all begin on top."""
    needed: dict[Node, list[Node]] = {}
    for edge in found:
        needed.setdefault(edge.source, []).append(edge.target)
    for node in reversed(graph.nodes):
        stream = graph.stream_of.get(node)
        if stream and isinstance(graph.streams[stream][0].op, Begin) and node in needed:
            rows[node] = min(rows[target] for target in needed[node]) - 1


def _stream_columns(graph: Graph, rows: dict[Node, int]) -> tuple[int, ...]:
    """Returns, for every stream, the leftmost column that is free for as long as the stream needs it, right of the
    parent, and right of all that came of the branch before it."""
    taken: list[list[tuple[int, int]]] = []  # of every column: first and last row of its streams
    columns = [0] * len(graph.streams)
    reach: dict[Node, int] = {}  # fork → the column furthest right that its branches, and theirs, have taken
    for number, forks in _families(graph):
        stream = graph.streams[number]
        first, last = rows[stream[0]], _last_row(graph, stream, rows)
        column = reach.get(forks[-1], columns[graph.stream_of[forks[-1]]]) + 1 if forks else int(number > 0)
        while column < len(taken) and any(first <= other[1] and other[0] <= last for other in taken[column]):
            column += 1
        taken.extend([] for _ in range(column + 1 - len(taken)))
        taken[column].append((first, last))
        columns[number] = column
        for fork in forks:
            reach[fork] = max(reach.get(fork, 0), column)
    return tuple(columns)


def _families(graph: Graph) -> Iterator[tuple[int, tuple[Node, ...]]]:
    """Yields every stream, each with the forks that it came of, outermost first: a branch, and all that came of it,
    before the next branch."""
    children: list[list[int]] = [[] for _ in graph.streams]
    pending: list[tuple[int, tuple[Node, ...]]] = []
    for number in range(len(graph.streams)):
        parents = graph.parents(number)
        if parents is None:
            pending.append((number, ()))
        else:
            children[parents[0]].append(number)
    pending.reverse()
    while pending:
        number, forks = pending.pop()
        yield number, forks
        for child in reversed(children[number]):
            pending.append((child, (*forks, graph.streams[child][0].inputs[0])))


def _last_row(graph: Graph, stream: tuple[Node, ...], rows: dict[Node, int]) -> int:
    """Returns the row of its last node, or of the join that an arrow leads down to."""
    joins = (rows[user] for node in stream for user in graph.users[node] if isinstance(user.op, Join))
    return max((rows[stream[-1]], *joins))


def _lanes(graph: Graph, rows: dict[Node, int], columns: tuple[int, ...]) -> tuple[dict[Node, int], tuple[int, ...]]:
    """Assigns separate lanes to lines that would overlap. Lines from a fork on the left run below those from a fork on
    the right, and with joins it is the other way round: so no lines cross."""
    strips: list[list[tuple[int, int, Node]]] = [[] for _ in range(max(rows.values()) + 1)]
    for node, row in rows.items():
        column = columns[graph.stream_of[node]]
        if isinstance(node.op, Fork):
            others = [user for user in graph.users[node] if isinstance(user.op, GetForkItem)]
            strips[row].append((-column, _furthest(graph, others, columns, column), node))
        elif isinstance(node.op, Join):
            strips[row - 1].append((column, _furthest(graph, node.inputs[1:], columns, column), node))
    lanes: dict[Node, int] = {}
    for strip in strips:
        taken: list[list[tuple[int, int]]] = []  # of every lane: from column, to column
        for _, last, node in sorted(strip, key=lambda line: (isinstance(line[2].op, Join), line[0])):
            first = columns[graph.stream_of[node]]
            lane = 0
            while lane < len(taken) and any(first <= other[1] and other[0] <= last for other in taken[lane]):
                lane += 1
            taken.extend([] for _ in range(lane + 1 - len(taken)))
            taken[lane].append((first, last))
            lanes[node] = lane
    return lanes, tuple(_count(strip, lanes) for strip in strips)


def _furthest(graph: Graph, others: Iterable[Node], columns: tuple[int, ...], column: int) -> int:
    return max((columns[graph.stream_of[other]] for other in others), default=column)


def _count(strip: list[tuple[int, int, Node]], lanes: dict[Node, int]) -> int:
    return max((lanes[node] + 1 for _, _, node in strip), default=0)
