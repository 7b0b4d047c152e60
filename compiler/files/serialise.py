"""Files of graphs, "x.umbel.json": programs that are kept, sent and read again, with no code inside.

    {"umbel": "graph", "version": 1,
     "name": "tip",
     "parameters": [{"name": "topic"}, {"name": "count", "default": 2}],
     "files": ["tip.py"],
     "nodes": [
      {"op": "Begin", "program": "tip"},
      {"op": "Constant", "value": "Tip about "},
      {"op": "Append", "inputs": [0, 1], "line": [0, 4, "tip"]},
      ...
     ],
     "ends": [9], "variables": [["tip", 8]], "result": 7}

A node's inputs are places of nodes before it, its line is a file's place in `files`, a number and a function. What else
it has are the attributes of its operation (`operations.py`), left out where they have their usual value; values are as
`values.py` writes them, results of gens as `results.py` does. docs/graph-format.md has all of it.

What is read is data until `verify` has looked at it, and it comes from anywhere.
"""

import errno
import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...lang import checks
from ...lang.errors import GraphError
from ...lang.source import public_name
from ..checks.verify import place, verify
from ..graph import Builder, Graph, Line, Node, Parameter
from ..operations import Choose, Constant, Generate, Look
from . import operations as file_operations
from . import text as file_text
from . import values as file_values
from .values import Json, expect, members

VERSION = 1
MAX_NODES = 1_000_000

_WHOLE: Mapping[str, type] = {
    "umbel": str,
    "version": int,
    "name": str,
    "parameters": list,
    "files": list,
    "nodes": list,
    "ends": list,
    "variables": list,
    "result": int,
}


# -------------------------------------------------------------------------------------------- writing


def save(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Writes the file of a graph, all of it or nothing.

    Raises:
        GraphError: the graph is not whole, or holds what no file can.
        OSError: the file cannot be written.
    """
    data, target = encode(graph), Path(checks.path("path", path))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target.parent))
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}")  # others may write the same file now
    try:
        draft.write_bytes(data)
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def encode(graph: Graph) -> bytes:
    """The file of a graph: UTF-8, a line for each node.

    Raises:
        GraphError: the graph is not whole, or holds what no file can: objects and result types of the user's classes.
    """
    verify(graph)
    lines = _Lines()
    nodes = [_written_node(graph, node, graph.numbers, lines) for node in graph.nodes]
    head = {"umbel": "graph", "version": VERSION, **_head(graph), "files": lines.files}
    foot = _foot(graph, graph.numbers)
    written = file_text.written
    listed = ",\n  ".join(map(written, nodes))
    return f'{written(head)[:-1]},\n "nodes": [\n  {listed}\n ],\n {written(foot)[1:]}\n'.encode()


def digest(graph: Graph) -> str:
    """SHA-256, hexadecimal, of what a graph says: equal for equal graphs, whatever the order of their nodes and
    wherever their lines stand.

    Raises:
        GraphError: as `encode`.
    """
    verify(graph)
    numbers = {node: number for number, node in enumerate(_in_order_of_need(graph))}
    nodes = (_written_node(graph, node, numbers, None) for node in numbers)
    hashed = hashlib.sha256()
    for part in ({"version": VERSION, **_head(graph)}, *nodes, _foot(graph, numbers)):
        hashed.update(file_text.written(part, sort_keys=True).encode() + b"\n")
    return hashed.hexdigest()


class _Lines:
    """Lines of nodes, and the files that they stand in. Of these only names that tell nothing of this machine."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    @property
    def files(self) -> list[str]:
        """Two files of one name are told apart by a number."""
        names: list[str] = []
        for file in self._places:
            name = numbered = public_name(file)
            count = 1
            while numbered in names:
                count += 1
                numbered = f"{name} ({count})"
            names.append(numbered)
        return names

    def written(self, line: Line) -> Json:
        return [self._places.setdefault(line.file, len(self._places)), line.number, line.function]


def _head(graph: Graph) -> dict[str, Json]:
    return {"name": graph.name, "parameters": [_written_parameter(parameter) for parameter in graph.parameters]}


def _foot(graph: Graph, numbers: Mapping[Node, int]) -> dict[str, Json]:
    return {
        "ends": [numbers[end] for end in graph.ends],
        "variables": [[name, numbers[value]] for name, value in graph.variables],
        "result": numbers[graph.result],
    }


def _written_parameter(parameter: Parameter) -> Json:
    if parameter.required:
        return {"name": parameter.name}
    try:
        return {"name": parameter.name, "default": file_values.written(parameter.default)}
    except GraphError as error:
        raise GraphError(f"the default of parameter {parameter.name!r} cannot be kept in a file: {error}") from None


def _written_node(graph: Graph, node: Node, numbers: Mapping[Node, int], lines: _Lines | None) -> dict[str, Json]:
    """`lines` None: without the line."""
    try:
        written = file_operations.written(node.op)
    except GraphError as error:
        at = place(graph.numbers[node], node)
        raise GraphError(f"{at}: {_subject(graph, node)} cannot be kept in a file: {error}") from None
    if node.inputs:
        written["inputs"] = [numbers[taken] for taken in node.inputs]
    if lines is not None and node.line is not None:
        written["line"] = lines.written(node.line)
    return written


def _subject(graph: Graph, node: Node) -> str:
    """What a node is to the user who has to change it."""
    match node.op:
        case Generate(gen):
            return f"gen({gen.name!r})"
        case Choose(select):
            return f"select({select.name!r})"
        case Constant():
            for name, value in graph.variables:
                if value is node:
                    return f"the value of variable {name!r}"
            if node is graph.result:
                return "what the program returns"
            if any(isinstance(user.op, Look) for user in graph.users[node]):
                return "this picture"
    return "a value"


def _in_order_of_need(graph: Graph) -> Iterator[Node]:
    """Every node behind its inputs, in the order in which ends, variables and the result come to need them."""
    done: set[Node] = set()
    for root in (*graph.ends, *(value for _, value in graph.variables), graph.result):
        waiting = [root]
        while waiting:
            node = waiting[-1]
            missing = [taken for taken in node.inputs if taken not in done] if node not in done else []
            if missing:
                waiting.extend(reversed(missing))
                continue
            waiting.pop()
            if node not in done:
                done.add(node)
                yield node


# -------------------------------------------------------------------------------------------- reading


def read(path: str | os.PathLike[str]) -> Graph:
    """The graph of a file.

    Raises:
        GraphError: it is no file of a graph, or of one that is not whole; the message names the file and the place.
        ParameterError: what is no path.
        OSError: there is no such file, or it cannot be read.
    """
    place = checks.path("path", path)
    with open(place, "rb") as file:
        data = file.read(file_text.MAX_BYTES + 1)
    return decode(data, source=place)


def decode(data: bytes, *, source: str) -> Graph:
    """The graph that `encode` wrote. `source`: where the bytes come from, for messages.

    Raises:
        GraphError: as `read`. Whatever the bytes are, nothing else is raised, and nothing of them is run.
    """
    try:
        graph = _read_graph(file_text.read(data))
        verify(graph)
    except GraphError as error:
        raise GraphError(f"{source}: {error}") from None
    return graph


def _read_graph(whole: Json) -> Graph:
    _check_version(expect(whole, dict, "the file"))
    given = members(whole, "the file", _WHOLE, {})
    files = [expect(file, str, f"files[{index}]") for index, file in enumerate(given["files"])]
    parameters = [_read_parameter(value, f"parameters[{index}]") for index, value in enumerate(given["parameters"])]
    nodes = _read_nodes(given["nodes"], files)
    graph = Graph(
        given["name"],
        tuple(parameters),
        tuple(nodes),
        tuple(_node(nodes, number, f"ends[{index}]") for index, number in enumerate(given["ends"])),
        tuple(_read_variable(pair, nodes, f"variables[{index}]") for index, pair in enumerate(given["variables"])),
        _node(nodes, given["result"], "result"),
    )
    return graph


def _check_version(whole: dict[str, Json]) -> None:
    if whole.get("umbel") != "graph":
        raise GraphError('it is no file of a graph, which begins with {"umbel": "graph", "version": 1}')
    version = expect(whole.get("version"), int, "version")
    if version > VERSION:
        raise GraphError(f"written by a newer umbel: version {version}, this one reads {VERSION}; install a newer one")
    if version < 1:
        raise GraphError(f"version {version} has never been; this umbel reads {VERSION}")


def _read_parameter(value: Json, at: str) -> Parameter:
    given = members(value, at, {"name": str}, {"default": object})
    if "default" not in given:
        return Parameter(given["name"])
    return Parameter(given["name"], False, file_values.read(given["default"], f"{at}.default"))


def _read_nodes(values: list[Json], files: list[str]) -> list[Node]:
    if len(values) > MAX_NODES:
        raise GraphError(f"it has {len(values)} nodes; at most {MAX_NODES} are read")
    builder = Builder()
    nodes: list[Node] = []
    for index, value in enumerate(values):
        at = f"nodes[{index}]"
        op = dict(expect(value, dict, at))
        inputs, line = op.pop("inputs", []), op.pop("line", None)
        taken = [_node(nodes, number, f"{at}.inputs") for number in expect(inputs, list, f"{at}.inputs")]
        said = None if line is None else _read_line(line, files, f"{at}.line")
        nodes.append(builder.node(file_operations.read(op, at), taken, said))
    return nodes


def _node(nodes: list[Node], number: Json, at: str) -> Node:
    if not 0 <= expect(number, int, at) < len(nodes):
        raise GraphError(f"{at}: there is no node {number} before this place; inputs stand before what takes them")
    return nodes[number]


def _read_line(value: Json, files: list[str], at: str) -> Line:
    if len(expect(value, list, at)) != 3:
        raise GraphError(f"{at}: expected a file's place, a number and a function, found {len(value)} things")
    file, number, function = expect(value[0], int, at), expect(value[1], int, at), expect(value[2], str, at)
    if not 0 <= file < len(files):
        raise GraphError(f"{at}: there is no file {file}")
    return Line(files[file], number, function)


def _read_variable(value: Json, nodes: list[Node], at: str) -> tuple[str, Node]:
    if len(expect(value, list, at)) != 2:
        raise GraphError(f"{at}: expected a name and a node, found {len(value)} things")
    return expect(value[0], str, at), _node(nodes, value[1], at)
