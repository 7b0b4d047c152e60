"""What a figure was taken on: processor, memory, versions, commit; and the memory of processes."""

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import umbel as ul
from umbel.lang.errors import MissingExtraError

try:
    import psutil  # type: ignore[import-untyped]  # its stubs are a package of their own
except ModuleNotFoundError as missing:
    raise MissingExtraError("psutil", "dev") from missing

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "msgspec", "pyzmq")
_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


@dataclass(frozen=True, slots=True)
class Machine:
    date: str
    processor: str
    cores: int
    instructions: tuple[str, ...]
    memory_gib: float
    system: str
    python: str
    umbel: str
    commit: str
    packages: dict[str, str]

    @property
    def slug(self) -> str:
        """For the name of a folder: the date and the processor."""
        processor = re.sub(r"[^a-z0-9]+", "-", self.processor.lower()).strip("-")
        return f"{self.date[:10]}-{processor}"


def describe() -> Machine:
    model, flags = _processor()
    return Machine(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        processor=model,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        instructions=tuple(flag for flag in _FLAGS if flag in flags),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        umbel=ul.__version__,
        commit=_commit(),
        packages={name: version for name in _PACKAGES if (version := _version(name))},
    )


def children() -> set[int]:
    """Processes that this one has started, and theirs."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def free_bytes() -> int:
    """Memory that can be had without swapping."""
    return int(psutil.virtual_memory().available)


def resident_bytes(pids: Iterable[int]) -> int:
    """Returns the memory of these processes now; those that have ended have none.

    Linux divides a page by the number of processes that share it (PSS), so that the page of a mapped file or of a
    library counts once. Elsewhere it counts in each of them (RSS).
    """
    total = 0
    for pid in pids:
        try:
            total += _proportional(pid) or psutil.Process(pid).memory_info().rss
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return total


def _proportional(pid: int) -> int | None:
    """Returns the PSS of a process; None where the system does not measure it."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except (FileNotFoundError, PermissionError):
        return None
    found = re.search(r"^Pss: +(\d+) kB$", text, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def _processor() -> tuple[str, set[str]]:
    """Name and instruction sets, as Linux tells them; elsewhere what Python knows."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine(), set()
    fields = dict(re.findall(r"^(model name|flags)\s*: (.*)$", text, re.MULTILINE))
    return fields.get("model name", platform.machine()), set(fields.get("flags", "").split())


def _commit() -> str:
    """The commit of the checkout, with a mark when files differ from it."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+changes" if changed else "")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
