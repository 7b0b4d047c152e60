"""What the compiler makes of the kernels for Hopper, without a GPU; `benchmarks.gpu.ptx` looks at more of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly  # compiling them takes a quarter of a minute

ROOT = Path(__file__).resolve().parents[4]
ATTENTION = ["d128 group 4 fp16"]
EXPERTS = ["8x7B decode", "gate up 8x7B prefill", "few down 30B"]
ROWS = ["row 4096 bf16", "row gated", "rows 32 x 4096"]
PACKED = ["packed gate up mxfp4", "packed few gate up int4", "packed few down mxfp4", "packed down fp8 decode"]
CODES = ["codes row int4", "codes rows 64 int4", "codes rows 16 fp8", "codes widen"]
SMALL = ["norm 8192", "sandwich", "act bf16", "heads d256", "heads d128 x8 bf16/fp8"]
SAMPLING = ["scan 128256", "select", "summarise"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Name → what it takes. In a process of its own: kernels that this one interprets cannot be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.gpu.ptx",
            "--only",
            *ATTENTION,
            *EXPERTS,
            *PACKED,
            *ROWS,
            *CODES,
            *SMALL,
            *SAMPLING,
        ],
        cwd=ROOT,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    heads, _, *rows = (line.strip("| ").split(" | ") for line in finished.stdout.splitlines() if line.startswith("|"))
    return {row[0]: dict(zip(heads[1:], map(int, row[1:]), strict=True)) for row in rows}


def test_no_kernel_spills(found: dict[str, dict[str, int]]) -> None:
    assert {name.split()[0] for name in found} == {
        *(
            "attend",
            "codes",
            "packed",
            "gate",
            "down",
            "few",
            "row",
            "rows",
            "norm",
            "add",
            "act",
            "heads",
            "scan",
            "select",
            "summarise",
        )
    }
    streamed = {name for name in found if name.startswith("attend few and some")}  # for four programs, not two
    assert [name for name, variant in found.items() if variant["spilled"] > (320 if name in streamed else 0)] == []


def test_tiles_of_all_kinds_use_tensor_cores_and_read_ahead(found: dict[str, dict[str, int]]) -> None:
    few, both, many = (found[f"attend {kind} d128 group 4 fp16"] for kind in ("few", "few and some", "many"))
    assert few["mma"] > 0, "16 query vectors are too few for a warp group"
    assert both["mma"] == few["mma"], "those of few rows"
    assert both["wgmma"] > 0, "64 are enough"
    assert many["wgmma"] > 0
    assert min(few["cp.async"], both["cp.async"], many["cp.async"]) > 0
    assert [few["resident"], both["resident"], many["resident"]] == [4, 4, 2]


def test_products_of_codes_use_tensor_cores(found: dict[str, dict[str, int]]) -> None:
    assert found["codes rows 64 int4"]["wgmma"] > 0
    assert found["codes rows 16 fp8"]["wgmma"] > 0
    assert found["codes row int4"]["resident"] >= 3


def test_products_of_packed_experts_use_tensor_cores_and_fit(found: dict[str, dict[str, int]]) -> None:
    decode, middle, prefill = (found[f"packed gate up mxfp4 {cut}"] for cut in ("decode", "middle", "prefill"))
    assert all(product["wgmma"] > 0 for product in (decode, middle, prefill, found["packed down fp8 decode"]))
    assert [product["resident"] for product in (decode, middle, prefill)] == [4, 3, 1]
    few = [found[name] for name in found if name.startswith("packed few")]
    assert len(few) == 2
    assert all(product["resident"] * product["warps"] >= 16 for product in few), few


def test_products_of_experts_use_tensor_cores_and_read_ahead(found: dict[str, dict[str, int]]) -> None:
    decodes = [found[f"{product} 8x7B decode"] for product in ("gate up", "down")]
    prefill = found["gate up 8x7B prefill"]
    assert all(decode["mma"] > 0 for decode in decodes), "16 rows are too few for a warp group"
    assert prefill["wgmma"] > 0
    assert all(product["cp.async"] > 0 for product in (*decodes, prefill))
    assert [product["resident"] for product in (*decodes, prefill)] == [3, 3, 1]


def test_products_of_one_row_keep_many_loads_in_flight(found: dict[str, dict[str, int]]) -> None:
    rows = [found[name] for name in found if name.split()[0] in ("few", "row")]
    assert len(rows) == 3
    assert all(variant["resident"] * variant["warps"] >= 16 for variant in rows), rows


def test_products_of_few_rows_fit_beside_what_they_read_ahead(found: dict[str, dict[str, int]]) -> None:
    rows = [found[name] for name in ("rows 32 x 4096", "rows 32 x 4096 gated")]
    assert all(variant["wgmma"] > 0 and variant["cp.async"] > 0 and variant["resident"] == 1 for variant in rows), rows


def test_many_programs_of_small_kernels_fit_a_multiprocessor(found: dict[str, dict[str, int]]) -> None:
    passes = [found[name] for name in found if name.split()[0] in ("norm", "add", "act", "heads", "scan")]
    assert all(variant["resident"] * variant["warps"] >= 20 for variant in passes), passes
