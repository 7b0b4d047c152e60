"""Constraints by llguidance's matcher, for grammars that are not regular: Lark grammars, and schemas that our own
automata refuse. The vocabulary is our table of bytes, so that user-defined tokens are text and control tokens nothing.

A matcher is a state machine of its own: a text has one, a copy is a copy of it. Nothing says how far the end is, so
ends are searched for (`Ends`), and are short rather than shortest: an end that is found may close a text, and one that
is not found, or is too long, says nothing.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConstraintRefused, LimitExceeded
from ..tokens.constraint import JumpCounters
from ..tokens.masks import SEPARATORS, Mask
from ..tokens.trie import EVERYTHING, Trie
from ..tokens.vocabulary import Encode, Vocabulary, unpack_few
from .llguidance_tokens import LlguidanceTokens, require_sound
from .source import Source

FIRST_TOKENS = 256  # of an end that is searched for once, where a text begins
NEXT_TOKENS = 64  # of an end that is searched for after a token: a look takes up to 0.3 ms of the step
MOST_LOOKS = 300  # of a search among several ways; a look is a copy of the matcher and a mask: 20 µs, in free text more
FEW = 24  # tokens that may come: all of them are tried

# What is tried first on the way to an end: what closes, what separates, digits, letters; what opens comes last.
_CLOSING = b"\"}])>'`;.,:\n <|(/"
_CLASSES = (b"0123456789", b"abcdefghijklmnopqrstuvwxyz", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_ENDS = (
    *b"\"}])>'`,:;.!?|&@#$%^~*=/+-_",
    *b"0123456789 \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ\t\r\\<([{",
)

LlMatcher = Any  # llguidance.LLMatcher, a compiled class


class Ends:
    """Searches for ends over one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, trie: Trie) -> None:
        self._vocabulary = vocabulary
        roots = trie.roots[EVERYTHING].tolist()
        self._single = [trie.tokens_at(node) if node >= 0 else [] for node in roots]  # tokens of one byte

    def allowed(self, matcher: LlMatcher) -> NDArray[np.uint32]:
        """[words] the tokens that may come; EOS ids exactly where the text may end. The caller's own.

        Raises:
            LimitExceeded: of the library.
        """
        bits = np.zeros(self._vocabulary.words, np.uint32)
        if not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            require_sound(matcher)
        bits &= ~self._vocabulary.eos_mask
        return bits | self._vocabulary.eos_mask if matcher.is_accepting() else bits

    def takes(self, matcher: LlMatcher, byte: int) -> bool:
        """Tells whether this byte may come, as far as tokens of one byte tell."""
        return any(matcher.validate_tokens([token]) == 1 for token in self._single[byte])

    def straight(self, matcher: LlMatcher, most: int) -> tuple[int, ...] | None:
        """Searches for an end of at most `most` tokens on one way; None where the way is longer, or leads nowhere.

        Of the bytes that may come the one taken least often goes first, then the one that ends most: no loop is gone
        through for ever."""
        matcher, tokens = matcher.deep_copy(), list[int]()
        taken: Counter[int] = Counter()
        while not matcher.is_accepting():
            forced: Sequence[int] = matcher.compute_ff_tokens()
            token = forced[0] if forced else self._least_taken(self.allowed(matcher), taken)
            if len(tokens) == most or token is None or not matcher.consume_token(token):
                return None
            tokens.append(token)
        return tuple(tokens)

    def shortest(self, matcher: LlMatcher, below: int) -> tuple[int, ...] | None:
        """An end of fewer than `below` tokens, from many ways that are begun. The one that promises most goes on: it is
        short, and what may come there came nowhere before. None where `MOST_LOOKS` find none."""
        waiting: list[tuple[int, int, tuple[int, ...], LlMatcher, NDArray[np.uint32]]]
        waiting = [(0, 0, (), matcher.deep_copy(), self.allowed(matcher))]
        seen: Counter[bytes] = Counter()
        looks = 0
        while waiting and looks < MOST_LOOKS:
            _, _, tokens, place, bits = heapq.heappop(waiting)
            forced: list[int] = place.compute_ff_tokens()
            for way in [forced] if forced else ([token] for token in self._candidates(bits)):
                following, after = (*tokens, *way), place.deep_copy()
                if len(following) >= below or not after.consume_tokens(way):
                    continue
                if after.is_accepting():
                    return following
                look = self.allowed(after)
                looks += 1
                key = look.tobytes()
                seen[key] += 1
                heapq.heappush(waiting, (seen[key] - len(following), looks, following, after, look))
        return None

    def _candidates(self, bits: NDArray[np.uint32]) -> list[int]:
        """Returns tokens of one byte: all that close, one of each class; all tokens where they are few."""
        if np.count_nonzero(bits) <= FEW:
            few = unpack_few(bits)
            if len(few) <= FEW:
                return few
        words = bits.data
        tokens = [token for byte in _CLOSING if (token := self._of_byte(words, byte)) is not None]
        for members in _CLASSES:
            tokens += [token for byte in members if (token := self._of_byte(words, byte)) is not None][:1]
        return tokens or _first(bits)

    def _least_taken(self, bits: NDArray[np.uint32], taken: Counter[int]) -> int | None:
        words = bits.data
        for byte in sorted(_ENDS, key=taken.__getitem__):  # stable: what ends most stays first
            token = self._of_byte(words, byte)
            if token is not None:
                taken[byte] += 1
                return token
        return next(iter(_first(bits)), None)

    def _of_byte(self, words: memoryview, byte: int) -> int | None:
        """Returns the token of this byte alone, if it may come."""
        return next((token for token in self._single[byte] if words[token >> 5] >> (token & 31) & 1), None)


def _first(bits: NDArray[np.uint32]) -> list[int]:
    """Returns the first token of a mask; [] of an empty one."""
    words = np.flatnonzero(bits)[:1]
    return unpack_few(bits[: int(words[0]) + 1])[:1] if len(words) else []


NO_END = 1 << 30  # tokens: no end is known
MOST_WIDE = 16  # searches of one text among several ways, some 10 ms each
FUEL = 4  # of one mask: some tens of microseconds
FUEL_PER_SECOND = 100_000  # of CPU time: one unit is 10 µs, as for our own automata
MOST_MASK_SECONDS = 0.25  # of CPU time for one mask; the library's own limits allow no more than about half of it
LEAST_BYTES = 5 << 20  # that a constraint takes: half of 250 real schemas take about this


class LlguidanceConstraint:
    """A constraint like constraint.Constraint, by llguidance.

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
        self._ends = Ends(tokens.vocabulary, tokens.trie)
        self.minimum_tokens = 0 if self._matcher.is_accepting() else 1  # that is certain: a search gives no least

    def begin(self, context: bytes = b"", said: bytes = b"") -> LlguidanceState:
        """See Constraint.begin."""
        matcher = self._matcher.deep_copy()
        if said and not matcher.consume_tokens(self._tokens.spell(said)):
            raise ConstraintRefused(f"no text begins with {said!r}")
        return LlguidanceState(matcher, self._tokens, self._ends, self._encode, self.counters, context)

    def healing(self, said: bytes) -> NoHealing:
        """Returns the matcher takes tokens, not parts of them: none is replaced."""
        return NoHealing(said)


class NoHealing:
    """A healing like `constraint.Healing`, where no token may be replaced."""

    possible = False

    def __init__(self, said: bytes) -> None:
        self._said = said

    def prepare(self, fuel: int) -> int | None:
        return fuel

    def mask(self, token: int) -> Mask:
        raise AssertionError(f"{self._said!r} (token {token}) may not be replaced")


class LlguidanceState:
    """The cursor of one text, like constraint.ConstraintState."""

    def __init__(
        self,
        matcher: Any,
        tokens: LlguidanceTokens,
        ends: Ends,
        encode: Encode | None,
        counters: JumpCounters,
        context: bytes,
    ) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._ends = ends
        self._encode = encode
        self._counters = counters
        self._context = context
        self._taken: list[int] = []
        self._plans: list[tuple[int, ...] | None] = [None]  # what was forced before each token; the last: now
        self._closing: tuple[int, ...] | None = None  # the shortest end that was found
        self._searched = ""  # how an end was searched for: "straight", then "widely"
        self._wide_searches = 0
        self._before: tuple[int, ...] | None = None  # the end that was known before the last token
        self._mask: Mask | None = None
        self._endings: bytes | None = None  # bytes with which they begin
        self.ended = False

    # ---------------------------------------------------------------------------------------- looking

    @property
    def accepting(self) -> bool:
        return bool(self._matcher.is_accepting())

    @property
    def finished(self) -> bool:
        return self.ended or (self.accepting and bool(self._matcher.is_stopped()))

    def prepare(self, fuel: int) -> int | None:
        """Calls the library once, which has limits of its own. It is not interrupted: what is left may be below 0.

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
        mask = Mask.only(forced[0], words) if forced else Mask.of(self._ends.allowed(self._matcher))
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
        """Returns the library's own, unless they would change the last token."""
        if self.ended:
            return []
        plan = self._plans[-1]
        if plan is None:
            plan = self._plans[-1] = self._plan()
        return list(plan)

    def closing_tokens(self) -> list[int] | None:
        """Searches for a short end from here; None when none is found, which does not mean that there is none."""
        if self.ended:
            return []
        bound = self.closing_bound
        if self._searched != "widely" and bound > 1 and self._wide_searches < MOST_WIDE:
            self._searched = "widely"
            self._wide_searches += 1
            self._closing = self._ends.shortest(self._matcher, bound) or self._closing
        return None if self._closing is None else list(self._closing)

    @property
    def closing_bound(self) -> int:
        """Of an end that is quickly found; more than any `max_tokens` when none is."""
        if not self.ended and self._closing is None and not self._searched:
            self._searched = "straight"
            self._closing = self._ends.straight(self._matcher, NEXT_TOKENS if self._taken else FIRST_TOKENS)
        if self.ended:
            return 0
        return NO_END if self._closing is None else len(self._closing)

    @property
    def endings(self) -> NDArray[np.uint32] | None:
        """See ConstraintState.endings. The matcher tells what may come, not what may come after that."""
        if self.ended or not self._taken or not self.accepting:
            return None
        if self._endings is None:
            self._endings = bytes(byte for byte in SEPARATORS if not self._ends.takes(self._matcher, byte))
        return self._tokens.endings.mask(self._endings)

    @property
    def begins_more(self) -> bool:
        """See ConstraintState.begins_more. As far as the ends that were found show it."""
        if self._before is None or self._closing is None:
            return False
        spell = self._tokens.vocabulary.spell
        before, now = spell(self._before), spell(self._closing)
        return len(now) > len(before) and now.endswith(before)

    roomy = True  # the library does not say how many states it has

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
        self._before = closing
        self._closing = closing[1:] if closing and closing[0] == token else None
        self._searched = ""
        self._endings = None
        self._taken.append(token)
        self._mask = None

    def rollback(self, tokens: int) -> None:
        assert 0 <= tokens <= len(self._taken), "rolling back what was never taken"
        if not tokens:
            return
        self._matcher.rollback(tokens - self.ended)
        del self._taken[-tokens:], self._plans[-tokens:]
        known = self._before if tokens == 1 else None  # the end that was known there: another search might miss it
        self._closing, self._searched, self._before = known, "straight" if known is not None else "", None
        self._mask, self._endings, self.ended = None, None, False

    def copy(self) -> LlguidanceState:
        """See ConstraintState.copy."""
        copied = LlguidanceState(
            self._matcher.deep_copy(), self._tokens, self._ends, self._encode, JumpCounters(), self._context
        )
        copied._taken, copied._plans = self._taken.copy(), self._plans.copy()
        copied._closing, copied._before, copied._searched = self._closing, self._before, self._searched
        copied._wide_searches = self._wide_searches
        copied._mask, copied._endings, copied.ended = self._mask, self._endings, self.ended
        return copied

    # ---------------------------------------------------------------------------------------- how

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
