"""Rounds weights to 4 bits with a float16 scale for each 32 inputs, on the native CPU kernels or in torch.

    weight ≈ (nibble − 8) · scale

The scale minimises Σ (x² + mean x²) (x − code · scale)² over a search, see source/quantise.cpp: with the largest weight
simply at −8, the divergence (KL) of a small model is half as much again.
"""

import ctypes

import torch

from ....lang.errors import ParameterError
from .library import NoKernels, load_library

GROUP = 32
_SOURCES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `umbel::Source`
_CANDIDATES = 16
_PIECE = 1 << 20  # weights that torch rounds at a time


def quantise_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds a matrix [n, k] on the CPU → codes uint8 [n, k / 2], that of the even input in the low half, and scales
    float16 [n, k / 32].

    Raises:
        ParameterError: another type, or inputs that 32 does not divide.
    """
    if weight.ndim != 2 or weight.dtype not in _SOURCES or weight.device.type != "cpu" or weight.shape[1] % GROUP:
        raise ParameterError(
            f"a weight of shape {tuple(weight.shape)}, {weight.dtype}, on {weight.device}; give a float matrix on the "
            f"CPU with a multiple of {GROUP} inputs"
        )
    try:
        library = load_library()
    except NoKernels:
        return quantise_int4_in_torch(weight)
    rows = weight if weight.stride(1) == 1 else weight.contiguous()
    n, k = rows.shape
    codes = torch.empty((n, k // 2), dtype=torch.uint8)
    scales = torch.empty((n, k // GROUP), dtype=torch.float16)
    pointer, long = ctypes.c_void_p, ctypes.c_long
    library.umbel_quantise_int4.argtypes = [pointer, ctypes.c_int, long, long, long, pointer, pointer]
    library.umbel_quantise_int4.restype = None
    library.umbel_quantise_int4(
        rows.data_ptr(), _SOURCES[rows.dtype], n, k, rows.stride(0), codes.data_ptr(), scales.data_ptr()
    )
    return codes, scales


def quantise_int4_in_torch(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `quantise_int4` where no library can be compiled; it takes many times as long."""
    n, k = weight.shape
    codes = torch.empty((n, k // 2), dtype=torch.uint8)
    scales = torch.empty((n, k // GROUP), dtype=torch.float16)
    step = max(1, _PIECE // k)
    for first in range(0, n, step):
        groups = weight[first : first + step].float().reshape(-1, GROUP)
        chosen = _best_scales(groups).half()
        steps = chosen.float()
        inverses = torch.where(steps != 0, 1 / steps, 0).nan_to_num(0, 0, 0)
        nibbles = ((groups * inverses).round().clamp(-8, 7) + 8).nan_to_num(8).to(torch.uint8)
        codes[first : first + step] = (nibbles[:, ::2] | (nibbles[:, 1::2] << 4)).view(-1, k // 2)
        scales[first : first + step] = chosen.view(-1, k // GROUP)
    return codes, scales


def _best_scales(groups: torch.Tensor) -> torch.Tensor:
    """groups [g, 32] → the scale of each, [g, 1]"""
    largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    squares = groups * groups
    weights = squares + squares.mean(1, keepdim=True)
    best, scales = torch.full_like(largest, -1), torch.zeros_like(largest)
    for candidate in range(_CANDIDATES):
        inverses = torch.where(largest != 0, -(7.1 + 0.12 * candidate) / largest, 0)
        weighed = weights * (codes := (groups * inverses).round().clamp(-8, 7))
        products, norms = (weighed * groups).sum(1, keepdim=True), (weighed * codes).sum(1, keepdim=True)
        merits = products * products / norms
        better = (norms > 0) & (merits > best)
        best, scales = torch.where(better, merits, best), torch.where(better, products / norms, scales)
    return torch.where(groups.abs().sum(1, keepdim=True).isfinite(), scales, torch.nan)
