"""One automaton of a constraint, as far as texts have gone, and what was found out on the way.

`Healing` is made on it too: the first token of a constrained text may begin inside the token before it.

    prompt      ... The answer is | ␣ |            the prompt's last token is dropped, and sampled again among
    text                               yes          itself and the tokens that begin with it: "␣", "␣y", "␣yes"

A prompt that ends in the middle of what the tokenizer would write as one token leaves the model with a beginning that
it has never seen; healing lets it write that token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..automaton.automaton import DEAD, Automaton
from ..errors import ConstraintRefused
from .jump import Plan, Planner
from .masks import NODES_PER_FUEL, NODES_PER_WALK, SEPARATORS, Mask, Masks
from .trie import END, Section, fewest_tokens
from .trie_walk import Fuelled, work_of
from .vocabulary import pack

Key = TypeVar("Key")
Value = TypeVar("Value")

MOST_REMEMBERED = 4_096  # of plans and of ends, each; then they are found again
LONGEST_REMEMBERED = 256  # tokens of an end; of longer ones the last is remembered


class Explored:
    """Remembers plans, ends and masks by state of one automaton; shared by the texts that began with it.

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
        """Returns the state after a token's bytes; None when it is refused, or spells nothing."""
        following = self.automaton.run(state, data) if data else DEAD
        return None if following == DEAD else following

    def plan(self, state: int, before: Sequence[bytes]) -> Plan:
        """Returns the tokens that must follow.

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
        """Returns tokens of a shortest text from here to acceptance.

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
        """Tells whether a state accepts, and nothing can follow."""
        final = self._finals.get(state)
        if final is None:
            final = self.automaton.accepting(state)
            if final:
                self.automaton.expand(state)
                final = bool((self.automaton.table[state] == DEAD).all())
            _remember(self._finals, state, final)
        return final

    def endings(self, state: int) -> NDArray[np.uint32] | None:
        """Of an accepting state: the tokens that end the text without being a part of it, see `masks`. None without
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
        """Spells in canonical tokens if the tokenizer has them; in the middle of a character it has none."""
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


class Healing:
    """The tokens that begin with some bytes and go on with a beginning of the constraint's texts.

    Made like a mask: `prepare` works on it, and can be interrupted.

    Args:
        said: what the token spells that may be replaced.
    """

    def __init__(self, explored: Explored, said: bytes) -> None:
        self._explored = explored
        masks = explored.masks
        node = masks.trie.find(said)
        start = explored.automaton.start
        below = [] if node is None else [Section(node + 1, int(masks.trie.nodes[node, END]))]
        self._left = work_of([section for section in below if section.end > section.begin], start)
        self._bits: NDArray[np.uint32] = np.zeros(masks.vocabulary.words, np.uint32)

    def prepare(self, fuel: int) -> int | None:
        """Works on → the fuel that is left, or None when more is needed.

        Raises:
            LimitExceeded: of the automaton.
        """
        masks, rows = self._explored.masks, Fuelled(self._explored.automaton, fuel)
        while len(self._left):
            if rows.fuel <= 0:
                return None
            self._left, visited = masks.walk(masks.trie, rows, self._left, self._bits, NODES_PER_WALK)
            rows.fuel -= 1 + visited // NODES_PER_FUEL
        return max(rows.fuel, 0)

    @property
    def possible(self) -> bool:
        """There is such a token."""
        assert not len(self._left), "prepare has to finish first"
        return bool(self._bits.any())

    def mask(self, token: int) -> Mask:
        """Returns the mask of those tokens, and of the one that may be replaced."""
        assert not len(self._left), "prepare has to finish first"
        return Mask.of(self._bits | pack(np.array([token], np.int32), len(self._bits)))
