"""Products of blocks on instruction sets that take a compilation of their own: AVX-VNNI, and ARM in an emulator.

ARM needs Debian's `g++-aarch64-linux-gnu` and `qemu-user`.
"""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from umbel.srt.kernels.cpu.library import FLAGS, SOURCES, Isa, cpu_flags, load_library, usable
from umbel.srt.kernels.cpu.linear import Format, PackedMatrix

from .test_blocks import QUANTISED, assert_close, assert_fine, blocks, dequantised, normal

pytestmark = pytest.mark.nightly

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
NEEDED = ("blocks*.cpp", "linear*.cpp", "memory.cpp", "threads.cpp", "int8_rows.cpp", "inputs.cpp")


@pytest.mark.skipif(not usable(Isa.AVX_VNNI, cpu_flags()), reason="this CPU has no AVX-VNNI")
@pytest.mark.parametrize("kind", QUANTISED)
def test_avx_vnni(kind: str) -> None:
    weight = blocks(kind, 50, 768)
    matrix = PackedMatrix(load_library(Isa.AVX_VNNI), [weight])
    fine = PackedMatrix(load_library(Isa.AVX_VNNI), [weight], fine=True)
    for rows in (1, 5, 70):
        assert_close(matrix(normal(rows, 768)), normal(rows, 768), dequantised(weight))
        assert_fine(fine(normal(rows, 768)), normal(rows, 768), dequantised(weight))


@pytest.fixture(scope="module", params=[Isa.NEON, Isa.NEON_I8MM, Isa.PORTABLE], ids=lambda isa: isa.value)
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """blocks_driver.cpp for one ARM instruction set."""
    if not (shutil.which(COMPILER) and shutil.which(EMULATOR)):
        pytest.skip(f"{COMPILER} or {EMULATOR} is not installed")
    folder = tmp_path_factory.mktemp(request.param.value)
    flags = [flag for flag in FLAGS if flag != "-shared"] + [*request.param.compiler_flags, f"-I{SOURCES}"]
    sources = [Path(__file__).with_name("blocks_driver.cpp"), *(path for name in NEEDED for path in SOURCES.glob(name))]

    def compiled(source: Path) -> str:
        target = str(folder / f"{source.name}.o")
        subprocess.run([COMPILER, *flags, "-c", str(source), "-o", target], check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sources))
    subprocess.run([COMPILER, "-static", "-pthread", *objects, "-o", str(folder / "driver")], check=True)
    return folder / "driver"


@pytest.mark.parametrize("kind", QUANTISED)
def test_arm(driver: Path, kind: str) -> None:
    weight = blocks(kind, 37, 768)
    together = product(driver, kind, normal(70, 768))
    assert_close(together, normal(70, 768), dequantised(weight))
    for rows in (1, 3, 4, 5):
        assert torch.equal(product(driver, kind, normal(70, 768)[:rows]), together[:rows])
    fine = product(driver, kind, normal(70, 768), terms=2)
    assert_fine(fine, normal(70, 768), dequantised(weight))
    assert torch.equal(product(driver, kind, normal(70, 768)[:3], terms=2), fine[:3])


def product(driver: Path, kind: str, x: torch.Tensor, *, terms: int = 1) -> torch.Tensor:
    weight = blocks(kind, 37, 768)
    head = np.array([Format[kind].value, 37, 768, len(x), weight.data.shape[1], terms], dtype=np.int64)
    given = head.tobytes() + weight.data.tobytes() + x.numpy().tobytes()
    done = subprocess.run([EMULATOR, "-cpu", "max", str(driver)], input=given, capture_output=True, check=True)
    return torch.from_numpy(np.frombuffer(done.stdout, dtype=np.float32).reshape(len(x), 37).copy())
