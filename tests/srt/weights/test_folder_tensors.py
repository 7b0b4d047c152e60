"""Matrices of a safetensors folder as blocks: the numbers of the tensors, and pages that are given back."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from umbel.srt.kernels.cpu.library import load_library
from umbel.srt.kernels.cpu.linear import PackedMatrix, dequantise
from umbel.srt.weights.folder_tensors import FolderTensors
from umbel.srt.weights.safetensors_folder import open_tensors

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.mark.parametrize("kind", DTYPES)
def test_a_block_holds_the_numbers_of_its_tensor(kind: str, tmp_path: Path) -> None:
    written = {
        "a": torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(DTYPES[kind]),
        "b": torch.randn(64, generator=torch.Generator().manual_seed(2)).to(DTYPES[kind]),
    }
    save_file(written, tmp_path / "model.safetensors")
    tensors = FolderTensors(open_tensors(tmp_path))
    block = tensors.block("a")
    assert block is not None
    assert (block.kind, block.shape) == (kind, (3, 64))
    assert torch.equal(dequantise(load_library(), block), written["a"].float())
    assert torch.equal(tensors["a"], written["a"])
    assert tensors.block("b") is None, "it is no matrix"
    assert set(tensors) == {"a", "b"}


def resident(path: Path) -> int:
    """Bytes of a file's pages that this process has mapped and touched."""
    kib, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and first == "Rss:":
            kib += int(line.split()[1])
    return kib * 1024


def pack_and_measure(path: Path, rows: int) -> tuple[int, int]:
    """Packs a matrix of 1,024 inputs → resident bytes of the file before and after."""
    save_file({"a": torch.ones(rows, 1024, dtype=torch.bfloat16)}, path / "model.safetensors")
    tensors = FolderTensors(open_tensors(path))
    block = tensors.block("a")
    assert block is not None
    assert int(block.data.max()) > 0, "every page is touched"
    before = resident(path / "model.safetensors")
    matrix = PackedMatrix(load_library(), [block])
    assert matrix.n == rows
    return before, resident(path / "model.safetensors")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_file_is_not_resident_next_to_its_packed_copy(tmp_path: Path) -> None:
    before, after = pack_and_measure(tmp_path, 1024)
    assert before >= 2 << 20
    assert after < before / 10


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_file_is_not_resident_next_to_its_packed_copy(tmp_path: Path) -> None:
    before, after = pack_and_measure(tmp_path, 50_000)
    assert before >= 100e6
    assert after < before / 100
