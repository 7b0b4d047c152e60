"""Products of blocks, integers and codes on instruction sets that take a compilation of their own: AVX-VNNI, and ARM in
an emulator.

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
from umbel.srt.kernels.cpu.linear import CODED, CodedRows, Format, IntegerRows, PackedMatrix
from umbel.srt.layers.checkpoint import BlockTensor
from umbel.srt.layers.quantized import TABLES, Codes

from .test_blocks import QUANTISED, assert_close, assert_fine, blocks, dequantised, integers, normal
from .test_linear import coded

pytestmark = pytest.mark.nightly

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
INTEGERS = {4: Format.INT4, 8: Format.INT8_GROUPS}  # with zero points, by bits
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


@pytest.mark.skipif(not usable(Isa.AVX_VNNI, cpu_flags()), reason="this CPU has no AVX-VNNI")
@pytest.mark.parametrize("bits", INTEGERS)
def test_integers_on_avx_vnni(bits: int) -> None:
    source, weight = integers(50, 768, 64, bits=bits)
    matrix = PackedMatrix(load_library(Isa.AVX_VNNI), [source])
    fine = PackedMatrix(load_library(Isa.AVX_VNNI), [source], fine=True)
    for rows in (1, 5, 70):
        assert_close(matrix(normal(rows, 768)), normal(rows, 768), weight)
        assert_fine(fine(normal(rows, 768)), normal(rows, 768), weight)


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
    source = blocks(kind, 37, 768)
    check_both_inputs(driver, source, dequantised(source))


@pytest.mark.parametrize("bits", INTEGERS)
def test_integers_on_arm(driver: Path, bits: int) -> None:
    check_both_inputs(driver, *integers(37, 768, 64, bits=bits))


@pytest.mark.parametrize("form", CODED)
def test_codes_on_arm(driver: Path, form: Format) -> None:
    source, weight = coded(form, 37, 1200, 24)
    x = normal(70, 1200)
    together = product(driver, source, x)
    scale = x.norm(dim=1, keepdim=True) * weight.norm(dim=1)
    assert bool(((together - x.double() @ weight.double().T).abs() <= 2e-6 * scale).all())
    for rows in (1, 2, 3, 5):
        assert torch.equal(product(driver, source, x[:rows]), together[:rows])


def check_both_inputs(driver: Path, source: BlockTensor | IntegerRows, weight: torch.Tensor) -> None:
    """Products with inputs of 8 and of 16 bits, of many rows and of few."""
    x = normal(70, 768)
    together = product(driver, source, x)
    assert_close(together, x, weight)
    for rows in (1, 3, 4, 5):
        assert torch.equal(product(driver, source, x[:rows]), together[:rows])
    fine = product(driver, source, x, terms=2)
    assert_fine(fine, x, weight)
    assert torch.equal(product(driver, source, x[:3], terms=2), fine[:3])


def product(
    driver: Path, source: BlockTensor | IntegerRows | CodedRows, x: torch.Tensor, terms: int = 1
) -> torch.Tensor:
    empty = np.zeros(0, np.uint8)
    match source:
        case BlockTensor():
            form, group, parts = Format[source.kind], 0, (source.data, empty, empty)
        case IntegerRows():
            assert source.zeros is not None
            form, group, parts = INTEGERS[source.bits], source.group, (source.codes, source.scales, source.zeros)
        case CodedRows():
            table = TABLES.get(Codes[source.form.name], ())
            form, group = source.form, source.group
            parts = (source.codes, source.scales, np.array(table, dtype=np.float32))
    n, k = source.shape
    head = np.array([form.value, n, k, len(x), terms, group, *(part.nbytes for part in parts)], dtype=np.int64)
    given = b"".join(part.tobytes() for part in (head, *parts, x.numpy()))
    done = subprocess.run([EMULATOR, "-cpu", "max", str(driver)], input=given, capture_output=True, check=True)
    return torch.from_numpy(np.frombuffer(done.stdout, dtype=np.float32).reshape(len(x), n).copy())
