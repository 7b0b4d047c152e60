"""Jump-forward: finds the tokens that are certain where the text is.

Forced text is spelled in the tokens that the tokenizer would give it, together with the last token before it. Two
things can spoil that:

    the past        the tokenizer would join the beginning of the forced text with the last token: no jump, the model
                    samples its way through
    the future      a longer token may begin inside the forced text and reach beyond it, if the text goes on that way:
                    its tokens from there on are left to the model

Both are decided from the automaton, the vocabulary and the text alone, never from what was sampled next.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..automaton.automaton import DEAD, LazyAutomaton
from .masks import Masks
from .vocabulary import Encode


@dataclass(frozen=True, slots=True)
class Plan:
    """Tokens that follow whatever is sampled."""

    tokens: tuple[int, ...] = ()
    cut: bool = False  # the canonical tokens would have changed the past
    seen: int = 0  # tokens before it that were looked at


class Planner:
    """Plans jumps over one automaton and vocabulary.

    Args:
        masks: of the vocabulary; their walk looks for longer tokens.
        encode: the canonical tokens of plain text in the middle of a sequence.
    """

    def __init__(self, automaton: LazyAutomaton, masks: Masks, encode: Encode) -> None:
        self._automaton = automaton
        self._vocabulary = masks.vocabulary
        self._trie = masks.trie
        self._goes_on = masks.walk.goes_on
        self._encode = encode

    def plan(self, state: int, forced: bytes, before: Sequence[bytes]) -> Plan:
        """Plans the tokens that must follow.

        Args:
            forced: the bytes that every continuation begins with, not empty.
            before: what the last tokens spell, the latest last.
        """
        known = _last_characters(before)
        if known is None:
            return Plan((), cut=True, seen=len(before))
        past = b"".join(known)
        text = _whole_characters(past + forced)
        if len(text) <= len(past):
            return Plan(seen=len(known))
        tokens = self._vocabulary.canonical(text, self._encode) or []
        spelled = [self._vocabulary.token_bytes(token) for token in tokens]
        if not tokens or spelled[: len(known)] != known:
            return Plan((), cut=True, seen=len(known))
        starts = list(itertools.accumulate(map(len, spelled), initial=0))
        certain = self._certain(text, len(past), starts[len(known) : -1], state)
        kept = bisect.bisect_right(starts, certain) - 1  # tokens that end where the text is certain
        return Plan(tuple(tokens[len(known) : kept]), seen=len(known))

    def _certain(self, text: bytes, past: int, starts: Sequence[int], state: int) -> int:
        """Measures the text before the first token that may become a longer one, beyond the text's end.

        starts: where the tokens after the past begin.
        """
        beyond = self._automaton.run(state, text[past:])
        assert beyond != DEAD, "forced bytes are allowed"
        for start in starts:
            begun = text[start:]
            if len(begun) < self._vocabulary.longest and self._goes_on(self._trie, self._automaton, begun, beyond):
                return start
        return len(text)


def _last_characters(before: Sequence[bytes]) -> list[bytes] | None:
    """Finds the fewest last tokens that begin with a character; [] without any, None when there are too few."""
    for count in range(min(1, len(before)), len(before) + 1):
        known = list(before[len(before) - count :])
        if not known or known[0][:1] < b"\x80" or known[0][:1] >= b"\xc0":
            return known
    return None


def _whole_characters(text: bytes) -> bytes:
    """Cuts the beginning of a character off the end."""
    for length in range(1, min(4, len(text)) + 1):
        byte = text[-length]
        if byte < 0x80:
            return text
        if byte >= 0xC0:  # begins a character of 2, 3 or 4 bytes
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return text if size == length else text[:-length]
    return text
