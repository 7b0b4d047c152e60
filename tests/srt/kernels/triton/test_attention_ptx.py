"""What the compiler makes of the attention kernels for Hopper, without a GPU; `benchmarks.gpu.ptx` says more."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]


def test_tiles_of_all_kinds_use_tensor_cores_read_ahead_and_spill_nothing(tmp_path: Path) -> None:
    """In a process of its own: kernels that this one interprets cannot be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.ptx", "--kernels", "attention", "--only", "d128 group 4 fp16"]
    finished = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    heads, _, *rows = (line.strip("| ").split(" | ") for line in finished.stdout.splitlines() if line.startswith("|"))
    found = {row[0].split()[1]: dict(zip(heads[1:], map(int, row[1:]), strict=True)) for row in rows}
    assert set(found) == {"few", "some", "many"}
    assert found["few"]["mma"] > 0, "16 query vectors are too few for a warp group"
    assert found["some"]["wgmma"] > 0
    assert found["many"]["wgmma"] > 0
    assert all(variant["cp.async"] > 0 and variant["spilled"] == 0 for variant in found.values())
    assert [found[kind]["resident"] for kind in ("few", "some", "many")] == [3, 2, 1]
