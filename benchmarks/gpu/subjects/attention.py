"""Attention: decode steps as captured graphs run them, prompts, and branches that share a prefix."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.nn import functional
from umbel.srt.attention.backend import AttentionGeometry
from umbel.srt.attention.long_prompts import attend_long
from umbel.srt.cache.kv_pool import KVPool
from umbel.srt.kernels.triton.attention_backend import TritonBackend, TritonPlan, Ways
from umbel.srt.runners.cuda.device import accelerator_for
from umbel.srt.runners.cuda.slot_table import SlotTable

from ..figures import Unit
from ..hardware import Limits
from .batches import Rows, Step, nested_step, normal, pool_for, step_of
from .sizes import Decode, Extend, Fork, Sizes
from .subject import Subject, Work

GROUP = "attention"
STREAM_MUST, STREAM_STRETCH = 75.0, 88.0  # % of bandwidth
SINGLE_MUST, SINGLE_STRETCH = 12.0, 7.0  # µs, the merge included; more where reading the keys takes as long
FORK_SHARE = 0.8  # of what bytes allow
ALL = Ways()
WITHOUT = {
    "the merge is a launch of its own": Ways(fused=False),
    "tiles of 32 query vectors": Ways(wide=False),
    "items by turns": Ways(balanced=False),
}


def attention_subjects(sizes: Sizes, limits: Limits, device: torch.device) -> Iterator[Subject]:
    """One at a time: their pools would not fit together."""
    for decode in sizes.streams:
        yield stream(decode, device)
    for extend in sizes.extends:
        yield prompt(extend, device)
    for extend in sizes.long_prompts:
        yield gathered_prompt(extend, device)
    for fork in sizes.forks:
        yield branches(fork, sizes.layers, device)
        for words, ways in WITHOUT.items():
            yield ablation(fork, words, ways, sizes.layers, device)
    for decode in sizes.singles:
        yield single(decode, sizes.layers, limits, device)


def stream(decode: Decode, device: torch.device) -> Subject:
    """A step that reads more keys than any cache holds."""
    geometry = decode.geometry
    step = step_of([Rows(decode.keys - 1)] * decode.sequences)
    pool = pool_for(step.slots, geometry, decode.dtype, device)
    return Subject(
        group=GROUP,
        name=f"decode, {_words(geometry)}, {decode.sequences} sequences of {decode.keys} keys",
        unit=Unit.BANDWIDTH,
        work=decode_work(step, pool, geometry, decode.dtype, device),
        size=decode.sequences * decode.keys * pool.geometry.bytes_per_slot,
        must=STREAM_MUST,
        stretch=STREAM_STRETCH,
        beside=_torch_decode(decode, device),
        note="beside: torch, keys in one piece",
    )


def single(decode: Decode, layers: int, limits: Limits, device: torch.device) -> Subject:
    """One sequence, through layers that each have keys of their own."""
    geometry = decode.geometry
    step = step_of([Rows(decode.keys - 1)] * decode.sequences)
    pool = pool_for(step.slots, geometry, decode.dtype, device, layers=layers)
    size = decode.sequences * decode.keys * pool.geometry.bytes_per_slot / layers
    reading = limits.seconds(size, 0.0) * 1e6
    return Subject(
        group=GROUP,
        name=f"decode of one layer, {_words(geometry)}, one sequence of {decode.keys} keys",
        unit=Unit.MICROSECONDS,
        work=decode_work(step, pool, geometry, decode.dtype, device),
        size=size,
        times=layers,
        must=max(SINGLE_MUST, reading / STREAM_MUST * 100),
        stretch=max(SINGLE_STRETCH, reading / STREAM_STRETCH * 100),
        note=f"of {layers} layers in one graph",
    )


def prompt(extend: Extend, device: torch.device) -> Subject:
    """Rows that see the prefix and each other."""
    geometry = extend.geometry
    ours, _, size = _prompt_works(extend, device)
    return Subject(
        group=GROUP,
        name=f"prompt of {_rows(extend)}, {_words(geometry)}",
        unit=Unit.RATE,
        work=ours,
        size=size,
        operations=_prompt_operations(extend),
        must=extend.must,
        stretch=extend.stretch,
        beside=None if extend.prefix else _torch_prompt(extend, device),
        note="" if extend.prefix else "beside: torch, keys in one piece",
    )


def gathered_prompt(extend: Extend, device: torch.device) -> Subject:
    """The same by torch's kernel on gathered keys, as steps of long prompts go (srt/attention/long_prompts.py)."""
    ours, torchs, size = _prompt_works(extend, device)
    return Subject(
        group=GROUP,
        name=f"prompt of {_rows(extend)} on gathered keys, {_words(extend.geometry)}",
        unit=Unit.RATE,
        work=torchs,
        size=size,
        operations=_prompt_operations(extend),
        beside=ours,
        note="torch's kernel; beside: ours",
    )


def _prompt_works(extend: Extend, device: torch.device) -> tuple[Work, Work, int]:
    """Returns a prompt by our kernel, the same by torch's on gathered keys, and the bytes that both must move."""
    geometry, dtype = extend.geometry, torch.bfloat16
    step = step_of([Rows(extend.prefix, extend.rows)])
    pool = pool_for(step.slots, geometry, dtype, device)
    queries = normal(extend.rows, geometry.heads, geometry.head_dim, device=device, dtype=dtype)
    slots, scale = torch.from_numpy(step.batch.slots[0]).to(device), geometry.head_dim**-0.5
    out = torch.empty_like(queries)
    return (
        prompt_work(step, pool, geometry, dtype, device),
        lambda: attend_long(queries, pool.keys[0], pool.values[0], slots, scale=scale, out=out),
        (extend.prefix + extend.rows) * pool.geometry.bytes_per_slot + 2 * queries.nbytes,
    )


def _prompt_operations(extend: Extend) -> int:
    seen = extend.rows * extend.prefix + extend.rows * (extend.rows + 1) // 2  # pairs of a row and a key
    return 4 * seen * extend.geometry.heads * extend.geometry.head_dim


def _rows(extend: Extend) -> str:
    return f"{extend.rows} behind {extend.prefix} keys" if extend.prefix else str(extend.rows)


def branches(fork: Fork, layers: int, device: torch.device) -> Subject:
    """Keys that branches share are read once; the plain kernel reads them for each.

    Through layers that each have keys of their own, as a step goes: of a single one, code and plan would have to come
    from memory first, which takes as long as the keys of some of these.
    """
    geometry, dtype = fork.geometry, torch.bfloat16
    on, off = (nested_step(fork.levels, tree=tree) for tree in (True, False))
    pool = pool_for(on.slots, geometry, dtype, device, layers=layers)
    most = sum(map(len, on.batch.slots)) / (on.slots - 1)
    return Subject(
        group=GROUP,
        name=_tree(fork),
        unit=Unit.TIMES,
        work=decode_work(on, pool, geometry, dtype, device),
        base=decode_work(off, pool, geometry, dtype, device),
        size=on.slots * pool.geometry.bytes_per_slot,
        must=fork.must,
        stretch=FORK_SHARE * most,
        most=most,
        note=f"faster than without sharing, {layers} layers in one graph",
    )


def ablation(fork: Fork, words: str, ways: Ways, layers: int, device: torch.device) -> Subject:
    """The same tree in one way less: how often faster all ways together are."""
    geometry, dtype = fork.geometry, torch.bfloat16
    step = nested_step(fork.levels)
    pool = pool_for(step.slots, geometry, dtype, device, layers=layers)
    return Subject(
        group=GROUP,
        name=f"{_tree(fork)}: {words}",
        unit=Unit.TIMES,
        work=decode_work(step, pool, geometry, dtype, device),
        base=decode_work(step, pool, geometry, dtype, device, ways=ways),
        size=step.slots * pool.geometry.bytes_per_slot,
        note=f"the time so, in those of the whole, {layers} layers in one graph",
    )


def decode_work(
    step: Step,
    pool: KVPool,
    geometry: AttentionGeometry,
    dtype: torch.dtype,
    device: torch.device,
    *,
    ways: Ways = ALL,
) -> Work:
    """All layers of the pool, planned as for a captured graph. The work returns the last one's results."""
    backend = TritonBackend(geometry, device, dtype=dtype, kv_dtype=pool.geometry.dtype, ways=ways)
    table = SlotTable(accelerator_for(device), sum(map(len, step.batch.slots)) + 1, windows=False)
    backend.use_table(table)
    plan: TritonPlan = backend.reserve(None, rows=step.batch.rows)
    backend.plan_into(plan, replace(step.batch, places=table.place(step.batch)), None)
    queries = normal(step.batch.rows, geometry.heads, geometry.head_dim, device=device, dtype=dtype)
    out = torch.empty_like(queries)

    def work() -> torch.Tensor:
        for layer in range(len(pool.geometry.layers)):
            backend.attend(layer, queries, pool, plan, scale=geometry.head_dim**-0.5, out=out)
        return out

    return work


def prompt_work(
    step: Step, pool: KVPool, geometry: AttentionGeometry, dtype: torch.dtype, device: torch.device
) -> Work:
    """The first layer of the pool, in a step that is planned for it alone. The work returns its results."""
    backend = TritonBackend(geometry, device, dtype=dtype, kv_dtype=pool.geometry.dtype)
    plan = backend.plan(step.batch, None)
    queries = normal(step.batch.rows, geometry.heads, geometry.head_dim, device=device, dtype=dtype)
    out = torch.empty_like(queries)
    return lambda: backend.attend(0, queries, pool, plan, scale=geometry.head_dim**-0.5, out=out)


def _torch_decode(decode: Decode, device: torch.device) -> Work:
    geometry, dtype = decode.geometry, decode.dtype
    keys, values = (
        normal(decode.sequences, geometry.kv_heads, decode.keys, geometry.head_dim, device=device, dtype=dtype)
        for _ in range(2)
    )
    queries = normal(decode.sequences, geometry.heads, 1, geometry.head_dim, device=device, dtype=dtype)
    return lambda: functional.scaled_dot_product_attention(queries, keys, values, enable_gqa=geometry.group > 1)


def _torch_prompt(extend: Extend, device: torch.device) -> Work:
    geometry = extend.geometry
    shape = (extend.rows, geometry.head_dim)
    queries, keys, values = (
        normal(1, heads, *shape, device=device, dtype=torch.bfloat16)
        for heads in (geometry.heads, geometry.kv_heads, geometry.kv_heads)
    )
    return lambda: functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=geometry.group > 1
    )


def _tree(fork: Fork) -> str:
    nodes = f" behind {fork.between[0]} nodes of {fork.between[1]}" if fork.between[0] else ""
    return f"{fork.branches} branches of {fork.own} keys{nodes} behind {fork.shared}, {_words(fork.geometry)}"


def _words(geometry: AttentionGeometry) -> str:
    return f"{geometry.heads}/{geometry.kv_heads} heads of {geometry.head_dim}"
