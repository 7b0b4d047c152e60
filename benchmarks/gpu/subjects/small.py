"""Norms, heads, activations and products of few rows: what should cost its bytes."""

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional
from umbel.srt.kernels.triton.linear import act_and_multiply, linear
from umbel.srt.kernels.triton.norm import add_rms_norm, rms_norm
from umbel.srt.kernels.triton.rope import rope_and_store
from umbel.srt.layers.rope import RopeConfig, RopeType, rope_table

from ..figures import Unit
from .batches import normal, pool_for
from .sizes import Sizes
from .subject import Subject

GROUP = "passes"
PASS_MUST, PASS_STRETCH = 75.0, 88.0  # % of bandwidth
FEW_ROWS = (1, 16, 32)
EPS = 1e-5
ROPE = RopeConfig(RopeType.DEFAULT, 10_000.0)
DTYPE = torch.bfloat16


def small_subjects(sizes: Sizes, device: torch.device) -> Iterator[Subject]:
    yield norm(sizes, device)
    yield norm_of_sum(sizes, device)
    yield heads(sizes, device)
    yield activation(sizes, device)
    for rows in FEW_ROWS:
        yield product(rows, sizes, device)


def norm(sizes: Sizes, device: torch.device) -> Subject:
    x = normal(sizes.rows, sizes.hidden, device=device, dtype=DTYPE)
    weight = normal(sizes.hidden, device=device, dtype=DTYPE)
    return Subject(
        group=GROUP,
        name=f"norm of {sizes.rows} rows of {sizes.hidden}",
        unit=Unit.BANDWIDTH,
        work=lambda: rms_norm(x, weight, eps=EPS, centered=False),
        size=2 * x.nbytes,
        must=PASS_MUST,
        stretch=PASS_STRETCH,
    )


def norm_of_sum(sizes: Sizes, device: torch.device) -> Subject:
    x, residual = (normal(sizes.rows, sizes.hidden, device=device, dtype=DTYPE, seed=seed) for seed in (2, 3))
    weight = normal(sizes.hidden, device=device, dtype=DTYPE)
    x *= 1e-3  # what is added again and again stays a number
    return Subject(
        group=GROUP,
        name=f"residual sum and norm of {sizes.rows} rows of {sizes.hidden}",
        unit=Unit.BANDWIDTH,
        work=lambda: add_rms_norm(x, residual, weight, eps=EPS, centered=False),
        size=4 * x.nbytes,
        must=PASS_MUST,
        stretch=PASS_STRETCH,
    )


def heads(sizes: Sizes, device: torch.device) -> Subject:
    geometry, rows = sizes.turned, sizes.rows
    qkv = normal(rows, (geometry.heads + 2 * geometry.kv_heads) * geometry.head_dim, device=device, dtype=DTYPE)
    table = rope_table(ROPE, geometry.head_dim, rows, dtype=DTYPE, device=device)
    pool = pool_for(rows + 1, geometry, DTYPE, device)
    positions = torch.arange(rows, device=device)
    slots = torch.randperm(rows, device=device) + 1
    return Subject(
        group=GROUP,
        name=f"heads of {rows} rows turned and stored, {geometry.heads}/{geometry.kv_heads} of {geometry.head_dim}",
        unit=Unit.BANDWIDTH,
        work=lambda: rope_and_store(qkv, positions, slots, table, pool.keys[0], pool.values[0]),
        size=2 * qkv.nbytes + table.nbytes + positions.nbytes + slots.nbytes,
        must=PASS_MUST,
        stretch=PASS_STRETCH,
    )


def activation(sizes: Sizes, device: torch.device) -> Subject:
    gate_up = normal(sizes.rows, 2 * sizes.width, device=device, dtype=DTYPE)
    return Subject(
        group=GROUP,
        name=f"gate of {sizes.rows} rows of {sizes.width}",
        unit=Unit.BANDWIDTH,
        work=lambda: act_and_multiply(gate_up, "silu"),
        size=1.5 * gate_up.nbytes,
        must=PASS_MUST,
        stretch=PASS_STRETCH,
    )


def product(rows: int, sizes: Sizes, device: torch.device) -> Subject:
    """Of the rows of a decode step with the largest matrix of a layer, gates and ups; several such in one graph."""
    times = 4
    x = normal(rows, sizes.hidden, device=device, dtype=DTYPE)
    shape = 2 * sizes.width, sizes.hidden
    weights = [normal(*shape, device=device, dtype=DTYPE, seed=seed) for seed in range(times)]

    def work(multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        for weight in weights:
            multiply(x, weight)

    return Subject(
        group=GROUP,
        name=f"product of {rows} {'row' if rows == 1 else 'rows'} with {shape[0]} of {shape[1]}",
        unit=Unit.BANDWIDTH,
        work=lambda: work(linear),
        size=weights[0].nbytes,
        times=times,
        must=PASS_MUST,
        stretch=PASS_STRETCH,
        beside=lambda: work(functional.linear),
        note=f"beside: torch; of {times} in one graph",
    )
