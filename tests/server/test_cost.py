"""Records of what requests cost, and the fees that providers would have charged."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import msgspec
import pytest
import umbel as ul
from umbel.compiler.files import serialise
from umbel.compiler.running.plan import Plan
from umbel.interpreter import cli
from umbel.lang.caching import CachingUsage, MarkUsage
from umbel.lang.errors import ParameterError
from umbel.lang.programs import RunProgram, digest_of, pack_values
from umbel.lang.prompt import Text
from umbel.lang.protocol import ScoreRequest, Usage
from umbel.server.cost import Recorded, Recorder, read_records, recorded, report

from .client import served


def test_half_of_the_input_reused_costs_60_percent_and_half_read_55() -> None:
    run = Recorded(prompt=10_000, completion=10, reused=5_000, read=5_000)
    assert (run.implicit, run.explicit) == (pytest.approx(0.60), pytest.approx(0.55))


def test_the_first_creation_costs_more_than_no_cache() -> None:
    assert Recorded(10_000, 0, created=5_000).explicit == pytest.approx(1.125)
    assert Recorded(10_000, 0, created_for_an_hour=5_000).explicit == pytest.approx(1.5)


def test_a_prefix_that_is_read_and_grown_costs_a_third() -> None:
    """1,200 tokens are read, 300 created: 495 P where 1,500 P would be charged."""
    assert Recorded(1_500, 0, read=1_200, created=300).explicit == pytest.approx(495 / 1_500)


def test_marks_are_recorded_by_how_long_they_last() -> None:
    marks = CachingUsage(
        (MarkUsage(1_200, 1_200, 0, 300.0), MarkUsage(1_500, 0, 300, 300.0), MarkUsage(2_000, 0, 500, 3_600.0))
    )
    found = recorded(Usage(prompt_tokens=2_100, cached_tokens=1_201, completion_tokens=7).marked(marks))
    assert found == Recorded(2_100, 7, 1_201, 1_200, 300, 500)


def test_the_requests_of_a_server_are_recorded_without_their_text(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorder = Recorder(path)

    async def scenario() -> None:
        async with served(recorder=recorder) as client:
            for prompt in ("a secret", ["a secret", "another"]):
                body = {"model": "oracle", "prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
                assert (await client.post("/v1/completions", body)).status == 200

    asyncio.run(scenario())
    recorder.close()
    records = read_records(path)
    assert [record.completion for record in records] == [3, 3, 3]
    assert sum(record.reused for record in records) > 0
    assert "secret" not in path.read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_costs_no_answer_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with served(recorder=Recorder(Path("/dev/full"))) as client:
            for _ in range(2):
                answer = await client.post("/v1/completions", {"model": "oracle", "prompt": "a", "max_tokens": 3})
                assert answer.status == 200

    asyncio.run(scenario())
    said = [record.getMessage() for record in caplog.records if record.name == "umbel.server"]
    assert said == ["/dev/full has not all requests: No space left on device"]


def test_the_command_prints_the_formulas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(
        '{"prompt":6000,"completion":1,"reused":1000,"read":1000}\n{"prompt":4000,"completion":2,"reused":4000,"read":4000}\n'
    )
    assert cli.main(["cost", str(path), "--price", "2"]) == 0
    printed = capsys.readouterr().out
    assert "2 requests, 10,000 input tokens, 3 generated" in printed
    assert "implicit caching: (5,000 + 0.2 · 5,000) / 10,000 = 60.0 %" in printed
    assert "explicit caching: (5,000 + 0.1 · 5,000 + 1.25 · 0 + 2 · 0) / 10,000 = 55.0 %" in printed
    assert "$0.0200 without a cache, $0.0120 implicit, $0.0110 explicit" in printed


def test_a_file_that_is_no_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text('{"prompt":1,"completion":1}\n{"prompt":"a"}\n')
    with pytest.raises(ParameterError, match="line 2"):
        read_records(tmp_path / "x")
    assert cli.main(["cost", str(tmp_path / "missing")]) == 1
    assert "missing" in capsys.readouterr().err
    with pytest.raises(ParameterError, match="--record"):
        Recorder(tmp_path / "no" / "folder")
    assert report([]) == "no input tokens were recorded"


@pytest.mark.parametrize("ttl", [300.0, 3_600.0])
def test_the_points_of_a_program_are_recorded_whichever_way_it_is_asked(tmp_path: Path, ttl: float) -> None:
    @ul.function(temperature=0)
    def reads(s: ul.State, question: str) -> Any:
        s += "a manual " * 200 + ul.cache_point(ttl=ttl)
        s += question + ul.gen("a", max_tokens=2)
        return s["a"]

    path = tmp_path / "run.jsonl"
    recorder, graph = Recorder(path), serialise.encode(reads.trace())

    async def scenario() -> int:
        async with served(recorder=recorder) as client:
            await client.begin("PUT", "/v1/programs/reads?parameter=question", graph, {}).ended()
            first = await client.post("/v1/programs/reads/runs", {"arguments": {"question": "why?"}})
            for body in ({"arguments": {"question": "how?"}, "stream": True}, {"arguments": {"question": "who?"}}):
                assert (await client.post("/v1/programs/reads/runs", body)).status == 200
            asked = {"model": "reads", "messages": [{"role": "user", "content": "when?"}]}
            assert (await client.post("/v1/chat/completions", asked)).status == 200
            slots = len(Plan(reads.trace()).slots.bindings)
            run = RunProgram("r", digest_of(graph), slots, graph, pack_values({"question": "where?"}))
            message = base64.b64encode(msgspec.msgpack.encode(run)).decode()
            assert b"error" not in (await client.post("/runtime", {"message": message})).content
            return int(first.json["usage"]["cache_write_tokens"])

    kept = asyncio.run(scenario())
    recorder.close()
    first, *others = read_records(path)
    created = (0, kept) if ttl >= 3_600 else (kept, 0)
    assert (first.read, first.created, first.created_for_an_hour) == (0, *created)
    assert [(each.read, each.created, each.created_for_an_hour) for each in others] == [(kept, 0, 0)] * 4
    fee = "1.25" if ttl < 3_600 else "2"
    assert f"+ 0.1 · {4 * kept:,} " in report([first, *others])
    assert f"+ {fee} · {kept:,}" in report([first, *others])


def test_scores_are_recorded_too(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorder = Recorder(path)

    async def scenario() -> None:
        async with served(recorder=recorder) as client:
            scores = await client.post("/score", {"text": "one or", "choices": [" two", " three"]})
            assert scores.status == 200, scores.content
            question = ScoreRequest("s", (Text("one or"),), (" two",))
            message = base64.b64encode(msgspec.msgpack.encode(question)).decode()
            answer = await client.post("/runtime", {"message": message})
            assert answer.status == 200, answer.content

    asyncio.run(scenario())
    recorder.close()
    assert [record.prompt > 0 for record in read_records(path)] == [True, True]
