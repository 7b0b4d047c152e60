"""What a runner computes with besides torch's products: the kernels in Triton, or their twins.

Nothing of Triton is imported before it is asked for: it takes a second, and is not there on every system.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...attention.backend import AttentionGeometry
from .choosing import DeviceChooser
from .kernels import FusedKernels
from .plans import GraphBackend


class MakeAttention(Protocol):
    """Raises ParameterError for what the kernels do not take."""

    def __call__(
        self,
        geometry: AttentionGeometry,
        device: torch.device,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        tree_attention: bool,
    ) -> GraphBackend[Any]: ...  # Any: each backend has its own plans, and only the backend reads them


@dataclass(frozen=True, slots=True)
class Parts:
    name: str  # in the runner's facts
    kernels: FusedKernels
    chooser: Callable[[], DeviceChooser]
    attention: MakeAttention
    anywhere: bool  # they take tensors of the CPU, too


def triton_parts() -> Parts:
    """Raises MissingExtraError without Triton. With TRITON_INTERPRET=1 they run in its interpreter, on the CPU."""
    from ...kernels.triton.attention_backend import TritonBackend  # says which extra is missing
    from ...kernels.triton.sampling import TritonSampling
    from . import triton_kernels

    return Parts("triton", triton_kernels, TritonSampling, TritonBackend, anywhere=triton_kernels.INTERPRETED)


def twin_parts() -> Parts:
    from ...kernels.triton import twins as kernels
    from .twins import TwinBackend, TwinChooser

    return Parts("twins of triton", kernels, TwinChooser, TwinBackend, anywhere=True)
