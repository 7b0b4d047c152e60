"""The pictures of one sequence: where chunks may end, which rows are theirs, who keeps them."""

import gc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from umbel.srt.core.batch import PictureGrid, PictureRows, PictureSpan
from umbel.srt.multimodal.sequence import NO_PICTURES, HeldPictures, SequencePictures

# tokens     0 1 2 3 4 5 6 7 8 9
#            t t A A A A B B t t
TWO = SequencePictures((PictureSpan(2, 6, 11), PictureSpan(6, 8, 12)), both_ways=True)
LENGTH = 10


@pytest.mark.parametrize(
    ("start", "end", "stops"),
    [
        (0, 1, 1),
        (0, 2, 2),
        (0, 3, 2),  # before the picture
        (2, 3, 6),  # it begins the chunk, and is taken whole
        (4, 5, 6),  # its first rows are cached
        (2, 7, 6),  # the second one waits for the next chunk
        (2, 8, 8),
        (6, 7, 8),
        (5, 9, 9),
    ],
)
def test_a_chunk_ends_before_a_picture_or_behind_it(start: int, end: int, stops: int) -> None:
    assert TWO.stop(start, end, LENGTH) == stops
    assert replace(TWO, both_ways=False).stop(start, end, LENGTH) == end


def test_a_picture_whose_last_row_has_to_wait_does_not_begin() -> None:
    assert TWO.stop(6, 7, last=7) == 6
    assert TWO.stop(3, 7, last=7) == 6


@given(st.lists(st.integers(1, LENGTH), min_size=1, max_size=6), st.booleans())
def test_chunks_have_every_row_of_every_picture_once(limits: list[int], both_ways: bool) -> None:
    pictures = replace(TWO, both_ways=both_ways)
    parts: list[PictureRows] = []
    start = turn = 0
    while start < LENGTH:
        end = pictures.stop(start, min(LENGTH, start + limits[turn % len(limits)]), LENGTH)
        assert end > start, "every step has a row"
        own = list(pictures.rows(start, end, 100))
        for part in own:
            assert 100 <= part.first < part.first + part.rows <= 100 + end - start
        parts.extend(own)
        if both_ways:
            assert pictures.seen_whole(start, end) == tuple(
                (span.start, span.end) for span in TWO.spans if start <= span.start and span.end <= end
            )
        start, turn = end, turn + 1
    for span in TWO.spans:
        offsets = [part.offset + i for part in parts if part.number == span.number for i in range(part.rows)]
        assert offsets == list(range(span.end - span.start))


# tokens     0 1 2 3 4 5 6 7 8 9 …, as drawn in the module's own docstring, and one more picture, 3 × 1
GRIDS = SequencePictures((PictureSpan(3, 9, 11, PictureGrid(2, 3)), PictureSpan(11, 14, 12, PictureGrid(3, 1))))
PLACES = [
    [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8, 8, 8, 11, 12],
    [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8, 9, 10, 11, 12],
    [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 8, 8, 11, 12],
]


def test_positions_on_axes_are_the_same_in_every_chunk() -> None:
    assert GRIDS.on_axes
    for start in range(16):
        for end in range(start + 1, 17):
            assert GRIDS.rope_positions(start, end).tolist() == [axis[start:end] for axis in PLACES]


# tokens     0 1 2 3 4 5 6: t, a clip of three parts of 1 × 2 tokens, t, as drawn there; the parts lie 4 positions apart
CLIP = SequencePictures(
    (
        PictureSpan(1, 3, 11, PictureGrid(1, 2)),
        PictureSpan(3, 5, 12, PictureGrid(1, 2, 4)),
        PictureSpan(5, 7, 13, PictureGrid(1, 2, 8)),
        PictureSpan(8, 10, 14, PictureGrid(1, 2)),
    )
)
CLIP_PLACES = [
    [0, 1, 1, 5, 5, 9, 9, 10, 11, 11, 13],
    [0, 1, 1, 1, 1, 1, 1, 10, 11, 11, 13],
    [0, 1, 2, 1, 2, 1, 2, 10, 11, 12, 13],
]


def test_parts_of_a_clip_lie_apart_in_time() -> None:
    for start in range(11):
        for end in range(start + 1, 12):
            assert CLIP.rope_positions(start, end).tolist() == [axis[start:end] for axis in CLIP_PLACES]


def test_pictures_without_a_grid_take_a_position_for_each_token() -> None:
    assert not TWO.on_axes
    assert TWO.rope_positions(1, 9).tolist() == [list(range(1, 9))] * 3


def test_text_has_no_pictures() -> None:
    assert (NO_PICTURES.end, list(NO_PICTURES.rows(0, 9, 0)), NO_PICTURES.seen_whole(0, 9)) == (0, [], ())


def test_what_is_forgotten_goes_when_the_last_who_holds_it_has_gone() -> None:
    store: HeldPictures[str] = HeldPictures()
    store.put(7, "pixels")
    first, second = store.hold(7), store.hold(7)
    store.forget(7)
    assert (store.known(7), store.find(7)) == (None, "pixels")
    del first
    assert store.find(7) == "pixels"
    del second
    gc.collect()
    assert store.find(7) is None


def test_a_picture_that_comes_again_is_the_one_that_is_held() -> None:
    store: HeldPictures[list[int]] = HeldPictures()
    store.put(7, [1])
    hold = store.hold(7)
    store.forget(7)
    store.put(7, [1])
    assert store.known(7) is hold.value


def test_forgetting_what_nobody_knows_is_no_mistake() -> None:
    HeldPictures[str]().forget(3)
