"""Norms, alone and behind a residual sum, against their references."""

from collections.abc import Iterator

import pytest
import torch
from umbel.srt.kernels.triton import norm, reference

from .closeness import DTYPES, TOLERANCES, random, relative_error

EPS = 1e-5


@pytest.fixture(autouse=True)
def _on_the_device(device: torch.device) -> Iterator[None]:
    with device:
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 48), (7, 640), (3, 1000)])
def test_rows_are_normalised_as_in_torch(dtype: torch.dtype, centered: bool, rows: int, hidden: int) -> None:
    x, weight = random(rows, hidden, dtype=dtype), random(hidden, dtype=dtype, seed=1)
    actual = norm.rms_norm(x, weight, eps=EPS, centered=centered)
    assert actual.dtype is dtype
    assert relative_error(actual, reference.rms_norm(x, weight, eps=EPS, centered=centered)) < TOLERANCES[dtype]
    exact = reference.rms_norm(x.float(), weight.float(), eps=EPS, centered=centered)
    assert relative_error(actual, exact) < 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sandwich", [False, True])
@pytest.mark.parametrize("centered", [False, True])
def test_what_is_added_stays_in_the_residual(dtype: torch.dtype, sandwich: bool, centered: bool) -> None:
    x, residual = random(5, 96, dtype=dtype), random(5, 96, dtype=dtype, seed=1)
    weight, after = random(96, dtype=dtype, seed=2), random(96, dtype=dtype, seed=3) if sandwich else None
    expected_sum = residual.clone()
    expected = reference.add_rms_norm(x, expected_sum, weight, eps=EPS, centered=centered, after=after)
    actual = norm.add_rms_norm(x, residual, weight, eps=EPS, centered=centered, after=after)
    assert relative_error(residual, expected_sum) < TOLERANCES[dtype]
    assert relative_error(actual, expected) < 2 * TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sandwich", [False, True])
def test_what_is_added_may_be_scaled_and_the_sum_left_without_a_norm(dtype: torch.dtype, sandwich: bool) -> None:
    x, residual = random(5, 96, dtype=dtype), random(5, 96, dtype=dtype, seed=1)
    after = random(96, dtype=dtype, seed=3) if sandwich else None
    expected = reference.add_rms_norm(x, residual.clone(), None, eps=EPS, centered=False, after=after, scale=0.22)
    actual = norm.add_rms_norm(x, residual, None, eps=EPS, centered=False, after=after, scale=0.22)
    assert actual is residual
    assert relative_error(actual, expected) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_may_be_multiplied_by_a_factor_of_the_layer(dtype: torch.dtype) -> None:
    x, residual, weight = (
        random(3, 40, dtype=dtype),
        random(3, 40, dtype=dtype, seed=1),
        random(40, dtype=dtype, seed=2),
    )
    factor, sums = torch.tensor([0.37]).to(dtype), [residual.clone(), residual.clone()]
    actual = norm.add_rms_norm(x, sums[0], weight, eps=EPS, centered=False, factor=factor)
    expected = reference.add_rms_norm(x, sums[1], weight, eps=EPS, centered=False, factor=factor)
    assert torch.equal(sums[0], (residual + x) * factor)
    assert torch.equal(sums[0], sums[1])
    assert relative_error(actual, expected) < TOLERANCES[dtype]


def test_rows_may_be_normalised_in_place() -> None:
    wide, weight = random(4, 200), random(96, seed=2)
    rest, part = wide.clone(), wide[:, 50:146]
    expected = reference.rms_norm(part, weight, eps=EPS, centered=False)
    assert norm.rms_norm(part, weight, eps=EPS, centered=False, out=part) is part
    assert relative_error(part, expected) < 1e-6
    assert torch.equal(wide[:, :50], rest[:, :50])
    assert torch.equal(wide[:, 146:], rest[:, 146:])


def test_rows_may_lie_apart() -> None:
    wide, residual, weight = random(4, 200), random(4, 96, seed=1), random(96, seed=2)
    expected_sum = residual.clone()
    expected = reference.add_rms_norm(wide[:, 50:146], expected_sum, weight, eps=EPS, centered=False)
    assert (
        relative_error(
            norm.rms_norm(wide[:, :96], weight, eps=EPS, centered=False),
            reference.rms_norm(wide[:, :96], weight, eps=EPS, centered=False),
        )
        < 1e-6
    )
    assert (
        relative_error(norm.add_rms_norm(wide[:, 50:146], residual, weight, eps=EPS, centered=False), expected) < 1e-6
    )
    assert torch.equal(residual, expected_sum)


def test_a_row_gives_the_same_bits_alone_and_in_a_batch() -> None:
    x, weight = random(6, 300), random(300, seed=1)
    together = norm.rms_norm(x, weight, eps=EPS, centered=True)
    assert torch.equal(norm.rms_norm(x[4:5], weight, eps=EPS, centered=True), together[4:5])


def test_no_rows_are_no_work() -> None:
    nothing = torch.empty(0, 64)
    weight = random(64)
    assert norm.rms_norm(nothing, weight, eps=EPS, centered=False).shape == (0, 64)
    assert norm.add_rms_norm(nothing, nothing, weight, eps=EPS, centered=False).shape == (0, 64)


def test_a_row_of_zeros_and_one_of_huge_numbers_stay_finite() -> None:
    x = torch.stack([torch.zeros(64), torch.full((64,), 1e18)])
    weight = torch.ones(64)
    normed = norm.rms_norm(x, weight, eps=EPS, centered=False)
    assert torch.equal(normed[0], torch.zeros(64))
    torch.testing.assert_close(normed[1], torch.ones(64))
