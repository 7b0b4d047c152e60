"""Packed matrices: of few rows they should cost their codes."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from umbel.srt.kernels.triton import reference
from umbel.srt.kernels.triton.quantized import quantized_linear
from umbel.srt.layers.quantized import Codes, QuantizedTensor

from ..figures import Unit
from .batches import normal
from .sizes import Sizes
from .small import DTYPE, GROUP
from .subject import Subject

Compared = Callable[[], tuple[torch.Tensor, torch.Tensor]]  # what is had, and what is expected
ROW_MUST, ROW_STRETCH = 75.0, 88.0  # % of bandwidth, of one row
_ROWS = (1, 32)
_TIMES = 2  # matrices in one graph: more than a cache holds


@dataclass(frozen=True, slots=True)
class Form:
    """One packed format. group: inputs that share a scale; where it does not divide the inputs, a part of it does."""

    name: str
    kind: Codes
    group: int
    zeros: bool = False

    def matrix(self, outputs: int, inputs: int, device: torch.device, *, seed: int = 0) -> QuantizedTensor:
        """Makes random codes, such that products are about as large as what goes in."""
        generator = torch.Generator(device).manual_seed(seed)
        columns = inputs * self.kind.bits // 8
        codes = torch.randint(256, (outputs, columns), generator=generator, device=device, dtype=torch.uint8)
        groups = inputs // math.gcd(self.group, inputs)
        if self.kind is Codes.E2M1:
            exponents = torch.full((outputs, groups), 119, device=device, dtype=torch.uint8)  # 2⁻⁸
            return QuantizedTensor(self.kind, codes, exponents.view(torch.float8_e8m0fnu))
        scales = torch.full((outputs, groups), inputs**-0.5, device=device)
        if self.kind is Codes.FLOAT8:
            codes &= 0xBF  # numbers below 2, none of which is no number
            return QuantizedTensor(self.kind, codes.view(torch.float8_e4m3fn), scales)
        zeros = torch.ones((outputs, groups), device=device, dtype=torch.int8) if self.zeros else None
        return QuantizedTensor(self.kind, codes, (scales / 8).half() if self.kind is Codes.INT4 else scales, zeros)


FORMS = (
    Form("AWQ", Codes.INT4, 128, zeros=True),
    Form("FP8 in blocks", Codes.FLOAT8, 128),
    Form("MXFP4", Codes.E2M1, 32),
    Form("NF4", Codes.NF4, 64),
)


def packed_products(sizes: Sizes, device: torch.device) -> Iterator[Subject]:
    """Rows of a decode step with the largest matrix of a layer, gates and ups."""
    for form in FORMS:
        for rows in _ROWS:
            yield _product(form, rows, sizes, device)


def _product(form: Form, rows: int, sizes: Sizes, device: torch.device) -> Subject:
    x = normal(rows, sizes.hidden, device=device, dtype=DTYPE)
    weights = [form.matrix(2 * sizes.width, sizes.hidden, device, seed=seed) for seed in range(_TIMES)]

    def work() -> None:
        for weight in weights:
            quantized_linear(x, weight)

    return Subject(
        group=GROUP,
        name=f"product of {rows} {'row' if rows == 1 else 'rows'} with {2 * sizes.width} of {sizes.hidden}, "
        f"{form.name}",
        unit=Unit.BANDWIDTH,
        work=work,
        size=bytes_of(weights[0]),
        times=_TIMES,
        must=ROW_MUST if rows == 1 else None,
        stretch=ROW_STRETCH if rows == 1 else None,
        note=f"of {_TIMES} in one graph",
    )


def packed_comparisons(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, Compared]]:
    """Yields names, and work that returns a result and that of the reference in float32."""
    for form in FORMS:
        weight = form.matrix(2 * sizes.width, sizes.hidden, device)
        for rows in _ROWS:
            yield f"product of {rows} with {form.name}", partial(_compare, weight, rows, sizes, device)


def _compare(
    weight: QuantizedTensor, rows: int, sizes: Sizes, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    x = normal(rows, sizes.hidden, device=device, dtype=DTYPE, seed=7)
    return quantized_linear(x, weight), reference.quantized_linear(x.float(), weight)


def bytes_of(weight: torch.Tensor | QuantizedTensor) -> int:
    """Returns what a product has to read of a matrix."""
    if isinstance(weight, torch.Tensor):
        return weight.nbytes
    zeros = 0 if weight.zeros is None else weight.zeros.nbytes
    return weight.codes.nbytes + weight.scales.nbytes + zeros
