"""Exports the decoder's Triton kernels under the names of `decoder.FusedKernels`. Imported only when used."""

import triton

from ...kernels.triton.linear import act_and_multiply, gated, linear
from ...kernels.triton.low_rank import adapter_blocks, add_low_rank
from ...kernels.triton.moe import fused_experts, route
from ...kernels.triton.norm import add_rms_norm, rms_norm
from ...kernels.triton.quantized import quantized_linear
from ...kernels.triton.rope import rope_and_store

__all__ = [
    "INTERPRETED",
    "act_and_multiply",
    "adapter_blocks",
    "add_low_rank",
    "add_rms_norm",
    "fused_experts",
    "gated",
    "linear",
    "quantized_linear",
    "rms_norm",
    "route",
    "rope_and_store",
]

INTERPRETED: bool = triton.knobs.runtime.interpret  # on the CPU, as it was when the kernels were imported
