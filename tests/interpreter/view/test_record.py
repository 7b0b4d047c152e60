"""The record of a run: what ran where and when, what it appended, and what is told of calls."""

import asyncio
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter.view import record as limits
from umbel.interpreter.view.page import RunRecord
from umbel.testing import FakeOpenAI

PLACE = "Venice"


def kinds(lines: list[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(line["stream"], line["kind"]) for line in lines if "op" in line]


def origins(lines: list[dict[str, Any]]) -> list[list[Any]]:
    return [piece for line in lines for piece in line.get("text", ())]


def test_operations_of_all_streams_are_there_in_the_order_of_their_ends() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += "Q: " + ul.gen("a", max_tokens=2)
        forks = s.fork(2)
        forks += ul.gen("b", max_tokens=2)
        forks.join()

    lines = program.run(backend=ul.Echo()).record().lines
    operations = [line for line in lines if "op" in line]
    assert lines[0]["program"] == "program"
    assert kinds(lines) == [(0, "text"), (0, "gen"), (0, "fork"), (1, "gen"), (2, "gen"), (0, "join")]
    assert [line["op"] for line in operations] == list(range(6))
    assert operations[2]["others"] == operations[5]["others"] == [1, 2]
    assert {
        line["stream"]: (line["parent"], line["after"]) for line in lines if "op" not in line and "stream" in line
    } == {
        0: (None, None),
        1: (0, 2),
        2: (0, 2),
    }
    assert all(0 <= line["from"] <= line["to"] for line in operations)
    assert lines[-1]["usage"]["calls"] == 3


def test_lines_of_the_program_come_before_the_operations_they_say() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += ul.gen("a", max_tokens=2)

    lines = program.run(backend=ul.Echo()).record().lines
    line = next(line for line in lines if "file" in line)
    assert line["code"] == 's += ul.gen("a", max_tokens=2)'
    assert line["function"] == "program"
    assert line["file"].endswith("test_record.py")
    assert not line["file"].startswith("/")  # folders of this machine are no part of a file that is passed on
    assert lines.index(line) < next(at for at, each in enumerate(lines) if each.get("line") == 0 and "op" in each)


def test_text_has_its_origin() -> None:
    @ul.function
    def program(s: ul.State, essay: str) -> None:
        s += f"Essay: {essay}\n"
        s += "Of " + PLACE + ":" + ul.gen("a", max_tokens=2)
        s += ul.select("b", choices=["x", "y"])
        s += ul.user("Go on.")

    assert origins(program.run(essay="It sinks.", backend=ul.Echo([" Slowly"])).record().lines)[:7] == [
        ["literal", "Essay: "],
        ["argument", "It sinks.", "essay"],
        ["literal", "\n"],
        ["literal", "Of "],
        ["value", "Venice", "PLACE"],
        ["literal", ":"],
        ["generated", " Slowly", "a"],
    ]
    lines = program.run(essay="It sinks.", backend=ul.Echo()).record().lines
    assert {piece[0] for piece in origins(lines)} == {"literal", "argument", "value", "generated", "chosen", "template"}


def test_a_division_that_could_be_another_is_not_made() -> None:
    left, right = "a, b", "c"

    @ul.function
    def program(s: ul.State) -> None:
        s += left + ", " + right

    assert origins(program.run(backend=ul.Echo()).record().lines) == [["program", "a, b, c"]]


def test_an_argument_that_is_known_decides_the_division() -> None:
    examples = "Question: 1?\nQuestion: 2?\n"

    @ul.function
    def program(s: ul.State, question: str) -> None:
        s += examples + f"Question: {question}"

    assert origins(program.run(question="3?", backend=ul.Echo()).record().lines) == [
        ["value", examples, "examples"],
        ["literal", "Question: "],
        ["argument", "3?", "question"],
    ]


def test_calls_have_tokens_and_the_place_where_the_cached_part_ends() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += "one two three four five six"
        s += ul.gen("a", max_tokens=2)

    backend = ul.Echo()
    program.run(backend=backend).sync()
    (call,) = next(line["calls"] for line in program.run(backend=backend).record().lines if "calls" in line)
    assert 0 < call["cached_tokens"] < call["prompt_tokens"]
    assert 0 < call["cached_until"] < len("one two three four five six")
    assert call["sent"] <= call["came"]
    assert "first" not in call  # it came in one piece, so the first token is not known


def test_of_streamed_calls_the_first_piece_has_a_time() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += ul.gen("a", max_tokens=4)

    state = program.run(backend=ul.Echo(["a b c d"]), stream=True)
    (call,) = next(line["calls"] for line in state.record().lines if "calls" in line)
    assert call["sent"] <= call["first"] <= call["came"]


def test_places_are_unknown_where_the_backend_does_not_tell() -> None:
    class Silent(ul.Echo):
        async def locate(self, question: Any) -> Any:
            raise ul.CapabilityError("does not tell")

    @ul.function
    def program(s: ul.State) -> None:
        s += "one two three" + ul.gen("a", max_tokens=2)
        s += ul.gen("b", max_tokens=2)

    calls = [line["calls"][0] for line in program.run(backend=Silent()).record().lines if "calls" in line]
    assert calls[1]["cached_tokens"] > 0
    assert all("cached_until" not in call for call in calls)


def test_the_start_of_a_backend_is_told_by_the_run_that_waited_for_it() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += ul.gen("a", max_tokens=2)

    backend = ul.Echo()
    first, second = (program.run(backend=backend).record().lines[-1] for _ in range(2))
    assert first["backend_start"] >= 0
    assert "backend_start" not in second


def test_facts_of_a_call_are_told() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += ul.gen("year", regex="[0-9]{4}", return_logprob=True)
        s += ul.select("place", choices=["Rome", "Bonn"])

    facts = [line["facts"] for line in program.run(backend=ul.Echo(["1984"])).record().lines if "calls" in line]
    assert facts[0]["guarantee"] == "enforced"
    assert all(logprob <= 0 for logprob, _ in facts[0]["logprobs"])
    assert sum(facts[1]["probabilities"].values()) == pytest.approx(1)


def test_an_error_is_told_with_its_line() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += "Q: " + ul.gen("a", max_tokens=2)
        s += "never said"

    state = program.run(backend=ul.Echo(faults=ul.FailCall(1, ul.BackendError("the model is away"))))
    failed = [line for line in state.record().lines if "error" in line and "op" in line]
    assert [(line["kind"], line["error"]) for line in failed] == [("gen", "BackendError: the model is away")]
    assert failed[0]["calls"][0].keys() == {"sent"}
    assert "never said" not in str(origins(state.record().lines))


def test_text_of_speculation_is_guessed() -> None:
    @ul.function(num_api_spec_tokens=32)
    def program(s: ul.State) -> None:
        s += "Name:" + ul.gen("name", stop="\n") + "\nJob:" + ul.gen("job", stop="\n") + "\n"

    with FakeOpenAI(lambda text: text and " Ann\nJob: cook\n") as server:
        state = program.run(
            backend=ul.OpenAI("gpt-3.5-turbo-instruct", base_url=server.base_url, api_key=server.api_key)
        )
        found = {piece[2]: piece[0] for piece in origins(state.record().lines) if piece[0] in ("generated", "guessed")}
    assert found == {"name": "generated", "job": "guessed"}


@pytest.mark.processes
def test_forced_and_guessed_parts_of_a_text_are_told_apart() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += ul.gen("a", regex="ab[cd]ef", temperature=0)
        s += ul.gen("twice", max_tokens=40, temperature=0)
        s += ul.gen("again", max_tokens=40, temperature=0)

    with ul.Runtime("oracle") as backend:
        lines = program.run(backend=backend).record().lines
    calls = {line["name"]: line for line in lines if "calls" in line}
    assert [piece[:2] for piece in calls["a"]["text"]] == [
        ["forced", "ab"],
        ["generated", calls["a"]["text"][1][1]],
        ["forced", "ef"],
    ]
    for name in ("twice", "again"):
        told = sum(len(text) for origin, text, _ in calls[name]["text"] if origin == "guessed")
        assert (told > 0) == (calls[name]["facts"]["guessed_tokens"] > 0)


def test_a_run_without_a_record_says_so() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += ul.gen("a", max_tokens=2)

    state = program.run(backend=ul.Echo(), record=False)
    assert state["a"]
    with pytest.raises(ul.ProgramError, match="record=False"):
        state.record()


def test_runs_are_the_same_with_and_without_a_record() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        forks = s.fork(3)
        forks += lambda i: f"{i}:" + ul.gen("a", max_tokens=3, temperature=0.7, seed=i)
        forks.join()
        s += ul.select("b", choices=["x", "y"])

    states = [program.run(backend=ul.Echo(), record=record) for record in (True, False)]
    assert states[0].text() == states[1].text()
    assert states[0]["a"] == states[1]["a"]
    assert states[0].usage == states[1].usage


def test_a_record_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    @ul.function
    def program(s: ul.State) -> None:
        for _ in range(10):
            s += "text "

    monkeypatch.setattr(limits, "MOST_OPERATIONS", 4)
    lines = program.run(backend=ul.Echo()).record().lines
    assert len(kinds(lines)) == 4
    assert lines[-1]["left_out"] == 6


def test_log_probabilities_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    @ul.function
    def program(s: ul.State) -> None:
        for _ in range(3):
            s += ul.gen("a", max_tokens=4, return_logprob=True)

    monkeypatch.setattr(limits, "MOST_LOGPROBS", 8)
    lines = program.run(backend=ul.Echo(["a b c d"] * 3)).record().lines
    assert ["logprobs" in line["facts"] for line in lines if "facts" in line] == [True, True, False]
    assert lines[-1]["logprobs_left_out"] == 4


def test_the_record_of_an_async_run_is_awaited() -> None:
    @ul.function
    async def program(s: ul.AsyncState) -> None:
        s += "Q: " + ul.gen("a", max_tokens=2)

    async def lines() -> list[dict[str, Any]]:
        state = await program.run_async(backend=ul.Echo())
        return (await state.record()).lines

    assert kinds(asyncio.run(lines())) == [(0, "text"), (0, "gen")]


def test_compiled_programs_are_recorded() -> None:
    @ul.function
    def program(s: ul.State, topic: str) -> None:
        s += "On " + topic + ":" + ul.gen("a", max_tokens=2)
        forks = s.fork(2)
        forks += ul.gen("b", max_tokens=2)
        forks.join()

    lines = program.compile().run(topic="Rome", backend=ul.Echo()).record().lines
    assert [kind for _, kind in kinds(lines) if kind in ("gen", "fork", "join")] == [
        "gen",
        "fork",
        "gen",
        "gen",
        "join",
    ]
    assert next(line["others"] for line in lines if line.get("kind") == "join") == [1, 2]


@pytest.mark.processes
def test_of_a_program_that_the_backend_ran_no_origins_are_made_up() -> None:
    @ul.function
    def program(s: ul.State, topic: str) -> None:
        s += "On " + topic + ":" + ul.gen("a", max_tokens=2)
        forks = s.fork(2)
        forks += ul.gen("b", max_tokens=2)
        forks.join()

    with ul.Runtime("oracle") as backend:
        state = program.compile().run(topic="Rome", backend=backend)
        lines = state.record().lines
        assert kinds(lines) == [(0, "shipped")]
        assert origins(lines) == [["shipped", state.text()]]
        local = program.run(topic="Rome", backend=backend).record().lines
    (call,) = next(line["calls"] for line in local if line.get("name") == "b")
    assert call["cached_until"] > 0
    assert 0 <= call["queued"] <= call["first_token"]  # by the engine


def test_records_are_saved_and_loaded(tmp_path: Any) -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += "halves \ud800 and \u2028" + ul.gen("a", max_tokens=2)

    state = program.run(backend=ul.Echo())
    path = state.save(tmp_path / "run.jsonl")
    assert RunRecord.load(path).lines == state.record().lines


@pytest.mark.parametrize("text", ["", "{", "[1]\n", '{"umbel_run": 99}\n', '{"a": 1}\n'])
def test_other_files_are_refused(tmp_path: Any, text: str) -> None:
    (tmp_path / "other").write_text(text)
    with pytest.raises(ul.ParameterError, match="record of a run"):
        RunRecord.load(tmp_path / "other")


def test_a_variable_is_a_value_though_the_model_has_repeated_an_argument() -> None:
    @ul.function
    def judge(s: ul.State, essay: str, row: dict[str, str]) -> None:
        s += f"Essay: {essay}"
        (branch,) = s.fork(1)
        branch += "\nFacts:" + ul.gen("facts", max_tokens=8)
        s += f"\nFacts:{branch['facts']}"
        s += f"\nRow: {row['facts']}"

    state = judge.run("A city by the sea.", {"facts": "older"}, backend=ul.Echo([" A city by the sea."]))
    state.sync()
    told = origins(state.record().lines)
    assert ["value", " A city by the sea.", "branch['facts']"] in told
    assert ["argument", "older", "row['facts']"] in told
