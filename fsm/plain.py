"""How many plain characters are certain to be taken: read off the counters of repeats, not by exploring.

Inside `"[^"]{0,65535}"` every text of so many characters may follow. Whoever makes masks can then allow all tokens
of plain characters at once and look at the others only.
"""

from __future__ import annotations

from collections.abc import Sequence

from .frames import Again, Frame, Frames, Position
from .places import ENDLESS, Place

_HOPS = (
    4  # repeats of plain characters behind one another that are added up; more are rare, and only cost a longer walk
)


def plain_run(frames: Frames, positions: Sequence[Position]) -> int:
    """Of the positions of one state. A lower bound, exact where one repeat, or few in a row, take all plain text."""
    return max((_run(frames, place, frame, _HOPS) for place, frame in positions if place.plain), default=0)


def _run(frames: Frames, place: Place, frame: Frame, hops: int) -> int:
    if place.plain != 1:  # inside a character automaton, which has counted for itself
        return place.plain
    run = 1
    if type(frame) is Again and _turns_alike(frames, place, frame):
        if frame.most == ENDLESS:
            return ENDLESS
        run += frame.most
        frame = frame.parent
    if hops == 0:
        return run
    behind = (_run(frames, place, after, hops - 1) for place, after in frames.landing(frame).positions if place.plain)
    return min(run + max(behind, default=0), ENDLESS)


def _turns_alike(frames: Frames, place: Place, frame: Again) -> bool:
    """The next turn of the loop begins with the same characters, and so does every one after it."""
    left = frame.most if frame.most == ENDLESS else frame.most - 1
    following = frames.again(frame.loop, max(frame.least - 1, 0), left, frame.parent)
    return (place, following) in frames.landing(frame).positions
