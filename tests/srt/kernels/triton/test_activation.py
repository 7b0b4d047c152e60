"""act(gate) × up against torch, for every activation that models name."""

from collections.abc import Iterator

import pytest
import torch
from umbel.srt.kernels.triton import activation, reference
from umbel.srt.layers.linear import ACTIVATIONS

from .closeness import DTYPES, TOLERANCES, random, relative_error

# The interpreter says so when an exponential is too large for a float32, which the kernels mean.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _on_the_device(device: torch.device) -> Iterator[None]:
    with device:
        yield


def test_every_activation_of_the_models_has_a_kernel() -> None:
    assert set(activation.ACTIVATION_KINDS) == set(ACTIVATIONS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gates_are_activated_and_multiplied_as_in_torch(name: str, dtype: torch.dtype) -> None:
    gate_up = random(3, 2 * 1100, dtype=dtype) * 3  # more columns than a program has, and no multiple of them
    actual = activation.act_and_multiply(gate_up, name)
    assert actual.dtype is dtype
    assert relative_error(actual, reference.act_and_multiply(gate_up, name)) < TOLERANCES[dtype]
    assert relative_error(actual, reference.act_and_multiply(gate_up.float(), name)) < 1e-2


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gates_far_from_zero_are_what_they_tend_to(name: str) -> None:
    gate_up = torch.cat([torch.tensor([[-200.0, -60.0, 60.0, 200.0]]), torch.ones(1, 4)], dim=1)
    actual = activation.act_and_multiply(gate_up, name)
    torch.testing.assert_close(actual, torch.tensor([[0.0, 0.0, 60.0, 200.0]]))


def test_rows_may_lie_apart() -> None:
    wide = random(4, 100)
    assert (
        relative_error(
            activation.act_and_multiply(wide[:, 10:74], "silu"), reference.act_and_multiply(wide[:, 10:74], "silu")
        )
        < 1e-6
    )


def test_no_rows_are_no_work() -> None:
    assert activation.act_and_multiply(torch.empty(0, 64), "silu").shape == (0, 32)
