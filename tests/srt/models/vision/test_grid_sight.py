"""Towers over grids: windows, and what is refused. test_sight.py compares what they compute with transformers."""

import itertools
from collections.abc import Callable

import msgspec
import pytest
import torch
from umbel.lang.errors import ModelError, RequestError
from umbel.srt.core.batch import PictureGrid, VisionModel
from umbel.srt.models.vision.grid_sight import Windows, attend_to_all
from umbel.srt.models.vision.parts import build_vision
from umbel.srt.models.vision.preprocessor import read_picture_format

from ..reference import relative_error
from .tiny import Tiny, noise, qwen2_5_vl, qwen2_vl, qwen3_vl


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def sight_of(tiny: Tiny) -> VisionModel:
    return build_vision(tiny.config, tiny.tensors, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize(("rows", "columns", "window"), [(5, 7, 3), (4, 4, 2), (1, 9, 4), (3, 2, 8)])
def test_patches_attend_within_their_square(rows: int, columns: int, window: int) -> None:
    patches = 4
    queries, keys, values = torch.randn((3, rows * columns * patches, 2, 8), generator=torch.Generator().manual_seed(1))
    attended = Windows(rows, columns, window, patches, torch.device("cpu")).attend(queries, keys, values)
    for top, left in itertools.product(range(0, rows, window), range(0, columns, window)):
        square = itertools.product(range(top, min(top + window, rows)), range(left, min(left + window, columns)))
        own = [(row * columns + column) * patches + patch for row, column in square for patch in range(patches)]
        expected = attend_to_all(queries[own], keys[own], values[own])
        assert relative_error(attended[own], expected) < 1e-6


@pytest.mark.parametrize(("make", "added"), [(qwen2_vl, 0), (qwen2_5_vl, 0), (qwen3_vl, 2)])
def test_a_picture_has_a_grid_of_tokens(make: Callable[[], Tiny], added: int) -> None:
    tiny = make()
    sight, picture = sight_of(tiny), tiny.picture(noise(50, 31))
    assert (sight.grid(picture), sight.tokens(picture)) == (PictureGrid(4, 6), 24)
    assert (sight.on_axes, sight.both_ways, sight.added_layers) == (True, False, added)
    assert sight.encode(picture).shape == (24, 64 * (1 + added))


def test_no_picture_has_more_tokens_than_the_largest() -> None:
    tiny = qwen2_vl()
    sight = sight_of(tiny)
    largest = sight.largest()
    assert largest.tokens == sight.tokens(largest) == len(sight.encode(largest))
    assert largest.tokens == read_picture_format(tiny.config).tile_tokens
    assert max(tiny.picture(noise(side, side)).tokens for side in (1, 40, 45, 300)) == 25
    assert 25 < tiny.picture(noise(1, 200)).tokens <= largest.tokens


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tile_height": 12}, "1 tiles of 12 × 48 pixels, and the tower sees one whose sides are multiples of 8"),
        ({"tile_width": 0}, "1 tiles of 32 × 0 pixels"),
        ({"columns": 2, "rows": 1}, "3 tiles of 32 × 48 pixels"),
        ({"pixels": b"123"}, "3 bytes of pixels; one of 32 × 48 has 4608"),
        ({"frames": 2}, "4608 bytes of pixels; one of 32 × 48 has 9216"),
        ({"frames": 3}, "has 3 frames, and the tower joins 2"),
    ],
)
def test_a_picture_for_another_model_is_refused(changes: dict[str, object], says: str) -> None:
    tiny = qwen2_vl()
    picture = msgspec.structs.replace(tiny.picture(noise(50, 31)), **changes)
    with pytest.raises(RequestError, match=says):
        sight_of(tiny).tokens(picture)


def test_every_tensor_is_accounted_for() -> None:
    tiny, cpu = qwen3_vl(), torch.device("cpu")
    more = {**tiny.tensors, "model.visual.extra.weight": torch.ones(1)}
    with pytest.raises(ModelError, match=r"tensors this model does not use: visual\.extra\.weight"):
        build_vision(tiny.config, more, dtype=torch.float32, device=cpu)
    fewer = {name: tensor for name, tensor in tiny.tensors.items() if "deepstack_merger_list.1.norm.bias" not in name}
    with pytest.raises(ModelError, match=r"lacks 1 tensors: visual\.deepstack_merger_list\.1\.norm\.bias"):
        build_vision(tiny.config, fewer, dtype=torch.float32, device=cpu)


def test_an_unknown_activation_is_refused() -> None:
    tiny = qwen2_vl()
    config = {**tiny.config, "vision_config": {**tiny.config["vision_config"], "hidden_act": "cosine"}}
    with pytest.raises(ModelError, match="hidden_act 'cosine' is not one of"):
        build_vision(config, tiny.tensors, dtype=torch.float32, device=torch.device("cpu"))
