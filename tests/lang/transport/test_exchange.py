"""The exchange: each caller gets its own answer, once, or an error."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

import pytest
from umbel.lang.errors import BackendError, ConnectionLostError, DeadlineError, EngineError, GraphError, ParameterError
from umbel.lang.programs import GraphWanted, ProgramEnded, ProgramEvent, ProgramPiece, RunProgram
from umbel.lang.protocol import (
    Abort,
    Chunk,
    Completion,
    Control,
    Done,
    Failure,
    Final,
    FinishReason,
    GenRequest,
    Hint,
    Origin,
    Scored,
    ScoreRequest,
    Usage,
)
from umbel.lang.transport.exchange import GRACE, KNOWN_GRAPHS, Exchange, Outgoing

T = TypeVar("T")


def final(label: str) -> Final:
    return Final(label, (Completion("x", (1,), 1, "", FinishReason.STOP),), Usage(calls=1))


class Wire:
    """The other side: what was sent, and an exchange to answer to."""

    def __init__(self, window: int = 8) -> None:
        self.sent: list[Outgoing] = []
        self.exchange = Exchange(self.sent.append, window=window)

    async def sent_something(self, count: int) -> None:
        while len(self.sent) < count:
            await asyncio.sleep(0)

    async def collect(self, request: GenRequest) -> list[Chunk | Final]:
        async with aclosing(self.exchange.generate(request)) as events:
            return [event async for event in events]


def run(scenario: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(scenario(), 20)

    return asyncio.run(bounded())


def test_chunks_and_finals_reach_their_own_caller_in_order() -> None:
    async def scenario() -> None:
        wire = Wire()
        tasks = [asyncio.create_task(wire.collect(GenRequest(label, ()))) for label in "ab"]
        await wire.sent_something(2)
        for label, text in (("a", "1"), ("b", "2"), ("a", "3")):
            wire.exchange.deliver(Chunk(label, 0, text))
        wire.exchange.deliver(final("b"))
        wire.exchange.deliver(final("a"))
        first, second = await asyncio.gather(*tasks)
        assert [event.text for event in first if isinstance(event, Chunk)] == ["1", "3"]
        assert [type(event) for event in second] == [Chunk, Final]
        assert wire.exchange.pending == 0

    run(scenario)


def test_closing_early_aborts_and_late_events_find_nobody() -> None:
    async def scenario() -> None:
        wire = Wire()
        events = wire.exchange.generate(GenRequest("a", ()))
        first = asyncio.ensure_future(anext(events))
        await wire.sent_something(1)
        wire.exchange.deliver(Chunk("a", 0, "x"))
        await first
        await events.aclose()
        assert wire.sent[1:] == [Abort("a")]
        wire.exchange.deliver(final("a"))
        assert wire.exchange.pending == 0

    run(scenario)


def test_a_finished_request_is_not_aborted() -> None:
    async def scenario() -> None:
        wire = Wire()
        task = asyncio.create_task(wire.collect(GenRequest("a", ())))
        await wire.sent_something(1)
        wire.exchange.deliver(final("a"))
        await task
        assert len(wire.sent) == 1

    run(scenario)


def test_a_failure_is_raised_as_its_class() -> None:
    async def scenario() -> None:
        wire = Wire()
        task = asyncio.create_task(wire.exchange.score(ScoreRequest("s", (), ("a",))))
        await wire.sent_something(1)
        wire.exchange.deliver(Failure("s", "EngineError", "it died"))
        with pytest.raises(EngineError, match="it died"):
            await task

    run(scenario)


def test_score_and_control_return_their_own_kind_and_refuse_another() -> None:
    async def scenario() -> None:
        wire = Wire()
        score = asyncio.create_task(wire.exchange.score(ScoreRequest("s", (), ("a",))))
        control = asyncio.create_task(wire.exchange.control("info"))
        wrong = asyncio.create_task(wire.exchange.score(ScoreRequest("w", (), ("a",))))
        await wire.sent_something(3)
        (asked,) = [message for message in wire.sent if isinstance(message, Control)]
        wire.exchange.deliver(Scored("s", (), Usage()))
        wire.exchange.deliver(Done(asked.id, {"a": 1}))
        wire.exchange.deliver(Done("w"))
        assert await score == Scored("s", (), Usage())
        assert (await control).result == {"a": 1}
        with pytest.raises(BackendError, match="answered by a Done"):
            await wrong

    run(scenario)


def test_a_broken_link_ends_all_that_waits_and_all_that_comes() -> None:
    async def scenario() -> None:
        wire = Wire()
        tasks = [asyncio.create_task(wire.collect(GenRequest(label, ()))) for label in "abc"]
        await wire.sent_something(3)
        wire.exchange.fail(lambda: ConnectionLostError("gone"))
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [ConnectionLostError] * 3
        assert len({id(result) for result in results}) == 3  # each has a traceback of its own
        with pytest.raises(ConnectionLostError):
            await wire.exchange.control("info")
        wire.exchange.hint(Hint("h", ()))
        assert len(wire.sent) == 3  # no aborts and no hints into the void

    run(scenario)


def test_more_requests_than_the_window_wait_their_turn() -> None:
    async def scenario() -> None:
        wire = Wire(window=2)
        tasks = [asyncio.create_task(wire.collect(GenRequest(str(index), ()))) for index in range(5)]
        for index in range(5):
            await wire.sent_something(min(index + 2, 5))
            for _ in range(10):
                await asyncio.sleep(0)
            assert len(wire.sent) == min(index + 2, 5)
            wire.exchange.deliver(final(str(index)))
        assert [events[0].id for events in await asyncio.gather(*tasks)] == list("01234")

    run(scenario)


def test_an_id_in_use_is_refused_and_a_used_one_is_not() -> None:
    async def scenario() -> None:
        wire = Wire()
        task = asyncio.create_task(wire.collect(GenRequest("a", ())))
        await wire.sent_something(1)
        with pytest.raises(ParameterError, match="'a' is in use"):
            await wire.collect(GenRequest("a", ()))
        wire.exchange.deliver(final("a"))
        await task
        again = asyncio.create_task(wire.collect(GenRequest("a", ())))
        await wire.sent_something(2)
        wire.exchange.deliver(final("a"))
        assert len(await again) == 1

    run(scenario)


def test_silence_ends_with_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's clock is moved, nobody waits."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        wire = Wire()
        task = asyncio.create_task(wire.collect(GenRequest("a", (), origin=Origin(timeout=1.0))))
        await wire.sent_something(1)
        started = loop.time()
        monkeypatch.setattr(loop, "time", lambda: started + 1.0 + GRACE + 0.1)
        with pytest.raises(DeadlineError, match="'a': no answer"):
            await task
        assert wire.sent[1:] == [Abort("a")]

    asyncio.run(scenario())


# ---------------------------------------------------------------------------------------------- programs


def shipped(label: str, digest: str = "d") -> RunProgram:
    return RunProgram(label, digest, 1, b"graph of " + digest.encode())


async def collected(wire: Wire, request: RunProgram) -> list[ProgramEvent]:
    async with aclosing(wire.exchange.program(request)) as events:
        return [event async for event in events]


def test_a_graph_travels_once_and_again_when_it_is_asked_for() -> None:
    async def scenario() -> None:
        wire = Wire()
        for number, wanted in enumerate((False, False, True)):
            wire.sent.clear()
            task = asyncio.create_task(collected(wire, shipped(str(number))))
            await wire.sent_something(1)
            if wanted:
                wire.exchange.deliver(GraphWanted(str(number)))
                await wire.sent_something(2)
            wire.exchange.deliver(ProgramPiece(str(number), 0, "x", "text"))
            wire.exchange.deliver(ProgramEnded(str(number)))
            assert [type(event) for event in await task] == [ProgramPiece, ProgramEnded]
            graphs = [message.graph for message in wire.sent if isinstance(message, RunProgram)]
            assert graphs == [[b"graph of d"], [b""], [b"", b"graph of d"]][number]

    run(scenario)


def test_who_asks_for_a_graph_that_was_sent_is_not_sent_it_for_ever() -> None:
    async def scenario() -> None:
        wire = Wire()
        task = asyncio.create_task(collected(wire, shipped("a")))
        await wire.sent_something(1)
        wire.exchange.deliver(GraphWanted("a"))
        with pytest.raises(BackendError, match="GraphWanted"):
            await task
        assert len(wire.sent) == 1

    run(scenario)


def test_leaving_a_program_early_aborts_it_and_its_failure_is_raised() -> None:
    async def scenario() -> None:
        wire = Wire()
        events = wire.exchange.program(shipped("a"))
        first = asyncio.ensure_future(anext(events))
        await wire.sent_something(1)
        wire.exchange.deliver(ProgramPiece("a", 0, "x", "text"))
        await first
        await events.aclose()
        assert wire.sent[-1] == Abort("a")
        task = asyncio.create_task(collected(wire, shipped("b")))
        await wire.sent_something(3)
        wire.exchange.deliver(Failure("b", "GraphError", "no"))
        with pytest.raises(GraphError, match="no"):
            await task
        assert wire.sent[-1] != Abort("b")
        assert wire.exchange.pending == 0

    run(scenario)


def test_only_so_many_digests_are_remembered() -> None:
    async def scenario() -> None:
        wire = Wire()
        for number in [*range(KNOWN_GRAPHS + 1), 0]:
            label = f"{number}-{len(wire.sent)}"
            task = asyncio.create_task(collected(wire, shipped(label, str(number))))
            await wire.sent_something(len(wire.sent) + 1)
            wire.exchange.deliver(ProgramEnded(label))
            await task
        assert isinstance(wire.sent[-1], RunProgram)
        assert wire.sent[-1].graph == b"graph of 0"

    run(scenario)
