"""Draws a recorded run: what a program did for one input, where no graph holds for all of them.

    the lines of state.save("run.jsonl")  ─▶  nodes as in a graph, with the texts that came  ─▶  the picture

A program that looks at an answer has no graph: what it says next depends on the answer. Its run has a picture. What the
program said after it had read an answer stands in dashed boxes, since another answer may lead elsewhere.

    Select related " yes"
    ╌╌╌╌╌╌                 said after the program had read related
    ╎Fork 3╎ ──▶ ...
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...lang import ops
from ...lang.errors import GraphError
from ..graph import Builder, Graph, Line, Node, Parameter
from ..operations import (
    Append,
    Argument,
    Begin,
    Choose,
    Constant,
    Fork,
    Generate,
    GetForkItem,
    Join,
    Operation,
    Variable,
)
from .drawing import Picture
from .listing import Label, folded, plain

MOST_BOXES = 400
_LONGEST = 34  # characters of a text in a label
_HOVER = 2000  # characters of a text that hovering shows

_Box = tuple[
    Operation, tuple[Node, ...], Label, str
]  # the operation, its further inputs, its label, what hovering shows
Entry = Mapping[str, Any]  # a line of a saved run, as `interpreter/view/data.py` describes it


def svg(lines: Sequence[Entry]) -> str:
    """Draws the run that these lines hold: the first 400 things that it said.

    Raises:
        GraphError: they are not of a run, or of one that said nothing.
    """
    run = _Run(lines)
    graph = run.graph()
    head = lines[0]
    title = plain(f"{graph.name}({', '.join(each.name for each in graph.parameters)})")
    backend, date = plain(str(head.get("backend", "")))[:60], plain(str(head.get("began", "")))[:10]
    about = " ".join(part for part in (f"a run on {backend}" if backend else "a run", date) if part)
    notes = ["a dashed box: said after the program had read an answer; another answer may lead elsewhere"]
    notes = notes if run.after else []
    if run.left_out:
        notes.append(f"the first {MOST_BOXES} of {MOST_BOXES + run.left_out} boxes")
    return Picture(graph, f"{title}: {about}", run.labels, run.full, run.after, notes).text()


@dataclass(slots=True)
class _Run:
    """Makes the nodes of a run, in the order of its lines."""

    lines: Sequence[Entry]
    labels: dict[Node, Label] = field(default_factory=dict)
    full: dict[Node, str] = field(default_factory=dict)
    after: set[Node] = field(default_factory=set)
    left_out: int = 0
    _builder: Builder = field(default_factory=Builder)
    _last: dict[int, Node] = field(default_factory=dict)  # of every stream
    _forks: dict[int, tuple[Node, list[int]]] = field(default_factory=dict)  # operation → its node and branches
    _answers: list[tuple[str, str, int, Node]] = field(default_factory=list)  # variable, text, stream, the call
    _branches: dict[int, int] = field(default_factory=dict)  # stream → its number in its fork
    _places: dict[int, Line] = field(default_factory=dict)

    def graph(self) -> Graph:
        """Makes all nodes, and the graph that holds them."""
        if not self.lines or "umbel_run" not in self.lines[0]:
            raise GraphError("this is no saved run; write the path of a file that state.save(path) wrote")
        head = self.lines[0]
        for line in self.lines[1:]:
            if "op" in line:
                self._operation(line)
            elif "stream" in line:
                self._begin(line, str(head.get("program") or "program"))
            elif "file" in line:
                self._places[line["line"]] = Line(line["file"], line["number"], line["function"])
        if not self._last:
            raise GraphError("the saved run holds no operations: the program said nothing")
        ends = self._last.values()
        names = [Parameter(str(name)) for name in head.get("arguments", {})]
        name = str(head.get("program") or "program")
        return self._builder.graph(name, names, ends, (), self._builder.node(Constant(None)))

    def _begin(self, line: Entry, program: str) -> None:
        """Begins a stream: a branch of a fork that is known, or one of its own."""
        number = line["stream"]
        fork = self._forks.get(line["after"]) if line["after"] is not None else None
        if fork is not None and number in fork[1]:
            index = self._branches[number] = fork[1].index(number)
            node = self._builder.node(GetForkItem(index), (fork[0],))
            self._label(node, Label("Branch", str(index)), f"branch {index}")
            if fork[0] in self.after:
                self.after.add(node)
        else:
            node = self._builder.node(Begin(program, number))
            self._label(node, Label("Begin", plain(program)), "")
        self._last[number] = node

    def _operation(self, line: Entry) -> None:
        number = line["stream"]
        if number not in self._last:
            raise GraphError(f"operation {line['op']} is of a stream that is not known; save the run again")
        boxes = self._boxes(line)
        if len(self.labels) + len(boxes) > MOST_BOXES:
            self.left_out += len(boxes)
            return
        place = self._places.get(line.get("line", -1))
        for op, inputs, label, whole in boxes:
            node = self._builder.node(op, (self._last[number], *inputs), place)
            self._label(node, label, f"{whole}\n{_after(line)}".rstrip())
            if line.get("after_read"):
                self.after.add(node)
            self._last[number] = node
            if isinstance(op, Fork):
                self._forks[line["op"]] = (node, list(line.get("others", ())))
            elif isinstance(op, Generate | Choose):
                self._answers.append((line.get("name", ""), _text(line), number, node))

    def _boxes(self, line: Entry) -> list[_Box]:
        """Returns the operation, its further inputs, label and whole text of each box that a line makes."""
        kind, name, text = line["kind"], str(line.get("name", "")), _text(line)
        error = f" {line['error']}" if line.get("error") else ""
        said = f"{plain(name)} {_quoted(text)}{plain(error)}".strip()
        match kind:
            case "gen":
                return [(Generate(ops.Gen(name or None)), (), Label("Gen", said), f"{name}\n{text}{error}")]
            case "select":
                return [(Choose(ops.Select(name or None, ())), (), Label("Select", said), f"{name}\n{text}{error}")]
            case "fork":
                size = len(line.get("others", ()))
                return [(Fork(size), (), Label("Fork", str(size)), f"fork of {size}")]
            case "join":
                ends = [self._last[each] for each in line.get("others", ()) if each in self._last]
                return [(Join("gather_variable"), tuple(ends), Label("Join", f"{len(ends)}"), f"join of {len(ends)}")]
            case "text":
                return list(self._pieces(line.get("text", ())))
            case _:
                node = self._builder.node(Constant(text))
                return [(Append(), (node,), Label(kind.replace(" ", "").capitalize(), said), f"{kind}\n{text}{error}")]

    def _pieces(self, pieces: Sequence[Sequence[str]]) -> Iterator[_Box]:
        """Yields the boxes of a text of the program: arguments, answers that calls gave, and between them all else."""
        said = ""
        for origin, text, *more in pieces:
            expression = str(more[0]) if more else ""
            value: Node | None = None
            if origin == "argument":
                value, name = self._builder.node(Argument(expression)), expression
            elif origin == "value":
                value, name = self._answer(text, expression)
            if value is None:
                said += text
                continue
            if said:
                yield self._said(said)
                said = ""
            kind = "Argument" if origin == "argument" else "Variable"
            yield Append(), (value,), Label(kind, f"{plain(name)} {_quoted(text)}"), f"{expression}\n{text}"
        if said:
            yield self._said(said)

    def _said(self, text: str) -> _Box:
        return Append(), (self._builder.node(Constant(text)),), Label("Text", _quoted(text)), text

    def _answer(self, text: str, expression: str) -> tuple[Node | None, str]:
        """Returns the node of the last answer that an expression names and that has this text, and its name. Of equal
        answers of branches `forks[0]["plan"]` is that of branch 0."""
        found: tuple[Node | None, str] = None, ""
        for name, answer, stream, call in self._answers:
            if answer != text:
                continue
            named = re.search(rf"""(?:\[(\d+)\]\s*\[\s*)?["']{re.escape(name)}["']""", expression)
            if named is None:
                continue
            if found[0] is None or named[1] is None or self._branches.get(stream) == int(named[1]):
                found = self._builder.node(Variable(name), (call,)), name
        return found

    def _label(self, node: Node, label: Label, whole: str) -> None:
        self.labels[node] = label
        self.full[node] = folded(whole, _HOVER)


def _text(line: Entry) -> str:
    return "".join(piece[1] for piece in line.get("text", ()))


def _after(line: Entry) -> str:
    name = line.get("after_read")
    return f"said after the program had read {name}" if name else ""


def _quoted(text: str) -> str:
    return f'"{plain(folded(text, _LONGEST))}"'
