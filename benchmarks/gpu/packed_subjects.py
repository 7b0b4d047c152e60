"""Packed matrices and packed experts: of few rows they should cost their codes, of many their products."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from umbel.srt.kernels.triton import reference
from umbel.srt.kernels.triton.moe import fused_experts
from umbel.srt.kernels.triton.quantized import quantized_linear
from umbel.srt.layers.quantized import Codes, QuantizedTensor

from .batches import normal
from .figures import Unit
from .sizes import ExpertShape, Sizes
from .small_subjects import DTYPE, EXPERTS, GROUP, PRODUCT_MUST, PRODUCT_STRETCH, numbers_of, orders
from .subjects import Subject

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


def packed_experts(sizes: Sizes, device: torch.device) -> Iterator[Subject]:
    """A whole prompt, and one token, layer after layer: each goes through experts that are not in the cache."""
    for shape in sizes.packed:
        for form in FORMS:
            gate_up, down = _stacks(form, shape, device)
            yield _prompt(form, shape, gate_up, down, sizes.prompt, device)
            yield _single(form, shape, gate_up, down, device)


def _stacks(form: Form, shape: ExpertShape, device: torch.device) -> tuple[QuantizedTensor, QuantizedTensor]:
    gate_up = form.matrix(shape.experts * 2 * shape.width, shape.hidden, device, seed=1)
    return gate_up, form.matrix(shape.experts * shape.hidden, shape.width, device, seed=2)


def _prompt(
    form: Form,
    shape: ExpertShape,
    gate_up: QuantizedTensor,
    down: QuantizedTensor,
    tokens: int,
    device: torch.device,
) -> Subject:
    x = normal(tokens, shape.hidden, device=device, dtype=DTYPE)
    weights = torch.full((tokens, shape.top_k), 1 / shape.top_k, device=device)
    chosen = orders(shape, tokens, device)[:, : shape.top_k].contiguous()
    share = min(1.0, tokens * shape.top_k / shape.experts)
    return Subject(
        group=EXPERTS,
        name=f"{shape.name}, {form.name}, {tokens} tokens",
        unit=Unit.RATE,
        work=lambda: fused_experts(x, gate_up, down, weights, chosen, activation="silu"),
        size=share * (bytes_of(gate_up) + bytes_of(down)) + 2 * x.nbytes,
        operations=2 * tokens * shape.top_k * numbers_of(shape),
        must=PRODUCT_MUST,
        stretch=PRODUCT_STRETCH,
    )


def _single(
    form: Form, shape: ExpertShape, gate_up: QuantizedTensor, down: QuantizedTensor, device: torch.device
) -> Subject:
    x = normal(1, shape.hidden, device=device, dtype=DTYPE)
    weights = torch.full((1, shape.top_k), 1 / shape.top_k, device=device)
    layers = shape.experts // shape.top_k
    chosen = [one.contiguous() for one in orders(shape, 1, device).split(shape.top_k, dim=1)[:layers]]

    def work() -> None:
        for one in chosen:
            fused_experts(x, gate_up, down, weights, one, activation="silu")

    return Subject(
        group=EXPERTS,
        name=f"{shape.name}, {form.name}, 1 token",
        unit=Unit.BANDWIDTH,
        work=work,
        size=(bytes_of(gate_up) + bytes_of(down)) * shape.top_k / shape.experts + 2 * x.nbytes,
        times=layers,
        must=ROW_MUST,
        note=f"of {layers} layers in one graph",
    )


def packed_comparisons(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yields names, results, and those of the references in float32."""
    for form in FORMS:
        weight = form.matrix(2 * sizes.width, sizes.hidden, device)
        for rows in _ROWS:
            x = normal(rows, sizes.hidden, device=device, dtype=DTYPE, seed=7)
            expected = reference.quantized_linear(x.float(), weight)
            yield f"product of {rows} with {form.name}", quantized_linear(x, weight), expected
    for shape in sizes.packed:
        weights = torch.full((9, shape.top_k), 1 / shape.top_k, device=device)
        chosen = orders(shape, 9, device)[:, : shape.top_k].contiguous()
        for form in FORMS:
            stacks = _stacks(form, shape, device)
            for tokens in (9, 1):
                x, some = normal(tokens, shape.hidden, device=device, dtype=DTYPE), (weights[:tokens], chosen[:tokens])
                actual = fused_experts(x, *stacks, *some, activation="silu")
                expected = reference.fused_experts(x.float(), *stacks, *some, activation="silu")
                yield f"experts, {shape.name}, {form.name}" + (", 1 token" if tokens == 1 else ""), actual, expected


def bytes_of(weight: QuantizedTensor) -> int:
    zeros = 0 if weight.zeros is None else weight.zeros.nbytes
    return weight.codes.nbytes + weight.scales.nbytes + zeros
