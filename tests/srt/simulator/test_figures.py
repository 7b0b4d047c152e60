"""The figures of a simulation and their pictures: what was not measured, the first arrival, odd names, near pools."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from umbel.interpreter.cli import main
from umbel.srt.simulator.arrivals import Poisson
from umbel.srt.simulator.command import Plan, open_scenario, simulate
from umbel.srt.simulator.comparison import Compared, draw_compared
from umbel.srt.simulator.report import svg_text

HEAD = {"n_programs": 2, "about": "", "licence": ""}
SELECT = [{"op": "text", "text": "Is it good? "}, {"op": "select", "name": "it", "choices": ["yes", "no"]}]


def write_selects(path: Path) -> Path:
    """Writes a workload that generates nothing."""
    lines = [HEAD, *({"id": number, "ops": SELECT} for number in range(2))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_what_no_call_has_is_no_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, figures = write_selects(tmp_path / "selects.jsonl"), tmp_path / "figures.json"
    assert main(["simulate", str(path), "--model", "oracle", "--json", str(figures)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-3:] for line in lines if line.startswith(("waiting", "time to"))] == [
        ["of", "no", "generation"]
    ] * 2
    found = json.loads(figures.read_text())
    assert (found["waiting"], found["first_token"]) == (None, None)
    assert found["call"]["mean"] > 0


def test_a_comparison_without_generations_has_no_waiting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = write_selects(tmp_path / "selects.jsonl"), tmp_path / "out.svg"
    assert main(["simulate", str(path), "--model", "oracle", "--pool", "2000,3000", "--svg", str(picture)]) == 0
    assert capsys.readouterr().out.count("none         none") == 2
    drawn = ElementTree.parse(picture).getroot()
    assert "of no generation" in drawn.itertext()
    assert len(drawn.findall(".//{*}polyline")) == 2  # hit rate and throughput


@pytest.mark.parametrize("coarse", [False, True])
def test_seconds_begin_with_the_first_arrival(coarse: bool) -> None:
    scenario = open_scenario("prefixes=1,requests=1", Poisson(0.001))
    result, measurements = simulate(scenario, Plan(coarse=coarse))
    assert result.call is not None
    assert result.seconds == pytest.approx(result.call.mean)
    assert result.calls_per_second == pytest.approx(1 / result.call.mean)
    assert result.by_replica[0].busy == pytest.approx(1, abs=0.01)
    times, loads = measurements.loads(10)
    assert (times[0], times[-1]) == (0, pytest.approx(result.seconds))
    assert loads.tolist() == [[1] * 9 + [0]]


def test_one_call_is_called_so(tmp_path: Path) -> None:
    picture = tmp_path / "out.svg"
    assert main(["simulate", "prefixes=1,prefix=9,requests=1", "--svg", str(picture)]) == 0
    assert "replica 0: 1 call<" in picture.read_text()
    assert "black: 1 call<" in picture.read_text()


@pytest.mark.parametrize("text", ["a\x01b", "a\x1fb", "a\udcffb", "a\uffffb"])
def test_what_xml_cannot_hold_is_replaced(text: str) -> None:
    written = svg_text(0, 0, text)
    assert ElementTree.fromstring(written.encode()).text == "a\ufffdb"


@pytest.mark.parametrize("more", [[], ["--pool", "2000,3000"]])
@pytest.mark.parametrize("name", ["a\x01<b>.jsonl", "a\udcff<b>.jsonl"])
def test_a_workload_of_any_name_is_drawn(tmp_path: Path, name: str, more: list[str]) -> None:
    path = write_selects(tmp_path / name)
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "svg", "html")}
    written = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    assert main(["simulate", str(path), "--model", "oracle", *more, *written]) == 0
    assert "a\ufffd<b>.jsonl" in ElementTree.parse(files["svg"]).getroot().itertext()
    assert "a\ufffd&lt;b&gt;.jsonl" in files["html"].read_text(encoding="utf-8")


def test_labels_of_near_pools_are_left_out() -> None:
    result, _ = simulate(open_scenario("prefixes=1,prefix=9,requests=1"), Plan())
    pools = [1_500, 1_600, 1_700, 30_000, 30_500]
    drawn = draw_compared([Compared("lpm", pool, result) for pool in pools], "pools")
    assert re.findall(r">([\d,]{5,})<", drawn) == ["1,500", "30,000"] * 3
    assert drawn.count("<circle") == 15


def test_a_replica_without_calls_has_no_hit_rate(tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    arguments = ["simulate", "prefixes=1,prefix=9,requests=1", "--replicas", "2", "--html", str(page)]
    assert main(arguments) == 0
    assert page.read_text().count("<td>none</td>") == 1
