"""Prints the figures of a simulation, and draws them: an SVG, and an HTML page that needs nothing else."""

import html
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .measurements import Measurements, SimulationResult, Spread

WIDTH, PANEL, GAP, LEFT, RIGHT = 900, 200, 64, 64, 24
BARS = 150  # height of the first panel
POINTS = 240  # in time
MOST_ROWS = 64  # replicas that are drawn one by one
_INK, _PALE, _GRID = "#1f2933", "#52606d", "#d9e2ec"
_FOUND, _COMPUTED, _OPTIMUM = "#2a9d8f", "#e9c46a", "#b5179e"


def lines_of(result: SimulationResult) -> list[str]:
    """Returns the figures as lines for a terminal."""
    best = result.optimal_hit_rate
    optimum = "not counted" if best is None else f"{best:.1%}"
    tiers = [f"from {name:<18} {tokens:,} tokens" for name, tokens in result.tier_tokens.items()]
    calls = [replica.calls for replica in result.by_replica]
    busy = [replica.busy for replica in result.by_replica]
    over, answers = result.most_over_mean, result.answer_tokens / max(result.seconds, 1e-9)
    return [
        f"{result.kind} simulation: {_count(result.replicas, 'replica')}, placement {result.policy}",
        f"calls                   {result.calls:,} in {result.seconds:,.2f} s, {result.calls_per_second:,.2f} a second",
        f"prompt tokens           {result.prompt_tokens:,}, of which {result.computed_tokens:,} were computed",
        f"hit rate                {result.hit_rate:.1%}; optimum of one unlimited cache: {optimum}",
        *tiers,
        f"answer tokens           {result.answer_tokens:,}, {answers:,.1f} a second",
        f"waiting                 {_spread(result.waiting, 'generation')}",
        f"time to first token     {_spread(result.first_token, 'generation')}",
        f"time of a call          {_spread(result.call, 'call')}",
        f"calls of a replica      {min(calls):,} to {max(calls):,}, mean {sum(calls) / len(calls):,.1f}",
        f"busy                    {min(busy):.0%} to {max(busy):.0%}, mean {sum(busy) / len(busy):.0%}",
        "load while another idles "
        + ("not counted" if over is None else f"at most {over:.2f} times the mean" if over else "no replica idled"),
    ]


def _spread(spread: Spread | None, noun: str) -> str:
    if spread is None:
        return f"of no {noun}"
    return f"mean {spread.mean:.3f} s, median {spread.p50:.3f} s, 99 of 100 below {spread.p99:.3f} s"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# ------------------------------------------------------------------------------------------------- drawing

_UNWRITABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")  # in XML, or in UTF-8


def writable(text: str) -> str:
    """Replaces characters that no XML has, and bytes of a name that are no UTF-8, by U+FFFD."""
    return _UNWRITABLE.sub("\ufffd", text)


def draw_svg(result: SimulationResult, measurements: Measurements, title: str) -> str:
    """Draws hit rates, tokens of each replica, and loads over time."""
    height = 84 + BARS + 2 * PANEL + 3 * GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        svg_text(LEFT, 30, title, size=17, weight=600),
        svg_text(LEFT, 50, lines_of(result)[0], fill=_PALE),
    ]
    top = 84.0
    for name, tall, panel in (
        ("Hit rate: share of the prompt tokens that were not computed", BARS, _hit_rates(result)),
        ("Prompt tokens by replica", PANEL, _tokens(result)),
        ("Calls in flight at each replica over time", PANEL, _loads(measurements)),
    ):
        parts += [f'<g transform="translate(0 {top:g})">', svg_text(LEFT, 0, name, weight=600), *panel, "</g>"]
        top += tall + GAP
    return "\n".join([*parts, "</svg>\n"])


def svg_text(
    x: float, y: float, text: str, *, fill: str = _INK, size: int = 13, weight: int = 400, anchor: str = "start"
) -> str:
    style = f'fill="{fill}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{html.escape(writable(text))}</text>'


def _hit_rates(result: SimulationResult) -> list[str]:
    """Draws a bar for what was reached and one for the optimum, each with its number."""
    bars = [("reached", result.hit_rate, _FOUND)]
    if result.optimal_hit_rate is not None:
        bars.append(("optimum", result.optimal_hit_rate, _OPTIMUM))
    parts = []
    room = WIDTH - LEFT - RIGHT - 140
    for index, (name, share, colour) in enumerate(bars):
        y = 24 + index * 56
        parts += [
            svg_text(LEFT, y + 22, name),
            f'<rect x="{LEFT + 80}" y="{y}" width="{room}" height="34" fill="{_GRID}" opacity="0.5"/>',
            f'<rect x="{LEFT + 80}" y="{y}" width="{max(0.0, share) * room:.1f}" height="34" fill="{colour}"/>',
            svg_text(LEFT + 90 + room, y + 22, f"{share:.1%}", weight=600),
        ]
    for tick in (0, 25, 50, 75, 100):
        x = LEFT + 80 + room * tick / 100
        parts.append(svg_text(x, 24 + 56 * len(bars) + 10, f"{tick} %", fill=_PALE, size=11, anchor="middle"))
    return parts


def round_ticks(most: float, count: int = 5) -> list[float]:
    """Returns multiples of 1, 2 or 5 · 10^n from 0 to the first one that is not below `most`, about `count` of them."""
    rough = max(most, 1e-9) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= rough * (1 - 1e-9))
    return [index * step for index in range(math.ceil(most / step - 1e-9) + 1)]


def _axes(most: float, right: str, *, times: float | None = None) -> tuple[list[str], float]:
    """Draws lines at round numbers, and what is under the panel → (parts, the number at the top)."""
    ticks = round_ticks(max(most, 5))  # calls and tokens are whole numbers
    parts = []
    for tick in ticks:
        y = 16 + (PANEL - 16) * (1 - tick / ticks[-1])
        parts += [
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{_GRID}"/>',
            svg_text(LEFT - 8, y + 4, _short(tick, ticks[-1]), fill=_PALE, size=11, anchor="end"),
        ]
    if times is not None:
        return parts + _times(times), ticks[-1]
    return [*parts, svg_text(WIDTH - RIGHT, PANEL + 18, right, fill=_PALE, size=11, anchor="end")], ticks[-1]


def _times(seconds: float) -> list[str]:
    """Writes round times under a panel, up to its end."""
    parts = []
    for tick in round_ticks(seconds, 6):
        if tick <= seconds:
            x = LEFT + (WIDTH - LEFT - RIGHT) * tick / max(seconds, 1e-9)
            parts += [
                f'<line x1="{x:.1f}" y1="{PANEL}" x2="{x:.1f}" y2="{PANEL + 4}" stroke="{_PALE}"/>',
                svg_text(x, PANEL + 18, f"{tick:,.6g} s", fill=_PALE, size=11, anchor="middle"),
            ]
    return parts


def _short(value: float, most: float) -> str:
    """Writes a number of an axis that goes to `most`: all in one unit."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if most >= size:
            return f"{value / (1e3 if letter == 'k' else size):.6g}{f' {letter}' if value else ''}"
    return f"{value:,.6g}"


def _tokens(result: SimulationResult) -> list[str]:
    """Draws for each replica a bar: computed tokens under found ones. Many replicas are drawn by their load."""
    replicas: Sequence[tuple[int, int]] = [(r.prompt_tokens, r.cached_tokens) for r in result.by_replica]
    label = f"replica 0 to {len(replicas) - 1}"
    if len(replicas) > 128:
        replicas, label = sorted(replicas, reverse=True), f"{len(replicas):,} replicas, by their tokens"
    most = max(1, *(prompt for prompt, _ in replicas))
    parts, top = _axes(most, label)
    room, tall = (WIDTH - LEFT - RIGHT) / len(replicas), PANEL - 16
    gap = min(6.0, room * 0.2)
    for index, (prompt, cached) in enumerate(replicas):
        x, full = LEFT + index * room + gap / 2, tall * prompt / top
        computed = tall * (prompt - cached) / top
        bar = f'<rect x="{x:.2f}" width="{room - gap:.2f}"'
        parts += [
            f'{bar} y="{16 + tall - computed:.1f}" height="{computed:.1f}" fill="{_COMPUTED}"/>',
            f'{bar} y="{16 + tall - full:.1f}" height="{full - computed:.1f}" fill="{_FOUND}"/>',
        ]
    for index, (name, colour) in enumerate((("found in the cache", _FOUND), ("computed", _COMPUTED))):
        x = LEFT + index * 160
        parts += [
            f'<rect x="{x}" y="{PANEL + 9}" width="11" height="11" fill="{colour}"/>',
            svg_text(x + 17, PANEL + 19, name, fill=_PALE, size=12),
        ]
    return parts


def _loads(measurements: Measurements) -> list[str]:
    """Draws a row for each replica, the darker the more calls; of many replicas the least, mean and greatest load."""
    times, loads = measurements.loads(POINTS)
    most = max(1, int(loads.max(initial=0)))
    if len(loads) > MOST_ROWS:
        axes, top = _axes(most, "", times=float(times[-1]))
        return [
            *axes,
            _line(loads.min(axis=0), top, "#8d99ae", 1.2),
            _line(loads.max(axis=0), top, "#d1495b", 1.2),
            _line(loads.mean(axis=0), top, _INK, 2.0),
            svg_text(WIDTH - RIGHT, 10, "red: greatest; black: mean; grey: least", fill=_PALE, size=11, anchor="end"),
        ]
    parts = _times(float(times[-1]))
    tall, room = (PANEL - 16) / len(loads), (WIDTH - LEFT - RIGHT) / POINTS
    for number, load in enumerate(loads.tolist()):
        y = 16 + number * tall
        if number % max(1, len(loads) // 8) == 0:
            parts.append(svg_text(LEFT - 8, y + tall / 2 + 4, str(number), fill=_PALE, size=11, anchor="end"))
        for first, end, calls in _runs(load):
            if calls:
                place = f'x="{LEFT + first * room:.2f}" y="{y:.2f}" width="{(end - first) * room:.2f}"'
                parts.append(
                    f'<rect {place} height="{tall * 0.92:.2f}" fill="{_INK}" opacity="{calls / most:.3f}">'
                    f"<title>replica {number}: {_count(calls, 'call')}</title></rect>"
                )
    parts.append(
        svg_text(WIDTH - RIGHT, 10, f"white: none; black: {_count(most, 'call')}", fill=_PALE, size=11, anchor="end")
    )
    return parts


def _runs(values: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields (first, end, value) of each run of equal values."""
    first = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] != values[first]:
            yield first, index, values[first]
            first = index


def _line(values: NDArray[np.float64] | NDArray[np.int64], most: float, colour: str, width: float) -> str:
    tall, room = PANEL - 16, WIDTH - LEFT - RIGHT
    points = " ".join(
        f"{LEFT + room * index / (len(values) - 1):.1f},{16 + tall * (1 - value / most):.1f}"
        for index, value in enumerate(values.tolist())
    )
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def page_of(result: SimulationResult, picture: str, title: str, command: str) -> str:
    """Returns an HTML page with the picture, all figures and a table of the replicas. It loads nothing."""
    rows = "".join(
        f"<tr><td>{number}</td><td>{r.calls:,}</td><td>{r.prompt_tokens:,}</td>"
        f"<td>{f'{r.cached_tokens / r.prompt_tokens:.1%}' if r.prompt_tokens else 'none'}</td>"
        f"<td>{r.answer_tokens:,}</td><td>{r.busy:.0%}</td></tr>"
        for number, r in enumerate(result.by_replica)
    )
    figures = html.escape("\n".join(lines_of(result)))
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: {_INK}; background: #fff; margin: 2rem auto; max-width: 60rem;
  padding: 0 1rem }}
svg {{ max-width: 100%; height: auto }}
pre {{ background: #f5f7fa; padding: 1rem; overflow-x: auto; font-size: 13px }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ text-align: right; padding: 0.2rem 0.9rem; border-bottom: 1px solid {_GRID} }}
</style>
<pre>{figures}</pre>
{picture}
<h2>Replicas</h2>
<table>
<tr><th>replica</th><th>calls</th><th>prompt tokens</th><th>hit rate</th><th>answer tokens</th><th>busy</th></tr>
{rows}
</table>
<p>Made by <code>{html.escape(command)}</code></p>
</html>
"""
