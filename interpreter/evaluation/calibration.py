"""Calibration of a select: how often a choice is right, next to the probability that the model gave it.

confidence of a row: probability of the choice that was taken, among all choices
ECE: mean over the bins, by their rows, of |accuracy - mean confidence|
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, cast

import msgspec

from ...lang import checks
from ...lang.errors import MissingExtraError, ParameterError, shown
from ..data.rows import listed
from .intervals import wilson
from .metrics import agrees
from .report import EvaluationReport
from .rows import EvaluatedRow, simple
from .texts import Field, Printed, counted

_KEPT = (0.25, 0.5, 0.75, 1.0)  # shares of the rows, the most certain ones, whose accuracy is reported
PICTURES = (".svg", ".png", ".pdf")
MOST_BINS = 100


class CalibrationBin(msgspec.Struct, frozen=True):
    """The rows whose confidence is in one range.

    Attributes:
        low, high: of the range; of bins of equal counts the lowest and the highest confidence in it.
        count: rows.
        confidence: their mean confidence.
        accuracy: share of right ones.
        accuracy_low, accuracy_high: Wilson's interval of 95% of the accuracy.
    """

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float
    accuracy_low: float
    accuracy_high: float


class KeptAccuracy(msgspec.Struct, frozen=True):
    """The accuracy of the most certain rows.

    Attributes:
        share: of all rows, 0 to 1.
        count: rows.
        least: the lowest confidence among them.
        accuracy: share of right ones.
    """

    share: float
    count: int
    least: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Calibration(Printed):
    """Compares how often a select is right with how probable its choices were; made by `report.calibration`.

    `print(calibration)` shows it, and `plot` draws it.

    Args:
        variable: of the select.
        label: the column with the right choice.
        binning: the bins in words.
        rows: of each row its number, its confidence, and whether it is right.
        bins: those that have rows, by rising confidence.
        left_out: rows without probabilities: failed programs, or none were scored.
        unknown_labels: rows whose label is none of the choices; they count as wrong.

    Examples:
        >>> @ul.function
        ... def is_spam(s, mail):
        ...     s += mail + " Spam?" + ul.select("spam", choices=[" yes", " no"])
        >>> mails = [("Buy!", "yes"), ("Win!", "yes"), ("Hi.", "no")]
        >>> rows = [{"mail": mail, "label": label} for mail, label in mails]
        >>> model = ul.Echo(scores={" yes": -0.1, " no": -2.4})
        >>> report = ul.evaluate(is_spam, rows, ul.exact_match("spam", "label"), backend=model)
        >>> calibration = report.calibration()
        >>> print(f"right: {calibration.accuracy:.0%}, certain: {calibration.confidence:.0%}")
        right: 67%, certain: 91%
        >>> round(calibration.ece, 2)
        0.24
    """

    variable: str
    label: str
    binning: str
    rows: tuple[tuple[int, float, bool], ...]
    bins: tuple[CalibrationBin, ...]
    left_out: int
    unknown_labels: int

    @property
    def accuracy(self) -> float:
        """Share of right rows, 0 to 1."""
        return fmean(right for _, _, right in self.rows)

    @property
    def confidence(self) -> float:
        """Mean confidence, 0 to 1. Above the accuracy the model is too certain, below it too uncertain."""
        return fmean(confidence for _, confidence, _ in self.rows)

    @property
    def ece(self) -> float:
        """Expected calibration error, 0 to 1, over these bins. Few rows make it larger than it is."""
        gaps = (bin.count * abs(bin.accuracy - bin.confidence) for bin in self.bins)
        return sum(gaps) / len(self.rows)

    @property
    def brier(self) -> float:
        """Mean of (confidence - 1 if right, else confidence) squared, 0 to 1: needs no bins."""
        return fmean((confidence - right) ** 2 for _, confidence, right in self.rows)

    @property
    def kept(self) -> tuple[KeptAccuracy, ...]:
        """The accuracy of the most certain quarter, half, three quarters, and all: what answering only those brings."""
        order = sorted(self.rows, key=lambda row: -row[1])
        found = []
        for share in _KEPT:
            count = max(1, round(share * len(order)))
            kept = order[:count]
            found.append(KeptAccuracy(share, count, kept[-1][1], fmean(right for _, _, right in kept)))
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """Returns the calibration as JSON has it."""
        names = ("variable", "label", "binning", "accuracy", "confidence", "ece", "brier", "left_out", "unknown_labels")
        about: dict[str, Any] = {name: getattr(self, name) for name in names}
        return cast(dict[str, Any], simple({**about, "bins": self.bins, "kept": self.kept, "rows": self.rows}))

    # -------------------------------------------------------------------------------- showing

    def _title(self) -> str:
        return f"calibration of {self.variable!r} against {self.label!r}: {counted(len(self.rows), 'row')}"

    def _fields(self) -> Iterator[Field]:
        yield "accuracy", f"{self.accuracy:.1%}, with a mean confidence of {self.confidence:.1%}"
        yield "ECE", f"{self.ece:.3f}, {self.binning}"
        yield "Brier", f"{self.brier:.3f}"
        yield "confidence", f"{'range':>9}{'rows':>6}{'right':>7}{'95%':>9}{'mean':>6}"
        for bin in self.bins:
            spread = f"{bin.accuracy_low * 100:.0f}-{bin.accuracy_high:.0%}"
            yield (
                "confidence",
                f"{f'{bin.low * 100:.0f}-{bin.high:.0%}':>9}{bin.count:>6}{bin.accuracy:>7.0%}{spread:>9}"
                f"{bin.confidence:>6.0%}",
            )
        yield "most certain", f"{'share':>9}{'rows':>6}{'right':>7}{'from':>9}"
        for kept in self.kept:
            yield "most certain", f"{kept.share:>9.0%}{kept.count:>6}{kept.accuracy:>7.0%}{kept.least:>9.0%}"
        if self.left_out:
            yield "left out", f"{counted(self.left_out, 'row')} without probabilities"
        if self.unknown_labels:
            yield "labels", f"{counted(self.unknown_labels, 'row')} with a label that is none of the choices: wrong"

    def plot(self, path: str | os.PathLike[str]) -> str:
        """Draws the accuracy over the confidence, with intervals and the number of rows, and returns the path.

        Args:
            path: of the picture: .svg, .png or .pdf.

        Raises:
            ParameterError: another kind of file, or one that cannot be written.
            MissingExtraError: matplotlib is not installed (extra `umbel[plots]`).
        """
        found = checks.path("path", path)
        if not found.lower().endswith(PICTURES):
            raise ParameterError(f"plot(path={shown(found)}); write a path that ends in {', '.join(PICTURES)}")
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            raise MissingExtraError("matplotlib", "plots") from None
        figure = Figure(figsize=(5.2, 5.8), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        self._draw_bins(upper)
        edges = [step / 20 for step in range(21)]
        lower.hist([confidence for _, confidence, _ in self.rows], bins=edges, color="#8aa4c8", edgecolor="white")
        lower.set(xlabel=f"probability of the choice ({self.variable})", ylabel="rows", xlim=(-0.03, 1.03))
        lower.yaxis.get_major_locator().set_params(integer=True, nbins=3)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)  # nothing is drawn there
        for axes in (upper, lower):
            axes.spines[["top", "right"]].set_visible(False)
        try:
            figure.savefig(found, dpi=150, metadata={"Date": None} if found.lower().endswith(".svg") else None)
        except OSError as error:
            raise ParameterError(f"{found} cannot be written: {error.strerror}; write another path") from None
        return found

    def _draw_bins(self, axes: Any) -> None:  # Any: matplotlib's Axes, which need not be installed
        bins = self.bins
        axes.plot([0, 1], [0, 1], color="#888888", linewidth=1, linestyle="--", label="calibrated")
        axes.errorbar(
            [bin.confidence for bin in bins],
            [bin.accuracy for bin in bins],
            yerr=[
                [max(0.0, bin.accuracy - bin.accuracy_low) for bin in bins],
                [max(0.0, bin.accuracy_high - bin.accuracy) for bin in bins],
            ],
            fmt="o",
            markersize=6,
            color="#2f66d0",
            ecolor="#9db7e6",
            capsize=3,
            label="bins: number of rows, 95% interval",
        )
        for bin in bins:
            axes.annotate(
                str(bin.count), (bin.confidence, bin.accuracy), (6, 4), textcoords="offset points", fontsize=8
            )
        axes.set(ylabel=f"share that is right ({self.label})", ylim=(-0.03, 1.03), xlim=(-0.03, 1.03))
        axes.set_title(
            f"accuracy {self.accuracy:.1%}, ECE {self.ece:.3f}, {counted(len(self.rows), 'row')}", fontsize=11
        )


# -------------------------------------------------------------------------------- computing


def calibration(
    report: EvaluationReport, variable: str, label: str, *, bins: int = 10, equal_counts: bool = False
) -> Calibration:
    """Computes the calibration of a variable; `EvaluationReport.calibration` documents it."""
    bins = checks.integer("bins", bins, 1, MOST_BINS)
    checks.switch("equal_counts", equal_counts)
    is_right = partial(agrees, ignore_case=bool(report.ignore_case))
    scored = [row for row in report.results if not row.error and variable in row.probabilities]
    if not scored:
        raise ParameterError(_no_probabilities(report, variable))
    _check_labels(scored, variable, label, is_right)
    rows, unknown = [], 0
    for row in scored:
        choice, shares = row.variables[variable], row.probabilities[variable]
        known = any(is_right(each, row.inputs[label]) for each in shares)
        unknown += not known
        rows.append((row.row, min(1.0, shares[choice]), is_right(choice, row.inputs[label])))
    groups = _equal_counts(rows, bins) if equal_counts else _equal_widths(rows, bins)
    kind = "of as many rows each" if equal_counts else "of equal width"
    return Calibration(
        variable,
        label,
        f"{counted(bins, 'bin')} {kind}, {len(groups)} with rows" if len(groups) < bins else f"{bins} bins {kind}",
        tuple(rows),
        tuple(groups),
        len(report.results) - len(scored),
        unknown,
    )


def _no_probabilities(report: EvaluationReport, variable: str) -> str:
    known = dict.fromkeys(name for row in report.results for name in row.probabilities)
    if known:
        names = ", ".join(map(repr, known))
        return f"calibration(variable={variable!r}): no row has its probabilities; write one of the selects {names}"
    return (
        f"calibration(variable={variable!r}): no row has probabilities of choices; they come with umbel.select on a "
        f"model that scores choices, and {report.model} has scored none"
    )


def _check_labels(
    scored: Sequence[EvaluatedRow], variable: str, label: str, is_right: Callable[[Any, Any], bool]
) -> None:
    for row in scored:
        if label not in row.inputs:
            raise ParameterError(
                f"calibration(label={shown(label)}): row {row.row} has no such column; it has {listed(row.inputs)}"
            )
    if not any(is_right(choice, row.inputs[label]) for row in scored for choice in row.probabilities[variable]):
        first = scored[0]
        raise ParameterError(
            f"calibration(label={label!r}): no label is one of the choices: row {first.row} has "
            f"{label}={shown(first.inputs[label])}, and the choices {shown(list(first.probabilities[variable]))}; give "
            "the column of right choices"
        )


def _equal_widths(rows: Sequence[tuple[int, float, bool]], bins: int) -> list[CalibrationBin]:
    groups: dict[int, list[tuple[int, float, bool]]] = {}
    for row in rows:
        groups.setdefault(min(bins - 1, int(row[1] * bins)), []).append(row)
    return [_bin(group, place / bins, (place + 1) / bins) for place, group in sorted(groups.items())]


def _equal_counts(rows: Sequence[tuple[int, float, bool]], bins: int) -> list[CalibrationBin]:
    order, count = sorted(rows, key=lambda row: row[1]), len(rows)
    groups = [order[place * count // bins : (place + 1) * count // bins] for place in range(bins)]
    return [_bin(group, group[0][1], group[-1][1]) for group in groups if group]


def _bin(group: Sequence[tuple[int, float, bool]], low: float, high: float) -> CalibrationBin:
    right = sum(is_right for _, _, is_right in group)
    interval = wilson(right, len(group))
    confidence = fmean(confidence for _, confidence, _ in group)
    return CalibrationBin(low, high, len(group), confidence, right / len(group), interval.low, interval.high)
