"""A socket's messages reach the loop: all of them, in order, whatever swallowed the edge."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import zmq
from umbel.lang.transport.inlet import READ_AT_ONCE, Inlet


class Ear:
    """What an inlet has told."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.batches: list[int] = []
        self.errors: list[BaseException] = []

    def take(self, messages: list[list[bytes]]) -> None:
        self.batches.append(len(messages))
        for (message,) in messages:
            if message == b"bad":
                raise ValueError("a message that nobody can take")
            self.messages.append(message)

    async def heard(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.messages) < count:
                await asyncio.sleep(0)


@contextmanager
def pair(name: str) -> Iterator[tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]]:
    with zmq.Context() as context, context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
        for socket in (left, right):
            socket.setsockopt(zmq.LINGER, 0)
        left.bind(f"inproc://{name}")
        right.connect(f"inproc://{name}")
        yield left, right


@asynccontextmanager
async def listening(socket: "zmq.Socket[bytes]") -> AsyncIterator[tuple[Ear, Inlet]]:
    ear = Ear()
    inlet = Inlet(socket, ear.take, ear.errors.append)
    try:
        yield ear, inlet
    finally:
        inlet.close()


def play(story: Callable[["zmq.Socket[bytes]", "zmq.Socket[bytes]"], Awaitable[None]]) -> None:
    with pair("test") as (left, right):
        asyncio.run(_awaited(story(left, right)))


async def _awaited(work: Awaitable[None]) -> None:
    await work


def test_more_messages_than_are_read_at_once_arrive_in_order() -> None:
    async def story(left: "zmq.Socket[bytes]", right: "zmq.Socket[bytes]") -> None:
        sent = [str(number).encode() for number in range(3 * READ_AT_ONCE + 7)]
        for message in sent:
            right.send(message)
        async with listening(left) as (ear, _):
            await ear.heard(len(sent))
            assert ear.messages == sent
            assert max(ear.batches) <= READ_AT_ONCE

    play(story)


def test_a_message_that_came_before_anyone_listened_is_heard() -> None:
    async def story(left: "zmq.Socket[bytes]", right: "zmq.Socket[bytes]") -> None:
        right.send(b"early")
        left.getsockopt(zmq.EVENTS)  # swallows the edge
        async with listening(left) as (ear, _):
            await ear.heard(1)

    play(story)


def test_a_message_whose_edge_a_send_has_swallowed_is_heard_by_looking() -> None:
    async def story(left: "zmq.Socket[bytes]", right: "zmq.Socket[bytes]") -> None:
        async with listening(left) as (ear, inlet):
            for number in range(200):
                right.send(b"question")
                left.send(b"said meanwhile")
                left.getsockopt(zmq.EVENTS)
                inlet.look()
                await ear.heard(number + 1)

    play(story)


def test_an_error_of_the_taker_is_told_once_and_ends_the_reading() -> None:
    async def story(left: "zmq.Socket[bytes]", right: "zmq.Socket[bytes]") -> None:
        async with listening(left) as (ear, inlet):
            right.send(b"bad")
            async with asyncio.timeout(10):
                while not ear.errors:
                    await asyncio.sleep(0)
            right.send(b"later")
            inlet.look()
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(ear.errors) == 1
            assert ear.messages == []

    play(story)
