"""The pictures of one sequence: their positions, and the limits they set for its chunks.

Rows of a picture that see each other (a model that looks at pictures in both directions) run in one step:

    tokens     t t t t P P P P P P t t          a chunk ends before P or after it:   [----)[----------)
    sees       causal  [all of P ] causal       and may begin inside P, when the keys before it are cached

A cached part of such a picture can be used, though its rows attended to later ones: those were rows of the same
picture, since its ids are the same whole run in every sequence and one step computed all of it. The same holds for
requests that read it in the step that computes it: every layer stores all keys before any row attends. A retracted
request keeps in the tree the keys of whole steps. The last row of a picture may run alone, for its logits, while all
keys of the picture are in the pool. Where pictures are seen causally, chunks may end inside them as inside text.

Rotary positions of some models have three axes. A picture of 2 × 3 tokens takes as many positions as its longer side:

    tokens     t t t P P P P P P t t
    time       0 1 2 3 3 3 3 3 3 6 7
    height     0 1 2 3 3 3 4 4 4 6 7
    width      0 1 2 3 4 5 3 4 5 6 7

Parts of a clip that follow each other begin at one height and width, and lie apart on the axis of time:

    tokens     t A A B B t      time     0 1 1 5 5 6      (A and B are 1 × 2, B is 4 positions after A)
                                width    0 1 2 1 2 6

They follow from the tokens before a row alone, as its keys do. So what is cached keeps its positions in every sequence
that shares it, and chunks, forks and retracted requests compute the same ones again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from ..core.batch import PictureRows, PictureSpan


@dataclass(frozen=True, slots=True)
class SequencePictures:
    """The pictures of a sequence. `holds`: objects that keep them in their store while this object lives."""

    spans: tuple[PictureSpan, ...] = ()  # in order
    both_ways: bool = False
    holds: tuple[object, ...] = ()

    @property
    def end(self) -> int:
        """End of the last picture; 0 without any."""
        return self.spans[-1].end if self.spans else 0

    def stop(self, start: int, end: int, last: int) -> int:
        """Moves the end of a chunk [start, end) so that it cuts no picture that must run whole.

        The chunk ends before such a picture, or after it where the picture begins the chunk. Where that is after
        `last`, nothing can run, and the result is `start`."""
        if self.both_ways:
            for span in self.spans:
                if span.start < end < span.end:
                    if start < span.start:
                        return span.start
                    return span.end if span.end <= last else start
        return end

    def rows(self, start: int, end: int, first: int) -> Iterator[PictureRows]:
        """Yields the picture rows of tokens [start, end); row `first` of the step is the first of them."""
        for span in self.spans:
            begin, stop = max(start, span.start), min(end, span.end)
            if begin < stop:
                yield PictureRows(first + begin - start, stop - begin, span.number, begin - span.start)

    @property
    def on_axes(self) -> bool:
        """Returns whether rotary positions differ between axes, or from the places of tokens."""
        return any(span.grid is not None for span in self.spans)

    def rope_positions(self, start: int, end: int) -> NDArray[np.int64]:
        """Computes the rotary positions of tokens [start, end): [3, tokens] of time, height and width."""
        positions = np.tile(np.arange(start, end, dtype=np.int64), (3, 1))
        skipped = 0  # tokens before, less the positions that they take
        clip = 0  # position of the first part
        for span in self.spans:
            if span.start >= end:
                break
            if span.grid is None:
                continue
            rows, columns, time = span.grid
            if time is None:
                clip, time = span.start - skipped, 0
            begin, stop = max(start, span.start), max(start, min(end, span.end))
            offsets = np.arange(begin, stop) - span.start
            inside = positions[:, begin - start : stop - start]
            inside[:] = clip
            inside[0] += time
            inside[1] += offsets // columns
            inside[2] += offsets % columns
            before, skipped = skipped, span.end - (clip + max(time + 1, rows, columns))
            positions[:, stop - start :] -= skipped - before
        return positions

    def seen_whole(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Returns the ranges of positions in [start, end) that attend in both directions."""
        if not self.both_ways:
            return ()
        seen = tuple((span.start, span.end) for span in self.spans if span.start < end and start < span.end)
        assert not seen or seen[-1][1] <= end, "a row sees keys that no step has computed"
        return seen


NO_PICTURES = SequencePictures()

Value = TypeVar("Value")


class Hold(Generic[Value]):
    """Keeps a picture while this object is referenced."""

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Value) -> None:
        self.value = value


class HeldPictures(Generic[Value]):
    """Maps numbers to the values that a store keeps of pictures, as long as any request needs them.

    The gateway says which pictures no later message will use. Earlier requests, such as a hint or a retracted request,
    may still compute rows of them. So each request holds its pictures, and a forgotten picture is freed when the last
    of them has ended.
    """

    def __init__(self) -> None:
        self._known: dict[int, Hold[Value]] = {}
        self._held: WeakValueDictionary[int, Hold[Value]] = WeakValueDictionary()  # known ones too

    def put(self, number: int, value: Value) -> None:
        """Adds a picture; keeps a present one, because a number belongs to the same pixels for ever."""
        hold = self._held.get(number)
        if hold is None:
            hold = self._held[number] = Hold(value)
        self._known[number] = hold

    def forget(self, number: int) -> None:
        """Hides a picture from new messages; ignores unknown numbers."""
        self._known.pop(number, None)

    def known(self, number: int) -> Value | None:
        """Returns the value for a new message; None when it is unknown."""
        hold = self._known.get(number)
        return None if hold is None else hold.value

    def hold(self, number: int) -> Hold[Value]:
        """Returns an object that keeps a known picture."""
        return self._known[number]

    def find(self, number: int) -> Value | None:
        """Returns the value for a row of a request, also of a forgotten picture that is still held."""
        hold = self._held.get(number)
        return None if hold is None else hold.value
