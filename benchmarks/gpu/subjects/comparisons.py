"""Each kernel beside its reference, which computes in float32 from the same rounded numbers.

Where pytest is not installed this is the test; where it is, it comes on top, with the shapes of real models.
"""

from collections.abc import Iterator
from itertools import chain

import torch
from umbel.srt.attention.backend import AttentionGeometry, TorchBackend
from umbel.srt.cache.kv_pool import FLOAT8, KVPool
from umbel.srt.core.batch import Batch
from umbel.srt.kernels.triton import reference
from umbel.srt.kernels.triton.attention_backend import TritonBackend
from umbel.srt.kernels.triton.linear import act_and_multiply, gated, linear
from umbel.srt.kernels.triton.moe import fused_experts, route
from umbel.srt.kernels.triton.norm import add_rms_norm, rms_norm
from umbel.srt.kernels.triton.rope import rope_and_store
from umbel.srt.layers.rope import rope_table

from ..figures import Figure, Unit
from .batches import Rows, forked_step, normal, pool_for, step_of
from .experts import packed_expert_comparisons
from .packed import packed_comparisons
from .sizes import Sizes
from .small import EPS, FEW_ROWS, ROPE

GROUP = "equality"
MOST = 1e-2  # of the expected values, by their norm
HALVES = (torch.bfloat16, torch.float16)


def comparisons(sizes: Sizes, device: torch.device) -> Iterator[Figure]:
    """The relative error of each kernel."""
    geometries = dict.fromkeys(case.geometry for cases in (sizes.streams, sizes.extends, sizes.forks) for case in cases)
    for geometry in geometries:
        yield _attention(geometry, torch.bfloat16, torch.bfloat16, device)
    first = next(iter(geometries))
    yield _attention(first, torch.float16, torch.float16, device)
    yield _attention(first, torch.bfloat16, FLOAT8, device)
    for geometry in geometries:
        yield _branches(geometry, device)
    for dtype in HALVES:
        yield from _passes(sizes, dtype, device)
    yield from _experts(sizes, device)
    for name, actual, expected in chain(packed_comparisons(sizes, device), packed_expert_comparisons(sizes, device)):
        yield _figure(name, actual, expected)


def _attention(geometry: AttentionGeometry, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> Figure:
    """Decoding beside prompts, short and long, with and without something before them."""
    step = step_of([Rows(300), Rows(7), Rows(40, 33), Rows(0, 12), Rows(90)])
    pool = pool_for(step.slots, geometry, kv_dtype, device)
    kind = _name(dtype) if kv_dtype is dtype else f"{_name(dtype)}, keys in {_name(kv_dtype)}"
    return _figure(
        f"attention, {geometry.heads}/{geometry.kv_heads} heads of {geometry.head_dim}, {kind}",
        *_attended(step.batch, pool, geometry, dtype, device),
    )


def _branches(geometry: AttentionGeometry, device: torch.device) -> Figure:
    step = forked_step(6, 300, 5)
    pool = pool_for(step.slots, geometry, torch.bfloat16, device)
    return _figure(
        f"branches, {geometry.heads}/{geometry.kv_heads} heads of {geometry.head_dim}",
        *_attended(step.batch, pool, geometry, torch.bfloat16, device),
    )


def _attended(
    batch: Batch, pool: KVPool, geometry: AttentionGeometry, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    queries = normal(batch.rows, geometry.heads, geometry.head_dim, device=device, dtype=dtype)
    scale = geometry.head_dim**-0.5
    ours = TritonBackend(geometry, device, dtype=dtype, kv_dtype=pool.geometry.dtype)
    reference = TorchBackend(geometry, device, tree_attention=False)
    return (
        ours.attend(0, queries, pool, ours.plan(batch, None), scale=scale),
        reference.attend(0, queries.float(), pool, reference.plan(batch, None), scale=scale),
    )


def _passes(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Figure]:
    rows, hidden = 5, sizes.hidden

    def numbers(*shape: int, seed: int) -> torch.Tensor:
        return normal(*shape, device=device, dtype=dtype, seed=seed)

    x, weight, residual = numbers(rows, hidden, seed=1), numbers(hidden, seed=2), numbers(rows, hidden, seed=3)
    yield _figure(
        f"norm, {_name(dtype)}",
        rms_norm(x, weight, eps=EPS, centered=False),
        reference.rms_norm(x.float(), weight.float(), eps=EPS, centered=False),
    )
    exact = residual.float()
    expected = reference.add_rms_norm(x.float(), exact, weight.float(), eps=EPS, centered=False)
    yield _figure(
        f"residual sum and norm, {_name(dtype)}",
        add_rms_norm(x, residual, weight, eps=EPS, centered=False),
        expected,
    )
    gate_up = numbers(rows, 2 * sizes.width, seed=4)
    yield _figure(
        f"gate, {_name(dtype)}", act_and_multiply(gate_up, "silu"), reference.act_and_multiply(gate_up.float(), "silu")
    )
    yield from _products(sizes, dtype, device)
    geometry = sizes.turned
    qkv = numbers(rows, (geometry.heads + 2 * geometry.kv_heads) * geometry.head_dim, seed=5)
    slots, positions = torch.arange(1, rows + 1, device=device), 3 * torch.arange(rows, device=device)
    results = []
    for kind, kernel, numbers_in in (
        (dtype, rope_and_store, qkv),
        (torch.float32, reference.rope_and_store, qkv.float()),
    ):
        table = rope_table(ROPE, geometry.head_dim, 3 * rows, dtype=kind, device=device)
        pool = pool_for(rows + 1, geometry, kind, device)
        queries = kernel(numbers_in, positions, slots, table, pool.keys[0], pool.values[0])
        results.append(torch.cat([queries, pool.keys[0][1:], pool.values[0][1:]], dim=1))
    yield _figure(f"heads turned and stored, {_name(dtype)}", *results)


def _products(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Figure]:
    weight = normal(2 * sizes.width, sizes.hidden, device=device, seed=6) * sizes.hidden**-0.5
    for rows in FEW_ROWS:
        x = normal(rows, sizes.hidden, device=device, dtype=dtype, seed=7)
        own, exact = weight.to(dtype), weight.to(dtype).float()
        name = f"of {rows} {'row' if rows == 1 else 'rows'}, {_name(dtype)}"
        yield _figure(f"product {name}", linear(x, own), reference.linear(x.double(), exact.double()))
        yield _figure(
            f"gates behind a product {name}",
            gated(x, own, None, "silu"),
            reference.gated(x.double(), exact.double(), None, "silu"),
        )


def _experts(sizes: Sizes, device: torch.device) -> Iterator[Figure]:
    dtype = torch.bfloat16
    for shape in sizes.experts:
        logits = normal(9, shape.experts, device=device)
        shares, chosen = route(logits, shape.top_k, renormalise=True)
        expected_shares, expected = reference.route(logits, shape.top_k, renormalise=True)
        same = shares if torch.equal(chosen, expected) else torch.full_like(shares, torch.nan)
        yield _figure(f"routes, {shape.name}", same, expected_shares)
        gate_up = normal(shape.experts, 2 * shape.width, shape.hidden, device=device, seed=3) * shape.hidden**-0.5
        down = normal(shape.experts, shape.hidden, shape.width, device=device, seed=4) * shape.width**-0.5
        gate_up, down = gate_up.to(dtype), down.to(dtype)
        for tokens in (9, 1):
            x = normal(tokens, shape.hidden, device=device, dtype=dtype)
            some = shares[:tokens], chosen[:tokens]
            yield _figure(
                f"experts, {shape.name}, {_name(dtype)}" + (", 1 token" if tokens == 1 else ""),
                fused_experts(x, gate_up, down, *some, activation="silu"),
                reference.fused_experts(x.float(), gate_up.float(), down.float(), *some, activation="silu"),
            )


def _figure(name: str, actual: torch.Tensor, expected: torch.Tensor) -> Figure:
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    return Figure(GROUP, name, Unit.ERROR, error, must=MOST)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
