"""What fits on a device, and what is said when it does not."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from umbel.lang.errors import ModelError, ParameterError
from umbel.srt.cache.kv_pool import FLOAT8, KVGeometry
from umbel.srt.layers.checkpoint import Tensors
from umbel.srt.multimodal.store import VisionStore
from umbel.srt.runners.build import build_runner
from umbel.srt.runners.cuda import device
from umbel.srt.runners.cuda.build import build_cuda_runner, obstacle
from umbel.srt.runners.cuda.decoder import CudaDecoder
from umbel.srt.runners.cuda.device import (
    CudaAccelerator,
    HostAccelerator,
    StepLimits,
    largest_step,
    measured_workspace,
    pool_size,
    probe_size,
    weight_bytes,
)
from umbel.srt.runners.cuda.runner import CudaRunner
from umbel.srt.runners.cuda.slot_table import table_bytes

from ...multimodal.toy_vision import ToyVision
from .engines import in_torch, on_host, tiny_model
from .reference import reference_parts

GEOMETRY = KVGeometry.uniform(layers=3, kv_heads=2, head_dim=16, dtype=torch.float32)
LIMITS = StepLimits(rows=40, sequences=8, logits=16)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> tuple[dict[str, Any], Tensors]:
    return tiny_model("qwen 3")


def build(model: tuple[dict[str, Any], Tensors], accelerator: HostAccelerator) -> CudaRunner:
    config, tensors = model
    return build_cuda_runner(
        config,
        tensors,
        accelerator=accelerator,
        dtype=torch.float32,
        kv_dtype=torch.float32,
        limits=LIMITS,
        parts=reference_parts(),
    )


def test_the_pool_is_a_share_of_what_the_largest_step_leaves(model: tuple[dict[str, Any], Tensors]) -> None:
    free, peak = 10_000_000, 2_000_000
    runner = build(model, HostAccelerator(free=free, peak=peak))
    # The largest step beside the logits of one that is still read, by itself and as a graph; the plans of graphs, the
    # logits that they write, and the table of slots.
    beside = free - 2 * (peak + LIMITS.logits * 97 * 4) - peak - LIMITS.logits * 97 * 4
    beside -= table_bytes(LIMITS.sequences, runner.context_length, windows=True)
    assert runner.num_slots == int(device.POOL_SHARE * beside) // GEOMETRY.bytes_per_slot


def test_the_pool_leaves_room_for_the_keys_that_long_prompts_gather(model: tuple[dict[str, Any], Tensors]) -> None:
    config, tensors = model
    slots = []
    for torch_prompts in (True, False):
        runner = build_cuda_runner(
            config,
            tensors,
            accelerator=HostAccelerator(free=10_000_000),
            dtype=torch.bfloat16,
            kv_dtype=torch.bfloat16,
            limits=LIMITS,
            torch_prompts=torch_prompts,
            parts=reference_parts(),
        )
        slots.append(runner.num_slots)
    scratch = runner.context_length * GEOMETRY.bytes_per_slot // 2 // 3  # of one of three layers, in 16 bits
    assert slots[1] - slots[0] == pytest.approx(device.POOL_SHARE * scratch / (GEOMETRY.bytes_per_slot // 2), abs=1)


def test_a_pool_is_no_larger_than_it_can_be_checked() -> None:
    size = pool_size(GEOMETRY, HostAccelerator(free=1 << 50), workspace=0, limits=LIMITS)
    assert size.slots == device.MOST_POOL_TOKENS + 1


def test_too_little_memory_for_a_pool_names_numbers_and_remedies() -> None:
    with pytest.raises(ParameterError, match=r"the host has 100000 free, .* takes 60000 of them: .* chunk_size"):
        pool_size(GEOMETRY, HostAccelerator(free=100_000), workspace=60_000, limits=LIMITS)


GiB = 1 << 30


@pytest.mark.parametrize(
    ("free", "own", "share", "usable"),
    [
        (70 * GiB, 9 * GiB, None, 70 * GiB),
        (70 * GiB, 9 * GiB, 0.5, 40 * GiB - device.CONTEXT_BYTES - 9 * GiB),
        (12 * GiB, 9 * GiB, 0.5, 12 * GiB),  # another program has more than its part
        (70 * GiB, 9 * GiB, 0.1, 0),
        (70 * GiB, 9 * GiB, 1.0, 70 * GiB),
    ],
)
def test_a_share_is_of_the_whole_device_and_of_all_that_a_runtime_takes(
    free: int, own: int, share: float | None, usable: int
) -> None:
    accelerator = HostAccelerator(free=free, total=80 * GiB, own=own, memory_share=share)
    assert accelerator.free_memory() == usable


def test_two_runtimes_with_shares_fit_on_one_device() -> None:
    """Neither counts on what the other one has not taken yet."""
    pools = []
    for taken in (0, 36 * GiB):
        accelerator = HostAccelerator(free=80 * GiB - taken - 9 * GiB, total=80 * GiB, own=9 * GiB, memory_share=0.45)
        size = pool_size(GEOMETRY, accelerator, workspace=GiB, limits=replace(LIMITS, rows=10_000))
        assert size.slots == device.MOST_POOL_TOKENS + 1
        pools.append(accelerator.free_memory())
    assert pools[0] == pools[1] == 36 * GiB - device.CONTEXT_BYTES - 9 * GiB


@pytest.mark.parametrize(
    ("accelerator", "says"),
    [
        (
            HostAccelerator(free=9 * GiB, total=10 * GiB, memory_share=0.055),
            "after the weights memory_share=0.055 of the host (10737418240 bytes) leaves 53687091 free, and the "
            "largest step takes 53687000 of them: a KV pool of 83 bytes holds 0 tokens of this model (768 bytes each); "
            "write at least 197376 bytes for 256 tokens; write a larger memory_share, make room by a smaller "
            'chunk_size or max_running, by kv_dtype="fp8" or by tensor_parallel',
        ),
        (
            HostAccelerator(free=53_687_091, total=10 * GiB, own=GiB),
            "after the weights the host has 53687091 free (other programs take 9073118413 of 10737418240), and the "
            "largest step takes 53687000 of them: a KV pool of 83 bytes holds 0 tokens of this model (768 bytes each); "
            "write at least 197376 bytes for 256 tokens; make room by a smaller chunk_size or max_running, by "
            'kv_dtype="fp8" or by tensor_parallel',
        ),
    ],
    ids=["of a share", "of a busy device"],
)
def test_too_little_memory_names_who_has_it(accelerator: HostAccelerator, says: str) -> None:
    with pytest.raises(ParameterError) as caught:
        pool_size(GEOMETRY, accelerator, workspace=53_687_000, limits=LIMITS)
    assert str(caught.value) == says


def test_weights_larger_than_a_share_are_not_read(model: tuple[dict[str, Any], Tensors]) -> None:
    needed = weight_bytes(model[1], torch.float32)
    accelerator = HostAccelerator(free=9 * GiB, total=10 * GiB, memory_share=0.05)
    with pytest.raises(ParameterError) as caught:
        build(model, accelerator)
    assert str(caught.value) == (
        f"the weights take {needed} bytes in float32, memory_share=0.05 of the host (10737418240 bytes) leaves 0 free; "
        'write a larger memory_share, write dtype="bfloat16" for half of them, spread the model over several devices '
        "with tensor_parallel, or take a smaller one"
    )


def test_the_cpu_has_no_shares(model: tuple[dict[str, Any], Tensors]) -> None:
    with pytest.raises(ParameterError, match=r"memory_share=0.4 is a part of a GPU's memory, and the CPU computes"):
        build_runner(*model, memory_share=0.4)


def test_weights_that_do_not_fit_are_not_read(model: tuple[dict[str, Any], Tensors]) -> None:
    needed = weight_bytes(model[1], torch.float32)
    assert needed == sum(tensor.numel() for tensor in model[1].values()) * 4
    with pytest.raises(
        ParameterError, match=f'take {needed} bytes in float32, the host has 5000 free; write dtype="bf'
    ):
        build(model, HostAccelerator(free=5000))


def test_weights_for_which_memory_runs_out_say_the_same(
    model: tuple[dict[str, Any], Tensors], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch has set aside is not free, so a count beforehand may be too good."""

    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CudaDecoder, "__init__", no_memory)
    with pytest.raises(ParameterError, match="tensor_parallel, or take a smaller one"):
        build(model, HostAccelerator())


def test_the_largest_step_has_all_rows_at_positions_that_there_are() -> None:
    step = largest_step(LIMITS, context_length=16)
    assert step.query_lengths.tolist() == [16, 16, 8]
    assert step.positions.max() == 15
    assert step.rows == LIMITS.rows
    assert [len(slots) for slots in step.slots] == [16, 16, 8]
    assert step.logit_rows.tolist() == list(range(24, 40))
    assert largest_step(LIMITS, context_length=100).query_lengths.tolist() == [40]


def test_the_step_of_another_runner_can_be_measured(model: tuple[dict[str, Any], Tensors]) -> None:
    probe = in_torch(*model, num_slots=probe_size(LIMITS).slots)
    assert measured_workspace(probe, HostAccelerator(peak=1000), LIMITS) == 1000 + LIMITS.logits * 97 * 4


def test_a_tower_has_room_for_its_largest_picture_and_for_what_is_kept_of_others(
    model: tuple[dict[str, Any], Tensors],
) -> None:
    probe, tower = in_torch(*model, num_slots=probe_size(LIMITS).slots), ToyVision()
    store = VisionStore(tower, feature_bytes=5000)

    class Measuring(HostAccelerator):
        def peak_memory(self, work: Callable[[], object]) -> int:
            """A picture takes more than a step."""
            seen = len(tower.encoded)
            work()
            return 3000 if len(tower.encoded) > seen else 1000

    assert measured_workspace(probe, Measuring(), LIMITS, store) == 3000 + 5000 + LIMITS.logits * 97 * 4


def test_no_device_is_an_error_that_says_what_to_write() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ModelError, match=r'device="cuda" cannot be used: .*; write "cpu"'):
        CudaAccelerator(torch.device("cuda"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 12}, "head_dim=12: .* multiples of 16"),
        ({"head_dim": 528}, "head_dim=528: .* up to 512, of latents 640"),
    ],
)
def test_models_that_the_kernels_do_not_take(
    model: tuple[dict[str, Any], Tensors], changes: dict[str, Any], reason: str
) -> None:
    config, tensors = {**model[0], **changes}, model[1]
    found = obstacle(config, dtype=torch.float32, kv_dtype=torch.float32, device=torch.device("cpu"))
    assert found is not None
    with pytest.raises(ParameterError, match=f'kernels="triton": {reason}.*; leave it out, and torch computes'):
        build_runner(config, tensors, num_slots=10, dtype="float32", kernels="triton")


@pytest.mark.parametrize(
    ("capability", "dtype", "kv_dtype", "reason"),
    [
        (
            (8, 6),
            torch.bfloat16,
            FLOAT8,
            "float8 need a device of compute capability 8.9, this device has 8.6; write kv_",
        ),
        (
            (7, 5),
            torch.bfloat16,
            torch.bfloat16,
            "Triton compiles for devices of compute capability 8.0 and more, this device has 7.5",
        ),
    ],
)
def test_numbers_for_which_a_device_is_too_old(
    model: tuple[dict[str, Any], Tensors],
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    reason: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = obstacle(model[0], dtype=dtype, kv_dtype=kv_dtype, device=torch.device("cuda"))
    assert found is not None
    assert reason in found


def test_a_pool_in_float8_holds_four_times_as_many_tokens_as_one_in_float32(
    model: tuple[dict[str, Any], Tensors],
) -> None:
    wide, narrow = on_host(*model), on_host(*model, kv_dtype=FLOAT8)
    assert wide.model.kv_geometry.bytes_per_slot == 4 * narrow.model.kv_geometry.bytes_per_slot
    assert narrow.facts()["kv_dtype"] == "float8_e4m3fn"
