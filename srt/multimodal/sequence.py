"""The pictures of one sequence: where they are, and what they mean for the steps that compute it.

Rows of a picture that see each other (a model that looks at pictures in both directions) run in one step:

    tokens     t t t t P P P P P P t t          a chunk ends before P or behind it:  [----)[----------)
    sees       causal  [all of P ] causal       and may begin inside P, when the keys before it are cached

A cached part of such a picture can be used, though its rows saw what came behind them: they saw the rest of the same
picture, since the ids of a picture are the same whole run wherever they stand, and a step computed all of it. The same
holds for requests that read it in the very step that computes it: every layer stores all keys before any row attends.
A request that was sent back keeps in the tree what whole steps have computed. The last row of a picture may run alone,
for its logits, while all keys of the picture are in the pool. Where pictures are seen causally, their rows are cut as
those of text are.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..core.batch import PictureRows
from ..core.image_token_ids import PictureSpan


@dataclass(frozen=True, slots=True)
class SequencePictures:
    """`holds`: what keeps the pictures in their store as long as this object is there."""

    spans: tuple[PictureSpan, ...] = ()  # in order
    both_ways: bool = False
    holds: tuple[object, ...] = ()

    @property
    def end(self) -> int:
        """Behind the last picture; 0 without any."""
        return self.spans[-1].end if self.spans else 0

    def stop(self, start: int, end: int, last: int) -> int:
        """Where a chunk that begins at `start` and would end at `end` ends, so that no picture is cut that must not be:
        before it, or behind it where it begins the chunk. Never behind `last`: then nothing can run, and it is `start`.
        """
        if self.both_ways:
            for span in self.spans:
                if span.start < end < span.end:
                    if start < span.start:
                        return span.start
                    return span.end if span.end <= last else start
        return end

    def rows(self, start: int, end: int, first: int) -> Iterator[PictureRows]:
        """Those of tokens [start, end), of which the step's row `first` is the first."""
        for span in self.spans:
            begin, stop = max(start, span.start), min(end, span.end)
            if begin < stop:
                yield PictureRows(first + begin - start, stop - begin, span.number, begin - span.start)

    def seen_whole(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Positions that rows [start, end) see whatever their order."""
        if not self.both_ways:
            return ()
        seen = tuple((span.start, span.end) for span in self.spans if span.start < end and start < span.end)
        assert not seen or seen[-1][1] <= end, "a row sees keys that no step has computed"
        return seen


NO_PICTURES = SequencePictures()
