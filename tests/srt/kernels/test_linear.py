"""Linears of floats and of codes against functional.linear, on every instruction set that this machine executes."""

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from umbel.lang.errors import ParameterError
from umbel.srt.kernels.cpu.library import Isa, cpu_flags, load_library
from umbel.srt.kernels.cpu.linear import CODED, CodedRows, Format, PackedMatrix
from umbel.srt.layers.quantized import Codes, QuantizedTensor

from .native import isa_cases, native_isas, with_each_team

FLOATS = (Format.F32, Format.BF16, Format.F16)
DTYPES = {Format.F32: torch.float32, Format.BF16: torch.bfloat16, Format.F16: torch.float16}
PAIRED = (Isa.AVX512,) if "avx512_bf16" in cpu_flags() else ()
ROUNDING = (Isa.AMX, Isa.AMX_EMULATED, *PAIRED)  # BF16 rounds x as well

# rows, n, k: one and many tiles of rows, blocks of rows, cut panels, odd k, k of one and several blocks
SHAPES = [
    *((1, 16, 64), (1, 100, 63), (2, 33, 65), (3, 17, 640), (4, 80, 31), (5, 48, 513), (6, 200, 1024), (7, 99, 1)),
    *((8, 64, 2), (13, 70, 1537), (16, 64, 96), (17, 130, 640), (33, 15, 1030), (70, 130, 640), (200, 40, 700)),
]


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


def rounded(weight: torch.Tensor, form: Format) -> torch.Tensor:
    return weight.to(DTYPES[form]).float()


def reference_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, form: Format, isa: Isa
) -> torch.Tensor:
    """In float64, so that what differs is the kernel's own rounding."""
    inputs = x.bfloat16() if form is Format.BF16 and isa in ROUNDING else x
    return functional.linear(inputs.double(), rounded(weight, form).double(), None if bias is None else bias.double())


def assert_close(out: torch.Tensor, expected: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Within what float32 sums of these magnitudes may lose: √k roundings of the largest partial sums."""
    scale = x.norm(dim=1, keepdim=True).double() * weight.norm(dim=1).double()
    assert bool(((out.double() - expected).abs() <= 1e-6 * scale + 1e-6).all())


@pytest.mark.parametrize("form", FLOATS)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
@pytest.mark.sampled(5)
def test_a_linear_is_that_of_torch(library: ctypes.CDLL, isa: Isa, form: Format, rows: int, n: int, k: int) -> None:
    x, weight, bias = normal(rows, k), normal(n, k, seed=1), normal(n, seed=2)
    matrix = PackedMatrix(library, [weight], form)
    assert_close(matrix(x), reference_product(x, weight, None, form, isa), x, weight)
    assert_close(matrix(x, bias), reference_product(x, weight, bias, form, isa), x, weight)


@pytest.mark.parametrize("rows", [1, 40])
def test_an_exact_matrix_does_not_round_its_inputs(library: ctypes.CDLL, rows: int) -> None:
    x, weight = normal(rows, 200), normal(40, 200, seed=1).bfloat16()
    expected = functional.linear(x.double(), weight.double())
    assert_close(PackedMatrix(library, [weight], exact=True)(x), expected, x, weight.float())


@pytest.mark.parametrize("isa", [case for case in isa_cases() if case.values[0] in PAIRED])
def test_numbers_that_are_none_reach_the_outputs_of_pairs(library: ctypes.CDLL) -> None:
    x = normal(3, 65)
    x[0, 7], x[1, 64] = torch.nan, torch.inf
    out = PackedMatrix(library, [normal(20, 65, seed=1)], Format.BF16)(x)
    assert bool(out[0].isnan().all())
    assert bool(out[1].isinf().all())
    assert bool(out[2].isfinite().all())


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 150), st.integers(1, 600), st.sampled_from(FLOATS), st.integers(0, 5))
def test_sizes_and_strides_are_free(rows: int, n: int, k: int, form: Format, gap: int) -> None:
    for isa in native_isas():
        library = load_library(isa)
        library.umbel_set_threads(2)
        x, weight = normal(rows, k + gap)[:, :k], normal(n, k + gap, seed=1)[:, :k]
        around = torch.full((rows, n + gap), 7.0)
        PackedMatrix(library, [weight], form)(x, out=around[:, :n])
        assert_close(around[:, :n], reference_product(x, weight, None, form, isa), x, weight)
        assert bool((around[:, n:] == 7).all()), "nothing is written past the outputs"
        library.umbel_set_threads(1)


@pytest.mark.parametrize("form", FLOATS)
def test_what_lies_past_a_row_is_not_read(library: ctypes.CDLL, form: Format) -> None:
    x = torch.full((9, 80), float("nan"))
    x[:, :65] = normal(9, 65)
    weight = normal(20, 65, seed=1)
    out = PackedMatrix(library, [weight], form)(x[:, :65])
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("form", FLOATS)
def test_a_row_gives_the_same_bits_alone_and_in_a_batch(library: ctypes.CDLL, form: Format) -> None:
    x = normal(130, 2300)  # several blocks, also of pairs
    matrix = PackedMatrix(library, [normal(90, 2300, seed=1)], form)
    bias = normal(90, seed=2)
    together = matrix(x, bias)
    for rows in (1, 2, 3, 5, 6, 7, 11, 16, 17, 31, 32, 48):
        assert torch.equal(matrix(x[40 : 40 + rows], bias), together[40 : 40 + rows])


@pytest.mark.parametrize("form", FLOATS)
@pytest.mark.parametrize("rows", [1, 5, 40, 130])
@pytest.mark.sampled(5)
def test_the_number_of_threads_changes_no_bit(library: ctypes.CDLL, form: Format, rows: int) -> None:
    x, weight = normal(rows, 700), normal(410, 700, seed=1)
    first, *others = with_each_team(library, lambda: PackedMatrix(library, [weight], form)(x))
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("form", FLOATS)
def test_a_panel_gives_the_bits_of_the_whole(library: ctypes.CDLL, form: Format) -> None:
    x = normal(21, 645)
    matrix = PackedMatrix(library, [normal(41, 645, seed=1)], form)
    whole = functional.pad(matrix(x), (0, 7))
    for panel in range(3):
        assert torch.equal(matrix.panel(x, panel), whole[:, 16 * panel : 16 * panel + 16])


@pytest.mark.parametrize("form", FLOATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stacked_sources_are_one_matrix(library: ctypes.CDLL, form: Format, dtype: torch.dtype) -> None:
    whole = normal(107, 333).to(dtype)
    x = normal(4, 333, seed=1)
    parts = [whole[:37], whole[37:38], whole[38:100], whole[100:]]
    assert torch.equal(PackedMatrix(library, parts, form)(x), PackedMatrix(library, [whole.float()], form)(x))


def test_a_strided_source_is_read_where_it_lies(library: ctypes.CDLL) -> None:
    whole, x = normal(64, 200), normal(3, 64, seed=1)
    part, turned = whole[::2, 100:164], whole[:, :50].T
    for source in (part, turned):
        matrix, plain = PackedMatrix(library, [source], Format.F32), PackedMatrix(library, [source.clone()], Format.F32)
        assert torch.equal(matrix(x), plain(x))


def test_float32_weights_become_the_nearest_of_16_bits(library: ctypes.CDLL) -> None:
    weight = normal(48, 70) * 1e3
    weight[:8] *= 1e-9  # no normal numbers of float16
    x = torch.eye(70)
    for form in (Format.BF16, Format.F16):
        assert torch.equal(PackedMatrix(library, [weight], form)(x), rounded(weight, form).T.contiguous())


@pytest.mark.parametrize("form", FLOATS)
def test_nan_and_infinity_stay_in_their_row(library: ctypes.CDLL, form: Format) -> None:
    x = normal(20, 130)
    matrix = PackedMatrix(library, [normal(50, 130, seed=1)], form)
    sound = matrix(x)
    x[3, 5], x[11, 129] = float("nan"), float("inf")
    out = matrix(x)
    assert bool(out[3].isnan().all())
    assert not bool(out[11].isfinite().any())
    kept = [row for row in range(20) if row not in (3, 11)]
    assert torch.equal(out[kept], sound[kept])


def test_no_rows_are_no_work(library: ctypes.CDLL) -> None:
    assert PackedMatrix(library, [normal(20, 30)], Format.F32)(normal(0, 30)).shape == (0, 20)


def test_a_matrix_takes_its_weights_and_their_padding(library: ctypes.CDLL) -> None:
    assert PackedMatrix(library, [normal(50, 100)], Format.F32).bytes == 64 * 128 * 4
    assert PackedMatrix(library, [normal(50, 100)], Format.BF16).bytes == 64 * 128 * 2
    assert PackedMatrix(library, [normal(50, 100).half()]).bytes == 64 * 128 * 2


def test_what_a_kernel_cannot_read_is_refused(library: ctypes.CDLL) -> None:
    matrix = PackedMatrix(library, [normal(20, 30)], Format.BF16)
    with pytest.raises(ParameterError, match=r"x is \(4, 31\)"):
        matrix(normal(4, 31))
    with pytest.raises(ParameterError, match="bfloat16"):
        matrix(normal(4, 30).bfloat16())
    with pytest.raises(ParameterError, match="next to each other"):
        matrix(normal(30, 4).T)
    with pytest.raises(ParameterError, match="out is"):
        matrix(normal(4, 30), out=torch.empty(4, 19))
    with pytest.raises(ParameterError, match="bias is"):
        matrix(normal(4, 30), normal(21))
    with pytest.raises(ParameterError, match="panel=2"):
        matrix.panel(normal(4, 30), 2)
    with pytest.raises(ParameterError, match="cannot be stacked"):
        PackedMatrix(library, [normal(2, 3), normal(2, 4)], Format.F32)
    with pytest.raises(ParameterError, match="float64"):
        PackedMatrix(library, [normal(2, 3).double()], Format.F32)
    with pytest.raises(ParameterError, match="give blocks as they are"):
        PackedMatrix(library, [normal(2, 32)], Format.Q4_0)
    with pytest.raises(ParameterError, match="empty"):
        PackedMatrix(library, [], Format.F32)


# ------------------------------------------------------------------------------------------ codes


def coded(form: Format, n: int, k: int, group: int) -> tuple[CodedRows, torch.Tensor]:
    """Returns random codes, and the float32 matrix that they stand for."""
    random = np.random.default_rng(n + k + group)
    if form is Format.FLOAT8:
        codes = random.integers(0, 256, (n, k), dtype=np.uint8)
        codes[codes & 127 == 127] = 3
        stored = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    else:
        codes = random.integers(0, 256, (n, k // 2), dtype=np.uint8)
        stored = torch.from_numpy(codes)
    scales = random.uniform(-0.01, 0.1, (n, k // group)).astype(np.float32)
    dense = QuantizedTensor(Codes[form.name], stored, torch.from_numpy(scales)).dense()
    return CodedRows(form, codes, scales), dense


@pytest.mark.parametrize("form", [Format.FLOAT8, Format.NF4])
@pytest.mark.parametrize("rows", [1, 130])
def test_the_number_of_threads_changes_no_bit_of_codes(library: ctypes.CDLL, form: Format, rows: int) -> None:
    x, (source, _) = normal(rows, 768), coded(form, 410, 768, 24)
    first, *others = with_each_team(library, lambda: PackedMatrix(library, [source])(x))
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize("form", CODED)
@pytest.mark.parametrize(("n", "k", "group"), [(70, 2304, 128), (33, 40, 40), (48, 1200, 24)])
def test_codes_have_the_bits_of_their_floats(library: ctypes.CDLL, form: Format, n: int, k: int, group: int) -> None:
    source, dense = coded(form, n, k, group)
    matrix, plain = PackedMatrix(library, [source, source]), PackedMatrix(library, [dense, dense])
    x, bias = normal(70, k), normal(2 * n, seed=1)
    together = matrix(x, bias)
    assert torch.equal(together, plain(x, bias))
    for rows in (1, 2, 3, 7, 12, 13):
        assert torch.equal(matrix(x[9 : 9 + rows], bias), together[9 : 9 + rows])
    assert torch.equal(matrix.panel(x, 1), plain.panel(x, 1))


def test_codes_take_their_bits_and_those_of_the_scales(library: ctypes.CDLL) -> None:
    assert PackedMatrix(library, [coded(Format.FLOAT8, 64, 512, 128)[0]]).bytes == 64 * 512 + 64 * 4 * 4
    assert PackedMatrix(library, [coded(Format.NF4, 64, 512, 64)[0]]).bytes == 64 * 512 // 2 + 64 * 8 * 4


def test_a_code_that_is_no_number_spoils_its_output(library: ctypes.CDLL) -> None:
    source, _ = coded(Format.FLOAT8, 20, 64, 32)
    source.codes[3, 40], source.codes[17, 2] = 0x7F, 0xFF
    out = PackedMatrix(library, [source])(normal(2, 64))
    assert out.isnan().nonzero().tolist() == [[0, 3], [0, 17], [1, 3], [1, 17]]


def test_codes_that_are_not_sound_are_refused(library: ctypes.CDLL) -> None:
    codes, scales = np.zeros((4, 64), np.uint8), np.ones((4, 2), np.float32)
    for source, message in (
        (CodedRows(Format.FLOAT8, codes, scales[:3]), r"with scales float32 \(3, 2\)"),
        (CodedRows(Format.INT4, codes, scales), "in INT4; give .* in FLOAT8, NF4"),
        (CodedRows(Format.FLOAT8, codes, np.ones((4, 3), np.float32)), "64 inputs in 3 groups"),
        (CodedRows(Format.FLOAT8, codes[:, :60], scales), "60 inputs in 2 groups"),
    ):
        with pytest.raises(ParameterError, match=message):
            PackedMatrix(library, [source])
    with pytest.raises(ParameterError, match="with parts in FLOAT8"):
        PackedMatrix(library, [CodedRows(Format.FLOAT8, codes, scales)], order=np.arange(64, dtype=np.int32))
