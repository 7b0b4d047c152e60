"""What the benchmarks say of processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.record import machine

SIZE = 32 << 20
READER = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    pages = sum(content[place] for place in range(0, len(content), mmap.PAGESIZE))
    print(pages, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system measures no PSS")
def test_a_file_that_processes_share_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(SIZE))
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "0\n"
        taken = machine.resident_bytes([reader.pid for reader in readers])
    finally:
        for reader in readers:
            reader.communicate()
    assert SIZE <= taken < 2 * SIZE


def test_a_process_that_has_ended_has_no_memory() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert machine.resident_bytes([ended.pid]) == 0
