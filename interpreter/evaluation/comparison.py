"""Compares two evaluations of the same data, row by row: `umbel.compare`.

Every row is its own control: what matters are the rows that changed, and the tests are those of pairs.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any, cast

import msgspec

from ...lang.errors import ParameterError, shown
from ..data.rows import listed
from .intervals import interval_of_differences, is_proportion, paired_test
from .report import EvaluationReport, measure_of
from .rows import EvaluatedRow, short, simple
from .texts import Field, Printed, counted, listed_rows, number, signed

_SHOWN = 3  # rows that changed, in each direction


class Difference(msgspec.Struct, frozen=True):
    """The difference of one figure between two evaluations, over the rows that both have measured.

    Attributes:
        name: of the figure.
        first, second: the means.
        difference: second less first.
        low, high: its confidence interval of 95%.
        method: of the interval.
        p_value: probability of a difference at least as large if both were equal; two-sided.
        test: the exact McNemar test for shares, a permutation test for numbers.
        count: rows that were compared.
        better, worse: numbers of the rows that changed, the largest change first.
        is_share: every value is 0 or 1.
    """

    name: str
    first: float
    second: float
    difference: float
    low: float
    high: float
    method: str
    p_value: float
    test: str
    count: int
    better: tuple[int, ...]
    worse: tuple[int, ...]
    is_share: bool

    def __str__(self) -> str:
        share = self.is_share
        low, high = signed(self.low, is_share=share), signed(self.high, is_share=share)
        return (
            f"{number(self.first, is_share=share)} → {number(self.second, is_share=share)}: "
            f"{signed(self.difference, is_share=share)}  (95%: {low.removesuffix(' points')} to {high}; {self.method}; "
            f"p = {self.p_value:.3g}, {self.test}; {counted(self.count, 'row')})"
        )


@dataclass(frozen=True, slots=True)
class Comparison(Printed):
    """Holds the differences between two evaluations of the same data; made by `compare`. `print` shows it.

    Args:
        first: the earlier report.
        second: the other one.
        differences: of the figures that both have, by name.

    Examples:
        >>> @ul.function
        ... def capital(s, country):
        ...     s += f"The capital of {country} is" + ul.gen("city", max_tokens=4)
        >>> rows = [{"country": "France", "label": "Paris"}, {"country": "Italy", "label": "Rome"}]
        >>> metric = ul.exact_match("city", "label")
        >>> small = ul.Echo({"France": " Paris", "Italy": " Milan"})
        >>> large = ul.Echo({"France": " Paris", "Italy": " Rome"})
        >>> first = ul.evaluate(capital, rows, metric, backend=small)
        >>> second = ul.evaluate(capital, rows, metric, backend=large)
        >>> comparison = ul.compare(first, second)
        >>> comparison.main.first, comparison.main.second, comparison.main.p_value
        (0.5, 1.0, 1.0)
        >>> [(before.variables["city"], after.variables["city"]) for before, after in comparison.better]
        [(' Milan', ' Rome')]
    """

    first: EvaluationReport
    second: EvaluationReport
    differences: dict[str, Difference]

    def __getitem__(self, name: str) -> Difference:
        """Returns the difference of a figure. Raises ParameterError for one that not both have."""
        if name not in self.differences:
            names = ", ".join(map(repr, self.differences))
            raise ParameterError(f"the comparison has no figure {shown(name)}; write one of {names}")
        return self.differences[name]

    @property
    def main(self) -> Difference:
        """The difference of the first figure; of most metrics the only one."""
        return next(iter(self.differences.values()))

    @property
    def better(self) -> list[tuple[EvaluatedRow, EvaluatedRow]]:
        """The rows in which the first figure is higher in the second report, as pairs of both."""
        return self._pairs(self.main.better)

    @property
    def worse(self) -> list[tuple[EvaluatedRow, EvaluatedRow]]:
        """The rows in which the first figure is lower in the second report, as pairs of both."""
        return self._pairs(self.main.worse)

    def _pairs(self, numbers: tuple[int, ...]) -> list[tuple[EvaluatedRow, EvaluatedRow]]:
        sides = [{row.row: row for row in report.results} for report in (self.first, self.second)]
        return [(sides[0][number], sides[1][number]) for number in numbers]

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as JSON has it, without the rows."""
        about = {
            side: {name: getattr(report, name) for name in ("program", "data", "metric", "model", "cost", "seconds")}
            for side, report in (("first", self.first), ("second", self.second))
        }
        return cast(dict[str, Any], simple({**about, "differences": self.differences}))

    # -------------------------------------------------------------------------------- showing

    def _title(self) -> str:
        first, second = self.first, self.second
        sides = [f"{report.program} ({report.model})" for report in (first, second)]
        return f"{sides[0]} → {sides[1]}, on {os.path.basename(first.data)}: {counted(len(first.results), 'row')}"

    def _fields(self) -> Iterator[Field]:
        for name, difference in self.differences.items():
            yield name, str(difference)
        for name, numbers in (("better", self.main.better), ("worse", self.main.worse)):
            yield name, f"{counted(len(numbers), 'row')}{': ' * bool(numbers)}{listed_rows(numbers)}"
            for before, after in self._pairs(numbers[:_SHOWN]):
                yield name, _changed(before, after, self.first.label)
        yield "cost", f"{_spent(self.first)} → {_spent(self.second)}"


def _changed(before: EvaluatedRow, after: EvaluatedRow, label: str) -> str:
    """Returns what the programs said of one row, then the row."""
    facts = []
    for name in dict.fromkeys([*before.variables, *after.variables]):
        one, other = before.variables.get(name), after.variables.get(name)
        facts.append(f"{name}: {short(one)} → {short(other)}" if one != other else f"{name}={short(one)}")
    facts += [f"{side.error} in the {name}" for side, name in ((before, "first"), (after, "second")) if side.error]
    return f"row {before.row}: {', '.join([*facts, *after.described_inputs(label)])}"


def _spent(report: EvaluationReport) -> str:
    """Returns what the programs took, calls that a journal has answered included."""
    cost = report.cost
    facts = [f"{cost.usage.total_tokens + cost.read.total_tokens:,} tokens"]
    if cost.usage.prompt_tokens:
        facts.append(f"{report.cached_share:.0%} of the prompts cached")
    if cost.dollars is not None and cost.dollars_read is not None and cost.dollars + cost.dollars_read:
        facts.append(f"${cost.dollars + cost.dollars_read:.4f}")
    return ", ".join(facts)


# -------------------------------------------------------------------------------- comparing


def compare(first: EvaluationReport, second: EvaluationReport) -> Comparison:
    """Compares two evaluations of the same data: differences with intervals, paired tests, the rows that changed.

    Shares are compared by the exact McNemar test, numbers by a permutation test of the pairs. Rows that one of the
    metrics could not measure are left out.

    Args:
        first: the report of the earlier program, or prompt, or model.
        second: the other one.

    Raises:
        ParameterError: they are about other rows or other right answers, or have no figure in common.

    Examples:
        >>> @ul.function
        ... def capital(s, country):
        ...     s += f"The capital of {country} is" + ul.gen("city", max_tokens=4)
        >>> @ul.function
        ... def careful(s, country):
        ...     s += f"The seat of government, which need not be the largest city, of {country}:"
        ...     s += ul.gen("city", max_tokens=4)
        >>> rows = [{"country": "France", "label": "Paris"}, {"country": "Italy", "label": "Rome"}]
        >>> answers = {"France is": " Paris", "Italy is": " Milan", "France:": " Paris", "Italy:": " Rome"}
        >>> model = ul.Echo(answers)
        >>> metric = ul.exact_match("city", "label")
        >>> first = ul.evaluate(capital, rows, metric, backend=model)
        >>> second = ul.evaluate(careful, rows, metric, backend=model)
        >>> print(ul.compare(first, second))
        capital (Echo) → careful (Echo), on the data: 2 rows
        exact_match  50.0% → 100.0%: +50.0 points ...
        better       1 row: 1
                     row 1: city: ' Milan' → ' Rome', right is 'Rome',...
        worse        0 rows
        ...
    """
    for name, given in (("first", first), ("second", second)):
        if not isinstance(given, EvaluationReport):
            raise ParameterError(
                f"compare({name}={shown(given)}); give a report: of umbel.evaluate(...), or "
                "umbel.EvaluationReport.load(PATH)"
            )
    _check_rows(first, second)
    _check_measures(first, second)
    names = [name for name in first.figures if name in second.figures]
    if not names:
        for name, report in (("first", first), ("second", second)):
            if not any(row.figures for row in report.results):
                raise ParameterError(
                    f"the {name} report has no row with figures, so there is nothing to compare; see its errors and "
                    "its unmeasured rows, and evaluate again"
                )
        raise ParameterError(
            f"the first report has {listed(first.figures, 'figures')}, and the second "
            f"{listed(second.figures, 'figures')}; evaluate both with the same metric"
        )
    return Comparison(first, second, {name: _difference(name, first, second) for name in names})


def _check_rows(first: EvaluationReport, second: EvaluationReport) -> None:
    """Raises ParameterError where the reports are about other rows."""
    sides = [{row.row: row.inputs for row in report.results} for report in (first, second)]
    advice = "evaluate both with the same data"
    for row in sorted(sides[0].keys() & sides[1].keys()):
        one, other = sides[0][row], sides[1][row]
        if one == other:
            continue
        if one.keys() != other.keys():
            raise ParameterError(
                f"the reports are about different data: the first has {listed(one)}, and the second {listed(other)}; "
                f"{advice}"
            )
        name = next(name for name in one if one[name] != other[name])
        raise ParameterError(
            f"the reports are about different data: row {row} has {name}={shown(one[name])} in the first, and "
            f"{shown(other[name])} in the second; {advice}, in the same order"
        )
    if sides[0].keys() != sides[1].keys():
        missing = sorted(sides[0].keys() ^ sides[1].keys())
        raise ParameterError(
            f"the reports are about different data: the first has {len(sides[0])} rows, the second {len(sides[1])}; "
            f"only one has row {listed_rows(missing, 5)}; {advice}"
        )


def _check_measures(first: EvaluationReport, second: EvaluationReport) -> None:
    """Raises ParameterError where the metrics compare with other right answers. Programs of other names may name their
    variables otherwise, and a report may not know what its metric compares."""
    one, other = measure_of(first), measure_of(second)
    names = ["label", "ignore_case", "variable"] if first.program == second.program else ["label", "ignore_case"]
    for name in names:
        if one[name] != other[name] and not {one[name], other[name]} & {"", None}:
            raise ParameterError(
                f"the reports are of different metrics: the first has {name}={shown(one[name])}, and the second "
                f"{shown(other[name])}; evaluate both with the same metric"
            )


def _difference(name: str, first: EvaluationReport, second: EvaluationReport) -> Difference:
    one, other = first.values(name), second.values(name)
    rows = [row for row in one if row in other]
    if not rows:
        raise ParameterError(f"no row has {name!r} in both reports; the metric raised, see report.unmeasured")
    changes = {row: other[row] - one[row] for row in rows}
    values, seed = list(changes.values()), first.seed
    share = is_proportion([*(one[row] for row in rows), *(other[row] for row in rows)])
    interval = interval_of_differences(values, seed, are_shares=share)
    test = paired_test(values, seed, are_shares=share)
    order = sorted(changes, key=lambda row: (-abs(changes[row]), row))
    return Difference(
        name=name,
        first=fmean(one[row] for row in rows),
        second=fmean(other[row] for row in rows),
        difference=fmean(values),
        low=interval.low,
        high=interval.high,
        method=interval.method,
        p_value=test.p_value,
        test=test.method,
        count=len(rows),
        better=tuple(row for row in order if changes[row] > 0),
        worse=tuple(row for row in order if changes[row] < 0),
        is_share=share,
    )
