"""Products of matrices in ggml's blocks with inputs of 8 bits, on every instruction set that this machine executes.

The references are the `gguf` library's dequantisation and the same rounding of inputs in torch. Blocks are random bytes
with scales of sane size, so that all codes occur.
"""

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from umbel.lang.errors import ParameterError
from umbel.srt.kernels.cpu.head import Head
from umbel.srt.kernels.cpu.library import Isa, load_library
from umbel.srt.kernels.cpu.linear import BLOCKS, IntegerRows, PackedMatrix, dequantise
from umbel.srt.layers.checkpoint import BlockTensor

from .native import isa_cases, native_isas, with_each_team

FLOATS = ("F32", "F16", "BF16")
QUANTISED = tuple(kind for kind in BLOCKS if kind not in FLOATS)
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))}


@pytest.fixture(params=isa_cases())
def isa(request: pytest.FixtureRequest) -> Isa:
    instruction_set: Isa = request.param
    return instruction_set


@pytest.fixture
def library(isa: Isa) -> Iterator[ctypes.CDLL]:
    loaded = load_library(isa)
    loaded.umbel_set_threads(2)
    yield loaded
    loaded.umbel_set_threads(1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blocks(kind: str, n: int, k: int, *, seed: int = 0, heads: int | None = None) -> BlockTensor:
    random = np.random.default_rng(seed)
    inputs, size = BLOCKS[kind]
    if kind in FLOATS:
        values = random.standard_normal((n, k)).astype(np.float32)
        half = values.astype(np.float16) if kind == "F16" else (values.view(np.uint32) >> 16).astype(np.uint16)
        return BlockTensor(kind, (n, k), (values if kind == "F32" else half).view(np.uint8), heads)
    data = random.integers(0, 256, (n, k // inputs, size), dtype=np.uint8)
    if kind == "MXFP4":
        data[..., 0] = random.integers(0, 4, data.shape[:2]) + 124
    for at in SCALES.get(kind, (0,)) if kind != "MXFP4" else ():
        scales = random.uniform(0.01, 0.1, data.shape[:2]).astype(np.float16) * random.choice([-1, 1], data.shape[:2])
        data[..., at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return BlockTensor(kind, (n, k), data.reshape(n, -1), heads)


def dequantised(source: BlockTensor) -> torch.Tensor:
    """What the `gguf` library reads, in the order of Hugging Face."""
    kind = gguf.GGMLQuantizationType[source.kind]
    rows = torch.from_numpy(gguf.dequantize(source.data, kind).astype(np.float32))
    if source.heads:
        n, k = source.shape
        rows = rows.view(source.heads, n // source.heads // 2, 2, k).transpose(1, 2).reshape(n, k)
    return rows


def rounded(x: torch.Tensor, *, fused: bool) -> torch.Tensor:
    """Signed bytes with one scale for each 32 inputs, in float64. fused: quotients are not rounded before they are
    integers, as machines compute them that round a product and a sum at once: it counts where one is at a half."""
    parts = x.view(len(x), -1, 32)
    largest = parts.abs().amax(2, keepdim=True).clamp_min(1e-30)
    inverse = torch.tensor(127.0) / largest  # 127 / largest would be 127 times its inverse
    quotients = parts.double() * inverse.double() if fused else (parts * inverse).double()
    return (quotients.round() * (largest / 127).double()).view(x.shape)


def bits_of(kind: str) -> int:
    return 8 if kind == "Q8_0" else 6  # at most


def assert_product(isa: Isa, bits: int, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """The product of inputs as this instruction set rounds them: AVX2 gives them 16 bits where codes have 8."""
    (assert_fine if isa is Isa.AVX2 and bits == 8 else assert_close)(out, x, weight)


def assert_close(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Within what float32 sums of these magnitudes may lose."""
    scale = x.double().norm(dim=1, keepdim=True) * weight.norm(dim=1).double()
    errors = [(out - rounded(x, fused=fused) @ weight.double().T).abs() for fused in (False, True)]
    assert bool((torch.minimum(*errors) <= 2e-6 * scale).all())


def assert_fine(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Within what rounding of inputs to 16 bits may lose, and float32 sums; 8 bits lose some hundred times as much."""
    scale = x.double().norm(dim=1, keepdim=True) * weight.norm(dim=1).double()
    half_steps = x.double().view(len(x), -1, 32).abs().amax(2) / (127 * 256) / 2
    rounding = half_steps @ weight.double().view(len(weight), -1, 32).abs().sum(2).T
    assert bool(((out - x.double() @ weight.double().T).abs() <= rounding + 2e-6 * scale).all())


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.sampled(5)
def test_a_product_is_that_of_the_dequantised_weights_and_the_rounded_inputs(
    library: ctypes.CDLL, isa: Isa, kind: str
) -> None:
    weight = blocks(kind, 50, 768)
    matrix, floats = PackedMatrix(library, [weight]), dequantised(weight)
    for rows in (1, 2, 3, 4, 5, 17, 70):
        x = normal(rows, 768, seed=rows)
        assert_product(isa, bits_of(kind), matrix(x), x, floats)


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.sampled(5)
def test_fine_inputs_have_16_bits(library: ctypes.CDLL, kind: str) -> None:
    weight, bias = blocks(kind, 50, 768), normal(50, seed=1)
    matrix, floats, x = PackedMatrix(library, [weight], fine=True), dequantised(weight), normal(70, 768)
    x[5, 40:50] *= 1000  # spoils the other inputs of two blocks, as far as they count next to it
    x[6, 64:96] = 0
    together = matrix(x, bias)
    assert_fine(together - bias, x, floats)
    for first, rows in ((5, 1), (3, 2), (60, 3), (20, 40)):
        assert torch.equal(matrix(x[first : first + rows], bias), together[first : first + rows])
    assert torch.equal(matrix.panel(x, 1) + bias[16:32], together[:, 16:32])
    tokens = np.array([49, 0, 17], dtype=np.int32)
    assert torch.equal(Head(library, matrix).some(x[5:10], tokens) + bias[tokens], together[5:10, tokens])
    x[7, 5] = float("nan")
    assert matrix(x).isfinite().all(1).tolist() == [row != 7 for row in range(70)]


@pytest.mark.parametrize("kind", QUANTISED)
def test_odd_sizes(library: ctypes.CDLL, isa: Isa, kind: str) -> None:
    inputs = BLOCKS[kind][0]
    for n, k in ((1, inputs), (15, 3 * inputs), (33, 5 * inputs)):
        weight, x, bias = blocks(kind, n, k), normal(3, k + 5)[:, :k], normal(n, seed=1)
        around = torch.full((3, n + 2), 7.0)
        PackedMatrix(library, [weight])(x, bias, out=around[:, :n])
        assert_product(isa, bits_of(kind), around[:, :n] - bias, x, dequantised(weight))
        assert bool((around[:, n:] == 7).all()), "nothing is written past the outputs"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", QUANTISED)
def test_a_row_gives_the_same_bits_alone_in_a_batch_and_in_a_panel(library: ctypes.CDLL, kind: str) -> None:
    x, matrix = normal(150, 2304), PackedMatrix(library, [blocks(kind, 37, 2304)])
    together = matrix(x)
    for first, rows in ((140, 1), (3, 2), (70, 3), (60, 4), (50, 5), (0, 16), (60, 70)):
        assert torch.equal(matrix(x[first : first + rows]), together[first : first + rows])
    assert torch.equal(matrix.panel(x, 2)[:, :5], together[:, 32:])


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 410, 512), (5, 410, 512), (130, 410, 512), (1, 20, 16_896)])
@pytest.mark.sampled(4)
def test_the_number_of_threads_changes_no_bit(library: ctypes.CDLL, kind: str, rows: int, n: int, k: int) -> None:
    x, weight = normal(rows, k), blocks(kind, n, k)
    first, *others = with_each_team(library, lambda: PackedMatrix(library, [weight])(x))
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("kind", [*QUANTISED, *FLOATS])
def test_rows_are_dequantised_as_the_gguf_library_does(library: ctypes.CDLL, kind: str) -> None:
    source = blocks(kind, 9, 512)
    torch.testing.assert_close(dequantise(library, source), dequantised(source), rtol=1e-6, atol=1e-6)
    some = with_each_team(library, lambda: dequantise(library, source, np.array([8, 0, 3, 3])))
    assert all(torch.equal(each, dequantise(library, source)[[8, 0, 3, 3]]) for each in some)


@pytest.mark.parametrize("rows", [1, 9])
def test_parts_of_several_formats_are_one_product(library: ctypes.CDLL, rows: int) -> None:
    sources = [
        *(blocks("Q4_K", 40, 512), blocks("Q4_K", 23, 512, seed=1), blocks("Q6_K", 17, 512)),
        *(normal(8, 512, seed=2), blocks("F16", 20, 512), blocks("Q8_0", 33, 512)),
    ]
    x, bias = normal(rows, 512), normal(141, seed=1)
    matrix = PackedMatrix(library, sources)
    assert [form.name for form in matrix.formats] == ["Q4_K", "Q6_K", "F32", "F16", "Q8_0"]
    alone = torch.cat([PackedMatrix(library, [source])(x) for source in sources], dim=1)
    assert torch.equal(matrix(x, bias), alone + bias)


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "F16", "F32"])
def test_rows_of_heads_come_into_the_order_of_hugging_face(library: ctypes.CDLL, kind: str) -> None:
    source, x = blocks(kind, 3 * 10, 256, heads=3), torch.eye(256)
    plain = BlockTensor(kind, source.shape, source.data)
    turned = PackedMatrix(library, [source])(x).view(256, 3, 2, 5).transpose(2, 3).reshape(256, 30)
    assert torch.equal(turned, PackedMatrix(library, [plain])(x))
    torch.testing.assert_close(PackedMatrix(library, [source])(x), dequantised(source).T, rtol=1e-5, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(*(st.sampled_from(QUANTISED), st.integers(1, 70), st.integers(1, 60), st.integers(1, 3)), st.integers(0, 2**16))
def test_sizes_are_free(kind: str, rows: int, n: int, spans: int, seed: int) -> None:
    weight, x = blocks(kind, n, spans * BLOCKS[kind][0], seed=seed), normal(rows, spans * BLOCKS[kind][0], seed=seed)
    for isa in native_isas():
        library = load_library(isa)
        library.umbel_set_threads(2)
        assert_product(isa, bits_of(kind), PackedMatrix(library, [weight])(x), x, dequantised(weight))
        library.umbel_set_threads(1)


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.sampled(5)
def test_the_largest_codes_and_inputs_do_not_overflow(library: ctypes.CDLL, kind: str) -> None:
    for byte in (0, 127, 128, 255):
        source = blocks(kind, 16, 256)
        size = BLOCKS[kind][1]
        data = source.data.reshape(16, -1, size)
        scales = {at + i for at in SCALES.get(kind, (0,)) for i in range(1 if kind == "MXFP4" else 2)}
        data[..., [at for at in range(size) if at not in scales]] = byte
        for x in (torch.ones(2, 256), -torch.ones(2, 256), torch.ones(2, 256) * torch.tensor([1.0, -1.0]).repeat(128)):
            matrix = PackedMatrix(library, [source])
            expected = rounded(x, fused=True) @ dequantised(source).double().T
            torch.testing.assert_close(matrix(x).double(), expected, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "Q8_0"])
def test_rows_that_are_not_numbers_spoil_no_other(library: ctypes.CDLL, kind: str) -> None:
    matrix, x = PackedMatrix(library, [blocks(kind, 40, 512)]), normal(9, 512)
    sound = matrix(x)
    x[3, 5], x[7, 511] = float("nan"), float("inf")
    out = matrix(x)
    assert not bool(out[[3, 7]].isfinite().any())
    kept = [0, 1, 2, 4, 5, 6, 8]
    assert torch.equal(out[kept], sound[kept])


@pytest.mark.parametrize(
    ("kind", "most"), [("Q4_0", 1.0), ("Q8_0", 1.0), ("Q6_K", 1.0), ("Q4_K", 1.03), ("Q3_K", 1.04)]
)
def test_memory_is_hardly_more_than_the_file(library: ctypes.CDLL, kind: str, most: float) -> None:
    source = blocks(kind, 64, 2048)
    assert source.data.nbytes <= PackedMatrix(library, [source]).bytes <= most * source.data.nbytes


def integers(n: int, k: int, group: int, *, bits: int, zeros: bool = True) -> tuple[IntegerRows, torch.Tensor]:
    """Returns random integers, and the float32 matrix that they stand for."""
    random = np.random.default_rng(group)
    top = 1 << bits
    codes = random.integers(0, top, (n, k), dtype=np.uint8)
    scales = random.uniform(0.01, 0.1, (n, k // group)).astype(np.float16)
    zero = random.integers(0, top, scales.shape, dtype=np.uint8) if zeros else None
    source = IntegerRows(codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4, scales, zero, bits)
    spread = np.repeat(np.full(scales.shape, top // 2) if zero is None else zero, group, axis=1)
    return source, torch.from_numpy(
        np.repeat(scales.astype(np.float32), group, axis=1) * (codes - spread.astype(np.int16))
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, 512])
def test_integers_in_groups(library: ctypes.CDLL, isa: Isa, group: int, zeros: bool, bits: int) -> None:
    k = max(256, 2 * group)
    source, weight = integers(40, k, group, bits=bits, zeros=zeros)
    matrix = PackedMatrix(library, [source, source])
    for rows in (1, 20):
        x = normal(rows, k)
        assert_product(isa, bits, matrix(x), x, torch.cat([weight, weight]))


@pytest.mark.parametrize("fine", [False, True])
def test_inputs_are_multiplied_in_the_order_of_the_weights(library: ctypes.CDLL, fine: bool) -> None:
    source, x = blocks("Q4_K", 40, 512), normal(70, 512)
    order = np.random.default_rng(0).permutation(512).astype(np.int32)
    matrix, plain = PackedMatrix(library, [source], fine=fine, order=order), PackedMatrix(library, [source], fine=fine)
    permuted = x[:, torch.from_numpy(order)]
    for rows in (1, 3, 70):
        assert torch.equal(matrix(x[:rows]), plain(permuted[:rows]))
    assert torch.equal(matrix.panel(x, 1), plain.panel(permuted, 1))
    tokens = np.array([3, 39], dtype=np.int32)
    assert torch.equal(Head(library, matrix).some(x, tokens), Head(library, plain).some(permuted, tokens))


def test_a_head_in_blocks_gives_all_logits(library: ctypes.CDLL) -> None:
    matrix, x = PackedMatrix(library, [blocks("Q6_K", 700, 256)]), normal(5, 256)
    head = Head(library, matrix)
    logits = head.all(x)
    assert not head.screens
    assert head.bytes == 0
    best = head.best(x)
    assert best.tokens.tolist() == logits.argmax(1).tolist()
    assert best.logits.tolist() == logits.amax(1).tolist()
    tokens = np.array([0, 15, 16, 300, 699], dtype=np.int32)
    assert torch.equal(head.some(x, tokens), logits[:, tokens])


def test_pages_of_a_file_are_read_and_given_back(library: ctypes.CDLL, tmp_path: Path) -> None:
    source = blocks("Q4_0", 512, 4096)
    (tmp_path / "weights").write_bytes(b"GGUF" + source.data.tobytes())
    with (tmp_path / "weights").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data = np.frombuffer(mapped, dtype=np.uint8, offset=4).reshape(source.data.shape)
    x = normal(2, 4096)
    packed = PackedMatrix(library, [BlockTensor("Q4_0", source.shape, data)])
    assert _resident(mapped, data) < data.nbytes // 4
    assert torch.equal(packed(x), PackedMatrix(library, [source])(x))
    assert np.array_equal(data, source.data), "the file is read again"


def _resident(mapped: mmap.mmap, data: NDArray[np.uint8]) -> int:
    """Bytes of the mapping that this process holds, as the system counts them."""
    start = data.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{start:x}-"):
            return next(int(rest.split()[1]) * 1024 for rest in lines if rest.startswith("Rss:"))
    raise AssertionError("no such mapping")


def test_what_is_no_sound_matrix_is_refused(library: ctypes.CDLL) -> None:
    source = blocks("Q4_K", 6, 512)
    for wrong, message in (
        (BlockTensor("Q4_K", (6, 768), source.data), "6 × 768 in Q4_K"),
        (BlockTensor("Q4_K", (7, 512), source.data), "7 × 512 in Q4_K"),
        (BlockTensor("Q4_K", (6, 500), source.data), "6 × 500 in Q4_K"),
        (BlockTensor("Q4_K", (6, 512), source.data[:, ::-1]), "next to each other"),
        (BlockTensor("IQ2_S", (6, 512), source.data), "type IQ2_S"),
        (BlockTensor("Q4_K", (6, 512), source.data, heads=4), "6 outputs for 4 heads"),
        (BlockTensor("Q4_K", (6, 512), source.data, heads=2), "same even number"),
    ):
        with pytest.raises(ParameterError, match=message):
            PackedMatrix(library, [wrong])
    for order, parts, message in (
        (np.full(512, 512, np.int32), [source], r"order int32 \(512,\) of 512 inputs, with parts in blocks"),
        (np.zeros(511, np.int32), [source], "of numbers below 512"),
        (np.zeros(512, np.int64), [source], "order int64"),
        (np.zeros(512, np.int32), [source, normal(3, 512)], "parts in F32"),
    ):
        with pytest.raises(ParameterError, match=message):
            PackedMatrix(library, parts, order=order)
    with pytest.raises(ParameterError, match="from 6 to 6 of 6"):
        dequantise(library, source, np.array([6]))
    codes, scales = np.zeros((4, 32), np.uint8), np.ones((4, 2), np.float32)
    for integers, message in (
        (IntegerRows(codes, scales[:3]), "with scales"),
        (IntegerRows(codes, np.ones((4, 3), np.float32)), "64 inputs in 3 groups"),
        (IntegerRows(codes, scales * 1e6), "float16 holds"),
        (IntegerRows(codes, scales, np.full((4, 2), 16, np.uint8)), "from 0 to 15"),
        (IntegerRows(codes, scales, bits=3), "integers of 3 bits"),
    ):
        with pytest.raises(ParameterError, match=message):
            PackedMatrix(library, [integers])
