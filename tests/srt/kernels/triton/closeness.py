"""How far a kernel's result is from what is expected, and the dtypes that models come in."""

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Of the largest value. Kernels and references round at the same places, so in 16 bits a result that falls on the other
# side of a tie is one rounding away, and what is computed from it another one.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest value that is expected."""
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same on every device, rounded to dtype."""
    numbers = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return numbers.to(torch.get_default_device(), dtype)
