"""A constraint over the tokens of one vocabulary, and the cursor of a text in it.

Constraint           shared by all texts; lives as long as a text uses it
ConstraintState      the cursor of one text: mask, advance, forced tokens, shortest end, rollback
Explored             one automaton of a constraint, as far as texts have gone, with the plans and ends found on the way
Healing              the tokens that may replace the one before the text

Healing is for a prompt that ends in the middle of what the tokenizer would write as one token. It leaves the model with
a beginning that it has never seen, so the first token of the text may begin inside the token before it:

    prompt      ... The answer is | ␣ |            the prompt's last token is dropped, and sampled again among
    text                               yes          itself and the tokens that begin with it: "␣", "␣y", "␣yes"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..automaton.automaton import DEAD, LazyAutomaton
from ..errors import ConstraintRefused, Limits
from ..language import Grammar
from .jump import Plan, Planner
from .masks import NODES_PER_FUEL, NODES_PER_WALK, SEPARATORS, Fuelled, Mask, Masks, work_of
from .trie import END, Section, fewest_of_any_text, fewest_tokens
from .vocabulary import Encode, pack

MOST_VISITED = 20_000  # nodes of the trie, in the search for the fewest tokens of a text: 20 ms
MOST_HEALINGS = 64  # that a constraint remembers; then they are made again
MOST_REMEMBERED = 4_096  # of plans and of ends, each; then they are found again
LONGEST_REMEMBERED = 256  # tokens of an end; of longer ones the last is remembered
Key = TypeVar("Key")
Value = TypeVar("Value")


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
            automaton = self._masks.automaton(self._grammar, self._limits)  # of its own: the search makes many states
            self._minimum = fewest_of_any_text(automaton, self._masks.trie, MOST_VISITED)
        return self._minimum

    def begin(self, context: bytes = b"", said: bytes = b"") -> ConstraintState:
        """Starts a text.

        Args:
            context: the bytes of the token before it; b"" when it spells nothing, as control tokens do.
            said: the beginning of the text, when that token spells it already (see Healing).

        Raises:
            ConstraintRefused: no text begins with `said`.
        """
        if self._explored.automaton.half_full:
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
        return Explored(self._masks.automaton(self._grammar, self._limits), self._masks, self._encode)


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

    @property
    def roomy(self) -> bool:
        """Whether states may be explored that no text needs: half of the automaton's limit is left to those that do."""
        return not self._explored.automaton.half_full

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
        """Copies the cursor, which goes its own way from here, and counts its jumps for itself."""
        copied = ConstraintState(self._explored, JumpCounters(), self._context, self._state)
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


class Explored:
    """Remembers plans, ends and masks by state of one automaton; shared by the texts that began with it.

    Args:
        encode: see Constraint.
    """

    def __init__(self, automaton: LazyAutomaton, masks: Masks, encode: Encode | None) -> None:
        self.automaton = automaton
        self.masks = masks
        self._encode = encode
        self._planner = Planner(automaton, masks, encode) if encode else None
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
                final = bool((self.automaton.row(state) == DEAD).all())
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

        What follows such a beginning without a choice is no part to be afraid of: it fits, or does not. Neither is the
        rest of a character.
        """
        automaton = self.automaton
        end = automaton.close(state)
        inside = 0  # bytes that the character has still to come
        for byte in data:
            state = automaton.step(state, byte)
            inside = max(inside - 1, 0) if byte < 0xC0 else (byte >= 0xE0) + (byte >= 0xF0) + 1
            if inside:
                continue
            following = automaton.close(state)
            if len(following) > len(end) and following.endswith(end) and automaton.forced(state) != following:
                return True
            end = following
        return False

    def _spell(self, text: bytes) -> list[int]:
        """Spells in canonical tokens where the tokenizer has them, else in the fewest."""
        tokens = self.masks.vocabulary.canonical(text, self._encode)
        if tokens is None:
            tokens = fewest_tokens(self.masks.trie, text)
        if tokens is None:
            raise ConstraintRefused(f"the model's vocabulary has no tokens that spell {text!r}; allow another text")
        return tokens


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
