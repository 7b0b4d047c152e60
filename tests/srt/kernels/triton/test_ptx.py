"""What the compiler makes of the small kernels and of experts for Hopper, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]


def compiled(cache: Path, *arguments: str) -> dict[str, dict[str, int]]:
    """Name → what it takes. In a process of its own: kernels that this one interprets cannot be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.ptx", *arguments],
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    heads, _, *rows = (line.strip("| ").split(" | ") for line in finished.stdout.splitlines() if line.startswith("|"))
    return {row[0]: dict(zip(heads[1:], map(int, row[1:]), strict=True)) for row in rows}


def test_no_small_kernel_spills_and_many_programs_fit_a_multiprocessor(tmp_path: Path) -> None:
    found = compiled(tmp_path, "--kernels", "small")
    assert {name.split()[0] for name in found} == {"norm", "add", "act", "heads", "scan", "finish"}
    assert all(variant["spilled"] == 0 for variant in found.values())
    passes = {name: variant for name, variant in found.items() if not name.startswith("finish")}  # one for each row
    assert all(variant["resident"] * variant["warps"] >= 20 for variant in passes.values()), passes


def test_products_of_experts_use_tensor_cores_and_read_ahead(tmp_path: Path) -> None:
    found = compiled(tmp_path, "--kernels", "moe", "--only", "8x7B")
    assert all(variant["spilled"] == 0 for variant in found.values())
    for product in ("gate up", "down"):
        decode, middle, prefill = (found[f"{product} 8x7B {cut}"] for cut in ("decode", "middle", "prefill"))
        assert decode["mma"] > 0, "16 rows are too few for a warp group"
        assert middle["wgmma"] > 0
        assert prefill["wgmma"] > 0
        assert min(decode["cp.async"], middle["cp.async"], prefill["cp.async"]) > 0
        assert [decode["resident"], middle["resident"], prefill["resident"]] == [3, 2, 1]
