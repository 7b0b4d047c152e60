"""The engine's open constraints: made while steps run, kept for later requests.

To open one takes the vocabulary's trie and the tokenizer, which take a second or two for a large model, and of which
the tokenizers library holds the interpreter's lock for most: an engine process makes them before it is ready
(`prepare`), others at the first constrained request.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, Protocol, TypeVar

from ...fsm.tokens.trie import Trie
from ..core.messages import EngineConstraint
from .matcher import SharedConstraint

OPENING_POLL = 0.005  # seconds between looks of an engine that has nothing else to do

KEPT_BYTES = 512 << 20

P = ParamSpec("P")
R = TypeVar("R")


class MatcherFactory(Protocol):
    """A model's vocabulary, ready for constraints."""

    eos_ids: frozenset[int]  # that end a constrained text

    @property
    def jumps_cut(self) -> int:
        """Forced texts that were sampled, because their usual tokens would have changed the one before them."""

    @property
    def trie(self) -> Trie:
        """Of the vocabulary."""

    def open(self, compiled: EngineConstraint) -> SharedConstraint:
        """Raises fsm's ConstraintRefused."""

    def prepare(self) -> None:
        """Makes what the first constraint of each engine would make."""


class ImmediateExecutor(Executor):
    """Runs what it is given when it is given it: for tests and for the oracle, which are deterministic."""

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        future: Future[R] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class MatcherCache:
    """Least recently used ones go first; a constraint in use lives on with its users.

    Args:
        load: makes the opener; called once, unless it fails.
        executor: runs it, and opens constraints; of one thread, or ImmediateExecutor.
        slow: opens what llguidance reads, which may take seconds, so that nothing else waits for that; of one thread,
            or ImmediateExecutor.
        entries: constraints kept; 0 opens one for every request.
        most_bytes: that the kept ones take, as far as is known when another one is asked for; they grow with use.
    """

    def __init__(
        self,
        load: Callable[[], MatcherFactory],
        executor: Executor,
        slow: Executor,
        *,
        entries: int,
        most_bytes: int = KEPT_BYTES,
    ) -> None:
        self._load = load
        self._loading = threading.Lock()
        self._executors = {"fsm": executor, "llguidance": slow}
        self._entries = entries
        self._most_bytes = most_bytes
        self._opener: MatcherFactory | None = None
        self._open: OrderedDict[tuple[str, str], Future[tuple[SharedConstraint, frozenset[int]]]] = OrderedDict()
        self.opened = 0
        self.hits = 0

    @property
    def jumps_cut(self) -> int:
        return self._opener.jumps_cut if self._opener is not None else 0

    def find(self, compiled: EngineConstraint, salt: str) -> Future[tuple[SharedConstraint, frozenset[int]]]:
        """The constraint, and the tokens that may end its texts."""
        key = (compiled.digest, salt)
        future = self._open.get(key)
        if future is not None and not (future.done() and future.exception() is not None):
            self.hits += 1
            self._open.move_to_end(key)
            return future
        self.opened += 1
        self._make_room()
        future = self._executors[compiled.engine].submit(self._make, compiled)
        if self._entries:
            self._open[key] = future
        return future

    def trie(self) -> Future[Trie]:
        """Of the vocabulary."""
        return self._executors["fsm"].submit(lambda: self._loaded().trie)

    def prepare(self) -> Future[None]:
        """Makes the opener, and what the first constraints would make, before they come. What fails here is tried again
        for them."""
        return self._executors["llguidance"].submit(lambda: self._loaded().prepare())

    def _make_room(self) -> None:
        """For one more."""
        taken = sum(map(_size, self._open.values()))
        while self._open and (len(self._open) >= self._entries or taken > self._most_bytes):
            taken -= _size(self._open.popitem(last=False)[1])

    def _make(self, compiled: EngineConstraint) -> tuple[SharedConstraint, frozenset[int]]:
        opener = self._loaded()
        return opener.open(compiled), opener.eos_ids

    def _loaded(self) -> MatcherFactory:
        """On the executors only."""
        with self._loading:
            if self._opener is None:
                self._opener = self._load()
            return self._opener


def _size(future: Future[tuple[SharedConstraint, frozenset[int]]]) -> int:
    return future.result()[0].nbytes if future.done() and future.exception() is None else 0
