"""Plots as SVG: bars normalised as in the paper's figures 5, 6 and 8 c, lines as in figure 8 a, b.

Written directly: two kinds of plot need no library, and the files are the same on every machine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ..configuration import FULL, ON_DEVICES, OURS, PAPER
from ..measure import Measurement
from .results import Results

_COLOURS = (
    "#1b4f8a",
    "#e0802f",
    "#3f9b5c",
    "#b8433e",
    "#7a62ab",
    "#8a6249",
    "#cf6fa8",
    "#777777",
    "#a8a32f",
    "#31a6b8",
    "#14301f",
    "#f2b8a0",
)
_FONT = 'font-family="Helvetica, Arial, DejaVu Sans, sans-serif"'
_LEFT, _TOP, _PLOT, _LABELS = 56, 44, 220, 96  # pixels: axis, title, height of the bars, slanted names


@dataclass(frozen=True, slots=True)
class Bars:
    """One group of bars for each of `groups`; a series without a value there leaves a gap."""

    title: str
    axis: str
    groups: tuple[str, ...]
    series: Mapping[str, tuple[float | None, ...]]


@dataclass(frozen=True, slots=True)
class Line:
    title: str
    horizontal: str
    vertical: str
    points: tuple[tuple[float, float], ...]


def write(results: Results, folder: Path) -> list[Path]:
    """All plots for which there are figures."""
    drawn: dict[str, str] = {}
    ablations = [configuration.name for configuration in (FULL, *PAPER, *OURS, *ON_DEVICES)]
    compared = [FULL.name, *(system for system in results.systems if system not in ablations)]
    for name, title, systems, quantity in (
        ("throughput", "Throughput, normalised (higher is better)", compared, _rate),
        ("latency", "Latency, normalised (lower is better)", compared, _latency),
        ("ablations", "Throughput without each part, normalised", ablations, _rate),
    ):
        bars = _normalised(results, title, [s for s in systems if s in results.systems], quantity)
        if len(bars.series) > 1:
            drawn[name] = draw_bars(bars)
    if results.sweep:
        drawn["hit_rate"] = draw_lines(_sweep_lines(results))
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, svg in drawn.items():
        path = folder / f"{name}.svg"
        path.write_text(svg, encoding="utf-8")
        paths.append(path)
    return paths


def _rate(measurement: Measurement) -> float:
    return measurement.rate


def _latency(measurement: Measurement) -> float:
    return measurement.latency


def _normalised(results: Results, title: str, systems: Sequence[str], quantity: Callable[[Measurement], float]) -> Bars:
    """Medians of paired ratios to the full configuration, which is 1."""
    series = {}
    for system in systems:
        spreads = [results.against(workload, system, FULL.name, quantity) for workload in results.workloads]
        if any(spreads):
            series[system] = tuple(spread.median if spread else None for spread in spreads)
    return Bars(title, "full = 1", tuple(results.workloads), series)


def _sweep_lines(results: Results) -> list[Line]:
    points = sorted(results.sweep, key=lambda point: point.hit_rate)
    horizontal = "hit rate, %"
    rates = [100 * point.hit_rate for point in points]

    def line(title: str, vertical: str, values: Sequence[float]) -> Line:
        return Line(title, horizontal, vertical, tuple(zip(rates, values, strict=True)))

    return [
        line("(a) Tokens per step", "tokens", [point.batch_size for point in points]),
        line("(a) Throughput", "programs/s", [point.rate for point in points]),
        line("(b) First token", "ms", [1000 * point.first_token for point in points]),
        line("(b) Whole call", "ms", [1000 * point.call_seconds for point in points]),
    ]


# ---------------------------------------------------------------------------------------------- drawing


def draw_bars(bars: Bars) -> str:
    thick = 9 if len(bars.series) > 4 else 14
    group_width = thick * len(bars.series) + 18
    width = _LEFT + max(group_width * len(bars.groups), 420) + 16
    height = _TOP + _legend_height(bars.series, width) + _PLOT + _LABELS
    top = _TOP + _legend_height(bars.series, width)
    values = [value for series in bars.series.values() for value in series if value is not None]
    highest = _round_up(max([*values, 1.0]))
    parts = [_text(_LEFT, 22, bars.title, size=15, weight="bold"), *_legend(bars.series, width)]
    parts += _grid(_LEFT, top, width - _LEFT - 16, highest, bars.axis)
    for number, group in enumerate(bars.groups):
        left = _LEFT + 9 + number * group_width
        for place, (series, colour) in enumerate(zip(bars.series.values(), _colours(bars.series), strict=True)):
            value = series[number]
            if value is None:
                continue
            tall = _PLOT * value / highest
            parts.append(
                f'<rect x="{left + place * thick}" y="{top + _PLOT - tall:.1f}" width="{thick - 1}" '
                f'height="{tall:.1f}" fill="{colour}"><title>{escape(group)}: {value:.3g}</title></rect>'
            )
        middle = left + thick * len(bars.series) / 2
        parts.append(_text(middle, top + _PLOT + 14, group, size=11, anchor="end", turn=-35))
    return _document(width, height, parts)


def draw_lines(lines: Sequence[Line]) -> str:
    """Small plots side by side."""
    wide, gap = 190, 76
    width = (wide + gap) * len(lines) + 16
    height = _TOP + _PLOT + 56
    parts: list[str] = []
    for number, line in enumerate(lines):
        left = _LEFT + number * (wide + gap)
        highest = _round_up(max(value for _, value in line.points))
        parts.append(_text(left, 22, line.title, size=13, weight="bold"))
        parts += _grid(left, _TOP, wide, highest, line.vertical)
        at = [(left + wide * x / 100, _TOP + _PLOT * (1 - y / highest)) for x, y in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_COLOURS[0]}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_COLOURS[0]}"/>' for x, y in at]
        for percent in (0, 50, 100):
            parts.append(_text(left + wide * percent / 100, _TOP + _PLOT + 16, str(percent), size=10, anchor="middle"))
        parts.append(_text(left + wide / 2, _TOP + _PLOT + 36, line.horizontal, size=11, anchor="middle"))
    return _document(width, height, parts)


def _document(width: float, height: float, parts: Sequence[str]) -> str:
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">\n<rect width="100%" height="100%" fill="white"/>\n{inner}\n</svg>\n'
    )


def _grid(left: float, top: float, width: float, highest: float, axis: str) -> list[str]:
    parts = []
    for step in range(5):
        y = top + _PLOT * (1 - step / 4)
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(left - 5, y + 3, f"{highest * step / 4:g}", size=10, anchor="end"))
    parts.append(_text(left - 38, top + _PLOT / 2, axis, size=11, anchor="middle", turn=-90))
    return parts


_ENTRY = 150  # pixels of one name in the legend


def _per_line(width: float) -> int:
    return max(1, int((width - _LEFT) // _ENTRY))


def _legend_height(series: Mapping[str, object], width: float) -> int:
    return 18 * -(-len(series) // _per_line(width)) + 8


def _legend(series: Mapping[str, object], width: float) -> list[str]:
    parts = []
    for number, (name, colour) in enumerate(zip(series, _colours(series), strict=True)):
        row, column = divmod(number, _per_line(width))
        x, y = _LEFT + column * _ENTRY, _TOP - 6 + 18 * row
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 14, y, name, size=11))
    return parts


def _colours(series: Mapping[str, object]) -> list[str]:
    return [_COLOURS[number % len(_COLOURS)] for number in range(len(series))]


def _text(
    x: float, y: float, text: str, *, size: int, weight: str = "normal", anchor: str = "start", turn: int = 0
) -> str:
    turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" {_FONT} font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}"{turned}>{escape(text)}</text>'
    )


def _round_up(value: float) -> float:
    """The end of an axis: the next of 1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8 times a power of ten."""
    power = 10.0
    while power > value:
        power /= 10
    while power * 10 < value:
        power *= 10
    return next(step * power for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10) if step * power >= value * 0.999)
