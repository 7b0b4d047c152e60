"""Compares simulations of one workload by policy and pool size: a table, curves as an SVG, and a page of both."""

import html
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .measurements import SimulationResult
from .report import GAP, LEFT, PANEL, RIGHT, WIDTH, round_ticks, svg_text

_PALE, _GRID, _OPTIMUM = "#52606d", "#d9e2ec", "#b5179e"
_COLOURS = ("#1d4e89", "#e07a1f", "#2a9d8f", "#d1495b")


class Compared(NamedTuple):
    """A simulation: the order of waiting calls, the tokens of each replica's pool, and what came out."""

    policy: str
    pool: int
    result: SimulationResult


def lines_of_compared(found: Sequence[Compared]) -> list[str]:
    """Returns a table for a terminal, and the optimum of an unlimited cache."""
    rows = [f"{'policy':8}{'pool':>12}{'hit rate':>10}{'mean wait':>12}{'first token':>13}{'calls a second':>16}"]
    for policy, pool, result in found:
        rows.append(
            f"{policy:8}{pool:12,}{result.hit_rate:10.1%}{result.waiting.mean:10.3f} s"
            f"{result.first_token.mean:11.3f} s{result.calls_per_second:16,.2f}"
        )
    best = found[0].result.optimal_hit_rate
    return [*rows, f"optimum of one unlimited cache: {'not counted' if best is None else f'{best:.1%}'}"]


def draw_compared(found: Sequence[Compared], title: str) -> str:
    """Draws hit rate, waiting and throughput over the pool sizes, a curve for each policy."""
    panels: list[tuple[str, Callable[[SimulationResult], float], float | None]] = [
        ("Hit rate, %; dashed: optimum of one unlimited cache", _hits, found[0].result.optimal_hit_rate),
        ("Mean seconds of waiting", lambda result: result.waiting.mean, None),
        ("Calls a second", lambda result: result.calls_per_second, None),
    ]
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
    for number, (name, value, best) in enumerate(panels):
        parts.append(f'<g transform="translate(0 {84 + number * (PANEL + GAP)})">')
        parts += [svg_text(LEFT, 0, name, weight=600), *_curves(found, value, best), "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def _hits(result: SimulationResult) -> float:
    return 100 * result.hit_rate


def _curves(found: Sequence[Compared], value: Callable[[SimulationResult], float], best: float | None) -> list[str]:
    pools = sorted({each.pool for each in found})
    ticks = round_ticks(max([1e-3, 0 if best is None else 100 * best, *(value(each.result) for each in found)]))
    room, tall, span = WIDTH - LEFT - RIGHT - 80, PANEL - 16, max(1, pools[-1] - pools[0])

    def place(pool: int, height: float) -> tuple[float, float]:
        return LEFT + 40 + room * (pool - pools[0]) / span, 16 + tall * (1 - height / ticks[-1])

    parts = []
    for tick in ticks:
        y = place(pools[0], tick)[1]
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{_GRID}"/>')
        parts.append(svg_text(LEFT - 8, y + 4, f"{tick:,.4g}", fill=_PALE, size=11, anchor="end"))
    parts += [
        svg_text(place(pool, 0)[0], PANEL + 18, f"{pool:,}", fill=_PALE, size=11, anchor="middle") for pool in pools
    ]
    if best is not None:
        y = place(pools[0], 100 * best)[1]
        line = f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{_OPTIMUM}"'
        parts.append(f'{line} stroke-dasharray="6 4"/>')
    for number, policy in enumerate(dict.fromkeys(each.policy for each in found)):
        colour = _COLOURS[number % len(_COLOURS)]
        points = [place(each.pool, value(each.result)) for each in found if each.policy == policy]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points]
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
