"""The runner: logits of the rows asked for, memory that is reused, packed weights that change nothing."""

import dataclasses

import numpy as np
import pytest
import torch
from umbel.lang.errors import ParameterError
from umbel.srt.cache.kv_pool import KVGeometry, KVPool, size_for_bytes
from umbel.srt.core.batch import Runner, ShortOfMemory
from umbel.srt.layers import linear
from umbel.srt.layers.linear import can_pack
from umbel.srt.models import decoder
from umbel.srt.runners import build, torch_runner
from umbel.srt.runners.build import build_runner, resolve_dtype
from umbel.srt.runners.cpu_runner import CpuRunner
from umbel.srt.runners.memory import room_for_step
from umbel.srt.runners.torch_runner import TorchRunner

from ..models.reference import Piece, Sequences, random_tokens, reference_model, relative_error, tensors_of

NUM_SLOTS = 120
REFERENCE = reference_model("gemma3_text", head_dim=16, sliding_window=5, sliding_window_pattern=3)
CONFIG, TENSORS = REFERENCE.config.to_dict(), tensors_of(REFERENCE)
GEOMETRY = KVGeometry.uniform(layers=3, kv_heads=2, head_dim=16, dtype=torch.float32)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["torch", "native"])
def runner(request: pytest.FixtureRequest) -> TorchRunner | CpuRunner:
    return build_runner(CONFIG, TENSORS, num_slots=NUM_SLOTS, dtype="float32", kernels=request.param)


def sequences() -> Sequences:
    return Sequences([random_tokens(30, 1), random_tokens(17, 2)], NUM_SLOTS)


def test_the_runner_has_the_shape_that_the_scheduler_expects(runner: TorchRunner | CpuRunner) -> None:
    seam: Runner = runner
    assert (seam.vocab_size, seam.context_length, seam.num_slots) == (97, 256, NUM_SLOTS)


def test_only_the_rows_asked_for_get_logits(runner: TorchRunner | CpuRunner) -> None:
    batch = sequences().batch([Piece(0, 0, 30), Piece(1, 0, 17)])
    every = runner.forward(batch).values.clone()
    some = runner.forward(dataclasses.replace(batch, logit_rows=np.array([3, 29, 46]))).values
    assert some.shape == (3, 97)
    assert some.dtype is torch.float32
    assert relative_error(some, every[[3, 29, 46]]) < 1e-5
    assert runner.forward(dataclasses.replace(batch, logit_rows=np.array([], dtype=np.int64))).values.shape == (0, 97)


def test_logits_lie_in_one_buffer_that_the_sampler_may_write_to(runner: TorchRunner | CpuRunner) -> None:
    first = runner.forward(sequences().batch([Piece(0, 0, 5)])).values
    first += 1.0
    second = runner.forward(sequences().batch([Piece(0, 5, 3)])).values
    assert first.data_ptr() == second.data_ptr()


def test_a_buffer_of_unusual_size_is_given_back(
    runner: TorchRunner | CpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_runner, "KEPT_BYTES", 20 * 97 * 4)
    assert runner.forward(sequences().batch([Piece(0, 0, 30)])).values.shape == (30, 97)
    after = runner.forward(sequences().batch([Piece(0, 29, 1)])).values
    assert after.untyped_storage().nbytes() <= 20 * 97 * 4


def test_clear_forgets_every_key(runner: TorchRunner | CpuRunner) -> None:
    runner.forward(sequences().batch([Piece(0, 0, 30)]))
    assert all(keys.any() for keys in runner.pool.keys)
    runner.clear()
    assert not any(part.any() for part in (*runner.pool.keys, *runner.pool.values))


def test_packed_weights_give_the_same_logits() -> None:
    assert can_pack(torch.float32)
    batch = sequences().batch([Piece(0, 0, 30), Piece(1, 0, 17)])
    packed, plain = (
        build_runner(CONFIG, TENSORS, num_slots=NUM_SLOTS, dtype="float32", kernels="torch", pack=pack)
        .forward(batch)
        .values
        for pack in (True, False)
    )
    assert relative_error(packed, plain) < 1e-5


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="this CPU has no packed bfloat16 weights (needs AVX-512)")
def test_packed_bfloat16_weights_give_the_same_logits() -> None:
    batch = sequences().batch([Piece(0, 0, 30), Piece(1, 0, 17)])
    packed, plain = (
        build_runner(CONFIG, TENSORS, num_slots=NUM_SLOTS, dtype="bfloat16", kernels="torch", pack=pack)
        .forward(batch)
        .values
        for pack in (True, False)
    )
    assert relative_error(packed, plain) < 0.02


def test_logits_in_float16_are_those_in_float32() -> None:
    """GPUs before Ampere compute so."""
    batch = sequences().batch([Piece(0, 0, 30), Piece(1, 0, 17)])
    half, exact = (
        build_runner(CONFIG, TENSORS, num_slots=NUM_SLOTS, dtype=dtype, kernels="torch").forward(batch).values.clone()
        for dtype in ("float16", "float32")
    )
    assert relative_error(half, exact) < 0.005


def test_packing_that_this_machine_does_not_offer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "can_pack", lambda dtype: False)
    with pytest.raises(ParameterError, match="cannot pack"):
        build_runner(CONFIG, TENSORS, num_slots=NUM_SLOTS, dtype="float16", kernels="torch", pack=True)


def test_mlp_and_vocabulary_products_in_blocks_give_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = build_runner(CONFIG, TENSORS, num_slots=NUM_SLOTS, dtype="float32", kernels="torch")
    batch = sequences().batch([Piece(0, 0, 30), Piece(1, 0, 17)])
    whole = runner.forward(batch).values.clone()
    monkeypatch.setattr(decoder, "MLP_ROWS", 7)
    monkeypatch.setattr(linear, "HEAD_ROWS", 5)
    monkeypatch.setattr(linear, "HEAD_BLOCK", 13)
    in_blocks = build_runner(CONFIG, TENSORS, num_slots=NUM_SLOTS, dtype="float32", kernels="torch", pack=True)
    assert relative_error(runner.forward(batch).values, whole) < 1e-5
    assert relative_error(in_blocks.forward(batch).values, whole) < 1e-5


@pytest.mark.parametrize("pack", [True, False])
def test_a_file_in_another_dtype_is_the_same_model(pack: bool) -> None:
    """The embedding stays as stored, and only the rows of a step are converted."""
    stored = {name: tensor.bfloat16() for name, tensor in TENSORS.items()}
    converted = {name: tensor.float() for name, tensor in stored.items()}
    batch = sequences().batch([Piece(0, 0, 30), Piece(1, 0, 17)])
    left, right = (
        build_runner(CONFIG, tensors, num_slots=NUM_SLOTS, dtype="float32", kernels="torch", pack=pack)
        .forward(batch)
        .values
        for tensors in (stored, converted)
    )
    assert torch.equal(left, right)


def test_the_pool_takes_as_many_slots_as_its_bytes_hold() -> None:
    assert GEOMETRY.bytes_per_slot == 2 * 3 * 2 * 16 * 4
    runner = build_runner(CONFIG, TENSORS, kv_bytes=400 * GEOMETRY.bytes_per_slot + 5, dtype="float32")
    assert runner.num_slots == 400
    assert runner.pool.keys[2].shape == runner.pool.values[2].shape == (400, 2, 16)


def test_too_little_memory_for_the_pool_says_how_much_to_write() -> None:
    with pytest.raises(ParameterError, match=f"holds 9 tokens .* write at least {257 * 768} bytes for 256 tokens"):
        size_for_bytes(GEOMETRY, 10 * 768)


def test_a_pool_without_a_usable_slot_is_refused() -> None:
    with pytest.raises(ParameterError, match="num_slots=1: write at least 2"):
        KVPool(GEOMETRY, 1, "cpu")


def test_a_pool_larger_than_memory_says_what_to_write() -> None:
    with pytest.raises(ParameterError, match="more than there is; write a smaller pool_tokens"):
        KVPool(GEOMETRY, 1 << 45, "cpu")


@pytest.mark.parametrize(("fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_takes_bfloat16_only_where_the_cpu_multiplies_it(
    fast: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "cpu_multiplies_bfloat16", lambda: fast)
    assert resolve_dtype("auto", torch.device("cpu"), CONFIG) is dtype


@pytest.mark.parametrize(
    ("raised", "short"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_a_step_without_memory_is_told_from_one_that_fails(raised: Exception, short: bool) -> None:
    given = []

    def work() -> None:
        with room_for_step(12, lambda: given.append(1)):
            raise raised

    with pytest.raises(ShortOfMemory if short else RuntimeError) as caught:
        work()
    assert isinstance(caught.value, ShortOfMemory) is short
    assert len(given) == short
