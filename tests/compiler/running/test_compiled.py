"""Compiled programs behave as interpreted ones: arguments, errors, ends, pieces, batches, files."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import umbel as ul
from umbel.interpreter.backends.echo import Echo, FailCall
from umbel.lang.protocol import Capabilities

PATIENCE = 20.0


class CallError(Exception):
    pass


@ul.function(temperature=0)
def report(s: ul.State, topic: str, tone: str = "dry") -> Any:
    s += f"On {topic}, {tone}:" + ul.gen("title", max_tokens=3) + "\n"
    with s.fork(2) as sides:
        sides += lambda i: f"Side {i} of {topic}:" + ul.gen("side", max_tokens=2)
    s += "Both: " + sides[0]["side"] + sides[1]["side"] + ul.gen("end", max_tokens=2)
    s["upper"] = s["title"].upper()
    return {"title": s["title"], "sides": s["side"]}


@pytest.fixture(scope="module")
def compiled() -> ul.CompiledProgram:
    return report.compile()


def echo(**options: Any) -> Echo:
    return Echo(lambda prompt: f"{len(prompt)} one two three four", **options)


# ------------------------------------------------------------------------------------ arguments


def test_a_default_stands_in_for_what_is_left_out(compiled: ul.CompiledProgram) -> None:
    assert compiled.run("cats", backend=echo()).text() == report.run("cats", backend=echo()).text()
    assert "On cats, wet:" in compiled.run("cats", tone="wet", backend=echo()).text()


@pytest.mark.parametrize(
    ("arguments", "keywords", "said"),
    [
        ((), {}, "missing a required argument: 'topic'"),
        (("a", "b", "c"), {}, "too many positional arguments"),
        (("a",), {"tune": "x"}, "did you mean 'tone'?"),
        (("a",), {"temperature": -1}, "temperature"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_as_by_the_program(
    compiled: ul.CompiledProgram, arguments: tuple[str, ...], keywords: dict[str, Any], said: str
) -> None:
    backend = echo()
    for program in (report, compiled):
        with pytest.raises(ul.ParameterError, match=said):
            program.run(*arguments, **keywords, backend=backend)
    assert backend.calls == 0


def test_a_fixed_parameter_is_no_option_of_its_name(tmp_path: Path) -> None:
    @ul.function
    def sampled(s: ul.State, n: int = 1, timeout: str = "", tone: str = "") -> None:
        s += f"{n}{timeout}{tone}:" + ul.gen("x", max_tokens=1, temperature=0)

    path = tmp_path / "sampled.umbel.json"
    program = sampled.bind(n=2).compile(static_args={"timeout": "t", "tone": "dry"}, passes=["default", "drop_unused"])
    program.save(path)
    for each in (program, ul.load(path)):
        with pytest.raises(
            ul.ParameterError,
            match=r"n was fixed by static_args or bind; compile again, or write sampling=\{'n': 3\}",
        ):
            each.run(n=3, backend=echo())
        with pytest.raises(ul.ParameterError, match=r"timeout was fixed .*, or write sampling=\{'timeout': 3\}"):
            each.run(timeout=3, backend=echo())
        with pytest.raises(ul.ParameterError, match="tone was fixed by static_args or bind; compile again for another"):
            each.run(tone="wet", backend=echo())
        assert len(each.run(sampling={"n": 3}, backend=echo())["x"]) == 3
        assert each.run(top_p=0.5, backend=echo()).text().startswith("2tdry:")


def test_a_compiled_program_runs_on_its_own(compiled: ul.CompiledProgram) -> None:
    @ul.function
    def outer(s: ul.State) -> None:
        compiled(s)

    with pytest.raises(ul.ParameterError, match=r"runs on its own; write report\(s, \.\.\.\) inside a program"):
        outer.run(backend=echo())


def test_numbers_are_put_into_text_and_lists_are_not() -> None:
    @ul.function
    def counted(s: ul.State, plain: Any, number: int) -> None:
        s += plain
        s += f" {number} " + str(number)

    program = counted.compile()
    assert program.run("a", 3, backend=echo()).text() == counted.run("a", 3, backend=echo()).text() == "a 3 3"
    for unfit in (None, ["a"], ul.gen("x")):
        with pytest.raises(ul.ParameterError, match=r"argument 'plain', which is .*str\(\.\.\.\)"):
            program.run(unfit, 3, backend=echo())


def test_options_of_a_run_lie_between_those_of_the_program_and_those_of_a_call() -> None:
    @ul.function(temperature=0.5, max_tokens=7)
    def layered(s: ul.State) -> None:
        s += ul.gen("a", max_tokens=1) + ul.gen("b")

    asked = []
    for program in (layered, layered.compile()):
        backend = echo()
        program.run(max_tokens=3, top_p=0.5, backend=backend).sync()
        asked.append([request.sampling for request in backend.requests])
    assert asked[0] == asked[1]
    assert [sampling.max_tokens for sampling in asked[1]] == [1, 3]


def test_every_run_has_lists_of_its_own() -> None:
    @ul.function
    def collecting(s: ul.State) -> Any:
        s["found"] = []
        return s["found"]

    program = collecting.compile()
    program.run(backend=echo()).ret_value.append("mine")
    assert program.run(backend=echo()).ret_value == []


# ------------------------------------------------------------------------------------ the state


def test_a_program_that_looks_at_nothing_returns_before_its_first_call() -> None:
    @ul.function
    def saying(s: ul.State) -> None:
        s += "a" + ul.gen("x")

    gate = ul.Gate()
    state = saying.compile().run(backend=echo(gate=gate), timeout=PATIENCE)
    assert state.variables() == ["x"]
    gate.open()
    assert state["x"]


def test_a_state_goes_on_after_its_program(compiled: ul.CompiledProgram) -> None:
    state = compiled.run("cats", backend=echo())
    state += " And " + ul.gen("more", max_tokens=1)
    with state.fork(2) as branches:
        branches += ul.gen("last", max_tokens=1)
    assert state.text().count(" And ") == 1
    assert len(state["last"]) == 2
    assert state.usage.calls == 7


def test_facts_and_costs_are_those_of_the_program(compiled: ul.CompiledProgram) -> None:
    states = [program.run("cats", backend=echo()) for program in (report, compiled)]
    for state in states:
        state.sync()
    interpreted, graphed = states
    for name in ("title", "side", "end", "upper"):
        assert graphed[name] == interpreted[name]
    assert graphed.usage.calls == interpreted.usage.calls
    assert graphed.get_meta_info("end")["finish_reason"] == "length"
    assert [facts["completion_tokens"] for facts in graphed.get_meta_info("side")] == [2, 2]
    with pytest.raises(ul.VariableError, match="did you mean 'title'"):
        graphed["tittle"]


def test_objects_are_made_of_texts() -> None:
    @ul.function
    def typed(s: ul.State) -> Any:
        s += "n=" + ul.gen("n", dtype=int)
        return s.value("n")

    state = typed.compile().run(backend=Echo(["42"]))
    assert state.ret_value == state.value("n") == 42


def test_pieces_come_while_it_runs(compiled: ul.CompiledProgram) -> None:
    gate = ul.Gate()
    state = compiled.run("cats", backend=echo(gate=gate), stream=True, timeout=PATIENCE)
    gate.step(3)  # the call and two pieces
    pieces = state.text_iter("title")
    assert next(pieces)
    assert state.ret_value is None
    gate.open()
    assert "".join(state.text_iter()) == state.text()
    state._sink.run.wait_finished()
    assert state.ret_value["title"] == state["title"]


def test_coroutines_wait_for_it(compiled: ul.CompiledProgram) -> None:
    async def read() -> list[Any]:
        states = await asyncio.gather(*(compiled.run_async(topic, backend=backend) for topic in "abc"))
        return [(await state["end"], state.ret_value, await state.text()) for state in states]

    backend = echo()
    expected = [report.run(topic, backend=backend) for topic in "abc"]
    assert asyncio.run(read()) == [(state["end"], state.ret_value, state.text()) for state in expected]


# ------------------------------------------------------------------------------------ errors and ends


@pytest.mark.parametrize("call", range(1, 5))
def test_a_failing_call_ends_the_program_where_it_looks(compiled: ul.CompiledProgram, call: int) -> None:
    """The last one is looked at by nobody: its readers have the error."""
    for program in (report, compiled):
        error = CallError()
        backend = echo(faults=FailCall(call, error))
        if call < 4:
            with pytest.raises(CallError) as caught:
                program.run("cats", backend=backend, timeout=PATIENCE)
            assert caught.value is error
            continue
        state = program.run("cats", backend=backend, timeout=PATIENCE)
        assert state["title"]
        assert state.error() is error
        with pytest.raises(CallError):
            state["end"]


def test_a_text_that_cannot_be_made_ends_the_program_as_python_does() -> None:
    @ul.function
    def reaching(s: ul.State) -> None:
        s += ul.gen("many", n=2, max_tokens=1, temperature=0)
        s += str(s["many"][0][99:]) + ul.gen("b", max_tokens=1)
        s += f"{s['many'][1]:d}"

    for program in (reaching, reaching.compile()):
        with pytest.raises(ValueError, match="Unknown format code 'd'"):
            program.run(backend=echo(), timeout=PATIENCE)


def test_a_branch_that_fails_fails_the_join_and_not_its_sibling() -> None:
    @ul.function
    def split(s: ul.State) -> None:
        sides = s.fork(2)
        sides[0] += "a" + ul.gen("x", max_tokens=1, temperature=0)
        sides[1] += "b" + ul.image("there-is-no-such-picture")
        sides.join()

    @ul.function
    def shown(s: ul.State, picture: str) -> None:
        sides = s.fork(2)
        sides[0] += "a" + ul.gen("x", max_tokens=1, temperature=0)
        sides[1] += "b" + ul.image(picture)
        sides.join()

    with pytest.raises(ul.ParameterError, match="no such file"):
        split.compile()
    with pytest.raises(ul.ParameterError, match="no such file"):
        shown.compile().run("there-is-no-such-picture", backend=echo())


def test_cancelling_ends_what_is_in_flight(compiled: ul.CompiledProgram) -> None:
    gate = ul.Gate()
    backend = echo(gate=gate)
    state = compiled.run("cats", backend=backend, stream=True)
    gate.wait_for(1)
    state.cancel()
    for name in ("title", "end", "side", "upper"):
        with pytest.raises(ul.CancelledError):
            state[name]
    state._sink.run.wait_finished()
    assert backend.active == set()
    assert backend.aborted


def test_a_cancelled_task_cancels_its_run(compiled: ul.CompiledProgram) -> None:
    gate = ul.Gate()
    backend = echo(gate=gate)

    async def give_up() -> None:
        task = asyncio.ensure_future(compiled.run_async("cats", backend=backend))
        await asyncio.to_thread(gate.wait_for, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    gate.open()
    compiled.run("dogs", backend=backend)
    assert backend.aborted


def test_a_deadline_ends_the_program(compiled: ul.CompiledProgram) -> None:
    with pytest.raises(ul.DeadlineError, match=r"timeout=0\.01"):
        compiled.run("cats", backend=echo(gate=ul.Gate()), timeout=0.01)


def test_a_budget_ends_the_program_and_leaves_what_there_was_room_for(compiled: ul.CompiledProgram) -> None:
    for program in (report, compiled):
        with pytest.raises(ul.BudgetError, match="calls") as caught:
            program.run("cats", backend=echo(), budget=ul.Budget(calls=2), timeout=PATIENCE)
        state = caught.value.state
        assert isinstance(state, ul.State)
        assert state.usage.calls == 2
        assert state["title"]


def test_speculation_saves_calls_as_it_does_for_the_program() -> None:
    @ul.function(num_api_spec_tokens=20)
    def person(s: ul.State) -> Any:
        s += "Name:" + ul.gen("name", stop="\n", max_tokens=5) + "\nJob:" + ul.gen("job", stop="\n", max_tokens=5)
        return s["job"]

    paid = Capabilities("paid", speculation=True, asks_again=True, stop_regex=True, logprobs=True)
    script = {"Name:": " Ada\nJob: poet\nAge: 36\nSo it is.", "Job:": " poet\nAge"}
    states = [program.run(backend=Echo(script, capabilities=paid)) for program in (person, person.compile())]
    assert [(state["name"], state.ret_value, state.usage.calls) for state in states] == [(" Ada", " poet", 1)] * 2


# ------------------------------------------------------------------------------------ batches and files


def test_batches_give_results_in_order(compiled: ul.CompiledProgram) -> None:
    items = [{"topic": topic} for topic in "abcdef"]
    backend = echo()
    expected = [state.ret_value for state in report.run_batch(items, backend=backend)]
    assert [state.ret_value for state in compiled.run_batch(items, backend=backend)] == expected
    early = compiled.run_batch(iter(items), backend=backend, generator_style=True, num_threads=2)
    assert [state.ret_value for state in early] == expected


def test_a_failed_program_of_a_batch_stands_in_its_place(compiled: ul.CompiledProgram) -> None:
    error = CallError()
    items = [("a",), (None,), ("b",)]

    @ul.function
    def plain(s: ul.State, text: Any) -> None:
        s += text + ul.gen("x", max_tokens=1)

    outcomes = plain.compile().run_batch(items, backend=echo(), on_error="return")
    assert [type(outcome) for outcome in outcomes] == [ul.State, ul.Failure, ul.State]
    backend = echo(faults=FailCall(1, error))
    first, second = compiled.run_batch([("a",), ("b",)], backend=backend, on_error="return", num_threads=1)
    assert isinstance(first, ul.Failure)
    assert first.error is error
    assert isinstance(second, ul.State)


def test_a_file_is_the_program(compiled: ul.CompiledProgram, tmp_path: Path) -> None:
    path = tmp_path / "report.graph"
    compiled.save(path)
    loaded = ul.load(path)
    states = [program.run("cats", backend=echo()) for program in (compiled, loaded)]
    assert states[0].text() == states[1].text()
    assert states[0].ret_value == states[1].ret_value
    assert repr(loaded) == repr(compiled)
    assert loaded.name == "report"


def test_a_compiled_program_is_no_part_of_a_traced_one(compiled: ul.CompiledProgram) -> None:
    @ul.function
    def outer(s: ul.State) -> None:
        s += compiled.run("cats")["title"]

    with pytest.raises(ul.TraceError, match=r"report\.run\(\.\.\.\)"):
        outer.trace()
