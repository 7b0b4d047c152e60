"""Positions that differ in counts only, united where that is exact.

    body{0,3} then F  |  body{2,9} then F   =   body{0,9} then F      intervals that overlap or touch
    counts (0,3)(1,5) |  counts (0,3)(2,4)  =   counts (0,3)(1,5)     one that includes the other

So an ambiguous constraint such as `(.{0,50},){0,50}` stands in a few places and not in thousands.
"""

from __future__ import annotations

from .frames import Again, Frame, Frames, Interval, Position, Rest, Root
from .places import Place


def united(frames: Frames, positions: tuple[Position, ...]) -> tuple[Position, ...]:
    """The same texts from as few positions as interval arithmetic finds."""
    groups: dict[tuple[Place, int], list[Frame]] = {}
    for place, frame in positions:
        groups.setdefault((place, frames.shape(frame)), []).append(frame)
    if len(groups) == len(positions):
        return positions
    found: list[Position] = []
    for (place, _), alike in groups.items():
        found += [(place, frame) for frame in (_united(frames, alike) if len(alike) > 1 else alike)]
    return tuple(found)


def _united(frames: Frames, alike: list[Frame]) -> list[Frame]:
    vectors = dict.fromkeys(_intervals(frame) for frame in alike)
    count = len(vectors) + 1
    while len(vectors) < count:
        count = len(vectors)
        for axis in range(len(next(iter(vectors)))):
            vectors = _united_along(vectors, axis)
    return [_with_intervals(frames, alike[0], vector) for vector in _maximal(list(vectors))]


def _with_intervals(frames: Frames, frame: Frame, intervals: tuple[Interval, ...]) -> Frame:
    """A frame of the same shape with these counts, the innermost first."""
    chain: list[Frame] = []
    while type(frame) is not Root:
        chain.append(frame)
        frame = frame.parent
    counts = list(intervals)
    built: Frame = frame
    for current in reversed(chain):
        if type(current) is Rest:
            built = frames.rest(current.sequence, current.index, built)
        elif type(current) is Again:
            least, most = counts.pop()
            built = frames.again(current.loop, least, most, built)
        else:
            built = frames.returning(built)
    return built


def _intervals(frame: Frame) -> tuple[Interval, ...]:
    """The counts along a frame and its parents, the innermost first."""
    found: list[Interval] = []
    while type(frame) is not Root:
        if type(frame) is Again:
            found.append((frame.least, frame.most))
        frame = frame.parent
    return tuple(found)


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
    """Vectors that no other one includes. Many are left as they are: comparing all pairs would cost more."""
    if len(vectors) > 64:
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
