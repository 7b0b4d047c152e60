"""Mixtures of experts, in floats and packed: a whole prompt, where products count, and one token, where weights do."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from umbel.srt.kernels.triton import reference
from umbel.srt.kernels.triton.moe import fused_experts
from umbel.srt.layers.quantized import QuantizedTensor

from ..figures import Unit
from .batches import normal
from .packed import FORMS, ROW_MUST, Compared, Form, bytes_of
from .sizes import ExpertShape, Sizes
from .small import DTYPE
from .subject import Subject

GROUP = "experts"
PRODUCT_MUST, PRODUCT_STRETCH = 200.0, 260.0  # TFLOPS
SINGLE_MUST = 70.0  # % of bandwidth, of one token


@dataclass(frozen=True, slots=True)
class Experts:
    """The weights of one layer. single_must: % of bandwidth for one token."""

    shape: ExpertShape
    name: str
    gate_up: torch.Tensor | QuantizedTensor
    down: torch.Tensor | QuantizedTensor
    single_must: float

    @property
    def size(self) -> int:
        return bytes_of(self.gate_up) + bytes_of(self.down)


def dense_experts(shape: ExpertShape, device: torch.device) -> Experts:
    gate_up = normal(shape.experts, 2 * shape.width, shape.hidden, device=device, dtype=DTYPE) * shape.hidden**-0.5
    down = normal(shape.experts, shape.hidden, shape.width, device=device, dtype=DTYPE) * shape.width**-0.5
    return Experts(shape, shape.name, gate_up, down, SINGLE_MUST)


def expert_subjects(sizes: Sizes, device: torch.device) -> Iterator[Subject]:
    for shape in sizes.experts:
        layer = dense_experts(shape, device)
        yield prompt(layer, sizes.prompt, device)
        yield single(layer, device)


def packed_experts(sizes: Sizes, device: torch.device) -> Iterator[Subject]:
    for shape in sizes.packed:
        for form in FORMS:
            layer = Experts(shape, f"{shape.name}, {form.name}", *stacks_of(form, shape, device), ROW_MUST)
            yield prompt(layer, sizes.prompt, device)
            yield single(layer, device)


def stacks_of(form: Form, shape: ExpertShape, device: torch.device) -> tuple[QuantizedTensor, QuantizedTensor]:
    gate_up = form.matrix(shape.experts * 2 * shape.width, shape.hidden, device, seed=1)
    return gate_up, form.matrix(shape.experts * shape.hidden, shape.width, device, seed=2)


def prompt(layer: Experts, tokens: int, device: torch.device) -> Subject:
    shape = layer.shape
    x = normal(tokens, shape.hidden, device=device, dtype=DTYPE)
    weights = torch.full((tokens, shape.top_k), 1 / shape.top_k, device=device)
    chosen = _orders(shape, tokens, device)[:, : shape.top_k].contiguous()
    share = min(1.0, tokens * shape.top_k / shape.experts)
    return Subject(
        group=GROUP,
        name=f"{layer.name}, {tokens} tokens",
        unit=Unit.RATE,
        work=lambda: fused_experts(x, layer.gate_up, layer.down, weights, chosen, activation="silu"),
        size=share * layer.size + 2 * x.nbytes,
        operations=2 * tokens * shape.top_k * 3 * shape.hidden * shape.width,
        must=PRODUCT_MUST,
        stretch=PRODUCT_STRETCH,
    )


def single(layer: Experts, device: torch.device) -> Subject:
    """One token, layer after layer as in a step: each goes through experts of its own, so none is in the cache."""
    shape = layer.shape
    x = normal(1, shape.hidden, device=device, dtype=DTYPE)
    weights = torch.full((1, shape.top_k), 1 / shape.top_k, device=device)
    layers = shape.experts // shape.top_k
    chosen = [one.contiguous() for one in _orders(shape, 1, device).split(shape.top_k, dim=1)[:layers]]

    def work() -> torch.Tensor:
        for one in chosen:
            result = fused_experts(x, layer.gate_up, layer.down, weights, one, activation="silu")
        return result

    return Subject(
        group=GROUP,
        name=f"{layer.name}, 1 token",
        unit=Unit.BANDWIDTH,
        work=work,
        size=layer.size * shape.top_k / shape.experts + 2 * x.nbytes,
        times=layers,
        must=layer.single_must,
        note=f"of {layers} layers in one graph",
    )


def packed_expert_comparisons(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, Compared]]:
    """Yields names, and work that returns a result and that of the reference in float32."""
    for shape in sizes.packed:
        weights = torch.full((9, shape.top_k), 1 / shape.top_k, device=device)
        chosen = _orders(shape, 9, device)[:, : shape.top_k].contiguous()
        for form in FORMS:
            stacks = stacks_of(form, shape, device)
            for tokens in (9, 1):
                name = f"experts, {shape.name}, {form.name}" + (", 1 token" if tokens == 1 else "")
                yield name, partial(_compare, stacks, weights[:tokens], chosen[:tokens], shape)


def _compare(
    stacks: tuple[QuantizedTensor, QuantizedTensor], weights: torch.Tensor, chosen: torch.Tensor, shape: ExpertShape
) -> tuple[torch.Tensor, torch.Tensor]:
    x = normal(len(chosen), shape.hidden, device=chosen.device, dtype=DTYPE)
    return (
        fused_experts(x, *stacks, weights, chosen, activation="silu"),
        reference.fused_experts(x.float(), *stacks, weights, chosen, activation="silu"),
    )


def _orders(shape: ExpertShape, tokens: int, device: torch.device) -> torch.Tensor:
    """All experts in an order of each token, int32 [tokens, experts]."""
    generator = torch.Generator(device).manual_seed(4)
    return torch.rand(tokens, shape.experts, generator=generator, device=device).argsort(dim=1).int()
