"""Pools in float8: what is rounded how, and that every engine reads it."""

import pytest
import torch
from umbel.lang.errors import ParameterError
from umbel.lang.runtime_options import Kernels
from umbel.srt.cache.kv_pool import FLOAT8, KVGeometry, KVPool, LayerKV, rounded
from umbel.srt.runners.build import build_runner

from ..models.reference import relative_error
from ..runners.cuda.engines import mixed_steps, on_host, only_last_rows, sequences, tiny_model

GEOMETRY = KVGeometry.uniform(layers=1, kv_heads=2, head_dim=16, dtype=FLOAT8)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_float8_has_three_bits_of_fraction_and_no_infinity() -> None:
    values = torch.tensor([1.0, 1.06, 1.07, 0.02, 300.0, 448.0, 500.0, -1e30, 2.0**-10])
    expected = [1.0, 1.0, 1.125, 0.01953125, 288.0, 448.0, 448.0, -448.0, 0.0]
    assert rounded(values, FLOAT8).float().tolist() == expected
    assert rounded(values.bfloat16(), FLOAT8).float().isfinite().all()
    assert rounded(torch.tensor(float("nan")), FLOAT8).float().isnan()


def test_the_precision_is_the_same_wherever_numbers_lie() -> None:
    """So no scale is needed between 2⁻⁶ and 448."""
    values = torch.logspace(-6, 8.8, 1000, base=2)
    error = (rounded(values, FLOAT8).float() - values).abs() / values
    assert error.max() <= 1 / 16


def test_a_pool_rounds_what_is_written_to_it() -> None:
    pool = KVPool(GEOMETRY, 5, "cpu")
    keys = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(1)) * 100
    pool.write(0, keys, 10 * keys, torch.tensor([4, 2]))
    assert torch.equal(pool.keys[0][[4, 2]].float(), rounded(keys, FLOAT8).float())
    assert pool.values[0].float().abs().max() == 448.0
    assert not pool.keys[0][[0, 1, 3]].float().any()


def test_it_costs_half_of_bfloat16() -> None:
    assert 2 * GEOMETRY.bytes_per_slot == GEOMETRY.rounded_to(torch.bfloat16).bytes_per_slot
    assert GEOMETRY.rounded_to(None) is GEOMETRY


def test_logits_of_a_float8_pool_lie_close_to_those_of_a_float32_pool() -> None:
    config, tensors = tiny_model("qwen 3")
    wide, narrow = (
        build_runner(config, tensors, num_slots=200, dtype="float32", kernels="torch", kv_dtype=kv_dtype)
        for kv_dtype in ("auto", "fp8")
    )
    assert narrow.facts()["kv_dtype"] == "float8_e4m3fn"
    worst = 0.0
    for pieces in mixed_steps():
        batch = only_last_rows(sequences().batch(pieces))
        worst = max(worst, relative_error(narrow.forward(batch).values, wide.forward(batch).values))
    assert 1e-3 < worst < 0.25  # random weights: a trained model's logits change less


def test_the_cuda_engine_rounds_like_torch() -> None:
    config, tensors = tiny_model("qwen 3")
    truth = build_runner(config, tensors, num_slots=200, dtype="float32", kernels="torch", pack=False, kv_dtype="fp8")
    runner = on_host(config, tensors, kv_dtype=FLOAT8)
    for pieces in mixed_steps():
        batch = only_last_rows(sequences().batch(pieces))
        assert relative_error(runner.forward(batch).values, truth.forward(batch).values) < 1e-2


@pytest.mark.parametrize("kernels", ["native"])
def test_the_native_kernels_refuse_it(kernels: Kernels) -> None:
    config, tensors = tiny_model("qwen 3")
    with pytest.raises(ParameterError, match=r'kernels="native": the KV pool would be .*float8_e4m3fn'):
        build_runner(config, tensors, num_slots=200, dtype="float32", kernels=kernels, kv_dtype="fp8")


def test_each_layer_has_keys_and_values_of_its_own_shape() -> None:
    own, latent = LayerKV(2, 16, 8), LayerKV(1, 24, 16, latent=True)
    geometry = KVGeometry((own, latent, LayerKV(2, 16, 8, source=0)), torch.float32)
    assert geometry.bytes_per_slot == 4 * (2 * (16 + 8) + 24)
    pool = KVPool(geometry, 5, "cpu")
    assert [tuple(part.shape) for part in (*pool.keys, *pool.values)] == [
        *((5, 2, 16), (5, 1, 24), (5, 2, 16)),
        *((5, 2, 8), (5, 1, 16), (5, 2, 8)),
    ]
    pool.write(1, torch.arange(24.0).view(1, 1, 24), None, torch.tensor([3]))
    assert pool.values[1][3, 0].tolist() == list(range(16))
    pool.write(0, torch.ones(1, 2, 16), torch.ones(1, 2, 8), torch.tensor([2]))
    assert pool.keys[2][2].min() == pool.values[2][2].min() == 1
