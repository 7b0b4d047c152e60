"""Products of one row, and gates behind them, against their references; more rows are torch's."""

from collections.abc import Iterator

import pytest
import torch
from umbel.srt.kernels.triton import linear, reference
from umbel.srt.kernels.triton.jit import pdl_options, supports_pdl
from umbel.srt.kernels.triton.linear import depth_for
from umbel.srt.layers.linear import ACTIVATIONS

from .closeness import DTYPES, TOLERANCES, random, relative_error

# The interpreter says so when an exponential is too large for a float32, which the kernels mean.
OVERFLOWS = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter: exp of large gates


@pytest.fixture(autouse=True)
def _on_the_device(device: torch.device) -> Iterator[None]:
    with device:
        yield


def weight_of(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Such that results are about as large as what goes in."""
    return (random(outputs, inputs, seed=1) * inputs**-0.5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 16), (10, 48), (33, 1040), (6, 2560)])
@pytest.mark.sampled(4)
def test_a_row_is_multiplied_as_in_torch(outputs: int, inputs: int, biased: bool, dtype: torch.dtype) -> None:
    x, weight = random(1, inputs, dtype=dtype), weight_of(outputs, inputs, dtype)
    bias = random(outputs, dtype=dtype, seed=2) if biased else None
    actual = linear.linear(x, weight, bias)
    assert actual.dtype is dtype
    assert actual.shape == (1, outputs)
    assert relative_error(actual, reference.linear(x, weight, bias)) < TOLERANCES[dtype]
    exact = reference.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert relative_error(actual, exact) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("width", "inputs"), [(1, 16), (21, 144), (5, 2064)])
@pytest.mark.sampled(4)
def test_a_gate_is_what_its_two_products_give(
    width: int, inputs: int, activation: str, biased: bool, dtype: torch.dtype
) -> None:
    x, weight = random(1, inputs, dtype=dtype), weight_of(2 * width, inputs, dtype)
    bias = random(2 * width, dtype=dtype, seed=2) if biased else None
    actual = linear.gated(x, weight, bias, activation)
    assert actual.dtype is dtype
    assert actual.shape == (1, width)
    assert relative_error(actual, reference.gated(x, weight, bias, activation)) < 2 * TOLERANCES[dtype]


@pytest.mark.parametrize("rows", [0, 2, 5])
def test_more_rows_are_torchs(rows: int) -> None:
    x, weight, bias = random(rows, 48), weight_of(6, 48), random(6, seed=2)
    assert torch.equal(linear.linear(x, weight, bias), reference.linear(x, weight, bias))
    gates = linear.gated(x, weight, bias, "silu")
    torch.testing.assert_close(gates, reference.gated(x, weight, bias, "silu"), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_rounded_before_they_become_float32(dtype: torch.dtype, rows: int) -> None:
    x, weight = random(rows, 64, dtype=dtype), weight_of(30, 64, dtype)
    out = torch.full((rows + 1, 30), torch.nan)
    assert linear.linear(x, weight, out=out[:rows]).data_ptr() == out.data_ptr()
    assert torch.equal(out[:rows], linear.linear(x, weight).float())
    assert out[rows].isnan().all()


def test_inputs_that_are_not_read_16_bytes_at_once_are_torchs() -> None:
    x, weight = random(1, 50), weight_of(6, 50)
    assert torch.equal(linear.linear(x, weight), reference.linear(x, weight))


def test_a_row_may_be_part_of_a_wider_one() -> None:
    wide, weight = random(1, 200), weight_of(6, 96)
    assert torch.equal(linear.linear(wide[:, 32:128], weight), linear.linear(wide[:, 32:128].clone(), weight))


def test_a_number_that_is_none_reaches_every_output() -> None:
    x, weight = random(1, 32), weight_of(7, 32)
    x[0, 5] = torch.nan
    assert linear.linear(x, weight).isnan().all()
    assert linear.gated(x, torch.cat([weight, weight]), None, "silu").isnan().all()


def test_a_tile_has_what_its_warps_read_at_once() -> None:
    assert depth_for(4096, torch.bfloat16, 4) == 1024
    assert depth_for(4096, torch.float32, 4) == 512
    assert depth_for(48, torch.bfloat16, 4) == 64


def test_nothing_is_launched_early_where_it_cannot_be() -> None:
    assert pdl_options(torch.device("cpu")) == {"PDL": False}
    assert not supports_pdl(torch.device("cpu"))


def test_every_activation_of_the_models_has_a_kernel() -> None:
    assert set(linear.ACTIVATION_KINDS) == set(ACTIVATIONS)


@OVERFLOWS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gates_are_activated_and_multiplied_as_in_torch(name: str, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * 1100, dtype=dtype) * 3  # more columns than a program has, and no multiple of them
    actual = linear.act_and_multiply(gate_up, name)
    assert actual.dtype is dtype
    assert relative_error(actual, reference.act_and_multiply(gate_up, name)) < TOLERANCES[dtype]
    assert relative_error(actual, reference.act_and_multiply(gate_up.float(), name)) < 1e-2


@OVERFLOWS
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gates_far_from_zero_are_what_they_tend_to(name: str) -> None:
    gate_up = torch.cat([torch.tensor([[-200.0, -60.0, 60.0, 200.0]]), torch.ones(1, 4)], dim=1)
    actual = linear.act_and_multiply(gate_up, name)
    power = 2 if name == "relu2" else 1
    torch.testing.assert_close(actual, torch.tensor([[0.0, 0.0, 60.0**power, 200.0**power]]))


@OVERFLOWS
def test_rows_may_lie_apart() -> None:
    wide = random(4, 100)
    assert (
        relative_error(
            linear.act_and_multiply(wide[:, 10:74], "silu"), reference.act_and_multiply(wide[:, 10:74], "silu")
        )
        < 1e-6
    )


def test_no_rows_are_no_work() -> None:
    assert linear.act_and_multiply(torch.empty(0, 64), "silu").shape == (0, 32)
