"""One automaton of a constraint, as far as texts have gone, and what was found out on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..automaton.automaton import DEAD, Automaton
from ..errors import ConstraintRefused
from .endings import SEPARATORS
from .jump import Plan, Planner
from .masks import Mask, Masks
from .spelling import fewest_tokens

Key = TypeVar("Key")
Value = TypeVar("Value")

MOST_REMEMBERED = 4_096  # of plans and of ends, each; then they are found again
LONGEST_REMEMBERED = 256  # tokens of an end; of longer ones the last is remembered


class Explored:
    """Shared by the texts that began with it.

    Args:
        encode: see constraint.Constraint.
    """

    def __init__(self, automaton: Automaton, masks: Masks, encode: Callable[[str], list[int]] | None) -> None:
        self.automaton = automaton
        self.masks = masks
        self._encode = encode
        self._planner = Planner(automaton, masks.vocabulary, masks.trie, encode) if encode else None
        self._serial = masks.register()
        self._plans: dict[tuple[int, tuple[bytes, ...]], Plan] = {}
        self._closings: dict[int, tuple[int, ...]] = {}
        self._long_closing: tuple[int, tuple[int, ...]] | None = None  # of which state, and its end
        self._finals: dict[int, bool] = {}
        self._endings: dict[int, bytes] = {}

    def prepare(self, state: int, fuel: int) -> tuple[Mask | None, int]:
        """See Masks.prepare."""
        return self.masks.prepare(self._serial, self.automaton, state, fuel)

    def follow(self, state: int, data: bytes) -> int | None:
        """The state after a token's bytes; None when it is refused, or spells nothing."""
        following = self.automaton.run(state, data) if data else DEAD
        return None if following == DEAD else following

    def plan(self, state: int, before: Sequence[bytes]) -> Plan:
        """The tokens that must follow.

        Args:
            before: what the last tokens spell, the latest last.
        """
        if self._planner is None:
            return Plan()
        forced = self.automaton.forced(state)
        if not forced:
            return Plan()
        key = (state, tuple(before[-1:]))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._planner.plan(state, forced, before)
            if plan.seen <= 1:
                _remember(self._plans, key, plan)
        return plan

    def closing(self, state: int) -> tuple[int, ...]:
        """Tokens of a shortest text from here to acceptance.

        Raises:
            ConstraintRefused: the vocabulary cannot spell it.
        """
        if self._long_closing is not None and self._long_closing[0] == state:
            return self._long_closing[1]
        closing = self._closings.get(state)
        if closing is None:
            closing = tuple(self._spell(self.automaton.close(state)))
            if len(closing) > LONGEST_REMEMBERED:
                self._long_closing = state, closing
            else:
                _remember(self._closings, state, closing)
        return closing

    def is_final(self, state: int) -> bool:
        """Accepting, and nothing can follow."""
        final = self._finals.get(state)
        if final is None:
            final = self.automaton.accepting(state)
            if final:
                self.automaton.expand(state)
                final = bool((self.automaton.table[state] == DEAD).all())
            _remember(self._finals, state, final)
        return final

    def endings(self, state: int) -> NDArray[np.uint32] | None:
        """Of an accepting state: the tokens that end the text without being a part of it, see `endings`. None without
        any."""
        first = self._endings.get(state)
        if first is None:
            first = bytes(byte for byte in SEPARATORS if self._is_over(self.automaton.step(state, byte)))
            _remember(self._endings, state, first)
        return self.masks.endings.mask(first)

    def _is_over(self, state: int) -> bool:
        return state == DEAD or self.is_final(state)

    def begins_more(self, state: int, data: bytes) -> bool:
        """Whether `data` begins a part that need not come: the end before it is the end of what has to come now, too.

        What follows such a beginning without a choice is no part to be afraid of: it fits, or does not.
        """
        automaton = self.automaton
        end = automaton.close(state)
        for byte in data:
            state = automaton.step(state, byte)
            following = automaton.close(state)
            if len(following) > len(end) and following.endswith(end) and automaton.forced(state) != following:
                return True
            end = following
        return False

    def _spell(self, text: bytes) -> list[int]:
        """Canonical tokens if the tokenizer has them; in the middle of a character it has none."""
        if self._encode is not None:
            try:
                tokens = self._encode(text.decode())
            except UnicodeDecodeError:
                pass
            else:
                if self.masks.vocabulary.spells(tokens, text):
                    return tokens
        fewest = fewest_tokens(self.masks.trie, text)
        if fewest is None:
            raise ConstraintRefused(f"the model's vocabulary has no tokens that spell {text!r}; allow another text")
        return fewest


def _remember(entries: dict[Key, Value], key: Key, value: Value) -> None:
    if len(entries) >= MOST_REMEMBERED:
        entries.clear()
    entries[key] = value
