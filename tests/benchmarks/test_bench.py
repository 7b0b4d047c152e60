"""The runner, the report and the plots, on the oracle."""

import itertools
import json
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
import umbel as ul
from umbel.lang.errors import ParameterError
from umbel.lang.prompt import Text as TextPart
from umbel.srt.in_process import LocalBackend
from umbel.srt.simulator.workload import Gen, Program, Text, Workload
from umbel.srt.tokenizer.prompt import PromptEncoder
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from benchmarks import bench as bench_module
from benchmarks import micro
from benchmarks.bench import Bench, Settings
from benchmarks.configuration import ALL, FULL, ON_CPU, Configuration, available, choose, option
from benchmarks.main import main, parser, settings
from benchmarks.measure import Measurement, Reuse, marked, measure
from benchmarks.micro import Figure, prompt_of
from benchmarks.peers.peer import PeerOptions
from benchmarks.record import plots
from benchmarks.record.machine import describe
from benchmarks.record.report import markdown
from benchmarks.record.results import Results, Spread, SweepPoint, read
from benchmarks.replay.validity import Validity
from benchmarks.sweep import sweep
from benchmarks.systems import PeerSystem, Umbel

from .conftest import BackendAsPeer

ENCODER = PromptEncoder(ByteTokenizer())
HEAD = "An example that all programs share. "
FILE = Workload(
    "toy",
    "about",
    "none",
    tuple(Program(f"p{n}", (Text(HEAD + f"Question {n}."), Gen("a", 4))) for n in range(6)),
    serial=False,
)


def measured(configuration: Configuration, **options: object) -> Measurement:
    backend = LocalBackend(seed=1, **configuration.runtime_options(options))
    return measure(Umbel(configuration, backend), FILE, encoder=ENCODER)


# --------------------------------------------------------------------------------------------- a run


def test_a_run_reuses_what_the_theorem_allows_and_without_a_cache_nothing() -> None:
    full, uncached = measured(FULL), measured(ALL["no-cache"])
    assert full.failures == uncached.failures == ()
    assert full.reuse is not None
    assert uncached.reuse is not None
    assert full.reuse.prompt == uncached.reuse.prompt == 6 * len(ENCODER.encode((TextPart(HEAD + "Question 0."),)))
    assert full.reuse.achieved == full.reuse.optimal > 0.75
    assert uncached.reuse.achieved == 0 < uncached.reuse.optimal
    assert len(full.latencies) == 3
    assert full.counters["completion_tokens"] == 6 * 4  # of the batch phase alone


def test_times_are_those_of_the_clock() -> None:
    ticks = itertools.count()
    system = Umbel(FULL, LocalBackend(seed=1))
    run = measure(system, FILE, warm=2, clock=lambda: float(next(ticks)))
    assert run.latencies == (1.0, 1.0)
    assert (run.seconds, run.rate, run.reuse) == (1.0, 6.0, None)


def test_a_failed_program_is_counted_with_its_reason() -> None:
    long = Program("long", (Text("x" * 9000), Gen("a", 4)))
    file = Workload("toy", "", "", (FILE.programs[0], long), serial=False)
    run = measure(Umbel(FULL, LocalBackend(seed=1)), file, encoder=ENCODER)
    assert len(run.failures) == 2  # alone, and in the batch
    assert all(failure.startswith("long: ContextLengthError") for failure in run.failures)


def test_constrained_values_are_counted() -> None:
    gens = (Gen("a", 8, regex="[a-z]{3}", ignore_eos=False), Gen("b", 9, json_schema={"type": "boolean"}))
    file = Workload("forms", "about", "none", (Program("p", (Text("x"), *gens)),), serial=False)
    run = measure(Umbel(FULL, LocalBackend(seed=1)), file)
    assert (run.failures, run.validity) == ((), Validity(satisfied=2))
    assert run.counters["constrained_tokens"] > 0


def test_a_peer_runs_the_same_programs() -> None:
    system = PeerSystem("peer", Weighed(LocalBackend(seed=1)))
    run = measure(system, FILE, encoder=ENCODER)
    system.close()
    assert run.failures == ()
    assert run.reuse is None
    assert run.resident_bytes == 7


class Weighed(BackendAsPeer):
    def resident_bytes(self) -> int:
        return 7


def test_a_marked_file_shares_nothing_with_its_other_repeats() -> None:
    texts = {
        program.ops[0].text + program.ops[1].text for mark in ("", "(1) ") for program in marked(FILE, mark).programs
    }
    assert len(texts) == 12


# ----------------------------------------------------------------------------------------- configurations


def test_configurations_that_this_version_cannot_run_are_named_with_the_reason() -> None:
    odd = Configuration("odd", "", {"no_such_option": 1})
    wrong = Configuration("wrong", "", {"policy": "backwards"})
    usable, missing = available([FULL, odd, wrong], {})
    assert usable == [FULL]
    assert "no_such_option" in missing["odd"]
    assert "backwards" in missing["wrong"]


def test_the_full_configuration_is_always_among_the_chosen() -> None:
    assert [c.name for c in choose(["fcfs"])] == ["full", "fcfs"]
    with pytest.raises(ParameterError, match="there are full"):
        choose(["fast"])


def test_options_are_read_with_their_types() -> None:
    assert [option(text) for text in ("a=1", "b=0.5", "c=true", "d=int8")] == [
        ("a", 1),
        ("b", 0.5),
        ("c", True),
        ("d", "int8"),
    ]
    with pytest.raises(ParameterError, match="NAME=VALUE"):
        option("a")


# --------------------------------------------------------------------------------------------- the sweep


def test_fewer_hits_mean_more_computed_tokens() -> None:
    points = sweep(LocalBackend(seed=1), FILE, ENCODER, shares=(0.0, 1.0))
    assert points[0].hit_rate > 0.75
    assert points[1].hit_rate == 0, "nothing is found, and nothing is computed for nobody"
    assert all(point.first_token <= point.call_seconds for point in points)


# -------------------------------------------------------------------------------------------- the report


def measurement(workload: str, system: str, turn: int, seconds: float, **fields: object) -> Measurement:
    given: dict[str, object] = {
        "programs": 10,
        "concurrency": 32,
        "latencies": (0.5, 1.5),
        "failures": (),
        "resident_bytes": 2**30,
        "reuse": Reuse(1000, 100, 90),
        "counters": {"tree_seconds": 0.01, "forward_seconds": 0.5, "keys_read": 3.0, "keys_saved": 1.0},
    }
    return Measurement(workload=workload, system=system, repeat=turn, seconds=seconds, **{**given, **fields})  # type: ignore[arg-type]


@pytest.fixture
def results() -> Results:
    results = Results(describe(), {"repeat": 2, "model": "default"})
    for turn, (full, other) in enumerate(((1.0, 2.0), (4.0, 5.0))):
        results.measurements += [measurement("toy", "full", turn, full), measurement("toy", "fcfs", turn, other)]
    results.figures.append(Figure("decode, batch 1", "full", "tokens/s", (30.0, 10.0, 20.0)))
    results.sweep += [SweepPoint("toy", share, 1 - share, 8.0, 3.0, 0.1, 0.2) for share in (0.0, 0.5, 1.0)]
    results.refused["json"] = "needs constraints: no"
    results.about["fcfs"] = "First come, first served"
    return results


def test_ratios_are_those_of_runs_in_the_same_turn(results: Results) -> None:
    assert results.against("toy", "fcfs", "full", lambda run: run.rate) == Spread(0.65, 0.5, 0.8)
    results.measurements = [run for run in results.measurements if (run.system, run.repeat) != ("full", 1)]
    assert results.against("toy", "fcfs", "full", lambda run: run.rate) == Spread(0.5, 0.5, 0.5)


def test_the_report_says_what_was_found_and_what_was_not_run(results: Results) -> None:
    text = markdown(results)
    assert "| toy | 10 | 2 | 6.25 [2.5–10] | 1 | 90.0% / 91.0% | 98.9% | 0.62% | 31.2% | 25.0% | 1.00 |  |" in text
    assert "| toy | 0.65 [0.50–0.80] |" in text
    assert "| decode, batch 1 | full | 20 [10–30] | tokens/s | 3 |" in text
    assert "* workload `json`: needs constraints: no" in text
    assert "`fcfs`: First come, first served" in text


def test_the_report_says_what_became_of_constraints(results: Results) -> None:
    assert "Constrained values" not in markdown(results)
    counters = {"forced_tokens": 30.0, "constrained_tokens": 100.0}
    for turn in range(2):
        results.measurements.append(
            measurement("json", "full", turn, 1.0, counters=counters, validity=Validity(8, 2, turn))
        )
    assert "| json | full | 16 of 21 | 4 | 1 | 30.0% |" in markdown(results)


def test_results_are_read_as_they_were_written(results: Results, tmp_path: Path) -> None:
    results.write(tmp_path / "a" / "results.json")
    assert read(tmp_path / "a" / "results.json") == results
    assert json.loads((tmp_path / "a" / "results.json").read_text())["machine"]["cores"] >= 1


def test_plots_are_well_formed_and_hold_their_figures(results: Results, tmp_path: Path) -> None:
    paths = {path.stem: path for path in plots.write(results, tmp_path)}
    assert set(paths) == {"ablations", "hit_rate"}  # no peer: nothing to compare throughput with
    said = {
        name: xml.etree.ElementTree.parse(path).findtext(".//{http://purl.org/dc/elements/1.1/}description")
        for name, path in paths.items()
    }
    assert said["ablations"] == "First come, first served, toy: 0.65 0.5 0.8"
    assert said["hit_rate"] is not None
    assert said["hit_rate"].splitlines()[0] == "Tokens per step: 8 8 8"


# --------------------------------------------------------------------------------------------- the command


@pytest.mark.processes
@pytest.mark.nightly
def test_the_whole_benchmark_on_the_oracle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "oracle", "--workload", "no_reuse", "--programs", "2"]
    arguments += ["--configurations", "no-cache", "no-parallelism", "--repeat", "1", "--no-figures"]
    assert main([*arguments, "--output", str(tmp_path)]) == 0
    found = read(tmp_path / "results.json")
    assert found.systems == ["full", "no-parallelism", "no-cache"]
    assert found.workloads == ["no_reuse"]
    assert all(run.resident_bytes > 0 for run in found.measurements)
    assert (tmp_path / "ablations.svg").is_file()
    assert "## All optimisations" in capsys.readouterr().out
    another = Settings(workloads=("no_reuse",), model="oracle", programs=1)
    with pytest.raises(ParameterError, match="--add: the settings"):
        Bench(another, tmp_path, lambda line: None, add=True)


def test_a_run_that_adds_goes_on_with_turns_of_its_own(tmp_path: Path, results: Results) -> None:
    same = Settings(workloads=(), model="oracle")
    bench = Bench(same, tmp_path, lambda line: None)
    bench.results.measurements += results.measurements
    bench.results.write(tmp_path / "results.json")
    added = Bench(same, tmp_path, lambda line: None, add=True)
    assert added.results.measurements == results.measurements
    assert next(added._turns) == 2


@pytest.mark.processes
@pytest.mark.nightly
def test_a_peer_meets_the_full_configuration_and_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Toy(Weighed):
        version = "1"
        running = False

        def start(self) -> None:
            self.running = True

        def stop(self) -> None:
            self.running = False

    toy = Toy(LocalBackend(seed=1))
    monkeypatch.setattr(bench_module, "create", lambda name, options: toy)
    options = PeerOptions(python=tmp_path, model=tmp_path)
    chosen = Settings(
        workloads=("no_reuse",), model="oracle", programs=2, repeat=2, micro=False, peers={"toy": options}
    )
    found = Bench(chosen, tmp_path, lambda line: None).run()
    assert not toy.running
    assert found.about["toy"] == "toy 1"
    spread = found.against("no_reuse", "toy", "full", lambda run: run.rate)
    assert spread is not None
    assert len(found.of("no_reuse", "toy")) == len(found.of("no_reuse", "full")) == 2
    marks = [prompt.startswith("(1) ") for prompt in toy.prompts]
    assert marks == [False] * 4 + [True] * 4  # its cache cannot be emptied between the repeats
    assert (tmp_path / "throughput.svg").is_file()


@pytest.mark.processes
def test_when_the_time_is_up_no_run_is_begun_and_what_was_left_out_is_said(tmp_path: Path) -> None:
    clock = iter([0.0, *(9.0 * n for n in range(1, 99))])  # each look at the clock is nine seconds later
    chosen = Settings(workloads=("no_reuse", "mmlu_5shot"), model="oracle", programs=1, micro=False, minutes=0.2)
    found = Bench(chosen, tmp_path, lambda line: None, clock=lambda: next(clock)).run()
    assert found.workloads == ["no_reuse"]
    assert found.missing == {"mmlu_5shot on full": "the time was up; write a larger --minutes"}


def test_wrong_options_say_what_to_write(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--workload", "nothing"], "no workload 'nothing'"),
        (["--repeat", "0"], "write a number of at least 1"),
        (["--peers", "vllm_cpu"], "--peer-python vllm_cpu=PATH"),
    ):
        assert main(arguments) == 1
        assert message in capsys.readouterr().err


@pytest.mark.processes
def test_python_m_benchmarks_is_the_command() -> None:
    command = [sys.executable, "-m", "benchmarks", "--workload", "nothing"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("benchmarks: ParameterError: ")
    assert "no workload 'nothing'" in done.stderr


def test_the_usual_run_has_every_ablation_and_full_every_file() -> None:
    usual = settings(parser().parse_args([]))
    assert {each.name for each in usual.configurations} == {each.name for each in ON_CPU} - {"torch-kernels"}
    assert usual.minutes == 9
    assert len(settings(parser().parse_args(["--full"])).workloads) == 16


def test_prompts_have_the_length_that_is_asked_for() -> None:
    for length in (32, 100):
        texts = [prompt_of(length, number, ENCODER) for number in range(3)]
        assert {len(ENCODER.encode((TextPart(text),))) for text in texts} == {length}
        assert len({text[:2] for text in texts}) == 3


def test_small_figures_are_positive_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro, "BATCHES", (1, 2))
    monkeypatch.setattr(micro, "NEW", 8)
    system = Umbel(FULL, LocalBackend(seed=1, debug={"check_every_step": False}))
    figures = micro.Micro(ENCODER, repeat=1).all_of(system)
    assert [figure.unit for figure in figures] == ["ms", "tokens/s", "tokens/s", "tokens/s"]
    assert all(len(figure.runs) == 1 and figure.median == figure.runs[0] for figure in figures)
    facts = system.counters()
    assert facts["completion_tokens"] == 1 + 1 + (1 + 2) * (1 + 8) + 1
    assert facts["cached_tokens"] < 40  # every prompt is new but for its first characters


def test_groups_hold_the_full_configuration_and_no_more_runtimes_than_asked(tmp_path: Path) -> None:
    bench = Bench(Settings(workloads=(), model="oracle", alive=2), tmp_path, lambda line: None)
    groups = list(bench._groups([FULL, ALL["no-cache"], ALL["no-parallelism"], ALL["fcfs"]]))
    assert [[c.name for c in group] for group in groups] == [["full", "no-parallelism", "no-cache"], ["full", "fcfs"]]
    assert ul.__version__ == bench.results.machine.umbel
