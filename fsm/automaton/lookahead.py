"""Tells what may come after a position, without making states.

    shortest_text     a shortest text to the end: concrete, deterministic, printable where there is a choice
    plain_run         how many plain characters are certain to be taken: inside `"[^"]{0,65535}"` any text of so many
                      may follow, so masks allow all tokens of plain characters at once and look at the others only
    Lookahead         the state as texts of at most `reach` bytes see it: counts that are out of reach have no end

A token has at most some dozens of bytes. Whether a string may still have 3000 characters or 2999 makes no difference to
it, so both are one state for it, and so are all states that it passes inside:

    Again(loop, 0, 3000, parent)     ~  Again(loop, 0, ENDLESS, parent)
    Again(loop, 100, 200, parent)    ~  Again(loop, ENDLESS, ENDLESS, parent)      the turns that are due never end

Every turn of a loop takes at least one byte (lowering sees to that), so a text of `reach` bytes neither uses up more
than `reach` turns nor gets through as many that are still due.
"""

from __future__ import annotations

from collections.abc import Iterable

from .characters import PLAIN, Character
from .frames import Again, Frame, Frames, Position, Rest, Return, Root, one_less
from .nodes import Leaf, Loop, Nested, Node, Opened, Options, Remaining, Sequence
from .places import ENDLESS, Place


class Lookahead:
    """Rewrites frames so that those are equal which texts of at most `reach` bytes cannot tell apart."""

    def __init__(self, frames: Frames, reach: int) -> None:
        self.reach = reach
        self._frames = frames
        self._seen: dict[Frame, Frame] = {}

    def of(self, positions: Iterable[Position]) -> tuple[Position, ...]:
        """Returns positions that go on with the same short texts."""
        return tuple(dict.fromkeys((place, self._frame(frame)) for place, frame in positions))

    def _frame(self, frame: Frame) -> Frame:
        above: list[Rest | Again] = []
        while frame not in self._seen and isinstance(frame, Rest | Again):
            above.append(frame)
            frame = frame.parent
        seen = self._seen.setdefault(frame, frame)  # a Root or a Return is what it is
        for current in reversed(above):
            if isinstance(current, Rest):
                seen = self._frames.rest(current.sequence, current.index, seen)
            else:
                seen = self._frames.again(current.loop, self._count(current.least), self._count(current.most), seen)
            self._seen[current] = seen
        return seen

    def _count(self, turns: int) -> int:
        return turns if turns <= self.reach else ENDLESS


_HOPS = 4  # repeats of plain characters in a row that are added up; more are rare


def plain_run(frames: Frames, positions: Iterable[Position]) -> int:
    """Counts the plain characters that the positions of one state take for certain.

    A lower bound, exact where one repeat, or few in a row, take all plain text.
    """
    return max((_run(frames, place, frame, _HOPS) for place, frame in positions if place.plain), default=0)


def _run(frames: Frames, place: Place, frame: Frame, hops: int) -> int:
    if place.plain != 1 or not _one_character(place):  # inside a character automaton, which has counted for itself
        return place.plain
    run = 1
    if type(frame) is Again and _turns_alike(frames, place, frame):
        if frame.most == ENDLESS:
            return ENDLESS
        run += frame.most
        frame = frame.parent
    if hops == 0:
        return run
    later = (_run(frames, place, after, hops - 1) for place, after in frames.closure(frame).positions if place.plain)
    return min(run + max(later, default=0), ENDLESS)


def plain_limit(frames: Frames, positions: Iterable[Position]) -> int:
    """Bounds the plain characters that a text may begin with from here; ENDLESS where that is not certain."""
    return max((_limit(frames, place, frame, _HOPS) for place, frame in positions), default=0)


def _limit(frames: Frames, place: Place, frame: Frame, hops: int) -> int:
    if not _takes_plain(place):
        return 0
    if hops == 0 or not _one_character(place):
        return ENDLESS
    limit = 1
    if type(frame) is Again and _turns_only(frames, place, frame):
        if frame.most == ENDLESS:
            return ENDLESS
        limit += frame.most
        frame = frame.parent
    later = (_limit(frames, following, after, hops - 1) for following, after in frames.closure(frame).positions)
    return min(limit + max(later, default=0), ENDLESS)


def _one_character(place: Place) -> bool:
    """Tells whether the place is before a single character, whichever it is."""
    return type(place) is Character


def _takes_plain(place: Place) -> bool:
    """Tells whether the first byte of some plain character leads on."""
    return any(_meets(first, last) for first, last, _ in place.edges)


def _meets(first: int, last: int) -> bool:
    return last >= 0x80 or any(first <= end and last >= start for start, end in PLAIN)


def _turns_only(frames: Frames, place: Place, frame: Again) -> bool:
    """Tells whether a text goes on with the next turn of the loop or leaves it, with no third way."""
    expected = {(place, _following(frames, frame))}
    if frame.least == 0:
        expected.update(frames.closure(frame.parent).positions)
    return expected.issuperset(frames.closure(frame).positions)


def _turns_alike(frames: Frames, place: Place, frame: Again) -> bool:
    """Tells whether the next turn of the loop, and every one after it, begins with the same characters."""
    return (place, _following(frames, frame)) in frames.closure(frame).positions


def _following(frames: Frames, frame: Again) -> Frame:
    """Returns the frame of the loop after its next turn."""
    return frames.again(frame.loop, one_less(frame.least), one_less(frame.most), frame.parent)


_LIKED = b"a0bcdefghijklmnopqrstuvwxyz123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_-. "
_RANK = [len(_LIKED) + (byte < 0x20) * 256 + byte for byte in range(256)]
for _rank, _byte in enumerate(_LIKED):
    _RANK[_byte] = _rank


def shortest_text(position: Position) -> bytes:
    """Returns the shortest text from a position to the end of the whole, the same one every time."""
    place, frame = position
    text = bytearray()
    _from_place(place, frame.room, text)
    while type(frame) is not Root:
        if type(frame) is Return:
            frame = min(frame.parents, key=_length)
        else:
            _of_frame(frame, text)
            frame = frame.parent
    return bytes(text)


def _length(frame: Frame) -> int:
    return frame.length


def _of_frame(frame: Frame, text: bytearray) -> None:
    match frame:
        case Rest():
            for part in frame.sequence.parts[frame.index :]:
                _of_node(part, frame.room, text)
        case Again():
            _of_copies(frame.loop.body, frame.room, frame.least, text)
        case _:
            raise AssertionError(f"no frame: {frame!r}")


def _of_node(node: Node, room: int, text: bytearray) -> None:
    """Writes a leftmost derivation, with what is still to be written on a stack."""
    waiting = [(node, room)]
    while waiting:
        current, room = waiting.pop()
        match current:
            case Leaf():
                rest = _from_leaf(current.place, text)
                if rest is not None:
                    waiting.append((rest, room))
            case Sequence():
                waiting += [(part, room) for part in reversed(current.parts)]
            case Options():
                waiting.append((min(current.options, key=lambda option: option.shortest(room)), room))
            case Loop():
                _of_copies(current.body, room, current.least, text)
            case Remaining():
                waiting += [(part, room) for part in reversed(current.shortest_parts(room))]
            case Opened():
                waiting.append((current.body(), room))
            case Nested():
                waiting.append((current.body(), room - 1))
            case _:
                raise AssertionError(f"no node: {current!r}")


def _of_copies(node: Node, room: int, count: int, text: bytearray) -> None:
    """Writes one copy and repeats it: all are the same. Loops are nested as deep as their source at most."""
    if count:
        copy = bytearray()
        _of_node(node, room, copy)
        text += copy * count


def _from_place(place: Place, room: int, text: bytearray) -> None:
    rest = _from_leaf(place, text)
    if rest is not None:
        _of_node(rest, room, text)


def _from_leaf(place: Place, text: bytearray) -> Node | None:
    """Writes the way out of a leaf; the node that has to follow it, or None."""
    while True:
        if place.accepting and place.shortest == 0:
            return None
        for rest in place.rests:
            if rest.shortest(0) == place.shortest:
                return rest
        byte, place = min(
            ((_liked(first, last), target) for first, last, target in place.edges if target.shortest < place.shortest),
            key=lambda step: _RANK[step[0]],
        )
        text.append(byte)


def _liked(first: int, last: int) -> int:
    return min(range(first, last + 1), key=_RANK.__getitem__)
