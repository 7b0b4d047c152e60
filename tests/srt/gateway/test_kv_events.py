"""Published blocks: a foreign router has exactly the blocks of the engines, after losses, late, and over restarts."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
import zmq
from umbel.lang.errors import ParameterError
from umbel.lang.runtime_options import RuntimeOptions
from umbel.srt.core.messages import CacheCleared, CacheEvents, EngineSnapshot, NodeAdded, NodeRemoved
from umbel.srt.gateway import kv_events
from umbel.srt.gateway.kv_events import KVEventPublisher, endpoints
from umbel.srt.in_process import LocalBackend

from ...kv_subscriber import Subscriber
from ..engine_harness import Engine
from .test_kv_blocks import ONE, TWO, names_of, told

ELSE = 9  # the number of an engine that only shows that a subscription counts


def fail(error: BaseException) -> None:
    raise error


class World:
    """A publisher on the running loop, and subscribers that ask it from threads."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.address = f"ipc://{folder}/kv"
        self.time = 1000.0
        self.publisher = self.start()
        self.subscribers: list[Subscriber] = []

    def start(self) -> KVEventPublisher:
        return KVEventPublisher(self.context, self.address, now=lambda: self.time, on_error=fail)

    async def subscriber(self) -> Subscriber:
        found = Subscriber(self.context, *endpoints(self.address))
        self.subscribers.append(found)
        await asyncio.to_thread(found.join, lambda: self.publisher.ready(ELSE))
        found.read()
        return found

    def close(self) -> None:
        self.publisher.close()
        for subscriber in self.subscribers:
            subscriber.close()
        self.context.term()


def play(folder: Path, run: Callable[[World], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        world = World(folder)
        try:
            await run(world)
        finally:
            world.close()

    asyncio.run(main())


def blocks_of(subscriber: Subscriber, engine: int = 0) -> set[int]:
    return set(subscriber.blocks.get(engine, ()))


class Workload:
    """Random prompts in a pool that is too small for them, step by step, with flushes and failures of the pool."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.engine = Engine(pool=400, context=300, max_step_tokens=48, check_every_step=False)
        stems = [[self.dice.randrange(1, 24) for _ in range(90)] for _ in range(4)]
        self.stems = [*stems, stems[0][:50] + stems[1][:40]]

    def step(self) -> list[CacheEvents]:
        if self.dice.random() < 0.3:
            stem = self.dice.choice(self.stems)
            tail = [self.dice.randrange(1, 24) for _ in range(self.dice.randrange(40))]
            salt = self.dice.choice(["", "", "s"])
            private = self.dice.choice([(), (), ((20, f"{salt}/x"),)])
            self.engine.generate(stem[: self.dice.randrange(1, 90)] + tail, salt=salt, private=private)
        if self.dice.random() < 0.02:
            self.engine.scheduler._forget_keys()
        return [event for event in self.engine.scheduler.step() if isinstance(event, CacheEvents)]

    def truth(self) -> set[int]:
        return names_of(self.engine.scheduler.kv.cache)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled(4)
def test_a_subscriber_has_the_blocks_of_the_engine_after_every_step(seed: int, tmp_path: Path) -> None:
    async def run(world: World) -> None:
        work = Workload(seed)
        subscriber = await world.subscriber()
        await asyncio.to_thread(subscriber.snapshot)
        world.publisher.ready(0)
        told_blocks = 0
        for _ in range(150):
            for message in work.step():
                assert world.publisher.follow(0, message)
            await until_read(world, subscriber)
            assert blocks_of(subscriber) == work.truth()
            told_blocks = max(told_blocks, len(blocks_of(subscriber)))
        assert told_blocks > 10
        assert subscriber.events.count({"type": "AllBlocksCleared"}) > 1

    play(tmp_path, run)


async def until_read(world: World, subscriber: Subscriber, **how: Callable[[int], bool]) -> None:
    """Reads until the subscriber has heard of all that was published."""
    last = world.publisher._next - 1
    while subscriber.heard < last:
        await asyncio.to_thread(subscriber.read_one, **how)


@pytest.mark.parametrize("seed", range(3))
def test_a_subscriber_that_missed_batches_has_them_replayed(seed: int, tmp_path: Path) -> None:
    async def run(world: World) -> None:
        work, missed = Workload(seed), random.Random(seed)
        subscriber = await world.subscriber()
        await asyncio.to_thread(subscriber.snapshot)
        world.publisher.ready(0)
        replays = 0
        for _ in range(100):
            for message in work.step():
                world.publisher.follow(0, message)
            await until_read(world, subscriber, drop=lambda number: missed.random() < 0.2)
            if subscriber.stale:
                replays += 1
                await asyncio.to_thread(subscriber.replay)
                assert not subscriber.stale
        world.publisher.ready(ELSE)
        await until_read(world, subscriber)
        if subscriber.stale:
            await asyncio.to_thread(subscriber.replay)
        assert blocks_of(subscriber) == work.truth()
        assert replays > 2
        assert world.publisher.counters["kv_events_replays"] >= replays

    play(tmp_path, run)


def test_a_replay_that_begins_too_late_leaves_the_copy_stale_until_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "KEPT_BATCHES", 3)

    async def run(world: World) -> None:
        subscriber = await world.subscriber()
        await asyncio.to_thread(subscriber.snapshot)
        for engine in range(6):
            world.publisher.ready(engine)
        world.publisher.follow(0, CacheEvents([NodeAdded(2, 0, "", told(ONE))]))
        await until_read(world, subscriber, drop=lambda number: number != world.publisher._next - 1)
        assert subscriber.stale
        await asyncio.to_thread(subscriber.replay)
        assert subscriber.stale
        await asyncio.to_thread(subscriber.snapshot)
        assert not subscriber.stale
        assert len(blocks_of(subscriber)) == 1

    play(tmp_path, run)


def test_a_subscriber_that_joins_late_goes_on_after_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "SNAPSHOT_EVENTS", 2)

    async def run(world: World) -> None:
        work = Workload(5)
        world.publisher.ready(0)
        for _ in range(80):
            for message in work.step():
                world.publisher.follow(0, message)
        subscriber = await world.subscriber()
        await asyncio.to_thread(subscriber.snapshot)
        assert blocks_of(subscriber) == work.truth() != set()
        assert subscriber.next == world.publisher._next
        for _ in range(80):
            for message in work.step():
                world.publisher.follow(0, message)
            await until_read(world, subscriber)
            assert blocks_of(subscriber) == work.truth()

    play(tmp_path, run)


def test_a_restart_shows_as_a_gap_and_has_another_epoch(tmp_path: Path) -> None:
    async def run(world: World) -> None:
        world.publisher.ready(0)
        world.publisher.follow(0, CacheEvents([NodeAdded(2, 0, "", told(ONE))]))
        subscriber = await world.subscriber()
        await asyncio.to_thread(subscriber.snapshot)
        first = subscriber.epoch
        world.publisher.close()
        world.time += 0.5
        world.publisher = world.start()
        await asyncio.to_thread(subscriber.join, lambda: world.publisher.ready(ELSE))
        await until_read(world, subscriber)
        assert subscriber.stale
        await asyncio.to_thread(subscriber.snapshot)
        assert blocks_of(subscriber) == set()
        assert first is not None
        assert subscriber.epoch is not None
        assert first < subscriber.epoch

    play(tmp_path, run)


def test_an_engine_that_is_gone_has_no_blocks_and_the_others_keep_theirs(tmp_path: Path) -> None:
    async def run(world: World) -> None:
        subscriber = await world.subscriber()
        await asyncio.to_thread(subscriber.snapshot)
        for engine in 0, 1:
            world.publisher.ready(engine)
            world.publisher.follow(engine, CacheEvents([NodeAdded(2, 0, "", told(ONE))]))
        world.publisher.gone(0)
        await until_read(world, subscriber)
        assert (len(blocks_of(subscriber)), len(blocks_of(subscriber, 1))) == (0, 1)

    play(tmp_path, run)


def test_after_lost_frames_nothing_is_told_until_the_engine_sent_its_whole_tree(tmp_path: Path) -> None:
    async def run(world: World) -> None:
        work = Engine(pool=300, check_every_step=False)

        def follow() -> None:
            for event in work.scheduler.step():
                if isinstance(event, CacheEvents):
                    world.publisher.follow(0, event)

        subscriber = await world.subscriber()
        await asyncio.to_thread(subscriber.snapshot)
        world.publisher.ready(0)
        work.generate([1] * 40)
        while not work.scheduler.idle:
            work.scheduler.step()  # lost
        world.publisher.frames_lost(0)
        work.generate([2] * 40)
        while not work.scheduler.idle:
            follow()
        await until_read(world, subscriber)
        assert blocks_of(subscriber) == set()
        work.scheduler.handle_message(EngineSnapshot())
        follow()
        await until_read(world, subscriber)
        assert blocks_of(subscriber) == names_of(work.scheduler.kv.cache) != set()

    play(tmp_path, run)


def test_events_that_do_not_fit_are_answered_by_a_question_for_a_snapshot(tmp_path: Path) -> None:
    async def run(world: World) -> None:
        world.publisher.ready(0)
        assert not world.publisher.follow(0, CacheEvents([NodeRemoved(5)]))
        assert world.publisher.follow(0, CacheEvents([NodeAdded(2, 0, "", told(ONE))]))  # ignored
        assert world.publisher.follow(0, CacheEvents([CacheCleared(), NodeAdded(2, 0, "", told(ONE + TWO))]))
        subscriber = await world.subscriber()
        await asyncio.to_thread(subscriber.snapshot)
        assert len(blocks_of(subscriber)) == 2

    play(tmp_path, run)


def test_a_question_that_is_none_is_counted_and_harms_nothing(tmp_path: Path) -> None:
    async def run(world: World) -> None:
        asker = world.context.socket(zmq.DEALER)
        asker.setsockopt(zmq.LINGER, 0)
        asker.connect(endpoints(world.address)[1])
        for frames in [b"x"], [b"", b"y"], [b"", b"", b"", b""], [b"", bytes(7)]:
            asker.send_multipart(frames)
        subscriber = await world.subscriber()
        await asyncio.to_thread(subscriber.snapshot)
        asker.close()
        assert world.publisher.counters["kv_events_malformed"] == 4

    play(tmp_path, run)


def test_an_address_that_is_taken_is_refused(tmp_path: Path) -> None:
    async def run(world: World) -> None:
        port = world.context.socket(zmq.PUB)
        number = port.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(ParameterError, match="cannot be bound"):
            KVEventPublisher(world.context, str(number), now=lambda: 0.0, on_error=fail)
        port.close()

    play(tmp_path, run)


@pytest.mark.parametrize(
    "address", ["", "localhost", "tcp://host", "tcp://host:0", "tcp://h:65535", "http://h:1", "70000"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ParameterError, match="kv_events"):
        RuntimeOptions(kv_events=address)


def test_a_port_alone_is_of_this_machine() -> None:
    assert endpoints(RuntimeOptions(kv_events="5557").kv_events or "") == (
        "tcp://127.0.0.1:5557",
        "tcp://127.0.0.1:5558",
    )
    assert endpoints("tcp://[::1]:7") == ("tcp://[::1]:7", "tcp://[::1]:8")


def test_a_runtime_in_this_process_refuses_to_publish() -> None:
    with pytest.raises(ParameterError, match="Runtime"):
        LocalBackend(kv_events="5557")
