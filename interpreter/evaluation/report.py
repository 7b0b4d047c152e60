"""The report of an evaluation: figures with intervals, cost, errors by kind, worst and slowest rows.

All figures are computed from the rows when they are read, so a report that was saved and loaded says the same.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Self, cast

import msgspec

from ...lang import __version__, checks
from ...lang.errors import ParameterError, shown
from ...lang.ops import MAX_NAME_LENGTH
from ...lang.protocol import Cost
from ..data.frames import Framed
from .intervals import interval_of, is_proportion
from .rows import EvaluatedRow, simple
from .texts import Field, Printed, counted, listed_rows, number

if TYPE_CHECKING:
    from .calibration import Calibration
    from .comparison import Comparison

_FORMAT = 1
_SHOWN = 5  # worst and slowest rows


class EvaluationFigure(msgspec.Struct, frozen=True):
    """One figure of an evaluation.

    Attributes:
        name: of the metric, or of the figure in its dict.
        mean: over the rows; NaN without any.
        low, high: its confidence interval of 95%.
        method: of the interval: Wilson's for shares, bootstrap for means.
        count: rows that have the figure; failed programs count, rows whose metric raised do not.
        is_share: every value is 0 or 1, True or False: the mean is a share.
    """

    name: str
    mean: float
    low: float
    high: float
    method: str
    count: int
    is_share: bool

    def __str__(self) -> str:
        if not self.count:
            return "not measured: no row has it"
        spread = f"{number(self.low, is_share=self.is_share)} to {number(self.high, is_share=self.is_share)}"
        return (
            f"{number(self.mean, is_share=self.is_share)}  (95%: {spread}; {self.method}; {counted(self.count, 'row')})"
        )


@dataclass(frozen=True)
class EvaluationReport(Framed, Printed):
    """Holds the rows of an evaluation and computes its figures; made by `evaluate` and by `EvaluationReport.load`.

    `print(report)` shows it; it can be saved, loaded, compared and made a frame.

    Args:
        program: name of the program.
        data: path of the data, or what kind it was.
        metric: name of the metric.
        model: name of the backend.
        seed: of intervals and tests.
        error_score: figure of a failed program where the metric gives numbers.
        seconds: that the evaluation took, by the clock on the wall, without the start of the model.
        results: the rows, in the order of the data.
        variable: that the metric compares; "" for a metric of another kind than `umbel.exact_match`.
        label: the column that it compares the variable with, or "".
        ignore_case: whether it ignores case; None for a metric of another kind, and where a saved report lacks it.

    Examples:
        >>> @ul.function
        ... def capital(s, country):
        ...     s += f"The capital of {country} is" + ul.gen("city", max_tokens=4)
        >>> rows = [{"country": "France", "label": "Paris"}, {"country": "Italy", "label": "Rome"}]
        >>> model = ul.Echo({"France": " Paris", "Italy": " Milan"})
        >>> report = ul.evaluate(capital, rows, ul.exact_match("city", "label"), backend=model)
        >>> report.accuracy, report.errors, report.cost.usage.calls
        (0.5, {}, 2)
        >>> report.worst(1)[0].variables, report.worst(1)[0].inputs
        ({'city': ' Milan'}, {'country': 'Italy', 'label': 'Rome'})
        >>> ul.EvaluationReport.load(report.save("first.json")).accuracy
        0.5
    """

    program: str
    data: str
    metric: str
    model: str
    seed: int
    error_score: float
    seconds: float
    results: tuple[EvaluatedRow, ...]
    variable: str = ""
    label: str = ""
    ignore_case: bool | None = None

    # -------------------------------------------------------------------------------- figures

    @cached_property
    def figures(self) -> dict[str, EvaluationFigure]:
        """The figures by name, in the order in which the metric gave them."""
        return {name: self._figure(name) for name in self._names}

    @cached_property
    def _names(self) -> tuple[str, ...]:
        names = dict.fromkeys(name for row in self.results for name in row.figures)
        return tuple(names) or (self.metric,)

    @property
    def figure(self) -> EvaluationFigure:
        """The first figure; of most metrics the only one."""
        return next(iter(self.figures.values()))

    @property
    def mean(self) -> float:
        """The mean of the first figure; of a metric that gives bools the accuracy."""
        return self.figure.mean

    @property
    def accuracy(self) -> float:
        """The share of right rows, 0 to 1.

        Raises:
            ParameterError: the metric gives numbers other than 0 and 1.
        """
        if not self.figure.is_share:
            raise ParameterError(f"{self.figure.name} gives numbers, and no share of right rows; read report.mean")
        return self.figure.mean

    def values(self, name: str) -> dict[int, float]:
        """Returns the values of a figure by the number of the row. A failed program has 0, or `error_score` where the
        metric gives numbers, or where it is not known what it gives, as all programs failed.

        Args:
            name: of the figure.

        Raises:
            ParameterError: there is no figure of this name.
        """
        name = checks.one_of("name", name, self._names)
        known = [row.figures[name] for row in self.results if name in row.figures]
        gives_bools = all(isinstance(value, bool) for value in known) if known else bool(self.variable)
        failed = 0.0 if gives_bools else self.error_score
        found = {}
        for row in self.results:
            if row.error:
                found[row.row] = failed
            elif name in row.figures:
                found[row.row] = float(row.figures[name])
        return found

    def _figure(self, name: str) -> EvaluationFigure:
        values = list(self.values(name).values())
        if not values:
            return EvaluationFigure(name, float("nan"), 0.0, 0.0, "none", 0, True)
        interval = interval_of(values, self.seed)
        share = is_proportion(values)
        return EvaluationFigure(name, fmean(values), interval.low, interval.high, interval.method, len(values), share)

    # -------------------------------------------------------------------------------- costs, errors, rows

    @cached_property
    def cost(self) -> Cost:
        """The cost of all programs. Calls that a journal had are in `cost.read`; a metric's own calls are not in it."""
        return sum((row.cost for row in self.results), Cost())

    @property
    def cached_share(self) -> float:
        """Part of the prompt tokens that was cached, 0 to 1."""
        usage = self.cost.usage
        return usage.cached_tokens / usage.prompt_tokens if usage.prompt_tokens else 0.0

    @property
    def errors(self) -> dict[str, int]:
        """Failed programs by the class of their error, the most frequent first."""
        return dict(Counter(row.error for row in self.results if row.error).most_common())

    @property
    def failed(self) -> list[EvaluatedRow]:
        """The rows whose program failed. They count as wrong."""
        return [row for row in self.results if row.error]

    @property
    def unmeasured(self) -> list[EvaluatedRow]:
        """The rows whose metric raised. They count for nothing."""
        return [row for row in self.results if row.metric_error]

    def worst(self, count: int = _SHOWN, name: str | None = None) -> list[EvaluatedRow]:
        """Returns the rows with the lowest values of a figure, without those whose program failed. Of rows that are
        equally wrong, those come first whose choice was the most probable: of the variable that the metric compares, or
        of any, where it names none.

        Args:
            count: number of rows, at most; default: 5.
            name: of the figure; default: the first.
        """
        figure = self.figure.name if name is None else name
        values = self.values(figure)
        best = max(values.values(), default=0.0)
        rows = [row for row in self.results if figure in row.figures and values[row.row] < best]
        order = sorted(rows, key=lambda row: (values[row.row], -_certainty(row, self.variable), row.row))
        return order[: _checked_count(count)]

    def slowest(self, count: int = _SHOWN) -> list[EvaluatedRow]:
        """Returns the rows whose programs took longest. Programs that run at the same time wait for each other.

        Args:
            count: number of rows, at most; default: 5.
        """
        timed = [row for row in self.results if row.seconds is not None]
        return sorted(timed, key=lambda row: -(row.seconds or 0.0))[: _checked_count(count)]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields each row as a dict: `row`, the input, the variables, the figures, `error`, `seconds`, tokens."""
        return (row.flat() for row in self.results)

    # -------------------------------------------------------------------------------- other reports

    def compare(self, other: "EvaluationReport") -> "Comparison":
        """Compares this report with a later one of the same data; see `umbel.compare`.

        Args:
            other: the later report.
        """
        from .comparison import compare

        return compare(self, other)

    def calibration(
        self, variable: str | None = None, label: str | None = None, *, bins: int = 10, equal_counts: bool = False
    ) -> "Calibration":
        """Compares the probabilities of a select with how often it is right.

            print(report.calibration("answer", "label"))

        Args:
            variable: the variable of the select; default: that of the metric `umbel.exact_match`.
            label: the column with the right choice, compared as `umbel.exact_match` does, without case if the metric
                ignores it; default: that of the metric.
            bins: number of bins of confidence, 1 to 100; default: 10.
            equal_counts: bins of as many rows each, in place of bins of equal width; default: False.

        Raises:
            ParameterError: no row has the probabilities, or the column, or a label that is one of the choices; or the
                metric names no variable, and none is given.
        """
        from .calibration import calibration

        given = {
            "variable": self.variable if variable is None else variable,
            "label": self.label if label is None else label,
        }
        advice = 'a name: calibration("answer", "label"), the variable of a select and the column of right choices'
        names = [checks.text(f"calibration({name})", value, MAX_NAME_LENGTH, advice) for name, value in given.items()]
        return calibration(self, names[0], names[1], bins=bins, equal_counts=equal_counts)

    # -------------------------------------------------------------------------------- files

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON has it: its figures, cost and errors, and all rows."""
        about: dict[str, Any] = {"format": _FORMAT, "umbel": __version__}
        for name in ("program", "data", "metric", "model", "seed", "error_score", "seconds"):
            about[name] = getattr(self, name)
        about |= measure_of(self)
        about["figures"] = self.figures
        about["errors"] = self.errors
        about["cost"] = self.cost
        about["cached_share"] = self.cached_share
        about["results"] = self.results
        return cast(dict[str, Any], simple(about))

    def save(self, path: str | os.PathLike[str]) -> str:
        """Writes the report, with its rows, as JSON, and returns the path. A file that is there is replaced.

        Args:
            path: of the file.

        Raises:
            ParameterError: the file cannot be written.
        """
        found = checks.path("path", path)
        temporary = f"{found}.tmp"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(self.to_dict(), file, ensure_ascii=True, indent=1)
                file.write("\n")
            os.replace(temporary, found)
        except OSError as error:
            raise ParameterError(f"{found} cannot be written: {error.strerror}; write another path") from None
        return found

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a report that `save` wrote.

        Args:
            path: of the file.

        Raises:
            ParameterError: there is no such file, or it is no report.
        """
        found = checks.path("path", path)
        try:
            with open(found, encoding="utf-8") as file:
                given = json.load(file)
        except OSError as error:
            raise ParameterError(f"{found} cannot be read: {error.strerror}; write the path of a report") from None
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict) or "results" not in given:
            raise ParameterError(f"{found} is no report; write the path of a file that report.save(PATH) wrote")
        if given.get("format") != _FORMAT:
            raise ParameterError(
                f"{found} is a report of format {shown(given.get('format'))}, and this umbel reads {_FORMAT}; evaluate "
                "again with this version"
            )
        try:
            return msgspec.convert({name: given[name] for name in cls.__dataclass_fields__ if name in given}, cls)
        except msgspec.ValidationError as error:
            raise ParameterError(f"{found} is no whole report ({error}); evaluate again") from None

    # -------------------------------------------------------------------------------- showing

    def _title(self) -> str:
        return f"{self.program} on {os.path.basename(self.data)}: {counted(len(self.results), 'row')}, {self.model}"

    def _fields(self) -> Iterator[Field]:
        yield from ((name, str(figure)) for name, figure in self.figures.items())
        if self.failed:
            kinds = ", ".join(f"{kind} {count}" for kind, count in self.errors.items())
            yield "failed", f"{counted(len(self.failed), 'program')}, counted as wrong: {kinds}"
            yield from (("failed", row.described(self.label)) for row in self.failed[:_SHOWN])
        if self.unmeasured:
            numbers = listed_rows(row.row for row in self.unmeasured)
            count = counted(len(self.unmeasured), "row")
            yield "not measured", f"{count}, counted for nothing, as the metric gave no figure: {numbers}"
            yield from (("not measured", row.described(self.label)) for row in self.unmeasured[:_SHOWN])
        yield "cost", self._cost()
        yield "time", self._time()
        yield from (("worst", row.described(self.label)) for row in self.worst())
        yield from (("slowest", f"{row.seconds:.2f} s, {row.described(self.label)}") for row in self.slowest(3))

    def _cost(self) -> str:
        usage, dollars = self.cost.usage, self.cost.dollars
        facts = [counted(usage.calls, "call") if usage.calls or not self.cost.read.calls else "no call made"]
        if usage.calls:
            facts.append(f"{usage.prompt_tokens:,} tokens in ({self.cached_share:.0%} cached)")
            facts.append(f"{usage.completion_tokens:,} out")
        if dollars is None:
            facts.append("price not known")
        elif dollars:
            facts.append(f"${dollars:.2f}" if dollars >= 1 else f"${dollars:.4f}")
        if (read := self.cost.read).calls:
            facts.append(f"{counted(read.calls, 'call')} of {read.total_tokens:,} tokens read from the journal")
        return ", ".join(facts)

    def _time(self) -> str:
        found = [row.seconds for row in self.results if row.seconds is not None]
        each = f"; a program {median(found):.2f} s in the median, next to others" if found else ""
        return f"{self.seconds:.1f} s in all{each}"


def measure_of(report: EvaluationReport) -> dict[str, Any]:
    """Returns what decides whether a row is right: the metric, and what it compares."""
    return {name: getattr(report, name) for name in ("metric", "variable", "label", "ignore_case")}


def _certainty(row: EvaluatedRow, variable: str) -> float:
    """Returns the probability of the most certain choice of a variable, or 0 without one; "": of all variables."""
    known = [shares for name, shares in row.probabilities.items() if variable in ("", name)]
    return max((max(shares.values()) for shares in known), default=0.0)


def _checked_count(count: object) -> int:
    return checks.integer("count", count, 0, 1_000_000, "the number of rows")
