"""Tiny random models that see: as transformers holds them, with the preprocessor that belongs to them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)
from umbel.srt.core.messages import EnginePicture
from umbel.srt.models.vision.preprocessor import PREPROCESSOR, read_picture_format
from umbel.srt.multimodal.stills import prepare

from ..reference import TINY

SIDE, PATCH = 24, 4
IMAGE_TOKEN = 96
GRIDS = [[24, 48], [48, 24], [48, 48], [72, 24]]
# Any, in this file: fields of configuration classes, classes without types.
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
}
CROPPED: dict[str, Any] = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
GEMMA_TEXT: dict[str, Any] = {**TINY, "head_dim": 16, "sliding_window": 12, "sliding_window_pattern": 3}


@dataclass(frozen=True)
class Tiny:
    model: PreTrainedModel
    processor: Any

    @property
    def config(self) -> dict[str, Any]:
        """As `ModelSource.config` has it."""
        return {**self.model.config.to_dict(), PREPROCESSOR: self.processor.to_dict()}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What transformers 5 calls them in memory; tied ones once."""
        tensors = {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}
        if self.model.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        if self.model.config.model_type == "qwen3_vl_moe":  # its checkpoints have inputs first
            stacks = [name for name in tensors if ".experts." in name]
            tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in stacks}
        return tensors

    def picture(self, image: Image.Image, number: int = 1) -> EnginePicture:
        """As the gateway sends it."""
        raster = prepare(image, read_picture_format(self.config))
        return EnginePicture(
            number=number,
            tokens=raster.tokens,
            width=raster.width,
            height=raster.height,
            columns=raster.columns,
            rows=raster.rows,
            tile_height=raster.tile_height,
            tile_width=raster.tile_width,
            pixels=raster.pixels,
        )

    def inputs(self, *images: Image.Image) -> dict[str, torch.Tensor]:
        """What transformers' forward pass takes beside the token ids."""
        inputs = self.processor(list(images), return_tensors="pt")
        return {name: inputs[name] for name in ("pixel_values", "image_sizes", "image_grid_thw") if name in inputs}

    def features(self, image: Image.Image) -> torch.Tensor:
        """[tokens, hidden], by transformers."""
        inputs = self.inputs(image)
        inputs["pixel_values"] = inputs["pixel_values"].to(self.model.dtype)
        with torch.no_grad():
            found = self.model.model.get_image_features(**inputs)
        # Qwen 3-VL has more of them, for the first layers.
        return torch.cat([found.pooler_output[0], *(each[0] for each in found.get("deepstack_features") or ())], dim=-1)


def llava(*, tower: str = "clip", text: dict[str, Any] | None = None, **changes: Any) -> Tiny:
    vision, processor = _tower(tower)
    config = LlavaConfig(vision_config=vision, text_config=_text(text), image_token_index=IMAGE_TOKEN, **changes)
    return Tiny(_random(LlavaForConditionalGeneration(config)), processor)


def llava_next(*, tower: str = "clip", text: dict[str, Any] | None = None, **changes: Any) -> Tiny:
    config = LlavaNextConfig(
        vision_config=_tower(tower)[0],
        text_config=_text(text),
        image_token_index=IMAGE_TOKEN,
        image_grid_pinpoints=GRIDS,
        **changes,
    )
    processor = LlavaNextImageProcessorPil(**CROPPED, image_grid_pinpoints=GRIDS)
    return Tiny(_random(LlavaNextForConditionalGeneration(config)), processor)


def gemma3(**changes: Any) -> Tiny:
    config = Gemma3Config(
        text_config={**GEMMA_TEXT, **changes},
        vision_config={**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
        mm_tokens_per_image=9,
        image_token_index=IMAGE_TOKEN,
    )
    processor = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return Tiny(_random(Gemma3ForConditionalGeneration(config)), processor)


QWEN_TEXT: dict[str, Any] = {**TINY, "hidden_size": 64, "num_hidden_layers": 4}
QWEN_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 900.0, "mrope_section": [2, 3, 3]}
GRID_TOWER: dict[str, Any] = {"depth": 3, "num_heads": 4, "patch_size": PATCH, "temporal_patch_size": 2}


def qwen2_vl(**changes: Any) -> Tiny:
    tower = {**GRID_TOWER, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    return _qwen(Qwen2VLConfig, Qwen2VLForConditionalGeneration, tower, changes)


def qwen2_5_vl(**changes: Any) -> Tiny:
    """Windows of 2 × 2 tokens, in all layers but the second."""
    tower = {**GRID_TOWER, "hidden_size": 32, "intermediate_size": 56, "out_hidden_size": 64}
    tower |= {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
    return _qwen(Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, tower, changes)


def qwen3_vl(**changes: Any) -> Tiny:
    tower = {**GRID_TOWER, "hidden_size": 32, "intermediate_size": 56, "out_hidden_size": 64}
    tower |= {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
    text = {"head_dim": 16, **changes}
    return _qwen(Qwen3VLConfig, Qwen3VLForConditionalGeneration, tower, text)


def qwen3_vl_moe() -> Tiny:
    tower = {**GRID_TOWER, "hidden_size": 32, "intermediate_size": 56, "out_hidden_size": 64}
    tower |= {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "mlp_only_layers": [1]}
    return _qwen(Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration, tower, {"head_dim": 16, **experts})


def _qwen(config_class: Any, model_class: Any, tower: dict[str, Any], changes: dict[str, Any]) -> Tiny:
    config = config_class(
        vision_config=tower,
        text_config={**QWEN_TEXT, "rope_parameters": QWEN_ROPE, **changes},
        image_token_id=IMAGE_TOKEN,
        video_token_id=IMAGE_TOKEN - 1,
        vision_start_token_id=IMAGE_TOKEN - 2,
        vision_end_token_id=IMAGE_TOKEN - 3,
    )
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 500, "longest_edge": 2000}, patch_size=PATCH, temporal_patch_size=2, merge_size=2
    )
    return Tiny(_random(model_class(config)), processor)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng([width, height, seed]).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _tower(kind: str) -> tuple[Any, Any]:
    if kind == "clip":
        return CLIPVisionConfig(**TOWER), CLIPImageProcessorPil(**CROPPED)
    return SiglipVisionConfig(**TOWER), SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})


def _text(changes: dict[str, Any] | None) -> dict[str, Any]:
    return {"model_type": "llama", **TINY, **(changes or {})}


def _random(model: PreTrainedModel) -> PreTrainedModel:
    """Large enough that mistakes show; norms and biases are not all ones and zeros."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            else:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.set_attn_implementation("eager")
    return model.eval()
