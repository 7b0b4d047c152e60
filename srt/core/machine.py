"""Says how much memory and how many cores this process may use.

A process in a container sees the memory and the cores of the whole machine. Its part of them stands in its control
groups, which lie inside each other: the narrowest one decides.

    version 2    memory.max, memory.current             cpu.max: "200000 100000" is two cores, "max 100000" all
    version 1    memory/memory.limit_in_bytes, ...      cpu/cpu.cfs_quota_us and cpu.cfs_period_us; a quota of -1 is all

Pages of files that a group has read count as its memory, and the kernel takes them back when memory is needed: those
that were not used lately (inactive_file) are counted as free, as MemAvailable does.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_MEMORY = Path("/proc/meminfo")


def available_memory() -> int:
    """Returns the bytes that are available without swapping; half of all memory where the system does not tell."""
    free = total_memory() // 2
    for line in _read(_MEMORY).splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    return min([free, *(max(0, limit - used) for limit, used in _memory_limits())])


def total_memory() -> int:
    """Returns the bytes of the machine's memory, or of the part that this process may use."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([installed, *(limit for limit, _ in _memory_limits())])


def usable_cores() -> int:
    """Returns the number of cores that this process may use at once; a part of one counts as one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _folders("cpu"):
        first = (*_numbers(folder / "cpu.cfs_quota_us"), *_numbers(folder / "cpu.cfs_period_us"))
        match _numbers(folder / "cpu.max") or first:
            case (quota, period) if quota > 0:
                cores = min(cores, math.ceil(quota / period))
    return cores


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yields the limit of each control group that has one, and how much of it is in use, in bytes."""
    for folder in _folders("memory"):
        for limit, usage, idle in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, used = _numbers(folder / limit), _numbers(folder / usage)
            if most and used:
                statistics = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
                yield most[0], used[0] - int(statistics.get(idle, 0))


def _folders(controller: str) -> Iterator[Path]:
    """Yields the folders of this process's control groups for "memory" or "cpu", from the inmost one on.

    A path that is not there is that of the machine, as a container sees it: the container's own group is the root.
    """
    for line in _read(_OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _GROUPS / controller if controllers else _GROUPS
        parts = [] if ".." in Path(path).parts else Path(path).parts[1:]
        for length in range(len(parts), -1, -1):
            yield root.joinpath(*parts[:length])


def _numbers(path: Path) -> tuple[int, ...]:
    """Reads the whole numbers of a file; () for one that is not there, or sets no limit."""
    words = _read(path).split()
    return () if "max" in words else tuple(map(int, words))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
