"""INT8 linears against float32 inputs times the dequantised weights, on every instruction set that runs here."""

import ctypes
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.srt.kernels.cpu.library import Isa, load_library
from umbel.srt.kernels.cpu.linear import Format, PackedMatrix

from .native import isa_cases, native_isas, with_each_team

LARGEST_INTEGER = 2**31 // (127 * 1024)  # of those that inputs become, so that a block's sum of products fits 32 bits
ARITHMETIC = 1e-6  # of |x| · |w|: what sums in float32 may lose

# rows, n, k: one and many tiles of rows, cut panels, k of one and several blocks of integers, odd k
SHAPES = [
    *((1, 16, 64), (2, 33, 65), (3, 17, 640), (4, 80, 31), (5, 48, 513), (6, 200, 1024), (7, 99, 1), (8, 64, 2)),
    *((13, 70, 1537), (16, 64, 96), (17, 130, 640), (33, 15, 1030), (70, 130, 640), (200, 40, 2100)),
]


@pytest.fixture(params=isa_cases())
def library(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    loaded = load_library(request.param)
    loaded.umbel_set_threads(2)
    yield loaded
    loaded.umbel_set_threads(1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dequantised(weight: torch.Tensor) -> torch.Tensor:
    """The reference of packing: bytes to nearest, one scale for each output."""
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
    stored = torch.where(scale > 0, (weight.float() / scale).round(), 0.0)
    return stored * scale


def assert_close(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    stored = dequantised(weight).double()
    expected = x.double() @ stored.T
    half_step = x.abs().amax(dim=1, keepdim=True).double() / LARGEST_INTEGER / 2
    allowed = half_step * stored.abs().sum(dim=1) + ARITHMETIC * x.norm(dim=1, keepdim=True) * stored.norm(dim=1)
    if bias is not None:
        expected, allowed = expected + bias, allowed + ARITHMETIC * bias.abs()
    assert bool(((out.double() - expected).abs() <= allowed + 1e-12).all())


@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
@pytest.mark.sampled(5)
def test_a_linear_is_inputs_times_dequantised_weights(library: ctypes.CDLL, rows: int, n: int, k: int) -> None:
    x, weight, bias = normal(rows, k), normal(n, k, seed=1), normal(n, seed=2)
    matrix = PackedMatrix(library, [weight], Format.INT8)
    assert_close(matrix(x), x, weight)
    assert_close(matrix(x, bias), x, weight, bias)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 70), st.integers(1, 150), st.integers(1, 600), st.integers(0, 5))
def test_sizes_and_strides_are_free(rows: int, n: int, k: int, gap: int) -> None:
    for isa in native_isas():
        library = load_library(isa)
        library.umbel_set_threads(2)
        x, weight = normal(rows, k + gap)[:, :k], normal(n, k + gap, seed=1)[:, :k]
        around = torch.full((rows, n + gap), 7.0)
        PackedMatrix(library, [weight], Format.INT8)(x, out=around[:, :n])
        assert_close(around[:, :n], x, weight)
        assert bool((around[:, n:] == 7).all()), "nothing is written past the outputs"
        library.umbel_set_threads(1)


def test_weights_are_rounded_to_the_nearest_byte(library: ctypes.CDLL) -> None:
    weight = normal(40, 130) * torch.logspace(-6, 6, 40)[:, None]
    out = PackedMatrix(library, [weight], Format.INT8)(torch.eye(130)).T
    expected = dequantised(weight)
    assert bool(((out - expected).abs() <= 1e-6 * expected.abs()).all())


@pytest.mark.nightly  # one of them alone is compiled for the default suite
def test_vectors_and_tiles_give_the_same_bits() -> None:
    libraries = [load_library(isa) for isa in native_isas() if isa is not Isa.PORTABLE]  # without fused additions
    x, weight = normal(37, 1500), normal(90, 1500, seed=1)
    outs = [PackedMatrix(library, [weight], Format.INT8)(x) for library in libraries]
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_a_row_gives_the_same_bits_alone_and_in_a_batch(library: ctypes.CDLL) -> None:
    x, bias = normal(130, 1100), normal(90, seed=2)
    matrix = PackedMatrix(library, [normal(90, 1100, seed=1)], Format.INT8)
    together = matrix(x, bias)
    for rows in (1, 2, 3, 4, 5, 6, 7, 11, 16, 17, 31, 48):
        assert torch.equal(matrix(x[40 : 40 + rows], bias), together[40 : 40 + rows])


@pytest.mark.parametrize("rows", [1, 5, 40, 130])
@pytest.mark.sampled(4)
def test_the_number_of_threads_changes_no_bit(library: ctypes.CDLL, rows: int) -> None:
    x, weight = normal(rows, 700), normal(410, 700, seed=1)
    first, *others = with_each_team(library, lambda: PackedMatrix(library, [weight], Format.INT8)(x))
    assert all(torch.equal(other, first) for other in others)


def test_the_largest_integers_do_not_overflow(library: ctypes.CDLL) -> None:
    for k in (640, 1024, 2048, 3000):
        x, weight = torch.full((9, k), 3.7), torch.full((20, k), -0.4)
        assert_close(PackedMatrix(library, [weight], Format.INT8)(x), x, weight)


def test_a_row_with_outliers_keeps_its_small_inputs(library: ctypes.CDLL) -> None:
    x = normal(20, 640)
    x[:, 7] *= 100
    weight = normal(64, 640, seed=1)
    weight[:, 7] = 0
    out = PackedMatrix(library, [weight], Format.INT8)(x)
    expected = x.double() @ dequantised(weight).double().T
    assert float((out - expected).norm() / expected.norm()) < 2e-3


@pytest.mark.parametrize("magnitude", [1e-36, 1e-20, 1e15])
def test_magnitudes_of_inputs_are_free(library: ctypes.CDLL, magnitude: float) -> None:
    x, weight = normal(9, 200), normal(30, 200, seed=1)
    matrix = PackedMatrix(library, [weight], Format.INT8)
    assert_close(matrix(x * magnitude) / magnitude, x, weight) if magnitude > 1e-30 else None
    assert bool(matrix(x * magnitude).isfinite().all())


def test_zeros_give_zeros(library: ctypes.CDLL) -> None:
    weight = normal(40, 100)
    weight[3] = 0
    out = PackedMatrix(library, [weight], Format.INT8)(torch.cat([torch.zeros(3, 100), normal(4, 100)]))
    assert bool((out[:3] == 0).all())
    assert bool((out[:, 3] == 0).all())


def test_nan_and_infinity_stay_in_their_row(library: ctypes.CDLL) -> None:
    x = normal(20, 130)
    matrix = PackedMatrix(library, [normal(50, 130, seed=1)], Format.INT8)
    sound = matrix(x)
    x[3, 5], x[11, 129] = float("nan"), float("inf")
    out = matrix(x)
    assert not bool(out[[3, 11]].isfinite().any())
    kept = [row for row in range(20) if row not in (3, 11)]
    assert torch.equal(out[kept], sound[kept])


def test_weights_that_are_not_finite_give_outputs_that_are_not(library: ctypes.CDLL) -> None:
    weight = normal(20, 70)
    weight[4, 3], weight[9, 69] = float("nan"), float("-inf")
    out = PackedMatrix(library, [weight], Format.INT8)(normal(5, 70, seed=1))
    assert bool(out[:, [4, 9]].isnan().all())
    assert int(out.isnan().sum()) == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacked_sources_are_one_matrix(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    whole, x = normal(107, 333).to(dtype), normal(4, 333, seed=1)
    parts = [whole[:37], whole[37:38], whole[38:100], whole[100:]]
    stacked, plain = (PackedMatrix(library, sources, Format.INT8) for sources in (parts, [whole.float()]))
    assert torch.equal(stacked(x), plain(x))


def test_a_matrix_takes_a_byte_for_each_weight(library: ctypes.CDLL) -> None:
    assert PackedMatrix(library, [normal(50, 100)], Format.INT8).bytes == 64 * 128 + 64 * 4
