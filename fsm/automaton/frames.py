"""What is left to match after a leaf: frames on a stack, equal ones the same object.

    Root                                  nothing is left
    Rest(sequence, index, parent)         parts index, index + 1, ... of a sequence, then the parent
    Again(loop, least, most, parent)      least to most further turns of a loop, then the parent
    Return(parents)                       the end of a recursive call, then one of the parents

A position is a place and the frame above it: a partial derivative (Antimirov, 1996) of the constraint. Counts live in
frames as intervals, so that `x{0,65535}` costs nothing ahead, and so that positions that differ in one count become
one where their intervals overlap or touch: body{a,b} | body{c,d} = body{min(a,c),max(b,d)}. A call that several
readings of a text make at once is one call with several parents, so that an ambiguous recursive grammar needs as many
positions at a depth as it has at the first (`intervals.united` does both).
"""

from __future__ import annotations

from ..errors import LimitExceeded
from ..limits import Limits
from .nodes import Leaf, Loop, Nested, Node, Options, Sequence
from .orders import Unfolding
from .places import ENDLESS, Place

Position = tuple[Place, "Frame"]
Interval = tuple[int, int]


class Frame:
    """One level of what is left.

    room: how many recursive calls may still be opened above this frame.
    base: the first Return, or the Root, at or below this frame.
    landing: where a text stands when it comes back to this frame; None: not asked for yet.
    state: the automaton's state for `landing`; -1: not asked for yet.
    """

    __slots__ = ("_length", "_parent", "base", "landing", "room", "state")

    def __init__(self, parent: Frame | None, room: int) -> None:
        self._parent = parent
        self.base: Frame = self if parent is None else parent.base
        self.room = room
        self.landing: Landing | None = None
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
    """parents: one or more, all with the same room; none is a Return."""

    __slots__ = ("parents",)

    def __init__(self, parents: tuple[Frame, ...]) -> None:
        super().__init__(None, parents[0].room - 1)
        self.parents = parents
        self._length = min(parent.length for parent in parents)


def one_less(turns: int) -> int:
    """A count of turns behind one more: none stays none, and no end stays no end."""
    return turns if turns in (0, ENDLESS) else turns - 1


class Landing:
    """Positions that are reached without a further byte, and whether the whole may end there."""

    __slots__ = ("accepting", "positions")

    def __init__(self, positions: tuple[Position, ...], accepting: bool) -> None:
        self.positions = positions
        self.accepting = accepting


class Frames:
    """The frames of one automaton, and where texts stand when they come back to one."""

    def __init__(self, limits: Limits) -> None:
        self.root = Root(limits.depth)
        self._rests: dict[tuple[Sequence, int, Frame], Rest] = {}
        self._agains: dict[tuple[Loop, int, int, Frame], Again] = {}
        self._returns: dict[frozenset[Frame], Return] = {}
        self.unions: dict[tuple[Frame, ...], list[Frame]] = {}  # what `intervals.united` has found before
        self._work = 64 * limits.ambiguity  # steps of one walk without a byte: left recursion in disguise ends here
        self._ambiguity = limits.ambiguity
        self.walked = 0  # nodes and frames that were looked at without taking a byte

    def __len__(self) -> int:
        return 1 + len(self._rests) + len(self._agains) + len(self._returns) + len(self.unions)

    def rest(self, sequence: Sequence, index: int, parent: Frame) -> Frame:
        """Parts from `index` on are left; the parent itself when none is."""
        if index == len(sequence.parts):
            return parent
        key = (sequence, index, parent)
        frame = self._rests.get(key)
        if frame is None:
            frame = self._rests[key] = Rest(sequence, index, parent)
        return frame

    def again(self, loop: Loop, least: int, most: int, parent: Frame) -> Frame:
        """`least` to `most` turns are left; the parent itself when none may follow."""
        if most == 0:
            return parent
        key = (loop, least, most, parent)
        frame = self._agains.get(key)
        if frame is None:
            frame = self._agains[key] = Again(loop, least, most, parent)
        return frame

    def returning(self, parents: tuple[Frame, ...]) -> Return:
        """The end of a recursive call that these frames wait for; none of them is a Return."""
        key = frozenset(parents)
        frame = self._returns.get(key)
        if frame is None:
            frame = self._returns[key] = Return(parents)
        return frame

    def landing(self, frame: Frame) -> Landing:
        """Where a text stands that comes back to `frame`. Raises LimitExceeded."""
        if frame.landing is None:
            frame.landing = self._walk(None, frame)
        return frame.landing

    def enter(self, node: Node, frame: Frame) -> Landing:
        """Where a text stands before `node`, with `frame` behind it. Raises LimitExceeded."""
        start, above = node, frame
        while start.shortest(above.room) < ENDLESS:  # down to a leaf that takes a byte: most nodes begin with one
            if isinstance(start, Sequence):
                above = self.rest(start, 1, above)
                start = start.parts[0]
            elif isinstance(start, Unfolding):
                start = start.body()
            elif isinstance(start, Leaf) and not (start.place.accepting or start.place.rests or start.place.terminal):
                return Landing(((start.place, above),), False)
            else:
                break
        return self._walk(node, frame)

    def _walk(self, start: Node | None, above: Frame) -> Landing:
        """Depth first over everything that needs no byte; None for a node: come back to the frame."""
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
                if frame.landing is not None:
                    positions.update(dict.fromkeys(frame.landing.positions))
                    accepting = accepting or frame.landing.accepting
                elif type(frame) is Root:
                    accepting = True
                else:
                    self._come_back(frame, waiting)
            elif node.shortest(frame.room) < ENDLESS:
                self._go_in(node, frame, positions, waiting)
            if len(seen) > self._work or len(positions) > self._ambiguity:
                raise LimitExceeded(
                    f"a text can be read in more than {self._ambiguity} ways at once; write a constraint whose "
                    "repeats and options differ in what they begin with",
                    keyword="ambiguity",
                )
        self.walked += len(seen)
        return Landing(tuple(positions), accepting)

    def _come_back(self, frame: Frame, waiting: list[tuple[Node | None, Frame]]) -> None:
        """What follows the frame, the first to be tried last."""
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
