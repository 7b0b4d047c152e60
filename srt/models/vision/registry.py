"""Splits the configuration and the tensors of a vision model into its two parts: decoder and sight.

Checkpoints name the same tensors in several ways, by the version of transformers that wrote them:

    language_model.model.layers.0…      model.language_model.layers.0…      the decoder's  model.layers.0…
    language_model.lm_head.weight       lm_head.weight                                     lm_head.weight
    vision_tower.vision_model.encoder…  model.vision_tower.encoder…         the sight's    vision_tower.encoder…
    multi_modal_projector…              model.multi_modal_projector…                       multi_modal_projector…
    image_newline                       model.image_newline                                image_newline
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ....lang.errors import ModelError
from ...core.model import VisionModel
from ...layers.checkpoint import Tensors
from ...layers.config_values import Config
from .config import read_vision
from .preprocessor import read_normalisation
from .sight import Sight
from .text_config import sees, text_config

__all__ = ["build_vision", "sees", "text_part"]


class Renamed(Mapping[str, torch.Tensor]):
    """Presents some tensors of a checkpoint under other names; each is read lazily."""

    def __init__(self, tensors: Tensors, names: Mapping[str, str]) -> None:
        self._tensors = tensors
        self._names = names  # new → in the checkpoint

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def build_vision(config: Config, tensors: Tensors, *, dtype: torch.dtype, device: torch.device) -> VisionModel:
    """Builds tower and projector of a vision model.

    Raises:
        ModelError: configuration, preprocessor or tensors that cannot be used.
    """
    names, _ = _sorted_names(tensors)
    return Sight(read_vision(config), read_normalisation(config), Renamed(tensors, names), dtype=dtype, device=device)


def text_part(config: Config, tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Returns configuration and tensors of the decoder only, as those of a text model. Any: parsed JSON.

    Raises:
        ModelError: the decoder is not implemented, or two tensors are the same one.
    """
    _, names = _sorted_names(tensors)
    return text_config(config), Renamed(tensors, names)


def _sorted_names(tensors: Tensors) -> tuple[dict[str, str], dict[str, str]]:
    """Returns names of the sight, and names of the decoder, each → names in the checkpoint.

    Names that are neither go to the sight, which refuses unknown ones.
    """
    sight: dict[str, str] = {}
    decoder: dict[str, str] = {}
    for stored in tensors:
        text = _decoder_name(stored.removeprefix("model."))
        target, name = (decoder, text) if text else (sight, _sight_name(stored.removeprefix("model.")))
        if name in target:
            raise ModelError(f"the checkpoint has {stored} and {target[name]}, which are the same tensor; keep one")
        target[name] = stored
    return sight, decoder


def _decoder_name(name: str) -> str | None:
    if name.startswith("lm_head."):
        return name
    if not name.startswith("language_model."):
        return None
    inner = name.removeprefix("language_model.")
    return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"


def _sight_name(name: str) -> str:
    return name.replace("vision_tower.vision_model.", "vision_tower.", 1)
