"""What was measured, beside what the hardware allows and what we ask of ourselves; as Markdown and as JSON.

A record is written after each figure, so that a call that is killed loses the figure under way alone. JSON is written
by the standard library: a machine with a GPU may have no msgspec.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
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
    SHARE = "%"

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

    @property
    def is_wrong(self) -> bool:
        """A kernel does not give what its reference gives, or a test failed; what is slow is not wrong."""
        return not self.unit.is_timed and self.met == "NO"


@dataclass(frozen=True, slots=True)
class PendingFigure:
    """A figure that is not taken yet: a record that has one of its name does not need it. take: may break."""

    name: str
    take: Callable[[], Figure]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the command. figures: that it took or changed."""

    date: str
    commit: str
    figures: int = 0


@dataclass(slots=True)
class Record:
    """Grows while groups run. Its methods write it, where it has a folder; what else changes it calls `save`.

    Attributes:
        dry: nothing was timed on a GPU, and no number means anything.
        sizes: names the shapes that were measured; figures of other sizes do not go with these.
        folder: where the record is kept.
        broken: what ended with an error, and which, by group.
        left_out: what did not run, and why, by group.
        seconds: that each group took, in all calls.
        more: larger records of groups, which go to files of their own: name → text.
        calls: that took figures, this one last.
        front: writes the page README.md; None: there is none.
    """

    hardware: Hardware
    dry: bool
    sizes: str = ""
    folder: Path | None = None
    figures: list[Figure] = field(default_factory=list)
    broken: dict[str, list[str]] = field(default_factory=dict)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    more: dict[str, str] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    front: "Callable[[Record], str] | None" = None
    _changed: set[tuple[str, str]] = field(default_factory=set)  # figures of this call
    _written: dict[str, str] = field(default_factory=dict)  # file name → text

    def __post_init__(self) -> None:
        if not self.calls:
            self.calls = [Call(self.hardware.date, self.hardware.commit)]

    @property
    def failed(self) -> list[str]:
        """What is wrong, not slow: a kernel that does not give what its reference gives, or a test that failed."""
        wrong = [f"{figure.group}: {figure.name}" for figure in self.figures if figure.is_wrong]
        return [*wrong, *(line for lines in self.broken.values() for line in lines)]

    def met(self, figure: Figure) -> str:
        """Of a dry run, times are not judged."""
        return "" if self.dry and figure.unit.is_timed else figure.met

    def has(self, group: str, name: str) -> bool:
        """The figure is there, and need not be taken again: it is a number, and not wrong."""
        found = next((one for one in self.figures if (one.group, one.name) == (group, name)), None)
        return found is not None and not found.is_wrong and not math.isnan(found.measured)

    def add(self, *figures: Figure) -> None:
        """Each takes the place of the one of its group and name."""
        places = {(one.group, one.name): place for place, one in enumerate(self.figures)}
        for figure in figures:
            key = figure.group, figure.name
            place = places.setdefault(key, len(self.figures))
            if place == len(self.figures):
                self.figures.append(figure)
            elif self.figures[place] == figure:
                continue
            self.figures[place] = figure
            self._changed.add(key)
        self.calls[-1] = replace(self.calls[-1], figures=len(self._changed))
        self.save()

    def begin(self, group: str) -> None:
        """Forgets what an earlier call said of a group: it is tried again."""
        self.broken.pop(group, None)
        self.left_out.pop(group, None)

    def broke(self, group: str, line: str) -> None:
        self.broken.setdefault(group, []).append(line)
        self.save()

    def leave_out(self, group: str, *lines: str) -> None:
        if lines:
            self.left_out.setdefault(group, []).extend(lines)
            self.save()

    def save(self) -> None:
        """Writes the record to its folder, if it has one."""
        if self.folder is not None:
            self.write(self.folder)

    def write(self, folder: Path) -> None:
        """`results.md`, `results.json`, the front page and what groups say at length, in place of what was there."""
        record = {
            "hardware": asdict(self.hardware),
            "dry": self.dry,
            "sizes": self.sizes,
            "calls": [asdict(call) for call in self.calls],
            "seconds": self.seconds,
            "broken": self.broken,
            "left_out": self.left_out,
            "figures": [{**_finite(asdict(figure)), "met": self.met(figure)} for figure in self.figures],
            "more": sorted(self.more),
        }
        folder.mkdir(parents=True, exist_ok=True)
        texts = {
            **self.more,
            **({} if self.front is None else {"README.md": self.front(self)}),
            "results.md": markdown(self),
            "results.json": json.dumps(record, indent=1, ensure_ascii=False) + "\n",
        }
        for name, text in texts.items():
            if self._written.get(str(folder / name)) != text:
                write_whole(folder / name, text)
                self._written[str(folder / name)] = text


def write_whole(path: Path, text: str) -> None:
    """A process that is killed leaves the file as it was, or as it is to be."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


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
        if any(texts.values()):
            lines += ["", f"## {title}", "", *(f"* {line}" for group in texts.values() for line in group)]
    took = ", ".join(f"{group} {seconds:.0f} s" for group, seconds in record.seconds.items())
    lines += ["", f"Time: {took}."]
    if len(record.calls) > 1:
        calls = ", ".join(f"{one.date} {one.figures} figures at {one.commit}" for one in record.calls)
        lines += ["", f"Calls: {calls}."]
    return "\n".join([*lines, ""])


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
