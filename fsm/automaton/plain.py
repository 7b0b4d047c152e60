"""How many plain characters are certain to be taken: read off the counters of repeats, not by exploring.

Inside `"[^"]{0,65535}"` every text of so many characters may follow. Whoever makes masks can then allow all tokens
of plain characters at once and look at the others only.
"""

from __future__ import annotations

from collections.abc import Sequence

from .characters import PLAIN, Character
from .frames import Again, Frame, Frames, Position, one_less
from .places import ENDLESS, Place

_HOPS = 4  # repeats of plain characters behind one another that are added up; more are rare


def plain_run(frames: Frames, positions: Sequence[Position]) -> int:
    """Of the positions of one state. A lower bound, exact where one repeat, or few in a row, take all plain text."""
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
    behind = (_run(frames, place, after, hops - 1) for place, after in frames.landing(frame).positions if place.plain)
    return min(run + max(behind, default=0), ENDLESS)


def plain_limit(frames: Frames, positions: Sequence[Position]) -> int:
    """No text with more plain characters at its beginning goes on from here; ENDLESS where that is not certain."""
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
    behind = (_limit(frames, following, after, hops - 1) for following, after in frames.landing(frame).positions)
    return min(limit + max(behind, default=0), ENDLESS)


def _one_character(place: Place) -> bool:
    """The place before a single character, whichever it is."""
    return type(place) is Character


def _takes_plain(place: Place) -> bool:
    """Whether the first byte of some plain character leads on."""
    return any(_meets(first, last) for first, last, _ in place.edges)


def _meets(first: int, last: int) -> bool:
    return last >= 0x80 or any(first <= end and last >= start for start, end in PLAIN)


def _turns_only(frames: Frames, place: Place, frame: Again) -> bool:
    """A text goes on with the next turn of the loop or leaves it, and has no third way."""
    expected = {(place, _following(frames, frame))}
    if frame.least == 0:
        expected.update(frames.landing(frame.parent).positions)
    return expected.issuperset(frames.landing(frame).positions)


def _turns_alike(frames: Frames, place: Place, frame: Again) -> bool:
    """The next turn of the loop begins with the same characters, and so does every one after it."""
    return (place, _following(frames, frame)) in frames.landing(frame).positions


def _following(frames: Frames, frame: Again) -> Frame:
    """What is left of the loop after its next turn."""
    return frames.again(frame.loop, one_less(frame.least), one_less(frame.most), frame.parent)
