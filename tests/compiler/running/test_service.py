"""A program that is shipped: what its state shows is what it would show here, whatever happens on the way."""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import umbel as ul
from hypothesis import HealthCheck, Phase, given, settings
from umbel.compiler.files import serialise
from umbel.compiler.graph import Builder, Graph, Node, Parameter
from umbel.compiler.operations import Append, Apply, Argument, Begin, Concat, Constant, Fork, Look
from umbel.compiler.running import service
from umbel.compiler.running.plan import Plan
from umbel.interpreter import loop
from umbel.interpreter.backends.echo import Echo
from umbel.lang.errors import (
    BudgetError,
    CancelledError,
    CapabilityError,
    ConstraintError,
    DeadlineError,
    GraphError,
    ParameterError,
    UmbelError,
)
from umbel.lang.programs import ProgramEnded, RunProgram, digest_of, pack_values
from umbel.lang.protocol import Backend
from umbel.srt.core.instruments import FailAt
from umbel.srt.in_process import LocalBackend

from ..random_programs import bodies, program_of
from ..watching import seen

pytestmark = pytest.mark.filterwarnings("ignore::umbel.TemplateWarning")

PATIENCE = 60.0  # seconds, far above what any of these programs needs
QUIETLY: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "phases": (Phase.explicit, Phase.generate),
    "suppress_health_check": list(HealthCheck),
}


@pytest.fixture
def backend() -> LocalBackend:
    return LocalBackend(debug={"check_every_step": False}, pool_tokens=1 << 15)


@pytest.fixture(scope="module")
def shared() -> LocalBackend:
    return LocalBackend(debug={"check_every_step": False}, pool_tokens=1 << 15)


@ul.function(temperature=0)
def advice(s: ul.State, topic: str, count: int = 2) -> dict[str, Any]:
    """Something of everything: branches, a choice, a scope, lists, several texts, an assignment, a result."""
    s += f"Advice on {topic}, {count} of it.\nplan: " + ul.gen("plan", max_tokens=6)
    branches = s.fork(3)
    for number, branch in enumerate(branches):
        branch += f"\nway {number}: " + ul.gen("way", max_tokens=4, temperature=0.8, seed=number)
    branches.join()
    with s.var_scope("verdict"):
        s += "\nbest is " + ul.select("best", ["the first", "the last"])
    s["chosen"] = branches[1]["way"].strip()
    s += f" ({s['chosen']:>8}) " + ul.gen("more", max_tokens=3, n=2, temperature=1, seed=9)
    return {"plan": s["plan"], "ways": s["way"], "upper": s["best"].upper()}


def once(program: ul.Program, backend: Backend, *, server: bool, **arguments: Any) -> ul.State:
    return program.compile(passes="none", server=server).run(**arguments, backend=backend, timeout=PATIENCE)


# --------------------------------------------------------------------------------------------- the same


def test_its_state_shows_what_it_would_show_here(backend: LocalBackend) -> None:
    here = once(advice, backend, server=False, topic="tea")
    expected = seen(here)
    asked = backend.down.carried
    shipped = once(advice, backend, server=True, topic="tea")
    assert seen(shipped) == expected
    assert shipped.ret_value == here.ret_value
    assert backend.down.carried == asked + 1
    for name in ("calls", "prompt_tokens", "completion_tokens"):
        assert getattr(shipped.usage, name) == getattr(here.usage, name)


@settings(max_examples=30, **QUIETLY)
@given(body=bodies(3))
def test_random_programs(body: tuple[object, ...], shared: LocalBackend) -> None:
    program = program_of(body, [])
    expected = seen(once(program, shared, server=False, question='why "so"? '))
    assert seen(once(program, shared, server=True, question='why "so"? ')) == expected


def test_pieces_come_as_they_are_made(backend: LocalBackend) -> None:
    pieces = []
    for server in (False, True):
        state = advice.compile(server=server).run("tea", backend=backend, stream=True, timeout=PATIENCE)
        pieces.append((list(state.text_iter("plan")), list(state.text_iter())))
        assert state["plan"] == "".join(pieces[-1][0])
    assert pieces[0] == pieces[1]
    assert len(pieces[1][0]) == 6


def test_it_runs_from_a_coroutine_and_in_a_batch(backend: LocalBackend) -> None:
    compiled = advice.compile(server=True)
    topics = ["tea", "rain", "umbels"]
    expected = [once(advice, backend, server=False, topic=topic)["plan"] for topic in topics]

    async def run() -> Any:
        state = await compiled.run_async("tea", backend=backend, timeout=PATIENCE)
        return await state["plan"]

    assert asyncio.run(run()) == expected[0]
    states = compiled.run_batch([{"topic": topic} for topic in topics], backend=backend, timeout=PATIENCE)
    assert [state["plan"] for state in states] == expected


def test_more_can_be_said_to_its_state(backend: LocalBackend) -> None:
    texts = []
    for server in (False, True):
        state = once(advice, backend, server=server, topic="tea")
        state += "\nAnd: " + ul.gen("and", max_tokens=4, temperature=0)
        texts.append(state.text())
    assert texts[0] == texts[1]


@dataclass
class Point:
    x: int
    y: int


def test_objects_are_made_here_so_their_classes_do_not_travel(backend: LocalBackend) -> None:
    @ul.function(temperature=0)
    def program(s: ul.State) -> Any:
        s += "point: " + ul.gen("point", dtype=Point, max_tokens=40)
        s += "number: " + ul.gen("number", dtype=int, max_tokens=8)
        return s.value("point")

    states = [once(program, backend, server=server) for server in (False, True)]
    assert states[0].ret_value == states[1].ret_value
    assert isinstance(states[1].ret_value, Point)
    assert states[0].value("number") == states[1].value("number")


def test_arguments_travel_as_they_are(backend: LocalBackend) -> None:
    @ul.function(temperature=0)
    def program(s: ul.State, values: Any) -> None:
        s += f"{values!r:>40} " + ul.gen("a", max_tokens=2) + ul.gen("b", max_tokens=2)

    for values in ((1, [2.5, None]), {"a": (True,), 3: 2**80}, -(2**70), b"bytes"):
        expected, shipped = (once(program, backend, server=server, values=values).text() for server in (False, True))
        assert shipped == expected


# ------------------------------------------------------------------------------------------- what fails


def kind_and_text(work: Callable[[], Any]) -> tuple[type, str]:
    with pytest.raises(Exception) as caught:  # which one is what is compared
        work()
    return type(caught.value), str(caught.value)


def too_short(s: ul.State) -> None:
    s += "x" + ul.gen("b", max_tokens=3) + ul.gen("a", max_tokens=2, regex="[a-z]{40}")
    s["c"] = s["a"]


def wrong_index(s: ul.State) -> None:
    s += "x" + ul.gen("a", max_tokens=3) + ul.gen("b", max_tokens=3)
    s += s["a"][40]


def failed_branch(s: ul.State) -> None:
    s += "x" + ul.gen("b", max_tokens=3)
    branches = s.fork(2)
    branches += " and" + ul.gen("a", max_tokens=2, regex="[a-z]{40}")
    branches.join()
    s["c"] = s["a"]


@pytest.mark.parametrize("body", [too_short, wrong_index, failed_branch])
def test_errors_are_those_that_it_would_have_had_here(body: Callable[[ul.State], None], backend: LocalBackend) -> None:
    program = ul.function(temperature=0)(body)
    ways = (False, True)
    here, shipped = (kind_and_text(lambda server=server: once(program, backend, server=server)) for server in ways)
    assert here == shipped
    assert here[0] in (ConstraintError, IndexError)


def test_what_was_known_before_an_error_can_be_read(backend: LocalBackend) -> None:
    @ul.function(temperature=0)
    def program(s: ul.State) -> None:
        s += "x" + ul.gen("good", max_tokens=3) + ul.gen("bad", max_tokens=2, regex="[a-z]{40}") + ul.gen("after")

    here, shipped = (once(program, backend, server=server) for server in (False, True))
    assert shipped["good"] == here["good"]
    for name in ("bad", "after"):
        with pytest.raises(ConstraintError, match="write max_tokens=40"):
            _ = shipped[name]
    assert shipped.usage.calls == here.usage.calls == 1
    assert isinstance(shipped.error(), ConstraintError)


@pytest.mark.parametrize("point", ["engine.forward", "engine.plan", "gateway.tokenize"])
def test_a_failing_engine_fails_the_program_and_the_next_one_runs(point: str) -> None:
    backend = LocalBackend(faults=FailAt(point, 2, RuntimeError("on purpose")))
    with pytest.raises(UmbelError):
        once(advice, backend, server=True, topic="tea")
    assert once(advice, backend, server=True, topic="tea")["plan"]


@ul.function(temperature=0, ignore_eos=True)
def endless(s: ul.State) -> None:
    s += "on" + ul.gen("a", max_tokens=2000) + ul.gen("b", max_tokens=2000)


def idle(backend: LocalBackend) -> bool:
    """Nothing is left of what was computed. Looked at on the loop that computes."""

    async def look() -> bool:
        for _ in range(10_000):
            if backend.engine.scheduler.idle:
                return True
            await asyncio.sleep(0)
        return False

    return loop.streams.run(look())


def test_cancelling_ends_it_everywhere(backend: LocalBackend) -> None:
    state = endless.compile(server=True).run(backend=backend, stream=True)
    assert next(state.text_iter("a"))
    state.cancel()
    with pytest.raises(CancelledError):
        _ = state["b"]
    assert idle(backend)


def test_a_deadline_ends_it_everywhere(backend: LocalBackend) -> None:
    state = endless.compile(server=True).run(backend=backend, timeout=0.05)
    with pytest.raises(DeadlineError):
        _ = state["b"]
    assert idle(backend)


def test_a_budget_holds_for_all_of_it(backend: LocalBackend) -> None:
    def spent(server: bool) -> Any:
        compiled = advice.compile(passes="none", server=server)
        with pytest.raises(BudgetError) as caught:
            compiled.run("tea", backend=backend, budget=ul.Budget(calls=3), timeout=PATIENCE)
        state: Any = caught.value.state
        return state.usage.calls, state["plan"], str(caught.value)

    assert spent(True) == spent(False)
    state = advice.compile(server=True).run("tea", backend=backend, budget=ul.Budget(calls=6), timeout=PATIENCE)
    assert state.usage.calls <= 6


def test_programs_that_share_a_budget_stay_here(backend: LocalBackend) -> None:
    topics = [{"topic": "tea"}, {"topic": "rain"}]
    advice.compile(server=True).run_batch(topics, backend=backend, budget=ul.Budget(calls=20), timeout=PATIENCE)
    assert backend.down.carried > 2


# --------------------------------------------------------------------------------------- what is not shipped


def test_it_stays_here_where_it_cannot_be_shipped(backend: LocalBackend) -> None:
    class Loud(str):
        def __str__(self) -> str:
            return self.upper()

    compiled = advice.compile()
    state = compiled.run(Loud("tea"), backend=backend, timeout=PATIENCE)
    assert backend.down.carried > 1
    assert state["plan"]
    with pytest.raises(ParameterError, match="a Loud cannot travel"):
        advice.compile(server=True).run(Loud("tea"), backend=backend)
    with pytest.raises(CapabilityError, match="runs no programs itself"):
        advice.compile(server=True).run("tea", backend=Echo())
    assert advice.compile(server="auto").run("tea", backend=Echo())["plan"] is not None


def test_pictures_are_read_by_who_ships_them(backend: LocalBackend, tmp_path: Path) -> None:
    @ul.function
    def program(s: ul.State, picture: Any) -> None:
        s += ul.gen("a", max_tokens=2) + ul.image(picture) + ul.gen("b", max_tokens=2)

    file = tmp_path / "picture.png"
    file.write_bytes(b"bytes of a picture")
    for picture, kind, says in (
        (str(file), ParameterError, "is no PNG"),
        (b"bytes of a picture", ParameterError, "is no PNG"),
        (str(tmp_path / "none.png"), ParameterError, "there is no such file"),
    ):
        for server in (False, True):
            with pytest.raises(kind, match=says):
                once(program, backend, server=server, picture=picture).text()
    data = serialise.encode(program.trace())
    request = RunProgram("a", digest_of(data), len(Plan(program.trace()).slots.bindings), data)
    for shown, error in ((str(file), "a server opens no files"), (b"bytes of a picture", "is no PNG")):
        arguments = pack_values({"picture": shown})
        assert error in asyncio.run(told_error(backend, msgspec.structs.replace(request, arguments=arguments)))


async def told_error(backend: LocalBackend, request: RunProgram) -> str:
    """The error of a program, refused or run."""
    try:
        events = [event async for event in backend.run_program(request)]
    except UmbelError as error:
        return str(error)
    assert isinstance(events[-1], ProgramEnded)
    assert events[-1].error is not None
    return events[-1].error.message


def test_a_single_call_saves_no_way(backend: LocalBackend) -> None:
    @ul.function
    def program(s: ul.State) -> None:
        s += "x" + ul.gen("a", max_tokens=2, temperature=0)

    once(program, backend, server=False).sync()
    sent = backend.down.carried
    state = program.compile().run(backend=backend, timeout=PATIENCE)
    state.sync()
    assert backend.down.carried == sent + 1
    assert "gateway_programs" not in backend_info(backend)


def test_server_takes_three_values() -> None:
    with pytest.raises(ParameterError, match="write True, False or 'auto'"):
        advice.compile(server="yes")  # type: ignore[arg-type]  # wrong on purpose


def backend_info(backend: LocalBackend) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        return dict((await backend.control("info")).result)

    return loop.streams.run(ask())


def test_a_graph_is_sent_once_and_read_once(backend: LocalBackend) -> None:
    compiled = advice.compile(server=True)
    for topic in ("a", "b", "c"):
        compiled.run(topic, backend=backend, timeout=PATIENCE).sync()
    info = backend_info(backend)
    assert (info["gateway_programs"], info["gateway_graphs_read"], info["gateway_graphs_found"]) == (3, 1, 2)


# ------------------------------------------------------------------------------------------ hostile graphs


def graph_of(build: Callable[[Builder, Node], Node], *, parameters: tuple[str, ...] = ()) -> Graph:
    """A program whose stream ends with what `build` puts behind its beginning."""
    builder = Builder()
    end = build(builder, builder.node(Begin("hostile")))
    result = builder.node(Constant(None))
    return builder.graph("hostile", [Parameter(name) for name in parameters], [end], [], result)


def grown(times: int) -> Callable[[Builder, Node], Node]:
    def build(builder: Builder, begin: Node) -> Node:
        text = builder.node(Constant("x"))
        for _ in range(times):
            text = builder.node(Concat(), (text, text))
        return builder.node(Append(), (begin, text))

    return build


def applied(function: str, *constants: Any) -> Callable[[Builder, Node], Node]:
    def build(builder: Builder, begin: Node) -> Node:
        text = builder.node(Apply(function, constants), (builder.node(Argument("a")),))
        return builder.node(Append(), (begin, text))

    return build


@pytest.mark.parametrize(
    "build",
    [
        applied("multiply", 10**12),
        applied("zfill", 10**12),
        applied("center", 10**12, "x"),
        applied("format", ">1000000000000"),
        applied("expandtabs", 10**12),
    ],
)
def test_texts_that_would_fill_the_memory_are_refused(build: Callable[[Builder, Node], Node]) -> None:
    shipped = service.IncomingProgram(graph_of(build, parameters=("a",)))
    with pytest.raises(GraphError, match="may make texts of"):
        shipped.text_limit.check({"a": "x\t"})


def test_texts_that_double_are_refused() -> None:
    service.IncomingProgram(graph_of(grown(10))).text_limit.check({})
    with pytest.raises(GraphError, match="may make texts of"):
        service.IncomingProgram(graph_of(grown(80))).text_limit.check({})


def bent(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The file of a good graph, changed."""
    whole = json.loads(serialise.encode(advice.trace()))
    change(whole)
    return json.dumps(whole).encode()


def place_of(whole: dict[str, Any], op: str) -> int:
    return next(number for number, node in enumerate(whole["nodes"]) if node["op"] == op)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 1_000_000,
        b'{"umbel": ' * 100_000,
        bent(lambda whole: whole["nodes"][place_of(whole, "Append")].update(inputs=[10, 10])),
        bent(lambda whole: whole["nodes"][place_of(whole, "Append")].update(inputs=[-1, 2**70])),
        bent(lambda whole: whole["nodes"][place_of(whole, "Fork")].update(size=10**9)),
        bent(lambda whole: whole["nodes"][place_of(whole, "Generate")]["gen"].update(options={"n": 10**9})),
        bent(lambda whole: whole["ends"].reverse()),
        bent(lambda whole: whole.update(nodes=[])),
    ],
    ids=["nested lists", "nested dicts", "forward", "nowhere", "forks", "n", "ends", "no nodes"],
)
def test_files_that_lie_are_refused(data: bytes) -> None:
    with pytest.raises(GraphError):
        service.read(data)


def test_sizes_are_refused_before_anything_is_made_of_them() -> None:
    def wide(builder: Builder, begin: Node) -> Node:
        return builder.node(Fork(10**6), (begin,))

    def long(builder: Builder, begin: Node) -> Node:
        end = begin
        for number in range(service.MOST_NODES):
            end = builder.node(Append(), (end, builder.node(Constant(str(number)))))
        return end

    def looking(builder: Builder, begin: Node) -> Node:
        return builder.node(Look(), (begin, builder.node(Constant("/etc/passwd"))))

    for build, says in ((wide, "1000000 branches"), (long, "nodes"), (looking, "a server opens no files")):
        with pytest.raises(GraphError, match=says):
            service.check_sizes(graph_of(build))


@pytest.fixture
def shipped() -> tuple[bytes, int]:
    """Bytes of a good graph, and how many slots it has."""
    graph = advice.trace()
    return serialise.encode(graph), len(Plan(graph).slots.bindings)


def test_mutated_bytes_are_refused_and_nothing_else_is_raised(shipped: tuple[bytes, int]) -> None:
    dice = random.Random(5)
    for _ in range(150):
        data = bytearray(shipped[0])
        for _ in range(dice.randint(1, 4)):
            place = dice.randrange(len(data))
            match dice.randrange(3):
                case 0:
                    data[place] = dice.randrange(256)
                case 1:
                    del data[place : place + dice.randint(1, 30)]
                case _:
                    data[place:place] = dice.choice((b"[", b"{", b"9", b'"', b"\xff", b"-1", b"null"))
        try:
            service.read(bytes(data))
        except (GraphError, ParameterError):
            continue


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"slots": 3}, GraphError, "the same version of umbel"),
        ({"digest": "0" * 64}, GraphError, "another digest"),
        ({"graph": b"[" * 100_000}, GraphError, "another digest"),
        ({"arguments": b"\xff\xff"}, ParameterError, "are no dict of names|cannot be read"),
        ({"arguments": pack_values([1])}, ParameterError, "are no dict of names"),
        ({"arguments": pack_values({})}, ParameterError, "misses its argument 'topic'"),
        ({"arguments": pack_values({"topic": "x", "other": 1})}, ParameterError, "no parameter 'other'"),
        ({"arguments": pack_values({"topic": "x", "count": b"\xff"}), "slots": 0}, GraphError, "the same version"),
        ({"sampling": pack_values({"temprature": 3})}, ParameterError, "did you mean 'temperature'"),
        ({"sampling": pack_values({"temperature": -3})}, ParameterError, "temperature=-3"),
    ],
)
def test_requests_that_lie_end_with_an_error(
    change: dict[str, Any], kind: type[UmbelError], says: str, shipped: tuple[bytes, int], backend: LocalBackend
) -> None:
    data, slots = shipped
    fields = {"digest": digest_of(data), "slots": slots, "graph": data, "arguments": pack_values({"topic": "x"})}

    async def ask() -> None:
        async for _ in backend.run_program(RunProgram("a", **{**fields, **change})):
            pass

    with pytest.raises(kind, match=says):
        asyncio.run(ask())
