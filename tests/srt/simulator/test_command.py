"""The command umbel simulate: what it prints and writes, and what it refuses."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from umbel.interpreter.cli import main
from umbel.lang.errors import ParameterError
from umbel.srt.simulator.command import main as simulate_main
from umbel.srt.simulator.report import round_ticks
from umbel.srt.simulator.workload import Workload

SHAPE = "prefixes=4,prefix=50,own=5,requests=40"


@pytest.mark.parametrize("more", [[], ["--replicas", "3"], ["--replicas", "100", "--coarse"]])
def test_figures_are_printed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "svg", "html")}
    written = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    assert main(["simulate", SHAPE, "--pool", "5000", *more, *written]) == 0
    printed = capsys.readouterr().out
    assert "hit rate" in printed
    figures = json.loads(files["json"].read_text())
    assert figures["calls"] == 40
    assert len(figures["by_replica"]) == figures["replicas"]
    drawn = ElementTree.parse(files["svg"]).getroot()
    assert drawn.tag.endswith("svg")
    page = files["html"].read_text()
    assert "<svg" in page
    assert not any(word in page for word in ("<script", "src=", "@import", "href="))


def test_pools_and_policies_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "svg", "html")}
    written = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    shape = "prefixes=12,prefix=100,own=10,requests=120"
    options = ["--pool", "2000,700", "--policy", "lpm,fcfs", "--max-running", "4"]
    assert main(["simulate", shape, *options, *written]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:5]] == [[p, s] for p in ("lpm", "fcfs") for s in ("700", "2,000")]
    hits = {(each["policy"], each["pool"]): each["cached_tokens"] for each in json.loads(files["json"].read_text())}
    assert hits["lpm", 700] > hits["fcfs", 700]
    assert hits["fcfs", 2000] > hits["fcfs", 700]
    drawn = ElementTree.parse(files["svg"]).getroot()
    assert len(drawn.findall(".//{*}polyline")) == 6
    assert "<svg" in files["html"].read_text()


@pytest.mark.parametrize(
    ("most", "ticks"),
    [
        (78_200, [0, 20_000, 40_000, 60_000, 80_000]),
        (163_240, [0, 50_000, 100_000, 150_000, 200_000]),
        (5, [0, 1, 2, 3, 4, 5]),
        (0.5, [0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        (25.3, [0, 10, 20, 30]),
    ],
)
def test_axes_have_round_numbers(most: float, ticks: list[float]) -> None:
    assert round_ticks(most) == pytest.approx(ticks)


def test_a_step_model_is_measured_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = tmp_path / "steps.json"
    assert simulate_main(["--measure", "oracle", "--steps", str(steps)]) == 0
    assert "median error" in capsys.readouterr().out
    assert simulate_main([SHAPE, "--steps", str(steps)]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to simulate"),
        (["missing.jsonl"], "cannot be read"),
        (["missing.jsonl", "--check"], "is no recording"),
        ([SHAPE, "--replicas", "0"], "write 1 to"),
        ([SHAPE, "--replicas", "65"], "write --coarse for more"),
        ([SHAPE, "--pool", "1"], "--pool 1; write 2 to 1,000,000,000"),
        ([SHAPE, "--pool", "100000000000000000"], "write 2 to 1,000,000,000"),
        ([SHAPE, "--arrivals", "now"], "write all, poisson:60"),
        ([SHAPE, "--tiers", "host"], "write some of host=TOKENS"),
        ([SHAPE, "--arrivals", "poisson:1e-320"], "--arrivals 'poisson:1e-320'; write all"),
        ([SHAPE, "--arrivals", "poisson:inf"], "write all, poisson:60"),
        ([SHAPE, "--arrivals", "clients:1000000000000"], "clients:8 (up to 1,000,000)"),
        ([SHAPE, "--arrivals", "poisson:1", "--seed", "-1"], "--seed -1; write 0 or more"),
        ([SHAPE, "--seed", "5"], "write --arrivals poisson:RATE with it, or seed=5 in the shape"),
        ([SHAPE, "--tiers", "host=1000@nan"], "tokens a second, is optional and 1 or more"),
        ([SHAPE, "--tiers", "host=1000@1e-320"], "1 or more"),
        ([f"{SHAPE},seed=-1"], "'seed=-1' in"),
        ([f"{SHAPE},seed=-1"], "write 0 or more"),
        ([f"{SHAPE},output=-1"], "write 0 or more"),
        ([f"{SHAPE},skew=-1"], "write 0 to 30"),
        ([f"{SHAPE},skew=nan"], "write 0 to 30"),
        ([f"{SHAPE},own=0"], "write 1 or more"),
        ([SHAPE, "--first", "3"], "a shape has none; write requests=3 in it"),
        ([SHAPE, "--first", "0"], "--first 0; write 1 or more"),
        ([SHAPE, "--first", "-1"], "--first -1; write 1 or more"),
        ([SHAPE, "--model", "nosuchmodel"], "a shape has none; leave it out"),
        ([SHAPE, "--steps", "missing.json"], "holds no step model"),
        ([SHAPE, "--steps", ""], "--steps=''; write a path"),
        ([SHAPE, "--json", ""], "--json=''; write a path"),
        ([SHAPE, "--svg", ""], "--svg=''; write a path"),
        ([SHAPE, "--measure", "oracle"], f"the workload '{SHAPE}' does nothing with --measure"),
        (["--fit", "r.jsonl", "--steps", "steps.json", "--svg", "x.svg"], "--svg does nothing with --fit"),
        (["--fit", "r.jsonl", "--measure", "oracle"], "--fit does nothing with --measure"),
        (["--fit", "r.jsonl", "--steps", "r.jsonl"], "--steps 'r.jsonl' would overwrite the file of --fit"),
        (["--measure", "oracle", "--steps", "missing/steps.json"], "missing is no folder"),
        (["--measure", "oracle"], "write --steps FILE"),
        ([SHAPE, "--json", "missing/out.json"], "missing is no folder"),
        ([SHAPE, "--pool", "20"], "failed"),
        ([SHAPE, "--pool", "many"], "write a number of tokens, or several"),
        ([SHAPE, "--policy", "lru"], "write lpm or fcfs, or lpm,fcfs"),
        ([SHAPE, "--policy", "round-robin"], "--placement round-robin places calls on replicas"),
        ([SHAPE, "--policy", "fcfs", "--coarse"], "leave --policy out"),
    ],
)
def test_mistakes_say_what_to_write(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--svg", "--html", "--pool", "--replicas", "--first", "--policy", "--placement"])
def test_a_check_refuses_what_it_would_ignore(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = {"--policy": "fcfs", "--placement": "random"}.get(option, "5")
    assert main(["simulate", "r.jsonl", "--check", option, value]) == 2
    assert f"{option} does nothing with --check; leave one of them out" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--svg", "--html"])
@pytest.mark.parametrize("link", ["same", "hard", "symbolic"])
def test_no_input_is_overwritten(tmp_path: Path, option: str, link: str, capsys: pytest.CaptureFixture[str]) -> None:
    workload = tmp_path / "run.jsonl"
    workload.write_text("paid")
    other = workload if link == "same" else tmp_path / "other"
    if link == "hard":
        other.hardlink_to(workload)
    elif link == "symbolic":
        other.symlink_to(workload)
    assert main(["simulate", str(workload), option, str(other)]) == 2
    assert f"{option} {str(other)!r} would overwrite the file of the workload" in capsys.readouterr().err
    assert workload.read_text() == "paid"
    assert main(["simulate", SHAPE, "--steps", str(workload), option, str(other)]) == 2
    assert "would overwrite the file of --steps" in capsys.readouterr().err


def test_two_outputs_are_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "out", tmp_path / "." / "in" / ".." / "out"
    (tmp_path / "in").mkdir()
    assert main(["simulate", SHAPE, "--json", str(one), "--svg", str(other)]) == 2
    assert "would overwrite the file of --json" in capsys.readouterr().err
    assert not one.exists()


def test_the_first_programs_are_one_or_more() -> None:
    with pytest.raises(ParameterError, match="the first -1 programs; write 1 or more"):
        Workload("w", "", "", (), serial=False).first(-1)
