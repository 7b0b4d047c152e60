"""Rounding to 4 bits: the search for scales, in C++ and in torch."""

import pytest
import torch
from umbel.lang.errors import ParameterError
from umbel.srt.kernels.cpu.library import load_library
from umbel.srt.kernels.cpu.quantise import quantise_int4, quantise_int4_in_torch

from .native import with_each_team


def weights(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(40, 96, generator=torch.Generator().manual_seed(0)).to(dtype)


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).float() - 8
    return nibbles * scales.float().repeat_interleave(32, 1)


def weighed_error(rounded: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Of each group."""
    groups = exact.float().view(-1, 32)
    importance = groups**2 + (groups**2).mean(1, keepdim=True)
    return (importance * (rounded.view(-1, 32) - groups) ** 2).sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_finds_what_torch_finds(dtype: torch.dtype) -> None:
    exact = weights(dtype)
    native, reference = (values(*quantise(exact)) for quantise in (quantise_int4, quantise_int4_in_torch))
    # Sums in another order may prefer another one of two equally good scales.
    torch.testing.assert_close(weighed_error(native, exact), weighed_error(reference, exact), rtol=1e-2, atol=1e-6)


def test_the_number_of_threads_changes_no_bit() -> None:
    first, *others = with_each_team(load_library(), lambda: quantise_int4(weights()))
    assert all(torch.equal(mine, theirs) for other in others for mine, theirs in zip(other, first, strict=True))


def test_no_scale_of_the_search_is_better_and_the_plain_one_is_worse() -> None:
    exact = weights()
    found = weighed_error(values(*quantise_int4(exact)), exact)
    groups = exact.view(-1, 32)
    largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    for place in (7.1, 7.7, 8.06, 8.9):
        steps = -largest / place
        plain = (groups / steps).round().clamp(-8, 7) * steps
        assert bool((found <= weighed_error(plain.view_as(exact), exact) * 1.001 + 1e-6).all()), place
        assert found.sum() < 0.97 * weighed_error(plain.view_as(exact), exact).sum()


def test_rows_may_lie_apart_and_numbers_on_the_grid_are_exact() -> None:
    grid = torch.arange(-8, 8).repeat(3, 4).float() * 0.25
    wide = torch.zeros(3, 128)
    wide[:, :64] = grid
    assert torch.equal(values(*quantise_int4(wide[:, :64])), grid)


@pytest.mark.parametrize("quantise", [quantise_int4, quantise_int4_in_torch])
def test_zeros_stay_and_what_is_no_number_shows(quantise: object) -> None:
    exact = torch.zeros(1, 64)
    exact[0, 40] = torch.inf
    rounded = values(*quantise(exact))  # type: ignore[operator]
    assert not rounded[0, :32].any()
    assert rounded[0, 32:].isnan().all()


def test_other_matrices_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"shape \(4, 40\).*a multiple of 32 inputs"):
        quantise_int4(torch.zeros(4, 40))
