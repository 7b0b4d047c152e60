"""Machines with GPUs, without a GPU: torch's answers about them, and the files that a driver leaves."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from umbel.srt.core import cards

GiB = 1 << 30


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU, as torch describes it."""

    name: str
    total_memory: int
    major: int
    minor: int
    multi_processor_count: int


T4 = Card("Tesla T4", 15 * GiB, 7, 5, 40)
RTX_3060 = Card("NVIDIA GeForce RTX 3060", 12 * GiB, 8, 6, 28)
L4 = Card("NVIDIA L4", 22 * GiB, 8, 9, 58)
A100_40 = Card("NVIDIA A100-SXM4-40GB", 39 * GiB, 8, 0, 108)
H100 = Card("NVIDIA H100 80GB HBM3", 79 * GiB, 9, 0, 132)
GB10 = Card("NVIDIA GB10", 119 * GiB, 12, 1, 48)
SLICE = Card("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9 * GiB, 9, 0, 16)
CUDA_ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_90a", "compute_90"]  # newer GPUs run the last, PTX


class FakeMachine:
    """Makes torch answer as on a machine with GPUs.

    Attributes:
        root: the folder that is read as the root of the file system.
    """

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self._patch = patch
        self.root = root
        patch.setattr(cards, "SYSTEM", root)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        self.torch(None)

    def torch(
        self, cuda: str | None, *, version: str = "2.13.0", hip: str | None = None, error: str = "", sees: bool = False
    ) -> None:
        """Installs a build of torch. error: of its start. sees: the GPUs of an earlier `sees`, else none."""

        def init() -> None:
            if error:
                raise RuntimeError(error)

        self._patch.setattr(torch, "__version__", version)
        self._patch.setattr(torch.version, "cuda", cuda)
        self._patch.setattr(torch.version, "hip", hip)
        self._patch.setattr(torch.cuda, "init", init)
        self._patch.setattr(torch.cuda, "is_available", lambda: sees)
        if not sees:
            self._patch.setattr(torch.cuda, "device_count", lambda: 0)

    def sees(self, *found: Card, architectures: Sequence[str] = CUDA_ARCHITECTURES) -> None:
        """Makes torch see GPUs. architectures: those that it was built for."""

        def index_of(device: torch.device | int) -> int:
            return device if isinstance(device, int) else device.index or 0

        answers = {
            "is_available": lambda: True,
            "device_count": lambda: len(found),
            "current_device": lambda: 0,
            "get_arch_list": lambda: list(architectures),
            "get_device_properties": lambda device: found[index_of(device)],
            "get_device_name": lambda device: found[index_of(device)].name,
            "get_device_capability": lambda device: (found[index_of(device)].major, found[index_of(device)].minor),
        }
        for name, answer in answers.items():
            self._patch.setattr(torch.cuda, name, answer)

    def has_memory(self, free: int, total: int, *, reserved: int = 0, error: str = "") -> None:
        """Gives every GPU so much memory. reserved: by torch in this process. error: of each use of a GPU."""

        def memory(device: object = None) -> tuple[int, int]:
            if error:
                raise RuntimeError(error)
            return free, total

        answers = {
            "set_device": lambda device: None,
            "mem_get_info": memory,
            "memory_reserved": lambda device=None: reserved,
            "empty_cache": lambda: None,
            "graph_pool_handle": lambda: (0, 1),
            "Stream": lambda: None,
        }
        for name, answer in answers.items():
            self._patch.setattr(torch.cuda, name, answer)

    def has_driver(self, version: str, *names: str, files: bool = True) -> None:
        """Leaves what NVIDIA's driver leaves. files: those of the devices, too, as outside of containers."""
        self._write(
            "proc/driver/nvidia/version",
            f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Thu Feb 22 01:44:30 UTC 2024\n"
            "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n",
        )
        for number, name in enumerate(names):
            place = f"proc/driver/nvidia/gpus/0000:0{number + 1}:00.0/information"
            self._write(place, f"Model: \t\t {name}\nIRQ:   \t\t 131\nBus Type: \t PCIe\n")
            if files:
                self._write(f"dev/nvidia{number}", "")
        if files:
            self._write("dev/nvidiactl", "")

    def has_pci_card(self, place: str, *, maker: str = "0x10de", kind: str = "0x030000") -> None:
        """Leaves what the kernel lists of a PCI card, without a driver."""
        self._write(f"sys/bus/pci/devices/{place}/vendor", f"{maker}\n")
        self._write(f"sys/bus/pci/devices/{place}/class", f"{kind}\n")

    def has_windows_card(self) -> None:
        """Leaves what WSL has of a GPU of Windows."""
        self._write("dev/dxg", "")
        self._write("usr/lib/wsl/lib/libcuda.so.1", "")

    def _write(self, path: str, content: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
