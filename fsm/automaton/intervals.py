"""Positions that differ in counts only, or in who waits for a call, united where that is exact.

    body{0,3} then F  |  body{2,9} then F    =   body{0,9} then F      intervals that overlap or touch
    counts (0,3)(1,5) |  counts (0,3)(2,4)   =   counts (0,3)(1,5)     one that includes the other
    X, return to P    |  X, return to Q      =   X, return to P or Q   the same call, read in two ways

So an ambiguous constraint such as `(.{0,50},){0,50}` stands in a few places and not in thousands.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from .frames import Again, Frame, Frames, Interval, Position, Rest, Return
from .places import Place

_COMPARED = 64  # counts that are compared pair by pair; more stay as they are, which is exact too


def united(frames: Frames, positions: tuple[Position, ...]) -> tuple[Position, ...]:
    """The same texts from as few positions as interval arithmetic and shared calls find."""
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
    """The same remaining texts from fewer frames. The same ones meet at byte after byte."""
    found = frames.unions.get(given)
    if found is None:
        found = frames.unions[given] = _united_counts(frames, _joined_calls(frames, given))
    return found


def _joined_calls(frames: Frames, given: Iterable[Frame]) -> list[Frame]:
    """Frames that are equal down to the call that they are in, in one call with the parents of all."""
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
    """Frames that differ in counts only, with intervals that include those of several."""
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
    """The frame and its parents above the call that it is in, the innermost first."""
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
    """The frames of `above` on another base; with other counts, the innermost first, where some are given."""
    built = base
    for frame in reversed(above):
        if type(frame) is Rest:
            built = frames.rest(frame.sequence, frame.index, built)
        elif type(frame) is Again:
            least, most = intervals.pop() if intervals else (frame.least, frame.most)
            built = frames.again(frame.loop, least, most, built)
    return built


def _united_along(vectors: dict[tuple[Interval, ...], None], axis: int) -> dict[tuple[Interval, ...], None]:
    """Vectors that agree but for one axis, where their intervals overlap or touch, become one."""
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
    """Vectors that no other one includes."""
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
