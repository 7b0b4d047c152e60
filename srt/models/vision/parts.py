"""Splits the tensors of a vision model into those of its tower and those of its decoder, and builds the tower.

Checkpoints name the same ones in several ways, by the version of transformers that wrote them:

    language_model.model.layers.0…      model.language_model.layers.0…      the decoder's  model.layers.0…
    model.text_model.layers.0…          model.layers.0…                                    model.layers.0…
    language_model.lm_head.weight       lm_head.weight                                     lm_head.weight
    vision_tower.vision_model.encoder…  model.vision_tower.encoder…         the sight's    vision_tower.encoder…
    multi_modal_projector…              model.multi_modal_projector…                       multi_modal_projector…
    image_newline                       model.image_newline                                image_newline
    visual.blocks.0…                    model.visual.blocks.0…              a grid's       visual.blocks.0…
"""

from collections.abc import Iterator, Mapping

import torch

from ....lang.errors import ModelError
from ...core.batch import VisionModel
from ...layers.checkpoint import Tensors
from ...layers.config_values import Config
from ...layers.quantized import QuantizedSource, QuantizedStacks, QuantizedTensor
from .config import decoder_config, read_vision, sees_grids, text_config
from .grid_config import ROOT, read_grid_vision
from .grid_sight import GridSight
from .preprocessor import read_normalisation, read_picture_format
from .sight import Sight


class Renamed(Mapping[str, torch.Tensor]):
    """Presents some tensors of a checkpoint under other names; each is read lazily."""

    def __init__(self, tensors: Tensors, names: Mapping[str, str]) -> None:
        self._tensors = tensors
        self._names = names  # new → in the checkpoint

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[self._names[name]]

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the tensor
        return name in self._names

    @property
    def quantized_names(self) -> frozenset[str]:
        """The names of packed matrices; see `layers.quantized.QuantizedSource`."""
        if not isinstance(self._tensors, QuantizedSource):
            return frozenset()
        packed = self._tensors.quantized_names
        return frozenset(name for name, stored in self._names.items() if stored in packed)

    def packed_bytes(self, name: str) -> int:
        assert isinstance(self._tensors, QuantizedSource), "it has names of packed matrices"
        return self._tensors.packed_bytes(self._names[name])

    def quantized(self, name: str) -> QuantizedTensor | None:
        return self._tensors.quantized(self._names[name]) if isinstance(self._tensors, QuantizedSource) else None

    @property
    def stacked_names(self) -> frozenset[str]:
        """The names of packed stacks of experts; see `layers.quantized.QuantizedStacks`."""
        if not isinstance(self._tensors, QuantizedStacks):
            return frozenset()
        packed = self._tensors.stacked_names
        return frozenset(name for name, stored in self._names.items() if stored in packed)

    def quantized_expert(self, name: str, expert: int, *shape: int) -> QuantizedTensor:
        assert isinstance(self._tensors, QuantizedStacks), "it has names of packed stacks"
        return self._tensors.quantized_expert(self._names[name], expert, *shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def build_vision(config: Config, tensors: Tensors, *, dtype: torch.dtype, device: torch.device) -> VisionModel:
    """Builds tower and projector of a vision model.

    Raises:
        ModelError: configuration, preprocessor or tensors that cannot be used.
    """
    normalisation = read_normalisation(config)
    if sees_grids(config):
        names = {name: stored for stored in tensors if (name := stored.removeprefix("model.")).startswith(f"{ROOT}.")}
        vision, most = read_grid_vision(config), read_picture_format(config).tile_tokens
        return GridSight(vision, normalisation, Renamed(tensors, names), most_tokens=most, dtype=dtype, device=device)
    names, _ = _sorted_names(tensors)
    return Sight(read_vision(config), normalisation, Renamed(tensors, names), dtype=dtype, device=device)


def text_part(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Returns configuration and tensors of the decoder only, as those of a text model.

    Raises:
        ModelError: the decoder is not implemented, or two tensors are the same one.
    """
    if sees_grids(config):
        return wrapped_text(config, tensors)
    _, names = _sorted_names(tensors)
    return text_config(config), Renamed(tensors, names)


def wrapped_text(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Returns configuration and tensors of the decoder of a vision model with any other tower.

    The head of a checkpoint that has none is its embedding, whatever the configuration says: parts of it differ.

    Raises:
        ModelError: a configuration that cannot be used, or two tensors are the same one.
    """
    names: dict[str, str] = {}
    plain: dict[str, str] = {}  # of checkpoints that name the decoder like a text model
    for stored in tensors:
        text = _decoder_name(stored.removeprefix("model."))
        target, name = (names, text) if text else (plain, stored)
        if name in target:
            raise ModelError(f"the checkpoint has {stored} and {target[name]}, which are the same tensor; keep one")
        target[name] = stored
    if not any(name.startswith("model.") for name in names):
        names |= {name: stored for name, stored in plain.items() if name.startswith(_PLAIN)}
    text_only = dict(decoder_config(config))
    text_only["tie_word_embeddings"] = text_only["tie_word_embeddings"] or "lm_head.weight" not in names
    return text_only, Renamed(tensors, names)


_PLAIN = ("model.layers.", "model.embed_tokens.", "model.norm.")


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
    owner, _, inner = name.partition(".")
    if owner not in ("language_model", "text_model"):
        return None
    return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"


def _sight_name(name: str) -> str:
    return name.replace("vision_tower.vision_model.", "vision_tower.", 1)
