"""Tiles against transformers' PIL-based image processors, before they normalise: the same bytes."""

from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    LlavaImageProcessorPil,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    Qwen2VLImageProcessorPil,
    SiglipImageProcessorPil,
)
from umbel.srt.models.vision.preprocessor import PREPROCESSOR, read_picture_format
from umbel.srt.multimodal.format import PictureFormat, Raster, dynamic_tokens, frame_format, picture_tokens_at
from umbel.srt.multimodal.stills import SQUARE_PIXELS, STRIP_PIXELS, prepare

SIDE, PATCH = 28, 4
GRIDS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
SIZES = [(1, 1), (2, 1), (7, 501), (1000, 30), (28, 28), (27, 29), (29, 28), (97, 64), (64, 97), (300, 301)]

CROPPED = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
PROCESSORS: dict[str, tuple[str, Any]] = {  # Any: classes without types
    "clip": ("llava", CLIPImageProcessorPil(**CROPPED)),
    "clip, a larger crop than the picture": (
        "llava",
        CLIPImageProcessorPil(**{**CROPPED, "size": {"shortest_edge": 9}}),
    ),
    "clip, cropped only": ("llava", CLIPImageProcessorPil(**CROPPED, do_resize=False)),
    "clip, stretched": ("llava", CLIPImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_center_crop=False)),
    "clip, odd": ("llava", CLIPImageProcessorPil(**{**CROPPED, "size": {"shortest_edge": 33}}, resample=1)),
    "llava, padded": ("llava", LlavaImageProcessorPil(**CROPPED, do_pad=True)),
    "llava, not padded": ("llava", LlavaImageProcessorPil(**CROPPED, resample=2)),
    "siglip": ("llava", SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})),
    "gemma 3": ("gemma3", Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})),
    "anyres": ("llava_next", LlavaNextImageProcessorPil(**CROPPED, image_grid_pinpoints=GRIDS)),
    "anyres, bilinear": ("llava_next", LlavaNextImageProcessorPil(**CROPPED, image_grid_pinpoints=GRIDS, resample=2)),
}


def form_of(name: str) -> PictureFormat:
    """As a folder with this processor's saved settings is read."""
    family, processor = PROCESSORS[name]
    config = {
        "model_type": family,
        "vision_config": {"image_size": SIDE, "patch_size": PATCH},
        "image_grid_pinpoints": GRIDS,
        "mm_tokens_per_image": 49,
        PREPROCESSOR: processor.to_dict(),
    }
    return read_picture_format(config)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """Every pixel its own: a shift by one shows everywhere."""
    pixels = np.random.default_rng([width, height, seed]).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def expected(name: str, image: Image.Image) -> np.ndarray:
    """[tiles, height, width, 3]"""
    processor = PROCESSORS[name][1]
    values = processor(image, do_rescale=False, do_normalize=False)["pixel_values"]
    tiles = np.asarray(values[0])
    tiles = tiles if tiles.ndim == 4 else tiles[None]
    assert tiles.dtype == np.uint8
    return tiles.transpose(0, 2, 3, 1)


def tiles_of(raster: Raster) -> np.ndarray:
    flat = np.frombuffer(raster.pixels, dtype=np.uint8)
    return flat.reshape(-1, raster.tile_height, raster.tile_width, 3)


@pytest.mark.parametrize("name", PROCESSORS)
def test_tiles_are_those_of_transformers(name: str) -> None:
    form = form_of(name)
    for width, height in SIZES:
        image = noise(width, height)
        assert np.array_equal(tiles_of(prepare(image, form)), expected(name, image)), (width, height)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(PROCESSORS)), st.integers(1, 400), st.integers(1, 400))
def test_tiles_of_any_size_are_those_of_transformers(name: str, width: int, height: int) -> None:
    image = noise(width, height)
    assert np.array_equal(tiles_of(prepare(image, form_of(name))), expected(name, image))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000))
def test_an_anyres_picture_has_as_many_tokens_as_transformers_counts(width: int, height: int) -> None:
    counter = SimpleNamespace(
        image_processor=SimpleNamespace(image_grid_pinpoints=GRIDS), patch_size=PATCH, num_additional_image_tokens=0
    )
    counter._get_unpadded_features = lambda *given: LlavaNextProcessor._get_unpadded_features(counter, *given)
    counted = LlavaNextProcessor._get_number_of_features(counter, height, width, SIDE, SIDE)
    assert picture_tokens_at(form_of("anyres"), width, height) == counted


DYNAMIC = PictureFormat(
    "dynamic",
    8,
    8,
    tile_tokens=dynamic_tokens(8, 500, 2000),
    patch_size=8,
    resize=None,
    least_pixels=500,
    most_pixels=2000,
)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300))
def test_a_dynamic_picture_is_resized_as_transformers_does(width: int, height: int) -> None:
    assume(max(width, height) <= 200 * min(width, height))
    image = noise(width, height)
    raster = prepare(image, DYNAMIC)
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 500, "longest_edge": 2000}, patch_size=4, temporal_patch_size=2, merge_size=2
    )
    made = processor(image, do_rescale=False, do_normalize=False, return_tensors="np")
    rows, columns = raster.tile_height // 8, raster.tile_width // 8
    assert made["image_grid_thw"].tolist() == [[1, 2 * rows, 2 * columns]]
    squares = tiles_of(raster).reshape(rows, 2, 4, columns, 2, 4, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    expected_patches = made["pixel_values"].reshape(-1, 3, 2, 4, 4)[:, :, 0]  # a still picture is two equal frames
    assert np.array_equal(squares.reshape(-1, 3, 4, 4), expected_patches)
    assert raster.tokens == rows * columns == picture_tokens_at(DYNAMIC, width, height)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(64, 40_000), st.integers(64, 400_000))
def test_a_dynamic_picture_has_no_more_tokens_than_its_format_says(
    width: int, height: int, least: int, most: int
) -> None:
    assume(max(width, height) <= 200 * min(width, height))
    least = min(least, most)
    form = msgspec.structs.replace(
        DYNAMIC, least_pixels=least, most_pixels=most, tile_tokens=dynamic_tokens(8, least, most)
    )
    assert 1 <= picture_tokens_at(form, width, height) <= form.tile_tokens
    frame = frame_format(form)
    assert picture_tokens_at(frame, width, height) <= frame.tile_tokens


def test_a_raster_says_what_it_is() -> None:
    raster = prepare(noise(100, 40), form_of("anyres"))
    assert (raster.width, raster.height, raster.columns, raster.rows) == (100, 40, 3, 1)
    assert (raster.tile_height, raster.tile_width) == (SIDE, SIDE)
    assert raster.tokens == picture_tokens_at(form_of("anyres"), 100, 40)


def test_frames_are_overviews_only() -> None:
    form = form_of("anyres")
    raster = prepare(noise(100, 40), frame_format(form))
    assert (raster.columns, raster.rows, raster.tokens) == (0, 0, (SIDE // PATCH) ** 2)
    assert raster.pixels == prepare(noise(100, 40), form).pixels[: SIDE * SIDE * 3]
    assert frame_format(form_of("clip")) == form_of("clip")


@pytest.mark.parametrize(
    "size",
    [(3, 5000), (5000, 3), *(pytest.param(size, marks=pytest.mark.nightly) for size in ((1, 5999), (16_000, 7)))],
)
def test_of_a_strip_that_is_too_long_the_middle_is_computed_and_nearly_the_same(size: tuple[int, int]) -> None:
    form = msgspec.structs.replace(form_of("clip"), tile_height=224, tile_width=224, resize=224)
    width, height = size
    assert 224 * 224 * max(size) / min(size) > STRIP_PIXELS
    image = noise(width, height)
    whole = (224, int(224 * height / width)) if width < height else (int(224 * width / height), 224)
    left, top = (whole[0] - 224) // 2, (whole[1] - 224) // 2
    exact = image.resize(whole, Image.Resampling.BICUBIC).crop((left, top, left + 224, top + 224))
    difference = np.asarray(exact, dtype=np.int16) - tiles_of(prepare(image, form))[0]
    assert np.abs(difference).max() <= 1


@pytest.mark.parametrize("size", [(40, 5000), (5000, 40), (1, 4500)])
def test_of_a_square_that_is_too_large_what_is_near_the_picture_is_computed(size: tuple[int, int]) -> None:
    assert max(size) ** 2 > SQUARE_PIXELS
    image = noise(*size)
    whole = expected("llava, padded", image).astype(np.int16)
    most = 1 if size[0] < size[1] else 0  # of wide pictures every row is whole
    assert np.abs(whole - tiles_of(prepare(image, form_of("llava, padded")))).max() <= most


def test_a_fingerprint_is_of_what_decides_the_pixels() -> None:
    form = form_of("clip")
    assert form.fingerprint == msgspec.structs.replace(form, after="\n").fingerprint
    assert len({form_of(name).fingerprint for name in PROCESSORS}) == len({form_of(name) for name in PROCESSORS})
    assert frame_format(form_of("anyres")).fingerprint != form_of("anyres").fingerprint


def test_a_format_crosses_between_processes() -> None:
    for name in PROCESSORS:
        form = form_of(name)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(form), type=PictureFormat) == form
