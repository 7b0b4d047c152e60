"""Frames: a stack of what is left to match after a leaf; equal frames are one object.

    Root                                  nothing is left
    Rest(sequence, index, parent)         parts index, index + 1, ... of a sequence, then the parent
    Again(loop, least, most, parent)      least to most further turns of a loop, then the parent
    Return(parents)                       the end of a recursive call, then one of the parents

A position is a place and the frame above it: a partial derivative (Antimirov, 1996) of the constraint. Counts live in
frames as intervals, so that `x{0,65535}` costs nothing ahead. `united` makes positions one where that is exact: those
that differ in counts only, or in the callers of one recursive call.

    body{0,3} then F  |  body{2,9} then F    =   body{0,9} then F      intervals that overlap or touch
    counts (0,3)(1,5) |  counts (0,3)(2,4)   =   counts (0,3)(1,5)     one that includes the other
    X, return to P    |  X, return to Q      =   X, return to P or Q   the same call, read in two ways

So an ambiguous constraint such as `(.{0,50},){0,50}` stands in a few places and not in thousands, and an ambiguous
recursive grammar needs as many positions at a depth as it has at the first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ..errors import Limits, too_ambiguous
from .nodes import Leaf, Loop, Nested, Node, Options, Sequence, Unfolding
from .places import ENDLESS, Place

Position = tuple[Place, "Frame"]
Interval = tuple[int, int]


class Frame:
    """One level of what is left.

    room: how many recursive calls may still be opened above this frame.
    base: the first Return, or the Root, at or below this frame.
    closure: where a text stands when it comes back to this frame; None: not asked for yet.
    state: the automaton's state for `closure`; -1: not asked for yet.
    """

    __slots__ = ("_length", "_parent", "base", "closure", "room", "state")

    def __init__(self, parent: Frame | None, room: int) -> None:
        self._parent = parent
        self.base: Frame = self if parent is None else parent.base
        self.room = room
        self.closure: Closure | None = None
        self.state = -1
        self._length = -1

    @property
    def parent(self) -> Frame:
        assert self._parent is not None, "a Root has no parent, a Return several"
        return self._parent

    @property
    def own_length(self) -> int:
        """Bytes of the shortest text of this frame without its parents."""
        return 0

    @property
    def length(self) -> int:
        """Bytes of the shortest text from here to the end of the whole."""
        above: list[Frame] = []
        frame = self
        while frame._length < 0:
            above.append(frame)
            frame = frame.parent
        total = frame._length
        for current in reversed(above):
            total += current.own_length
            current._length = total
        return total


class Root(Frame):
    __slots__ = ()

    def __init__(self, room: int) -> None:
        super().__init__(None, room)
        self._length = 0


class Rest(Frame):
    __slots__ = ("index", "sequence")

    def __init__(self, sequence: Sequence, index: int, parent: Frame) -> None:
        super().__init__(parent, parent.room)
        self.sequence = sequence
        self.index = index

    @property
    def own_length(self) -> int:
        return self.sequence.shortest_from(self.index, self.room)


class Again(Frame):
    __slots__ = ("least", "loop", "most")

    def __init__(self, loop: Loop, least: int, most: int, parent: Frame) -> None:
        super().__init__(parent, parent.room)
        self.loop = loop
        self.least = least
        self.most = most

    @property
    def own_length(self) -> int:
        return self.least * self.loop.body.shortest(self.room) if self.least else 0


class Return(Frame):
    """The end of a recursive call. parents: one or more, all with the same room; none is a Return."""

    __slots__ = ("parents",)

    def __init__(self, parents: tuple[Frame, ...]) -> None:
        super().__init__(None, parents[0].room - 1)
        self.parents = parents
        self._length = min(parent.length for parent in parents)


def one_less(turns: int) -> int:
    """Returns a count of turns after one more: none stays none, and no end stays no end."""
    return turns if turns in (0, ENDLESS) else turns - 1


class Closure:
    """The ε-closure: positions that are reached without a further byte, and whether the whole may end there."""

    __slots__ = ("accepting", "positions")

    def __init__(self, positions: tuple[Position, ...], accepting: bool) -> None:
        self.positions = positions
        self.accepting = accepting


class Frames:
    """Makes the frames of one automaton, each once, and finds where texts stand that come back to one."""

    def __init__(self, limits: Limits) -> None:
        self.root = Root(limits.depth)
        self._rests: dict[tuple[Sequence, int, Frame], Rest] = {}
        self._agains: dict[tuple[Loop, int, int, Frame], Again] = {}
        self._returns: dict[frozenset[Frame], Return] = {}
        self.unions: dict[tuple[Frame, ...], list[Frame]] = {}  # what `united` has found before
        self._work = 64 * limits.ambiguity  # steps of one walk without a byte: left recursion in disguise ends here
        self._ambiguity = limits.ambiguity
        self.walked = 0  # nodes and frames that were looked at without taking a byte

    def __len__(self) -> int:
        return 1 + len(self._rests) + len(self._agains) + len(self._returns) + len(self.unions)

    def rest(self, sequence: Sequence, index: int, parent: Frame) -> Frame:
        """Makes the frame with parts from `index` on left; the parent itself when none is."""
        if index == len(sequence.parts):
            return parent
        key = (sequence, index, parent)
        frame = self._rests.get(key)
        if frame is None:
            frame = self._rests[key] = Rest(sequence, index, parent)
        return frame

    def again(self, loop: Loop, least: int, most: int, parent: Frame) -> Frame:
        """Makes the frame with `least` to `most` turns left; the parent itself when none may follow."""
        if most == 0:
            return parent
        key = (loop, least, most, parent)
        frame = self._agains.get(key)
        if frame is None:
            frame = self._agains[key] = Again(loop, least, most, parent)
        return frame

    def returning(self, parents: tuple[Frame, ...]) -> Return:
        """Returns the end of a recursive call that these frames wait for; none of them is a Return."""
        key = frozenset(parents)
        frame = self._returns.get(key)
        if frame is None:
            frame = self._returns[key] = Return(parents)
        return frame

    def closure(self, frame: Frame) -> Closure:
        """Finds the positions of a text that comes back to `frame`. Raises LimitExceeded."""
        if frame.closure is None:
            frame.closure = self._walk(None, frame)
        return frame.closure

    def enter(self, node: Node, frame: Frame) -> Closure:
        """Finds the positions of a text before `node`, with `frame` to come after it. Raises LimitExceeded."""
        start, above = node, frame
        while start.shortest(above.room) < ENDLESS:  # down to a leaf that takes a byte: most nodes begin with one
            if isinstance(start, Sequence):
                above = self.rest(start, 1, above)
                start = start.parts[0]
            elif isinstance(start, Unfolding):
                start = start.body()
            elif isinstance(start, Leaf) and not (start.place.accepting or start.place.rests or start.place.terminal):
                return Closure(((start.place, above),), False)
            else:
                break
        return self._walk(node, frame)

    def _walk(self, start: Node | None, above: Frame) -> Closure:
        """Goes depth first over everything that needs no byte; None for a node: come back to the frame."""
        positions: dict[Position, None] = {}
        accepting = False
        waiting: list[tuple[Node | None, Frame]] = [(start, above)]
        seen: set[tuple[Node | None, Frame]] = set()
        while waiting:
            task = waiting.pop()
            if task in seen:
                continue
            seen.add(task)
            node, frame = task
            if node is None:
                if frame.closure is not None:
                    positions.update(dict.fromkeys(frame.closure.positions))
                    accepting = accepting or frame.closure.accepting
                elif type(frame) is Root:
                    accepting = True
                else:
                    self._come_back(frame, waiting)
            elif node.shortest(frame.room) < ENDLESS:
                self._go_in(node, frame, positions, waiting)
            if len(seen) > self._work or len(positions) > self._ambiguity:
                raise too_ambiguous(self._ambiguity)
        self.walked += len(seen)
        return Closure(tuple(positions), accepting)

    def _come_back(self, frame: Frame, waiting: list[tuple[Node | None, Frame]]) -> None:
        """Adds what follows the frame, the first to be tried last."""
        if type(frame) is Rest:
            waiting.append(
                (frame.sequence.parts[frame.index], self.rest(frame.sequence, frame.index + 1, frame.parent))
            )
        elif type(frame) is Again:
            self._turn(frame.loop, frame.least, frame.most, frame.parent, waiting)
        else:
            assert type(frame) is Return, "the root is looked at before"
            waiting += [(None, parent) for parent in reversed(frame.parents)]

    def _turn(self, loop: Loop, least: int, most: int, parent: Frame, waiting: list[tuple[Node | None, Frame]]) -> None:
        if least == 0:
            waiting.append((None, parent))
        waiting.append((loop.body, self.again(loop, one_less(least), one_less(most), parent)))

    def _go_in(
        self, node: Node, frame: Frame, positions: dict[Position, None], waiting: list[tuple[Node | None, Frame]]
    ) -> None:
        match node:
            case Leaf():
                place = node.place
                if not place.terminal:
                    positions[place, frame] = None
                waiting += [(rest, frame) for rest in reversed(place.rests)]
                if place.accepting:
                    waiting.append((None, frame))
            case Sequence():
                waiting.append((node.parts[0], self.rest(node, 1, frame)))
            case Options():
                waiting += [(option, frame) for option in reversed(node.options)]
            case Loop():
                self._turn(node, node.least, node.most, frame, waiting)
            case Unfolding():
                waiting.append((node.body(), frame))
            case Nested():
                # A call at the very end of another needs no end, and no room, of its own.
                waiting.append((node.body(), frame if type(frame) is Return else self.returning((frame,))))
            case _:
                raise AssertionError(f"no node: {node!r}")


_COMPARED = 64  # counts that are compared pair by pair; more stay as they are, which is exact too


def united(frames: Frames, positions: tuple[Position, ...]) -> tuple[Position, ...]:
    """Returns the same texts from as few positions as interval arithmetic and shared calls find."""
    groups: dict[Place, list[Frame]] = {}
    for place, frame in positions:
        groups.setdefault(place, []).append(frame)
    if len(groups) == len(positions):
        return positions
    return tuple(
        (place, frame)
        for place, alike in groups.items()
        for frame in (_united(frames, tuple(alike)) if len(alike) > 1 else alike)
    )


def _united(frames: Frames, given: tuple[Frame, ...]) -> list[Frame]:
    """Returns the same remaining texts from fewer frames. The same ones meet at byte after byte."""
    found = frames.unions.get(given)
    if found is None:
        found = frames.unions[given] = _united_counts(frames, _joined_calls(frames, given))
    return found


def _joined_calls(frames: Frames, given: Iterable[Frame]) -> list[Frame]:
    """Returns frames that are equal down to the call that they are in, in one call with the parents of all."""
    groups: dict[tuple[Hashable, ...], list[Frame]] = {}
    for frame in given:
        above = _above_base(frame)
        groups.setdefault((frame.room, isinstance(frame.base, Return), *map(_exact, above)), []).append(frame)
    found: list[Frame] = []
    for alike in groups.values():
        if len(alike) == 1:
            found.append(alike[0])
            continue
        parents = dict.fromkeys(
            parent for frame in alike if isinstance(frame.base, Return) for parent in frame.base.parents
        )
        base: Frame = frames.returning(tuple(_united(frames, tuple(parents))))
        found.append(_rebuilt(frames, _above_base(alike[0]), base, []))
    return found


def _united_counts(frames: Frames, given: Iterable[Frame]) -> list[Frame]:
    """Returns frames that differ in counts only, with intervals that include those of several."""
    groups: dict[tuple[Hashable, ...], list[Frame]] = {}
    for frame in given:
        groups.setdefault((frame.base, *map(_shape, _above_base(frame))), []).append(frame)
    found: list[Frame] = []
    for alike in groups.values():
        if len(alike) == 1:
            found.append(alike[0])
            continue
        above = _above_base(alike[0])
        vectors = dict.fromkeys(_intervals(_above_base(frame)) for frame in alike)
        count = len(vectors) + 1
        while len(vectors) < count:
            count = len(vectors)
            for axis in range(len(next(iter(vectors)))):
                vectors = _united_along(vectors, axis)
        found += [_rebuilt(frames, above, alike[0].base, list(vector)) for vector in _maximal(list(vectors))]
    return found


def _above_base(frame: Frame) -> list[Frame]:
    """Returns the frame and its parents above the call that it is in, the innermost first."""
    above: list[Frame] = []
    while frame is not frame.base:
        above.append(frame)
        frame = frame.parent
    return above


def _exact(frame: Frame) -> tuple[Hashable, ...]:
    if type(frame) is Again:
        return frame.loop, frame.least, frame.most
    assert type(frame) is Rest, "a base is not above itself"
    return frame.sequence, frame.index


def _shape(frame: Frame) -> tuple[Hashable, ...]:
    return (frame.loop,) if type(frame) is Again else _exact(frame)


def _intervals(above: list[Frame]) -> tuple[Interval, ...]:
    return tuple((frame.least, frame.most) for frame in above if type(frame) is Again)


def _rebuilt(frames: Frames, above: list[Frame], base: Frame, intervals: list[Interval]) -> Frame:
    """Returns the frames of `above` on another base; with other counts, the innermost first, where some are given."""
    built = base
    for frame in reversed(above):
        if type(frame) is Rest:
            built = frames.rest(frame.sequence, frame.index, built)
        elif type(frame) is Again:
            least, most = intervals.pop() if intervals else (frame.least, frame.most)
            built = frames.again(frame.loop, least, most, built)
    return built


def _united_along(vectors: dict[tuple[Interval, ...], None], axis: int) -> dict[tuple[Interval, ...], None]:
    """Unites vectors that agree but for one axis, where their intervals overlap or touch."""
    lines: dict[tuple[Interval, ...], list[Interval]] = {}
    for vector in vectors:
        lines.setdefault(vector[:axis] + vector[axis + 1 :], []).append(vector[axis])
    united: dict[tuple[Interval, ...], None] = {}
    for others, intervals in lines.items():
        intervals.sort()
        least, most = intervals[0]
        for start, end in intervals[1:]:
            if start <= most + 1:
                most = max(most, end)
            else:
                united[(*others[:axis], (least, most), *others[axis:])] = None
                least, most = start, end
        united[(*others[:axis], (least, most), *others[axis:])] = None
    return united


def _maximal(vectors: list[tuple[Interval, ...]]) -> list[tuple[Interval, ...]]:
    """Keeps the vectors that no other one includes."""
    if len(vectors) > _COMPARED:
        return vectors
    return [
        vector
        for vector in vectors
        if not any(
            other != vector
            and all(start >= first and end <= last for (start, end), (first, last) in zip(vector, other, strict=True))
            for other in vectors
        )
    ]
