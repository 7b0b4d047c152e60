"""Weights that are made of random numbers where they are read: for measurements of models that are not at hand."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from zlib import crc32

import torch

from ..weights.safetensors_folder import tensor_headers

EMBEDDING = "embed_tokens.weight"


class RandomTensors(Mapping[str, torch.Tensor]):
    """Tensors by name, each made when it is read, the same each time: normal numbers from a seed, so small that
    activations keep their size from layer to layer. Vectors, those of norms among them, are ones.

    Args:
        shapes: by name.
        device: they are made there; nothing is copied.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = shapes
        self._dtype = dtype
        self._device = device

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(crc32(name.encode()))
        deviation = 1.0 if name.endswith(EMBEDDING) else math.prod(shape[1:]) ** -0.5
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        return tensor.normal_(0.0, deviation, generator=generator)

    def __contains__(self, name: object) -> bool:  # Mapping's own would make the tensor
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def random_tensors(files: Sequence[Path], dtype: torch.dtype, device: torch.device) -> RandomTensors:
    """Returns random tensors of the names and shapes in the headers of safetensors files."""
    shapes = {name: shape for path in files for name, shape in tensor_headers(path).items()}
    return RandomTensors(shapes, dtype, device)
