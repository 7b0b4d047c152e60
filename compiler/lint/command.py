"""The command `umbel lint`: prints text that prevents prefix sharing, and what to move or write instead.

The file runs, as an import of it would. A program that looks at its values cannot be traced. Its graph is then
*sketched* from its source: the beginning of the program, up to the first call or to where it depends on a value.
Whatever it does later, this much it says first.
"""

import argparse
import ast
import inspect
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...interpreter.program import Program
from ...lang.errors import MAX_MESSAGE, ParameterError, UmbelError, shortened, shown
from ...lang.generation import gen
from ...lang.ops import Gen, RoleBegin, RoleEnd
from ...lang.prompt import shown_name
from ..graph import Builder, Graph, Line, Node, Parameter
from ..operations import Append, Argument, Begin, Constant, Generate
from ..script import add_static, by_name, names_of
from ..tracing.effects import TraceWarning
from ..tracing.trace import Trace, trace
from .linter import Subject, findings_of
from .pieces import Counter, default_counter
from .rules import Finding
from .source import Run, Scope, Source, SourceFile, SourceProgram, Stop, Turn, volatile_call

Note = tuple[int, str]  # a line, and why the program there was looked at by its source alone


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit status: 0 without findings, 1 with.

    Raises:
        UmbelError: the file cannot be looked at.
    """
    options = parser().parse_args(arguments)
    path, _, name = _split(options.file)
    subjects, notes = load(Path(path), name or None, by_name("--static", options.static))
    for line, note in notes:
        print(f"umbel lint: {path}:{line}: only the source was looked at: {note}", file=sys.stderr)
    counter = default_counter()
    found = [finding for subject in subjects for finding in findings_of(subject, counter, shared=options.shared)]
    found.sort(key=lambda finding: (finding.line, finding.rule))
    if subjects:
        _print(found, subjects[0].file, counter, options)
    if not options.json:
        print(f"umbel lint: {path}: {_counted(found, len(subjects))}")
    return 1 if found else 0


def _counted(found: list[Finding], programs: int) -> str:
    findings = "no findings" if not found else "1 finding" if len(found) == 1 else f"{len(found)} findings"
    if not programs:
        return "no programs; write a function of the language, with @function"
    return f"{findings} in {programs} program{'' if programs == 1 else 's'}"


def _split(given: str) -> tuple[str, str, str]:
    """`FILE.py:program`; a colon elsewhere is part of the path."""
    path, colon, name = given.rpartition(":")
    return (path, colon, name) if colon and name.isidentifier() else (given, "", "")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="umbel lint",
        description="Say what keeps prompts from sharing their beginnings, what it costs, and what to write instead. "
        "The file runs as an import of it would; no model is asked. Exit status 1 with findings, 0 without. "
        "A comment '# umbel: noqa[rule]' on the line silences a finding.",
    )
    made.add_argument("file", metavar="FILE.py[:program]", help="a Python file with programs, or one of them")
    made.add_argument(
        "--shared", action="append", default=[], metavar="NAME", help="an argument that many runs have in common"
    )
    add_static(made)
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def _print(found: list[Finding], file: SourceFile, counter: Counter, options: argparse.Namespace) -> None:
    if options.json:
        print(_json(found, file, counter))
    else:
        for finding in found:
            print(_text(finding, file, counter))


def _text(finding: Finding, file: SourceFile, counter: Counter) -> str:
    lines = [f"{file.path}:{finding.line}: {finding.rule}: {finding.program}: {finding.what}", f"    {finding.why}"]
    gain = finding.gain
    if gain.first or gain.total:
        lines.append(
            f"    gain: at most {gain.first} tokens of the first call's prompt, {gain.total} of all calls', "
            f"by {counter.name}"
        )
    return "\n".join([*lines, ""])


def _json(found: list[Finding], file: SourceFile, counter: Counter) -> str:
    listed = [
        {
            "rule": finding.rule,
            "file": shown_name(str(file.path)),
            "line": finding.line,
            "program": finding.program,
            "what": finding.what,
            "why": finding.why,
            "gain": {"first_call": finding.gain.first, "all_calls": finding.gain.total},
        }
        for finding in found
    ]
    return msgspec.json.format(msgspec.json.encode({"counted_by": counter.name, "findings": listed})).decode()


def load(
    path: Path, name: str | None = None, static_args: Mapping[str, Any] | None = None
) -> tuple[list[Subject], list[Note]]:
    """Loads the programs of a file, or the one called `name`.

    Args:
        static_args: given to the programs that have such parameters.

    Raises:
        ParameterError: there is no such file or program, or the file is no Python.
        ParameterError, UmbelError: the file fails when it runs; the message, or a note, has its line.
    """
    try:
        file = SourceFile.read(path)
    except OSError as error:
        raise ParameterError(
            f"{shown(str(path))}: {error.strerror}; write the path of a Python file with programs"
        ) from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # no Python, or no name of a file
        raise ParameterError(f"{shown(str(path))} is no Python file: {error}") from error
    wanted = [program for program in file.programs if name is None or program.function.name == name]
    if name is not None and not wanted:
        known = ", ".join(program.function.name for program in file.programs) or "none"
        raise ParameterError(f"{path} has no program {name!r}; its programs are {known}")
    made = _programs(path)
    subjects, notes = [], []
    for program in wanted:
        traced, refusal = _traced(made, program, static_args or {})
        if refusal:
            notes.append((program.function.lineno, f"{program.function.name}: {refusal}"))
        lines = {effect.line.number for effect in traced.effects if effect.kind == "volatile"} if traced else set()
        subjects.append(Subject(file, program, traced.graph if traced else sketch(file, program), lines))
    return subjects, notes


def _programs(path: Path) -> dict[int, Program]:
    """Returns the programs that the file's names stand for, by the first line of their functions."""
    found = {}
    for value in names_of(path).values():
        if isinstance(value, Program):
            code = inspect.unwrap(value).__code__
            if Path(code.co_filename) == path:
                found[code.co_firstlineno] = value
    return found


def _traced(
    made: Mapping[int, Program], source: SourceProgram, static_args: Mapping[str, Any]
) -> tuple[Trace | None, str]:
    """Returns the trace, or why there is none."""
    function = source.function
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    program = made.get(first)
    if program is None:
        return None, "no name of the module stands for it"
    parameters = {each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)}
    given = {name: value for name, value in static_args.items() if name in parameters}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TraceWarning)  # the linter says it itself
            return trace(program, static_args=given), ""
    except UmbelError as error:
        return None, str(error)
    except SystemExit as error:
        return None, f"the program ends Python, by {shown(error)}"
    except Exception as error:
        notes = getattr(error, "__notes__", ())
        if not notes:  # with one it is the program's own, and the note has the line
            raise
        return None, "; ".join([shortened(f"{type(error).__name__}: {error}", MAX_MESSAGE), *notes])


def sketch(file: SourceFile, program: SourceProgram) -> Graph:
    """Sketches a graph whose one call stands for all that is not known. Values that come from parameters are arguments,
    by their first parameter's name; the graph ends where something else is said."""
    builder = Builder()
    node = builder.node(Begin(program.function.name))
    names = parameter_names(program)
    role = ""
    for said in program.said:
        match said:
            case Run():
                extended = _extended(builder, node, said, program.scope, names, file)
                if extended is None:
                    break
                node = extended
            case Turn(role):
                node = builder.node(RoleBegin(role), (node,))
            case Stop.TURN_ENDS:
                node = builder.node(RoleEnd(role), (node,))
            case _:
                break
    call = gen("rest")
    assert isinstance(call, Gen), "gen() without reasoning is one operation"
    end = builder.node(Generate(call), (node,))
    parameters = [Parameter(name) for name in names]
    return builder.graph(program.function.name, parameters, [end], [], builder.node(Constant(None)))


def parameter_names(program: SourceProgram) -> list[str]:
    """Returns the names of parameters, without the state and `self`."""
    arguments = program.function.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    return [*names[2 if names[:1] == ["self"] else 1 :], *(each.arg for each in arguments.kwonlyargs)]


def _extended(builder: Builder, node: Node, run: Run, scope: Scope, names: list[str], file: SourceFile) -> Node | None:
    for source in run.sources:
        value = _value(builder, source, scope, names)
        if value is None:
            return None
        line = Line(str(file.path), source.statement.lineno)
        node = builder.node(Append(), (node, value), line)
    return node


def _value(builder: Builder, source: Source, scope: Scope, names: list[str]) -> Node | None:
    text = source.text if source.text is not None else scope.constant(source.expression)
    if text is not None:
        return builder.node(Constant(text))
    if volatile_call(source.expression, scope) is not None:
        return builder.node(Constant(ast.unparse(source.expression)))  # told apart by its origin
    for part, _ in scope.flowing(source.expression):
        if isinstance(part, ast.Name) and part.id in names:
            return builder.node(Argument(part.id))
    return None


if __name__ == "__main__":
    sys.exit(main())
