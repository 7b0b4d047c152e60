"""How far a kernel's result is from what is expected, and the dtypes that models come in."""

import torch
from umbel.srt.layers.quantized import Codes, QuantizedTensor

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


def random_codes(kind: Codes, outputs: int, inputs: int, group: int, *, zeros: bool = False) -> QuantizedTensor:
    """Codes of all values. Scales of e2m1 are powers of two, those of the other kinds are between 0.5 and 1.5."""
    generator = torch.Generator().manual_seed(3)
    if kind is Codes.FLOAT8:
        numbers = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn)
    elif kind is Codes.INT8:
        numbers = torch.randint(-128, 128, (outputs, inputs), generator=generator).to(torch.int8)
    else:
        numbers = torch.randint(0, 256, (outputs, inputs // 2), generator=generator).to(torch.uint8)
    if kind is Codes.E2M1:
        exponents = torch.randint(118, 124, (outputs, inputs // group), generator=generator).to(torch.uint8)
        return QuantizedTensor(kind, numbers, exponents.view(torch.float8_e8m0fnu))
    scales = torch.rand(outputs, inputs // group, generator=generator) + 0.5
    points = torch.randint(-8, 8, scales.shape, generator=generator).to(torch.int8) if zeros else None
    return QuantizedTensor(kind, numbers, scales if kind is Codes.FLOAT8 else scales.half(), points)
