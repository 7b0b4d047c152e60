"""Draws the plot of the first page: how many times as fast as other engines programs run on the same CPU.

It shows the record with the most workloads and pairs of runs among those with several peers: all of its workloads, and
their median. A mean would be lifted by a quarter by the one workload on which a peer scores choices without its cache.
Ratios are turned over: in the plots of a record umbel is 1, here the other engine is.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from ..configuration import FULL
from .plots import Bar, Bars, about, draw_bars, ratio_text, save, system_name, workload_name
from .results import Results, Spread, read

RECORD = "2026-11-22-xeon-amx-whole"
PEERS = ("vllm_cpu", "openvino_genai")
NAME = "speed.svg"


def write(results: Path, folder: Path) -> list[Path]:
    """Writes the plot of the record in `results` into `folder`, and returns its path in a list."""
    bars = hero_bars(read(results / RECORD / "results.json"), PEERS)
    folder.mkdir(parents=True, exist_ok=True)
    return [save(draw_bars(bars), folder / NAME, list(bars.facts()))]


def hero_bars(results: Results, peers: Sequence[str]) -> Bars:
    """Returns umbel's programs per second over those of each peer, the median first, then the largest gain first."""
    gains = {peer: {name: gain for name in results.workloads if (gain := _gain(results, name, peer))} for peer in peers}
    every = [name for name in results.workloads if all(name in gains[peer] for peer in peers)]
    order = sorted(every, key=lambda name: -median(gains[peer][name].spread.median for peer in peers))
    series = {}
    for peer in peers:
        middle = median([gains[peer][name].spread.median for name in order])
        overall = Bar(Spread(middle, middle, middle), None)
        series[system_name(peer, results)] = (overall, *(gains[peer][name] for name in order))
    middles = [ratio_text(bars[0].spread.median) for bars in series.values()]
    title = f"umbel runs {' to '.join(sorted(middles))} times as many programs per second"
    axis = "programs/s of umbel over those of the other engine on the same CPU, logarithmic axis"
    groups = (f"median of {len(order)} workloads", *map(workload_name, order))
    return Bars(title, about(results), axis, groups, series, stressed=1)


def _gain(results: Results, workload: str, peer: str) -> Bar | None:
    spread = results.against(workload, FULL.name, peer, lambda run: run.rate)
    runs = results.of(workload, peer)
    return Bar(spread, len(runs), any(run.failures for run in runs)) if spread else None
