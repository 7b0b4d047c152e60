"""Products of few rows on tensor cores against their references, and which products they are."""

from collections.abc import Iterator

import pytest
import torch
from umbel.srt.kernels.triton import linear, reference
from umbel.srt.kernels.triton.linear import ACTIVATION_KINDS, multiplies_few, multiply_few
from umbel.srt.kernels.triton.tuning import read_tuning

from .closeness import TOLERANCES, random, relative_error

HALVES = (torch.bfloat16, torch.float16)
MOST_ROWS, LEAST_OUTPUTS = read_tuning().linear_rows.most_rows, read_tuning().linear_rows.least_outputs


@pytest.fixture(autouse=True)
def _on_the_device(device: torch.device) -> Iterator[None]:
    with device:
        yield


def weight_of(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Such that results are about as large as what goes in."""
    return (random(outputs, inputs, seed=1) * inputs**-0.5).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(2, 1, 16), (5, 70, 592), (16, 64, 256), (MOST_ROWS, 130, 48)])
def test_few_rows_are_multiplied_as_in_torch(
    rows: int, outputs: int, inputs: int, biased: bool, dtype: torch.dtype
) -> None:
    x, weight = random(rows, inputs, dtype=dtype), weight_of(outputs, inputs, dtype)
    bias = random(outputs, dtype=dtype, seed=2) if biased else None
    out = torch.full((rows + 1, outputs), torch.nan, dtype=dtype)
    multiply_few(x, weight, bias, out[:rows])
    assert relative_error(out[:rows], reference.linear(x, weight, bias)) < TOLERANCES[dtype]
    assert out[rows].isnan().all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gates_of_few_rows_are_what_two_products_give(activation: str, biased: bool, dtype: torch.dtype) -> None:
    x, weight = random(7, 272, dtype=dtype), weight_of(2 * 45, 272, dtype)
    bias = random(2 * 45, dtype=dtype, seed=2) if biased else None
    out = torch.empty((7, 45), dtype=dtype)
    multiply_few(x, weight, bias, out, kind=ACTIVATION_KINDS[activation])
    assert relative_error(out, reference.gated(x, weight, bias, activation)) < 2 * TOLERANCES[dtype]


def test_a_row_gives_the_same_bits_whatever_is_beside_it() -> None:
    x, weight = random(6, 96, dtype=torch.bfloat16), weight_of(40, 96, torch.bfloat16)
    wide = torch.cat([x, torch.full_like(x, torch.nan)], dim=1)[:, :96]
    together, apart = torch.empty((6, 40)), torch.empty((2, 40))
    multiply_few(wide, weight, None, together)
    multiply_few(torch.stack([x[4], torch.full_like(x[0], torch.nan)]), weight, None, apart)
    assert torch.equal(apart[0], together[4])
    assert apart[1].isnan().all()


def test_logits_are_rounded_before_they_become_float32() -> None:
    x, weight = random(3, 64, dtype=torch.bfloat16), weight_of(30, 64, torch.bfloat16)
    wide, narrow = torch.empty((3, 30)), torch.empty((3, 30), dtype=torch.bfloat16)
    multiply_few(x, weight, None, wide)
    multiply_few(x, weight, None, narrow)
    assert torch.equal(wide, narrow.float())


@pytest.mark.nightly
def test_linear_maps_take_them_where_programs_are_many_enough() -> None:
    x, weight = random(3, 16, dtype=torch.bfloat16), weight_of(LEAST_OUTPUTS, 16, torch.bfloat16)
    expected = torch.empty((3, LEAST_OUTPUTS), dtype=torch.bfloat16)
    multiply_few(x, weight, None, expected)
    assert torch.equal(linear.linear(x, weight), expected)
    gates = torch.empty((3, LEAST_OUTPUTS // 2), dtype=torch.bfloat16)
    multiply_few(x, weight, None, gates, kind=ACTIVATION_KINDS["silu"])
    assert torch.equal(linear.gated(x, weight, None, "silu"), gates)


def test_what_is_not_theirs_is_torchs() -> None:
    half, whole = torch.bfloat16, torch.float32
    assert multiplies_few(torch.empty(MOST_ROWS, 16, dtype=half), torch.empty(LEAST_OUTPUTS, 16, dtype=half))
    assert not multiplies_few(torch.empty(MOST_ROWS + 1, 16, dtype=half), torch.empty(LEAST_OUTPUTS, 16, dtype=half))
    assert not multiplies_few(torch.empty(0, 16, dtype=half), torch.empty(LEAST_OUTPUTS, 16, dtype=half))
    assert not multiplies_few(torch.empty(2, 16, dtype=half), torch.empty(LEAST_OUTPUTS - 1, 16, dtype=half))
    assert not multiplies_few(torch.empty(2, 16, dtype=whole), torch.empty(LEAST_OUTPUTS, 16, dtype=whole))
