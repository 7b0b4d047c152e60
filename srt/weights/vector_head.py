"""Loads what turns pooled hidden states into vectors, and parts it from the tensors of the decoder."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from ...lang.errors import ModelError
from ..core.vectors import DenseMap, VectorConfig
from ..layers.checkpoint import Tensors
from ..layers.config_values import Config
from ..models.decoder_config import EMBEDDING, HEAD
from .gguf_tensors import GgufTensors
from .safetensors_folder import SINGLE, open_tensors
from .vector_config import CLASSIFIER

_PREFIX = "model."


@dataclass(frozen=True, slots=True, eq=False)
class _VectorMap:
    """A linear map with its activation, in float32."""

    weight: torch.Tensor  # [outputs, inputs]
    bias: torch.Tensor | None
    activation: str = ""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        mapped = functional.linear(x, self.weight, self.bias)
        return mapped.tanh() if self.activation else mapped


class LoadedHead:
    """Implements `batch.VectorHead` in float32 on the CPU: a vector is one row."""

    def __init__(self, config: VectorConfig, maps: tuple[_VectorMap, ...] = ()) -> None:
        self.every_row = config.every_row
        self.dimensions = config.dimensions
        self._normalized = config.normalized
        self._maps = maps

    def vector(self, pooled: torch.Tensor, dimensions: int) -> bytes:
        """Computes the vector of one text, see `batch.VectorHead`. Zeros stay zeros."""
        x = pooled.float().cpu()
        for mapped in self._maps:
            x = mapped(x)
        x = x[:dimensions] if dimensions else x
        values = (functional.normalize(x, dim=0) if self._normalized else x).numpy()
        return (values if sys.byteorder == "little" else values.byteswap()).tobytes()


def load_head(config: VectorConfig, tensors: Tensors, folder: Path, hidden: int) -> LoadedHead:
    """Reads the maps of a model's vectors.

    Args:
        tensors: of the checkpoint.
        folder: that of the checkpoint, which has a folder for each dense map.
        hidden: numbers of a hidden state.

    Raises:
        ModelError: a tensor is missing, or has another shape than the configuration says.
    """
    if not config.labels:
        return LoadedHead(config, tuple(_dense(folder / dense.folder, dense) for dense in config.maps))
    weight = tensors[CLASSIFIER]
    if tuple(weight.shape) != (config.labels, hidden):
        raise ModelError(
            f"tensor {CLASSIFIER} has shape {list(weight.shape)}, config.json says {[config.labels, hidden]}; "
            "check its num_labels or id2label"
        )
    rows = weight.flip(0) if config.yes_first else weight
    return LoadedHead(config, (_VectorMap(rows.float(), None),))


def _dense(folder: Path, dense: DenseMap) -> _VectorMap:
    tensors = open_tensors(folder)
    wanted: dict[str, tuple[int, ...]] = {"linear.weight": (dense.outputs, dense.inputs)}
    wanted |= {"linear.bias": (dense.outputs,)} if dense.biased else {}
    read: dict[str, torch.Tensor] = {}
    for name, shape in wanted.items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            raise ModelError(f"{folder / SINGLE} holds no {name} of shape {list(shape)}; download it again")
        read[name] = tensors[name].float()
    return _VectorMap(read["linear.weight"], read.get("linear.bias"), dense.activation)


def decoder_part(config: Config, tensors: Tensors, vectors: VectorConfig) -> tuple[Config, Tensors]:
    """Returns configuration and tensors of the decoder, as one with an output head.

    A classifier's head is left out. A checkpoint of the bare model lacks the first part of all names, and may lack the
    output head: the embedding takes its place, and nothing is generated with it.
    """
    from ..models.vision.parts import Renamed  # with all vision towers, which most models do not need

    bare = EMBEDDING not in tensors and EMBEDDING.removeprefix(_PREFIX) in tensors
    if isinstance(tensors, GgufTensors):  # whose blocks stay as they are
        tensors = tensors.without(CLASSIFIER)
    elif bare or vectors.labels:
        names: Mapping[str, str] = {
            f"{_PREFIX}{name}" if bare and name != HEAD else name: name for name in tensors if name != CLASSIFIER
        }
        tensors = Renamed(tensors, names)
    return (config if vectors.generates else {**config, "tie_word_embeddings": True}), tensors
