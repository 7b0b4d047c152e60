"""A recording of a real runtime, simulated exactly, has the counters of that runtime."""

import asyncio
import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from umbel.interpreter.cli import main
from umbel.lang.errors import ParameterError
from umbel.lang.prompt import Generated, Text
from umbel.lang.protocol import ConstraintSpec, GenRequest, Hint, Origin, ScoreRequest
from umbel.lang.sampling import SamplingParams
from umbel.srt.in_process import LocalBackend
from umbel.srt.scheduler import scheduler
from umbel.srt.scheduler.guesses import Guesser, HistorySource, PromptSource
from umbel.srt.simulator.answers import MadeUpTokens, NumberTokenizer
from umbel.srt.simulator.command import MOST_ERROR, Plan, check, open_scenario, simulate
from umbel.srt.simulator.events import Events
from umbel.srt.simulator.exact import ExactSimulation
from umbel.srt.simulator.measurements import Measurements
from umbel.srt.simulator.recorded import RecordingPlayer, is_recording, read_recording
from umbel.srt.simulator.step_model import DEFAULT_STEPS, read_steps, write_step_model
from umbel.srt.simulator.tiers import parse_tiers
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from ..guessing import Free

SAME = ("requests", "prompt_tokens", "cached_tokens", "computed_prompt_tokens", "completion_tokens", "finished")
STEPS = ("steps", "forward_rows", "evicted_tokens")
GUESSES = ("guessed_prompt_rows", "accepted_prompt_rows", "guessed_history_rows", "accepted_history_rows")
SECRET = "a private sentence"


async def conversation(backend: LocalBackend, number: int, question: int) -> None:
    """Shots, a hint, two branches, a choice, and a second turn on the first one's answer."""
    origin = Origin(program_id=f"p{number}", fork_group=f"g{number}", salt="eve" if number % 3 == 0 else "")
    shots = (Text(f"{SECRET} and some more of it. " * 4), Text(f"question {question}: "))
    backend.hint(Hint(f"h{number}", shots, origin))

    async def generate(name: str, prompt: tuple[Text | Generated, ...], length: int, heat: float) -> Generated:
        sampling = SamplingParams(max_tokens=length, temperature=heat, ignore_eos=True)
        request = GenRequest(f"{name}{number}", prompt, sampling, stream=number % 2 == 0, origin=origin)
        final = [event async for event in backend.generate(request)][-1]
        completion = final.completions[0]  # type: ignore[union-attr]  # the last event is a Final
        return Generated(completion.text, completion.token_ids)

    first, _ = await asyncio.gather(generate("a", shots, 9, 0.0), generate("b", (*shots, Text("why? ")), 5, 1.0))
    await backend.score(ScoreRequest(f"s{number}", shots, ("yes", "yes, but", "no"), origin=origin))
    await generate("c", (*shots, first, Text(" and then? ")), 6, 0.0)


def record(path: Path, *, together: int, pool: int, host: int | None = None, different: int = 12) -> dict[str, object]:
    """Records 12 conversations, of which so many are different."""

    async def work() -> dict[str, object]:
        backend = LocalBackend(pool_tokens=pool, host_cache=host, debug={"recording": str(path)})
        await backend.start()
        for first in range(0, 12, together):
            await asyncio.gather(
                *(conversation(backend, number, number % different) for number in range(first, first + together))
            )
        info = (await backend.control("info")).result
        await backend.close()
        return dict(info)

    return asyncio.run(work())


def replayed(path: Path, tiers: str = "") -> dict[str, float]:
    recording = read_recording(path)
    assert recording.skipped == 0
    events, measurements, tokenizer = Events(), Measurements(1), NumberTokenizer()
    host = ExactSimulation(
        events,
        tokenizer,
        MadeUpTokens(),
        DEFAULT_STEPS,
        recording.settings,
        measurements,
        tiers=parse_tiers(tiers),
    )
    RecordingPlayer(recording, tokenizer, events, host).begin()
    events.run()
    host.finish()
    return measurements.counters


@pytest.mark.parametrize("together", [1, 4, 12])
def test_the_counters_are_those_of_the_runtime(tmp_path: Path, together: int) -> None:
    info = record(tmp_path / "r.jsonl", together=together, pool=20_000)
    counters = replayed(tmp_path / "r.jsonl")
    names = (*SAME, *STEPS)
    assert {name: counters[name] for name in names} == {name: info[name] for name in names}


@pytest.mark.parametrize("together", [1, 6])
def test_they_are_the_same_where_next_tokens_were_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    sources = [PromptSource(), HistorySource()]
    monkeypatch.setattr(scheduler, "make_guesser", lambda _, runner: Guesser(sources, Free, runner.vocab_size))
    info = record(tmp_path / "r.jsonl", together=together, pool=20_000, different=2)
    counters = replayed(tmp_path / "r.jsonl")
    names = (*SAME, *STEPS, *GUESSES)
    assert counters["accepted_history_rows"] > 0
    assert counters["guessed_history_rows"] > counters["accepted_history_rows"]
    assert counters["steps"] < counters["completion_tokens"]
    assert {name: counters[name] for name in names} == {name: info[name] for name in names}


def test_they_are_the_same_where_constraints_force_tokens_in_and_at_the_end_of_a_text(tmp_path: Path) -> None:
    async def work() -> dict[str, object]:
        backend = LocalBackend(debug={"recording": str(tmp_path / "r.jsonl")})
        await backend.start()
        verdict = ConstraintSpec("regex", "[a-c]{2} because it is so; [x-z] and that is all[.]")

        async def judge(number: int) -> None:
            parts: tuple[Text | Generated, ...] = (Text(f"{number % 3}: the verdict is 9"),)
            for turn in range(2):
                request = GenRequest(f"{number}.{turn}", parts, SamplingParams(max_tokens=60), constraint=verdict)
                final = [event async for event in backend.generate(request)][-1]
                completion = final.completions[0]  # type: ignore[union-attr]  # the last event is a Final
                parts = (*parts, Generated(completion.text, completion.token_ids), Text(" Then: 9"))

        await asyncio.gather(*(judge(number) for number in range(6)))
        info = (await backend.control("info")).result
        await backend.close()
        return dict(info)

    info = asyncio.run(work())
    recording = read_recording(tmp_path / "r.jsonl")
    assert info["forced_tokens"] > 0
    assert all(tail > 0 for tail in recording.tails.values())
    counters = replayed(tmp_path / "r.jsonl")
    names = (*SAME, *STEPS)
    assert {name: counters[name] for name in names} == {name: info[name] for name in names}


def test_they_are_the_same_where_constraints_replace_or_keep_the_last_token_of_a_prompt(tmp_path: Path) -> None:
    async def work() -> dict[str, object]:
        # Tokens that a constraint forces have no keys at the end of a text; simulated ones have.
        backend = LocalBackend(debug={"recording": str(tmp_path / "r.jsonl")}, jump_forward=False)
        await backend.start()
        [longer] = ByteTokenizer().encode(" the", first=False)
        for number in range(6):
            sampling = SamplingParams(max_tokens=20, seed=number, logit_bias={longer: 100.0 * (number % 2)})
            things = ConstraintSpec("regex", "the end|a thing|bees")
            parts = (Text(f"{number}: they sing in "),)  # tokens " the" and " a" begin with its last one
            request = GenRequest(f"c{number}", parts, sampling, constraint=things)
            final = [event async for event in backend.generate(request)][-1]
            completion = final.completions[0]  # type: ignore[union-attr]  # the last event is a Final
            answer = Generated(completion.text, completion.token_ids)
            async for _ in backend.generate(GenRequest(f"d{number}", (*parts, answer, Text(" then")), sampling)):
                pass
        info = (await backend.control("info")).result
        await backend.close()
        return dict(info)

    info = asyncio.run(work())
    assert info["prompt_tokens"] == info["cached_tokens"] + info["computed_prompt_tokens"]
    assert len(read_recording(tmp_path / "r.jsonl").replaced) == 5  # of 6
    counters = replayed(tmp_path / "r.jsonl")
    assert {name: counters[name] for name in SAME} == {name: info[name] for name in SAME}


def test_they_are_the_same_where_prefixes_are_evicted(tmp_path: Path) -> None:
    info = record(tmp_path / "r.jsonl", together=1, pool=300)
    counters = replayed(tmp_path / "r.jsonl")
    assert counters["evicted_tokens"] > 0
    assert {name: counters[name] for name in SAME} == {name: info[name] for name in SAME}


def test_they_are_the_same_where_host_memory_has_what_was_evicted(tmp_path: Path) -> None:
    info = record(tmp_path / "r.jsonl", together=1, pool=300, host=1 << 24)
    counters = replayed(tmp_path / "r.jsonl", "host=1000000")
    assert counters["loaded_host_tokens"] > 0
    names = (*SAME, "loads", "loaded_host_tokens", "saved_pages", "evicted_tokens")
    assert {name: counters[name] for name in names} == {name: info[name] for name in names}


def test_a_recording_has_no_text(tmp_path: Path) -> None:
    record(tmp_path / "r.jsonl", together=4, pool=20_000)
    text = (tmp_path / "r.jsonl").read_text()
    assert is_recording(tmp_path / "r.jsonl")
    for word in (*SECRET.split(), "question", "eve", json.dumps(list(SECRET.encode()))[1:-1]):
        assert f'"{word}"' not in text
        assert f" {word} " not in text


def test_the_command_takes_recordings_and_their_steps(tmp_path: Path) -> None:
    record(tmp_path / "r.jsonl", together=4, pool=20_000)
    for plan in (Plan(), Plan(replicas=2), Plan(coarse=True, replicas=2)):
        result, _ = simulate(open_scenario(str(tmp_path / "r.jsonl")), plan)
        assert result.calls == 48
    steps, model = read_steps(tmp_path / "r.jsonl")
    assert model == "oracle"
    assert len(steps) > 20


def test_a_check_compares_a_recording_with_its_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "r.jsonl", together=4, pool=20_000)
    found = check(tmp_path / "r.jsonl")
    assert found.equal
    assert found.calls == 48
    assert found.counters["prompt_tokens"][0] > found.counters["cached_tokens"][0] > 0
    slow = replace(DEFAULT_STEPS, step=1.0)
    assert abs(check(tmp_path / "r.jsonl", slow).throughput_error) > MOST_ERROR
    write_step_model(slow, tmp_path / "steps.json")
    assert main(["simulate", str(tmp_path / "r.jsonl"), "--check", "--steps", str(tmp_path / "steps.json")]) == 1
    assert "counters are equal; throughput is off by" in capsys.readouterr().out
    assert main(["simulate", "prefixes=2", "--check"]) == 2
    assert "is no recording; --check takes one" in capsys.readouterr().err


def test_a_check_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "r.jsonl", together=4, pool=20_000)
    main(["simulate", str(tmp_path / "r.jsonl"), "--check", "--json", str(tmp_path / "figures.json")])
    assert "counters are equal" in capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["calls"] == 48
    assert figures["prompt_tokens"]["recorded"] == figures["prompt_tokens"]["simulated"] > 0
    assert set(figures["seconds"]) == {"recorded", "simulated"}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--first", "1"], "a recording has none; leave --first out"),
        (["--model", "nosuchmodel"], "a recording has none; leave it out"),
        (["--arrivals", "all"], "leave --arrivals out"),
    ],
)
def test_options_that_a_recording_does_not_use_are_refused(
    tmp_path: Path, option: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.jsonl").write_text('{"recording": 2}')
    assert main(["simulate", str(tmp_path / "r.jsonl"), *option]) == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_recorded_is_counted(tmp_path: Path) -> None:
    async def work() -> None:
        backend = LocalBackend(debug={"recording": str(tmp_path / "r.jsonl")})
        await backend.score(ScoreRequest("s", (Text("one "),), ("yes", "no"), probability="exact"))
        await backend.close()

    asyncio.run(work())
    assert read_recording(tmp_path / "r.jsonl").skipped == 1


def test_seconds_begin_with_the_first_call_that_is_no_hint(tmp_path: Path) -> None:
    record(tmp_path / "r.jsonl", together=4, pool=20_000)
    before = read_recording(tmp_path / "r.jsonl").seconds
    header, *lines = map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())
    hint = {"call": 999, "kind": "hint", "at": 0, "sequences": [[0, 0, 3]]}
    later = [line | {"at": line["at"] + 7} if "at" in line else line for line in lines]
    (tmp_path / "r.jsonl").write_text("\n".join(json.dumps(line) for line in [header, hint, *later]))
    assert read_recording(tmp_path / "r.jsonl").seconds == pytest.approx(before)


def test_a_broken_recording_is_refused_with_its_line(tmp_path: Path) -> None:
    record(tmp_path / "r.jsonl", together=4, pool=20_000)
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    (tmp_path / "r.jsonl").write_text("\n".join([*lines[:5], lines[5][:10]]))
    with pytest.raises(ParameterError, match=r"r\.jsonl, line 6"):
        read_recording(tmp_path / "r.jsonl")


def test_a_recording_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    backend = LocalBackend(debug={"recording": str(tmp_path / "none" / "r.jsonl")})
    with pytest.raises(ParameterError, match=r"debug\.recording"):
        asyncio.run(backend.start())
