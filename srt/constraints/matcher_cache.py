"""The engine's cache of open constraints: opened while steps run, kept for later requests.

Opening one needs the vocabulary's trie and the tokenizer. Making them takes a second or two for a large model, and the
tokenizers library holds the interpreter lock for most of it. So an engine process makes them before it is ready
(`prepare`); the in-process backend does so at the first constrained request.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, Protocol, TypeVar

from ...fsm.tokens.trie import Trie
from ..core.messages import EngineConstraint
from .matcher import SharedConstraint

OPENING_POLL = 0.005  # seconds between polls of an otherwise idle engine

KEPT_BYTES = 512 << 20

P = ParamSpec("P")
R = TypeVar("R")


class MatcherFactory(Protocol):
    """Opens constraints for a model's vocabulary."""

    eos_ids: frozenset[int]  # tokens that end a constrained text

    @property
    def jumps_cut(self) -> int:
        """Number of forced texts that were sampled: their usual tokens would have changed the one before."""

    @property
    def trie(self) -> Trie:
        """The vocabulary's trie."""

    def open(self, compiled: EngineConstraint) -> SharedConstraint:
        """Opens a constraint. Raises fsm's ConstraintRefused."""

    def prepare(self) -> None:
        """Makes in advance what the first constraint of each kind needs."""


class ImmediateExecutor(Executor):
    """Runs work at once in the caller's thread: for tests and for the oracle, which are deterministic."""

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        future: Future[R] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class MatcherCache:
    """Keeps open constraints; evicts the least recently used. An evicted one lives on while requests use it.

    Args:
        load: makes the matcher factory; called once, unless it fails.
        executor: runs `load` and opens constraints; one thread, or ImmediateExecutor.
        slow: opens constraints of llguidance, which may take seconds, so that others do not wait; one thread, or
            ImmediateExecutor.
        entries: constraints kept; 0 opens one for every request.
        most_bytes: size of the kept ones, measured when another one is requested; they grow with use.
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
        """Returns the constraint, and the tokens that may end its texts."""
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
        """Returns the vocabulary's trie."""
        return self._executors["fsm"].submit(lambda: self._loaded().trie)

    def prepare(self) -> Future[None]:
        """Makes the factory, and what the first constraints need, before they come. They repeat what fails here."""
        return self._executors["llguidance"].submit(lambda: self._loaded().prepare())

    def _make_room(self) -> None:
        """Evicts until one more fits."""
        taken = sum(map(_size, self._open.values()))
        while self._open and (len(self._open) >= self._entries or taken > self._most_bytes):
            taken -= _size(self._open.popitem(last=False)[1])

    def _make(self, compiled: EngineConstraint) -> tuple[SharedConstraint, frozenset[int]]:
        opener = self._loaded()
        return opener.open(compiled), opener.eos_ids

    def _loaded(self) -> MatcherFactory:
        """Returns the factory; makes it at the first call. Runs on the executors only."""
        with self._loading:
            if self._opener is None:
                self._opener = self._load()
            return self._opener


def _size(future: Future[tuple[SharedConstraint, frozenset[int]]]) -> int:
    return future.result()[0].nbytes if future.done() and future.exception() is None else 0
