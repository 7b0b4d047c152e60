"""What a device waits for between steps: gaps of a trace (`srt/scheduler/trace.py`), by what the host did meanwhile.

    host     │ commit │ admit │ launch │ wait ............ │ commit │
    device   ══ step 1 ═]    (gap)      [═══ step 2 ════════]           of this gap: 1 result, 2 admission, 1 plan

The device's clock is laid on the host's by the step whose result the host had soonest after its end: no result is had
before it is there. A gap is shared out among causes by the time that the host spent in each phase, so that causes add
up to the time that the device was idle.
"""

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from umbel.srt.scheduler.trace import HostPhase, TracedStep

LEAST = 5e-6  # seconds; between two steps that were enqueued there are some
LONGEST = 10  # gaps that are listed


class Cause(StrEnum):
    """What the device waits for."""

    PLAN = "the host's plan"
    MASK = "a mask"
    RESULT = "the sampler's result"
    ADMISSION = "admission"
    PREFILL = "prefill scheduling"
    LOOP = "messages and counters"
    PROGRAMS = "nothing to do: programs"


_CAUSES = {
    HostPhase.RESTING: Cause.PROGRAMS,
    HostPhase.OUTSIDE: Cause.LOOP,
    HostPhase.BEGIN: Cause.LOOP,
    HostPhase.PLAN: Cause.PLAN,
    HostPhase.PREFILL: Cause.PREFILL,
    HostPhase.ADMIT: Cause.ADMISSION,
    HostPhase.LAUNCH: Cause.PLAN,
    HostPhase.WAIT: Cause.RESULT,
    HostPhase.COMMIT: Cause.RESULT,
    HostPhase.MASK: Cause.MASK,
    HostPhase.END: Cause.LOOP,
}
_WITH_MASKS = (HostPhase.PLAN, HostPhase.PREFILL, HostPhase.ADMIT, HostPhase.COMMIT)  # masks are made within them


@dataclass(frozen=True, slots=True)
class Span:
    """A time in which the device ran, on the host's clock. step: what it ran. late: the choice of late rows."""

    begin: float
    end: float
    step: TracedStep
    late: bool = False


@dataclass(frozen=True, slots=True)
class Phase:
    """A time in which the host did one thing."""

    begin: float
    end: float
    phase: HostPhase


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which the device was idle.

    Attributes:
        causes: seconds by cause; together they are the gap.
        step: that ran next.
    """

    begin: float
    end: float
    causes: Mapping[Cause, float]
    step: TracedStep

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def cause(self) -> Cause:
        """The one that took most of it."""
        return max(self.causes, key=lambda cause: self.causes[cause])


@dataclass(frozen=True, slots=True)
class Idle:
    """A workload on a device: its steps, and the gaps between them, in order.

    Attributes:
        begin, end: on the host's clock: the first step and the last.
        busy: the part of that time in which a step ran, from 0 to 1.
    """

    begin: float
    end: float
    busy: float
    spans: tuple[Span, ...]
    phases: tuple[Phase, ...]
    gaps: tuple[Gap, ...]

    @property
    def steps(self) -> int:
        return sum(not span.late for span in self.spans)

    def seconds_by_cause(self) -> dict[Cause, float]:
        """Idle seconds by cause, the most first."""
        sums = {cause: sum(gap.causes.get(cause, 0.0) for gap in self.gaps) for cause in Cause}
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def idle_of(
    marks: Sequence[tuple[HostPhase, float]],
    steps: Sequence[TracedStep],
    *,
    begin: float = float("-inf"),
    end: float = float("inf"),
) -> Idle | None:
    """Returns what the device did from `begin` to `end` on the host's clock; None where no step ran."""
    spans = [span for span in _spans(steps) if span.begin >= begin and span.end <= end]
    if not spans:
        return None
    first, last = spans[0].begin, spans[-1].end
    phases = [phase for phase in _phases(marks, last) if phase.end > first]
    shares = _mask_shares(steps, phases)
    starts = [phase.begin for phase in phases]
    gaps = []
    for before, after in pairwise(spans):
        if after.begin - before.end > LEAST:
            causes = _causes(before.end, after, phases, starts, shares)
            gaps.append(Gap(before.end, after.begin, causes, after.step))
    busy = sum(span.end - span.begin for span in spans) / max(last - first, 1e-9)
    return Idle(first, last, min(1.0, busy), tuple(spans), tuple(phases), tuple(gaps))


def described(step: TracedStep) -> str:
    """Returns what a step consists of, in words."""
    parts = [(step.texts, "texts"), (step.guesses, "guessed rows"), (step.late, "late rows")]
    words = [f"{count} {name}" for count, name in parts if count]
    if step.prompts:
        words.insert(1 if step.texts else 0, f"{step.prompts} rows of {step.prompt_sequences} prompts")
    return ", ".join(words)


# ------------------------------------------------------------------------------------------ how


def _spans(steps: Sequence[TracedStep]) -> Iterator[Span]:
    """Yields what the device ran, laid on the host's clock."""
    ends, at = [], 0.0
    for step in steps:
        if step.times is not None:
            at += sum(step.times)
            ends.append((at, step))
    offset = min((step.ended - end for end, step in ends), default=0.0)
    at = offset
    for step in steps:
        if step.times is None:
            yield Span(step.launched, step.ended, step)
            continue
        begin = at + step.times.idle
        forward_end = begin + step.times.forward
        yield Span(begin, forward_end, step)
        at = forward_end + step.times.waited + step.times.chosen
        if step.late:
            yield Span(at - step.times.chosen, at, step, late=True)


def _phases(marks: Sequence[tuple[HostPhase, float]], last: float) -> Iterator[Phase]:
    for (phase, begin), (_, end) in zip(marks, [*marks[1:], (HostPhase.RESTING, last)], strict=True):
        if end > begin:
            yield Phase(begin, end, phase)


def _mask_shares(steps: Sequence[TracedStep], phases: Sequence[Phase]) -> list[tuple[float, float]]:
    """Returns (until, share): of the phases that make masks, up to that time, the part that these took.

    A step knows the seconds of all masks since the one before. Those of the phase MASK are it as a whole.
    """
    shares, place = [], 0
    for step in steps:
        inside, alone = 0.0, 0.0
        while place < len(phases) and phases[place].begin < step.ended:
            one = phases[place]
            inside += one.end - one.begin if one.phase in _WITH_MASKS else 0.0
            alone += one.end - one.begin if one.phase is HostPhase.MASK else 0.0
            place += 1
        masks = max(0.0, step.mask - alone)
        shares.append((step.ended, min(1.0, masks / inside) if inside else 0.0))
    return shares


def _causes(
    begin: float,
    after: Span,
    phases: Sequence[Phase],
    starts: Sequence[float],
    shares: Sequence[tuple[float, float]],
) -> dict[Cause, float]:
    end = after.begin
    found: dict[Cause, float] = {}
    if after.late:  # its forward pass is done, and it waits for nothing else
        return {Cause.MASK: end - begin}
    covered = 0.0
    for place in range(max(0, bisect_right(starts, begin) - 1), len(phases)):
        one = phases[place]
        if one.begin >= end:
            break
        seconds = min(end, one.end) - max(begin, one.begin)
        if seconds <= 0:
            continue
        covered += seconds
        masks = 0.0
        if one.phase in _WITH_MASKS and shares:
            at = bisect_right(shares, (one.begin, 2.0))
            masks = seconds * shares[min(at, len(shares) - 1)][1]
            found[Cause.MASK] = found.get(Cause.MASK, 0.0) + masks
        cause = _CAUSES[one.phase]
        found[cause] = found.get(cause, 0.0) + seconds - masks
    rest = end - begin - covered
    if rest > 0:  # before the first mark
        found[Cause.LOOP] = found.get(Cause.LOOP, 0.0) + rest
    return {cause: seconds for cause, seconds in found.items() if seconds > 0}


# ------------------------------------------------------------------------------------------ the page


def page(title: str, workloads: Mapping[str, Idle]) -> str:
    """Returns the tables of all workloads as Markdown."""
    lines = [f"# What the device waits for: {title}", "", *_overview(workloads)]
    for name, idle in workloads.items():
        lines += ["", f"## {name}", "", *_by_cause(idle), "", *_longest(idle)]
    return "\n".join([*lines, ""])


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _overview(workloads: Mapping[str, Idle]) -> Iterator[str]:
    yield "| workload | seconds | steps | device busy | gaps | p50, µs | p99, µs | idle by cause |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    for name, idle in workloads.items():
        gaps = [gap.seconds for gap in idle.gaps]
        middle = statistics.median(gaps) if gaps else 0.0
        whole = idle.end - idle.begin
        causes = [f"{cause} {seconds / whole:.1%}" for cause, seconds in idle.seconds_by_cause().items() if seconds]
        yield (
            f"| {name} | {whole:.2f} | {idle.steps} | {idle.busy:.1%} | {len(gaps)} | {middle * 1e6:.0f} | "
            f"{quantile(gaps, 0.99) * 1e6:.0f} | {', '.join(causes)} |"
        )


def _by_cause(idle: Idle) -> Iterator[str]:
    yield "| gaps mostly for | count | idle, ms | of the time | p50, µs | p99, µs |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for cause, seconds in idle.seconds_by_cause().items():
        gaps = [gap.seconds for gap in idle.gaps if gap.cause is cause]
        if not seconds:
            continue
        share = seconds / (idle.end - idle.begin)
        yield (
            f"| {cause} | {len(gaps)} | {seconds * 1e3:.2f} | {share:.1%} | {quantile(gaps, 0.5) * 1e6:.0f} | "
            f"{quantile(gaps, 0.99) * 1e6:.0f} |"
        )


def _longest(idle: Idle) -> Iterator[str]:
    yield "| longest gaps, µs | at, ms | by cause | the next step |"
    yield "| ---: | ---: | --- | --- |"
    for gap in sorted(idle.gaps, key=lambda gap: -gap.seconds)[:LONGEST]:
        parts: Iterable[tuple[Cause, float]] = sorted(gap.causes.items(), key=lambda item: -item[1])
        causes = ", ".join(f"{cause} {seconds * 1e6:.0f}" for cause, seconds in parts if seconds >= LEAST)
        at = (gap.begin - idle.begin) * 1e3
        yield f"| {gap.seconds * 1e6:.0f} | {at:.1f} | {causes} | {described(gap.step)} |"
