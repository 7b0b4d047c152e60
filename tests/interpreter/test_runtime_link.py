"""A program's end of the socket, with the test as the gateway."""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
import umbel
import zmq
from umbel.interpreter.backends import runtime_gateway, runtime_link
from umbel.interpreter.backends.runtime_gateway import LocalGateway
from umbel.interpreter.backends.runtime_link import Link
from umbel.lang.errors import ConnectionLostError, ParameterError, RequestError
from umbel.lang.prompt import Text
from umbel.lang.protocol import Done, Failure, Final, GenRequest, ReadStatus, StatusRead, Usage, VocabularyInfo
from umbel.lang.status import EngineState, RuntimeState, RuntimeStatus
from umbel.lang.transport.link import (
    Codec,
    FromGateway,
    Hello,
    Inbound,
    Outbound,
    Ping,
    Pong,
    Progress,
    ToGateway,
    Welcome,
)
from umbel.lang.transport.process_life import ProcessSample, ProcessState, TimeSpent


class FakeProcess(LocalGateway):
    """A gateway process as far as a link looks at it. It never tells of its end: the link has to look."""

    address = "inproc://gateway"
    process_id = os.getpid()

    def __init__(self) -> None:
        super().__init__()
        self.ended: str | None = None

    def exit_descriptor(self) -> int | None:
        return None

    def exit_reason(self) -> str | None:
        return self.ended

    def end_hung(self, reason: str) -> None:
        self.ended = reason

    def close(self) -> None:
        """It is the test's own process."""


class Gateway:
    """The other end: reads frames when asked to, and says what it is told to say."""

    def __init__(self) -> None:
        self.process = FakeProcess()
        self._socket = runtime_link.context().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.process.address)
        self._inbound: Inbound[ToGateway] = Inbound(Codec(ToGateway), Counter())
        self._outbound: Outbound[FromGateway] = Outbound(Codec(FromGateway))

    def frames(self) -> list[list[ToGateway]]:
        """What has come, without signs of life."""
        frames = []
        while self._socket.poll(0):
            messages = self._inbound.read(self._socket.recv_multipart())
            if not all(isinstance(message, Ping) for message in messages):
                frames.append(messages)
        return frames

    async def next_frames(self) -> list[list[ToGateway]]:
        while not (frames := self.frames()):
            await asyncio.sleep(0)
        return frames

    def say(self, *messages: FromGateway) -> None:
        self._socket.send_multipart(self._outbound.write(messages))

    def close(self) -> None:
        self._socket.close(linger=0)


WELCOME = Welcome("toy", 100, VocabularyInfo(300, None, (), {}), 100, 8, 60.0, None, {}, 8)


def play(
    monkeypatch: pytest.MonkeyPatch,
    story: Callable[[Link, Gateway], Awaitable[None]],
    welcome: Welcome | Progress = WELCOME,
) -> None:
    context = zmq.Context[zmq.Socket[bytes]]()

    class Pair:
        """A DEALER would need a ROUTER, which names its peers: a PAIR is enough here."""

        def socket(self, _: int) -> "zmq.Socket[bytes]":
            return context.socket(zmq.PAIR)

    monkeypatch.setattr(runtime_link, "context", Pair)

    async def told() -> None:
        gateway = Gateway()
        link = Link(gateway.process, lambda _: None)
        try:
            async with asyncio.timeout(10):
                assert await gateway.next_frames() == [[Hello(umbel.__version__)]]
                gateway.say(welcome)
                while link._phase == "starting the gateway" and link.welcome is None:
                    await asyncio.sleep(0)
                await story(link, gateway)
        finally:
            await link.close()
            gateway.close()

    asyncio.run(told())
    context.term()


async def ask(link: Link, label: str, text: str = "hello") -> Final:
    exchange = await link.ready(60.0)
    async for event in exchange.generate(GenRequest(label, (Text(text),))):
        if isinstance(event, Final):
            return event
    raise AssertionError("no ending")


def test_what_is_asked_in_one_turn_of_the_loop_travels_as_one_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(link: Link, gateway: Gateway) -> None:
        calls = [asyncio.create_task(ask(link, str(number))) for number in range(5)]
        (frame,) = await gateway.next_frames()
        assert [message.id for message in frame if isinstance(message, GenRequest)] == list("01234")
        gateway.say(*(Final(str(number), (), Usage()) for number in range(5)))
        assert [final.id for final in await asyncio.gather(*calls)] == list("01234")

    play(monkeypatch, story)


def test_a_request_that_cannot_travel_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(link: Link, gateway: Gateway) -> None:
        link._codec.max_bytes = 1000
        calls = [
            asyncio.create_task(ask(link, "large", "x" * 1000)),
            asyncio.create_task(ask(link, "half", "\ud800")),
            asyncio.create_task(ask(link, "good")),
        ]
        (frame,) = await gateway.next_frames()
        gateway.say(Final("good", (), Usage()))
        large, half, good = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(large, RequestError)
        assert isinstance(half, ParameterError)
        assert isinstance(good, Final)
        assert [message.id for message in frame if isinstance(message, GenRequest)] == ["good"]

    play(monkeypatch, story)


def test_frames_stay_below_the_limit_however_much_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(link: Link, gateway: Gateway) -> None:
        link._codec.max_bytes = 1000
        calls = [asyncio.create_task(ask(link, str(number), "x" * 300)) for number in range(7)]
        frames: list[list[ToGateway]] = []
        while sum(map(len, frames)) < 7:
            frames += await gateway.next_frames()
        assert len(frames) > 2
        assert all(len(link._codec.encode(frame)) <= 1000 for frame in frames)
        for number in range(7):
            gateway.say(Failure(str(number), "EngineError", "no"))
        await asyncio.gather(*calls, return_exceptions=True)

    play(monkeypatch, story)


def test_a_gateway_whose_process_has_ended_ends_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(link: Link, gateway: Gateway) -> None:
        call = asyncio.create_task(ask(link, "a"))
        await gateway.next_frames()
        gateway.process.ended = "it was ended by SIGKILL"
        with pytest.raises(ConnectionLostError, match="SIGKILL"):
            await call

    monkeypatch.setattr(runtime_link, "PERIOD", 0.01)
    play(monkeypatch, story)


class System:
    """What the system says of the gateway's process: it has done this since the link was made, and every
    look is half a second after the one before it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: ProcessState, *, computes: float = 0.0) -> None:
        self.looks = 0
        self._state, self._computes = state, computes
        monkeypatch.setattr(runtime_link, "PERIOD", 0.001)
        monkeypatch.setattr(runtime_gateway, "read_process", self._read)
        monkeypatch.setattr(runtime_link.TimeSpent, "look", lambda stay, *seen: self._look(stay, *seen))

    def _read(self, process_id: int) -> ProcessSample:
        return ProcessSample(self._state, self._computes * self.looks)

    def _look(self, stay: TimeSpent, now: float, process: ProcessSample, observer: ProcessSample) -> None:
        self.looks += 1
        LOOK(stay, 0.5 * self.looks, process, observer)


LOOK = TimeSpent.look


@pytest.mark.parametrize(
    ("state", "computes", "reason", "seconds"),
    [
        (ProcessState.STOPPED, 0.0, "its process was stopped for 2.0 s", 2.5),
        (ProcessState.ASLEEP, 0.0, "has not answered for 3.0 s", 3.5),
        (ProcessState.RUNNABLE, 0.5, "has computed for 60 s", 61.0),
        (ProcessState.ON_DISK, 0.0, "waited for a disk for 300 s", 301.0),
    ],
)
def test_a_gateway_that_owes_an_answer_and_hangs_is_ended(
    state: ProcessState, computes: float, reason: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(link: Link, gateway: Gateway) -> None:
        with pytest.raises(ConnectionLostError, match=reason) as caught:
            await ask(link, "a")
        assert "load" in str(caught.value)  # how busy the machine was
        assert reason in (gateway.process.ended or "")  # it is ended, so that the next request starts another
        assert 0.5 * system.looks <= seconds

    system = System(monkeypatch, state, computes=computes)
    play(monkeypatch, story)


def test_a_gateway_that_waits_for_a_core_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(link: Link, gateway: Gateway) -> None:
        call = asyncio.create_task(ask(link, "a"))
        while system.looks < 200:
            await asyncio.sleep(0)
        gateway.say(Final("a", (), Usage()))
        assert (await call).id == "a"

    system = System(monkeypatch, ProcessState.RUNNABLE)
    play(monkeypatch, story)


def test_a_gateway_that_starts_may_be_silent_but_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def starting(link: Link, gateway: Gateway) -> None:
        while system.looks < 200:
            await asyncio.sleep(0)
        assert not link.broken
        assert "it has been loading the model for" in link.start_in_words()
        assert "s for a core" in link.start_in_words()
        system._state = ProcessState.STOPPED
        with pytest.raises(ConnectionLostError, match="while it started: its process was stopped"):
            await link.ready(60.0)

    system = System(monkeypatch, ProcessState.ASLEEP)
    play(monkeypatch, starting, welcome=Progress("loading the model"))


def test_a_gateway_that_was_ready_owes_its_answers_to_later_links_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def joining(link: Link, gateway: Gateway) -> None:
        assert not gateway.process.was_ready
        gateway.process.was_ready = True  # another link was told so
        with pytest.raises(ConnectionLostError, match="while it started: it has not answered"):
            await link.ready(60.0)

    System(monkeypatch, ProcessState.ASLEEP)
    play(monkeypatch, joining, welcome=Progress("starting the engine again"))


def test_the_health_is_what_the_gateway_said_last(monkeypatch: pytest.MonkeyPatch) -> None:
    async def heard(link: Link, gateway: Gateway, *messages: FromGateway) -> None:
        gateway.say(*messages, Done("marker"))
        seen = link._inbound._next + 1
        while link._inbound._next < seen:
            await asyncio.sleep(0)

    async def story(link: Link, gateway: Gateway) -> None:
        assert link.health().state is RuntimeState.READY
        assert link.health().heartbeat_age is None  # it has not told one yet
        await heard(link, gateway, Pong(EngineState.READY, 0.5))
        health = link.health()
        assert health.healthy
        assert health.heartbeat_age is not None
        assert health.heartbeat_age >= 0.5
        await heard(link, gateway, Pong(EngineState.STARTING))
        assert link.health().state is RuntimeState.RESTARTING
        await heard(link, gateway, Pong(EngineState.FAILED))
        assert link.health().state is RuntimeState.FAILED
        await heard(link, gateway, Pong(EngineState.READY, 0.0))
        assert link.health().healthy
        link.break_off(lambda: ConnectionLostError("gone"))
        assert (link.health().state, link.health().cause) == (RuntimeState.BROKEN, "gone")

    play(monkeypatch, story)


def test_a_runtime_that_starts_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def starting(link: Link, gateway: Gateway) -> None:
        gateway.say(Pong(EngineState.STARTING))
        await asyncio.sleep(0)
        health = link.health()
        assert (health.state, health.cause) == (RuntimeState.STARTING, "it is loading the model")

    play(monkeypatch, starting, welcome=Progress("loading the model"))


def test_a_download_does_not_count_as_time_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def starting(link: Link, gateway: Gateway) -> None:
        waiting = asyncio.create_task(link.ready(30.0))
        while not link._limits:
            await asyncio.sleep(0)
        (limit,) = link._limits
        first = limit.when()
        assert first is not None
        gateway.say(Progress("downloading org/repo", downloading=True))
        while limit.when() is not None:
            await asyncio.sleep(0)
        assert link.health().cause == "it is downloading org/repo"
        late = asyncio.create_task(link.ready(30.0))  # begun during the download
        while len(link._limits) < 2:
            await asyncio.sleep(0)
        assert [each.when() for each in link._limits] == [None, None]
        gateway.say(Progress("starting the engine"))
        while limit.when() is None:
            await asyncio.sleep(0)
        assert all((each.when() or 0.0) > first for each in link._limits)
        for each in link._limits:
            each.reschedule(asyncio.get_running_loop().time())
        for task in (waiting, late):
            with pytest.raises(TimeoutError):
                await task

    play(monkeypatch, starting, welcome=Progress("loading the model"))


def test_the_status_is_asked_for_while_the_window_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(link: Link, gateway: Gateway) -> None:
        exchange = await link.ready(60.0)
        calls = [asyncio.create_task(ask(link, str(number))) for number in range(WELCOME.max_queue + 1)]
        (frame,) = await gateway.next_frames()
        assert len(frame) == WELCOME.max_queue
        asked = asyncio.create_task(exchange.status())
        (frame,) = await gateway.next_frames()
        (question,) = frame
        assert isinstance(question, ReadStatus)
        gateway.say(StatusRead(question.id, RuntimeStatus("toy", "00", EngineState.READY)))
        assert (await asked).model == "toy"
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    play(monkeypatch, story)


def test_an_answer_that_nobody_waits_for_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(link: Link, gateway: Gateway) -> None:
        call = asyncio.create_task(ask(link, "a"))
        await gateway.next_frames()
        gateway.say(Done("nobody"), Final("a", (), Usage()))
        assert (await call).id == "a"

    play(monkeypatch, story)
