"""A shortest text from a position to the end: concrete, deterministic, printable where there is a choice."""

from __future__ import annotations

from .frames import Again, Frame, Position, Rest, Return, Root
from .nodes import Leaf, Loop, Nested, Node, Options, Sequence
from .orders import Opened, Remaining
from .places import Place

_LIKED = b"a0bcdefghijklmnopqrstuvwxyz123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_-. "
_RANK = [len(_LIKED) + (byte < 0x20) * 256 + byte for byte in range(256)]
for _rank, _byte in enumerate(_LIKED):
    _RANK[_byte] = _rank


def shortest_text(position: Position) -> bytes:
    """The shortest text from a position to the end of the whole, the same one every time."""
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
    """A leftmost derivation, with what is still to be written on a stack."""
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
    """Written once and repeated: all copies are the same. Loops are nested as deep as their source at most."""
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
            ((_liked(first, last), behind) for first, last, behind in place.edges if behind.shortest < place.shortest),
            key=lambda step: _RANK[step[0]],
        )
        text.append(byte)


def _liked(first: int, last: int) -> int:
    return min(range(first, last + 1), key=_RANK.__getitem__)
