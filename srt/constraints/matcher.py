"""Matches generations against their constraints: masks tokens, forces tokens, and closes texts in time.

A Matcher follows one text. The MatcherCache opens constraints while steps run, and keeps them for later requests.

A token is taken in one of three ways, all of them in `settle`:

    sampled    under the mask of the state the text is in
    forced     the constraint leaves no choice about the text, and the tokenizer none about its tokens
    closing    a sampled token would leave too little of max_tokens for the shortest end, which is taken instead; a
               token that begins an optional part (another member, another item) must leave enough for that part, too

Forced and closing tokens are known beforehand and wait in `pending`. With jump-forward they are appended without a step
of their own. Without it each takes its step and overrules the sample: the text is the same by construction.

The shortest known end may be longer than max_tokens from the first token on. Then the model's tokens are taken until an
end fits, or until the text is cut.

Where a text is complete, a sampled token that does not belong to it may end it (`TextState.endings`).
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import ParamSpec, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...fsm.errors import ConstraintRefused
from ...fsm.tokens.trie import Trie
from ...lang.errors import ConstraintError
from ..core.messages import EngineConstraint

MOST_SPARE = 16  # tokens; a name and a short value

P = ParamSpec("P")
R = TypeVar("R")
Mask = NDArray[np.uint32]  # [words] bit t % 32 of word t // 32: token t may come


class TextState(Protocol):
    """The state of one text in its constraint: `fsm.tokens.constraint.ConstraintState`."""

    @property
    def mask(self) -> Mask:
        """The allowed tokens; shared, and valid only after `prepare` has finished."""

    @property
    def few(self) -> NDArray[np.int32] | None:
        """The allowed tokens when they are few; valid only after `prepare` has finished."""

    @property
    def accepting(self) -> bool: ...

    @property
    def finished(self) -> bool:
        """Whether the text is accepted and nothing can follow."""

    @property
    def roomy(self) -> bool:
        """Whether states may be explored that no text may come to."""

    def prepare(self, fuel: int) -> int | None:
        """Computes the mask → the remaining fuel, or None when it is not finished.

        Below 0: work that cannot be interrupted took more than was given."""

    def advance(self, token: int) -> None: ...

    def rollback(self, tokens: int) -> None: ...

    def copy(self) -> Self:
        """Returns a state that goes its own way from here."""

    def forced_tokens(self) -> list[int]: ...

    def closing_tokens(self) -> list[int] | None:
        """Returns the tokens of a shortest end from here; [] where the text may end, None where no end is known."""

    @property
    def closing_bound(self) -> int:
        """Returns a cheap upper bound of the number of `closing_tokens`."""

    @property
    def endings(self) -> Mask | None:
        """Tokens that end a complete text without being a part of it. Shared; None without any."""

    @property
    def begins_more(self) -> bool:
        """Whether the last token began an optional part."""


class TokenSet(Protocol):
    """Tokens that may come: `fsm.tokens.masks.Mask`."""

    @property
    def bits(self) -> Mask: ...

    @property
    def few(self) -> NDArray[np.int32] | None: ...


class Healing(Protocol):
    """The tokens that may replace the one before the text: `fsm.tokens.healing.Healing`."""

    def prepare(self, fuel: int) -> int | None:
        """Computes the masks, as `TextState.prepare`."""

    @property
    def possible(self) -> bool: ...

    def mask(self, token: int) -> TokenSet:
        """Returns those tokens and the one that may be replaced."""


class SharedConstraint(Protocol):
    """The part that all texts under one constraint share: `fsm.tokens.constraint.Constraint`."""

    @property
    def minimum_tokens(self) -> int:
        """Lower bound of the tokens of a text; the shortest text may have more."""

    @property
    def nbytes(self) -> int:
        """Approximate size in memory."""

    def begin(self, context: bytes = b"", said: bytes = b"") -> TextState:
        """Starts a text. context: the token before the text; said: its part that belongs to the text."""

    def healing(self, said: bytes) -> Healing:
        """Finds the tokens that may replace one with this spelling."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """The prompt's last token, dropped to be sampled again among those that may replace it."""

    token: int
    said: bytes  # its spelling
    allowed: TokenSet
    constraint: SharedConstraint
    token_bytes: Callable[[int], bytes]

    def begin(self, token: int) -> TextState:
        """Starts the text inside this token."""
        data = self.token_bytes(token)
        return self.constraint.begin(data, data[len(self.said) :])


class Matcher:
    """Matches the tokens of one generation, which owns it. Its state changes only in `settle`.

    Args:
        state: the state at the beginning of the text.
        eos_ids: tokens with which the model ends its text.
        boundary: None leaves the prompt as it is.
    """

    __slots__ = (
        "_boundary",
        "_ensured",
        "_spare",
        "_state",
        "closing",
        "ended",
        "eos_ids",
        "error",
        "forced",
        "healed",
        "pending",
        "restored",
        "was_forced",
    )

    def __init__(self, state: TextState, eos_ids: frozenset[int], boundary: Boundary | None = None) -> None:
        self._state = state
        self._boundary = boundary  # until the first token is settled
        self._ensured = False  # an end fits, now and after every token to come
        self._spare: int | None = None  # tokens reserved for an optional part
        self.eos_ids = eos_ids
        self.pending: deque[int] = deque()
        self.closing = False  # `pending` leads to the end
        self.ended = False  # an end-of-sequence token was taken
        self.forced = 0  # tokens taken from `pending`
        self.was_forced = False  # the last one was
        self.healed = 0  # bytes of the first token that repeat the prompt
        self.restored = False  # the token settled last belongs to the prompt
        self.error: ConstraintError | None = None  # why this text cannot go on
        if boundary is None:
            self._look_ahead()

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing can follow it, or its shortest end has been reached."""
        return self.ended or self._state.finished or (self.closing and not self.pending)

    @property
    def accepting(self) -> bool:
        """Whether the text satisfies the constraint as it is."""
        return self.ended or self._state.accepting

    @property
    def overrules(self) -> bool:
        """Whether the text may go on with another token than the one that is sampled next."""
        return bool(self.pending) or self._boundary is not None

    @property
    def mask(self) -> Mask:
        return self._boundary.allowed.bits if self._boundary is not None else self._state.mask

    @property
    def few(self) -> NDArray[np.int32] | None:
        return self._boundary.allowed.few if self._boundary is not None else self._state.few

    @property
    def endings(self) -> Mask | None:
        """Tokens outside `mask` that may also be sampled, and end the text."""
        return None if self._boundary is not None or self.pending else self._state.endings

    def prepare(self, fuel: int) -> int | None:
        """Computes the mask of the next sample → the remaining fuel, or None when more is needed.

        A mask with one token leaves no choice: the token goes to `pending`.

        Raises:
            ConstraintError: the constraint is too large to go on, or the vocabulary cannot spell what must follow.
        """
        if self.pending or self._boundary is not None:
            return fuel
        try:
            left = self._state.prepare(fuel)
        except ConstraintRefused as error:
            raise _refused(error) from error
        if left is None:
            return None
        few = self._state.few
        if few is not None and len(few) < 2:
            if not len(few):
                raise ConstraintError("no token of the model spells what the constraint asks for next; widen it")
            self.pending.append(int(few[0]))
        return left

    def ahead(self, tokens: Sequence[int], spend: Callable[[Callable[[int], int | None]], bool]) -> Iterator[None]:
        """Yields after each of `tokens` that may come one after the other, while its mask is that after this token.

        It ends before a token that may not come, after one that ends the text, where a mask is not finished, and where
        tokens are known anyway. Then the matcher is as it was.

        Args:
            spend: runs the preparation of a mask; False: it was not finished.
        """
        if self._boundary is not None or self.pending or self.closing:
            return
        own, self._state = self._state, self._state.copy()  # past its limits an engine does not come back
        try:
            for token in tokens:
                if not (self._state.roomy and _holds(self._state.mask, token)):
                    return
                self._state.advance(token)
                if token in self.eos_ids or self._state.finished or not spend(self._state.prepare):
                    return
                yield
        except ConstraintRefused:
            return  # a text that gets there ends with this error
        finally:
            self._state = own

    def settle(self, token: int, remaining: int) -> int | None:
        """Takes a token → the token taken, which differs when `pending` or the budget overrules the sample.

        None: the text is complete and ends without a further token, because the sampled one is outside `mask` or leaves
        too little. `error` is set instead of raised, because the step has other requests.

        Args:
            token: sampled, or the first of `pending`.
            remaining: tokens that the text may still have, this one included.
        """
        if self._spare is None:
            self._spare = min(MOST_SPARE, remaining // 4)
        try:
            if self._boundary is not None:
                return self._settle_boundary(self._boundary, token, remaining)
            return self._settle(token, remaining)
        except ConstraintRefused as error:
            self.error = _refused(error)
            return token

    def _settle_boundary(self, boundary: Boundary, token: int, remaining: int) -> int:
        """Takes the first token: the prompt's own again, or one that contains the beginning of the text."""
        self._boundary = None
        if token != boundary.token:
            before, self._state = self._state, boundary.begin(token)
            if self._fits(remaining - 1):
                self.healed = len(boundary.said)
                self._look_ahead()
                return token
            self._state = before
        self.restored = True
        if not self._state.finished:
            self._look_ahead()
        return boundary.token

    def _settle(self, token: int, remaining: int) -> int | None:
        state = self._state
        self.restored = False
        if self._is_ending(token):
            self.was_forced = False
            return None
        self.was_forced = bool(self.pending)
        if self.was_forced:
            token = self.pending.popleft()
            self.forced += 1
        self._ensured = self._ensured or (not self.closing and self._fits(remaining))
        state.advance(token)
        self.ended = token in self.eos_ids
        if self.closing or self.ended:
            return token
        if self._ensured and not self._may_stay(remaining - 1):
            state.rollback(1)
            return self._close()
        if not self.pending:
            self._look_ahead()
        return token

    def _is_ending(self, token: int) -> bool:
        endings = self.endings
        return endings is not None and _holds(endings, token) and not _holds(self._state.mask, token)

    def _close(self) -> int | None:
        """Switches to the shortest end → its first token; None where the text may end here."""
        self.pending = deque(self._state.closing_tokens() or ())
        self.closing = True
        if not self.pending:
            return None
        self.forced += not self.was_forced
        self.was_forced = True
        token = self.pending.popleft()
        self._state.advance(token)
        return token

    def _may_stay(self, remaining: int) -> bool:
        """Returns whether the last token leaves enough tokens for an end."""
        if not self._fits(remaining):
            return False
        spare, state = self._spare or 0, self._state
        return self._fits(remaining - spare) or not state.begins_more

    def _fits(self, remaining: int) -> bool:
        """Returns whether an end of at most so many tokens is known."""
        state = self._state
        if state.closing_bound <= remaining:
            return True
        closing = state.closing_tokens()
        return closing is not None and len(closing) <= remaining

    def _look_ahead(self) -> None:
        if not self._state.finished:
            self.pending.extend(self._state.forced_tokens())


def _holds(mask: Mask, token: int) -> bool:
    return bool(mask[token >> 5] >> np.uint32(token & 31) & np.uint32(1))


def _refused(error: ConstraintRefused) -> ConstraintError:
    return ConstraintError(f"the constraint became too costly while the text was generated: {error}")


OPENING_POLL = 0.005  # seconds between polls of an otherwise idle engine


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
        """Makes in advance what the first constraint of our own engine needs."""

    def prepare_llguidance(self) -> None:
        """Makes in advance what the first constraint of llguidance needs."""


class ImmediateExecutor(Executor):
    """Runs work at once in the caller's thread: for tests and for the oracle, which are deterministic."""

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        future: Future[R] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


MEASURED_EVERY = 256  # requests: measuring 256 constraints takes about as long as a mask


class MatcherCache:
    """Keeps open constraints; evicts the least recently used. An evicted one lives on while requests use it.

    Opening one needs the vocabulary's trie and a tokenizer, which are opened before an engine process is ready
    (`prepare`). Those of llguidance need its view of the vocabulary. Making it holds the interpreter lock for half a
    second with a large vocabulary, so an engine makes it when it has been idle for a while (`prepare_llguidance`), or
    at the first such constraint. The in-process backend makes everything at the first constrained request.

    Args:
        load: makes the matcher factory; called once, unless it fails.
        executor: runs `load` and opens constraints; one thread, or ImmediateExecutor.
        slow: opens constraints of llguidance, which may take seconds, so that others do not wait; one thread, or
            ImmediateExecutor.
        entries: constraints kept; 0 opens one for every request.
        most_bytes: size of the kept ones, which grow with use. It is measured when one is opened, and once for every
            MEASURED_EVERY requests whose constraint is open.
    """

    def __init__(
        self,
        load: Callable[[], MatcherFactory],
        executor: Executor,
        slow: Executor,
        *,
        entries: int,
        most_bytes: int = 512 << 20,
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
            if self.hits % MEASURED_EVERY == 0:
                self._trim(self._entries)
            return future
        self.opened += 1
        self._trim(self._entries - 1)
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

    def prepare_llguidance(self) -> Future[None]:
        """Makes llguidance's view of the vocabulary, if it is installed and has none."""
        return self._executors["llguidance"].submit(lambda: self._loaded().prepare_llguidance())

    def _trim(self, entries: int) -> None:
        """Evicts until at most `entries` are kept, and they take at most `most_bytes`."""
        taken = sum(map(_size, self._open.values()))
        while self._open and (len(self._open) > entries or taken > self._most_bytes):
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
