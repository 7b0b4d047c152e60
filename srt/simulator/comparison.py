"""Compares simulations of one workload by policy and pool size: a table, curves as an SVG, and a page of both."""

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

from .measurements import SimulationResult, Spread
from .report import GAP, LEFT, PANEL, RIGHT, WIDTH, round_ticks, svg_text

_PALE, _GRID, _OPTIMUM = "#52606d", "#d9e2ec", "#b5179e"
_LABEL = 60.0  # from one label of a pool to the next, at least
_COLOURS = ("#1d4e89", "#e07a1f", "#2a9d8f", "#d1495b")


class Compared(NamedTuple):
    """A simulation: the order of waiting calls, the tokens of each replica's pool, and what came out."""

    policy: str
    pool: int
    result: SimulationResult


class _Point(NamedTuple):
    policy: str
    pool: int
    value: float


def lines_of_compared(found: Sequence[Compared]) -> list[str]:
    """Returns a table for a terminal, and the optimum of an unlimited cache."""
    rows = [f"{'policy':8}{'pool':>12}{'hit rate':>10}{'mean wait':>12}{'first token':>13}{'calls a second':>16}"]
    for policy, pool, result in found:
        rows.append(
            f"{policy:8}{pool:12,}{result.hit_rate:10.1%}{_mean(result.waiting):>12}{_mean(result.first_token):>13}"
            f"{result.calls_per_second:16,.2f}"
        )
    best = found[0].result.optimal_hit_rate
    return [*rows, f"optimum of one unlimited cache: {'not counted' if best is None else f'{best:.1%}'}"]


def _mean(spread: Spread | None) -> str:
    return "none" if spread is None else f"{spread.mean:.3f} s"


def draw_compared(found: Sequence[Compared], title: str) -> str:
    """Draws hit rate, waiting and throughput over the pool sizes, a curve for each policy."""
    hits = [_Point(policy, pool, 100 * result.hit_rate) for policy, pool, result in found]
    waits = [_Point(policy, pool, result.waiting.mean) for policy, pool, result in found if result.waiting]
    rates = [_Point(policy, pool, result.calls_per_second) for policy, pool, result in found]
    panels = (
        ("Hit rate, %; dashed: optimum of one unlimited cache", hits, found[0].result.optimal_hit_rate),
        ("Mean seconds of waiting", waits, None),
        ("Calls a second", rates, None),
    )
    height = 84 + len(panels) * (PANEL + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        svg_text(LEFT, 30, title, size=17, weight=600),
    ]
    for number, policy in enumerate(dict.fromkeys(each.policy for each in found)):
        x, colour = LEFT + 110 * number, _COLOURS[number % len(_COLOURS)]
        parts += [f'<rect x="{x}" y="43" width="11" height="11" fill="{colour}"/>', svg_text(x + 17, 53, policy)]
    for number, (name, points, best) in enumerate(panels):
        parts.append(f'<g transform="translate(0 {84 + number * (PANEL + GAP)})">')
        parts += [svg_text(LEFT, 0, name, weight=600), *_curves(points, best), "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def _curves(points: Sequence[_Point], best: float | None) -> list[str]:
    """Draws a curve for each policy."""
    if not points:
        return [svg_text(LEFT, 28, "of no generation", fill=_PALE)]
    pools = sorted({point.pool for point in points})
    ticks = round_ticks(max([1e-3, 0 if best is None else 100 * best, *(point.value for point in points)]))
    room, tall, span = WIDTH - LEFT - RIGHT - 80, PANEL - 16, max(1, pools[-1] - pools[0])

    def place(pool: int, height: float) -> tuple[float, float]:
        return LEFT + 40 + room * (pool - pools[0]) / span, 16 + tall * (1 - height / ticks[-1])

    parts = []
    for tick in ticks:
        y = place(pools[0], tick)[1]
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{_GRID}"/>')
        parts.append(svg_text(LEFT - 8, y + 4, f"{tick:,.4g}", fill=_PALE, size=11, anchor="end"))
    labelled = -math.inf
    for pool in pools:
        x = place(pool, 0)[0]
        if x - labelled >= _LABEL:
            parts.append(svg_text(x, PANEL + 18, f"{pool:,}", fill=_PALE, size=11, anchor="middle"))
            labelled = x
    if best is not None:
        y = place(pools[0], 100 * best)[1]
        line = f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{_OPTIMUM}"'
        parts.append(f'{line} stroke-dasharray="6 4"/>')
    for number, policy in enumerate(dict.fromkeys(point.policy for point in points)):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [place(point.pool, point.value) for point in points if point.policy == policy]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in places]
    return parts


def compared_page(found: Sequence[Compared], picture: str, title: str, command: str) -> str:
    """Returns an HTML page with table and curves. It loads nothing."""
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }}
svg {{ max-width: 100%; height: auto }}
pre {{ background: #f5f7fa; padding: 1rem; overflow-x: auto; font-size: 13px }}
</style>
<pre>{html.escape(chr(10).join(lines_of_compared(found)))}</pre>
{picture}
<p>Made by <code>{html.escape(command)}</code></p>
</html>
"""
