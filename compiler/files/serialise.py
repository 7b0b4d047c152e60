"""Writes and reads files of graphs, "x.umbel.json": programs that are kept, sent and read again, with no code inside.

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

A node's inputs are indices of earlier nodes; its line is an index into `files`, a number and a function. Its other
members are the attributes of its operation, left out where they have their default; values are as `values.py` writes
them, results of gens as `results.py` does. docs/graph-format.md specifies all of it. `verify` checks that a graph that
was read can run.

Files are untrusted: their content is plain data until `verify` has checked it.
"""

import errno
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, cast

import msgspec

from ...fsm.composed import nodes
from ...fsm.composed.expression import captures_of_constraint
from ...lang import checks, ops
from ...lang.errors import ConstraintError, GraphError, ParameterError
from ...lang.prompt import public_name
from ...lang.protocol import ConstraintSpec
from ...lang.result import Captures
from ..checks.nodes import OPERATIONS
from ..checks.verify import place, verify
from ..graph import Builder, Graph, Line, Node, Parameter
from ..operations import Apply, Choose, Constant, Generate, Look, Operation, Structure
from . import results as file_results
from . import values as file_values
from .values import Json, expect, json_text, members

VERSION = 3  # captures are new in 2, and `fixed` in 3; a graph is written as the oldest version that has what it needs
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
_PARTIAL: Mapping[str, type] = {"fixed": list}  # left out when empty


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
    """Returns the file of a graph: UTF-8, a line for each node.

    Raises:
        GraphError: the graph is not whole, or holds what no file can: objects and result types of the user's classes.
    """
    verify(graph)
    lines = _Lines()
    nodes = [_written_node(graph, node, graph.numbers, lines) for node in graph.nodes]
    fixed: dict[str, Json] = {"fixed": list(graph.fixed)} if graph.fixed else {}
    version = VERSION if fixed else _version(graph)
    head = {"umbel": "graph", "version": version, **_head(graph), **fixed, "files": lines.files}
    foot = _foot(graph, graph.numbers)
    listed = ",\n  ".join(map(json_text, nodes))
    return f'{json_text(head)[:-1]},\n "nodes": [\n  {listed}\n ],\n {json_text(foot)[1:]}\n'.encode()


def digest(graph: Graph) -> str:
    """Returns the SHA-256, hexadecimal, of a graph. It is equal for equal graphs, independently of the order of nodes,
    of source lines and of the names that were fixed, which change no run.

    Raises:
        GraphError: as `encode`.
    """
    verify(graph)
    numbers = {node: number for number, node in enumerate(_in_order_of_need(graph))}
    nodes = (_written_node(graph, node, numbers, None) for node in numbers)
    hashed = hashlib.sha256()
    for part in ({"version": _version(graph), **_head(graph)}, *nodes, _foot(graph, numbers)):
        hashed.update(json_text(part, sort_keys=True).encode() + b"\n")
    return hashed.hexdigest()


class _Lines:
    """Collects lines of nodes and their files, by names without paths of this machine."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    @property
    def files(self) -> list[str]:
        """Returns the file names; a number distinguishes two files of one name."""
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
    """Writes a node as JSON; with `lines` None, without its line."""
    try:
        written = _written_operation(node.op)
    except GraphError as error:
        at = place(graph.numbers[node], node)
        raise GraphError(f"{at}: {_subject(graph, node)} cannot be kept in a file: {error}") from None
    if node.inputs:
        written["inputs"] = [numbers[taken] for taken in node.inputs]
    if lines is not None and node.line is not None:
        written["line"] = lines.written(node.line)
    return written


def _subject(graph: Graph, node: Node) -> str:
    """Names a node in the user's terms, for an error message."""
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
    """Yields every node after its inputs, in the order in which ends, variables and the result come to need them."""
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
    """Reads the graph of a file.

    Raises:
        GraphError: it is no file of a graph, or of one that is not whole; the message names the file and the place.
        ParameterError: what is no path.
        OSError: there is no such file, or it cannot be read.
    """
    place = checks.path("path", path)
    with open(place, "rb") as file:
        data = file.read(file_values.MAX_BYTES + 1)
    return decode(data, source=place)


def decode(data: bytes, *, source: str) -> Graph:
    """Reads the graph that `encode` wrote. `source`: where the bytes come from, for messages.

    Raises:
        GraphError: as `read`. Whatever the bytes are, nothing else is raised, and nothing of them is run.
    """
    try:
        graph = _read_graph(file_values.read_json(data))
        verify(graph)
    except GraphError as error:
        raise GraphError(f"{source}: {error}") from None
    return graph


def _read_graph(whole: Json) -> Graph:
    _check_version(expect(whole, dict, "the file"))
    given = members(whole, "the file", _WHOLE, _PARTIAL)
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
        tuple(expect(name, str, f"fixed[{index}]") for index, name in enumerate(given.get("fixed", []))),
    )
    return graph


def _version(graph: Graph) -> int:
    """Returns the oldest version whose readers read a graph, apart from its fixed names."""
    captures = any(isinstance(node.op, Generate) and node.op.gen.captures is not None for node in graph.nodes)
    return 2 if captures else 1


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
        nodes.append(builder.node(_read_operation(op, at), taken, said))
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


# -------------------------------------------------------------------------------------------- operations


def _written_operation(op: Operation) -> dict[str, Json]:
    """Writes an operation as JSON.

    Raises:
        GraphError: an attribute that no file can hold; the message follows the place of the node.
    """
    return {"op": type(op).__name__, **_written_fields(op)}


def _read_operation(value: dict[str, Json], at: str) -> Operation:
    """Reads an operation from JSON. `value`: without the members that belong to the node.

    Raises:
        GraphError: an unknown operation, or members that it does not have.
    """
    name = value.get("op")
    kind = OPERATIONS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise GraphError(f"{at}.op: unknown operation {name!r}; known are {', '.join(OPERATIONS)}")
    given = {key: member for key, member in value.items() if key != "op"}
    return cast(Operation, _read_fields(kind, given, at))


def _written_fields(owner: Any) -> dict[str, Json]:
    """Writes the fields of a dataclass, without those that have their usual value."""
    kind = type(owner)
    result: dict[str, Json] = {}
    for field in fields(owner):
        value, usual = getattr(owner, field.name), _usual(kind, field)
        if type(value) is not type(usual) or value != usual:
            result[field.name] = _CODECS.get((kind, field.name), _PLAIN)[0](value)
    return result


def _read_fields(kind: type, value: dict[str, Json], at: str) -> Any:
    usual = {field.name: _usual(kind, field) for field in fields(kind)}
    required = {name: object for name, value in usual.items() if value is MISSING}
    given = members(value, at, required, {name: object for name in usual if name not in required})
    made = {
        name: _CODECS.get((kind, name), _PLAIN)[1](given[name], f"{at}.{name}") if name in given else standing
        for name, standing in usual.items()
    }
    if kind is ops.Gen and made["result"] is not None:
        schema = made["constraint"].source if made["constraint"] is not None else ""
        made["result"] = file_results.read(made["result"], schema, f"{at}.result")
    if kind is ops.Gen and made["captures"] is not None:
        made["captures"] = _read_captures(made["captures"], made["constraint"], f"{at}.captures")
    return kind(**made)


def _usual(kind: type, field: Field[Any]) -> Any:
    """Returns the default of a field; MISSING when it is required."""
    if (kind, field.name) == (ops.Select, "choices"):
        return ()  # they are inputs of the node
    return field.default if field.default_factory is MISSING else field.default_factory()


# ------------------------------------------------------------------------------------------ attributes


def _same(value: Any) -> Json:
    return value


def _read_plain(value: Json, at: str) -> Any:
    if isinstance(value, list | dict):
        raise GraphError(f"{at}: expected text, a number, true, false or null")
    return value


def _read_tuple(value: Json, at: str) -> tuple[Any, ...]:
    return tuple(file_values.read(member, at) for member in expect(value, list, at))


def _written_tuple(value: tuple[Any, ...]) -> Json:
    return [file_values.written(member) for member in value]


def _written_sampling(options: Mapping[str, Any]) -> Json:
    return {name: _written_sampling_value(value) for name, value in options.items()}


def _written_sampling_value(value: Any) -> Json:
    match value:
        case tuple():
            return list(value)
        case dict():
            return {str(token): bias for token, bias in value.items()}
        case _:
            return value


def _read_sampling(value: Json, at: str) -> dict[str, Any]:
    given = expect(value, dict, at)
    return {name: _read_sampling_value(name, member, f"{at}.{name}") for name, member in given.items()}


def _read_sampling_value(name: str, value: Json, at: str) -> Any:
    if name in ("stop", "stop_regex", "stop_token_ids"):
        return tuple(_read_plain(member, at) for member in expect(value, list, at))
    if name == "logit_bias":
        bias = expect(value, dict, at)
        if not all(re.fullmatch("[0-9]{1,18}", token) for token in bias):
            raise GraphError(f"{at}: expected ids of tokens as keys")
        return {int(token): _read_plain(number, at) for token, number in bias.items()}
    return _read_plain(value, at)


def _read_constraint(value: Json, at: str) -> ConstraintSpec | None:
    try:
        return msgspec.convert(value, ConstraintSpec | None)
    except (msgspec.ValidationError, ParameterError) as error:
        raise GraphError(f"{at}: {error}") from None


def _read_later(value: Json, at: str) -> Json:
    return value


def _written_captures(captures: Captures) -> Json:
    return {name: file_results.written(result) for name, result in captures.parts.items()}


def _read_captures(value: Json, constraint: ConstraintSpec | None, at: str) -> Captures:
    """Reads the captures of a constraint: name → how its text becomes an object."""
    if constraint is None:
        raise GraphError(f"{at}: they are parts of a constraint, and there is none")
    try:
        tree = nodes.read(constraint.source) if constraint.kind == "expression" else None
        parts = {
            name: file_results.read(
                result,
                constraint.source if tree is None else nodes.captured_schema(tree, name),
                f"{at}.{name}",
            )
            for name, result in expect(value, dict, at).items()
        }
        return captures_of_constraint(constraint, parts)
    except ConstraintError as error:
        raise GraphError(f"{at}: {error}") from None


_Codec = tuple[Callable[[Any], Json], Callable[[Json, str], Any]]
_PLAIN: _Codec = (_same, _read_plain)
_SAMPLING: _Codec = (_written_sampling, _read_sampling)
_CODECS: Mapping[tuple[type, str], _Codec] = {
    (Generate, "gen"): (_written_fields, lambda value, at: _read_fields(ops.Gen, expect(value, dict, at), at)),
    (Generate, "defaults"): _SAMPLING,
    (Generate, "tags"): (_written_tuple, _read_tuple),
    (Choose, "select"): (_written_fields, lambda value, at: _read_fields(ops.Select, expect(value, dict, at), at)),
    (Choose, "defaults"): _SAMPLING,
    (Constant, "value"): (file_values.written, file_values.read),
    (Apply, "arguments"): (_written_tuple, _read_tuple),
    (Structure, "template"): (file_values.written, file_values.read),
    (ops.Gen, "options"): _SAMPLING,
    (ops.Gen, "constraint"): (msgspec.to_builtins, _read_constraint),
    (ops.Gen, "result"): (file_results.written, _read_later),  # what stands in its constraint is needed for it
    (ops.Gen, "captures"): (_written_captures, _read_later),
}
