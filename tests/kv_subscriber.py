"""A foreign router's side of the published blocks: plain zmq and msgpack, and nothing of ours."""

from collections.abc import Callable
from hashlib import sha256
from typing import Any

import msgspec
import zmq

PATIENCE = 60_000  # milliseconds until what must come counts as missing
END = (-1).to_bytes(8, "big", signed=True)


class Subscriber:
    """Keeps the blocks of all engines, and knows whether its copy is stale.

    Attributes:
        blocks: engine → hash of a block → (hash of the block before it, its tokens, its extra keys).
        next: the number of the next batch; None before the first one.
        stale: a batch was missed that no replay and no snapshot has brought.
    """

    def __init__(self, context: "zmq.Context[Any]", stream: str, questions: str) -> None:
        self.blocks: dict[int, dict[int, tuple[int | None, tuple[int, ...], Any]]] = {}
        self.next: int | None = None
        self.heard = -1  # the number of the last batch that came or was dropped
        self.stale = True
        self.epoch: int | None = None
        self.events: list[dict[str, Any]] = []
        self._stream, self._questions = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for socket, address in ((self._stream, stream), (self._questions, questions)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, PATIENCE)
            socket.connect(address)
        self._stream.setsockopt(zmq.SUBSCRIBE, b"kv-")

    def close(self) -> None:
        self._stream.close()
        self._questions.close()

    def join(self, speak: Callable[[], object]) -> None:
        """Waits until the subscription counts: `speak` publishes something."""
        while not self._stream.poll(20):
            speak()

    # -- the live stream

    def read(self, *, drop: Callable[[int], bool] = lambda number: False) -> int:
        """Reads what is there → the number of batches. Batches that `drop` names never come."""
        count = 0
        while self._stream.poll(0):
            self.read_one(drop=drop)
            count += 1
        return count

    def read_one(self, *, drop: Callable[[int], bool] = lambda number: False) -> None:
        topic, number, batch = self._stream.recv_multipart()
        assert topic == b"kv-events"
        self.heard = int.from_bytes(number, "big")
        self._take(self.heard, batch, drop)

    def _take(self, number: int, batch: bytes, drop: Callable[[int], bool]) -> None:
        if drop(number):
            return
        if self.next is not None and number < self.next:
            return  # it was in the snapshot or the replay
        if self.next is not None and number > self.next:
            self.stale = True
        if self.stale:
            return
        self.next = number + 1
        self._apply(batch)

    def _apply(self, batch: bytes) -> None:
        _, events, engine = msgspec.msgpack.decode(batch)
        known = self.blocks.setdefault(engine, {})
        self.events += events
        for event in events:
            match event["type"]:
                case "AllBlocksCleared":
                    known.clear()
                case "BlockRemoved":
                    assert event["medium"] == "GPU"
                    for name in event["block_hashes"]:
                        del known[name]
                case "BlockStored":
                    size, before = event["block_size"], event["parent_block_hash"]
                    names, tokens = event["block_hashes"], event["token_ids"]
                    assert len(tokens) == size * len(names)
                    assert before is None or before in known, "a block comes after the one before it"
                    for index, name in enumerate(names):
                        assert name not in known, "a block is stored once"
                        extra = event.get("extra_keys")
                        part = tuple(tokens[index * size : (index + 1) * size])
                        known[name] = before, part, None if extra is None else extra[index]
                        before = name
                case other:
                    raise AssertionError(other)

    # -- questions

    def _ask(self, question: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
        self._questions.send_multipart([b"", question])
        found = []
        while True:
            empty, topic, number, batch = self._questions.recv_multipart()
            assert empty == b""
            if number == END:
                return found, batch
            assert topic == b"kv-events"
            found.append((int.from_bytes(number, "big"), batch))

    def replay(self) -> None:
        """Asks for what was missed; stays stale when the answer begins too late."""
        assert self.next is not None, "there is something to go on from"
        found, end = self._ask(self.next.to_bytes(8, "big"))
        assert end == b""
        if found and found[0][0] == self.next:
            self.stale = False
            for number, batch in found:
                self._take(number, batch, lambda number: False)

    def snapshot(self) -> None:
        found, epoch = self._ask(b"snapshot")
        self.epoch = int.from_bytes(epoch, "big")
        self.blocks.clear()
        (self.next,) = {number for number, _ in found} or {self.epoch}
        for _, batch in found:
            self._apply(batch)
        self.stale = False


def published_name(parent: bytes, tokens: tuple[int, ...], *fields: bytes) -> bytes:
    """The name of a block, as docs/kv_events.md defines it. fields: the adapter, then three for each extra key."""
    parts = [b"umbel block 1", parent, b"".join(token.to_bytes(4, "little") for token in tokens), *fields]
    return sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()
