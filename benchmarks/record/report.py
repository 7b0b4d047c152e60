"""The report as Markdown: what was found, with its spread, and what could not be run."""

from collections.abc import Callable, Iterable, Sequence

from ..configuration import FULL
from ..measure import Measurement
from ..replay.validity import Validity
from .results import Results, Spread

Cell = Callable[[str, str], str]  # workload, system → text


def markdown(results: Results) -> str:
    sections = [_machine(results)]
    if results.measurements:
        sections.append(_full(results))
        sections.append(_ratios(results, "Programs per second against `full`", lambda m: m.rate))
        sections.append(_ratios(results, "Latency, one program at a time, against `full`", lambda m: m.latency))
        sections.append(_absolute(results))
        sections.append(_constrained(results))
    if results.figures:
        sections.append(_figures(results))
    if results.sweep:
        sections.append(_sweep(results))
    sections.append(_left_out(results))
    return "\n\n".join(section for section in sections if section) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _machine(results: Results) -> str:
    machine = results.machine
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    settings = ", ".join(f"{name} {value}" for name, value in results.settings.items() if value is not None)
    return (
        f"# Benchmark of {machine.date[:10]}\n\n"
        f"{machine.processor}, {machine.cores} cores ({', '.join(machine.instructions)}), {machine.memory_gib} GiB, "
        f"{machine.system}; Python {machine.python}, umbel {machine.umbel} at {machine.commit}, {packages}.\n\n"
        f"Settings: {settings}.\n\n"
        "Each run: cache emptied, the first programs one at a time (latency), then the whole file with so many in "
        "flight (programs/s). Figures are medians of runs in turn; brackets hold the smallest and the largest."
    )


def _full(results: Results) -> str:
    rows = []
    for workload in results.workloads:
        runs = results.of(workload, FULL.name)
        if not runs:
            continue
        achieved = Spread.of(run.reuse.achieved for run in runs if run.reuse)
        optimal = Spread.of(run.reuse.optimal for run in runs if run.reuse)
        reached = Spread.of(run.reuse.achieved / run.reuse.optimal for run in runs if run.reuse and run.reuse.optimal)
        rows.append(
            [
                workload,
                str(runs[0].programs),
                str(len(runs)),
                _text(Spread.of(run.rate for run in runs)),
                _text(Spread.of(run.latency for run in runs)),
                f"{_percent(achieved)} / {_percent(optimal)}",
                _percent(reached),
                _percent(_share(runs, "tree_seconds"), digits=2),
                _percent(_share(runs, "forward_seconds")),
                _percent(Spread.of(share for run in runs if (share := _shared_keys(run)) is not None)),
                f"{max(run.resident_bytes for run in runs) / 2**30:.2f}",
                _failures(runs),
            ]
        )
    head = [
        "workload",
        "programs",
        "runs",
        "programs/s",
        "latency, s",
        "hit rate / optimal",
        "of optimal",
        "tree",
        "forward",
    ]
    note = (
        "`tree` and `forward`: share of the time of the batch phase. `keys shared`: reads of keys that tree attention "
        "saved. GiB: all processes of the runtime."
    )
    shares = [
        run.reuse.achieved / run.reuse.optimal
        for workload in results.workloads
        for run in results.of(workload, FULL.name)
        if run.reuse and run.reuse.optimal > 0.01
    ]
    if shares:
        note += f" Mean of `of optimal`, where there is anything to reuse: {sum(shares) / len(shares):.1%}."
    return "## All optimisations\n\n" + _table([*head, "keys shared", "GiB", "failed"], rows) + "\n\n" + note


def _ratios(results: Results, title: str, quantity: Callable[[Measurement], float]) -> str:
    others = [system for system in results.systems if system != FULL.name]
    if not others:
        return ""
    rows = [
        [workload, *(_text(results.against(workload, other, FULL.name, quantity), digits=2) for other in others)]
        for workload in results.workloads
    ]
    legend = "; ".join(f"`{name}`: {results.about[name]}" for name in others if name in results.about)
    return f"## {title}\n\n" + _table(["workload", *others], rows) + f"\n\n{legend}."


def _absolute(results: Results) -> str:
    if len(results.systems) < 2:
        return ""
    rows = []
    for workload in results.workloads:
        for system in results.systems:
            runs = results.of(workload, system)
            if runs:
                hits = Spread.of(run.reuse.achieved for run in runs if run.reuse)
                rows.append(
                    [
                        workload,
                        system,
                        _text(Spread.of(run.rate for run in runs)),
                        _text(Spread.of(run.latency for run in runs)),
                        _percent(hits),
                        f"{max(run.resident_bytes for run in runs) / 2**30:.2f}",
                        _failures(runs),
                    ]
                )
    head = ["workload", "system", "programs/s", "latency, s", "hit rate", "GiB", "failed"]
    return "## Every system\n\n" + _table(head, rows)


def _constrained(results: Results) -> str:
    """What became of constraints, for every system that was asked for any."""
    rows = []
    for workload in results.workloads:
        for system in results.systems:
            runs = results.of(workload, system)
            counts = [run.validity for run in runs if run.validity is not None]
            if counts:
                found = sum(counts, Validity())
                rows.append(
                    [
                        workload,
                        system,
                        f"{found.satisfied} of {found.total}",
                        str(found.cut),
                        str(found.broken),
                        _percent(Spread.of(share for run in runs if (share := _forced(run)) is not None)),
                    ]
                )
    if not rows:
        return ""
    head = ["workload", "system", "satisfied", "cut off", "broken", "tokens forced"]
    return "## Constrained values\n\n" + _table(head, rows)


def _figures(results: Results) -> str:
    rows = [
        [figure.name, figure.system, _text(Spread.of(figure.runs)), figure.unit, str(len(figure.runs))]
        for figure in results.figures
    ]
    return "## Small figures\n\n" + _table(["figure", "system", "median", "unit", "runs"], rows)


def _sweep(results: Results) -> str:
    rows = [
        [
            point.workload,
            f"{point.salted_share:.0%}",
            f"{point.hit_rate:.1%}",
            f"{point.batch_size:.1f}",
            f"{point.rate:.3g}",
            f"{1000 * point.first_token:.0f}",
            f"{1000 * point.call_seconds:.0f}",
        ]
        for point in results.sweep
    ]
    head = ["workload", "calls kept from the cache", "hit rate", "tokens per step", "programs/s"]
    return "## Cache hit rate\n\n" + _table([*head, "first token, ms", "call, ms"], rows)


def _left_out(results: Results) -> str:
    lines = [f"* workload `{name}`: {reason}" for name, reason in results.refused.items()]
    lines += [f"* `{name}`: {reason}" for name, reason in results.missing.items()]
    return "## Not run\n\n" + "\n".join(lines) if lines else ""


def _share(runs: Sequence[Measurement], counter: str) -> Spread | None:
    return Spread.of(share for run in runs if (share := run.share(counter)) is not None)


def _shared_keys(run: Measurement) -> float | None:
    read, saved = (run.counters.get(name, 0.0) for name in ("keys_read", "keys_saved"))
    return saved / (read + saved) if read else None


def _forced(run: Measurement) -> float | None:
    forced, constrained = (run.counters.get(name, 0.0) for name in ("forced_tokens", "constrained_tokens"))
    return forced / constrained if constrained else None


def _failures(runs: Sequence[Measurement]) -> str:
    failed = sum(len(run.failures) for run in runs)
    return str(failed) if failed else ""


def _text(spread: Spread | None, digits: int = 3) -> str:
    if spread is None:
        return "–"
    median, low, high = (f"{value:.{digits}f}" if digits == 2 else f"{value:.{digits}g}" for value in _parts(spread))
    return median if spread.low == spread.high else f"{median} [{low}–{high}]"


def _parts(spread: Spread) -> tuple[float, float, float]:
    return spread.median, spread.low, spread.high


def _percent(spread: Spread | None, digits: int = 1) -> str:
    return "–" if spread is None else f"{spread.median:.{digits}%}"
