"""Who chooses tokens on the device, without the host waiting for them."""

from typing import Protocol

import torch

from ...core.batch import Chooser, Draws


class DeviceChooser(Chooser, Protocol):
    """In Triton it is `kernels.triton.sampling.TritonSampling`, its twin is `twins.TwinChooser`."""

    def choose_async(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        """One token for each draw, int64 [n] on the device; −1 where the logits of a row are not numbers.

        logits: float32 [_, vocab].
        """
