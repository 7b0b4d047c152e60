"""Draws one second of a device as SVG: what ran, what the host did, and what each gap waited for.

    device  ▓▓▓▓▓▓▓▓▓ ▓▓▓▓▓▓▓▓▓░▓▓▓▓       steps, darker ones with prompts
    idle             █         █           gaps, in the colour of their cause
    host    ▒▒▒░░░▒▒▒▒▒▒░░░▒▒▒▒▒▒░░        phases

The second is cut into rows, or steps of a few milliseconds could not be told apart.
"""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TypeVar

from umbel.srt.scheduler.trace import HostPhase

from .gaps import Cause, Gap, Idle, Phase, Span, described

_Item = TypeVar("_Item", Span, Gap, Phase)
SECONDS = 1.0
_ROWS = 5
_WIDTH, _LEFT, _RIGHT, _TOP = 1200.0, 64.0, 40.0, 84.0  # pixels
_LANE, _ROW = 18.0, 96.0
_FONT = 'font-family="Helvetica, Arial, DejaVu Sans, sans-serif"'
_STEPS = {"texts": "#3f9b5c", "prompts": "#1b4f8a", "late choice": "#8fd0a4"}
_CAUSES = {
    Cause.PLAN: "#b8433e",
    Cause.MASK: "#7a62ab",
    Cause.RESULT: "#e0802f",
    Cause.ADMISSION: "#cf6fa8",
    Cause.PREFILL: "#8a6249",
    Cause.LOOP: "#a8a32f",
    Cause.PROGRAMS: "#c8ccd1",
}
_PHASES = {
    HostPhase.PLAN: "#b8433e",
    HostPhase.LAUNCH: "#d98883",
    HostPhase.PREFILL: "#8a6249",
    HostPhase.ADMIT: "#cf6fa8",
    HostPhase.COMMIT: "#e0802f",
    HostPhase.MASK: "#7a62ab",
    HostPhase.WAIT: "#eef0f2",
    HostPhase.BEGIN: "#a8a32f",
    HostPhase.END: "#a8a32f",
    HostPhase.OUTSIDE: "#d3d08b",
    HostPhase.RESTING: "#ffffff",
}


def timeline(title: str, idle: Idle, seconds: float = SECONDS) -> str:
    """Draws the second in the middle of a workload, or all of it where it is shorter."""
    begin = max(idle.begin, (idle.begin + idle.end - seconds) / 2)
    whole = min(seconds, idle.end - begin)
    height = _TOP + _ROWS * _ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:g}" height="{height:g}" '
        f'viewBox="0 0 {_WIDTH:g} {height:g}" {_FONT} font-size="11">',
        f'<rect width="{_WIDTH:g}" height="{height:g}" fill="#ffffff"/>',
        f'<text x="{_LEFT:g}" y="20" font-size="15">{escape(title)}: device busy {idle.busy:.1%}</text>',
        *_legend("steps", _STEPS.items(), 36),
        *_legend("idle for", ((str(cause), colour) for cause, colour in _CAUSES.items()), 54),
    ]
    for row in range(_ROWS):
        parts += _row(idle, begin + row * whole / _ROWS, whole / _ROWS, begin, _TOP + row * _ROW)
    return "\n".join([*parts, "</svg>", ""])


def _row(idle: Idle, begin: float, seconds: float, zero: float, top: float) -> Iterator[str]:
    scale = (_WIDTH - _LEFT - _RIGHT) / seconds

    def box(item: Span | Gap | Phase, lane: int, colour: str, hover: str) -> str:
        left, right = max(begin, item.begin), min(begin + seconds, item.end)
        x, width = _LEFT + (left - begin) * scale, max(0.4, (right - left) * scale)
        return (
            f'<rect x="{x:.2f}" y="{top + lane * (_LANE + 4):g}" width="{width:.2f}" height="{_LANE:g}" '
            f'fill="{colour}"><title>{escape(hover)}</title></rect>'
        )

    for lane, name in enumerate(("device", "idle", "host")):
        y = top + lane * (_LANE + 4) + 13
        yield f'<text x="{_LEFT - 8:g}" y="{y:g}" text-anchor="end" fill="#555555">{name}</text>'
    for span in _within(idle.spans, begin, seconds):
        kind = "late choice" if span.late else "prompts" if span.step.prompts else "texts"
        yield box(span, 0, _STEPS[kind], f"{(span.end - span.begin) * 1e3:.2f} ms: {described(span.step)}")
    for gap in _within(idle.gaps, begin, seconds):
        yield box(gap, 1, _CAUSES[gap.cause], f"{gap.seconds * 1e6:.0f} µs: {gap.cause}")
    for phase in _within(idle.phases, begin, seconds):
        if phase.phase is not HostPhase.RESTING:
            hover = f"{(phase.end - phase.begin) * 1e6:.0f} µs: {phase.phase.name.lower()}"
            yield box(phase, 2, _PHASES[phase.phase], hover)
    for mark in range(5):
        x = _LEFT + mark / 4 * (_WIDTH - _LEFT - _RIGHT)
        at = (begin - zero + mark / 4 * seconds) * 1e3
        yield (
            f'<text x="{x:g}" y="{top + 3 * (_LANE + 4) + 10:g}" text-anchor="middle" fill="#555555">{at:.1f} ms</text>'
        )


def _within(items: Sequence[_Item], begin: float, seconds: float) -> list[_Item]:
    return [item for item in items if item.end > begin and item.begin < begin + seconds]


def _legend(name: str, entries: Iterable[tuple[str, str]], y: float) -> Iterator[str]:
    yield f'<text x="{_LEFT - 8:g}" y="{y:g}" text-anchor="end" fill="#555555">{name}</text>'
    x = _LEFT
    for word, colour in entries:
        yield f'<rect x="{x:g}" y="{y - 9:g}" width="11" height="11" fill="{colour}"/>'
        yield f'<text x="{x + 15:g}" y="{y:g}">{escape(word)}</text>'
        x += 36 + 6.2 * len(word)
