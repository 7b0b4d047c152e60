"""A journal or a saved run, simulated, has the prompts and the cached tokens of the run."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter import loop
from umbel.interpreter.cli import main
from umbel.interpreter.traces.reading import read_trace
from umbel.lang.errors import JournalError, ParameterError
from umbel.lang.traces.calls import CallTrace, Written
from umbel.srt.in_process import LocalBackend
from umbel.srt.simulator.arrivals import ClosedLoop
from umbel.srt.simulator.command import Plan, open_scenario, simulate
from umbel.srt.simulator.measurements import Measurements, SimulationResult
from umbel.srt.tokenizer.tokenizer import ByteTokenizer
from umbel.testing import FakeOpenAI

SAME = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
TOPICS = [{"topic": topic} for topic in ("a cat", "a dog", "a cat", "the sea")]


@ul.function
def turns(s, topic):
    s += ul.system("You judge.") + ul.user("A tale of " + topic)
    s += ul.assistant(ul.gen("tale", max_tokens=9))
    s += ul.user("Is it good?") + ul.assistant("It is " + ul.select("good", ["good", "really bad"]))
    s += ul.user("Why?") + ul.assistant(ul.gen("why", max_tokens=12, temperature=0, stop="e"))


@ul.function
def branches(s, topic):
    s += "A tale of " + topic + ": " + ul.gen("tale", max_tokens=8)
    forks = s.fork(3)
    for number, fork in enumerate(forks):
        fork += f" Question {number}: " + ul.gen("answer", max_tokens=5 + number)
    s += " They say " + forks[0]["answer"] + " and " + forks[1]["answer"] + forks[2]["answer"]
    s += ul.gen("sum", max_tokens=6)


@contextmanager
def runtime() -> Iterator[LocalBackend]:
    backend = LocalBackend(seed=3)
    try:
        yield backend
    finally:
        loop.streams.run(backend.close(), 60.0)


def recorded(program: Any, path: Path, *, saved: bool = False) -> tuple[dict[str, Any], ul.Usage]:
    """Runs a batch with a journal, one program at a time, or saves one run. Returns the counters of the runtime, which
    has computed hints, and the usage of the calls."""
    with runtime() as backend:
        if saved:
            states = [program.run("a cat", backend=backend)]
            states[0].save(path)
        else:
            states = program.run_batch(TOPICS, backend=backend, journal=path, num_threads=1)
        info: Any = loop.streams.run(backend.control("info"), 60.0).result
    return dict(info), sum((state.cost.usage for state in states), ul.Usage())


def simulated(path: Path, model: str = "oracle") -> tuple[SimulationResult, Measurements, CallTrace]:
    trace = read_trace(path)
    assert trace is not None
    return *simulate(open_scenario(str(path), ClosedLoop(1), model=model, trace=trace), Plan()), trace


def test_a_journal_has_the_counters_of_the_runtime_where_one_program_runs_at_a_time(tmp_path: Path) -> None:
    info, _ = recorded(turns, tmp_path / "run.jsonl")
    _, measurements, trace = simulated(tmp_path / "run.jsonl")
    assert trace.notes == ()
    assert info["cached_tokens"] > 0
    assert {name: measurements.counters[name] for name in SAME} == {name: info[name] for name in SAME}


def test_a_saved_run_has_about_them(tmp_path: Path) -> None:
    info, _ = recorded(turns, tmp_path / "saved.jsonl", saved=True)
    _, measurements, trace = simulated(tmp_path / "saved.jsonl")
    assert trace.counts == "oracle"
    for name in ("requests", "completion_tokens"):
        assert measurements.counters[name] == info[name]
    for name in ("prompt_tokens", "cached_tokens"):  # bytes that are no UTF-8 are other tokens in its texts
        assert measurements.counters[name] == pytest.approx(info[name], rel=0.05)


@pytest.mark.parametrize("saved", [False, True])
def test_branches_have_the_prompts_and_about_the_hits_of_the_runtime(tmp_path: Path, saved: bool) -> None:
    path = tmp_path / "run.jsonl"
    _, usage = recorded(branches, path, saved=saved)
    result, measurements, trace = simulated(path)
    assert result.calls == sum(map(len, trace.programs)) == (5 if saved else 20)
    assert result.prompt_tokens == (pytest.approx(usage.prompt_tokens, rel=0.05) if saved else usage.prompt_tokens)
    assert result.answer_tokens == usage.completion_tokens
    assert measurements.found == pytest.approx(usage.cached_tokens, rel=0.1)
    assert any("forks announce no prefix" in note for note in trace.notes)
    for tale, *answers, sum_ in trace.programs:
        assert tale.after == ()
        assert {call.after for call in answers} == {(0,)}
        assert sum_.after == (0, 1, 2, 3)
        assert len({call.branch for call in answers}) == 1
        assert tale.branch == sum_.branch == ""
        assert all([piece for piece in call.prompt if isinstance(piece, int)] == [0] for call in answers)
        assert isinstance(sum_.prompt[-1], Written)


def test_programs_that_a_body_runs_belong_to_it(tmp_path: Path) -> None:
    @ul.function
    def around(s, topic):
        s += "First " + ul.gen("first", max_tokens=3)
        inner = turns.run(s["first"], backend=backend)
        inner = turns.run(inner["why"], backend=backend)
        s += "Then " + inner["why"] + ul.gen("last", max_tokens=3)

    path = tmp_path / "run.jsonl"
    with runtime() as backend:
        around.run_batch(TOPICS[:2], backend=backend, journal=path, num_threads=1)
    trace = read_trace(path)
    assert trace is not None
    assert [len(calls) for calls in trace.programs] == [8, 8]
    for calls in trace.programs:
        assert [call.after for call in calls] == [(), (0,), (1,), (2,), (0, 3), (4,), (5,), (0, 3, 6)]


def test_continuations_begin_together_and_constraints_are_said(tmp_path: Path) -> None:
    @ul.function
    def several(s, topic):
        s += topic + ul.gen("many", max_tokens=4, n=3) + ul.gen("digits", regex="[0-9]{3}")

    path = tmp_path / "run.jsonl"
    with runtime() as backend:
        several.run_batch(TOPICS[:1], backend=backend, journal=path)
    result, _, trace = simulated(path)
    [calls] = trace.programs
    assert [call.after for call in calls] == [(), (), (), (0, 1, 2)]
    assert all(call.sampled for call in calls)
    assert any("1 calls had constraints" in note for note in trace.notes)
    assert result.answer_tokens == 3 * 4 + 3


def test_a_providers_journal_is_counted_with_the_tokenizer_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    with FakeOpenAI(lambda text: "four words of answer") as server:
        backend = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)

        @ul.function
        def short(s, topic):
            s += ul.user("Tell of " + topic) + ul.assistant(ul.gen("tale", max_tokens=20))

        short.run_batch(TOPICS, backend=backend, journal=path)
    figures = tmp_path / "out.json"
    assert main(["simulate", str(path), "--model", "oracle", "--pool", "3000", "--json", str(figures)]) == 0
    found = json.loads(figures.read_text())
    assert found["calls"] == 4
    assert found["answer_tokens"] == 4 * len(ByteTokenizer().encode("four words of answer", first=False))
    assert "openai gpt-4o has answered the calls, and the tokens are those of oracle" in capsys.readouterr().err
    assert main(["simulate", str(path), "--model", "oracle", "--pool", "3000,6000", "--replicas", "2"]) == 0
    assert capsys.readouterr().err.count("openai gpt-4o has answered") == 1
    assert main(["simulate", str(path), "--model", "oracle", "--coarse", "--first", "3"]) == 0
    assert "calls                   3 in" in capsys.readouterr().out


def test_a_run_that_was_killed_has_its_calls_until_then(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(turns, path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], lines[5][:20]]))
    trace = read_trace(path)
    assert trace is not None
    assert [len(calls) for calls in trace.programs] == [2]
    assert trace.notes == (
        "the last line of the journal is torn, and left out",
        "1 of 1 programs had not ended: theirs are the calls until then",
    )


def test_files_that_cannot_be_used_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    recorded(turns, path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:4], *lines[5:]]))
    with pytest.raises(JournalError, match="line 5 was edited or damaged"):
        read_trace(path)
    path.write_bytes(lines[0])
    with pytest.raises(JournalError, match="has no call, so there is nothing to simulate"):
        read_trace(path)
    path.write_text('{"umbel_run":1,"backend":"local oracle"}\n{"op":0}\n')
    with pytest.raises(ParameterError, match="was edited"):
        read_trace(path)
    path.write_text('{"umbel_run":1,"backend":"local oracle"}\n')
    with pytest.raises(ParameterError, match="has no call"):
        read_trace(path)
    path.write_text('{"umbel_batch":1,"program":"check"}\n')
    assert main(["simulate", str(path)]) == 2
    assert (
        "is the view= file of a batch, which has no calls; write run_batch(..., journal=FILE)"
        in capsys.readouterr().err
    )
    path.write_text('{"something": "else"}\n')
    assert main(["simulate", str(path)]) == 2
    assert "as no recording, journal or saved run does either" in capsys.readouterr().err
    path.write_bytes(b"".join(lines))
    assert main(["simulate", str(path), "--check"]) == 2
    assert "is no recording; --check takes one" in capsys.readouterr().err
    assert main(["simulate", str(path), "--model", "no-such-model"]) == 2
    assert "ModelError" in capsys.readouterr().err
