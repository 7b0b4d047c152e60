"""Constraints by llguidance's matcher, for grammars that are not regular: Lark grammars, and schemas that our own
automata refuse. The vocabulary is our table of bytes, so that user-defined tokens are text and control tokens nothing.

A matcher is a state machine of its own: a text has one, a copy is a copy of it. Nothing says how far the end is, so
shortest ends are searched for, and are short rather than shortest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConstraintRefused, LimitExceeded
from ..tokens.constraint import Encode, JumpCounters
from ..tokens.masks import Mask
from ..tokens.trie import EVERYTHING
from ..tokens.vocabulary import unpack_few
from .llguidance_tokens import LlguidanceTokens, require_sound
from .source import Source

MOST_CLOSING = 1_024  # tokens of an end that is searched for
FUEL = 4  # of one mask: some tens of microseconds
FUEL_PER_SECOND = 100_000  # of CPU time: one unit is 10 µs, as for our own automata
MOST_MASK_SECONDS = 0.25  # of CPU time for one mask; the library's own limits allow no more than about half of it
LEAST_BYTES = 5 << 20  # that a constraint takes: half of 250 real schemas take about this

# What is tried first on the way to an end: what closes, what separates, digits, letters; what opens comes last.
_ENDS = (
    *b"\"}])>'`,:;.!?|&@#$%^~*=/+-_",
    *b"0123456789 \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ\t\r\\<([{",
)


class LlguidanceConstraint:
    """As constraint.Constraint.

    Args:
        nbytes: that the matcher takes, as far as `rehearse` has seen it.
    """

    def __init__(
        self,
        source: Source,
        tokens: LlguidanceTokens,
        *,
        encode: Encode | None,
        counters: JumpCounters,
        nbytes: int = 0,
    ) -> None:
        self.nbytes = max(nbytes, LEAST_BYTES)
        self._tokens = tokens
        self._encode = encode
        self.counters = counters
        self._matcher = tokens.matcher(source)
        self.minimum_tokens = len(self.begin().closing_tokens())

    def begin(self, context: bytes = b"", said: bytes = b"") -> LlguidanceState:
        """See Constraint.begin."""
        matcher = self._matcher.deep_copy()
        if said and not matcher.consume_tokens(self._tokens.spell(said)):
            raise ConstraintRefused(f"no text begins with {said!r}")
        return LlguidanceState(matcher, self._tokens, self._encode, self.counters, context)

    def healing(self, said: bytes) -> NoHealing:
        """The matcher takes tokens, not parts of them: none is replaced."""
        return NoHealing(said)


class NoHealing:
    """As healing.Healing, where no token may be replaced."""

    possible = False

    def __init__(self, said: bytes) -> None:
        self._said = said

    def prepare(self, fuel: int) -> int | None:
        return fuel

    def mask(self, token: int) -> Mask:
        raise AssertionError(f"{self._said!r} (token {token}) may not be replaced")


class LlguidanceState:
    """As constraint.ConstraintState."""

    def __init__(
        self, matcher: Any, tokens: LlguidanceTokens, encode: Encode | None, counters: JumpCounters, context: bytes
    ) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._encode = encode
        self._counters = counters
        self._context = context
        self._taken: list[int] = []
        self._plans: list[tuple[int, ...] | None] = [None]  # what was forced before each token; the last: now
        self._closing: tuple[int, ...] | None = None
        self._mask: Mask | None = None
        self.ended = False

    # ---------------------------------------------------------------------------------------- looking

    @property
    def accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        return self.ended or (self.accepting and bool(self._matcher.is_stopped()))

    def prepare(self, fuel: int) -> int | None:
        """One call of the library, which has limits of its own. It is not interrupted: what is left may be below 0.

        Raises:
            LimitExceeded: they are passed.
        """
        if self._mask is not None:
            return fuel
        assert not self.ended, "nothing follows the end"
        if fuel <= 0:
            return None
        began = time.thread_time()
        forced = self.forced_tokens()
        words = self._tokens.vocabulary.words
        mask = Mask.only(forced[0], words) if forced else Mask.of(self._allowed(self._matcher))
        seconds = time.thread_time() - began
        if seconds > MOST_MASK_SECONDS:
            raise LimitExceeded(
                f"llguidance took {seconds:.2f} s of CPU time for one token, at most {MOST_MASK_SECONDS:g} s are "
                "allowed; write a less ambiguous grammar"
            )
        self._mask = mask
        return fuel - max(FUEL, round(seconds * FUEL_PER_SECOND))

    @property
    def mask(self) -> NDArray[np.uint32]:
        assert self._mask is not None, "prepare has to finish first"
        return self._mask.bits

    @property
    def few(self) -> NDArray[np.int32] | None:
        assert self._mask is not None, "prepare has to finish first"
        return self._mask.few

    def forced_tokens(self) -> list[int]:
        """The library's own, unless they would change the last token."""
        if self.ended:
            return []
        plan = self._plans[-1]
        if plan is None:
            plan = self._plans[-1] = self._plan()
        return list(plan)

    def closing_tokens(self) -> list[int]:
        """Of a short end from here. Raises ConstraintRefused when none is found."""
        if self.ended:
            return []
        if self._closing is None:
            self._closing = self._search()
        return list(self._closing)

    @property
    def closing_bound(self) -> int:
        return len(self.closing_tokens())

    # ---------------------------------------------------------------------------------------- moving

    def advance(self, token: int) -> None:
        """See ConstraintState.advance."""
        vocabulary = self._tokens.vocabulary
        if token in vocabulary.eos_ids:
            if self.ended or not self.accepting:
                raise ConstraintRefused(f"token {token} ends the text where it may not end")
            self.ended = True
        else:
            if self.ended or self._matcher.validate_tokens([token]) != 1:
                raise ConstraintRefused(f"token {token} ({vocabulary.token_bytes(token)!r}) is not allowed here")
            self._matcher.consume_token(token)
            require_sound(self._matcher)
        plan, closing = self._plans[-1], self._closing
        self._plans.append(plan[1:] if plan and plan[0] == token and len(plan) > 1 else None)
        self._counters.forced += bool(plan and plan[0] == token)
        self._closing = closing[1:] if closing and closing[0] == token else None
        self._taken.append(token)
        self._mask = None

    def rollback(self, tokens: int) -> None:
        assert 0 <= tokens <= len(self._taken), "rolling back what was never taken"
        if not tokens:
            return
        self._matcher.rollback(tokens - self.ended)
        del self._taken[-tokens:], self._plans[-tokens:]
        self._mask, self._closing, self.ended = None, None, False

    def copy(self) -> LlguidanceState:
        copied = LlguidanceState(self._matcher.deep_copy(), self._tokens, self._encode, self._counters, self._context)
        copied._taken, copied._plans = self._taken.copy(), self._plans.copy()
        copied._closing, copied._mask, copied.ended = self._closing, self._mask, self.ended
        return copied

    # ---------------------------------------------------------------------------------------- how

    def _allowed(self, matcher: Any) -> NDArray[np.uint32]:
        vocabulary = self._tokens.vocabulary
        bits = np.zeros(vocabulary.words, np.uint32)
        accepting = matcher.is_accepting()
        if not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            require_sound(matcher)
        bits &= ~vocabulary.eos_mask
        return bits | vocabulary.eos_mask if accepting else bits

    def _plan(self) -> tuple[int, ...]:
        tokens = self._matcher.compute_ff_tokens()
        require_sound(self._matcher)
        if not tokens or self._encode is None:
            return ()
        vocabulary = self._tokens.vocabulary
        last = vocabulary.token_bytes(self._taken[-1]) if self._taken else self._context
        past = [last] if last else []
        whole = self._tokens.spell(last + vocabulary.spell(tokens))
        if [vocabulary.token_bytes(token) for token in whole[: len(past)]] != past or whole[len(past) :] != tokens:
            self._counters.cut += 1
            return ()
        return tuple(tokens)

    def _search(self) -> tuple[int, ...]:
        """Goes where the text closes, token by token. Of the bytes that may come, the one that was taken least often,
        then the one that ends most: no loop is gone through for ever."""
        matcher, tokens = self._matcher.deep_copy(), list[int]()
        taken: Counter[int] = Counter()
        while not matcher.is_accepting():
            if len(tokens) == MOST_CLOSING:
                raise LimitExceeded("no end of this text is near; write a grammar whose texts can end")
            token = self._towards_the_end(matcher, taken)
            if token is None or not matcher.consume_token(token):
                raise ConstraintRefused("the model's vocabulary has no tokens that spell an end of this text")
            tokens.append(token)
        return tuple(tokens)

    def _towards_the_end(self, matcher: Any, taken: Counter[int]) -> int | None:
        forced: Sequence[int] = matcher.compute_ff_tokens()
        if forced:
            return forced[0]
        bits, trie = self._allowed(matcher), self._tokens.trie
        for byte in sorted(_ENDS, key=taken.__getitem__):  # stable: what ends most stays first
            node = int(trie.roots[EVERYTHING, byte])
            for token in trie.tokens_at(node) if node >= 0 else []:
                if bits[token >> 5] >> np.uint32(token & 31) & 1:
                    taken[byte] += 1
                    return token
        words = np.flatnonzero(bits)[:1]
        return unpack_few(bits[: int(words[0]) + 1])[0] if len(words) else None
