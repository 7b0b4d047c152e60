"""The plots of stored results: up to date, readable, and what the figures say."""

import functools
import html
import itertools
import re
import statistics
from pathlib import Path

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from benchmarks.record import __main__ as command
from benchmarks.record import hero, plots
from benchmarks.record.results import Spread, read

FOLDERS = command.stored()


def facts(path: Path) -> str:
    found = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, path
    return found[1]


def same(drawn: Path, stored: Path) -> None:
    """Compares bytes, and figures alone where another version of matplotlib drew the stored plot."""
    remedy = f"{stored.name} is not what its results say; run python -m benchmarks.record"
    if f"matplotlib {matplotlib.__version__}" in stored.read_text(encoding="utf-8"):
        assert drawn.read_bytes() == stored.read_bytes(), remedy
    assert facts(drawn) == facts(stored), remedy


@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
def test_the_stored_plots_hold_the_figures_of_the_stored_results(folder: Path) -> None:
    found = plots.bars_of(read(folder / "results.json"))
    assert set(found) == {path.stem for path in folder.glob("*.svg")}
    for name, bars in found.items():
        assert html.unescape(facts(folder / f"{name}.svg")) == "\n".join(bars.facts())


@pytest.mark.nightly
@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
def test_the_stored_plots_are_drawn_as_they_would_be_now(folder: Path, tmp_path: Path) -> None:
    for path in plots.write(read(folder / "results.json"), tmp_path):
        same(path, folder / path.name)


def test_the_plot_of_the_first_page_is_that_of_its_record(tmp_path: Path) -> None:
    for path in hero.write(command.RESULTS, tmp_path):
        same(path, command.ASSETS / path.name)


@functools.cache
def figures() -> dict[str, plots.Bars]:
    """Returns every plot of bars by the folder and the name of its file."""
    found = {
        f"{folder.name}/{name}": bars
        for folder in FOLDERS
        for name, bars in plots.bars_of(read(folder / "results.json")).items()
    }
    return found | {"hero": hero.hero_bars(read(command.RESULTS / hero.RECORD / "results.json"), hero.PEERS)}


# The most bars, the most series, the longest names, and one run of each.
DENSE = (
    "2026-11-22-xeon-amx-whole/throughput",
    "2026-11-21-xeon-amx-ablation/ablations",
    "2026-11-28-amd-epyc-llama-cpp/latency",
    "hero",
)


def texts(figure: Figure) -> dict[str, Bbox]:
    """Returns where every text stands, in pixels."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # places the legend
    renderer = canvas.get_renderer()
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return {f"{number} {text.get_text()}": text.get_window_extent(renderer) for number, text in enumerate(shown)}


@pytest.mark.parametrize("name", DENSE)
def test_no_text_of_a_plot_stands_on_another(name: str) -> None:
    boxes = texts(plots.draw_bars(figures()[name]))
    # Letters may touch by a pixel: a box is as tall as the tallest letter of the font.
    grown = {text: Bbox.from_extents(box.x0, box.y0 + 1, box.x1, box.y1 - 1) for text, box in boxes.items()}
    met = [
        (first, second)
        for (first, one), (second, other) in itertools.combinations(grown.items(), 2)
        if Bbox.intersection(one, other)
    ]
    assert met == []


def test_umbel_is_named_umbel_and_the_machine_and_the_model_are_named() -> None:
    for name, bars in figures().items():
        said = " ".join([bars.title, bars.axis, bars.about, *bars.series])
        assert "umbel" in said, name
        assert not re.search(r"\bfull\b|_", said), name
        assert re.match(r"Gemma 3 270M on .+, 2 cores, 20\d\d-\d\d-\d\d", bars.about), name


def test_bars_are_the_medians_of_pairs_and_whiskers_their_ends() -> None:
    bars = figures()["2026-11-22-xeon-amx-whole/throughput"]
    results = read(command.RESULTS / "2026-11-22-xeon-amx-whole" / "results.json")
    place = results.workloads.index("react_agent")
    bar = bars.series["vLLM 0.32.0"][place]
    spread = results.against("react_agent", "vllm_cpu", "full", lambda run: run.rate)
    assert bar is not None
    assert spread is not None
    assert bar.spread == spread
    assert spread.low < spread.median < spread.high
    axes = plots.draw_bars(bars).axes[0]
    ends = {
        round(line.get_xdata()[0], 6): round(line.get_xdata()[1], 6)
        for line in axes.lines
        if len(line.get_xdata()) == 2
    }
    assert ends[round(spread.low, 6)] == round(spread.high, 6)
    assert any(patch.get_x() + patch.get_width() == pytest.approx(spread.median) for patch in axes.patches)
    assert axes.get_xscale() == "log"


def test_a_record_of_single_runs_says_that_it_holds_no_spread() -> None:
    assert "no spread" in figures()["2026-11-28-amd-epyc-llama-cpp/throughput"].caption()
    assert "paired runs" in figures()["2026-11-22-xeon-amx-whole/throughput"].caption()


def test_the_plot_of_the_first_page_has_all_workloads_and_begins_with_their_median() -> None:
    bars = figures()["hero"]
    results = read(command.RESULTS / hero.RECORD / "results.json")
    assert bars.groups[0] == f"median of {len(results.workloads)} workloads"
    assert set(bars.groups[1:]) == {name.replace("_", " ") for name in results.workloads}
    for series in bars.series.values():
        middle, *rest = [bar.spread.median for bar in series if bar is not None]
        assert len(rest) == len(bars.groups) - 1
        assert middle == statistics.median(rest)
        assert plots.ratio_text(middle) in bars.title


@pytest.mark.parametrize(
    ("ratio", "text"), [(86.4, "86"), (3.14, "3.1"), (1.554, "1.55"), (0.38, "0.38"), (0.0117, "0.012")]
)
def test_ratios_are_written_with_two_or_three_digits(ratio: float, text: str) -> None:
    assert plots.Bar(Spread(ratio, ratio, ratio), 1).text == text


def test_a_folder_without_results_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path)]) == 2
    assert "holds no results.json; name a folder of results/" in capsys.readouterr().err
