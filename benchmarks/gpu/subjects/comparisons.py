"""Each kernel beside its reference, which computes in float32 from the same rounded numbers.

Where pytest is not installed this is the test; where it is, it comes on top, with the shapes of real models.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from umbel.srt.attention.backend import AttentionGeometry, TorchBackend
from umbel.srt.attention.long_prompts import attend_long
from umbel.srt.cache.kv_pool import FLOAT8, KVPool
from umbel.srt.core.batch import Batch
from umbel.srt.kernels.triton import reference
from umbel.srt.kernels.triton.attention_backend import TritonBackend
from umbel.srt.kernels.triton.linear import act_and_multiply, gated, linear
from umbel.srt.kernels.triton.moe import fused_experts, route
from umbel.srt.kernels.triton.norm import add_rms_norm, rms_norm
from umbel.srt.kernels.triton.rope import rope_and_store
from umbel.srt.layers.rope import rope_table
from umbel.srt.runners.cuda.device import accelerator_for
from umbel.srt.runners.cuda.slot_table import SlotTable

from ..figures import Figure, PendingFigure, Unit
from .batches import Rows, forked_step, nested_step, normal, pool_for, step_of
from .experts import packed_expert_comparisons
from .packed import Compared, packed_comparisons
from .sizes import ExpertShape, Sizes
from .small import EPS, FEW_ROWS, ROPE

GROUP = "equality"
MOST = 1e-2  # of the expected values, by their norm
HALVES = (torch.bfloat16, torch.float16)


def comparisons(sizes: Sizes, device: torch.device) -> Iterator[PendingFigure]:
    """Yields the relative error of each kernel."""
    for name, work in _compared(sizes, device):
        yield PendingFigure(name, partial(_figure, name, work))


def _compared(sizes: Sizes, device: torch.device) -> Iterator[tuple[str, Compared]]:
    geometries = dict.fromkeys(case.geometry for cases in (sizes.streams, sizes.extends, sizes.forks) for case in cases)
    for geometry in geometries:
        yield _attention(geometry, torch.bfloat16, torch.bfloat16, device)
    first = next(iter(geometries))
    yield _attention(first, torch.float16, torch.float16, device)
    yield _attention(first, torch.bfloat16, FLOAT8, device)
    for geometry in geometries:
        name = f"branches, {geometry.heads}/{geometry.kv_heads} heads of {geometry.head_dim}"
        yield name, partial(_branches, geometry, device)
        yield f"{name}, three levels in a captured step", partial(_captured_branches, geometry, device)
    for geometry in geometries:
        name = f"a prompt by torch on gathered keys, {geometry.heads}/{geometry.kv_heads} heads of {geometry.head_dim}"
        yield name, partial(_gathered, geometry, device)
    for dtype in HALVES:
        yield from _passes(sizes, dtype, device)
    for shape in sizes.experts:
        yield from _experts(shape, device)
    yield from chain(packed_comparisons(sizes, device), packed_expert_comparisons(sizes, device))


def _attention(
    geometry: AttentionGeometry, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> tuple[str, Compared]:
    """Decodes next to prompts, short and long, with and without something before them."""
    kind = _name(dtype) if kv_dtype is dtype else f"{_name(dtype)}, keys in {_name(kv_dtype)}"

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        step = step_of([Rows(300), Rows(7), Rows(40, 33), Rows(0, 12), Rows(90)])
        pool = pool_for(step.slots, geometry, kv_dtype, device)
        return _attended(step.batch, pool, geometry, dtype, device)

    return f"attention, {geometry.heads}/{geometry.kv_heads} heads of {geometry.head_dim}, {kind}", work


def _branches(geometry: AttentionGeometry, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    step = forked_step(6, 300, 5)
    pool = pool_for(step.slots, geometry, torch.bfloat16, device)
    return _attended(step.batch, pool, geometry, torch.bfloat16, device)


def _captured_branches(geometry: AttentionGeometry, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """By a plan as graphs read it: queues, wide tiles, merges where parts end. Twice: the counters are 0 again."""
    step, dtype = nested_step([(1, 300), (2, 260), (12, 40)]), torch.bfloat16
    pool = pool_for(step.slots, geometry, dtype, device)
    queries = normal(step.batch.rows, geometry.heads, geometry.head_dim, device=device, dtype=dtype)
    scale = geometry.head_dim**-0.5
    ours = TritonBackend(geometry, device, dtype=dtype)
    table = SlotTable(accelerator_for(device), sum(map(len, step.batch.slots)) + 1, windows=False)
    ours.use_table(table)
    plan = ours.reserve(None, rows=step.batch.rows)
    assert ours.plan_into(plan, replace(step.batch, places=table.place(step.batch)), None)
    results = [ours.attend(0, queries, pool, plan, scale=scale) for _ in range(2)]
    reference = TorchBackend(geometry, device, tree_attention=False)
    expected = reference.attend(0, queries.float(), pool, reference.plan(step.batch, None), scale=scale)
    return torch.cat(results), torch.cat([expected, expected])


def _gathered(geometry: AttentionGeometry, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt behind keys that are in the pool, by torch's kernel."""
    step = step_of([Rows(300, 200)])
    pool = pool_for(step.slots, geometry, torch.bfloat16, device)
    queries = normal(step.batch.rows, geometry.heads, geometry.head_dim, device=device, dtype=torch.bfloat16)
    slots, scale = torch.from_numpy(step.batch.slots[0]).to(device), geometry.head_dim**-0.5
    out, reference = torch.empty_like(queries), TorchBackend(geometry, device, tree_attention=False)
    attend_long(queries, pool.keys[0], pool.values[0], slots, scale=scale, out=out)
    return out, reference.attend(0, queries.float(), pool, reference.plan(step.batch, None), scale=scale)


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


def _passes(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Compared]]:
    rows, hidden = 5, sizes.hidden

    def numbers(*shape: int, seed: int) -> torch.Tensor:
        return normal(*shape, device=device, dtype=dtype, seed=seed)

    x, weight, residual = numbers(rows, hidden, seed=1), numbers(hidden, seed=2), numbers(rows, hidden, seed=3)
    yield (
        f"norm, {_name(dtype)}",
        lambda: (
            rms_norm(x, weight, eps=EPS, centered=False),
            reference.rms_norm(x.float(), weight.float(), eps=EPS, centered=False),
        ),
    )

    def norm_of_sum() -> tuple[torch.Tensor, torch.Tensor]:
        expected = reference.add_rms_norm(x.float(), residual.float(), weight.float(), eps=EPS, centered=False)
        return add_rms_norm(x, residual.clone(), weight, eps=EPS, centered=False), expected

    yield f"residual sum and norm, {_name(dtype)}", norm_of_sum
    gate_up = numbers(rows, 2 * sizes.width, seed=4)
    yield (
        f"gate, {_name(dtype)}",
        lambda: (act_and_multiply(gate_up, "silu"), reference.act_and_multiply(gate_up.float(), "silu")),
    )
    matrix = normal(2 * sizes.width, sizes.hidden, device=device, seed=6) * sizes.hidden**-0.5
    for rows in FEW_ROWS:
        name = f"of {rows} {'row' if rows == 1 else 'rows'}, {_name(dtype)}"
        yield f"product {name}", partial(_product, matrix, rows, dtype, gates=False)
        yield f"gates behind a product {name}", partial(_product, matrix, rows, dtype, gates=True)
    yield f"heads turned and stored, {_name(dtype)}", partial(_heads, sizes.turned, dtype, device)


def _product(matrix: torch.Tensor, rows: int, dtype: torch.dtype, *, gates: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """gates: the product is that of gates and ups, which are multiplied."""
    x = normal(rows, matrix.shape[1], device=matrix.device, dtype=dtype, seed=7)
    own = matrix.to(dtype)
    exact = own.double()
    if gates:
        return gated(x, own, None, "silu"), reference.gated(x.double(), exact, None, "silu")
    return linear(x, own), reference.linear(x.double(), exact)


def _heads(
    geometry: AttentionGeometry, dtype: torch.dtype, device: torch.device, rows: int = 5
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, and the keys and values that were stored."""
    width = (geometry.heads + 2 * geometry.kv_heads) * geometry.head_dim
    qkv = normal(rows, width, device=device, dtype=dtype, seed=5)
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
    return results[0], results[1]


def _experts(shape: ExpertShape, device: torch.device) -> Iterator[tuple[str, Compared]]:
    dtype = torch.bfloat16
    logits = normal(9, shape.experts, device=device)

    def routes() -> tuple[torch.Tensor, torch.Tensor]:
        shares, chosen = route(logits, shape.top_k, renormalise=True)
        expected_shares, expected = reference.route(logits, shape.top_k, renormalise=True)
        return shares if torch.equal(chosen, expected) else torch.full_like(shares, torch.nan), expected_shares

    yield f"routes, {shape.name}", routes
    gate_up = normal(shape.experts, 2 * shape.width, shape.hidden, device=device, seed=3) * shape.hidden**-0.5
    down = normal(shape.experts, shape.hidden, shape.width, device=device, seed=4) * shape.width**-0.5
    gate_up, down = gate_up.to(dtype), down.to(dtype)

    def mixed(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        shares, chosen = route(logits, shape.top_k, renormalise=True)
        some = shares[:tokens], chosen[:tokens]
        x = normal(tokens, shape.hidden, device=device, dtype=dtype)
        return (
            fused_experts(x, gate_up, down, *some, activation="silu"),
            reference.fused_experts(x.float(), gate_up.float(), down.float(), *some, activation="silu"),
        )

    for tokens in (9, 1):
        name = f"experts, {shape.name}, {_name(dtype)}" + (", 1 token" if tokens == 1 else "")
        yield name, partial(mixed, tokens)


def _figure(name: str, work: Compared) -> Figure:
    actual, expected = work()
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    return Figure(GROUP, name, Unit.ERROR, error, must=MOST)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
