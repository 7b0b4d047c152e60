"""Pictures for the oracle: of any size, told apart by their numbers, and checked as its keys are.

The oracle's keys are fingerprints of what a row has seen. A row of a picture that is seen both ways has seen all of the
picture, so its fingerprint is that of the picture's last row: a step that cut the picture, or ran a row of it without
the rest, stores another one, and whoever reads it finds out.
"""

import numpy as np
from numpy.typing import NDArray

from ...lang.errors import EngineError, RequestError
from ..core.batch import Batch, PictureRows
from ..core.image_token_ids import PICTURE_BASE, PictureSpan
from ..core.messages import EnginePicture
from ..multimodal.references import HeldPictures


class PictureError(EngineError):
    """A batch does not say what its token ids say of pictures."""


class OraclePictures:
    """A `batch.PictureStore` that takes any picture, and checks what batches say of them."""

    def __init__(self, *, both_ways: bool) -> None:
        self.both_ways = both_ways
        self._held: HeldPictures[int] = HeldPictures()  # tokens

    def put(self, picture: EnginePicture) -> None:
        if picture.tokens < 1:
            raise RequestError(f"picture {picture.number} has tokens={picture.tokens}; write 1 or more")
        self._held.put(picture.number, picture.tokens)

    def forget(self, number: int) -> None:
        self._held.forget(number)

    def tokens(self, number: int) -> int | None:
        return self._held.known(number)

    def hold(self, number: int) -> object:
        return self._held.hold(number)

    def spans_of(self, token_ids: NDArray[np.int64]) -> tuple[PictureSpan, ...]:
        """The pictures of a sequence; the last one may go on behind its end.

        Raises:
            PictureError: a picture that nobody keeps.
        """
        spans: list[PictureSpan] = []
        end = 0
        for start in np.flatnonzero(token_ids >= PICTURE_BASE).tolist():
            if start < end:
                continue
            number = int(token_ids[start]) - PICTURE_BASE
            tokens = self._held.find(number)
            if tokens is None:
                raise PictureError(f"position {start}: picture {number} is forgotten, and a row of it runs")
            end = start + tokens
            if (token_ids[start:end] != token_ids[start]).any():
                raise PictureError(f"position {start}: picture {number} has {tokens} tokens, and not all are here")
            spans.append(PictureSpan(start, end, number))
        return tuple(spans)

    def widen(self, fingerprints: NDArray[np.uint64], spans: tuple[PictureSpan, ...]) -> None:
        """Changes the fingerprints of a sequence to those of rows that see their picture whole."""
        if self.both_ways:
            for span in spans:
                fingerprints[span.start : span.end] = fingerprints[min(span.end, len(fingerprints)) - 1]

    def check(self, batch: Batch, sequences: list[tuple[PictureSpan, ...]]) -> None:
        """The batch says which of its rows are pictures', and which see each other.

        Raises:
            PictureError: it says something else.
        """
        parts: list[PictureRows] = []
        together: list[tuple[tuple[int, int], ...]] = []
        first = 0
        for count, start, spans in zip(
            batch.query_lengths.tolist(), batch.prefix_lengths.tolist(), sequences, strict=True
        ):
            inside = [span for span in spans if start < span.end and span.start < start + count]
            for span in inside:
                begin, end = max(start, span.start), min(start + count, span.end)
                parts.append(PictureRows(first + begin - start, end - begin, span.number, begin - span.start))
            together.append(tuple((span.start, span.end) for span in inside) if self.both_ways else ())
            if self.both_ways and inside and inside[-1].end > start + count:
                raise PictureError(f"picture {inside[-1].number} is cut, and its rows see each other")
            first += count
        if batch.pictures != tuple(parts):
            raise PictureError(f"the batch says that its pictures are {batch.pictures}, and they are {tuple(parts)}")
        if batch.spans != (tuple(together) if any(together) else ()):
            raise PictureError(f"the batch says that {batch.spans} see each other, and these do: {tuple(together)}")
