"""Pictures in the engine: what is checked when they come, what is computed and how often."""

import msgspec
import pytest
import torch
from umbel.lang.errors import RequestError
from umbel.srt.core.batch import PictureGrid, PictureRows
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.core.messages import EnginePicture
from umbel.srt.multimodal.store import VisionStore

from .toy_vision import HIDDEN, ToyVision, picture


def store_with(
    *pictures: EnginePicture, room: int = 1 << 20, on_axes: bool = False, added_layers: int = 0
) -> tuple[VisionStore, ToyVision]:
    vision = ToyVision(on_axes=on_axes, added_layers=added_layers)
    store = VisionStore(vision, feature_bytes=room)
    for each in pictures:
        store.put(each)
    return store, vision


def test_rows_are_given_what_the_tower_sees_at_their_place() -> None:
    store, vision = store_with(picture(3, 4), picture(8, 2))
    given = store.given([PictureRows(5, 2, 3, 1), PictureRows(9, 2, 8, 0)])
    assert given.rows.tolist() == [5, 6, 9, 10]
    assert torch.equal(given.values, torch.cat([vision.encode(picture(3, 4))[1:3], vision.encode(picture(8, 2))]))


def test_layers_are_given_features_of_their_own() -> None:
    store, vision = store_with(picture(3, 4), added_layers=2)
    given = store.given([PictureRows(5, 2, 3, 1)])
    made = vision.encode(picture(3, 4))[1:3]
    for values, part in zip((given.values, *given.added), made.split(HIDDEN, dim=1), strict=True):
        assert torch.equal(values, part)


def test_the_grid_of_a_picture_is_known_until_it_is_forgotten() -> None:
    store, _ = store_with(picture(3, 4), on_axes=True)
    assert (store.on_axes, store.grid(3), store.grid(4)) == (True, PictureGrid(1, 4), None)
    store.forget(3)
    assert store.grid(3) is None


def test_the_digest_of_a_picture_is_known_as_long_as_a_request_holds_it() -> None:
    store, _ = store_with(msgspec.structs.replace(picture(3, 4), digest=b"cat"), picture(4, 4))
    assert (store.digest(3), store.digest(4), store.digest(5)) == (b"cat", None, None)
    held = store.hold(3)
    store.forget(3)
    assert store.digest(3) == b"cat"
    del held
    assert store.digest(3) is None


def test_a_picture_in_chunks_is_seen_once() -> None:
    store, vision = store_with(picture(3, 4))
    for offset in range(4):
        store.given([PictureRows(0, 1, 3, offset)])
    assert vision.encoded == [3]
    facts = store.facts()
    assert (facts["pictures_computed"], facts["picture_features_found"]) == (1, 3)


def test_features_give_way_to_newer_ones_and_are_computed_again() -> None:
    store, vision = store_with(picture(1, 2), picture(2, 2), room=2 * HIDDEN * 4 + 1)
    for number in (1, 1, 2, 2, 1):
        store.given([PictureRows(0, 2, number, 0)])
    assert vision.encoded == [1, 2, 1]


def test_features_of_one_picture_are_kept_however_little_room_there_is() -> None:
    store, vision = store_with(picture(1, 2), room=0)
    store.given([PictureRows(0, 1, 1, 0)])
    store.given([PictureRows(0, 1, 1, 1)])
    assert vision.encoded == [1]


def test_a_picture_of_other_tokens_than_the_model_has_for_it_is_refused_with_the_number() -> None:
    store, _ = store_with()
    with pytest.raises(RequestError, match=r"picture 5 of 4 × 3 pixels has 4 tokens .* not 6; write tokens=4"):
        store.put(msgspec.structs.replace(picture(5, 4), tokens=6))
    assert store.tokens(5) is None


def test_a_forgotten_picture_is_seen_by_those_who_hold_it() -> None:
    store, vision = store_with(picture(3, 4))
    hold = store.hold(3)
    store.given([PictureRows(0, 1, 3, 0)])
    store.forget(3)
    assert store.tokens(3) is None
    store.given([PictureRows(0, 1, 3, 1)])
    assert vision.encoded == [3, 3], "its features have gone, and are made again for the one who needs them"
    assert hold is not None


def test_seconds_in_the_tower_are_counted() -> None:
    clock = VirtualClock()
    store = VisionStore(ToyVision(clock), clock=clock)
    store.put(picture(1, 2))
    store.given([PictureRows(0, 2, 1, 0)])
    assert store.facts()["tower_seconds"] == 0.25
