"""The command `umbel compile`: prints the graph of a program, draws it, or writes it to a file."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..interpreter.view.page import RunRecord
from ..lang import checks
from ..lang.errors import MAX_MESSAGE, ParameterError, UmbelError, shortened
from . import passes
from .files import serialise
from .graph import Graph
from .script import add_static, by_name, pair, program_of
from .tracing.trace import trace
from .views import recorded

_SUFFIX = ".umbel.json"
_SAID = {
    "effect": "has run now, and never does when the graph runs",
    "volatile": "gives another answer each time, and the graph keeps this one",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 with a message where there is no graph."""
    options = parser().parse_args(arguments)
    try:
        for option, path in (("--output", options.output), ("--svg", options.svg)):
            if path is not None:
                checks.output(option, path)
        if options.run is not None:
            return _draw_run(options)
        graph = _graph(options)
        rewritten = passes.rewrite(graph, options.passes, keep=options.keep, independent=options.independent)
        _write(rewritten, options)
    except BrokenPipeError:
        raise
    except (UmbelError, OSError) as error:
        _show(shortened(str(error), MAX_MESSAGE), error)
        return 1
    except Exception as error:
        if not getattr(error, "__notes__", ()):  # with one it is the program's own, and the note has the line
            raise
        _show(shortened(f"{type(error).__name__}: {error}", MAX_MESSAGE), error)
        return 1
    return 0


def _show(message: str, error: Exception) -> None:
    if "static_args={" in message:
        error.add_note("on the command line it is --static NAME=JSON, such as --static n=3")
    print("\n  ".join([f"umbel compile: {message}", *getattr(error, "__notes__", ())]), file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="umbel compile",
        description="Trace a program to its graph: what it says, in which order, and what depends on what. The file "
        'runs as an import of it would, without what stands under if __name__ == "__main__"; no model is asked.',
    )
    made.add_argument(
        "source",
        nargs="?",
        metavar="FILE.py:PROGRAM",
        help=f"a program of a Python file, or a file of a graph, FILE{_SUFFIX}",
    )
    made.add_argument(
        "--from",
        dest="run",
        metavar="RUN.jsonl",
        help="instead of a program: draw a run that state.save(FILE) wrote, with --svg; also of programs that look at "
        "answers, whose later boxes are dashed",
    )
    printed = made.add_mutually_exclusive_group()
    printed.add_argument("--show", action="store_true", help="print a listing, and what the passes did; the default")
    printed.add_argument("--json", action="store_true", help="print the graph as its file has it")
    printed.add_argument("--dot", action="store_true", help="print the graph for Graphviz")
    made.add_argument("--svg", type=Path, metavar="FILE", help="draw the graph")
    made.add_argument("-o", "--output", type=Path, metavar=f"FILE{_SUFFIX}", help="keep the graph, for umbel.load")
    add_static(made)
    made.add_argument(
        "--given",
        action="append",
        default=[],
        type=_given,
        metavar="NAME=JSON",
        help="an answer that the program looks at, to see what it says for that one; such a graph is not kept",
    )
    made.add_argument(
        "--passes",
        type=_passes,
        default="default",
        metavar="NAMES",
        help="how the graph is rewritten: default, none, or names with commas between them",
    )
    made.add_argument("--keep", type=_names, metavar="NAMES", help="of drop_unused: the variables that are asked for")
    made.add_argument(
        "--independent", type=_names, metavar="NAMES", help="of fork_independent: calls that need not see each other"
    )
    return made


def _given(text: str) -> tuple[str, Any]:  # Any: JSON
    return pair(text, "--given 'answer=\"yes\"'")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _passes(text: str) -> str | list[str]:
    """Reads names of passes. "default" and "none" are no names of passes, and stand alone."""
    names = _names(text)
    return names[0] if len(names) == 1 else names


def _draw_run(options: argparse.Namespace) -> int:
    """Draws the run of `--from`. Another option than `--svg` is refused: a run has no graph that holds for others."""
    others = ("source", "output", "keep", "independent")
    if options.svg is None or any(getattr(options, name) for name in (*others, "json", "dot", "static", "given")):
        raise ParameterError(
            f"--from draws a run, and takes --svg alone; write umbel compile --from {options.run} --svg FILE"
        )
    picture = recorded.svg(RunRecord.load(options.run).lines)
    options.svg.write_text(picture, encoding="utf-8")
    _say_written(options.svg)
    return 0


def _graph(options: argparse.Namespace) -> Graph:
    given = by_name("--given", options.given)
    static = by_name("--static", options.static)
    if options.source is None:
        raise ParameterError(
            "a program is missing; write umbel compile FILE.py:PROGRAM, or --from RUN.jsonl --svg FILE"
        )
    if given and (options.output is not None or options.json):
        raise ParameterError(
            "--given is for looking at a graph, which is wrong for other answers; write --show, --svg or --dot with it"
        )
    if options.source.endswith(_SUFFIX):
        if options.static or given:
            option = "--static" if options.static else "--given"
            raise ParameterError(f"{option} is for programs; a graph has its values inside")
        return serialise.read(options.source)
    path, colon, name = options.source.rpartition(":")
    if not colon or not name.isidentifier():
        path, name = options.source, None
    traced = trace(program_of(Path(path), name), static_args=static, given=given)
    if given:
        answers = ", ".join(f"{answer}={value!r}" for answer, value in given.items())
        print(f"umbel compile: the graph is what the program says for {answers} alone", file=sys.stderr)
    for effect in traced.effects:
        print(f"umbel compile: {effect} {_SAID[effect.kind]}", file=sys.stderr)
    return traced.graph


def _write(rewritten: passes.Rewritten, options: argparse.Namespace) -> None:
    graph = rewritten.graph
    if options.output is not None:
        graph.save(options.output)
        _say_written(options.output)
    if options.svg is not None:
        options.svg.write_text(graph.svg(), encoding="utf-8")
        _say_written(options.svg)
    if options.json:
        print(serialise.encode(graph).decode(), end="")
    elif options.dot:
        print(graph.dot(), end="")
    elif options.show or (options.output is None and options.svg is None):
        print(f"{graph.text()}\npasses\n{_indented(str(rewritten.report))}")


def _say_written(path: Path) -> None:
    print(f"umbel compile: wrote {path}", file=sys.stderr)  # standard output may be a graph


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
