"""Ids of picture tokens, which take the place of a picture in a token sequence."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PICTURE_BASE = 1 << 30  # ids from here on are pictures; no vocabulary reaches it, and int32 holds 2^30 numbers
PICTURE_END = 1 << 31


class PictureSpan(NamedTuple):
    """Tokens [start, end) of a sequence are the whole picture of this number."""

    start: int
    end: int
    number: int


def picture_tokens(number: int, tokens: int) -> list[int]:
    """Returns the ids of a picture in a sequence."""
    assert 0 <= number < PICTURE_BASE, "numbers are not used twice, and int32 ends there"
    return [PICTURE_BASE + number] * tokens


def without_pictures(token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Replaces picture ids by 0, for an embedding table; their embeddings come from the vision tower."""
    return np.where(token_ids < PICTURE_BASE, token_ids, 0)


def picture_spans(
    token_ids: Sequence[int] | NDArray[np.integer], tokens_of: Callable[[int], int | None]
) -> tuple[PictureSpan, ...]:
    """Finds the pictures of a sequence, in order.

    Args:
        tokens_of: a picture's number → its tokens; None when there is no such picture.

    Raises:
        ValueError: a picture that is unknown, or not whole.
    """
    ids = np.asarray(token_ids)
    places = np.flatnonzero(ids >= PICTURE_BASE)
    spans: list[PictureSpan] = []
    done = 0
    while done < len(places):
        start = int(places[done])
        number = int(ids[start]) - PICTURE_BASE
        tokens = tokens_of(number)
        if tokens is None:
            raise ValueError(f"picture {number} is unknown")
        end = start + tokens
        if tokens < 1 or end > len(ids) or not (ids[start:end] == ids[start]).all():
            raise ValueError(f"picture {number} has {tokens} tokens, and not all of them are here")
        spans.append(PictureSpan(start, end, number))
        done += tokens
    return tuple(spans)
