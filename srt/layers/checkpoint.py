"""Takes tensors out of a checkpoint by name, and accounts for each of them.

Every tensor is asked for once with the shape the configuration implies; what is missing, has another shape or is
left over is a mistake of the checkpoint, named in one error.
"""

from collections.abc import Mapping

import torch

from ...lang.errors import ModelError

# Hugging Face parameter name → tensor. May be lazy: a tensor is read when it is asked for.
Tensors = Mapping[str, torch.Tensor]

LISTED = 8  # names in one message


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

    def take_fused(self, names: list[str], shapes: list[tuple[int, ...]]) -> torch.Tensor:
        """Several tensors, stacked along the first dimension: one product instead of several."""
        return torch.cat([self.take(name, *shape) for name, shape in zip(names, shapes, strict=True)])

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
