"""Products with matrices in codes, against the same in torch."""

from dataclasses import replace

import pytest
import torch
from umbel.srt.kernels.triton import quantized
from umbel.srt.kernels.triton.quantized import quantized_linear
from umbel.srt.kernels.triton.reference import quantized_linear as reference
from umbel.srt.kernels.triton.tuning import read_tuning
from umbel.srt.layers.quantized import Codes

from .closeness import TOLERANCES, random, random_codes, relative_error

MOST_ROWS = read_tuning().quantized_rows.most_rows
CASES = {
    "int4": random_codes(Codes.INT4, 70, 160, 32),
    "int4, zeros": random_codes(Codes.INT4, 70, 256, 128, zeros=True),
    "int4, a group for all": random_codes(Codes.INT4, 9, 96, 96),
    "int8": random_codes(Codes.INT8, 70, 96, 96),
    "int8, zeros": random_codes(Codes.INT8, 70, 128, 64, zeros=True),
    "float8": random_codes(Codes.FLOAT8, 70, 256, 128),
    "nf4": random_codes(Codes.NF4, 70, 192, 64),
    "e2m1": random_codes(Codes.E2M1, 5, 64, 32),
    "fp4": random_codes(Codes.FP4, 5, 64, 64),
}


@pytest.mark.parametrize("rows", [1, 5, MOST_ROWS + 1])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(4)
def test_products_of_all_kinds_equal_those_of_torch(case: str, rows: int, device: torch.device) -> None:
    weight = CASES[case].to(device)
    x = random(rows, weight.shape[1]).to(device)
    assert relative_error(quantized_linear(x, weight), reference(x, weight)) < 10 * TOLERANCES[torch.float32]


@pytest.mark.parametrize("rows", [1, 5, MOST_ROWS + 1])
def test_sixteen_bits_round_the_result(rows: int, device: torch.device) -> None:
    weight = CASES["int4, zeros"].to(device)
    x = random(rows, 256, dtype=torch.bfloat16).to(device)
    exact = x.double() @ weight.dense().double().t()
    assert relative_error(quantized_linear(x, weight), exact) < 1.5 * TOLERANCES[torch.bfloat16]


def test_inputs_are_permuted_once_and_results_go_where_they_are_asked(device: torch.device) -> None:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    weight = replace(CASES["int4, zeros"], permutation=order).to(device)
    x, out = random(3, 256).to(device), torch.zeros(3, 100, device=device)
    quantized_linear(x, weight, out=out[:, 20:90])
    assert relative_error(out[:, 20:90], x @ weight.dense().t()) < 1e-5
    assert not out[:, :20].any()
    assert not out[:, 90:].any()


@pytest.mark.parametrize("inputs", [48, 40])
def test_other_groups_are_left_to_torch(inputs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_codes(Codes.INT8, 9, inputs, 8).to(device)
    monkeypatch.setattr(quantized, "_multiply_rows", None)
    x = random(2, inputs).to(device)
    torch.testing.assert_close(quantized_linear(x, weight), x @ weight.dense().t(), rtol=1e-4, atol=1e-3)
    assert quantized_linear(x[:0], weight).shape == (0, 9)
