"""Takes tensors out of a checkpoint by name, and accounts for each of them.

Every tensor is asked for once with the shape the configuration implies; what is missing, has another shape or is
left over is a mistake of the checkpoint, named in one error.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...lang.errors import ModelError

# Hugging Face parameter name → tensor. May be lazy: a tensor is read when it is asked for.
Tensors = Mapping[str, torch.Tensor]

LISTED = 8  # names in one message


@dataclass(frozen=True, slots=True)
class LinearTensors:
    """Linear maps that one product computes, stacked along their outputs."""

    names: tuple[str, ...]  # in the checkpoint, without ".weight" and ".bias"
    widths: tuple[int, ...]  # outputs of each
    inputs: int
    biased: bool = False


class Checkpoint:
    """Reads `tensors` in the model's dtype and onto its device."""

    def __init__(self, tensors: Tensors, *, dtype: torch.dtype, device: torch.device) -> None:
        self._tensors = tensors
        self._dtype = dtype
        self.device = device
        self._taken: set[str] = set()

    def require(self, names: list[str]) -> None:
        """All names at once, before anything large is read: one message tells everything that is missing."""
        missing = [name for name in names if name not in self._tensors]
        if missing:
            raise ModelError(
                f"the checkpoint lacks {len(missing)} tensors: {listing(missing)}; "
                "check that all its files are there and that config.json belongs to them"
            )

    def holds(self, name: str) -> bool:
        """Whether there is such a tensor: families spell some of their tensors in several ways."""
        return name in self._tensors

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return self.take_as_stored(name, *shape).to(self._dtype)

    def take_as_stored(self, name: str, *shape: int) -> torch.Tensor:
        """In the dtype of the file: on the CPU its mapped pages, not copied unless they are scattered."""
        self.require([name])
        self._taken.add(name)
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"tensor {name} has shape {list(tensor.shape)}, the configuration says {list(shape)}; "
                "check that config.json belongs to these weights"
            )
        return tensor.to(self.device).contiguous()

    def take_weights(self, tensors: LinearTensors, *, as_stored: bool = False) -> list[torch.Tensor]:
        """The matrix of each map, [width, inputs], in the model's dtype or as the file stores it."""
        take = self.take_as_stored if as_stored else self.take
        return [
            take(f"{name}.weight", width, tensors.inputs)
            for name, width in zip(tensors.names, tensors.widths, strict=True)
        ]

    def take_bias(self, tensors: LinearTensors) -> torch.Tensor | None:
        """The biases of all maps as one, [sum of widths]; None: they have none."""
        if not tensors.biased:
            return None
        parts = [self.take(f"{name}.bias", width) for name, width in zip(tensors.names, tensors.widths, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def finish(self, *, ignored: frozenset[str] = frozenset()) -> None:
        """Nothing may be left over, apart from `ignored` names and buffers that old checkpoints stored."""
        left = [
            name
            for name in self._tensors
            if name not in self._taken and name not in ignored and not name.endswith("rotary_emb.inv_freq")
        ]
        if left:
            raise ModelError(
                f"the checkpoint has {len(left)} tensors this model does not use: {listing(left)}; "
                "check that config.json belongs to these weights"
            )


def listing(names: list[str]) -> str:
    rest = len(names) - LISTED
    return ", ".join(sorted(names)[:LISTED]) + (f" and {rest} more" if rest > 0 else "")
