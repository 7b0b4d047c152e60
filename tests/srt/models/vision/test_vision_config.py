"""Configurations and preprocessors of models that see: what is read, and what is refused with value and remedy."""

from typing import Any

import pytest
from transformers import AutoConfig
from umbel.lang.errors import ModelError
from umbel.srt.models.families import read_config
from umbel.srt.models.vision.config import read_vision, text_config
from umbel.srt.models.vision.preprocessor import PREPROCESSOR, Normalisation, read_normalisation, read_picture_format

# As the model's own files have them, which leave out what is transformers' default. Any: JSON values.
LLAVA_15: dict[str, Any] = {
    "model_type": "llava",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "vocab_size": 32064},
    PREPROCESSOR: {
        "crop_size": {"height": 336, "width": 336},
        "do_center_crop": True,
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_processor_type": "CLIPImageProcessor",
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "resample": 3,
        "rescale_factor": 0.00392156862745098,
        "size": {"shortest_edge": 336},
    },
}
GEMMA_4B: dict[str, Any] = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    PREPROCESSOR: {
        "do_convert_rgb": None,
        "do_normalize": True,
        "do_pan_and_scan": None,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "Gemma3ImageProcessor",
        "image_seq_length": 256,
        "image_std": [0.5, 0.5, 0.5],
        "pan_and_scan_max_num_crops": None,
        "pan_and_scan_min_crop_size": None,
        "pan_and_scan_min_ratio_to_activate": None,
        "processor_class": "Gemma3Processor",
        "resample": 2,
        "rescale_factor": 0.00392156862745098,
        "size": {"height": 896, "width": 896},
    },
}
LLAVA_NEXT: dict[str, Any] = {
    **LLAVA_15,
    "model_type": "llava_next",
    PREPROCESSOR: {
        **LLAVA_15[PREPROCESSOR],
        "aspect_ratio_setting": "anyres",
        "do_pad": True,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        "image_processor_type": "LlavaNextImageProcessor",
        "processor_class": "LlavaNextProcessor",
    },
}


def preprocessed(**changes: Any) -> dict[str, Any]:
    return {**LLAVA_15, PREPROCESSOR: {**LLAVA_15[PREPROCESSOR], **changes}}


def test_llava_15_is_read_from_its_own_files() -> None:
    vision = read_vision(LLAVA_15)
    assert (vision.tower.activation, vision.tower.norm_eps, vision.depths) == ("quick_gelu", 1e-5, (23,))
    assert (vision.tile_tokens, vision.hidden_size, vision.both_ways) == (576, 4096, False)
    form = read_picture_format(LLAVA_15, after="\n")
    assert (form.layout, form.resize, form.tile_height, form.tile_tokens) == ("fixed", 336, 336, 576)
    assert read_vision({**LLAVA_15, "vision_config": None}) == vision  # transformers' own default


def test_gemma_3_is_read_from_its_own_files() -> None:
    vision = read_vision(GEMMA_4B)
    assert (vision.tile_tokens, vision.hidden_size, vision.both_ways, vision.pooled_side) == (256, 2560, True, 16)
    form = read_picture_format(GEMMA_4B)
    assert (form.resize, form.resample, form.tile_tokens) == ((896, 896), "bilinear", 256)
    assert read_normalisation(GEMMA_4B) == Normalisation(1 / 255, (0.5,) * 3, (0.5,) * 3)


def test_llava_next_has_the_grids_that_transformers_takes() -> None:
    form = read_picture_format(LLAVA_NEXT)
    assert form.grids == ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
    assert (form.layout, form.resize) == ("anyres", (336, 336))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gemma3_text"])
def test_a_text_config_that_says_nothing_is_what_transformers_takes(family: str) -> None:
    seeing = "gemma3" if family == "gemma3_text" else "llava"
    ours = read_config(text_config({"model_type": seeing, "text_config": {"model_type": family}}))
    assert ours == read_config(AutoConfig.for_model(family).to_dict())


def test_a_text_config_may_be_absent() -> None:
    assert text_config({"model_type": "gemma3"})["model_type"] == "gemma3_text"
    assert text_config({"model_type": "llava"})["model_type"] == "llama"


@pytest.mark.parametrize("where", ["whole", "text"])
def test_embeddings_are_tied_wherever_the_file_says_so(where: str) -> None:
    config: dict[str, Any] = {"model_type": "llava", "text_config": {}}
    (config if where == "whole" else config["text_config"])["tie_word_embeddings"] = True
    assert read_config(text_config(config)).tied
    assert not read_config(text_config({"model_type": "llava"})).tied
    assert read_config(text_config({"model_type": "gemma3"})).tied


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "mllama"}, "'mllama' does not see"),
        ({"vision_config": {"model_type": "pixtral"}}, "model_type 'pixtral'"),
        ({"vision_config": {"num_channels": 1}}, "num_channels=1"),
        ({"vision_config": {"image_size": [336, 336]}}, "image_size"),
        ({"vision_config": {"hidden_size": 100}}, "not a multiple of num_attention_heads"),
        ({"vision_config": {"patch_size": 500}}, "larger than the tile"),
        ({"vision_feature_select_strategy": "cls"}, "vision_feature_select_strategy 'cls'"),
        ({"vision_feature_layer": 25}, "vision_feature_layer=25; write numbers from -25 to 24"),
        ({"vision_feature_layer": []}, "names no layer"),
        ({"text_config": {"model_type": "opt"}}, "text_config has model_type 'opt'"),
        ({"model_type": "llava_next", "vision_feature_select_strategy": "full"}, "no square of patches"),
        ({"model_type": "llava_next", "image_grid_pinpoints": [[336, 500]]}, "multiples of 336"),
        ({"model_type": "llava_next", "image_grid_pinpoints": []}, "image_grid_pinpoints is empty"),
        ({"model_type": "gemma3", "text_config": {}}, "siglip_vision_model"),
    ],
)
def test_a_configuration_that_is_not_implemented_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says.replace("[", r"\[")):
        read_vision({**LLAVA_15, **changes})


@pytest.mark.parametrize("tokens", [250, 81])
def test_patches_that_cannot_be_averaged_to_a_square_are_refused(tokens: int) -> None:
    with pytest.raises(ModelError, match=f"mm_tokens_per_image={tokens}"):
        read_vision({**GEMMA_4B, "mm_tokens_per_image": tokens})


def test_a_window_holds_a_picture() -> None:
    text = {**GEMMA_4B["text_config"], "sliding_window": 255}
    with pytest.raises(ModelError, match="sliding_window=255 is smaller than a picture"):
        read_vision({**GEMMA_4B, "text_config": text})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"size": {"longest_edge": 336}}, "size="),
        ({"size": {"shortest_edge": 336, "longest_edge": 500}}, "size="),
        ({"size": 0}, "size=0"),
        ({"crop_size": {"height": 224, "width": 224}}, "224 × 224 pixels"),
        ({"crop_size": {"shortest_edge": 336}}, "crop_size="),
        ({"do_center_crop": False}, "neither cut"),
        ({"resample": 0}, "resample=0 is not implemented"),
        ({"do_resize": "yes"}, "do_resize='yes'"),
        ({"do_flip_channel_order": True}, "do_flip_channel_order=True is not implemented"),
        ({"aspect_ratio_setting": "anyres"}, "aspect_ratio_setting='anyres' is not implemented"),
        ({"do_pan_and_scan": True}, "do_pan_and_scan=True is not implemented"),
        ({"pad_size": {"height": 9, "width": 9}}, "pad_size="),
        ({"image_processor_type": "ViTImageProcessor"}, "'ViTImageProcessor' is not one of"),
        ({"image_processor_type": "LlavaNextImageProcessor"}, "does not suit a llava model"),
        (
            {"image_processor_type": "LlavaImageProcessor", "do_pad": True, "do_resize": False},
            "do_pad without do_resize",
        ),
        ({"image_mean": [0.5]}, "image_mean="),
    ],
)
def test_a_preprocessor_that_is_not_implemented_is_refused(changes: dict[str, Any], says: str) -> None:
    padded = {"image_processor_type": "LlavaImageProcessor", "do_pad": True} if "image_mean" in changes else {}
    with pytest.raises(ModelError, match=says.replace("[", r"\[")):
        read_picture_format(preprocessed(**{**changes, **padded}))


def test_grids_of_model_and_preprocessor_are_the_same() -> None:
    config = {**LLAVA_NEXT, PREPROCESSOR: {**LLAVA_NEXT[PREPROCESSOR], "image_grid_pinpoints": [[336, 336]]}}
    with pytest.raises(ModelError, match="are not those of"):
        read_picture_format(config)
    stretched = {**LLAVA_NEXT, PREPROCESSOR: {**LLAVA_NEXT[PREPROCESSOR], "size": {"shortest_edge": 224}}}
    with pytest.raises(ModelError, match="is that of its tiles, 336"):
        read_picture_format(stretched)


@pytest.mark.parametrize("size", [336, {"shortest_edge": 336}])
def test_sizes_have_several_spellings(size: object) -> None:
    assert read_picture_format(preprocessed(size=size, crop_size=336)) == read_picture_format(LLAVA_15)


def test_one_number_is_a_square_where_the_file_says_so() -> None:
    assert read_picture_format(preprocessed(size=336, default_to_square=True)).resize == (336, 336)
    assert read_picture_format(preprocessed(size=[336, 336], do_center_crop=False)).resize == (336, 336)


def test_normalisation_may_be_turned_off() -> None:
    off = read_normalisation(preprocessed(do_normalize=False, do_rescale=False))
    assert off == Normalisation(1.0, (0.0,) * 3, (1.0,) * 3)
    assert read_normalisation(preprocessed(image_mean=0.5)).mean == (0.5, 0.5, 0.5)
    with pytest.raises(ModelError, match="image_std="):
        read_normalisation(preprocessed(image_std=[0.5, 0, 1]))
