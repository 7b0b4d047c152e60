"""A journal answers the calls that it has, and refuses what is not its own."""

import asyncio
import json
import math
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter import loop
from umbel.interpreter.fakes.openai import FakeOpenAI
from umbel.interpreter.journal import file as file_module
from umbel.interpreter.journal import use as use_module
from umbel.interpreter.journal.file import JournalFile, read_result, written_result
from umbel.lang.protocol import Completion, Final, FinishReason, Scored, ScoredChoice, TokenLogprob, Usage

BYTE = TokenLogprob(1, "a", -0.5, (), b"\xff")
PICTURE = b"\x89PNG\r\n\x1a\n" + b"\x00" * 16


def numbered() -> Callable[[str], str]:
    """Answers "1", "2", ... : no two answers are the same, so one that is asked for again is seen."""
    count = iter(range(1, 10_000))
    return lambda text: str(next(count))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run.jsonl")


@ul.function
def ask(s, question):
    s += ul.user(question) + ul.assistant(ul.gen("answer", max_tokens=8))


@ul.function
def explore(s, question):
    s += ul.user(question) + ul.assistant(ul.gen("plan", max_tokens=8))
    branches = s.fork(3)
    for branch in branches:
        branch += ul.user("Go on.") + ul.assistant(ul.gen("step", max_tokens=8))
        inner = branch.fork(2)
        for each in inner:
            each += ul.user("Again.") + ul.assistant(ul.gen("end", max_tokens=8))
        inner.join()
    branches.join()
    s += ul.user("Choose.") + ul.assistant(ul.select("choice", ["yes", "no"], temperature=1.0))
    return s["step"], s["choice"]


def seen(state: Any) -> Any:
    """Everything of a state but the numbers of its requests."""
    state.sync()
    facts = {name: state.meta(name) for name in state.names()} if hasattr(state, "names") else {}
    return state.text(), state.ret_value, {name: state[name] for name in facts}


def lines_of(path: str) -> list[bytes]:
    return Path(path).read_bytes().splitlines(keepends=True)


def test_the_calls_of_a_finished_run_are_read(path: str) -> None:
    first = explore.run("Why?", backend=ul.Echo(numbered(), scores={"yes": -1.0, "no": -1.0}), journal=path)
    idle = ul.Echo(numbered(), scores={"yes": -9.0, "no": -0.1})
    again = explore.run("Why?", backend=idle, journal=path)
    assert seen(again) == seen(first)
    assert not idle.requests
    assert again.cost.usage == Usage()
    assert again.cost.read == first.cost.usage
    assert (first.cost.usage.calls, first.cost.read.calls) == (11, 0)


def test_a_run_without_a_journal_costs_what_one_with_it_does(path: str) -> None:
    plain = explore.run("Why?", backend=ul.Echo(str.upper, scores={"yes": -1.0, "no": -9.0}), seed=1)
    kept = explore.run("Why?", backend=ul.Echo(str.upper, scores={"yes": -1.0, "no": -9.0}), seed=1, journal=path)
    assert seen(kept) == seen(plain)
    assert kept.cost == plain.cost


def test_equal_prompts_in_branches_keep_their_own_answers(path: str) -> None:
    first = explore.run("Why?", backend=ul.Echo(numbered(), scores={"yes": 0.0, "no": -1.0}), journal=path)
    again = explore.run("Why?", backend=ul.Echo([], scores={"yes": 0.0, "no": -1.0}), journal=path)
    assert again["step"] == first["step"]
    assert len(set(first["step"])) == 3


@pytest.mark.parametrize("kept", range(1, 6))
def test_a_run_that_broke_off_goes_on(path: str, kept: int) -> None:
    whole = explore.run("Why?", backend=ul.Echo(numbered(), scores={"yes": 0.0, "no": -1.0}), journal=path)
    lines = lines_of(path)
    calls = [index for index, line in enumerate(lines) if json.loads(line)["type"] == "call"]
    Path(path).write_bytes(b"".join(lines[: calls[kept]]))
    again = explore.run("Why?", backend=ul.Echo(numbered(), scores={"yes": 0.0, "no": -1.0}), journal=path)
    assert (again.cost.read.calls, again.cost.usage.calls) == (kept, 11 - kept)
    assert again["plan"] == whole["plan"]
    third = explore.run("Why?", backend=ul.Echo([], scores={"yes": 0.0, "no": -1.0}), journal=path)
    assert seen(third) == seen(again)


def test_a_changed_prompt_is_not_answered_with_an_old_result(path: str) -> None:
    said = ["one"]

    @ul.function
    def program(s):
        s += said[0]
        s += ul.gen("x", max_tokens=4)

    program.run(backend=ul.Echo({"one": "1"}), journal=path)
    said[0] = "two"
    state = program.run(backend=ul.Echo({"two": "2"}), journal=path)
    assert state["x"] == "2"
    assert (state.cost.read.calls, state.cost.usage.calls) == (0, 1)
    said[0] = "one"
    assert program.run(backend=ul.Echo([]), journal=path)["x"] == "1"


def test_batches_keep_their_items_apart(path: str) -> None:
    items = [{"question": "Why?"}] * 8
    first = ask.run_batch(items, backend=ul.Echo(numbered()), journal=path)
    again = ask.run_batch(items, backend=ul.Echo([]), journal=path)
    assert [state["answer"] for state in again] == [state["answer"] for state in first]
    assert len({state["answer"] for state in first}) == 8
    assert sum((state.cost for state in again), ul.Cost()).read.calls == 8


def test_a_batch_may_be_longer_than_it_was(path: str) -> None:
    ask.run_batch([("a",), ("b",)], backend=ul.Echo(numbered()), journal=path)
    states = list(ask.run_batch([("a",), ("b",), ("c",)], backend=ul.Echo(["3"]), journal=path, generator_style=True))
    assert [state["answer"] for state in states] == ["1", "2", "3"]


def test_a_failed_program_is_tried_again(path: str) -> None:
    def fails(verb: str, number: int) -> None:
        if verb == "generate" and number == 2:
            raise ul.EngineError("gone")

    items = [("a",), ("b",), ("c",)]
    states = ask.run_batch(items, backend=ul.Echo(faults=fails), journal=path, on_error="return", num_threads=1)
    assert [isinstance(state, ul.Failure) for state in states] == [False, True, False]
    echo = ul.Echo()
    again = ask.run_batch(items, backend=echo, journal=path)
    assert len(echo.requests) == 1
    assert all(state["answer"] for state in again)


def test_async_programs_and_compiled_ones_have_journals(path: str, tmp_path: Path) -> None:
    @ul.function
    async def program(s, question):
        s += ul.user(question) + ul.assistant(ul.gen("answer", max_tokens=8))
        return await s["answer"]

    async def both() -> tuple[Any, Any]:
        first = await program.run_async("Why?", backend=ul.Echo(numbered()), journal=path)
        return first.ret_value, (await program.run_async("Why?", backend=ul.Echo([]), journal=path)).ret_value

    assert asyncio.run(both()) == ("1", "1")
    compiled, other = ask.compile(), str(tmp_path / "compiled.jsonl")
    first = compiled.run_batch([("a",), ("b",)], backend=ul.Echo(numbered()), journal=other)
    again = compiled.run_batch([("a",), ("b",)], backend=ul.Echo([]), journal=other)
    assert [state["answer"] for state in again] == [state["answer"] for state in first]


def test_a_compiled_program_with_branches_reads_its_calls(path: str) -> None:
    @ul.function
    def program(s, question):
        s += ul.user(question)
        branches = s.fork(2)
        for branch in branches:
            branch += ul.assistant(ul.gen("answer", max_tokens=8))
        branches.join()

    compiled = program.compile()
    first = compiled.run("Why?", backend=ul.Echo(numbered()), journal=path)
    first.sync()
    assert compiled.run("Why?", backend=ul.Echo([]), journal=path)["answer"] == first["answer"] == ["1", "2"]


def test_runs_that_a_body_starts_are_in_the_journal_of_the_run_around_them(path: str) -> None:
    @ul.function
    def outer(s, model):
        one = ask.run("one", backend=model)["answer"]
        two = [state["answer"] for state in ask.run_batch([("two",), ("three",)], backend=model)]
        s += f"{one} {two}: " + ul.gen("x", max_tokens=4)
        return s["x"], one, two

    echo, idle = ul.Echo(numbered()), ul.Echo([])
    first = outer.run(echo, backend=echo, journal=path)
    again = outer.run(idle, backend=idle, journal=path)
    assert again.ret_value == first.ret_value
    assert not idle.requests
    with JournalFile(path, writes=False) as file:
        assert set(file.calls) == {"0", "0>0", "0>1.0", "0>1.1"}


def test_a_read_stream_yields_its_text_in_one_piece(path: str) -> None:
    first = ask.run("Why?", backend=ul.Echo(["one two three"]), journal=path, stream=True)
    pieces = [text for text in first.text_iter("answer") if text]
    again = ask.run("Why?", backend=ul.Echo([]), journal=path, stream=True)
    assert [text for text in again.text_iter("answer") if text] == ["".join(pieces)]
    assert len(pieces) > 1


def test_constraints_logprobs_and_continuations_are_as_they_were(path: str) -> None:
    @ul.function
    def program(s):
        s += "A: " + ul.gen("number", regex="[1-9]", max_tokens=4)
        s += "B: " + ul.gen("many", n=3, max_tokens=4, return_logprob=True, top_logprobs_num=2)

    first = program.run(backend=ul.Echo(["7", "x y", "x y", "x y"]), journal=path)
    first.sync()
    again = program.run(backend=ul.Echo([]), journal=path)
    assert again["many"] == first["many"]

    def without_ids(facts: Any) -> Any:
        return [
            {k: v for k, v in each.items() if k != "id"} for each in (facts if isinstance(facts, list) else [facts])
        ]

    for name in ("number", "many"):
        assert without_ids(again.meta(name)) == without_ids(first.meta(name))


def test_pictures_are_in_it_as_digests(path: str, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(PICTURE)

    @ul.function
    def program(s):
        s += ul.user(ul.image(str(picture)) + "What is it?") + ul.assistant(ul.gen("x", max_tokens=4))

    program.run(backend=ul.Echo(["a fish"]), journal=path)
    assert program.run(backend=ul.Echo([]), journal=path)["x"] == "a fish"
    assert len(Path(path).read_bytes()) < 4000
    picture.write_bytes(PICTURE + b"other")
    assert program.run(backend=ul.Echo(["a bird"]), journal=path)["x"] == "a bird"


@pytest.mark.parametrize(
    "result",
    [
        Final("1", (Completion("null", (1,), 1, "", FinishReason.STOP),), Usage(3, 0, 1, 1)),
        Final("1", (Completion("a", (1,), 1, "", FinishReason.STOP, "x", (BYTE,)),), Usage()),
        Scored("1", (ScoredChoice((1,), (-math.inf,)), ScoredChoice((2,), (-0.5,))), Usage(1)),
    ],
)
def test_results_come_back_as_they_were(result: Any) -> None:
    assert read_result(written_result(result)) == result


# -------------------------------------------------------------------------------- costs


def test_read_calls_cost_nothing_and_say_what_they_have_cost(path: str) -> None:
    with FakeOpenAI({"Why?": "Because."}) as server:
        backend = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
        first = ask.run("Why?", backend=backend, journal=path)
        again = ask.run("Why?", backend=backend, journal=path, budget=ul.Budget(calls=1))
        assert again["answer"] == first["answer"] == "Because."
        assert server.calls == 1
        assert first.cost.dollars
        assert (again.cost.dollars, again.cost.dollars_read) == (0.0, first.cost.dollars)
        assert server.api_key not in Path(path).read_text()
        assert server.base_url not in Path(path).read_text()


def test_a_speculated_call_that_answered_several_gens_is_read_as_one(path: str) -> None:
    @ul.function(num_api_spec_tokens=32)
    def program(s):
        s += ul.user("A card.")
        with s.assistant():
            s += (
                "Name: "
                + ul.gen("name", stop="\n", max_tokens=16)
                + "\nJob: "
                + ul.gen("job", stop="\n", max_tokens=16)
            )

    with FakeOpenAI(lambda text: "Name: Ada\nJob: mathematician\n") as server:
        backend = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
        first = program.run(backend=backend, journal=path)
        first.sync()
        made = server.calls
        again = program.run(backend=backend, journal=path)
        again.sync()
        assert server.calls == made
        assert (again["name"], again["job"]) == (first["name"], first["job"]) == ("Ada", "mathematician")
        assert again.meta("job")["speculated"] is first.meta("job")["speculated"] is True
        assert again.cost.speculation == first.cost.speculation


def test_a_choice_that_is_drawn_is_drawn_again_the_same(path: str) -> None:
    @ul.function
    def program(s):
        for index in range(20):
            s += ul.select(f"c{index}", ["a", "b"], temperature=1.0)

    echo = ul.Echo(scores={"a": -1.0, "b": -1.0})
    first = program.run(backend=echo, journal=path)
    first.sync()
    again = program.run(backend=ul.Echo(scores={"a": -1.0, "b": -1.0}), journal=path)
    assert again.text() == first.text()
    assert "a" in first.text()
    assert "b" in first.text()
    assert again.cost.usage.calls == 0


@pytest.mark.parametrize("speculation", [{"num_api_spec_tokens": 24}, {"speculate": "auto"}])
def test_what_was_speculated_is_decided_as_it_was(path: str, speculation: dict[str, Any]) -> None:
    """In a process that has learned nothing, and with any number of calls recorded."""

    def made() -> Any:
        @ul.function(**speculation)
        def program(s):
            s += ul.user("A card.")
            with s.assistant():
                for name in ("name", "job", "town"):
                    s += f"{name}: " + ul.gen(name, stop="\n", max_tokens=16) + "\n"

        return program

    with FakeOpenAI(lambda text: "name: Ada\njob: mathematician\ntown: London\n") as server:
        backend = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
        program = made()
        for number in range(3):  # it learns
            whole = program.run(backend=backend, journal=f"{path}{number}")
        calls = server.calls
        again = made().run(backend=backend, journal=f"{path}2")
        assert seen(again) == seen(whole)
        assert server.calls == calls
        lines = lines_of(f"{path}2")
        first = next(index for index, line in enumerate(lines) if json.loads(line)["type"] == "call")
        Path(f"{path}2").write_bytes(b"".join(lines[: first + 1]))
        assert seen(made().run(backend=backend, journal=f"{path}2")) == seen(whole)


def test_answers_that_were_asked_for_again_are_read_with_their_tries(path: str) -> None:
    @ul.function
    def program(s):
        s += ul.user("A number?") + ul.assistant(ul.gen("number", regex="[0-9]{3}", max_tokens=8))

    answers = ["many", "12", "123"]
    with FakeOpenAI(answers, models=["gpt-4-turbo"]) as server:
        backend = ul.OpenAI("gpt-4-turbo", base_url=server.base_url, api_key=server.api_key, profile="openai")
        first = program.run(backend=backend, journal=path)
        again = program.run(backend=backend, journal=path)
        assert (again["number"], again.meta("number")["tries"]) == ("123", 3)
        assert (first.cost.usage.calls, again.cost.usage.calls, again.cost.read.calls) == (3, 0, 3)
        assert server.calls == 3


# -------------------------------------------------------------------------------- the file


@pytest.mark.filterwarnings("ignore::umbel.interpreter.journal.file.JournalWarning")
def test_a_file_that_ends_anywhere_is_gone_on_with(path: str) -> None:
    """As a kill, or a full disk, may leave it."""
    items = [("a",), ("b",), ("c",)]
    states = ask.run_batch(items, backend=ul.Echo(str.upper), journal=path, num_threads=1)
    whole = Path(path).read_bytes()
    for length in range(0, len(whole), 37):
        Path(path).write_bytes(whole[:length])
        echo = ul.Echo(str.upper)
        again = ask.run_batch(items, backend=echo, journal=path, num_threads=1)
        assert [state["answer"] for state in again] == [state["answer"] for state in states]
        kept = [line for line in whole[:length].splitlines(keepends=True) if line.endswith(b"\n")]
        assert len(echo.requests) == 3 - sum(b'"type":"call"' in line for line in kept)


def test_half_of_a_surrogate_pair_is_refused(path: str) -> None:
    with pytest.raises(ul.JournalError, match="a journal holds Unicode"):
        ask.run("a\ud800b", backend=ul.Echo(), journal=path)


def test_a_row_that_a_journal_cannot_keep_fails_alone(path: str) -> None:
    echo = ul.Echo(str.upper)
    rows = [("a",), ("b\ud83d",), ("c",)]
    first, failed, last = ask.run_batch(rows, backend=echo, journal=path, on_error="return")
    assert isinstance(failed, ul.Failure)
    assert "a journal holds Unicode" in str(failed.error)
    assert len(echo.requests) == 2
    again = ask.run_batch(rows, backend=echo, journal=path, on_error="return")
    assert [each["answer"] for each in (again[0], again[2])] == [each["answer"] for each in (first, last)]
    assert len(echo.requests) == 2
    with pytest.raises(ul.JournalError, match="a journal holds Unicode"):
        ask.run_batch(rows, backend=echo, journal=path)[1].sync()


def test_it_is_for_its_owner_alone(path: str) -> None:
    ask.run("Why?", backend=ul.Echo(), journal=path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_a_torn_last_line_is_dropped(path: str) -> None:
    ask.run_batch([("a",), ("b",)], backend=ul.Echo(numbered()), journal=path, num_threads=1)
    lines = lines_of(path)
    last = max(index for index, line in enumerate(lines) if json.loads(line)["type"] == "call")
    Path(path).write_bytes(b"".join(lines[:last]) + lines[last][:-7])
    echo = ul.Echo(["again"])
    with pytest.warns(ul.JournalWarning, match=f"the last line \\({last + 1}\\) is torn"):
        states = ask.run_batch([("a",), ("b",)], backend=echo, journal=path)
    assert [state["answer"] for state in states] == ["1", "again"]
    assert [json.loads(line)["type"] for line in lines_of(path)].count("call") == 2


@pytest.mark.parametrize("change", ["edited", "removed", "moved"])
def test_a_damaged_line_is_named(path: str, change: str) -> None:
    ask.run_batch([("a",), ("b",), ("c",)], backend=ul.Echo(["one", "two", "three"]), journal=path, num_threads=1)
    lines = lines_of(path)
    place = next(index for index, line in enumerate(lines) if b'"one"' in line)
    match change:
        case "edited":
            lines[place] = lines[place].replace(b'"one"', b'"ONE"')
        case "removed":
            del lines[place]
        case "moved":
            lines[place], lines[place + 1] = lines[place + 1], lines[place]
    Path(path).write_bytes(b"".join(lines))
    with pytest.raises(ul.JournalError, match=rf"run\.jsonl line {place + 1} was edited or damaged.*head -n {place} "):
        ask.run_batch([("a",), ("b",), ("c",)], backend=ul.Echo(), journal=path)
    Path(path).write_bytes(b"".join(lines[:place]))  # as the message says
    assert ask.run_batch([("a",), ("b",), ("c",)], backend=ul.Echo(), journal=path)


def test_a_file_of_something_else_is_no_journal(path: str) -> None:
    Path(path).write_text('{"question": "Why?"}\n')
    with pytest.raises(ul.JournalError, match="is no journal"):
        ask.run("Why?", backend=ul.Echo(), journal=path)
    assert Path(path).read_text() == '{"question": "Why?"}\n'


def test_a_journal_is_of_one_program(path: str) -> None:
    ask.run("Why?", backend=ul.Echo(), journal=path)
    with pytest.raises(ul.JournalError, match=r"is of program 'ask', and this is 'explore'; write journal="):
        explore.run("Why?", backend=ul.Echo(), journal=path)


def program_saying(folder: Path, text: str, comment: str = "") -> Any:
    """Makes a program of a file of its own: its source is read from there."""
    file = folder / f"said_{text}_{len(comment)}.py"
    file.write_text(
        f"def helper():{comment}\n    return {text!r}\n\n\n"
        "def program(s):\n    s += helper() + ul.gen('x', max_tokens=4)\n"
    )
    scope: dict[str, Any] = {"ul": ul, "__name__": "said"}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    return ul.function(scope["program"])


def test_a_function_that_the_program_calls_is_part_of_it(path: str, tmp_path: Path) -> None:
    program_saying(tmp_path, "one").run(backend=ul.Echo(), journal=path)
    program_saying(tmp_path, "one", comment="  # a comment").run(backend=ul.Echo([]), journal=path)
    with pytest.raises(ul.JournalError, match=r"'program' as it was before helper changed; write journal="):
        program_saying(tmp_path, "two").run(backend=ul.Echo(), journal=path)


def test_other_arguments_are_named(path: str) -> None:
    ask.run_batch([("a",), ("b",)], backend=ul.Echo(), journal=path)
    echo = ul.Echo()
    with pytest.raises(ul.JournalError, match="item 1 with other arguments: 'question'; write"):
        ask.run_batch([("a",), ("other",)], backend=echo, journal=path)
    with pytest.raises(ul.JournalError, match="'option temperature'"):
        ask.run_batch([("a",), ("b",)], backend=echo, journal=path, temperature=0.5)
    assert not echo.requests


def test_another_version_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(use_module, "__version__", "0.0.9")
    ask.run("Why?", backend=ul.Echo(), journal=path)
    monkeypatch.undo()
    with pytest.raises(ul.JournalError, match=rf"is of umbel 0\.0\.9, and this is {ul.__version__}; write journal="):
        ask.run("Why?", backend=ul.Echo(), journal=path)


def test_another_model_is_named(path: str) -> None:
    ask.run("Why?", backend=ul.Echo(), journal=path)
    with FakeOpenAI() as server:
        backend = ul.OpenAI("gpt-4o", base_url=server.base_url, api_key=server.api_key)
        with pytest.raises(ul.JournalError, match=r"calls of the model 'Echo', and this run has '.*gpt-4o"):
            ask.run("Why?", backend=backend, journal=path)["answer"]
        assert server.calls == 0


def test_two_runs_cannot_have_one_journal(path: str) -> None:
    gate = ul.Gate()
    first = ask.run("Why?", backend=ul.Echo(gate=gate), journal=path, stream=True)
    gate.wait_for(1)
    with pytest.raises(ul.JournalError, match="in use by another run"):
        ask.run("Why?", backend=ul.Echo(), journal=path)
    gate.open()
    first.sync()
    assert ask.run("Why?", backend=ul.Echo([]), journal=path)["answer"] == first["answer"]


def _stopped_in_its_body(path: str, goes_on: threading.Event) -> None:
    """Leaves a batch while one of its bodies waits for `goes_on`, outside of any call."""
    begun = threading.Event()

    @ul.function
    def waits(s, number):
        s += f"{number}?" + ul.gen("answer", max_tokens=4)
        if number:
            begun.set()
            assert goes_on.wait(60)

    left = waits.run_batch([(0,), (1,)], backend=ul.Echo(), journal=path, generator_style=True, num_threads=2)
    next(left)
    assert begun.wait(60)
    left.close()


def test_a_run_waits_for_the_bodies_of_stopped_runs(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def wait_for(event: threading.Event, seconds: float) -> bool:
        goes_on.set()
        return loop.wait_for(event, seconds)

    _stopped_in_its_body(path, goes_on)
    monkeypatch.setattr(file_module, "wait_for", wait_for)
    with JournalFile(path, writes=True):
        assert goes_on.is_set()


def test_a_body_of_a_stopped_run_that_does_not_return_holds_the_journal(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    _stopped_in_its_body(path, goes_on)
    monkeypatch.setattr(file_module, "LONGEST_END", 0.0)
    with pytest.raises(ul.JournalError, match="in use by another run"):
        ask.run("Why?", backend=ul.Echo(), journal=path)
    goes_on.set()


def test_a_stopped_run_cannot_wait_for_itself(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "wait_for", lambda event, seconds: pytest.fail("the run waits for its own end"))

    @ul.function
    def again(s):
        s += ul.user("Why?") + ul.assistant(ul.gen("answer", max_tokens=4))
        s.cancel()
        JournalFile(path, writes=True)

    with pytest.raises(ul.JournalError, match="in use by another run"):
        again.run(backend=ul.Echo(), journal=path)


def test_an_awaited_run_waits_while_its_loop_turns(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    @ul.function
    def program(s):
        begun.set()
        assert goes_on.wait(60)
        s += "Why?" + ul.gen("answer", max_tokens=4)

    async def session() -> str:
        left = asyncio.create_task(program.run_async(backend=ul.Echo(), journal=path))
        await asyncio.to_thread(begun.wait)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        here = asyncio.get_running_loop()

        def wait_for(event: threading.Event, seconds: float) -> bool:
            here.call_soon_threadsafe(goes_on.set)
            return loop.wait_for(event, seconds)

        monkeypatch.setattr(use_module, "wait_for", wait_for)
        state = await program.run_async(backend=ul.Echo(), journal=path)
        return await state["answer"]

    assert asyncio.run(session())


def test_calls_after_the_end_of_a_run_are_refused(path: str) -> None:
    echo = ul.Echo()
    state = ask.run("Why?", backend=echo, journal=path)
    state += ul.user("More?") + ul.assistant(ul.gen("more", max_tokens=4))
    with pytest.raises(ul.JournalError, match="is closed, since its run has ended"):
        state["more"]
    assert len(echo.requests) == 1


@pytest.mark.parametrize("given", [3, "", b"", object()])
def test_odd_paths_are_refused(given: Any) -> None:
    with pytest.raises(ul.JournalError, match="write the path of a file"):
        ask.run("Why?", backend=ul.Echo(), journal=given)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ul.JournalError, match="cannot be opened: No such file or directory"):
        ask.run("Why?", backend=ul.Echo(), journal=tmp_path / "nowhere" / "run.jsonl")


def test_estimates_take_no_journal(path: str) -> None:
    with pytest.raises(ul.ParameterError, match="no journal"):
        ask.estimate("Why?", backend=ul.Echo(), journal=path)


def test_a_disk_that_is_full_fails_the_call_and_leaves_whole_lines(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask.run_batch([("a",)], backend=ul.Echo(["1"]), journal=path)
    whole, write = Path(path).read_bytes(), os.write

    def full(opened: int, data: bytes) -> int:
        if data.startswith(b'{"sum"'):
            write(opened, data[:20])
            raise OSError(28, "No space left on device")
        return write(opened, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ul.JournalError, match=r"cannot be written: .*No space left"):
        ask.run_batch([("a",), ("b",)], backend=ul.Echo(["2"]), journal=path)
    assert Path(path).read_bytes() == whole


def test_prompts_are_written_as_what_they_add(path: str) -> None:
    @ul.function
    def program(s, document):
        s += document
        for index in range(10):
            s += f"\nQ{index}: " + ul.gen(f"a{index}", max_tokens=4)

    document = "x" * 10_000
    program.run(document, backend=ul.Echo(numbered()), journal=path).sync()
    assert len(Path(path).read_bytes()) < 3 * len(document)  # the prompt, the argument, and little more
    with JournalFile(path, writes=False) as file:
        texts = [file.text_of(number) for places in file.calls["0"].values() for _, number in places]
    assert texts[0] == document + "\nQ0: "
    assert [len(text) for text in texts] == sorted(len(text) for text in texts)
    assert texts[9].startswith(texts[8] + "9\nQ9: ")


def test_a_batch_that_was_left_in_the_middle_keeps_its_journal_and_does_not_block_others(path: str) -> None:
    @ul.function
    def ask(s, number):
        s += f"{number}?" + ul.gen("answer")

    items = [{"number": number} for number in range(3)]
    left = ask.run_batch(items, backend=ul.Echo(), journal=path, generator_style=True)
    state = next(left)
    state.sync()
    for other in left:  # all programs have ended, and the generator has not
        if other["answer"].startswith("2"):
            break
    with pytest.raises(ul.JournalError, match="in use by another run"):
        ask.run_batch(items, backend=ul.Echo(), journal=path)
    left.close()
    states = ask.run_batch(items, backend=ul.Echo(), journal=path)
    assert sum(state.cost.read.calls for state in states) == 3


@pytest.mark.parametrize("text", ["my only line", "{", '{"key": "value"}', "\ufeff{}"])
def test_a_file_of_one_line_that_is_no_journal_is_left_alone(text: str, path: str) -> None:
    Path(path).write_text(text)
    if not '{"sum":"'.startswith(text):
        with pytest.raises(ul.JournalError, match="is no journal, or its first line was edited"):
            ask.run("Why?", backend=ul.Echo(), journal=path)
        assert Path(path).read_text() == text
        return
    with pytest.warns(ul.JournalWarning, match="torn"):
        ask.run("Why?", backend=ul.Echo(), journal=path)
