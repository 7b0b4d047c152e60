"""Which GPU computes, and what is said of one that does not, on machines of all kinds."""

import asyncio
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from umbel.lang.errors import ModelError, ParameterError
from umbel.lang.runtime_options import RuntimeOptions
from umbel.srt import doctor, launch
from umbel.srt.core.cards import chosen_device, resolve_device, unused_cards
from umbel.srt.core.step_sizes import StepSizes
from umbel.srt.distributed.launch import device_of
from umbel.srt.in_process import LocalBackend
from umbel.srt.kernels.triton.launcher import missing_for_launcher
from umbel.srt.runners.build import build_runner, resolve_dtype
from umbel.srt.runners.cuda.build import obstacle
from umbel.srt.runners.cuda.device import CONTEXT_BYTES, CudaAccelerator, DeviceMemory

from ..fake_cards import A100_40, GB10, H100, L4, RTX_3060, SLICE, T4, Card, FakeMachine, GiB
from .cuda.engines import tiny_model

CU126 = "run pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
CU130 = "run pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
RTX = RTX_3060.name


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeMachine:
    return FakeMachine(monkeypatch, tmp_path)


# ------------------------------------------------------------------------------------ the device of an index


@pytest.mark.parametrize(
    ("options", "rank", "replica", "device"),
    [
        (RuntimeOptions(device="cuda:1"), 0, 0, "cuda:1"),
        (RuntimeOptions(device="cuda"), 0, 0, "cuda"),
        (RuntimeOptions(), 0, 0, "cuda"),
        (RuntimeOptions(device="cpu", replicas=9), 0, 8, "cpu"),
        (RuntimeOptions(device="cuda:1", replicas=3), 0, 2, "cuda:3"),
        (RuntimeOptions(device="cuda:2", tensor_parallel=2), 1, 0, "cuda:3"),
        (RuntimeOptions(device="cuda:0", tensor_parallel=2, replicas=2), 1, 1, "cuda:3"),
        (RuntimeOptions(tensor_parallel=2, replicas=2), 0, 1, "cuda:2"),
    ],
)
def test_ranks_and_replicas_take_the_devices_from_an_index_on(
    options: RuntimeOptions, rank: int, replica: int, device: str, machine: FakeMachine
) -> None:
    machine.sees(L4, L4, L4, L4)
    assert device_of(options, rank, replica) == torch.device(device)


@pytest.mark.parametrize(
    ("count", "options", "says"),
    [
        (1, {"device": "cuda:1"}, "device='cuda:1': this machine has 1 CUDA device; write \"cuda:0\""),
        (
            4,
            {"device": "cuda:4"},
            'device=\'cuda:4\': this machine has 4 CUDA devices; write one from "cuda:0" to "cuda:3"',
        ),
        (
            2,
            {"device": "cuda:1", "tensor_parallel": 2},
            "tensor_parallel=2: this machine has 1 CUDA device from cuda:1 on, and each rank needs one of its own; "
            'write at most tensor_parallel=1, or device="cpu"',
        ),
        (
            4,
            {"device": "cuda:1", "replicas": 2, "tensor_parallel": 2},
            "replicas=2: this machine has 3 CUDA devices from cuda:1 on, and each replica needs 2 of its own "
            '(tensor_parallel); write at most replicas=1, or device="cpu"',
        ),
    ],
)
def test_devices_that_there_are_not_are_refused_with_their_number(
    count: int, options: dict[str, object], says: str, machine: FakeMachine
) -> None:
    machine.sees(*[L4] * count)
    with pytest.raises(ParameterError) as caught:
        device_of(RuntimeOptions(**options), 0)  # type: ignore[arg-type]
    assert str(caught.value) == says


def test_a_machine_that_shows_some_of_its_devices_says_which(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.sees(L4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ParameterError) as caught:
        resolve_device("cuda:3")
    assert str(caught.value) == (
        "device='cuda:3': this machine has 1 CUDA device in CUDA_VISIBLE_DEVICES='3'; write \"cuda:0\""
    )


@pytest.mark.parametrize("name", ["metal", "cuda:x", "cuda:01", "cuda:-1", "cuda:100", "gpu", "CUDA", "", 1, None])
def test_names_of_no_device_are_refused_with_what_to_write(name: object) -> None:
    with pytest.raises(ParameterError) as caught:
        RuntimeOptions(device=name)  # type: ignore[arg-type]
    assert str(caught.value) == f"device={name!r} is not known; write one of 'auto', 'cpu', 'cuda', 'cuda:1'"


# ------------------------------------------------------------------------------- GPUs that torch does not see


def cpu_build(machine: FakeMachine) -> None:
    machine.torch(None, version="2.13.0+cpu")


def no_card(machine: FakeMachine) -> None:
    cpu_build(machine)
    machine.has_pci_card("0000:00:02.0", maker="0x8086")


def no_card_for_a_cuda_build(machine: FakeMachine) -> None:
    machine.torch("12.6", error="Found no NVIDIA driver on your system")


def cpu_build_and_new_driver(machine: FakeMachine) -> None:
    cpu_build(machine)
    machine.has_driver("580.82.07", H100.name, H100.name, L4.name)


def cpu_build_and_driver_of_cuda_12(machine: FakeMachine) -> None:
    cpu_build(machine)
    machine.has_driver("550.54.15", RTX)


def cpu_build_and_driver_of_cuda_11(machine: FakeMachine) -> None:
    cpu_build(machine)
    machine.has_driver("470.256.02", T4.name)


def driver_of_cuda_12_and_torch_of_13(machine: FakeMachine) -> None:
    machine.torch("13.0", version="2.13.0+cu130")
    machine.has_driver("550.54.15", L4.name)


def driver_of_cuda_11_and_torch_of_12(machine: FakeMachine) -> None:
    machine.torch("12.6", version="2.13.0+cu126")
    machine.has_driver("470.256.02", T4.name)


def container_without_its_gpus(machine: FakeMachine) -> None:
    machine.torch("12.6")
    machine.has_driver("550.54.15", H100.name, files=False)


def no_driver(machine: FakeMachine) -> None:
    machine.torch("12.6")
    machine.has_pci_card("0000:01:00.0")
    machine.has_pci_card("0000:01:00.1", kind="0x040300")  # its sound


def driver_that_was_updated(machine: FakeMachine) -> None:
    machine.torch("12.6", error="CUDA unknown error - this may be due to an incorrectly set up environment\nmore")
    machine.has_driver("550.54.15", RTX)


def cuda_of_the_future(machine: FakeMachine) -> None:
    machine.torch("14.1", error="The NVIDIA driver on your system is too old (found version 12040)")
    machine.has_driver("550.54.15", RTX)


def windows(machine: FakeMachine) -> None:
    cpu_build(machine)
    machine.has_windows_card()


def amd_and_rocm(machine: FakeMachine) -> None:
    machine.sees(replace(L4, name="AMD Radeon RX 7900 XTX"))
    machine.torch(None, version="2.13.0+rocm6.4", hip="6.4.43482", sees=True)


def nvidia_and_rocm(machine: FakeMachine) -> None:
    machine.torch(None, version="2.13.0+rocm6.4", hip="6.4.43482")
    machine.has_driver("580.82.07", RTX)


def card_before_the_kernels_of_torch(machine: FakeMachine) -> None:
    machine.sees(Card("NVIDIA GeForce GTX 1080", 8 * GiB, 6, 1, 20))


def card_after_the_kernels_of_torch(machine: FakeMachine) -> None:
    machine.sees(Card("NVIDIA B300", 268 * GiB, 10, 3, 148), architectures=["sm_80", "sm_90", "sm_100a"])


# arranged → the clause that follows the cards' name, but for what to write instead
UNUSED: dict[Callable[[FakeMachine], None], str] = {
    cpu_build_and_new_driver: (
        f"2 x {H100.name}, NVIDIA L4 (driver 580.82.07): torch 2.13.0+cpu is a CPU build; {CU130}, or "
    ),
    cpu_build_and_driver_of_cuda_12: f"{RTX} (driver 550.54.15): torch 2.13.0+cpu is a CPU build; {CU126}, or ",
    cpu_build_and_driver_of_cuda_11: (
        "Tesla T4 (driver 470.256.02): torch 2.13.0+cpu is a CPU build; update the driver to 525.60.13 or newer, and "
        f"{CU126}, or "
    ),
    driver_of_cuda_12_and_torch_of_13: (
        "NVIDIA L4 (driver 550.54.15): CUDA 13.0 of torch 2.13.0+cu130 needs driver 580.65.06 or newer; update the "
        f"driver, or {CU126}, or "
    ),
    driver_of_cuda_11_and_torch_of_12: (
        "Tesla T4 (driver 470.256.02): CUDA 12.6 of torch 2.13.0+cu126 needs driver 525.60.13 or newer; update the "
        "driver, or "
    ),
    container_without_its_gpus: (
        f"{H100.name} (driver 550.54.15): there is no /dev/nvidia0; in a container, start it with the GPU (docker run "
        "--gpus all), elsewhere run sudo nvidia-modprobe -u -c 0, or "
    ),
    no_driver: (
        "an NVIDIA GPU at 0000:01:00.0: its driver is not loaded; install NVIDIA's driver and restart; in a "
        "container, start it with the GPU (docker run --gpus all), or "
    ),
    driver_that_was_updated: (
        f"{RTX} (driver 550.54.15): torch says 'CUDA unknown error - this may be due to an incorrectly set up "
        "environment'; run nvidia-smi; where it fails, too, restart the machine or reinstall the driver, or "
    ),
    cuda_of_the_future: (
        f"{RTX} (driver 550.54.15): torch says 'The NVIDIA driver on your system is too old (found version 12040)'; "
        "run nvidia-smi; where it fails, too, restart the machine or reinstall the driver, or "
    ),
    windows: f"an NVIDIA GPU of Windows (WSL): torch 2.13.0+cpu is a CPU build; {CU130}, or ",
    amd_and_rocm: (
        "AMD Radeon RX 7900 XTX: torch 2.13.0+rocm6.4 is a ROCm build, and umbel computes on GPUs of NVIDIA only; "
    ),
    nvidia_and_rocm: f"{RTX} (driver 580.82.07): torch 2.13.0+rocm6.4 is a ROCm build; {CU130}, or ",
    card_before_the_kernels_of_torch: (
        f"NVIDIA GeForce GTX 1080: torch 2.13.0 has no kernels for compute capability 6.1; {CU126}, or "
    ),
    card_after_the_kernels_of_torch: (
        f"NVIDIA B300: torch 2.13.0 has no kernels for compute capability 10.3; {CU130}, or "
    ),
}


@pytest.mark.parametrize("arrange", UNUSED, ids=lambda arrange: arrange.__name__)
def test_a_gpu_that_torch_does_not_use_is_named_with_the_reason(
    arrange: Callable[[FakeMachine], None], machine: FakeMachine, caplog: pytest.LogCaptureFixture
) -> None:
    """Once in the log where the CPU computes in its place, and as the error where it was asked for."""
    arrange(machine)
    assert chosen_device("auto") == "cpu"
    with caplog.at_level(logging.WARNING, "umbel.engine"):
        launch._report_unused_cards(RuntimeOptions())
        launch._report_unused_cards(RuntimeOptions(device="cpu"))
    assert caplog.messages == [f'the CPU computes, not {UNUSED[arrange]}write device="cpu"']
    with pytest.raises(ModelError) as caught:
        device_of(RuntimeOptions(device="cuda"), 0)
    assert str(caught.value) == f"device='cuda': torch cannot use {UNUSED[arrange]}write \"cpu\""


@pytest.mark.parametrize(
    ("arrange", "reason"),
    [
        (no_card, ""),
        (no_card_for_a_cuda_build, ""),
        (
            lambda machine: machine.torch(None, version="2.13.0+rocm6.4", hip="6.4"),
            ": torch 2.13.0+rocm6.4 is a ROCm build, and umbel computes on GPUs of NVIDIA only",
        ),
    ],
    ids=["none", "none for a CUDA build", "none for a ROCm build"],
)
def test_nothing_is_said_of_a_machine_without_gpus_that_is_not_asked_for_one(
    arrange: Callable[[FakeMachine], None], reason: str, machine: FakeMachine, caplog: pytest.LogCaptureFixture
) -> None:
    arrange(machine)
    launch._report_unused_cards(RuntimeOptions())
    assert caplog.messages == []
    with pytest.raises(ModelError) as caught:
        resolve_device("cuda")
    assert str(caught.value) == f"device='cuda': torch sees no CUDA device here{reason}; write \"cpu\""


@pytest.mark.parametrize(
    ("visible", "hides"),
    [("", True), ("-1", True), ("-1,0", True), ("1", True), ("0", False), ("GPU-8932f937", False)],
)
def test_devices_may_be_hidden_by_the_environment(
    visible: str, hides: bool, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver_that_was_updated(machine)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    unused = unused_cards()
    assert unused is not None
    hidden = (f"CUDA_VISIBLE_DEVICES={visible!r} hides it", "unset CUDA_VISIBLE_DEVICES")
    assert ((unused.reason, unused.remedy) == hidden) is hides


@pytest.mark.parametrize("name", ["nvidia0", "nvidiactl"])
def test_a_file_that_this_user_may_not_open_is_named_with_its_group(
    name: str, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.torch("12.6")
    machine.has_driver("550.54.15", RTX)
    closed = machine.root / "dev" / name
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed)
    unused = unused_cards()
    assert unused is not None
    assert unused.reason == f"this user may not open /dev/{name}"
    assert unused.remedy == f"run sudo usermod -aG {closed.group()} $USER and log in again"


@pytest.mark.parametrize("card", [T4, RTX_3060, L4, H100], ids=lambda card: card.name)
def test_a_gpu_that_torch_has_kernels_for_computes(card: Card, machine: FakeMachine) -> None:
    machine.sees(card)
    machine.has_driver("550.54.15", card.name)
    assert unused_cards() is None
    assert chosen_device("auto") == "cuda"
    assert resolve_device("cuda:0") == torch.device("cuda", 0)


def test_auto_passes_over_a_gpu_that_torch_has_no_kernels_for(machine: FakeMachine) -> None:
    machine.sees(Card("NVIDIA GeForce GTX 1080", 8 * GiB, 6, 1, 20), RTX_3060, L4)
    assert chosen_device("auto") == "cuda:1"
    assert device_of(RuntimeOptions(replicas=2), 0, 1) == torch.device("cuda", 2)


# ------------------------------------------------------------------------------------ the size of a step


@pytest.mark.parametrize(
    ("card", "options", "sizes"),
    [
        (H100, {}, StepSizes(8192, 256, 1024)),
        (A100_40, {}, StepSizes(2048, 128, 512)),
        (L4, {}, StepSizes(2048, 128, 512)),
        (GB10, {}, StepSizes(2048, 128, 512)),  # much memory, few multiprocessors
        (T4, {}, StepSizes(1024, 64, 256)),
        (RTX_3060, {}, StepSizes(1024, 64, 256)),
        (SLICE, {}, StepSizes(1024, 64, 256)),
        (H100, {"memory_share": 0.45}, StepSizes(2048, 128, 512)),
        (H100, {"chunk_size": None}, StepSizes(None, 256, 1024)),
        (H100, {"chunk_size": 512, "max_running": 64}, StepSizes(512, 64, 1024)),
        (H100, {"device": "cpu"}, StepSizes(512, 64, 1024)),
        (None, {}, StepSizes(512, 64, 1024)),
        (None, {"chunk_size": 99, "max_running": 3}, StepSizes(99, 3, 1024)),
    ],
    ids=lambda value: value.name if isinstance(value, Card) else None,
)
def test_the_largest_step_is_chosen_by_the_class_of_the_device(
    card: Card | None, options: dict[str, object], sizes: StepSizes, machine: FakeMachine
) -> None:
    """What options name counts on every device."""
    if card is not None:
        machine.sees(card)
    assert launch._step_sizes(RuntimeOptions(**options), 0) == sizes  # type: ignore[arg-type]


def test_replicas_are_sized_by_their_own_device(machine: FakeMachine) -> None:
    machine.sees(T4, H100, L4)
    options = RuntimeOptions(device="cuda:1", replicas=2)
    assert [launch._step_sizes(options, replica).chunk_size for replica in (0, 1)] == [8192, 2048]


@pytest.mark.parametrize(
    ("options", "used"),
    [({}, (512, 64)), ({"chunk_size": None, "max_running": 3}, (0, 3)), ({"replicas": 2}, (512, 64))],
)
def test_a_runtime_says_which_sizes_it_uses(options: dict[str, Any], used: tuple[int, int]) -> None:
    """Those of one engine, of several as well. 0: prompts are computed whole."""

    async def sizes() -> tuple[object, object]:
        backend = LocalBackend(**options)
        info = (await backend.control("info")).result
        await backend.close()
        return info["chunk_size"], info["max_running"]

    assert asyncio.run(sizes()) == used


# ---------------------------------------------------------------------------------------- memory of a GPU


def test_a_gpu_counts_what_this_runtime_has_taken_of_its_share(machine: FakeMachine) -> None:
    machine.sees(H100)
    machine.has_memory(free=70 * GiB, total=80 * GiB, reserved=2 * GiB)  # of another runtime in this process
    accelerator = CudaAccelerator(torch.device("cuda"), memory_share=0.5)
    assert accelerator.free_memory() == 40 * GiB - CONTEXT_BYTES
    machine.has_memory(free=60 * GiB, total=80 * GiB, reserved=12 * GiB)
    assert accelerator.memory() == DeviceMemory(80 * GiB, 60 * GiB, own=10 * GiB)
    assert accelerator.free_memory() == 30 * GiB - CONTEXT_BYTES
    assert CudaAccelerator(torch.device("cuda", 0)).free_memory() == 60 * GiB


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with `TORCH_USE_CUDA_DSA`",
            "CUDA error: CUDA-capable device(s) is/are busy or unavailable (another program may have it alone: "
            "nvidia-smi -q -d COMPUTE)",
        ),
        ("CUDA error: out of memory\nCUDA kernel errors might be", "CUDA error: out of memory"),
    ],
)
def test_a_gpu_that_is_busy_says_so_before_anything_is_loaded(error: str, reason: str, machine: FakeMachine) -> None:
    machine.sees(RTX_3060)
    machine.has_memory(free=0, total=12 * GiB, error=error)
    with pytest.raises(ModelError) as caught:
        build_runner({}, {}, device="cuda:0")
    assert str(caught.value) == f'device="cuda:0" cannot be used: {reason}; write "cpu", or another device'


# --------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("card", "config", "asked", "dtype"),
    [
        (H100, {"model_type": "gemma3_text"}, "auto", torch.bfloat16),
        (RTX_3060, {"model_type": "llama"}, "auto", torch.bfloat16),
        (T4, {"model_type": "llama"}, "auto", torch.float16),
        (T4, {"model_type": "llama"}, "float32", torch.float32),
        (T4, {}, "auto", torch.float16),
        (T4, {"model_type": "gemma"}, "auto", torch.float32),
        (T4, {"model_type": "gemma2"}, "auto", torch.float32),
        (T4, {"model_type": "gemma3_text"}, "auto", torch.float32),
        (T4, {"model_type": "gemma3", "text_config": {"hidden_size": 8}}, "auto", torch.float32),
        (T4, {"model_type": "paligemma"}, "auto", torch.float32),
        (T4, {"model_type": "llava", "text_config": {"model_type": "gemma2"}}, "auto", torch.float32),
        (T4, {"model_type": "gemma2"}, "float16", torch.float16),
    ],
)
def test_auto_takes_numbers_that_the_gpu_multiplies_and_the_model_fits(
    card: Card, config: dict[str, Any], asked: str, dtype: torch.dtype, machine: FakeMachine
) -> None:
    machine.sees(H100, card)
    assert resolve_dtype(asked, torch.device("cuda", 1), config) is dtype


@pytest.mark.parametrize(
    ("card", "kind", "asked", "lines"),
    [
        (
            T4,
            "gemma2",
            "auto",
            ["gemma2 computes in float32: its activations exceed float16, and this GPU has no bfloat16"],
        ),
        (T4, "gemma2", "float32", []),
        (T4, "llama", "auto", []),
        (L4, "gemma2", "auto", []),
    ],
)
def test_a_model_that_takes_twice_the_memory_for_its_gpu_says_so(
    card: Card, kind: str, asked: str, lines: list[str], machine: FakeMachine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.sees(card)
    machine.has_memory(free=card.total_memory, total=card.total_memory)
    with pytest.raises(ModelError):  # it has no sizes
        build_runner({"model_type": kind}, {}, device="cuda:0", dtype=asked)
    assert caplog.messages == lines


# ------------------------------------------------------------------------------------ Triton's launcher

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"


@pytest.mark.parametrize(
    ("programs", "header", "cc", "reason", "remedy"),
    [
        (["gcc"], True, None, None, None),
        (["clang"], True, None, None, None),
        (["mine"], True, "mine", None, None),
        (
            [],
            True,
            None,
            "they need a C compiler, and there is none",
            "install one (Debian, Ubuntu: apt install gcc; Fedora: dnf install gcc) or set CC",
        ),
        (["gcc"], True, "icc", "CC='icc' is not a program", "unset CC, or set it to a C compiler"),
        (
            ["gcc"],
            False,
            None,
            "they need {include}/Python.h, and it is not there",
            f"install it (Debian, Ubuntu: apt install {PYTHON}; Fedora: dnf install python3-devel)",
        ),
    ],
)
def test_what_triton_compiles_its_launcher_with_is_looked_for_before(
    programs: list[str], header: bool, cc: str | None, reason: str | None, remedy: str | None, tmp_path: Path
) -> None:
    """A launcher in the cache was compiled before, and needs nothing."""
    include, cache = tmp_path / "include", tmp_path / "cache"
    for name in programs:
        (tmp_path / name).touch(mode=0o755)
    include.mkdir()
    if header:
        (include / "Python.h").touch()
    environment = {"PATH": str(tmp_path), "TRITON_CACHE_DIR": str(cache), **({"CC": cc} if cc else {})}
    found = missing_for_launcher(environment, include)
    assert found == (None if reason is None else (reason.format(include=include), remedy))
    (cache / "ABCD").mkdir(parents=True)
    (cache / "ABCD" / "cuda_utils.cpython-311-x86_64-linux-gnu.so").touch()
    assert missing_for_launcher(environment, include) is None


def test_without_a_c_compiler_torch_computes_on_the_gpu(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.sees(L4)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    config, _ = tiny_model("qwen 3")
    found = obstacle(config, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, device=torch.device("cuda"))
    assert found == (
        "they need a C compiler, and there is none; install one (Debian, Ubuntu: apt install gcc; Fedora: dnf install "
        "gcc) or set CC"
    )
    assert [finding for finding in doctor.triton() if finding.state is not doctor.State.OK] == [
        doctor.Finding(
            "triton",
            doctor.State.NOTE,
            f"{importlib.metadata.version('triton')}; its kernels do not run, so torch computes on the GPU, slower: "
            "they need a C compiler, and there is none",
            "install one (Debian, Ubuntu: apt install gcc; Fedora: dnf install gcc) or set CC",
        )
    ]
