"""The command `umbel fsm`: what automaton a regular expression or a JSON schema is, before and after compression."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from ..automaton.automaton import Automaton
from ..boolean.resolution import resolve
from ..errors import ConstraintRefused, Limits
from ..language import Grammar
from ..regex.parser import parse_regex
from ..schema import SchemaOptions, resolved_schema
from .compress import CompressedGraph, Exploration, ForcedShare, Graph, compress, cut, explore, folded, forced_share
from .drawing import dot, edge_label, quoted, svg

Kind = Literal["regex", "schema"]

_LISTED = 40  # compressed states that are listed without --edges
_DRAWN = 60  # states in a picture; of more the first ones are drawn
_LABEL = 64  # characters of a label in the list
_AROUND = 60  # characters before and after a mark
_SHOWN = 240  # characters of the shortest text that are printed


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that is printed of one constraint."""

    kind: Kind
    source: str
    explored: Exploration
    compressed: CompressedGraph
    shortest: ForcedShare
    unenforced: tuple[tuple[str, str], ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status; a constraint that is refused, or a file that is not there, gives 1."""
    options = parser().parse_args(arguments)
    try:
        kind, source = _read(options.constraint, options.kind)
    except (OSError, ValueError) as error:  # no such file, no text in it, or no name of one
        reason = error.strerror if isinstance(error, OSError) else error
        remedy = "write an expression, or the path of a file with a JSON schema"
        print(f"umbel fsm: {options.constraint[:200]!r}: {str(reason)[:200]}; {remedy}", file=sys.stderr)
        return 1
    schema_options = SchemaOptions(
        whitespace=options.whitespace, closed=options.closed, allow_unenforced=options.allow_unenforced
    )
    try:
        inspection = inspect(kind, source, schema_options=schema_options, most_states=options.states)
    except ConstraintRefused as error:
        print(_refusal(error, kind, source), file=sys.stderr)
        return 1
    print(_json(inspection) if options.json else _text(inspection, every_edge=options.edges))
    return _draw(inspection, schema_options, options.dot, options.svg)


def inspect(
    kind: Kind,
    source: str,
    *,
    schema_options: SchemaOptions = SchemaOptions(),  # noqa: B008 (frozen)
    most_states: int = 2_000,
) -> Inspection:
    """Builds the automaton and walks it breadth first. Raises ConstraintRefused and its kinds."""
    limits = Limits()
    unenforced: tuple[tuple[str, str], ...] = ()
    if kind == "regex":
        grammar = resolve(Grammar(parse_regex(source, limits)), limits)
    else:
        compiled = resolved_schema(source, schema_options, limits)
        grammar, unenforced = compiled.grammar, compiled.unenforced
    automaton = Automaton(grammar, limits)
    shortest = forced_share(automaton)
    explored = explore(automaton, most_states)
    return Inspection(kind, source, explored, compress(explored.characters), shortest, unenforced)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="umbel fsm",
        description="Print the automaton of a constraint, before and after compression. After the first character of "
        "an edge, and along the only edge of a state, there is no choice: jump-forward writes that without the model.",
    )
    made.add_argument("constraint", help="a regular expression, a file with a JSON schema, or - for standard input")
    kinds = made.add_mutually_exclusive_group()
    kinds.add_argument("--regex", dest="kind", action="store_const", const="regex", help="it is an expression")
    kinds.add_argument("--schema", dest="kind", action="store_const", const="schema", help="it is a schema or its file")
    made.add_argument("--whitespace", choices=("spaced", "compact", "flexible"), default="spaced", help="of JSON")
    made.add_argument("--closed", action="store_true", help="objects have no members that the schema does not name")
    made.add_argument("--allow-unenforced", action="store_true", help="list keywords that are not honoured")
    made.add_argument("--states", type=_positive, default=2_000, help="how many states to explore (2000)")
    made.add_argument("--edges", action="store_true", help=f"list the edges of more than {_LISTED} states too")
    made.add_argument("--json", action="store_true", help="print one JSON object")
    made.add_argument("--dot", type=Path, metavar="FILE", help="write a graph for Graphviz")
    made.add_argument("--svg", type=Path, metavar="FILE", help="draw the compressed automaton")
    return made


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of states; write a number of 1 or more")
    return int(text)


def _read(given: str, kind: Kind | None) -> tuple[Kind, str]:
    """Reads what is meant: text of a JSON object is a schema, and so is the content of a file."""
    if given == "-":
        source = sys.stdin.read()
        return kind or ("schema" if source.lstrip().startswith("{") else "regex"), source.removesuffix("\n")
    if kind == "regex":
        return kind, given
    if given.endswith(".json") or _is_file(given):
        return "schema", Path(given).read_text(encoding="utf-8")
    return kind or ("schema" if _is_object(given) else "regex"), given


def _is_file(given: str) -> bool:
    try:
        return Path(given).is_file()
    except (OSError, ValueError):  # too long for a name, or a zero byte: an expression
        return False


def _is_object(given: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(given), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False


def _refusal(error: ConstraintRefused, kind: Kind, source: str) -> str:
    """Returns the error; below it a one-line expression with a mark at the position."""
    lines = [f"umbel fsm: {error}"]
    position = re.fullmatch(r"position (\d+)", error.where)
    if kind == "regex" and position and source.isprintable():
        place = int(position[1])
        start = max(0, place - _AROUND)
        lines += [f"  {source[start : place + _AROUND]}", "  " + " " * (place - start) + "^"]
    return "\n".join(lines)


def _text(inspection: Inspection, *, every_edge: bool) -> str:
    before, after = inspection.compressed.before, inspection.compressed.after
    explored = inspection.explored
    lines = [f"{inspection.kind}: {_one_line(inspection.source)}", ""]
    lines += _table(
        ("", "bytes", "characters", "compressed"),
        ("states", explored.byte_states, len(before.states), len(after.states)),
        ("edges", explored.byte_edges, len(before.edges), len(after.edges)),
    )
    lines += ["", f"removed     {inspection.compressed.removed_share:.0%} of the states after each character"]
    shortest = inspection.shortest
    lines.append(f"shortest    {len(shortest.text)} bytes, {shortest.forced} forced ({shortest.share:.0%})")
    cut = "" if len(shortest.text.decode()) <= _SHOWN else " ..."
    lines.append(f"            {quoted(shortest.text.decode()[:_SHOWN])}{cut}")
    lines.append(f"explored    {_extent(before)}")
    lines += [f"unenforced  {keyword} at {path}" for keyword, path in inspection.unenforced]
    lines.append("")
    if every_edge or len(after.states) <= _LISTED:
        lines += _edge_list(after)
    else:
        lines.append(f"{len(after.edges)} edges; --edges lists them")
    return "\n".join(lines)


def _one_line(source: str) -> str:
    text = " ".join(source.split()) if "\n" in source else source
    return text if len(text) <= 100 else f"{text[:99]}…"


def _table(head: tuple[str, ...], *rows: tuple[object, ...]) -> list[str]:
    cells = [tuple(map(str, row)) for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join((row[0].ljust(10), *map(str.rjust, row[1:], widths[1:]))) for row in cells]


def _extent(graph: Graph) -> str:
    if graph.complete:
        return "fully"
    return f"{len(graph.states) - len(graph.open_states)} states; {len(graph.open_states)} more are seen and left"


def _edge_list(graph: Graph) -> list[str]:
    """Lists a block for each state: *n accepts, ?n was not explored."""
    lines: list[str] = []
    width = max(len(_name(graph, state)) for state in graph.states)
    leaving: dict[int, list[str]] = {state: [] for state in graph.states}
    for edge in graph.edges:
        leaving[edge.source].append(f"{edge_label(edge, _LABEL)} -> {_name(graph, edge.target)}")
    for state, edges in leaving.items():
        name = _name(graph, state).rjust(width)
        lines.append(f"  {name}  {edges[0] if edges else '(end)' if state in graph.accepting else '...'}")
        lines += [f"  {' ' * width}  {edge}" for edge in edges[1:]]
    return [*lines, "", "  * a text may end here" + ("; ? not explored" if graph.open_states else "")]


def _name(graph: Graph, state: int) -> str:
    return f"{'?' if state in graph.open_states else ''}{'*' if state in graph.accepting else ''}{state}"


def _json(inspection: Inspection) -> str:
    """Lists edges as [source, target, ranges of code points, text after it]."""
    after = inspection.compressed.after
    explored = inspection.explored
    before = inspection.compressed.before
    return msgspec.json.format(
        msgspec.json.encode(
            {
                "kind": inspection.kind,
                "source": inspection.source,
                "explored": before.complete,
                "states": {
                    "bytes": explored.byte_states,
                    "characters": len(before.states),
                    "compressed": len(after.states),
                },
                "edges": {
                    "bytes": explored.byte_edges,
                    "characters": len(before.edges),
                    "compressed": len(after.edges),
                },
                "removed_share": inspection.compressed.removed_share,
                "shortest": {
                    "text": inspection.shortest.text.decode(),
                    "bytes": len(inspection.shortest.text),
                    "forced_bytes": inspection.shortest.forced,
                },
                "unenforced": inspection.unenforced,
                "graph": {
                    "start": after.start,
                    "states": after.states,
                    "accepting": sorted(after.accepting),
                    "open": sorted(after.open_states),
                    "edges": [[edge.source, edge.target, edge.first, edge.then] for edge in after.edges],
                },
            }
        )
    ).decode()


def _picture(inspection: Inspection, schema_options: SchemaOptions) -> tuple[Graph, list[str]]:
    """Cuts a graph to what a picture has room for, and says in words what is left out."""
    graph, notes = inspection.compressed.after, list[str]()
    if len(graph.states) > _DRAWN and inspection.kind == "schema" and not schema_options.closed:
        closed = replace(schema_options, closed=True)
        most_states = len(inspection.compressed.before.states)
        graph = inspect("schema", inspection.source, schema_options=closed, most_states=most_states).compressed.after
        notes.append("without the members that the schema does not name; --closed prints the same automaton")
    smaller = folded(graph)
    if len(smaller.states) < len(graph.states):
        graph = smaller
        notes.append("counted repeats are loops, drawn without their counts")
    if len(graph.states) > _DRAWN:
        notes.append(f"the first {_DRAWN} of {len(graph.states)} states; dashed ones go on, --dot writes all")
        graph = cut(graph, _DRAWN)
    return graph, notes


def _draw(inspection: Inspection, schema_options: SchemaOptions, dot_file: Path | None, svg_file: Path | None) -> int:
    try:
        if dot_file is not None:
            dot_file.write_text(dot(inspection.compressed.after), encoding="utf-8")
        if svg_file is not None:
            graph, notes = _picture(inspection, schema_options)
            svg_file.write_text(svg(graph, _one_line(inspection.source), notes), encoding="utf-8")
            print("".join(f"picture     {note}\n" for note in notes), end="")
    except (OSError, ValueError) as error:
        print(f"umbel fsm: {str(error)[:400]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
