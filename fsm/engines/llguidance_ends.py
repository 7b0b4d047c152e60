"""Ends of a text that llguidance's matcher follows. The matcher does not say how far the end is: it is searched for.

What is found is an end, and short; that there is no shorter one is not known. So an end that is found may close a text,
and one that is not found, or is too long, says nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..tokens.trie import EVERYTHING, Trie
from ..tokens.vocabulary import Vocabulary, unpack_few
from .llguidance_tokens import require_sound

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

Matcher = Any  # llguidance.LLMatcher, a compiled class


class Ends:
    """Searches over one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, trie: Trie) -> None:
        self._vocabulary = vocabulary
        roots = trie.roots[EVERYTHING].tolist()
        self._single = [trie.tokens_at(node) if node >= 0 else [] for node in roots]  # tokens of one byte

    def allowed(self, matcher: Matcher) -> NDArray[np.uint32]:
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

    def takes(self, matcher: Matcher, byte: int) -> bool:
        """Whether this byte may come, as far as tokens of one byte tell."""
        return any(matcher.validate_tokens([token]) == 1 for token in self._single[byte])

    def straight(self, matcher: Matcher, most: int) -> tuple[int, ...] | None:
        """An end of at most `most` tokens on one way; None where the way is longer, or leads nowhere.

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

    def shortest(self, matcher: Matcher, below: int) -> tuple[int, ...] | None:
        """An end of fewer than `below` tokens, from many ways that are begun. The one that promises most goes on: it is
        short, and what may come there came nowhere before. None where `MOST_LOOKS` find none."""
        waiting: list[tuple[int, int, tuple[int, ...], Matcher, NDArray[np.uint32]]]
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
        """Tokens of one byte: all that close, one of each class; all tokens where they are few."""
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
        """The token of this byte alone, if it may come."""
        return next((token for token in self._single[byte] if words[token >> 5] >> (token & 31) & 1), None)


def _first(bits: NDArray[np.uint32]) -> list[int]:
    """The first token of a mask; [] of an empty one."""
    words = np.flatnonzero(bits)[:1]
    return unpack_few(bits[: int(words[0]) + 1])[:1] if len(words) else []
