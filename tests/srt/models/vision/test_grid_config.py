"""Configurations and preprocessors of Qwen-VL: what is read, and what is refused with value and remedy."""

from typing import Any

import pytest
from umbel.lang.errors import ModelError
from umbel.srt.core.config import PictureLimits
from umbel.srt.models.families import read_config
from umbel.srt.models.vision.config import decoder_config
from umbel.srt.models.vision.grid_config import read_grid_vision
from umbel.srt.models.vision.preprocessor import MOST_TOKENS, PREPROCESSOR, read_normalisation, read_picture_format
from umbel.srt.multimodal.format import FRAME_TOKENS, frame_format

# As the models' own files have them, the decoders' cut down to what is read here. Any: JSON values.
TEXT: dict[str, Any] = {
    "vocab_size": 151_936,
    "intermediate_size": 11_008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128_000,
}
QWEN_25_3B: dict[str, Any] = {
    **TEXT,
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    PREPROCESSOR: {
        "min_pixels": 3136,
        "max_pixels": 12_845_056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
    },
}
QWEN_3_4B: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {
        **TEXT,
        "model_type": "qwen3_vl_text",
        "hidden_size": 2560,
        "head_dim": 128,
        "rope_theta": 5_000_000,
        "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    },
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "intermediate_size": 4096,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    PREPROCESSOR: {
        "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
        "default_to_square": True,
        "do_pad": None,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessorFast",
    },
}


def changed(config: dict[str, Any], part: str, **changes: Any) -> dict[str, Any]:
    return {**config, part: {**config[part], **changes}}


def test_qwen_25_is_read_from_its_own_files() -> None:
    vision = read_grid_vision(QWEN_25_3B)
    assert (vision.unit, vision.window, vision.whole, vision.added) == (28, 4, {7, 15, 23, 31}, ())
    form = read_picture_format(QWEN_25_3B)
    assert (form.layout, form.patch_size, form.least_pixels) == ("dynamic", 28, 3136)
    assert (form.most_pixels, form.tile_tokens) == (MOST_TOKENS * 28 * 28, MOST_TOKENS)
    frame = frame_format(form)
    assert (frame.tile_tokens, frame.most_pixels, frame.least_pixels) == (FRAME_TOKENS, FRAME_TOKENS * 28 * 28, 3136)
    axes = read_config(decoder_config(QWEN_25_3B)).layers[0].rope.axes
    assert axes == (0,) * 16 + (1,) * 24 + (2,) * 24


def test_qwen_3_is_read_from_its_own_files() -> None:
    vision = read_grid_vision(QWEN_3_4B)
    assert (vision.unit, vision.window, vision.table_side, vision.added) == (32, 0, 48, (5, 11, 17))
    form = read_picture_format(QWEN_3_4B)
    assert (form.least_pixels, form.most_pixels, form.tile_tokens) == (65_536, MOST_TOKENS * 32 * 32, MOST_TOKENS)
    assert read_normalisation(QWEN_3_4B).mean == (0.5, 0.5, 0.5)
    axes = read_config(decoder_config(QWEN_3_4B)).layers[0].rope.axes
    assert axes == (0, 1, 2) * 20 + (0,) * 4


def test_large_squares_make_no_picture_larger_than_one_may_be() -> None:
    large = changed(changed(QWEN_25_3B, "vision_config", patch_size=112, window_size=896), PREPROCESSOR, patch_size=112)
    form = read_picture_format(changed(large, PREPROCESSOR, max_pixels=1 << 30))
    assert form.most_pixels == PictureLimits().most_pixels


def test_fewer_pixels_are_taken_where_the_preprocessor_says_so() -> None:
    form = read_picture_format(changed(QWEN_25_3B, PREPROCESSOR, max_pixels=100 * 28 * 28))
    assert (form.most_pixels, form.tile_tokens) == (100 * 28 * 28, 141)  # in a line of 1 × 141 squares


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"out_hidden_size": 1024}, "tokens have 1024 numbers, and the decoder's hidden_size is 2048"),
        ({"num_heads": 15}, "15 heads of a width of 1280"),
        ({"window_size": 27}, "window_size=27 pixels is smaller than a token's square, 28"),
        ({"fullatt_block_indexes": [7, 32]}, r"fullatt_block_indexes=\[7, 32\]; write ascending numbers"),
        ({"fullatt_block_indexes": [8, 7]}, r"fullatt_block_indexes=\[8, 7\]; write ascending numbers"),
        ({"in_channels": 1}, "in_channels=1"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_type='default'"),
        ({"depth": 0}, "depth=0"),
        ({"patch_size": 129}, "squares of 258 pixels; at most 256 can be read"),
    ],
)
def test_a_tower_that_is_not_implemented_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        read_grid_vision(changed(QWEN_25_3B, "vision_config", **changes))


def test_learned_positions_are_a_square() -> None:
    with pytest.raises(ModelError, match="num_position_embeddings=2305 is no square"):
        read_grid_vision(changed(QWEN_3_4B, "vision_config", num_position_embeddings=2305))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"patch_size": 16}, "patch_size=16, and the tower's is 14"),
        ({"do_resize": False}, "no multiples of 28"),
        ({"min_pixels": 20_000_000}, "min_pixels=20000000 is more than max_pixels=12845056"),
        ({"max_pixels": -1}, "max_pixels=-1"),
        ({"image_processor_type": "CLIPImageProcessor"}, "does not suit a qwen2_5_vl model"),
        ({"do_center_crop": True}, "do_center_crop=True is not implemented"),
        ({"resample": 0}, "resample=0"),
    ],
)
def test_a_preprocessor_that_does_not_fit_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        read_picture_format(changed(QWEN_25_3B, PREPROCESSOR, **changes))


@pytest.mark.parametrize("sections", [[16, 24], [16, 24, 25], "all", [64, 0, 0.0]])
def test_frequencies_have_one_axis_each(sections: object) -> None:
    config = changed(QWEN_25_3B, "rope_scaling", mrope_section=sections)
    with pytest.raises(ModelError, match="write three numbers, of time, height and width, that are 64 together"):
        read_config(decoder_config(config))
