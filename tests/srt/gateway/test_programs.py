"""IncomingProgram programs inside the gateway, whose engine is scripted: each ends once, and leaves nothing behind."""

import asyncio
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from umbel.compiler.files import serialise
from umbel.compiler.graph import Builder
from umbel.compiler.operations import Append, Begin, Constant, Generate, Variable
from umbel.compiler.running.plan import Plan
from umbel.lang import ops
from umbel.lang.chat_template import ChatTemplate
from umbel.lang.errors import GraphError
from umbel.lang.programs import (
    PROGRAM_HOST,
    GraphWanted,
    ProgramBudget,
    ProgramEnded,
    ProgramPiece,
    ProgramValue,
    RunProgram,
    digest_of,
    unpack_values,
)
from umbel.lang.protocol import Abort, Failure, GenRequest, Origin
from umbel.srt.core.config import GatewayLimits
from umbel.srt.core.messages import EngineFailed, Tokens
from umbel.srt.gateway.calls import Answer
from umbel.srt.gateway.gateway import Gateway
from umbel.srt.gateway.programs import GraphCache, Programs, capabilities_of
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from ..gateway_harness import CLIENT, Harness, ended

OTHER = b"other"


def graph_bytes(text: str = "Q", calls: int = 2) -> tuple[bytes, int]:
    """A program that says a text and generates variables x0, x1, ... behind it; and how many slots it has."""
    builder = Builder()
    end = builder.node(Append(), (builder.node(Begin("toy")), builder.node(Constant(text))))
    variables = []
    for number in range(calls):
        name = f"x{number}"
        end = builder.node(Generate(ops.Gen(name, {"max_tokens": 4, "temperature": 0.0})), (end,))
        variables.append((name, builder.node(Variable(name), (end,))))
    graph = builder.graph("toy", (), [end], variables, builder.node(Constant(None)))
    return serialise.encode(graph), len(Plan(graph).slots.bindings)


def program(label: str = "p", *, whole: bool = True, text: str = "Q", calls: int = 2, **fields: object) -> RunProgram:
    data, slots = graph_bytes(text, calls)
    return RunProgram(label, digest_of(data), slots, data if whole else b"", **fields)  # type: ignore[arg-type]


class World(Harness):
    """The gateway of `Harness`, with programs. Made on a running loop."""

    def __init__(self, limits: GatewayLimits = GatewayLimits()) -> None:  # noqa: B008  # frozen
        super().__init__(limits=limits)
        self.flushed = 0
        self.gateway = Gateway(
            ByteTokenizer(),
            model="toy",
            to_engines=[self.to_engine.append],
            clock=self.clock,
            limits=limits,
            seed=7,
        )
        self.gateway.engine_ready(100)
        self.programs = Programs(
            capabilities_of("runtime toy"),
            lambda: ChatTemplate(None),
            host=PROGRAM_HOST,
            to_gateway=self.gateway.receive,
            limits=limits,
            after=self._flush,
            counters=self.gateway.counters,
        )

    def receive(self, client: bytes, request: RunProgram) -> None:
        self.programs.receive(self.front_end.client(client), request)

    def _flush(self) -> None:
        self.flushed += 1

    def abort(self, client: bytes, label: str) -> bool:
        return self.programs.abort(self.front_end.client(client), label)

    def lose(self, client: bytes) -> None:
        self.programs.client_lost(self.front_end.client(client))

    def of(self, label: str, client: bytes = CLIENT) -> list[Answer]:
        return [message for message in self.front_end.answers(client) if message.id == label]

    def ending(self, label: str, client: bytes = CLIENT) -> Answer | None:
        endings = [each for each in self.of(label, client) if isinstance(each, ProgramEnded | Failure | GraphWanted)]
        assert len(endings) <= 1, "a program ends once"
        return endings[0] if endings else None

    async def calls(self, count: int) -> None:
        """Until the engine has been asked so often."""
        await until(lambda: len(self.generates()) >= count)

    def answer(self, index: int, text: str) -> None:
        """What the engine says to the call of this number."""
        self.gateway.engine_event(ended(self.generates()[index].id, list(text.encode())))


async def until(condition: Callable[[], object]) -> None:
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come to that")


def run(scenario: Callable[[World], Awaitable[None]], limits: GatewayLimits = GatewayLimits()) -> None:  # noqa: B008  # frozen
    async def bounded() -> None:
        world = World(limits)
        await asyncio.wait_for(scenario(world), 30)
        await until(lambda: not world.programs.in_flight and not world.gateway.in_flight)

    asyncio.run(bounded())


# -------------------------------------------------------------------------------------------- what is told


def test_variables_come_as_they_are_known_and_then_one_ending() -> None:
    async def scenario(world: World) -> None:
        world.receive(CLIENT, program())
        await world.calls(1)
        world.answer(0, "one")
        await world.calls(2)
        (first,) = world.of("p")
        assert isinstance(first, ProgramValue)
        assert (first.name, first.value, first.usage.calls) == ("x0", "one", 1)
        assert unpack_values(first.facts)["finish_reason"] == "length"
        world.answer(1, "two")
        await until(lambda: world.ending("p"))
        ending = world.ending("p")
        assert isinstance(ending, ProgramEnded)
        assert "".join(part.text for part in ending.prompt if not isinstance(part, bytes)) == "Qonetwo"  # type: ignore[union-attr]  # no media
        assert ending.usage.calls == 2
        assert world.flushed > 0

    run(scenario)


def test_pieces_are_told_to_who_asks_for_them() -> None:
    async def scenario(world: World) -> None:
        world.receive(CLIENT, program(calls=1, stream=True))
        await world.calls(1)
        world.gateway.engine_event(Tokens(world.generates()[0].id, list(b"on")))
        await until(lambda: len(world.of("p")) >= 3)
        world.gateway.engine_event(ended(world.generates()[0].id, list(b"e"), text_bytes=3))
        await until(lambda: world.ending("p"))
        pieces = [each for each in world.of("p") if isinstance(each, ProgramPiece)]
        assert "".join(piece.text for piece in pieces if piece.name == "x0") == "one"
        assert "".join(piece.text for piece in pieces if piece.name == "") == "Qone"

    run(scenario)


def test_a_budget_travels_with_its_program() -> None:
    async def scenario(world: World) -> None:
        world.receive(CLIENT, program(budget=ProgramBudget(calls=1)))
        await world.calls(1)
        world.answer(0, "one")
        await until(lambda: world.ending("p"))
        ending = world.ending("p")
        assert isinstance(ending, ProgramEnded)
        assert ending.error is not None
        assert ending.error.kind == "BudgetError"
        assert len(world.generates()) == 1

    run(scenario)


def test_calls_have_the_salt_priority_and_time_of_their_program() -> None:
    async def scenario(world: World) -> None:
        origin = Origin(program_id="not mine to choose", salt="mine", priority=3, timeout=50.0)
        world.receive(CLIENT, program(calls=1, origin=origin))
        world.receive(CLIENT, program("q", calls=1, origin=Origin(salt="../theirs")))
        await world.calls(1)
        schedule = world.generates()[0].schedule
        assert (schedule.salt, schedule.priority) == ("mine", 3)
        assert schedule.program_id != "not mine to choose"
        assert schedule.timeout is not None
        assert 0 < schedule.timeout <= 50.0
        world.answer(0, "one")
        await until(lambda: world.ending("p") and world.ending("q"))
        refused = world.ending("q")
        assert isinstance(refused, ProgramEnded)
        assert refused.error is not None
        assert "salt" in refused.error.message
        assert len(world.generates()) == 1

    run(scenario)


# ------------------------------------------------------------------------------------------------ graphs


def test_a_graph_that_is_not_here_is_asked_for_and_found_from_then_on() -> None:
    async def scenario(world: World) -> None:
        world.receive(CLIENT, program("a", whole=False))
        await until(lambda: world.ending("a"))
        assert isinstance(world.ending("a"), GraphWanted)
        world.receive(CLIENT, program("b"))
        await world.calls(1)
        world.receive(OTHER, program("c", whole=False))
        await world.calls(2)
        for index, text in enumerate(("b0", "c0", "b1", "c1")):
            await world.calls(index + 1)
            world.answer(index, text)
        await until(lambda: world.ending("c", OTHER))
        counters = world.gateway.counters
        assert (counters["graphs_read"], counters["graphs_found"], counters["graphs_wanted"]) == (1, 1, 1)

    run(scenario)


def test_nobody_puts_a_graph_in_the_place_of_another() -> None:
    async def scenario(world: World) -> None:
        good, evil = program("a"), program("b", text="evil")
        lie = RunProgram("b", good.digest, evil.slots, evil.graph)
        world.receive(OTHER, lie)
        await until(lambda: world.ending("b", OTHER))
        failure = world.ending("b", OTHER)
        assert isinstance(failure, Failure)
        assert "another digest" in failure.message
        world.receive(CLIENT, program("a", whole=False))
        await until(lambda: world.ending("a"))
        assert isinstance(world.ending("a"), GraphWanted)

    run(scenario)


def test_long_graphs_are_read_beside_the_loop_and_once_for_all_who_wait() -> None:
    """The reader gets its graph after others have asked for it, and after the first of them has gone."""

    async def scenario() -> None:
        limits = replace(GatewayLimits(), long_graph=0)
        read: list[bytes] = []

        def slow(data: bytes) -> bytes:
            read.append(data)
            return data

        cache = GraphCache(limits, slow, Counter())
        first = asyncio.ensure_future(cache.find(digest_of(b"graph"), b"graph"))
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(cache.find(digest_of(b"graph"), b"")) for _ in range(3)]
        await asyncio.sleep(0)
        first.cancel()
        assert await asyncio.gather(*others) == [b"graph"] * 3
        assert read == [b"graph"]

    asyncio.run(scenario())


def test_the_shelf_is_bounded_in_count_and_bytes() -> None:
    async def scenario() -> None:
        limits = replace(GatewayLimits(), kept_graphs=3, kept_graph_bytes=10)
        cache = GraphCache(limits, bytes, Counter())

        async def here(data: bytes) -> bool:
            return await cache.find(digest_of(data), b"") is not None

        for data in (b"a", b"b", b"c"):
            await cache.find(digest_of(data), data)
        assert await here(b"a")  # used just now
        await cache.find(digest_of(b"d"), b"d")
        assert [await here(data) for data in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
        await cache.find(digest_of(b"x" * 9), b"x" * 9)
        assert [await here(data) for data in (b"a", b"c", b"d", b"x" * 9)] == [False, False, True, True]
        with pytest.raises(GraphError, match="are accepted"):
            await GraphCache(replace(limits, max_graph_bytes=1), bytes, Counter()).find(digest_of(b"xx"), b"xx")

    asyncio.run(scenario())


def test_what_cannot_be_read_is_refused_whatever_reading_raises() -> None:
    async def scenario() -> None:
        def fail(data: bytes) -> bytes:
            raise RecursionError

        with pytest.raises(GraphError, match="cannot be read: RecursionError"):
            await GraphCache(GatewayLimits(), fail, Counter()).find(digest_of(b"x"), b"x")

    asyncio.run(scenario())


# ----------------------------------------------------------------------------------------------- endings


def test_an_abort_ends_the_program_and_its_calls() -> None:
    async def scenario(world: World) -> None:
        world.receive(CLIENT, program())
        await world.calls(1)
        assert not world.abort(OTHER, "p")
        assert world.abort(CLIENT, "p")
        await until(lambda: world.ending("p"))
        failure = world.ending("p")
        assert isinstance(failure, Failure)
        assert failure.kind == "CancelledError"
        await until(lambda: world.aborts() == [world.generates()[0].id])
        world.answer(0, "late")
        assert not world.abort(CLIENT, "p")

    run(scenario)


def test_a_client_that_goes_takes_its_programs_with_it_and_no_others() -> None:
    async def scenario(world: World) -> None:
        world.receive(CLIENT, program())
        await world.calls(1)
        world.receive(OTHER, program())
        await world.calls(2)
        world.lose(CLIENT)
        await until(lambda: world.aborts() == [world.generates()[0].id])
        world.answer(0, "late")
        world.answer(1, "one")
        await world.calls(3)
        world.answer(2, "two")
        await until(lambda: world.ending("p", OTHER))
        assert world.of("p") == []
        assert world.gateway.counters["programs_orphaned"] == 1

    run(scenario)


def test_a_deadline_ends_it() -> None:
    async def scenario(world: World) -> None:
        world.receive(CLIENT, program(origin=Origin(timeout=0.0)))
        await until(lambda: world.ending("p"))
        failure = world.ending("p")
        assert isinstance(failure, Failure)
        assert failure.kind == "DeadlineError"

    run(scenario)


def test_a_program_does_not_notice_that_its_engine_was_replaced() -> None:
    async def scenario(world: World) -> None:
        world.receive(CLIENT, program("p", calls=1))
        await world.calls(1)
        world.gateway.engine_lost("signal 9")
        world.gateway.engine_ready(100)
        await world.calls(2)
        world.answer(1, "one")
        await until(lambda: world.ending("p"))
        ending = world.ending("p")
        assert isinstance(ending, ProgramEnded)
        assert ending.error is None

    run(scenario)


def test_a_second_engine_that_dies_ends_it_with_the_cause() -> None:
    async def scenario(world: World) -> None:
        world.receive(CLIENT, program())
        await world.calls(1)
        world.gateway.engine_lost("signal 11")
        world.gateway.engine_ready(100)
        await world.calls(2)
        world.gateway.engine_lost("signal 9")
        await until(lambda: world.ending("p"))
        ending = world.ending("p")
        assert isinstance(ending, ProgramEnded)
        assert ending.error is not None
        assert (ending.error.kind, "signal 9" in ending.error.message) == ("EngineError", True)
        world.gateway.engine_ready(100)
        world.receive(CLIENT, program("again", calls=1))
        await world.calls(3)
        world.answer(2, "one")
        await until(lambda: world.ending("again"))

    run(scenario)


def test_a_failing_call_fails_what_needs_it() -> None:
    async def scenario(world: World) -> None:
        world.receive(CLIENT, program())
        await world.calls(1)
        world.gateway.engine_event(EngineFailed(world.generates()[0].id, "EngineError", "out of luck"))
        await until(lambda: world.ending("p"))
        values = [each for each in world.of("p") if isinstance(each, ProgramValue)]
        assert [value.error and value.error.message for value in values] == ["out of luck", "out of luck"]

    run(scenario)


# ------------------------------------------------------------------------------------------------ limits


def test_programs_beyond_the_limits_are_refused_at_once() -> None:
    limits = replace(GatewayLimits(), max_programs=1, max_argument_bytes=10)

    async def scenario(world: World) -> None:
        for label, request, kind in (
            ("long", program("long", arguments=b"x" * 11), "OverloadedError"),
            ("x" * 300, program("x" * 300), "ParameterError"),
            ("late", program("late", origin=Origin(timeout=float("nan"))), "ParameterError"),
        ):
            world.receive(CLIENT, request)
            failure = world.ending(label)
            assert isinstance(failure, Failure)
            assert failure.kind == kind
        world.receive(CLIENT, program(calls=1))
        world.receive(CLIENT, program("more"))
        failure = world.ending("more")
        assert isinstance(failure, Failure)
        assert failure.kind == "OverloadedError"
        await world.calls(1)
        world.answer(0, "one")
        await until(lambda: world.ending("p"))
        world.receive(CLIENT, program("now", calls=0))
        await until(lambda: isinstance(world.ending("now"), ProgramEnded))

    run(scenario, limits)


def test_an_id_in_use_is_refused_and_the_program_that_has_it_runs_on() -> None:
    async def scenario(world: World) -> None:
        world.receive(CLIENT, program(calls=1))
        world.receive(CLIENT, program(calls=1))
        (failure,) = world.of("p")
        assert isinstance(failure, Failure)
        assert "is in use" in failure.message
        world.front_end.delivered.clear()
        await world.calls(1)
        world.answer(0, "one")
        await until(lambda: isinstance(world.ending("p"), ProgramEnded))

    run(scenario)


def test_programs_leave_room_in_the_queue_for_calls_of_clients() -> None:
    limits = replace(GatewayLimits(), max_queue=4)

    async def scenario(world: World) -> None:
        for number in range(6):
            world.receive(CLIENT, program(str(number), calls=1))
        await world.calls(2)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(world.generates()) == 2
        world.send(GenRequest("g", ()), OTHER)
        assert world.front_end.delivered == [] or not isinstance(world.front_end.delivered[-1][1], Failure)
        world.send(Abort("g"), OTHER)
        for index in range(7):
            await world.calls(index + 1)
            world.answer(index, "x")
        await until(lambda: all(world.ending(str(number)) for number in range(6)))

    run(scenario, limits)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_every_program_ends_once(seed: int) -> None:
    """Programs, answers, failures, aborts, clients that leave and engines that die, in an order drawn from the seed."""
    dice = random.Random(seed)

    async def scenario(world: World) -> None:
        sent: list[tuple[bytes, str]] = []
        gone: set[bytes] = set()
        answered = 0

        def answer() -> None:
            nonlocal answered
            call = world.generates()[answered].id
            answered += 1
            if dice.random() < 0.1:
                world.gateway.engine_event(EngineFailed(call, "EngineError", "out of luck"))
            else:
                world.gateway.engine_event(ended(call, list(b"text")))

        for number in range(60):
            client = dice.choice([client for client in (CLIENT, OTHER, b"third") if client not in gone] or [b"last"])
            match dice.choices(("send", "answer", "abort", "leave", "kill"), (40, 50, 12, 1, 3))[0]:
                case "send":
                    calls, stream = dice.randint(0, 3), dice.random() < 0.5
                    whole = dice.random() < 0.8
                    sent.append((client, str(number)))
                    world.receive(client, program(str(number), calls=calls, stream=stream, whole=whole))
                case "answer" if answered < len(world.generates()):
                    answer()
                case "abort" if sent:
                    world.abort(*dice.choice(sent))
                case "leave":
                    gone.add(client)
                    world.lose(client)
                case "kill":
                    world.gateway.engine_lost("killed")
                    world.gateway.engine_ready(100)
            for _ in range(dice.randint(0, 12)):
                await asyncio.sleep(0)
        while world.programs.in_flight:
            if answered < len(world.generates()):
                answer()
            await asyncio.sleep(0)
        for client, label in sent:
            ending = world.ending(label, client)  # asserts that there is no second one
            assert ending is not None or client in gone
            if ending is not None:
                assert world.of(label, client)[-1] is ending, "nothing is told after the end"

    run(scenario)


_LOADED = """
import sys
import umbel.srt.gateway.server
late = ("umbel.interpreter", "umbel.compiler", "torch", "transformers")
print([name for name in sys.modules if name.startswith(late)])
"""


@pytest.mark.processes
def test_a_gateway_loads_what_runs_programs_when_the_first_one_comes_and_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
