"""The lazy byte automaton of a constraint. It makes states when a text, a mask or a jump first needs them.

    table[state, byte] ->  next state | DEAD (-1): no text of the constraint goes on so | UNKNOWN (-2): not asked yet

One look at the positions of a state tells which bytes lead on, and which of them lead to the same target; a step works
out the target of its own byte, `expand` those of the whole row.

A state stands for a set of positions (see frames) and for whether the text may end there. Every state that is not
DEAD reaches the end of some text: that is what makes masks safe.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import Limits, too_ambiguous, too_many_states
from ..language import Grammar
from .frames import Closure, Frame, Frames, Position, united
from .lookahead import Lookahead, plain_limit, plain_run, shortest_text
from .lowering import lower
from .places import DEAD, ENDLESS, UNKNOWN, WHOLE_LITERALS, LiteralTrie, Move, MoveKind, Place, Split, Text, split

ROW_BYTES = 256 * 4

_STATE_BYTES = 500  # of one state without its row: entries of lists and dictionaries; measured, as those below
_POSITION_BYTES = 130
_FRAME_BYTES = 300
_SPLIT_BYTES = 3_000
_FIRST_ROWS = 32
_DOUBLED_ROWS = 4_096  # beyond, room for all states is reserved: copying tens of megabytes would stall the engine
_LITERAL_BYTES = 8  # of a literal, made at once; more would be wasted where hundreds of options begin
_WALKED_PER_STEP = 16  # what is looked at between bytes takes about a sixteenth of the time of a target


class LazyAutomaton(Protocol):
    """Steps through the texts of a constraint, byte by byte. `Automaton` documents each of these.

    There are two with the same states: `Automaton`, the reference, and srt/kernels/cpu/automaton.py in C++.
    """

    start: int

    @property
    def half_full(self) -> bool: ...

    @property
    def states(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def step(self, state: int, byte: int) -> int: ...

    def run(self, state: int, data: bytes) -> int: ...

    def accepting(self, state: int) -> bool: ...

    def expanded(self, state: int) -> bool: ...

    def expand(self, state: int) -> None: ...

    def row(self, state: int) -> NDArray[np.int32]: ...

    def forced(self, state: int) -> bytes: ...

    def close(self, state: int) -> bytes: ...

    def close_length(self, state: int) -> int: ...

    def plain_run(self, state: int) -> int: ...

    def plain_limit(self, state: int) -> int: ...

    def lookahead(self, state: int, reach: int) -> int: ...


class Automaton:
    """The automaton of one constraint. Not for several threads at once.

    Args:
        grammar: as `boolean.resolution.resolve` returns it: without Intersection and Difference.
        limits: of states, of positions in one state, of nested recursive calls, of forced bytes.

    Raises:
        ConstraintRefused: nothing is admitted.
        LimitExceeded: here and from every method that makes states.
    """

    def __init__(self, grammar: Grammar, limits: Limits = Limits()) -> None:  # noqa: B008 (frozen)
        lowered = lower(grammar, limits)
        self._limits = limits
        self._lowered = lowered
        self._frames = Frames(limits)
        self._positions: list[tuple[Position, ...]] = []
        self._accepting: list[bool] = []
        self._begun: list[Split | None] = []  # of the states whose row has its dead bytes
        self._whole: list[bool] = []  # states whose row has no unknown byte
        self._lengths: dict[int, int] = {}  # of shortest texts to the end
        self._alone: dict[Position, int] = {}  # states of one position that do not accept: the common case
        self._states: dict[tuple[bool, frozenset[Position]], int] = {}
        self._splits: dict[tuple[Place, ...], Split] = {}
        self._plain_runs: dict[int, int] = {}
        self._lookahead: Lookahead | None = None
        self._lookahead_states: dict[int, int] = {}
        self._targets = 0
        self._held = 0  # positions of all states
        # [capacity, 256] Rows are written when their state is made: what is beyond takes no memory yet.
        self.table: NDArray[np.int32] = np.empty((min(_FIRST_ROWS, limits.states), 256), dtype=np.int32)
        self.start = self._state_of(self._frames.enter(lowered.root, self._frames.root))

    @property
    def half_full(self) -> bool:
        """Whether more than half of the states are there that the limits allow."""
        return 2 * self.states > self._limits.states

    @property
    def states(self) -> int:
        """States made so far."""
        return len(self._positions)

    @property
    def steps(self) -> int:
        """The work done so far, in targets worked out; one that many positions lead to counts as many."""
        return self._targets + self._frames.walked // _WALKED_PER_STEP

    @property
    def nbytes(self) -> int:
        """About how much memory this takes: the rows in use exactly, the rest as an estimate."""
        states = (ROW_BYTES + _STATE_BYTES) * self.states + _POSITION_BYTES * self._held
        return self._lowered.nbytes + states + _FRAME_BYTES * len(self._frames) + _SPLIT_BYTES * len(self._splits)

    def step(self, state: int, byte: int) -> int:
        """Returns the state after one byte; DEAD stays DEAD."""
        if state < 0:
            return DEAD
        following = self.table.item(state, byte)
        if following == UNKNOWN:
            move = self._begin(state).move(byte)
            return DEAD if move is None else self._take(state, move)
        return following

    def run(self, state: int, data: bytes) -> int:
        """Returns the state after `data`, DEAD when it is refused."""
        for byte in data:
            if state < 0:
                return DEAD
            state = self.step(state, byte)
        return state

    def accepting(self, state: int) -> bool:
        """Tells whether a text may end here."""
        return self._accepting[state]

    def expanded(self, state: int) -> bool:
        """Tells whether the row of this state is known."""
        return self._whole[state]

    def expand(self, state: int) -> None:
        """Works the whole row of a state out."""
        if self._whole[state]:
            return
        for move in self._begin(state).moves:
            if self.table.item(state, move.ranges[0][0]) == UNKNOWN:
                self._take(state, move)
        self._whole[state] = True

    def row(self, state: int) -> NDArray[np.int32]:
        """Returns [256] what the table has for a state; valid until another state is made."""
        row: NDArray[np.int32] = self.table[state]
        return row

    def forced(self, state: int) -> bytes:
        """Returns the bytes that every text goes on with from here; none of the states passed accepts."""
        data = bytearray()
        while not self._accepting[state] and len(data) < self._limits.forced_bytes:
            byte = self._begin(state).only_byte
            if byte < 0:
                break
            data.append(byte)
            state = self.step(state, byte)
        return bytes(data)

    def close(self, state: int) -> bytes:
        """Returns a shortest text from here to the end; the same one every time."""
        if self._accepting[state]:
            return b""
        return shortest_text(min(self._positions[state], key=_length))

    def close_length(self, state: int) -> int:
        """Counts the bytes of `close`, without writing it."""
        length = self._lengths.get(state)
        if length is None:
            length = 0 if self._accepting[state] else min(map(_length, self._positions[state]))
            self._lengths[state] = length
        return length

    def plain_run(self, state: int) -> int:
        """Counts plain characters (see characters.PLAIN): every text of at most so many may go on from here.

        From counters, without exploring; ENDLESS for any number, 0 inside a character. Never more than is true.
        """
        run = self._plain_runs.get(state)
        if run is None:
            run = self._plain_runs[state] = plain_run(self._frames, self._positions[state])
        return run

    def plain_limit(self, state: int) -> int:
        """Bounds the plain characters that a text may begin with from here; ENDLESS where that is not certain."""
        return plain_limit(self._frames, self._positions[state])

    def lookahead(self, state: int, reach: int) -> int:
        """Returns a state from which the same texts of at most `reach` bytes go on, and end: of many states, one."""
        if self._lookahead is None or self._lookahead.reach != reach:
            self._lookahead, self._lookahead_states = Lookahead(self._frames, reach), {}
        seen = self._lookahead_states.get(state)
        if seen is None:
            positions = self._lookahead.of(self._positions[state])
            seen = self._lookahead_states[state] = self._state_of(Closure(positions, self._accepting[state]))
        return seen

    def _begin(self, state: int) -> Split:
        """Returns the split of a state; its dead bytes are in the row from here on."""
        known = self._begun[state]
        if known is None:
            places = tuple([place for place, _ in self._positions[state]])
            known = self._splits.get(places)
            if known is None:
                known = self._splits[places] = split(places)
            self._begun[state] = known
            known.begin(self.table[state])
        return known

    def _take(self, state: int, move: Move) -> int:
        """Works the target of a move out, for all its bytes."""
        target = self._target(self._positions[state], move)
        row = self.table[state]  # after the target: the table may be another one now
        for first, last in move.ranges:
            row[first : last + 1] = target
        self._targets += len(move.steps)
        return target

    def _target(self, positions: tuple[Position, ...], move: Move) -> int:
        if move.kind is MoveKind.END:
            return self._state_after(positions[move.index][1])
        if move.kind is MoveKind.PASS:
            position = (move.place, positions[move.index][1])
            state = self._alone.get(position)
            return self._add_literal(*position) if state is None else state
        found: dict[Position, None] = {}
        accepting = False
        for index, place in move.steps:
            frame = positions[index][1]
            if not place.terminal:
                found[place, frame] = None
            closures = [self._frames.enter(rest, frame) for rest in place.rests]
            if place.accepting:
                closures.append(self._frames.closure(frame))
            for closure in closures:
                found.update(dict.fromkeys(closure.positions))
                accepting = accepting or closure.accepting
        return self._state_of(Closure(tuple(found), accepting))

    def _state_after(self, frame: Frame) -> int:
        if frame.state < 0:
            frame.state = self._state_of(self._frames.closure(frame))
        return frame.state

    def _state_of(self, closure: Closure) -> int:
        positions, accepting = closure.positions, closure.accepting
        if len(positions) > 1:
            positions = united(self._frames, positions)
        if len(positions) == 1 and not accepting:
            state = self._alone.get(positions[0])
        else:
            state = self._states.get((accepting, frozenset(positions)))
        return self._add(positions, accepting) if state is None else state

    def _add_literal(self, place: Place, frame: Frame) -> int:
        """Adds the state of one position, and those after it as far as a literal leads: its bytes come soon."""
        first = self._add(((place, frame),), False)
        left = min(_LITERAL_BYTES, self._limits.states - first - 1)
        state = first
        while left > 0 and isinstance(place, Text | LiteralTrie):
            if len(place.edges) != 1:
                break
            byte, _, place = place.edges[0]
            position = (place, frame)
            if place.accepting or place.rests or position in self._alone:
                break
            following = self._add((position,), False)
            row = self.table[state]
            row.fill(DEAD)
            row[byte] = following
            self._begun[state] = WHOLE_LITERALS[byte]
            self._whole[state] = True
            self._targets += 1
            state = following
            left -= 1
        return first

    def _add(self, positions: tuple[Position, ...], accepting: bool) -> int:
        state = len(self._positions)
        if len(positions) > self._limits.ambiguity:
            raise too_ambiguous(self._limits.ambiguity)
        if state >= self._limits.states:
            raise too_many_states(self._limits.states)
        if state == len(self.table):
            capacity = 2 * state if state < _DOUBLED_ROWS else self._limits.states
            grown = np.empty((min(capacity, self._limits.states), 256), dtype=np.int32)
            grown[:state] = self.table
            self.table = grown
        self.table[state].fill(UNKNOWN)
        if len(positions) == 1 and not accepting:
            self._alone[positions[0]] = state
        else:
            self._states[accepting, frozenset(positions)] = state
        self._positions.append(positions)
        self._held += len(positions)
        self._accepting.append(accepting)
        self._begun.append(None)
        self._whole.append(False)
        return state


def _length(position: Position) -> int:
    place, frame = position
    return place.shortest + frame.length


__all__ = ["DEAD", "ENDLESS", "ROW_BYTES", "UNKNOWN", "Automaton", "LazyAutomaton"]
