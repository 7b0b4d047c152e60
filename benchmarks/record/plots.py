"""Plots of a record as SVG, by matplotlib: ratios as in the paper's figures 5, 6 and 8 c, lines as in figure 8 a, b.

    json decode regex   ├──────────────■ 0.24        umbel = 1; a bar begins at 1 and ends at the median
                        ├─────────────■─┤ 0.25       of the paired runs; a whisker spans all of them
                       0.1   0.2     0.5      1

A record gives the same bytes each time: no date is written, ids are salted by a constant, letters are drawn as paths of
the font that matplotlib carries. The metadata of a plot holds the figures that it shows.
"""

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from umbel.lang.errors import MissingExtraError

from ..configuration import ALL, FULL, ON_DEVICES, OURS, PAPER
from ..measure import Measurement
from .machine import Machine
from .results import Results, Spread

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
except ModuleNotFoundError as missing:
    raise MissingExtraError("matplotlib", "plots") from missing

STYLE: Mapping[str, str | float | bool] = {
    "svg.hashsalt": "umbel",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "figure.facecolor": "white",
}
# Told apart in grey and by people who see few colours: after Okabe and Ito.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#7a6a00", "#555555")
_INK, _QUIET = "#1f2328", "#6e7781"
_PEERS = {
    "vllm_cpu": "vLLM",
    "openvino_genai": "OpenVINO GenAI",
    "llama_cpp": "llama.cpp",
    "transformers_generate": "transformers",
}
_MODELS = {"default": "Gemma 3 270M"}
_BAR = 0.155  # inches: of a bar, and of the space between two groups of them
_WIDTH = 6.6  # inches: of the axes
_STEPS = (1, 2, 5)  # ticks: these times a power of ten


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio, and what is said at it.

    Attributes:
        runs: pairs of runs that it is the median of; None for a mean over workloads.
        failed: some programs of the system failed, so that it may have computed less.
    """

    spread: Spread
    runs: int | None
    failed: bool = False

    @property
    def text(self) -> str:
        return f"{ratio_text(self.spread.median)}{' *' if self.failed else ''}"


@dataclass(frozen=True, slots=True)
class Bars:
    """A group of bars for each of `groups`, on a logarithmic axis; a series without a value there leaves a gap.

    Attributes:
        about: on what the figures were taken, below the title.
        stressed: so many of the first groups have names in bold.
    """

    title: str
    about: str
    axis: str
    groups: tuple[str, ...]
    series: Mapping[str, tuple[Bar | None, ...]]
    stressed: int = 0

    def caption(self) -> str:
        counts = {bar.runs for series in self.series.values() for bar in series if bar is not None and bar.runs}
        if max(counts, default=1) == 1:
            said = "One pair of runs each: the record holds no spread."
        else:
            between = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else str(max(counts))
            single = "; none where there is one" if min(counts) == 1 else ""
            said = f"Bars: medians of {between} paired runs. Whiskers: the smallest and the largest{single}."
        failed = any(bar is not None and bar.failed for series in self.series.values() for bar in series)
        return said + (" * some of its programs failed." if failed else "")

    def facts(self) -> Iterator[str]:
        """Yields a line for each bar, as the metadata of the plot holds it."""
        for name, series in self.series.items():
            for group, bar in zip(self.groups, series, strict=True):
                if bar is not None:
                    parts = (bar.spread.median, bar.spread.low, bar.spread.high)
                    yield f"{name}, {group}: {' '.join(f'{part:.4g}' for part in parts)}{' *' if bar.failed else ''}"


@dataclass(frozen=True, slots=True)
class Line:
    title: str
    horizontal: str
    vertical: str
    points: tuple[tuple[float, float], ...]


def write(results: Results, folder: Path) -> list[Path]:
    """Writes all plots for which there are figures, and returns their paths."""
    found = bars_of(results)
    drawn = {name: draw_bars(bars) for name, bars in found.items()}
    facts = {name: list(bars.facts()) for name, bars in found.items()}
    if results.sweep:
        lines = sweep_lines(results)
        drawn["hit_rate"] = draw_lines(lines, about(results))
        facts["hit_rate"] = [f"{line.title}: {' '.join(f'{y:.4g}' for _, y in line.points)}" for line in lines]
    folder.mkdir(parents=True, exist_ok=True)
    return [save(figure, folder / f"{name}.svg", facts[name]) for name, figure in drawn.items()]


def save(figure: Figure, path: Path, facts: Sequence[str]) -> Path:
    """Writes a figure as SVG: the same bytes for the same figure. `facts` go into its metadata."""
    with matplotlib.rc_context(dict(STYLE)):
        figure.savefig(
            path,
            bbox_inches="tight",
            pad_inches=0.15,
            metadata={"Date": None, "Creator": f"matplotlib {matplotlib.__version__}", "Description": "\n".join(facts)},
        )
    text = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE), encoding="utf-8")
    return path


def bars_of(results: Results) -> dict[str, Bars]:
    """Returns the plots of bars by the name of their file."""
    ablations = [configuration.name for configuration in (FULL, *PAPER, *OURS, *ON_DEVICES)]
    former = [name for name in results.systems if name in ("no-tree", "random")]  # of records of earlier versions
    others = [system for system in results.systems if system not in (*ablations, *former)]
    found = {}
    for name, title, systems, quantity in (
        ("throughput", "Programs per second, higher is better", others, _rate),
        ("latency", "Seconds of one program alone, lower is better", others, _latency),
        ("ablations", "Programs per second without one part of umbel", [*ablations[1:], *former], _rate),
    ):
        series = {
            system_name(system, results): bars
            for system in systems
            if system in results.systems and any(bars := _ratios(results, system, quantity))
        }
        if series:
            groups = tuple(map(workload_name, results.workloads))
            found[name] = Bars(title, about(results), "umbel = 1, logarithmic axis", groups, series)
    return found


def _rate(measurement: Measurement) -> float:
    return measurement.rate


def _latency(measurement: Measurement) -> float:
    return measurement.latency


def _ratios(results: Results, system: str, quantity: Callable[[Measurement], float]) -> tuple[Bar | None, ...]:
    bars = []
    for workload in results.workloads:
        spread = results.against(workload, system, FULL.name, quantity)
        runs = results.of(workload, system)
        bars.append(Bar(spread, len(runs), any(run.failures for run in runs)) if spread else None)
    return tuple(bars)


def about(results: Results) -> str:
    """Says on what the figures were taken: model, machine, date."""
    model = str(results.settings.get("model", "default"))
    programs = max((run.programs for run in results.measurements), default=0)
    extent = f", at most {programs} programs of a workload" if programs else ""
    return f"{_MODELS.get(model, model)} on {machine_name(results.machine)}, {results.machine.date[:10]}{extent}"


def machine_name(machine: Machine) -> str:
    processor = re.sub(r"\((R|TM)\)|\bProcessor\b", "", machine.processor)
    matrix = " with AMX" if any(flag.startswith("amx") for flag in machine.instructions) else ""
    return f"{' '.join(processor.split())}{matrix}, {machine.cores} cores"


def system_name(system: str, results: Results) -> str:
    """Returns the name in a plot: a peer with its version, a configuration by what is off."""
    if system in _PEERS:
        version = results.about.get(system, "").removeprefix(f"{system} ")
        if version.startswith("of "):  # its engine comes in a package of another name
            version = f"({version.removeprefix('of ')})"
        return f"{_PEERS[system]} {version}".strip()
    if system in ALL:
        return "umbel, INT8 weights" if system == "int8" else ALL[system].about
    return results.about.get(system, system).partition(" (")[0]


def workload_name(workload: str) -> str:
    return workload.replace("_", " ")


def ratio_text(ratio: float) -> str:
    digits = 0 if ratio >= 10 else 1 if ratio >= 2 else 2 if ratio >= 0.1 else 3
    return f"{ratio:.{digits}f}"


def sweep_lines(results: Results) -> list[Line]:
    points = sorted(results.sweep, key=lambda point: point.hit_rate)
    rates = [100 * point.hit_rate for point in points]

    def line(title: str, vertical: str, values: Sequence[float]) -> Line:
        return Line(title, "hit rate, %", vertical, tuple(zip(rates, values, strict=True)))

    return [
        line("Tokens per step", "tokens", [point.batch_size for point in points]),
        line("Throughput", "programs/s", [point.rate for point in points]),
        line("First token", "ms", [1000 * point.first_token for point in points]),
        line("Whole call", "ms", [1000 * point.call_seconds for point in points]),
    ]


# ---------------------------------------------------------------------------------------------- drawing


def draw_bars(bars: Bars) -> Figure:
    """Draws bars that begin at 1, a group of them for each workload, from top to bottom."""
    count = len(bars.series)
    height = _BAR * (count + 1) * len(bars.groups) + 0.1
    with matplotlib.rc_context(dict(STYLE)):
        figure = Figure(figsize=(_WIDTH, height))
        axes = figure.add_axes((0, 0, 1, 1))
        low, high = _limits(bars)
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        middles = [(count + 1) * (number + 0.5) for number in range(len(bars.groups))]
        axes.set_ylim((count + 1) * len(bars.groups), 0)
        axes.set_yticks(middles, bars.groups)
        axes.tick_params(axis="y", length=0, labelcolor=_INK)
        for label in axes.get_yticklabels()[: bars.stressed]:
            label.set_fontweight("bold")
        _ratio_axis(axes, low, high, bars.axis)
        for place, ((name, series), colour) in enumerate(zip(bars.series.items(), colours(count), strict=True)):
            rows = [middle - (count - 1) / 2 + place for middle in middles]
            _draw_series(axes, name, rows, series, colour)
        axes.axvline(1, color=_INK, linewidth=1.2)
        bottom = _heading(axes, bars, height)
        _write_caption(axes, bars.caption(), height, bottom)
    return figure


def colours(count: int) -> list[str]:
    return [_COLOURS[number % len(_COLOURS)] for number in range(count)]


def _limits(bars: Bars) -> tuple[float, float]:
    """Returns the ends of the axis: room for every whisker, and for the figure after it."""
    spreads = [bar.spread for series in bars.series.values() for bar in series if bar is not None]
    low, high = min([0.9, *(spread.low for spread in spreads)]), max([1.1, *(spread.high for spread in spreads)])
    room = (high / low) ** 0.12
    has_left = any(spread.median < 1 for spread in spreads)
    return low / (room if has_left else 1.0), high * room


def _ratio_axis(axes: Axes, low: float, high: float, label: str) -> None:
    ticks = [step * 10.0**power for power in range(-4, 5) for step in _STEPS]
    shown = [tick for tick in ticks if low <= tick <= high]
    if len(shown) > 9:
        shown = [tick for tick in shown if f"{tick:e}".startswith("1")]
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.grid(axis="x", color="#d8dee4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", colors=_QUIET, length=3)
    axes.spines["bottom"].set_color("#d8dee4")
    axes.set_xlabel(label, color=_QUIET)


def _draw_series(axes: Axes, name: str, rows: Sequence[float], series: Sequence[Bar | None], colour: str) -> None:
    label = name
    for row, bar in zip(rows, series, strict=True):
        if bar is None:
            continue
        spread = bar.spread
        axes.barh(row, spread.median - 1, left=1, height=0.86, color=colour, label=label)
        label = "_"  # one entry of the legend for all bars of the series
        if spread.high > spread.low:
            axes.plot((spread.low, spread.high), (row, row), color=_INK, linewidth=0.9, marker="|", markersize=4)
        beyond = spread.median >= 1
        axes.annotate(
            bar.text,
            (max(spread.high, 1.0) if beyond else min(spread.low, 1.0), row),
            (4 if beyond else -4, 0),
            textcoords="offset points",
            horizontalalignment="left" if beyond else "right",
            verticalalignment="center_baseline",
            fontsize=7.5,
            color=_INK,
        )


def _heading(axes: Axes, bars: Bars, height: float) -> float:
    """Writes title, what the figures were taken on, and the legend above the axes, each in lines of its own."""
    names = list(bars.series)
    columns = 2 if max(map(len, names)) > 24 or len(names) > 3 else max(len(names), 1)
    lines = -(-len(names) // columns)
    top = 8.0 + 14 * lines  # points above the axes
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1 + 4 / 72 / height),
        ncols=columns,
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        handlelength=1.0,
        handletextpad=0.5,
        columnspacing=1.6,
        labelcolor=_INK,
    )
    said = textwrap.fill(bars.about, 92)
    place = {"xycoords": "axes fraction", "textcoords": "offset points", "verticalalignment": "bottom"}
    axes.annotate(said, (0, 1), (0, top), fontsize=9, color=_QUIET, **place)
    top += 13 * (said.count("\n") + 1) + 3
    axes.annotate(
        textwrap.fill(bars.title, 64), (0, 1), (0, top), fontsize=12.5, fontweight="bold", color=_INK, **place
    )
    return -38.0


def _write_caption(axes: Axes, caption: str, height: float, below: float) -> None:
    axes.annotate(
        textwrap.fill(caption, 112),
        (0, 0),
        (0, below),
        xycoords="axes fraction",
        textcoords="offset points",
        verticalalignment="top",
        fontsize=8,
        color=_QUIET,
    )


def draw_lines(lines: Sequence[Line], said: str) -> Figure:
    """Draws small plots next to each other."""
    with matplotlib.rc_context(dict(STYLE)):
        figure = Figure(figsize=(2.4 * len(lines), 2.3), layout="constrained")
        figure.suptitle(said, fontsize=9, color=_QUIET, x=0.01, horizontalalignment="left")
        for number, line in enumerate(lines):
            axes = figure.add_subplot(1, len(lines), number + 1)
            horizontal, vertical = zip(*line.points, strict=True)
            axes.plot(horizontal, vertical, color=_COLOURS[0], marker="o", markersize=4)
            axes.set_xlim(-3, 103)
            axes.set_ylim(0, (max(vertical) or 1.0) * 1.12)
            axes.set_title(line.title, fontsize=10, fontweight="bold", loc="left", color=_INK)
            axes.set_xlabel(line.horizontal, color=_QUIET)
            axes.set_ylabel(line.vertical, color=_QUIET)
            axes.grid(color="#d8dee4", linewidth=0.7)
    return figure
