"""Runs steps on all ranks: the scheduler's runner on rank 0, which sends each step to the other ranks first.

Steps reach the others in the order in which they are computed here, so all ranks make the same exchanges in the same
order. If a step fails on one rank, the next exchange would no longer match: the engine ends (`RanksApart`), and its
supervisor starts it again.
"""

import threading
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from ...fsm.tokens.masks import Walk
from ..core.batch import AsyncRunner, Batch, Chooser, Logits, Pending, PictureStore, Runner
from ..core.messages import EngineForget, EnginePicture
from .messages import Clear, RankStep, ToRank


class RanksApart(BaseException):
    """Ranks may wait for each other in different exchanges. No `Exception`, so that no handler ends only a request."""


class OtherRanks(Protocol):
    """The other ranks, see processes.py."""

    ranks: int  # all of them, including this one

    def send(self, message: ToRank) -> None:
        """Sends a message to all of them. Raises OSError when one has ended."""


class _Sender:
    """Sends messages to the other ranks, from any thread. Pictures to forget are sent before the next message."""

    def __init__(self, others: OtherRanks) -> None:
        self._others = others
        self._lock = threading.Lock()
        self._gone: deque[int] = deque()

    def send(self, message: ToRank) -> None:
        with self._lock:
            while self._gone:
                self._others.send(EngineForget(self._gone.popleft()))
            self._others.send(message)

    def forget_later(self, number: int) -> None:
        """Notes a picture to forget. Takes no lock: finalizers call it, in any thread."""
        self._gone.append(number)


class LeaderStore:
    """Implements `batch.PictureStore` on rank 0.

    The others keep a picture as long as rank 0 does: until it is forgotten and no request holds it.
    """

    def __init__(self, store: PictureStore, sender: _Sender) -> None:
        self.both_ways = store.both_ways
        self._store = store
        self._sender = sender
        self._uploaded: set[int] = set()  # pictures that the others have

    def put(self, picture: EnginePicture) -> None:
        self._store.put(picture)
        if picture.number in self._uploaded:  # forgotten, and still held by a request
            return
        self._uploaded.add(picture.number)
        self._sender.send(picture)
        going = weakref.finalize(self._store.hold(picture.number), self._discard, picture.number)
        going.atexit = False

    def forget(self, number: int) -> None:
        self._store.forget(number)

    def tokens(self, number: int) -> int | None:
        return self._store.tokens(number)

    def hold(self, number: int) -> object:
        return self._store.hold(number)

    def _discard(self, number: int) -> None:
        self._uploaded.discard(number)
        self._sender.forget_later(number)


class LeaderRunner:
    """Implements `batch.Runner` on all ranks.

    Args:
        runner: computes the part of rank 0.
        others: the other ranks.
    """

    def __init__(self, runner: Runner, others: OtherRanks) -> None:
        self._runner = runner
        self._ranks = others.ranks
        self._sender = _Sender(others)
        self._pictures = None if runner.pictures is None else LeaderStore(runner.pictures, self._sender)
        self.vocab_size = runner.vocab_size
        self.context_length = runner.context_length
        self.num_slots = runner.num_slots

    @property
    def pictures(self) -> PictureStore | None:
        return self._pictures

    @property
    def chooser(self) -> Chooser | None:
        return self._runner.chooser

    @property
    def trie_walk(self) -> Walk | None:
        return self._runner.trie_walk

    def forward(self, batch: Batch) -> Logits:
        try:
            self._sender.send(RankStep.of(batch))
            return self._runner.forward(batch)
        except Exception as error:
            raise RanksApart("a step failed on rank 0, and the others may be in the middle of it") from error

    def facts(self) -> Mapping[str, str | int | float]:
        return {**self._runner.facts(), "ranks": self._ranks}

    def clear(self) -> None:
        self._sender.send(Clear())
        self._runner.clear()


class LeaderAsyncRunner(LeaderRunner):
    """Implements `batch.AsyncRunner` on all ranks: a step that fails after its launch has made all its exchanges."""

    def __init__(self, runner: AsyncRunner, others: OtherRanks) -> None:
        super().__init__(runner, others)
        self._async_runner = runner

    def launch(self, batch: Batch) -> Pending:
        try:
            self._sender.send(RankStep.of(batch))
            return self._async_runner.launch(batch)
        except Exception as error:
            raise RanksApart("a step failed on rank 0, and the others may be in the middle of it") from error


def lead(runner: Runner, others: OtherRanks) -> LeaderRunner:
    """Returns a runner of all ranks, asynchronous if that of rank 0 is."""
    return LeaderAsyncRunner(runner, others) if isinstance(runner, AsyncRunner) else LeaderRunner(runner, others)
