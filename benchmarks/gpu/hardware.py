"""The device that figures were taken on: its limits, its clocks as they were found, versions and commit."""

import importlib.metadata
import platform
import re
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

_PACKAGES = ("torch", "triton", "numpy", "msgspec", "pytest")
# By what a device's name contains, the first that fits: bytes/s of its memory and FLOP/s of dense products in bfloat16,
# as the makers state them.
_KNOWN = {
    "H200": (4.8e12, 989e12),
    "H100 PCIe": (2.0e12, 756e12),
    "H100 NVL": (3.9e12, 835e12),
    "H100": (3.35e12, 989e12),
    "B200": (8.0e12, 2250e12),
    "A100-SXM4-80GB": (2.039e12, 312e12),
    "A100": (1.935e12, 312e12),
    "L40S": (0.864e12, 362e12),
}
UNKNOWN = "unknown"  # of a commit, where there is no checkout
_CLOCKS = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,temperature.gpu,power.draw,driver_version"


@dataclass(frozen=True, slots=True)
class Limits:
    """What nothing can exceed.

    Attributes:
        bandwidth: bytes/s of the device's memory.
        rate: FLOP/s of products in bfloat16.
        stated: by the maker; otherwise what reading and a product reached here.
    """

    bandwidth: float
    rate: float
    stated: bool

    def seconds(self, size: float, operations: float) -> float:
        """The least that so many bytes and operations take."""
        return max(size / self.bandwidth, operations / self.rate)


@dataclass(frozen=True, slots=True)
class Hardware:
    name: str
    limits: Limits
    copied: float  # bytes/s that a large copy moved, read and written together
    read: float  # bytes/s of reading alone
    multiplied: float  # FLOP/s that a large product reached
    multiprocessors: int
    memory: int  # bytes
    cache: int  # bytes, of the second level
    clocks: dict[str, str]  # before the first figure; they are never changed
    busy_clocks: dict[str, str]  # right behind the large product
    versions: dict[str, str]
    commit: str
    date: str

    @property
    def slug(self) -> str:
        """For the name of a folder: the date and the device."""
        return f"{self.date[:10]}-{re.sub(r'[^a-z0-9]+', '-', self.name.lower()).strip('-')}"

    def lines(self) -> list[str]:
        """For the head of the report."""
        limits = self.limits
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return [
            f"{self.date}, commit {self.commit}; {versions}.",
            "",
            f"{self.multiprocessors} multiprocessors, {self.memory / 2**30:.0f} GiB, {self.cache / 2**20:.0f} MiB of "
            f"cache; {'stated' if limits.stated else 'taken as measured'}: {limits.bandwidth / 1e12:.2f} TB/s, "
            f"{limits.rate / 1e12:.0f} TFLOPS in bfloat16. Measured here: a copy moves {self.copied / 1e12:.2f} TB/s, "
            f"reading alone {self.read / 1e12:.2f}, a product of torch runs at {self.multiplied / 1e12:.0f} TFLOPS.",
            "",
            f"As found: {_words(self.clocks)}. Behind the product: {_words(self.busy_clocks)}.",
        ]


Timed = Callable[[Callable[[], object]], float]  # work → seconds


def describe(device: torch.device, timed: Timed, *, elements: int, width: int) -> Hardware:
    """Looks at the device, moves `elements` numbers of four bytes and multiplies square matrices of `width`."""
    clocks = _clocks() if device.type == "cuda" else {}
    copied, read = _moved(device, timed, elements)
    left = torch.randn(width, width, device=device).to(torch.bfloat16)
    multiplied = 2 * width**3 / timed(lambda: left @ left)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
        cache, multiprocessors = properties.L2_cache_size, properties.multi_processor_count
    else:
        name, memory, cache, multiprocessors = "no GPU", 0, 0, 0
    return Hardware(
        name=name,
        limits=limits_of(name, read=read, multiplied=multiplied),
        copied=copied,
        read=read,
        multiplied=multiplied,
        multiprocessors=multiprocessors,
        memory=memory,
        cache=cache,
        clocks=clocks,
        busy_clocks=_clocks() if device.type == "cuda" else {},
        versions=_versions(clocks.get("driver_version")),
        commit=_commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _moved(device: torch.device, timed: Timed, elements: int) -> tuple[float, float]:
    """Bytes/s of a copy and of reading, both by kernels: a copy of torch's is none in a graph, and slower than one."""
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / timed(lambda: torch.neg(source, out=target))
    return copied, source.nbytes / timed(source.sum)


def limits_of(name: str, *, read: float, multiplied: float) -> Limits:
    """What the maker states; of a device that is not known, what was measured."""
    for part, (bandwidth, rate) in _KNOWN.items():
        if part in name:
            return Limits(bandwidth, rate, stated=True)
    return Limits(read, multiplied, stated=False)


def _versions(driver: str | None) -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    return {**found, "driver": driver} if driver else found


def _words(clocks: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in clocks.items()) or "nvidia-smi says nothing"


def _clocks() -> dict[str, str]:
    """What nvidia-smi reads; empty where there is none."""
    command = ["nvidia-smi", f"--query-gpu={_CLOCKS}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = said.splitlines()[0].split(",") if said else []
    return {name: value.strip() for name, value in zip(_CLOCKS.split(","), values, strict=False)}


def _commit() -> str:
    """The commit of the checkout, with a mark of how files differ from it, those of records apart."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        folder = Path(__file__).parent
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        changes = git("diff", "HEAD", "--", ":/", ":(exclude,top)benchmarks/results")
        return commit + (f"+changes-{zlib.crc32(changes.encode()):08x}" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
