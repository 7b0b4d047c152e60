"""What was measured, beside what the hardware allows and what we ask of ourselves; as Markdown and as JSON.

JSON is written by the standard library: a machine with a GPU may have no msgspec.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from .hardware import Hardware


class Unit(StrEnum):
    """Of a figure, as the table says it."""

    BANDWIDTH = "% of bandwidth"
    RATE = "TFLOPS"
    MICROSECONDS = "µs"
    TIMES = "×"
    TOKENS = "tokens/s"
    PROGRAMS = "programs/s"
    ERROR = "relative error"
    PASSED = "passed"

    @property
    def smaller_is_better(self) -> bool:
        return self in (Unit.MICROSECONDS, Unit.ERROR)

    @property
    def is_timed(self) -> bool:
        """It says how fast something is, not whether it is right."""
        return self not in (Unit.ERROR, Unit.PASSED)


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table.

    Attributes:
        limit: what the hardware allows, in the same unit; None where it has none.
        must, stretch: what is asked for; None: it is only told.
        beside: what torch does in the same place, or another base, in the same unit.
        note: what is to be known about the figure.
    """

    group: str
    name: str
    unit: Unit
    measured: float
    limit: float | None = None
    must: float | None = None
    stretch: float | None = None
    beside: float | None = None
    note: str = ""

    def reaches(self, goal: float) -> bool:
        """No number reaches nothing."""
        if math.isnan(self.measured):
            return False
        return self.measured <= goal if self.unit.smaller_is_better else self.measured >= goal

    @property
    def met(self) -> str:
        """What was reached, in a word; empty where nothing is asked for."""
        if self.stretch is not None and self.reaches(self.stretch):
            return "stretch"
        if self.must is not None:
            return "must" if self.reaches(self.must) else "NO"
        return ""


@dataclass(slots=True)
class Record:
    """Grows while groups run.

    Attributes:
        dry: nothing was timed on a GPU, and no number means anything.
        broken: what ended with an error, and which.
        left_out: what did not run, and why.
        seconds: that each group took.
        more: larger records of groups, which go to files of their own: name → text.
    """

    hardware: Hardware
    dry: bool
    figures: list[Figure] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    more: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> list[str]:
        """What is wrong, not slow: a kernel that does not give what its reference gives, or a test that failed."""
        wrong = [figure for figure in self.figures if not figure.unit.is_timed and figure.met == "NO"]
        return [*(f"{figure.group}: {figure.name}" for figure in wrong), *self.broken]

    def met(self, figure: Figure) -> str:
        """Of a dry run, times are not judged."""
        return "" if self.dry and figure.unit.is_timed else figure.met

    def write(self, folder: Path) -> None:
        """`results.md`, `results.json` and what groups say at length, in place of what was there."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.md").write_text(markdown(self), encoding="utf-8")
        record = {
            "hardware": asdict(self.hardware),
            "dry": self.dry,
            "seconds": self.seconds,
            "broken": self.broken,
            "left_out": self.left_out,
            "figures": [{**_finite(asdict(figure)), "met": self.met(figure)} for figure in self.figures],
        }
        (folder / "results.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        for name, text in self.more.items():
            (folder / name).write_text(text, encoding="utf-8")


def markdown(record: Record) -> str:
    hardware = record.hardware
    lines = [f"# Kernels and engine on {hardware.name}", "", *hardware.lines()]
    if record.dry:
        lines += [
            "",
            "**A dry run**: tiny shapes on the CPU, kernels in Triton's interpreter. It shows that everything runs; "
            "no figure says anything about a GPU.",
        ]
    lines += ["", *table(record)]
    for title, texts in (("Broken", record.broken), ("Left out", record.left_out)):
        if texts:
            lines += ["", f"## {title}", "", *(f"* {line}" for line in texts)]
    took = ", ".join(f"{group} {seconds:.0f} s" for group, seconds in record.seconds.items())
    return "\n".join([*lines, "", f"Time: {took}.", ""])


def table(record: Record) -> list[str]:
    head = ["group", "figure", "unit", "limit", "must", "stretch", "measured", "beside", "met", "note"]
    rows = [
        [
            *(figure.group, figure.name, figure.unit.value),
            *map(number, (figure.limit, figure.must, figure.stretch, figure.measured, figure.beside)),
            *(record.met(figure), figure.note),
        ]
        for figure in record.figures
    ]
    ruler = ["---"] * 3 + ["---:"] * 5 + ["---"] * 2
    return ["| " + " | ".join(cells) + " |" for cells in (head, ruler, *rows)]


def number(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return ""
    if value and abs(value) < 0.01:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _finite(record: Mapping[str, object]) -> dict[str, object]:
    """JSON has no word for what is not a number."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
