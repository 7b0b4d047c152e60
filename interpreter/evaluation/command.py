"""`umbel eval FILE.py:PROGRAM DATA`: evaluates a program from the command line, compares it with an earlier report."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ...lang import checks
from ...lang.errors import ParameterError, shown
from ..backends.runtime import Runtime
from ..data.rows import Table, listed, table_of
from ..terminal.run_file import is_program, named_in_file
from .calibration import MOST_BINS, PICTURES, Calibration
from .comparison import Comparison, compare
from .evaluate import evaluate
from .metrics import Metric, contains_match, exact_match
from .report import EvaluationReport

_BINS = 10  # of a calibration
_ABOUT = (
    "Runs a program over the rows of a file, measures each result, and prints figures with their intervals, the cost, "
    "errors by kind, and the worst rows."
)


def main(arguments: Sequence[str]) -> int:
    """Runs the command. Returns the exit code: 0, or 1 where the figure is below --at-least or no row was measured.

    Raises:
        ParameterError: the program, the metric or the data cannot be used.
        Exception: that of the row that exceeds --max-errors, after the report of the rows before it.
    """
    options = parser().parse_args(list(arguments))
    table = _checked(options)
    earlier = None if options.compare is None else EvaluationReport.load(options.compare)
    files: dict[str, dict[str, Any]] = {}
    program = named_in_file(options.program, "program", is_program, "eval", files)
    metric = _metric(options, files)
    try:
        report = evaluate(
            program,
            table,
            metric,
            backend=_backend(options, files),
            journal=options.journal,
            output=options.output,
            if_exists=options.if_exists,
            seed=options.seed,
            max_errors=options.max_errors,
            progress=options.progress and sys.stderr.isatty(),
            **({} if options.temperature is None else {"temperature": options.temperature}),
        )
    except Exception as error:
        if isinstance(stopped := getattr(error, "report", None), EvaluationReport):
            print(stopped, flush=True)
        raise
    try:
        _print(report, earlier, options)
    finally:  # a comparison that is refused loses no report
        if options.save is not None:
            report.save(options.save)
    if not report.figure.count:
        print("umbel eval: no row was measured", file=sys.stderr)
        return 1
    if options.at_least is not None and not report.mean >= options.at_least:
        print(f"umbel eval: {report.figure.name} is {report.mean:.4g}, below {options.at_least:.4g}", file=sys.stderr)
        return 1
    return 0


def _checked(options: argparse.Namespace) -> Table:
    """Returns the rows. Raises ParameterError for what would be refused after the run, which may have been paid for."""
    for option, given in (("--plot", options.plot), ("--bins", options.bins)):
        if given is not None and options.calibration is None:
            raise ParameterError(f"{option} is of the calibration; write --calibration VARIABLE=COLUMN, too")
    if options.bins is not None:
        checks.integer("--bins", options.bins, 1, MOST_BINS)
    if options.plot is not None and not options.plot.lower().endswith(PICTURES):
        raise ParameterError(f"--plot {shown(options.plot)}; write a path that ends in {', '.join(PICTURES)}")
    for option, path in (("--save", options.save), ("--plot", options.plot)):
        if path is not None:
            checks.output(option, path)
    if options.output is not None and options.if_exists == "error" and os.path.isfile(options.output):
        raise ParameterError(
            f"--output {shown(options.output)} exists; write --if-exists resume to go on with it, --if-exists "
            "overwrite, or another path"
        )
    columns = {"--exact": options.exact, "--contains": options.contains, "--calibration": options.calibration}
    table = table_of(options.data, "DATA")
    assert table is not None, "a path is a file of rows"
    for option, given in columns.items():
        if given is None or table.total == 0:
            continue
        variable, column = _pair(option, given)
        if column not in table.columns:
            raise ParameterError(
                f"{option} {given}: {table.name} has no column {column!r}; it has {listed(table.columns)}. Write "
                f"{option} {variable}=COLUMN with the column of right values"
            )
    return table


def _print(report: EvaluationReport, earlier: EvaluationReport | None, options: argparse.Namespace) -> None:
    """Prints the report, whether or not what comes after it is refused."""
    if not options.json:
        print(report, flush=True)
    found: dict[str, Any] = {"report": report.to_dict()}
    try:
        for name, part in _further(report, earlier, options):
            found[name] = part.to_dict()
            if not options.json:
                print(f"\n{part}", flush=True)
    finally:
        if options.json:
            print(json.dumps(found), flush=True)


def _further(
    report: EvaluationReport, earlier: EvaluationReport | None, options: argparse.Namespace
) -> Iterator[tuple[str, Calibration | Comparison]]:
    if options.calibration is not None:
        calibration = report.calibration(
            *_pair("--calibration", options.calibration), bins=_BINS if options.bins is None else options.bins
        )
        yield "calibration", calibration
        if options.plot is not None:  # after it is printed, as the picture may be refused
            calibration.plot(options.plot)
    if earlier is not None:
        yield "comparison", compare(earlier, report)


def _metric(options: argparse.Namespace, files: dict[str, dict[str, Any]]) -> Metric:
    given = [value for value in (options.metric, options.exact, options.contains) if value is not None]
    if len(given) != 1:
        raise ParameterError("write one of --metric FILE.py:NAME, --exact VARIABLE=COLUMN, --contains VARIABLE=COLUMN")
    if options.metric is not None:
        found: Metric = named_in_file(options.metric, "metric", callable, "eval", files)
        return found
    if options.exact is not None:
        return exact_match(*_pair("--exact", options.exact), ignore_case=options.ignore_case)
    return contains_match(*_pair("--contains", options.contains), ignore_case=options.ignore_case)


def _backend(options: argparse.Namespace, files: dict[str, dict[str, Any]]) -> Any:  # Any: whatever the file has
    """Returns the backend that is named; None is that of the file, or the default model."""
    if options.model is not None and options.backend is not None:
        raise ParameterError("--model and --backend both name what the program runs on; write one of them")
    if options.model is not None:
        return Runtime(options.model)
    if options.backend is None:
        return None
    return named_in_file(options.backend, "backend", lambda found: not isinstance(found, type), "eval", files)


def _pair(option: str, given: str) -> tuple[str, str]:
    variable, equals, column = given.partition("=")
    if not equals or not variable or not column:
        raise ParameterError(f"{option} {shown(given)}; write VARIABLE=COLUMN, such as {option} answer=label")
    return variable, column


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(prog="umbel eval", description=_ABOUT)
    made.add_argument("program", metavar="FILE.py:PROGRAM", help="a Python file and the name of a program in it")
    made.add_argument("data", metavar="DATA", help="a .jsonl, .csv or .parquet file; its columns are the arguments")
    metrics = made.add_argument_group("metric, one of")
    metrics.add_argument("--metric", metavar="FILE.py:NAME", help="a function of state and row: a bool or a number")
    metrics.add_argument("--exact", metavar="VARIABLE=COLUMN", help="the variable is the value of the column")
    metrics.add_argument("--contains", metavar="VARIABLE=COLUMN", help="the text of the column stands in the variable")
    metrics.add_argument("--ignore-case", action="store_true", help="for --exact and --contains")
    running = made.add_argument_group("running")
    running.add_argument(
        "--model",
        help="a name (org/repo, ollama:NAME), a folder or a GGUF file; default: --backend, else that of the file, "
        "else Gemma 3 270M",
    )
    running.add_argument("--backend", metavar="FILE.py:NAME", help="a backend that a Python file makes")
    running.add_argument("--temperature", type=float, help="of the programs' calls; default: theirs")
    running.add_argument("--journal", metavar="FILE", help="finished calls: a run that was killed pays nothing twice")
    running.add_argument("--output", metavar="FILE.jsonl", help="write each row with its figures as it comes")
    running.add_argument(
        "--if-exists", choices=("error", "resume", "overwrite"), default="error", help="for --output; default: error"
    )
    running.add_argument("--max-errors", type=int, metavar="N", help="stop after more rows with errors")
    running.add_argument("--seed", type=int, default=0, help="of intervals and tests; default: 0")
    running.add_argument("--no-progress", dest="progress", action="store_false", help="show no bar")
    reports = made.add_argument_group("reports")
    reports.add_argument("--save", metavar="REPORT.json", help="write the report, for --compare")
    reports.add_argument("--compare", metavar="REPORT.json", help="compare with an earlier report of the same data")
    reports.add_argument("--calibration", metavar="VARIABLE=COLUMN", help="of a select: confidence next to accuracy")
    reports.add_argument("--bins", type=int, help=f"of the calibration; default: {_BINS}")
    reports.add_argument("--plot", metavar="FILE", help="draw the calibration as .svg, .png or .pdf")
    reports.add_argument("--json", action="store_true", help="print one JSON object")
    reports.add_argument("--at-least", type=float, metavar="X", help="exit code 1 where the figure is below, for CI")
    return made
