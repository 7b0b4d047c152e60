"""A program that a server runs: one request, the values of a run at home, and nothing of the server in reach."""

import asyncio
import base64
import contextlib
import datetime
import gc
import json
import random
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
import umbel as ul
from hypothesis import HealthCheck, Phase, given, settings
from umbel.compiler.files import serialise
from umbel.compiler.graph import Builder, Graph, Node, Parameter
from umbel.compiler.operations import Append, Argument, Begin, Constant, Leaf, Look, Structure
from umbel.compiler.running import hosted
from umbel.compiler.running.hosted import HostedGraph, HostedRun, RunOutcome, TextPiece, VariableSet, as_json
from umbel.interpreter.backends.echo import Echo
from umbel.interpreter.body import run_options
from umbel.lang.errors import (
    BudgetError,
    CapabilityError,
    DeadlineError,
    GraphError,
    ParameterError,
    ProgramError,
    ResultError,
    UmbelError,
)
from umbel.lang.protocol import Backend
from umbel.srt.in_process import LocalBackend

from ..random_programs import bodies, program_of
from .test_service import advice

pytestmark = pytest.mark.filterwarnings("ignore::umbel.TemplateWarning")

T = TypeVar("T")


def backend() -> LocalBackend:
    return LocalBackend(debug={"check_every_step": False}, pool_tokens=1 << 15)


def hosted_of(program: ul.Program) -> HostedGraph:
    return HostedGraph.read(serialise.encode(program.trace()), source="a test")


def begun(program: HostedGraph, on: Backend, arguments: dict[str, Any], **options: Any) -> HostedRun:
    return program.start(arguments, run_options({"backend": on, "timeout": 60.0, **options}))


def outcome(program: HostedGraph, on: Backend, arguments: dict[str, Any], **options: Any) -> RunOutcome:
    async def run() -> RunOutcome:
        return await begun(program, on, arguments, **options).outcome()

    return asyncio.run(run())


def at_home(program: ul.Program, **arguments: Any) -> ul.State:
    return program.compile(server=False).run(**arguments, backend=backend(), timeout=60.0)


async def all_of(run: HostedRun) -> list[Any]:
    return [event async for events in run.events() for event in events]


def closed(on: LocalBackend, work: Coroutine[Any, Any, T]) -> T:
    """Runs on a loop of its own, with the backend that it closes there."""

    async def run() -> T:
        try:
            return await work
        finally:
            await on.close()

    return asyncio.run(run())


# ------------------------------------------------------------------------------------------- the same


def test_a_run_is_one_request_and_gives_what_a_run_at_home_gives() -> None:
    expected, on = at_home(advice, topic="tea"), backend()

    async def work() -> tuple[RunOutcome, int, dict[str, Any]]:
        await on.start()
        before = on.down.carried
        got = await begun(hosted_of(advice), on, {"topic": "tea"}).outcome()
        return got, on.down.carried - before, (await on.control("info")).result

    got, carried, info = closed(on, work())
    assert got.variables == {name: expected[name] for name in expected.variables()}
    assert got.result == expected.ret_value
    assert got.usage.calls == expected.usage.calls
    assert got.error is None
    assert carried == 1
    assert info["gateway_programs"] == 1


@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@given(body=bodies(3))
def test_random_programs(body: tuple[object, ...]) -> None:
    program = program_of(body, [])
    expected = at_home(program, question='why "so"? ')
    got = outcome(hosted_of(program), backend(), {"question": 'why "so"? '})
    assert got.variables == {name: as_json(expected[name]) for name in expected.variables()}
    assert got.result == as_json(expected.ret_value)


def test_a_program_of_one_call_is_shipped_too() -> None:
    @ul.function(temperature=0)
    def program(s: ul.State) -> None:
        s += "x" + ul.gen("a", max_tokens=2)

    on = backend()

    async def work() -> dict[str, Any]:
        await begun(hosted_of(program), on, {}).outcome()
        return (await on.control("info")).result

    assert closed(on, work())["gateway_programs"] == 1


def test_options_of_the_run_reach_its_calls() -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += "x" + ul.gen("a") + ul.gen("b", max_tokens=2)

    got = outcome(hosted_of(program), backend(), {}, max_tokens=3, temperature=0, ignore_eos=True)
    assert got.usage.completion_tokens == 5


def test_typed_variables_are_objects_and_texts() -> None:
    @ul.function(temperature=0)
    def program(s: ul.State) -> Any:
        s += "age " + ul.gen("age", dtype=int, max_tokens=4) + " name " + ul.gen("name", max_tokens=2)
        return s.value("age")

    got = outcome(hosted_of(program), backend(), {})
    assert got.objects == {"age": int(got.variables["age"])}
    assert got.result == got.objects["age"]
    assert got.text == str(got.result)


def test_a_text_that_is_no_object_is_named_and_the_rest_is_there() -> None:
    @ul.function(temperature=0)
    def program(s: ul.State) -> None:
        s += "list " + ul.gen("list", dtype=list[int], stop="[", max_tokens=20) + ul.gen("b", max_tokens=2)

    got = outcome(hosted_of(program), backend(), {})
    assert "it ended at stop='['" in got.unreadable["list"]
    assert got.variables["list"] == ""
    assert got.objects == {}
    assert got.error is None


# -------------------------------------------------------------------------------------------- events


def test_pieces_of_every_branch_come_before_their_values_and_the_outcome_last() -> None:
    async def work() -> list[Any]:
        return await all_of(begun(hosted_of(advice), backend(), {"topic": "tea"}, stream=True))

    events = asyncio.run(work())
    end = events[-1]
    assert isinstance(end, RunOutcome)
    for number, text in enumerate(end.variables["way"]):
        pieces = [e.text for e in events if isinstance(e, TextPiece) and (e.variable, e.branch) == ("way", str(number))]
        assert len(pieces) == 4
        assert "".join(pieces) == text
    values = {(e.variable, e.branch): e.value for e in events if isinstance(e, VariableSet)}
    assert values[("way", "")] == end.variables["way"]
    assert values[("best", "")] == end.variables["best"]


def test_branches_of_branches_and_programs_inside_have_paths() -> None:
    @ul.function(temperature=0)
    def inner(s: ul.State) -> None:
        s += "in" + ul.gen("x", max_tokens=1)

    @ul.function(temperature=0)
    def program(s: ul.State) -> None:
        for branch in s.fork(2):
            branch += "a" + ul.gen("x", max_tokens=1)
            twig = branch.fork(2)[1]
            twig += "b" + ul.gen("y", max_tokens=1)
        s += inner.run()["x"] + ul.gen("z", max_tokens=1)

    read = hosted_of(program)
    names = {(read.plan.slots.bindings[slot][0], branch) for slot, branch in read.branches.items()}
    assert names == {("x", "0"), ("x", "1"), ("y", "0.1"), ("y", "1.1"), ("x", "run1"), ("z", "")}


def test_a_run_that_is_not_streamed_gives_its_values_alone() -> None:
    async def work() -> list[Any]:
        return await all_of(begun(hosted_of(advice), backend(), {"topic": "tea"}))

    events = asyncio.run(work())
    assert not any(isinstance(event, TextPiece) for event in events)
    assert isinstance(events[-1], RunOutcome)


@pytest.mark.parametrize("streamed", [True, False])
def test_leaving_a_run_ends_it_everywhere(streamed: bool) -> None:
    @ul.function(temperature=0, ignore_eos=True)
    def endless(s: ul.State) -> Any:
        s += "on" + ul.gen("a", max_tokens=2000) + ul.gen("b", max_tokens=2000)
        return s["b"]

    on = backend()
    complaints: list[dict[str, Any]] = []

    async def work() -> bool:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        run = begun(hosted_of(endless), on, {}, stream=streamed)
        if streamed:
            events = run.events()
            assert isinstance((await anext(events))[0], TextPiece)
            await events.aclose()
        else:
            task = asyncio.create_task(run.outcome())
            while on.down.carried == 0:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        for _ in range(10_000):
            if on.engine.scheduler.idle:
                return True
            await asyncio.sleep(0)
        return False

    assert closed(on, work())
    gc.collect()
    assert complaints == []


# --------------------------------------------------------------------------------------------- answers


@ul.function(temperature=0)
def echo(s: ul.State, question: str, words: int = 3) -> Any:
    s += ul.user(question) + ul.assistant(ul.gen("thought", max_tokens=4))
    s += ul.user(f"in {words} words") + ul.assistant(ul.gen("answer", max_tokens=6))
    return s["answer"]


def pieces_of_answer(program: ul.Program, arguments: dict[str, Any]) -> tuple[list[str], RunOutcome]:
    async def work() -> list[Any]:
        return [piece async for piece in begun(hosted_of(program), backend(), arguments, stream=True).answer()]

    *pieces, end = asyncio.run(work())
    return pieces, end


def test_the_variable_that_is_returned_is_answered_piece_by_piece() -> None:
    pieces, end = pieces_of_answer(echo, {"question": "why?"})
    assert len(pieces) == 6
    assert "".join(pieces) == end.text == end.result == end.variables["answer"]


def test_a_text_around_variables_is_answered_as_far_as_it_is_certain() -> None:
    @ul.function(temperature=0, ignore_eos=True)
    def program(s: ul.State, question: str) -> Any:
        s += question + ul.gen("first", max_tokens=3) + ul.select("choice", ["yes", "no"])
        s += ul.gen("age", dtype=int, max_tokens=2) + ul.gen("many", max_tokens=2, n=2, temperature=1, seed=1)
        s += ul.gen("last", max_tokens=2)
        return (
            f"{s['last']}{question} {s['first']}, {s['choice']:>5}{s['age']} {s['many'][1]} \ud83d{s['last'].upper()}"
        )

    pieces, end = pieces_of_answer(program, {"question": "why?"})
    assert end.error is None
    assert "".join(pieces) == end.text == as_json(end.result)
    assert len(pieces) == 2
    assert pieces[0] == end.variables["last"][0]


@pytest.mark.parametrize("index", [0, 40])
def test_an_answer_that_fails_on_its_way_ends_with_the_error(index: int) -> None:
    @ul.function(temperature=0, ignore_eos=True)
    def program(s: ul.State, question: str) -> Any:
        s += question + ul.gen("a", max_tokens=3)
        return f"{question}: {s['a'][index]}{s['a']}"

    pieces, end = pieces_of_answer(program, {"question": "why?"})
    assert (end.error is None) == (index == 0)
    assert "".join(pieces) == (end.text if index == 0 else "why?: ")


def test_another_result_is_answered_in_one_piece() -> None:
    pieces, end = pieces_of_answer(advice, {"topic": "tea"})
    assert pieces == [end.text]
    assert json.loads(end.text) == end.result


def test_a_program_without_a_result_answers_with_its_last_assistant_turn() -> None:
    @ul.function(temperature=0)
    def program(s: ul.State, question: str) -> None:
        s += ul.user(question) + ul.assistant("It is " + ul.gen("a", max_tokens=3))
        s += ul.user("sure?")

    pieces, end = pieces_of_answer(program, {"question": "why?"})
    assert pieces == [end.text] == [f"It is {end.variables['a']}"]


def test_a_program_that_can_answer_no_message_says_what_to_write() -> None:
    @ul.function
    def silent(s: ul.State, question: str) -> None:
        s += question + ul.gen("a", max_tokens=1)

    @ul.function
    def two(s: ul.State, question: str, other: str) -> Any:
        s += question + other + ul.gen("a", max_tokens=1)
        return s["a"]

    hosted_of(echo).check_answers("question")
    for program, parameter, says in (
        (echo, "questoin", "did you mean 'question'"),
        (silent, "question", "write return s"),
        (two, "question", "needs other next to question"),
        (looking, "picture", "is a picture"),
    ):
        with pytest.raises(ParameterError, match=says):
            hosted_of(program).check_answers(parameter)


# ------------------------------------------------------------------------------------------- described


@ul.function
def looking(s: ul.State, picture: Any, question: str = "What is it?", more: Any = None) -> Any:
    s += ul.image(picture) + question + ul.gen("a", max_tokens=2) + f"{more!r}"
    return s["a"]


def test_parameters_are_a_json_schema() -> None:
    read = hosted_of(looking)
    assert read.parameters == {
        "type": "object",
        "properties": {
            "picture": {"type": "string", "contentEncoding": "base64"},
            "question": {"type": "string", "default": "What is it?"},
            "more": {"default": None},
        },
        "required": ["picture"],
        "additionalProperties": False,
    }
    assert hosted_of(advice).parameters["properties"]["topic"] == {"type": ["string", "number", "boolean"]}


def test_variables_have_kinds() -> None:
    assert hosted_of(advice).variables == {
        "plan": "text",
        "way": "list",
        "best": "text",
        "verdict": "text",
        "chosen": "value",
        "more": "texts",
    }


# --------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "misses its argument 'topic'; its parameters are topic, count"),
        ({"topic": "tea", "color": 1}, "has no parameter 'color'"),
        ({"topic": None}, "cannot put argument 'topic'"),
        ({"topic": "\ud83d"}, "is no character"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_runs(arguments: dict[str, Any], says: str) -> None:
    on = backend()
    with pytest.raises(ParameterError, match=says):
        outcome(hosted_of(advice), on, arguments)
    assert on.down.carried == 0


@pytest.mark.parametrize("option", [{"verbose": True}, {"num_api_spec_tokens": 8}])
def test_options_that_have_no_meaning_on_a_server_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="leave them out"):
        outcome(hosted_of(advice), backend(), {"topic": "tea"}, **option)


def test_a_backend_that_runs_no_programs_is_refused() -> None:
    with pytest.raises(CapabilityError, match="runs no programs itself"):
        outcome(hosted_of(advice), Echo(), {"topic": "tea"})


def test_a_program_that_cannot_be_shipped_is_refused_when_it_is_read() -> None:
    @ul.function
    def dated(s: ul.State) -> None:
        s += "when " + ul.gen("when", dtype=datetime.date)

    builder = Builder()
    begin = builder.node(Begin("open"))
    turn = builder.node(ul.lang.ops.RoleBegin("user"), (begin,))
    opened = builder.graph("open", (), (turn,), (), builder.node(Constant(None)))
    with pytest.raises(GraphError, match=r"cannot run in one request: .* leaves a role"):
        HostedGraph.read(serialise.encode(opened), source="x")
    with pytest.raises(GraphError, match="may refuse what was generated"):
        hosted_of(dated)


def graph_of_picture(parameter: Parameter) -> bytes:
    builder = Builder()
    begin = builder.node(Begin("look"))
    look = builder.node(Look(), (begin, builder.node(Argument("picture"))))
    said = builder.node(Append(), (look, builder.node(Constant("?"))))
    return serialise.encode(builder.graph("look", (parameter,), (said,), (), builder.node(Constant(None))))


def test_no_file_of_the_server_is_shown(tmp_path: Path) -> None:
    """Neither by the default of a parameter nor by an argument; the file is there, so a look would find it."""
    file = tmp_path / "secret.png"
    file.write_bytes(base64.b64decode("iVBORw0KGgo="))
    for default in (file, str(file), None):
        with pytest.raises(GraphError, match="a server opens no files"):
            HostedGraph.read(graph_of_picture(Parameter("picture", False, default)), source="x")
    read = HostedGraph.read(graph_of_picture(Parameter("picture")), source="x")
    for given_picture in (str(file), f"file://{file}", 3, {"path": str(file)}, [str(file)]):
        with pytest.raises(ParameterError, match="is no base64"):
            outcome(read, backend(), {"picture": given_picture})


@pytest.mark.parametrize("head", ["", "data:image/png;base64,"])
def test_pictures_are_base64_or_data_urls_of_it(head: str) -> None:
    picture = head + base64.b64encode(b"bytes of a picture").decode()
    got = outcome(hosted_of(looking), backend(), {"picture": picture})
    assert "is no PNG" in str(got.error)


# ------------------------------------------------------------------------------------------- what fails


def test_a_fault_of_the_program_is_its_error() -> None:
    @ul.function(temperature=0)
    def program(s: ul.State) -> None:
        s += "x" + ul.gen("a", max_tokens=2)
        s["b"] = s["a"][40]

    got = outcome(hosted_of(program), backend(), {})
    assert isinstance(got.error, ProgramError)
    assert "IndexError" in str(got.error)
    assert set(got.variables) == {"a"}
    assert got.result is None


def test_a_budget_leaves_what_it_had_room_for() -> None:
    got = outcome(hosted_of(advice), backend(), {"topic": "tea"}, budget=ul.Budget(calls=3))
    assert isinstance(got.error, BudgetError)
    assert "plan" in got.variables
    assert "best" not in got.variables
    assert got.usage.calls <= 3


def test_an_error_that_the_program_does_not_look_at_is_the_run_s() -> None:
    @ul.function(temperature=0)
    def program(s: ul.State) -> None:
        s += "x" + ul.gen("a", max_tokens=2) + ul.gen("b", max_tokens=2, regex="[a-z]{40}")

    got = outcome(hosted_of(program), backend(), {})
    assert "max_tokens=40" in str(got.error)
    assert set(got.variables) == {"a"}


def test_a_deadline_ends_it() -> None:
    @ul.function(temperature=0, ignore_eos=True)
    def endless(s: ul.State) -> Any:
        s += "on" + ul.gen("a", max_tokens=2000) + ul.gen("b", max_tokens=2000)
        return s["b"]

    got = outcome(hosted_of(endless), backend(), {}, timeout=0.02)
    assert isinstance(got.error, DeadlineError)


# ---------------------------------------------------------------------------------------------- values


def test_every_value_of_a_program_has_json() -> None:
    value = {
        "tuple": (1, [2.5, None, True]),
        3: b"bytes",
        "set": {"b", "a"},
        "numbers": [float("nan"), float("inf"), 2**80, -(2**63), 2**64 - 1],
        "half": "a\ud83d",
        "path": Path("cat.png"),
        "day": datetime.date(2024, 2, 29),
    }
    assert as_json(value) == {
        "tuple": [1, [2.5, None, True]],
        "3": "Ynl0ZXM=",
        "set": ["a", "b"],
        "numbers": [None, None, str(2**80), -(2**63), 2**64 - 1],
        "half": "a?",
        "path": "cat.png",
        "day": "2024-02-29",
    }


def doubled(times: int) -> Graph:
    """A graph that returns a list of two lists of two lists ... of its argument."""
    builder = Builder()
    node: Node = builder.node(Argument("x"))
    for _ in range(times):
        node = builder.node(Structure([Leaf(0), Leaf(1)]), (node, node))
    begin = builder.node(Begin("doubled"))
    said = builder.node(Append(), (begin, builder.node(Constant("?"))))
    return builder.graph("doubled", (Parameter("x"),), (said,), (), node)


@pytest.mark.parametrize(("times", "says"), [(60, "more than"), (200, "lists in lists")])
def test_an_answer_of_any_size_is_refused(times: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "MOST_ANSWER", 10_000)
    read = HostedGraph.read(serialise.encode(doubled(times)), source="x")
    got = outcome(read, backend(), {"x": "y"})
    assert isinstance(got.error, ResultError)
    assert says in str(got.error)


# ---------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize(("what", "most"), [("parameters", 256), ("variables", 4_096)])
def test_parameters_and_variables_are_few(what: str, most: int) -> None:
    builder = Builder()
    begin = builder.node(Begin("many"))
    value = builder.node(Constant(None))
    names = [f"x{number}" for number in range(most + 1)]
    parameters = [Parameter(name) for name in names] if what == "parameters" else []
    variables = [(name, value) for name in names] if what == "variables" else []
    data = serialise.encode(builder.graph("many", parameters, (begin,), variables, value))
    with pytest.raises(GraphError, match=f"has {most + 1} {what}, and {most} are the most"):
        HostedGraph.read(data, source="x")


def test_bytes_that_are_no_graph_are_refused_and_nothing_else_is_raised() -> None:
    whole, draw = serialise.encode(advice.trace()), random.Random(5)
    text = whole.decode()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 6)):
            at = draw.randrange(len(data))
            match draw.randrange(3):
                case 0:
                    data[at] = draw.randrange(256)
                case 1:
                    del data[at : at + draw.randrange(40)]
                case _:
                    data[at:at] = draw.choice([b"{", b"]", b"null", b"1e999", b'"\\ud800"', b"-7", b"[[[["])
        with contextlib.suppress(UmbelError):
            HostedGraph.read(bytes(data), source="x")
    for data in (b"", b"\xff", b"[" * 100_000, b"null", text[: len(text) // 2].encode(), b'{"umbel": "graph"}'):
        with pytest.raises(GraphError):
            HostedGraph.read(bytes(data), source="x")
