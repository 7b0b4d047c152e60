"""Queries rotated, keys and values in the pool: against the reference, and against what the torch decoder does."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from umbel.srt.kernels.triton import reference, rope
from umbel.srt.kernels.triton.tuning import read_tuning, tuned
from umbel.srt.layers.linear import HeadNorm, RMSNorm
from umbel.srt.layers.rope import Rope, RopeConfig, RopeType, apply_rope, rope_table

from .closeness import DTYPES, TOLERANCES, random, relative_error

ROPE = RopeConfig(RopeType.DEFAULT, 10_000.0)
SLOTS, POSITIONS = 40, 64
POSITIONS_OF_ROWS = [0, 63, 5, 5, 17]
SLOTS_OF_ROWS = [3, 39, 7, 21, 1]


@pytest.fixture(autouse=True)
def _on_the_device(device: torch.device) -> Iterator[None]:
    with device:
        yield


def pool(kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that nobody has written to: 1 everywhere."""
    shape = (SLOTS, kv_heads, head_dim)
    return torch.ones(shape).to(dtype), torch.ones(shape).to(dtype)


def head_norm(head_dim: int, dtype: torch.dtype, *, centered: bool) -> HeadNorm:
    return HeadNorm(random(head_dim, dtype=dtype, seed=5), random(head_dim, dtype=dtype, seed=6), 1e-6, centered)


def places() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(POSITIONS_OF_ROWS), torch.tensor(SLOTS_OF_ROWS)


CASES = [
    *((dtype, normed, (3, 1, 20)) for dtype in DTYPES for normed in ("not", "plain", "centered")),
    *((torch.bfloat16, "plain", shape) for shape in ((4, 2, 64), (5, 2, 16), (1, 1, 256))),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("dtype", "normed", "shape"), CASES, ids=str)
def test_heads_are_normed_turned_and_stored_as_in_torch(
    dtype: torch.dtype, normed: str, shape: tuple[int, int, int]
) -> None:
    heads, kv_heads, head_dim = shape
    qkv = random(5, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    table = rope_table(ROPE, head_dim, POSITIONS, dtype=dtype, device=torch.get_default_device())
    norm = None if normed == "not" else head_norm(head_dim, dtype, centered=normed == "centered")
    pools, expected_pools = pool(kv_heads, head_dim, dtype), pool(kv_heads, head_dim, dtype)
    actual = rope.rope_and_store(qkv, *places(), table, *pools, head_norm=norm)
    expected = reference.rope_and_store(qkv, *places(), table, *expected_pools, head_norm=norm)
    assert actual.shape == (5, heads, head_dim)
    assert actual.is_contiguous()
    for got, wanted in zip((actual, *pools), (expected, *expected_pools), strict=True):
        assert got.dtype is dtype
        assert relative_error(got, wanted) < TOLERANCES[dtype]
    assert torch.equal(pools[1], expected_pools[1]), "values are copied"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.75, 1.0])
def test_some_dimensions_of_a_head_turn_and_neighbours_may_turn_together(
    fraction: float, interleaved: bool, normed: bool
) -> None:
    kind = RopeType.DEFAULT if fraction else RopeType.NONE
    config = RopeConfig(kind, 10_000.0, fraction=fraction, interleaved=interleaved)
    rotated = config.rotated(16)
    qkv, norm = random(5, 4 * 16), head_norm(16, torch.float32, centered=False) if normed else None
    table = rope_table(config, 16, POSITIONS, dtype=torch.float32, device=torch.get_default_device())
    pools, expected_pools = pool(1, 16, torch.float32), pool(1, 16, torch.float32)
    actual = rope.rope_and_store(
        qkv, *places(), table, *pools, head_norm=norm, rotated=rotated, interleaved=interleaved
    )
    expected = reference.rope_and_store(
        qkv, *places(), table, *expected_pools, head_norm=norm, rotated=rotated, interleaved=interleaved
    )
    for got, wanted in zip((actual, *pools), (expected, *expected_pools), strict=True):
        assert relative_error(got, wanted) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_are_normed_and_gates_are_passed_over_as_in_torch(dtype: torch.dtype) -> None:
    qkv = random(5, (2 * 3 + 2) * 16, dtype=dtype)  # three queries, each with a gate
    table = rope_table(ROPE, 16, POSITIONS, dtype=dtype, device=torch.get_default_device())
    norm = replace(head_norm(16, dtype, centered=False), value_weight=random(16, dtype=dtype, seed=7))
    pools, expected_pools = pool(1, 16, dtype), pool(1, 16, dtype)
    actual = rope.rope_and_store(qkv, *places(), table, *pools, head_norm=norm, gated=True)
    expected = reference.rope_and_store(qkv, *places(), table, *expected_pools, head_norm=norm, gated=True)
    assert actual.shape == (5, 3, 16)
    for got, wanted in zip((actual, *pools), (expected, *expected_pools), strict=True):
        assert relative_error(got, wanted) < TOLERANCES[dtype]
    ungated = torch.cat([qkv.view(5, 8, 16)[:, [0, 2, 4]], qkv.view(5, 8, 16)[:, 6:]], dim=1).flatten(1)
    assert torch.equal(rope.rope_and_store(ungated, *places(), table, *pools, head_norm=norm), actual)
    values = RMSNorm(norm.value_weight, eps=1e-6, centered=False)(qkv.view(5, 8, 16)[:, 7:])
    assert relative_error(pools[1][SLOTS_OF_ROWS], values) < TOLERANCES[dtype]


def test_rows_of_queries_alone_store_nothing() -> None:
    qkv, norm = random(5, 3 * 16), head_norm(16, torch.float32, centered=False)
    table = rope_table(ROPE, 16, POSITIONS, dtype=torch.float32, device=torch.get_default_device())
    alone = rope.rope_and_store(qkv, *places(), table, None, None, head_norm=norm)
    assert relative_error(alone, reference.rope_and_store(qkv, *places(), table, None, None, head_norm=norm)) < 1e-6
    whole = torch.cat([qkv, random(5, 2 * 16, seed=3)], dim=1)
    queries = rope.rope_and_store(whole, *places(), table, *pool(1, 16, torch.float32), head_norm=norm)
    assert torch.equal(alone, queries)


def test_neighbours_turn_as_complex_numbers() -> None:
    config = RopeConfig(RopeType.DEFAULT, 10_000.0, fraction=0.5, interleaved=True)
    heads, positions = random(5, 3, 16), places()[0]
    turned = apply_rope(
        heads, Rope(config, 16, torch.get_default_device()).angles(positions, torch.float32), interleaved=True
    )
    angle = positions[:, None] * 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
    expected = torch.view_as_complex(heads[..., :8].unflatten(-1, (4, 2))) * torch.exp(1j * angle)[:, None]
    assert relative_error(turned[..., :8], torch.view_as_real(expected).flatten(-2)) < 1e-6
    assert torch.equal(turned[..., 8:], heads[..., 8:])


def test_the_reference_does_what_the_decoder_in_torch_does() -> None:
    qkv = random(5, 8 * 32, dtype=torch.bfloat16)
    table = rope_table(ROPE, 32, POSITIONS, dtype=torch.bfloat16, device=torch.get_default_device())
    norm = head_norm(32, torch.bfloat16, centered=True)
    keys, values = pool(2, 32, torch.bfloat16)
    queries = reference.rope_and_store(qkv, *places(), table, keys, values, head_norm=norm)

    heads = qkv.view(5, 8, 32)
    weight = torch.cat([norm.query_weight.expand(4, -1), norm.key_weight.expand(2, -1)])
    angles = Rope(ROPE, 32, torch.get_default_device()).angles(places()[0], torch.bfloat16)
    rotated = apply_rope(RMSNorm(weight, eps=1e-6, centered=True)(heads[:, :6]), angles)
    assert torch.equal(queries, rotated[:, :4])
    assert torch.equal(keys[SLOTS_OF_ROWS], rotated[:, 4:])
    assert torch.equal(values[SLOTS_OF_ROWS], heads[:, 6:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_in_float8_cuts_numbers_off(dtype: torch.dtype) -> None:
    qkv = random(5, 4 * 32, dtype=dtype) * 200
    table = rope_table(ROPE, 32, POSITIONS, dtype=dtype, device=torch.get_default_device())
    pools, expected_pools = pool(1, 32, torch.float8_e4m3fn), pool(1, 32, torch.float8_e4m3fn)
    rope.rope_and_store(qkv, *places(), table, *pools)
    reference.rope_and_store(qkv, *places(), table, *expected_pools)
    for got, wanted in zip(pools, expected_pools, strict=True):
        assert float(got.float().abs().max()) <= 448.0
        differ = (got.view(torch.uint8) != wanted.view(torch.uint8)).float().mean()
        assert float(differ) < 0.01, "a sum in another order may fall on the other side of a tie"
        assert relative_error(got.float(), wanted.float()) < 0.08
    assert torch.equal(pools[1].view(torch.uint8), expected_pools[1].view(torch.uint8)), "values have no sums"
    assert float(pools[0].float().abs().max()) == 448.0, "something was cut off"


def test_only_the_slots_of_the_rows_are_written() -> None:
    qkv, table = (
        random(5, 4 * 16),
        rope_table(ROPE, 16, POSITIONS, dtype=torch.float32, device=torch.get_default_device()),
    )
    keys, values = pool(1, 16, torch.float32)
    rope.rope_and_store(qkv, *places(), table, keys, values)
    others = torch.tensor([slot for slot in range(SLOTS) if slot not in SLOTS_OF_ROWS])
    assert torch.equal(keys[others], torch.ones(len(others), 1, 16))
    assert torch.equal(values[others], torch.ones(len(others), 1, 16))


def test_many_rows_are_cut_into_other_programs_with_the_same_result() -> None:
    qkv = random(5, 12 * 16)
    table = rope_table(ROPE, 16, POSITIONS, dtype=torch.float32, device=torch.get_default_device())
    few, many = pool(2, 16, torch.float32), pool(2, 16, torch.float32)
    expected = rope.rope_and_store(qkv, *places(), table, *few)
    with tuned(qkv.device, rope=replace(read_tuning().rope, few_rows=4)):
        assert torch.equal(rope.rope_and_store(qkv, *places(), table, *many), expected)
    assert torch.equal(many[0], few[0])
    assert torch.equal(many[1], few[1])


def test_rows_may_lie_apart_and_none_are_no_work() -> None:
    table = rope_table(ROPE, 16, POSITIONS, dtype=torch.float32, device=torch.get_default_device())
    wide = random(5, 100)
    pools, expected_pools = pool(1, 16, torch.float32), pool(1, 16, torch.float32)
    actual = rope.rope_and_store(wide[:, 10:74], *places(), table, *pools)
    assert (
        relative_error(actual, reference.rope_and_store(wide[:, 10:74].contiguous(), *places(), table, *expected_pools))
        < 1e-6
    )
    nothing = torch.empty(0, dtype=torch.int64)
    assert rope.rope_and_store(wide[:0, :64], nothing, nothing, table, *pools).shape == (0, 2, 16)


def test_a_table_holds_what_a_step_would_compute() -> None:
    table = rope_table(ROPE, 24, 9000, dtype=torch.bfloat16, device=torch.get_default_device())  # more than one part
    positions = torch.tensor([0, 1, 8191, 8192, 8999])
    cos, sin = Rope(ROPE, 24, torch.get_default_device()).angles(positions, torch.bfloat16)
    assert torch.equal(table[positions, :12], cos[:, 0, :12])
    assert torch.equal(table[positions, 12:], sin[:, 0, 12:])
