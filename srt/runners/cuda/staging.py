"""Arrays on their way to the device: packed into one pinned buffer, copied by one transfer that nobody waits for.

    host     | token ids | positions | write slots | sources |      fresh for each step: torch's pinned allocator
                     one copy, in stream order                      gives memory out again when its copy is done
    device   | token ids | positions | write slots | sources |      the same memory for all steps

Copies and kernels run in one stream, so a step's arrays are overwritten when the step before has read its own. Arrays
of the same lengths always come to the same addresses, as captured graphs need it, until the buffer has to grow.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from .device import Accelerator

ALIGNMENT = 16  # bytes; Triton reads 16 at once where it knows that an address is a multiple of it


class Staging:
    """Sends arrays to one device.

    Args:
        capacity: bytes that are there from the beginning.
    """

    def __init__(self, accelerator: Accelerator, capacity: int) -> None:
        self._accelerator = accelerator
        self._buffer = torch.empty(capacity, dtype=torch.uint8, device=accelerator.device)

    # Any: arrays of several dtypes travel together.
    def send(self, arrays: Sequence[NDArray[np.generic]]) -> list[torch.Tensor]:
        """Each as a tensor on the device, with its shape and dtype; valid until the next call."""
        ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
        starts = [0, *ends[:-1]]
        size = ends[-1]
        if size > len(self._buffer):
            self._buffer = torch.empty(2 * size, dtype=torch.uint8, device=self._accelerator.device)
        host = self._accelerator.host_buffer(size)
        bytes_of_host = host.numpy()
        tensors: list[torch.Tensor] = []
        for array, start in zip(arrays, starts, strict=True):
            bytes_of_host[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
            part = self._buffer[start : start + array.nbytes]
            tensors.append(part.view(_DTYPES[array.dtype.name]).view(array.shape))
        self._buffer[:size].copy_(host, non_blocking=True)
        return tensors


_DTYPES = {
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "float32": torch.float32,
    "float64": torch.float64,
}
