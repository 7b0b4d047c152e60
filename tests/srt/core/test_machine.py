"""Memory and cores of this process: the machine's, or those that its control groups leave it."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from umbel.srt.core import machine

GB = 1 << 30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GB, 60 of them free, with eight cores; it has no control groups yet."""
    (tmp_path / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n")
    monkeypatch.setattr(machine, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GB // 4096}.__getitem__)
    return tmp_path


def write(system: Path, own: str, files: Mapping[str, str]) -> None:
    (system / "cgroup").write_text(own)
    for name, content in files.items():
        path = system / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def told() -> tuple[int, int, int]:
    return machine.available_memory(), machine.total_memory(), machine.usable_cores()


def test_without_control_groups_all_of_the_machine_is_used(system: Path) -> None:
    assert told() == (60 * GB, 64 * GB, 8)
    (system / "meminfo").unlink()
    assert machine.available_memory() == 32 * GB


def test_groups_without_limits_leave_the_machine_as_it_is(system: Path) -> None:
    unlimited = {"a/memory.max": "max\n", "a/memory.current": f"{GB}\n", "a/cpu.max": "max 100000\n"}
    write(system, "0::/a\n", unlimited)
    assert told() == (60 * GB, 64 * GB, 8)
    first = {
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "1\n",
        "cpu/cpu.cfs_quota_us": "-1\n",
        "cpu/cpu.cfs_period_us": "100000\n",
    }
    write(system, "4:memory:/\n1:cpu,cpuacct:/\n", first)
    assert told() == (60 * GB, 64 * GB, 8)


def test_the_narrowest_group_decides(system: Path) -> None:
    files = {
        "pod/memory.max": f"{4 * GB}\n",
        "pod/memory.current": f"{3 * GB}\n",
        "pod/memory.stat": f"anon {GB}\ninactive_file {GB}\n",
        "pod/cpu.max": "150000 100000\n",
        "pod/box/memory.max": f"{8 * GB}\n",
        "pod/box/memory.current": f"{GB}\n",
        "pod/box/cpu.max": "400000 100000\n",
    }
    write(system, "0::/pod/box\n", files)
    assert told() == (2 * GB, 4 * GB, 2)


def test_groups_of_the_first_version_limit_a_process(system: Path) -> None:
    files = {
        "memory/a/memory.limit_in_bytes": f"{4 * GB}\n",
        "memory/a/memory.usage_in_bytes": f"{2 * GB}\n",
        "memory/a/memory.stat": f"inactive_file 7\ntotal_inactive_file {GB}\n",
        "cpu/a/cpu.cfs_quota_us": "50000\n",
        "cpu/a/cpu.cfs_period_us": "100000\n",
    }
    write(system, "9:name=systemd:/\n4:memory:/a\n1:cpu,cpuacct:/a\n0::/\n", files)
    assert told() == (3 * GB, 4 * GB, 1)


@pytest.mark.parametrize("path", ["/docker/abc", "/../../other"])
def test_a_container_that_sees_the_path_of_the_machine_finds_its_own_group_at_the_root(system: Path, path: str) -> None:
    write(system, f"0::{path}\n", {"memory.max": f"{2 * GB}\n", "memory.current": "0\n", "cpu.max": "100000 100000\n"})
    assert told() == (2 * GB, 2 * GB, 1)


def test_more_than_the_limit_in_use_leaves_nothing(system: Path) -> None:
    write(system, "0::/\n", {"memory.max": f"{GB}\n", "memory.current": f"{GB + 4096}\n"})
    assert machine.available_memory() == 0


def test_this_machine_is_read() -> None:
    available, total, cores = told()
    assert 0 < available <= total
    assert 1 <= cores <= (os.cpu_count() or 1)
