"""Runs a program over data and measures each result: `umbel.evaluate`.

    data ─► Table ─► run_batch ─► finished state ─► variables ─► metric ─► EvaluatedRow ─► output, report
                     journal=      in the order of the rows      in the run of its program

Rows are numbered by the batch, so a journal finds its calls whichever rows an output has already. The metric is called
inside the run of its row: what it asks of a model is in the journal, too.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, cast

from ...lang import checks
from ...lang.errors import ParameterError, ResultError, shown
from ...lang.protocol import Backend
from ...lang.state import State
from ..batch import Failure, IfExists, Source, known_values, values_of
from ..data.output import EXISTING, ResultFile, refuse_one_file
from ..data.progress import BatchProgress
from ..data.rows import Row, Table, table_of
from ..run import chosen_backend
from .metrics import Matching, Metric, checked_metric, figures_of, name_of
from .report import EvaluationReport, measure_of
from .rows import (
    EvaluatedRow,
    measure_of_line,
    probabilities_of,
    row_of_line,
    seconds_of,
    simple,
    start_seconds_of,
    stream_of,
    values_of_line,
)
from .texts import counted

Program = Any  # of the interpreter or the compiler, which is not imported here: what has run_batch()
_MOST_ROWS = 1_000_000
_MOST_SEED = 2**63 - 1


def evaluate(
    program: Program,
    data: Source,
    metric: Metric,
    *,
    backend: Backend | None = None,
    journal: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    if_exists: IfExists = "error",
    seed: int = 0,
    error_score: float = 0.0,
    max_errors: int | None = None,
    progress: bool | Callable[[BatchProgress], object] = False,
    num_threads: int | Literal["auto"] = "auto",
    **options: Any,  # as of run_batch()
) -> EvaluationReport:
    """Runs a program over data, measures each result by a metric, and reports the figures with their intervals.

    Programs that fail count as wrong, and are listed by kind. A row whose metric raises counts for nothing, and is
    listed with the error. The report is about all other rows, too: neither stops the run.

    Args:
        program: a function with `@umbel.function`, or a compiled program.
        data: what `run_batch` takes: an iterable of dicts, a DataFrame, or the path of a .jsonl, .csv or .parquet file.
            Columns go to parameters by their names; the metric gets all of them.
        metric: a function of the finished state and of the row (a dict). It returns a bool, a number, of which more is
            better, or a dict of several figures. `umbel.exact_match` and `umbel.contains_match` make usual ones.
        backend: to run on, instead of the default one.
        journal: path of a file with finished calls: a run that was killed goes on without paying twice.
        output: path of a .jsonl file, into which each row is written with its figures as soon as it is measured.
        if_exists: "resume" takes the rows that an output of the same metric has already, and runs those that it lacks;
            "overwrite" begins anew; "error", the default, refuses.
        seed: of the resampling of intervals and tests; default: 0. That of the model goes to `sampling={"seed": 1}`.
        error_score: figure of a failed program where the metric gives numbers; default: 0. For bools it is False.
        max_errors: number of rows with an error, of program or metric, after which the run stops; None: it never does.
        progress: True shows a bar; a function gets the numbers, as of `run_batch`.
        num_threads: most programs at once; default: "auto".
        options: as of `run_batch`: temperature, budget, timeout, view ...

    Returns:
        The report: figures with intervals, cost, errors by kind, and all rows.

    Raises:
        ParameterError: wrong arguments, a column that is missing, data without rows, or an output of another metric.
        JournalError: the journal is damaged, in use, or of another program, version, model or arguments.
        Exception: that of the data itself, or of the row that exceeds `max_errors`; its attribute `report` is about the
            rows that were measured before.

    Examples:
        >>> @ul.function
        ... def capital(s, country):
        ...     s += f"The capital of {country} is" + ul.gen("city", max_tokens=4)
        >>> rows = [{"country": "France", "label": "Paris"}, {"country": "Italy", "label": "Rome"}]
        >>> model = ul.Echo({"France": " Paris", "Italy": " Milan"})
        >>> report = ul.evaluate(capital, rows, ul.exact_match("city", "label"), backend=model)
        >>> print(report)
        capital on the data: 2 rows, Echo
        exact_match  50.0%  (95%: 9.5% to 90.5%; Wilson; 2 rows)
        cost         2 calls, ...
        worst        row 1: city=' Milan', right is 'Rome',...
        ...
    """
    if not callable(getattr(program, "run_batch", None)) or isinstance(program, type):
        raise ParameterError(f"evaluate(program={shown(program)}); write a function with @umbel.function")
    checked_metric(metric)
    checks.integer("seed", seed, 0, _MOST_SEED)
    score = checks.number("error_score", error_score, -1e300, 1e300, "the figure of a failed program, such as 0")
    if max_errors is not None:
        checks.integer("max_errors", max_errors, 0, _MOST_ROWS, "the number of errors that are allowed, or None")
    for name in ("generator_style", "on_error", "stream", "verbose"):
        if name in options:
            raise ParameterError(f"evaluate() takes no {name}; it gives a report, and goes on after errors")
    table = _table(data)
    if output is not None and "evaluation" in table.columns:
        raise ParameterError(f"{table.name} has a column 'evaluation', which output= writes itself; rename it")
    if isinstance(metric, Matching) and table.total != 0:
        metric.check(table.columns, table.name)
    model = chosen_backend(backend)
    about = EvaluationReport(
        program=str(getattr(program, "name", "program")),
        data=table.name,
        metric=name_of(metric),
        model="",
        seed=seed,
        error_score=float(score),
        seconds=0.0,
        results=(),
        variable=metric.variable if isinstance(metric, Matching) else "",
        label=metric.label if isinstance(metric, Matching) else "",
        ignore_case=metric.ignore_case if isinstance(metric, Matching) else None,
    )
    refuse_one_file({"output": output, "journal": journal})
    file = _output(output, if_exists, table.path)
    try:
        rows = Evaluation(metric, table, file, max_errors, about, model)
        return rows.run(
            program, {**options, "backend": model, "journal": journal, "progress": progress, "num_threads": num_threads}
        )
    finally:
        if file is not None:
            file.close()


class Evaluation:
    """One call of `evaluate`.

    Args:
        metric: as of `evaluate`.
        table: the rows.
        file: the output, or None.
        max_errors: as of `evaluate`.
        about: the report before its rows.
        model: the backend.
    """

    def __init__(
        self,
        metric: Metric,
        table: Table,
        file: ResultFile | None,
        max_errors: int | None,
        about: EvaluationReport,
        model: Backend,
    ) -> None:
        self._metric = metric
        self._table = table
        self._file = file
        self._max_errors = max_errors
        self._about = about
        self._model = model
        self._pending: deque[tuple[int, Row]] = deque()  # started, in their order, in which results come
        self._rows: list[EvaluatedRow] = []
        self._errors = 0
        self._began = time.monotonic()
        self._start = 0.0  # seconds until the model had started

    def run(self, program: Program, options: Mapping[str, Any]) -> EvaluationReport:
        """Runs all rows. An error that ends it has the report of those that were measured before."""
        try:
            table = replace(self._table, skips=self._is_done)
            # Closed at once: an error keeps this frame, and with it programs that run and a journal that is locked.
            with closing(program.run_batch(table, generator_style=True, on_error="return", **options)) as outcomes:
                for outcome in outcomes:
                    self._take(outcome)
        except Exception as error:
            if self._rows:
                error.report = self._report()  # type: ignore[attr-defined]  # documented in evaluate
            raise
        if not self._rows:
            raise ParameterError(f"{self._table.name} has no rows; an evaluation needs at least one")
        return self._report()

    def _report(self) -> EvaluationReport:
        rows = tuple(sorted(self._rows, key=lambda row: row.row))
        seconds = max(0.0, time.monotonic() - self._began - self._start)
        return replace(self._about, model=self._model.capabilities.name, seconds=seconds, results=rows)

    def _is_done(self, index: int, inputs: Row) -> bool:
        """Takes a row that the output has. Any other one is expected from the batch."""
        if self._file is not None and self._file.has(index, inputs):
            line = self._file.line(index)
            row = None if line is None else row_of_line(line, inputs)
            if row is None:
                raise ParameterError(
                    f"{self._file.path} has row {index} of another kind of output; write if_exists='overwrite', or "
                    "another output="
                )
            self._check_measure(index, measure_of_line(line or {}))
            self._rows.append(row)
            return True
        self._pending.append((index, inputs))
        return False

    def _check_measure(self, index: int, before: Mapping[str, Any]) -> None:
        """Raises ParameterError where a row of the output has figures of another metric."""
        assert self._file is not None, "a row that is there is in an output"
        now = measure_of(self._about)
        for name in now:
            if name in before and before[name] != now[name]:
                raise ParameterError(
                    f"{self._file.path} has row {index} with figures of {name}={shown(before[name])}, and this "
                    f"evaluation has {name}={shown(now[name])}; give the metric of that run, write "
                    "if_exists='overwrite', or another output="
                )

    def _take(self, outcome: State | Failure) -> None:
        index, inputs = self._pending.popleft()
        state = outcome.state if isinstance(outcome, Failure) else outcome
        self._start = max(self._start, start_seconds_of(state))
        error: BaseException | None
        if isinstance(outcome, Failure):
            assert outcome.index == index, "results come in the order of the rows"
            row, error = self._failed(index, inputs, state, outcome.error), outcome.error
        else:
            row, error = self._measured(index, inputs, state)
        self._rows.append(row)
        if self._file is not None and error is None:
            self._file.write(index, inputs, values_of_line(row, measure_of(self._about)))
        elif self._file is not None and error is not None:
            self._file.fail(index, inputs, error, row.variables)
        if error is not None:
            self._count(error)

    def _measured(self, index: int, inputs: Row, state: State) -> tuple[EvaluatedRow, BaseException | None]:
        """Calls the metric. Returns the row, and the error of program or metric."""
        try:
            values = values_of(state)
        except ResultError as error:  # a text was cut off, so it is not the object that was asked for
            return self._failed(index, inputs, state, error), error
        figures, failed = {}, None
        try:
            with stream_of(state).run.inside():
                figures = figures_of(self._metric, state, dict(inputs))
        except Exception as error:
            failed = error
        row = EvaluatedRow(
            index,
            simple(inputs),
            simple(values),
            figures,
            metric_error="" if failed is None else type(failed).__name__,
            message="" if failed is None else _message(failed),
            seconds=seconds_of(state),
            cost=state.cost,
            probabilities=probabilities_of(state),
        )
        return row, failed

    def _failed(self, index: int, inputs: Row, state: State, error: BaseException) -> EvaluatedRow:
        return EvaluatedRow(
            index,
            simple(inputs),
            simple(known_values(state)),
            error=type(error).__name__,
            message=_message(error),
            seconds=seconds_of(state),
            cost=state.cost_so_far,
        )

    def _count(self, error: BaseException) -> None:
        self._errors += 1
        if self._max_errors is not None and self._errors > self._max_errors:
            total = "" if self._table.total is None else f" of {self._table.total}"
            error.add_note(
                f"evaluate() stopped: {counted(self._errors, 'error')} of rows, and max_errors={self._max_errors}; "
                f"error.report is about the {len(self._rows)}{total} rows that had run"
            )
            raise error


def _message(error: BaseException) -> str:
    """Returns the message of an error with its notes."""
    return "; ".join([str(error), *getattr(error, "__notes__", ())])


def _output(path: str | os.PathLike[str] | None, existing: str, source: str) -> ResultFile | None:
    checks.one_of("if_exists", existing, EXISTING)
    if path is None:
        return None
    found = checks.path("output", path)
    if not found.endswith(".jsonl"):
        raise ParameterError(
            f"evaluate(output={shown(found)}); write a path that ends in .jsonl; report.to_pandas().to_parquet(PATH) "
            "writes Parquet"
        )
    return ResultFile(found, existing, None, source)


# -------------------------------------------------------------------------------- the data


def _table(data: Source) -> Table:
    """Returns the rows of the data. An iterable of dicts becomes a table, whose further columns are carried along."""
    table = table_of(data, "evaluate(data)")
    if table is not None:
        return table
    if isinstance(data, bytes | Mapping) or not isinstance(data, Iterable):
        raise ParameterError(
            f"evaluate(data) takes an iterable of dicts, a frame, or the path of a file; got {type(data).__name__} "
            f"{shown(data)}"
        )
    total = checks.length("evaluate(data)", data, "a list of dicts")
    rows: Iterator[Row]
    if total is None:
        begun = checks.begun("evaluate(data)", data, "a list of dicts")
        rows = (_checked_row(index, row) for index, row in enumerate(begun))
    else:
        known = checks.members("evaluate(data)", data, _MOST_ROWS, "a list of dicts")
        checked = [_checked_row(index, row) for index, row in enumerate(known)]
        return Table("the data", tuple(dict.fromkeys(chain.from_iterable(checked))), total, iter(checked))
    first = next(rows, None)
    if first is None:
        return Table("the data", (), 0, rows)
    return Table("the data", tuple(first), total, chain([first], rows))


def _checked_row(index: int, row: object) -> Row:
    if isinstance(row, Mapping):
        return cast(Row, dict(row))
    raise ParameterError(
        f"evaluate(data): row {index} is {shown(row)}; write a dict, such as {{'question': ..., 'label': ...}}: the "
        "metric finds its columns by name"
    )
