"""A constraint over the tokens of one vocabulary, and the cursor of a text in it.

Constraint           shared by all texts; lives as long as a text uses it
ConstraintState      the cursor of one text: mask, advance, forced tokens, shortest end, rollback
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..automaton.automaton import DEAD, Automaton
from ..errors import ConstraintRefused
from ..language import Grammar
from ..limits import Limits
from .explored import Explored, Healing
from .jump import Plan
from .masks import Mask, Masks
from .trie import fewest_of_any_text

MOST_VISITED = 20_000  # nodes of the trie, in the search for the fewest tokens of a text: 20 ms
MOST_HEALINGS = 64  # that a constraint remembers; then they are made again

Encode = Callable[[str], list[int]]  # the canonical tokens of plain text in the middle of a sequence


@dataclass(slots=True)
class JumpCounters:
    """Counts what jump-forward did. One for all constraints of an engine, or one of each."""

    forced: int = 0  # tokens that were taken because nothing else could come
    cut: int = 0  # times that forced text had to be sampled: its canonical tokens would have changed the past


class Constraint:
    """A compiled constraint, shared by all texts under it; for one thread at a time.

    The automaton grows with the texts that go through it. Half way to its limit new texts get a fresh one, so that
    texts are never ended for what earlier ones explored.

    Args:
        grammar: resolved, see boolean.resolution.resolve.
        masks: over the vocabulary.
        encode: without it nothing is forced, and the shortest ends are spelled in as few tokens as possible.
        limits: of each automaton.
        counters: of jump-forward.

    Raises:
        ConstraintRefused: the vocabulary has no tokens for the shortest text.
    """

    def __init__(
        self,
        grammar: Grammar,
        masks: Masks,
        *,
        encode: Encode | None = None,
        limits: Limits | None = None,
        counters: JumpCounters | None = None,
    ) -> None:
        self._grammar = grammar
        self._masks = masks
        self._encode = encode
        self._limits = limits or Limits()
        self.counters = counters or JumpCounters()
        self._explored = self._unexplored()
        self._healings: dict[bytes, Healing] = {}
        self._explored.closing(self._explored.automaton.start)  # the vocabulary spells it
        self._minimum: int | None = None

    @property
    def minimum_tokens(self) -> int:
        """No text has fewer tokens. Usually it is what the shortest text has; where longer texts may have fewer tokens
        and are many, it is less."""
        if self._minimum is None:
            automaton = Automaton(self._grammar, self._limits)  # of its own: the search makes many states
            self._minimum = fewest_of_any_text(automaton, self._masks.trie, MOST_VISITED)
        return self._minimum

    def begin(self, context: bytes = b"", said: bytes = b"") -> ConstraintState:
        """Starts a text.

        Args:
            context: the bytes of the token before it; b"" when it spells nothing, as control tokens do.
            said: the beginning of the text, when that token spells it already (see explored.Healing).

        Raises:
            ConstraintRefused: no text begins with `said`.
        """
        if 2 * self._explored.automaton.states > self._limits.states:
            self._explored, self._healings = self._unexplored(), {}
        state = self._explored.automaton.run(self._explored.automaton.start, said)
        if state == DEAD:
            raise ConstraintRefused(f"no text begins with {said!r}")
        return ConstraintState(self._explored, self.counters, context, state)

    def healing(self, said: bytes) -> Healing:
        """Returns the tokens that may replace one that spells `said` before the text. Shared, like masks."""
        healing = self._healings.get(said)
        if healing is None:
            if len(self._healings) >= MOST_HEALINGS:
                self._healings.clear()
            healing = self._healings[said] = Healing(self._explored, said)
        return healing

    @property
    def nbytes(self) -> int:
        """Of what new texts use; the masks are counted where they are kept."""
        return self._explored.automaton.nbytes

    def _unexplored(self) -> Explored:
        return Explored(Automaton(self._grammar, self._limits), self._masks, self._encode)


class _Step(NamedTuple):
    """A token that was taken, and where the text was before it."""

    token: int
    state: int
    plan: Plan | None
    place: int


class ConstraintState:
    """The cursor of one text.

    Forced tokens are planned once and then followed, so a text is the same whether they are appended together or come
    one by one out of masks with a single bit.
    """

    __slots__ = ("_context", "_counters", "_explored", "_mask", "_place", "_plan", "_state", "_steps", "ended")

    def __init__(self, explored: Explored, counters: JumpCounters, context: bytes, state: int) -> None:
        self._explored = explored
        self._counters = counters
        self._context = context
        self._state = state
        self._steps: list[_Step] = []
        self._plan: Plan | None = None  # None: not asked for yet in this state
        self._place = 0  # in the plan
        self._mask: Mask | None = None
        self.ended = False  # an EOS token was taken

    # ---------------------------------------------------------------------------------------- looking

    @property
    def accepting(self) -> bool:
        """The text may end here."""
        return self._explored.automaton.accepting(self._state)

    @property
    def finished(self) -> bool:
        """The text has ended, or may end and can have no further token."""
        return self.ended or self._explored.is_final(self._state)

    def prepare(self, fuel: int) -> int | None:
        """Works on the mask of this state → the fuel that is left, or None when more is needed.

        One unit is about the time of one new transition of the automaton, 10 µs.

        Raises:
            LimitExceeded: the automaton grew too large.
        """
        if self._mask is not None:
            return fuel
        assert not self.ended, "nothing follows the end"
        forced = self.forced_tokens()
        if forced:
            self._mask = Mask.only(forced[0], self._explored.masks.vocabulary.words)
            return fuel
        self._mask, left = self._explored.prepare(self._state, fuel)
        return None if self._mask is None else left

    @property
    def mask(self) -> NDArray[np.uint32]:
        """[words] the tokens that may come now; EOS ids exactly where the text may end. Shared: never written to."""
        assert self._mask is not None, "prepare has to finish first"
        return self._mask.bits

    @property
    def few(self) -> NDArray[np.int32] | None:
        """The tokens that may come now, ascending; None when they are more than 64."""
        assert self._mask is not None, "prepare has to finish first"
        return self._mask.few

    def forced_tokens(self) -> list[int]:
        """Tokens that follow whatever is sampled; [] where the text is free or its tokens are not certain yet."""
        if self.ended:
            return []
        if self._plan is None:
            self._plan, self._place = self._explored.plan(self._state, self._before()), 0
            self._counters.cut += self._plan.cut
        return list(self._plan.tokens[self._place :])

    def closing_tokens(self) -> list[int]:
        """Returns tokens of a shortest end from here; [] where the text may end.

        Raises:
            ConstraintRefused: the vocabulary cannot spell it.
        """
        return [] if self.ended else list(self._explored.closing(self._state))

    @property
    def closing_bound(self) -> int:
        """At least the number of `closing_tokens`, and cheap."""
        return 0 if self.ended else self._explored.automaton.close_length(self._state)

    @property
    def endings(self) -> NDArray[np.uint32] | None:
        """[words] where the text may end, and has begun: the tokens that end it without being a part of it; see
        `masks.Endings`. None without any. Shared: never written to."""
        if self.ended or not self._steps or not self.accepting:
            return None
        return self._explored.endings(self._state)

    @property
    def begins_more(self) -> bool:
        """The last token began a part that need not come, such as another member: the end before it would do."""
        if not self._steps or self.ended:
            return False
        step = self._steps[-1]
        data = self._explored.masks.vocabulary.token_bytes(step.token)
        return self._explored.begins_more(step.state, data)

    # ---------------------------------------------------------------------------------------- moving

    def advance(self, token: int) -> None:
        """Takes a token.

        Raises:
            ConstraintRefused: it is not allowed here.
        """
        vocabulary = self._explored.masks.vocabulary
        step = _Step(token, self._state, self._plan, self._place)
        if token in vocabulary.eos_ids:
            if self.ended or not self.accepting:
                raise ConstraintRefused(f"token {token} ends the text where it may not end")
            self.ended = True
        else:
            following = self._explored.follow(self._state, vocabulary.token_bytes(token)) if not self.ended else None
            if following is None:
                raise ConstraintRefused(f"token {token} ({vocabulary.token_bytes(token)!r}) is not allowed here")
            self._state = following
            self._follow_plan(token)
        self._steps.append(step)
        self._mask = None

    def _follow_plan(self, token: int) -> None:
        plan, place = self._plan, self._place
        planned = plan is not None and place < len(plan.tokens) and plan.tokens[place] == token
        self._counters.forced += planned
        if plan is not None and planned and place + 1 < len(plan.tokens):
            self._place += 1
        else:
            self._plan, self._place = None, 0

    def rollback(self, tokens: int) -> None:
        """Takes the last tokens back."""
        assert 0 <= tokens <= len(self._steps), "rolling back what was never taken"
        if not tokens:
            return
        first = self._steps[-tokens]
        del self._steps[-tokens:]
        self._state, self._plan, self._place = first.state, first.plan, first.place
        self._mask = None
        self.ended = False

    def copy(self) -> ConstraintState:
        """Copies the cursor, which goes its own way from here."""
        copied = ConstraintState(self._explored, self._counters, self._context, self._state)
        copied._steps = self._steps.copy()
        copied._plan, copied._place = self._plan, self._place
        copied._mask, copied.ended = self._mask, self.ended
        return copied

    def _before(self) -> list[bytes]:
        """The bytes of the last tokens, of as many as can hold the beginning of a character; the latest is the last."""
        token_bytes = self._explored.masks.vocabulary.token_bytes
        before = [token_bytes(step.token) for step in self._steps[-4:]]
        if len(before) < 4 and self._context:
            before.insert(0, self._context)
        return before
