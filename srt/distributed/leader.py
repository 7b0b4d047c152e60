"""Rank 0 as the scheduler sees it: a runner that tells the other ranks what it is about to compute.

A step reaches the others in the order in which it is computed here, before it is: everybody comes to the same exchanges
in the same order. So no step may fail on one rank and go on, for the next one would meet the others in another place:
the engine ends (`RanksApart`), and its supervisor starts it again.
"""

import threading
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from ...fsm.tokens.trie_walk import Walk
from ..core.batch import AsyncRunner, Batch, Chooser, Logits, Pending, PictureStore, Runner
from ..core.messages import EngineForget, EnginePicture
from .messages import Clear, Step, ToRank


class RanksApart(BaseException):
    """Ranks may wait for each other in different places. No `Exception`: nobody may end a request and go on."""


class Others(Protocol):
    """The other ranks, see crew.py."""

    ranks: int  # all of them, this one too

    def tell(self, message: ToRank) -> None:
        """Raises OSError when one of them is gone."""


class _Voice:
    """Tells the others; several threads may. What is said in passing is said before the next message."""

    def __init__(self, others: Others) -> None:
        self._others = others
        self._lock = threading.Lock()
        self._gone: deque[int] = deque()

    def tell(self, message: ToRank) -> None:
        with self._lock:
            while self._gone:
                self._others.tell(EngineForget(self._gone.popleft()))
            self._others.tell(message)

    def forget_later(self, number: int) -> None:
        """Takes no lock: it is called where an object goes, which may be anywhere."""
        self._gone.append(number)


class LeadingStore:
    """A `batch.PictureStore` of rank 0. The others keep a picture for as long as this one does, also behind the message
    that forgets it, while requests hold it."""

    def __init__(self, store: PictureStore, voice: _Voice) -> None:
        self.both_ways = store.both_ways
        self._store = store
        self._voice = voice
        self._told: set[int] = set()  # pictures that the others have

    def put(self, picture: EnginePicture) -> None:
        self._store.put(picture)
        if picture.number in self._told:  # forgotten, and still held by somebody
            return
        self._told.add(picture.number)
        self._voice.tell(picture)
        going = weakref.finalize(self._store.hold(picture.number), self._went, picture.number)
        going.atexit = False

    def forget(self, number: int) -> None:
        self._store.forget(number)

    def tokens(self, number: int) -> int | None:
        return self._store.tokens(number)

    def hold(self, number: int) -> object:
        return self._store.hold(number)

    def _went(self, number: int) -> None:
        self._told.discard(number)
        self._voice.forget_later(number)


class LeadingRunner:
    """A `batch.Runner` of all ranks.

    Args:
        runner: computes the part of rank 0.
        others: compute theirs.
    """

    def __init__(self, runner: Runner, others: Others) -> None:
        self._runner = runner
        self._ranks = others.ranks
        self._voice = _Voice(others)
        self._pictures = None if runner.pictures is None else LeadingStore(runner.pictures, self._voice)
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
            self._voice.tell(Step.of(batch))
            return self._runner.forward(batch)
        except Exception as error:
            raise RanksApart("a step failed on rank 0, and the others may be in the middle of it") from error

    def facts(self) -> Mapping[str, str | int | float]:
        return {**self._runner.facts(), "ranks": self._ranks}

    def clear(self) -> None:
        self._voice.tell(Clear())
        self._runner.clear()


class LeadingAsyncRunner(LeadingRunner):
    """An `batch.AsyncRunner` of all ranks: steps that fail behind their launch have met the others everywhere."""

    def __init__(self, runner: AsyncRunner, others: Others) -> None:
        super().__init__(runner, others)
        self._launcher = runner

    def launch(self, batch: Batch) -> Pending:
        try:
            self._voice.tell(Step.of(batch))
            return self._launcher.launch(batch)
        except Exception as error:
            raise RanksApart("a step failed on rank 0, and the others may be in the middle of it") from error


def leading(runner: Runner, others: Others) -> LeadingRunner:
    """A runner of all ranks, which launches its steps if that of rank 0 does."""
    return LeadingAsyncRunner(runner, others) if isinstance(runner, AsyncRunner) else LeadingRunner(runner, others)
