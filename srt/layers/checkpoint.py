"""Takes tensors from a checkpoint by name, and accounts for each of them.

Every tensor is taken once, with the shape that the configuration implies. A tensor that is missing, left over or of
another shape is an error of the checkpoint; the message names it.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ...lang.errors import ModelError

# Hugging Face parameter name → tensor. May be lazy: a tensor is read on access.
Tensors = Mapping[str, torch.Tensor]

LISTED = 8  # names in one message
ONES = "ones"  # the name of a norm's weights that are all one, and in no checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class BlockTensor:
    """A matrix in quantised blocks as its file stores them, mapped: nothing is copied or unpacked.

    Attributes:
        kind: ggml's name of the block type, "Q4_K"; "F32", "F16" and "BF16" are types of blocks of one weight.
        shape: (outputs, inputs).
        data: uint8 [outputs, bytes of a row], the mapped file. The mapping lives as long as this array.
        heads: rows stand in llama.cpp's order within each of so many heads (the two rows that RoPE turns together are
            adjacent); None: in Hugging Face's order.
    """

    kind: str
    shape: tuple[int, int]
    data: NDArray[np.uint8]
    heads: int | None = None


class BlockTensors(Mapping[str, torch.Tensor]):
    """Tensors of a file of quantised blocks: by name they are dequantised, by `block` they are as stored."""

    @abstractmethod
    def block(self, name: str) -> BlockTensor | None:
        """Returns the matrix as stored; None for a tensor that is no matrix, or of no type of blocks."""


@dataclass(frozen=True, slots=True)
class LinearTensors:
    """Linear maps that one product computes, stacked along their outputs."""

    names: tuple[str, ...]  # in the checkpoint, without ".weight" and ".bias"
    widths: tuple[int, ...]  # outputs of each
    inputs: int
    biased: bool = False
    fine_inputs: bool = False  # where products round inputs to 8 bits (blocks on the CPU kernels), these keep 16

    @property
    def weights(self) -> list[str]:
        """The names of the matrices, where a checkpoint stores them as floats."""
        return [f"{name}.weight" for name in self.names]


class Checkpoint:
    """Reads `tensors` in the model's dtype and onto its device."""

    def __init__(self, tensors: Tensors, *, dtype: torch.dtype, device: torch.device) -> None:
        self.tensors = tensors
        self.dtype = dtype
        self.device = device
        self._taken: set[str] = set()

    def require(self, names: list[str]) -> None:
        """Checks all names before a tensor is read, so that one message lists everything that is missing."""
        missing = [name for name in names if name not in self.tensors]
        if missing:
            raise ModelError(
                f"the checkpoint lacks {len(missing)} tensors: {listing(missing)}; "
                "check that all its files are there and that config.json belongs to them"
            )

    def holds(self, name: str) -> bool:
        """Returns whether there is such a tensor: families spell some of their tensors in several ways."""
        return name in self.tensors

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return self.take_as_stored(name, *shape).to(self.dtype)

    def take_as_stored(self, name: str, *shape: int, other_shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Takes a tensor in the file's dtype: on the CPU its mapped pages, copied only if not contiguous.

        other_shape: which it may have instead.
        """
        if name == ONES:
            return torch.ones(shape, device=self.device)
        self.require([name])
        tensor = self.tensors[name]
        stored = tuple(tensor.shape)
        self.mark_taken(name, stored, stored if stored == other_shape else shape)
        return tensor.to(self.device).contiguous()

    def mark_taken(self, name: str, stored: tuple[int, ...], expected: tuple[int, ...]) -> None:
        """Notes that a tensor is taken, in whatever form. Raises ModelError if it has another shape."""
        self._taken.add(name)
        if stored != expected:
            raise ModelError(
                f"tensor {name} has shape {list(stored)}, the configuration says {list(expected)}; "
                "check that config.json belongs to these weights"
            )

    def take_block(self, name: str, *shape: int) -> BlockTensor | None:
        """Takes a matrix in the blocks of its file; None: the file stores floats, and `take` reads them."""
        block = self.tensors.block(name) if isinstance(self.tensors, BlockTensors) else None
        if block is not None:
            self.mark_taken(name, block.shape, shape)
        return block

    def take_weights(self, tensors: LinearTensors, *, as_stored: bool = False) -> list[torch.Tensor]:
        """Takes the matrix of each map, [width, inputs], in the model's dtype or as the file stores it."""
        take = self.take_as_stored if as_stored else self.take
        return [take(name, width, tensors.inputs) for name, width in zip(tensors.weights, tensors.widths, strict=True)]

    def take_bias(self, tensors: LinearTensors) -> torch.Tensor | None:
        """Takes the biases of all maps as one, [sum of widths]; None: they have none."""
        if not tensors.biased:
            return None
        parts = [self.take(f"{name}.bias", width) for name, width in zip(tensors.names, tensors.widths, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def finish(self, *, is_unused: Callable[[str], bool]) -> None:
        """Checks that no tensor is left over, except those that are unused and buffers that old checkpoints stored."""
        left = [
            name
            for name in self.tensors
            if name not in self._taken and not is_unused(name) and not name.endswith("rotary_emb.inv_freq")
            if not (name.endswith(".bias") and not self.tensors[name].any())  # converters to GPTQ add zeros
        ]
        if left:
            raise ModelError(
                f"the checkpoint has {len(left)} tensors this model does not use: {listing(left)}; "
                "check that config.json belongs to these weights"
            )


def listing(names: list[str]) -> str:
    rest = len(names) - LISTED
    return ", ".join(sorted(names)[:LISTED]) + (f" and {rest} more" if rest > 0 else "")
