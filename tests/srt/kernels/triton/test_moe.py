"""Routing, and tokens through their experts, against the references and against plain sums."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from umbel.srt.kernels.triton import moe, reference
from umbel.srt.kernels.triton.moe import (
    MoeTiles,
    are_few,
    code_cut,
    tiles_for,
)
from umbel.srt.kernels.triton.tuning import read_tuning
from umbel.srt.layers.checkpoint import Checkpoint
from umbel.srt.layers.linear import DenseMethod
from umbel.srt.layers.quantized import Codes, QuantizedTensor
from umbel.srt.models.decoder_config import ExpertsConfig
from umbel.srt.models.experts import ExpertKernels, Experts, expert_kernels

from .closeness import DTYPES, random, random_codes, relative_error

TUNING = read_tuning()
SMALL_TILES = MoeTiles(rows=16, columns=16, depth=32, group=2, warps=4, stages=2)


@pytest.fixture(autouse=True)
def _on_the_device(device: torch.device) -> Iterator[None]:
    with device:
        yield


def weights_of(
    experts: int, hidden: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up and down, such that results are about as large as what goes in."""
    gate_up = (random(experts, 2 * width, hidden, seed=1) * 2 * hidden**-0.5).to(dtype)
    return gate_up, (random(experts, hidden, width, seed=2) * 2 * width**-0.5).to(dtype)


def routed(tokens: int, experts: int, top_k: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.route(random(tokens, experts, seed=seed) * 2, top_k, renormalise=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (60, 4), (128, 8), (3, 3), (1, 1)])
@pytest.mark.sampled(4)
def test_tokens_go_to_their_most_probable_experts(
    experts: int, top_k: int, renormalise: bool, dtype: torch.dtype
) -> None:
    logits = random(3, experts, dtype=dtype) * 2
    weights, chosen = moe.route(logits, top_k, renormalise=renormalise)
    expected_weights, expected = reference.route(logits, top_k, renormalise=renormalise)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=2e-6, atol=1e-7)


def test_of_equal_experts_the_first_are_chosen() -> None:
    weights, chosen = moe.route(torch.zeros(2, 6), 3, renormalise=True)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter says so
def test_logits_that_are_no_numbers_choose_experts_that_there_are() -> None:
    _, chosen = moe.route(torch.full((1, 5), torch.nan), 2, renormalise=True)
    assert 0 <= int(chosen.min()) <= int(chosen.max()) < 5


ROUTINGS = [(1, 8, 2), (3, 4, 4), (37, 5, 2)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("tiles", [SMALL_TILES, None], ids=["small", "chosen"])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "dtype"),
    [
        *((*routing, dtype) for routing in ROUTINGS for dtype in DTYPES if dtype != torch.float16),
        *(pytest.param(*routing, torch.float16, marks=pytest.mark.nightly) for routing in ROUTINGS[:2]),
        (*ROUTINGS[2], torch.float16),
    ],
)
def test_tokens_go_through_their_experts_as_in_torch(
    tokens: int, experts: int, top_k: int, tiles: MoeTiles | None, dtype: torch.dtype
) -> None:
    x, (gate_up, down) = random(tokens, 40, dtype=dtype), weights_of(experts, 40, 24, dtype)
    weights, chosen = routed(tokens, experts, top_k)
    actual = moe.fused_experts(x, gate_up, down, weights, chosen, activation="silu", tiles=tiles)
    assert actual.dtype is dtype
    expected = reference.fused_experts(x, gate_up, down, weights, chosen, activation="silu")
    exact = reference.fused_experts(x.float(), gate_up.float(), down.float(), weights, chosen, activation="silu")
    assert relative_error(actual, expected) < (2e-6 if dtype is torch.float32 else 1e-2)
    assert relative_error(actual, exact) < 1e-2


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "width", "dtype"),
    [
        (1, 4, 3, 24, torch.bfloat16),
        *(pytest.param(1, 4, 3, 24, dtype, marks=pytest.mark.nightly) for dtype in DTYPES if dtype != torch.bfloat16),
        pytest.param(1, 20, 16, 8, torch.bfloat16, marks=pytest.mark.nightly),
        pytest.param(4, 24, 1, 40, torch.bfloat16, marks=pytest.mark.nightly),
    ],
)
def test_few_tokens_go_through_their_experts_without_being_sorted(
    tokens: int, experts: int, top_k: int, width: int, dtype: torch.dtype
) -> None:
    assert are_few(tokens * top_k, experts, top_k, TUNING.moe_choice)
    x, (gate_up, down) = random(tokens, 528, dtype=dtype), weights_of(experts, 528, width, dtype)
    weights, chosen = routed(tokens, experts, top_k)
    actual = moe.fused_experts(x, gate_up, down, weights, chosen, activation="gelu")
    assert actual.dtype is dtype
    sorted_first = moe.fused_experts(x, gate_up, down, weights, chosen, activation="gelu", tiles=SMALL_TILES)
    assert relative_error(actual, sorted_first) < (2e-6 if dtype is torch.float32 else 1e-2)
    exact = reference.fused_experts(x.float(), gate_up.float(), down.float(), weights, chosen, activation="gelu")
    assert relative_error(actual, exact) < 1e-2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 21])
@pytest.mark.parametrize("kind", ["clamped", "biased", "without gates"])
def test_experts_of_other_kinds_are_those_of_torch(kind: str, tokens: int, dtype: torch.dtype) -> None:
    """gpt-oss has biases and clamped gates, Nemotron-H neither gates nor biases. One token takes the shorter way."""
    x, (gate_up, down) = random(tokens, 40, dtype=dtype) * 3, weights_of(4, 40, 24, dtype)
    weights, chosen = routed(tokens, 4, 2)
    options: dict[str, Any] = {"activation": "silu", "biases": (random(4, 48, dtype=dtype), random(4, 40, dtype=dtype))}
    if kind == "clamped":
        options["clamp"] = 1.5, 1.702
    if kind == "without gates":
        gate_up, options = gate_up[:, :24].contiguous(), {"activation": "relu2", "gated": False}
    actual = moe.fused_experts(x, gate_up, down, weights, chosen, **options)
    expected = reference.fused_experts(x, gate_up, down, weights, chosen, **options)
    assert relative_error(actual, expected) < (2e-6 if dtype is torch.float32 else 1e-2)


def test_tokens_are_few_while_hardly_any_share_an_expert() -> None:
    assert are_few(1 * 8, 128, 8, TUNING.moe_choice)
    assert are_few(4 * 8, 128, 8, TUNING.moe_choice)
    assert not are_few(5 * 8, 128, 8, TUNING.moe_choice)
    assert are_few(1 * 2, 8, 2, TUNING.moe_choice)
    assert not are_few(2 * 2, 8, 2, TUNING.moe_choice)


@pytest.mark.parametrize(
    ("tiles", "activation"),
    [(TUNING.moe_middle, "silu"), (TUNING.moe_prefill, "gelu_pytorch_tanh")],
    ids=["middle", "prefill"],
)
def test_the_cuts_for_many_tokens_give_the_same(tiles: MoeTiles, activation: str) -> None:
    x, (gate_up, down) = random(150, 40), weights_of(2, 40, 136)
    weights, chosen = routed(150, 2, 2)
    actual = moe.fused_experts(x, gate_up, down, weights, chosen, activation=activation, tiles=tiles)
    expected = reference.fused_experts(x, gate_up, down, weights, chosen, activation=activation)
    assert relative_error(actual, expected) < 2e-6


def test_the_reference_is_the_sum_that_the_definition_says() -> None:
    x, (gate_up, down) = random(4, 12), weights_of(3, 12, 8)
    weights, chosen = routed(4, 3, 2)
    result = reference.fused_experts(x, gate_up, down, weights, chosen, activation="relu")
    for token in range(4):
        total = torch.zeros(12)
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            total += weight * (down[expert] @ (gate.relu() * up))
        torch.testing.assert_close(result[token], total)


def test_experts_without_tokens_are_not_read() -> None:
    x, (gate_up, down) = random(20, 16), weights_of(6, 16, 16)
    weights = torch.ones(20, 1)
    chosen = torch.full((20, 1), 4, dtype=torch.int32)
    expected = reference.fused_experts(x, gate_up, down, weights, chosen, activation="silu")
    gate_up[[0, 1, 2, 3, 5]] = torch.nan
    down[[0, 1, 2, 3, 5]] = torch.nan
    actual = moe.fused_experts(x, gate_up, down, weights, chosen, activation="silu", tiles=SMALL_TILES)
    assert relative_error(actual, expected) < 2e-6


def test_a_token_that_is_not_a_number_stays_alone() -> None:
    x, (gate_up, down) = random(9, 16), weights_of(3, 16, 16)
    weights, chosen = routed(9, 3, 2)
    clean = moe.fused_experts(x, gate_up, down, weights, chosen, activation="silu", tiles=SMALL_TILES)
    x[4] = torch.nan
    actual = moe.fused_experts(x, gate_up, down, weights, chosen, activation="silu", tiles=SMALL_TILES)
    others = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8])
    assert torch.equal(actual[others], clean[others])
    assert actual[4].isnan().all()


def test_no_tokens_are_no_work() -> None:
    gate_up, down = weights_of(3, 16, 8)
    nothing, chosen = torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int32)
    assert moe.fused_experts(torch.empty(0, 16), gate_up, down, nothing, chosen, activation="silu").shape == (0, 16)
    assert moe.route(torch.empty(0, 3), 2, renormalise=True)[1].shape == (0, 2)


def test_the_cut_grows_with_the_tokens_of_an_expert() -> None:
    assert tiles_for(1 * 8, 128, TUNING) is TUNING.moe_decode
    assert tiles_for(256 * 8, 128, TUNING) is TUNING.moe_decode
    assert tiles_for(1024 * 8, 128, TUNING) is TUNING.moe_middle
    assert tiles_for(8192 * 2, 8, TUNING) is TUNING.moe_prefill


@pytest.mark.parametrize("rounded", [False, True])
def test_a_layer_gives_the_same_on_either(rounded: bool) -> None:
    config = ExpertsConfig(count=4, chosen=2, width=24, renormalise=True, rounded=rounded, shared_width=16)
    gate_up, down = weights_of(4, 40, 24)
    shared_gate_up, shared_down = weights_of(1, 40, 16)
    tensors = {
        "mlp.gate.weight": random(4, 40, seed=7),
        "mlp.experts.gate_up_proj": gate_up,
        "mlp.experts.down_proj": down,
        "mlp.shared_expert.gate_proj.weight": shared_gate_up[0, :16],
        "mlp.shared_expert.up_proj.weight": shared_gate_up[0, 16:],
        "mlp.shared_expert.down_proj.weight": shared_down[0],
        "mlp.shared_expert_gate.weight": random(1, 40, seed=8),
    }
    x = random(6, 40, dtype=torch.bfloat16)

    def result(kernels: ExpertKernels) -> torch.Tensor:
        weights = Checkpoint(
            {f"model.layers.3.{name}": tensor for name, tensor in tensors.items()},
            dtype=torch.bfloat16,
            device=torch.get_default_device(),
        )
        layer = Experts(
            "model.layers.3", config, weights, hidden=40, activation="silu", kernels=kernels, method=DenseMethod()
        )
        weights.finish(is_unused=lambda name: False)
        return layer(x)

    assert relative_error(result(moe), result(reference)) < 1e-2


# ------------------------------------------------------------------------------------------ packed


FORMS: dict[str, dict[str, Any]] = {
    "int4, zeros": {"kind": Codes.INT4, "group": 32, "zeros": True},
    "mxfp4": {"kind": Codes.E2M1, "group": 32},
    "float8, blocks": {"kind": Codes.FLOAT8, "group": 32},
    "int4": {"kind": Codes.INT4, "group": 32},
    "int8": {"kind": Codes.INT8, "group": None},
    "int8, zeros": {"kind": Codes.INT8, "group": 32, "zeros": True},
    "float8, outputs": {"kind": Codes.FLOAT8, "group": None},
    "nf4": {"kind": Codes.NF4, "group": 32},
}
EXPERTS, HIDDEN, WIDTH = 4, 96, 64  # tiles are 64 lines and 128 inputs: all are cut off somewhere


def packed_weights(form: str, *, gated: bool = True) -> tuple[QuantizedTensor, QuantizedTensor]:
    """gate_up and down, stacked, such that results are about as large as what goes in."""

    def stack(outputs: int, inputs: int) -> QuantizedTensor:
        options = {**FORMS[form], "group": FORMS[form]["group"] or inputs}
        matrix = random_codes(outputs=EXPERTS * outputs, inputs=inputs, **options).to(torch.get_default_device())
        if matrix.kind is Codes.E2M1:
            return matrix
        largest = {Codes.INT4: 8, Codes.INT8: 128}.get(matrix.kind, 1)
        return replace(matrix, scales=matrix.scales * (inputs**-0.5 / largest))

    return stack((1 + gated) * WIDTH, HIDDEN), stack(HIDDEN, WIDTH)


def floats_of(stack: QuantizedTensor) -> torch.Tensor:
    return stack.dense().view(EXPERTS, -1, stack.shape[1])


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize(
    "form", [name if number < 1 else pytest.param(name, marks=pytest.mark.nightly) for number, name in enumerate(FORMS)]
)
def test_packed_experts_are_those_of_their_numbers(form: str, tokens: int) -> None:
    """One token reads the codes of its experts, more are sorted and meet widened tiles."""
    gate_up, down = packed_weights(form)
    x, (weights, chosen) = random(tokens, HIDDEN), routed(tokens, EXPERTS, 2)
    actual = moe.fused_experts(x, gate_up, down, weights, chosen, activation="silu")
    expected = reference.fused_experts(x, floats_of(gate_up), floats_of(down), weights, chosen, activation="silu")
    assert relative_error(actual, expected) < 1e-5
    in_torch = reference.fused_experts(x, gate_up, down, weights, chosen, activation="silu")
    assert relative_error(in_torch, expected) < 1e-5


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [("gpt-oss", 1), ("gpt-oss", 7), ("nemotron", 7), pytest.param("nemotron", 1, marks=pytest.mark.nightly)],
)
def test_packed_experts_of_other_kinds_round_where_floats_do(kind: str, tokens: int) -> None:
    gated = kind == "gpt-oss"
    gate_up, down = packed_weights("mxfp4" if gated else "float8, blocks", gated=gated)
    dtype = torch.bfloat16
    x, (weights, chosen) = random(tokens, HIDDEN, dtype=dtype), routed(tokens, EXPERTS, 2)
    options: dict[str, Any] = {"activation": "silu", "clamp": (1.5, 1.702)}
    options["biases"] = random(EXPERTS, 2 * WIDTH, dtype=dtype), random(EXPERTS, HIDDEN, dtype=dtype)
    if not gated:
        options = {"activation": "relu2", "gated": False}
    actual = moe.fused_experts(x, gate_up, down, weights, chosen, **options)
    floats = floats_of(gate_up).to(dtype), floats_of(down).to(dtype)
    expected = reference.fused_experts(x, *floats, weights, chosen, **options)
    assert actual.dtype is dtype
    assert relative_error(actual, expected) < 1e-2


@pytest.mark.nightly
@pytest.mark.parametrize("tiles", [TUNING.moe_codes_middle, TUNING.moe_codes_prefill], ids=["middle", "prefill"])
def test_the_cuts_for_many_tokens_of_packed_experts_give_the_same(tiles: MoeTiles) -> None:
    gate_up, down = packed_weights("int4, zeros")
    x, (weights, chosen) = random(150, HIDDEN), routed(150, EXPERTS, 2)
    actual = moe.fused_experts(x, gate_up, down, weights, chosen, activation="silu", tiles=tiles)
    expected = reference.fused_experts(x, floats_of(gate_up), floats_of(down), weights, chosen, activation="silu")
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.nightly), 9])
def test_packed_experts_without_tokens_are_not_read(tokens: int) -> None:
    gate_up, down = packed_weights("int4, zeros")
    x, weights = random(tokens, HIDDEN), torch.ones(tokens, 1)
    chosen = torch.full((tokens, 1), 2, dtype=torch.int32)
    expected = reference.fused_experts(x, floats_of(gate_up), floats_of(down), weights, chosen, activation="silu")
    for stack in (gate_up, down):
        for expert in (0, 1, 3):
            stack.scales.view(EXPERTS, -1)[expert] = torch.nan
    actual = moe.fused_experts(x, gate_up, down, weights, chosen, activation="silu")
    assert relative_error(actual, expected) < 1e-5


def test_the_cut_for_few_tokens_wastes_little_after_the_last_input() -> None:
    for inputs in (64, 768, 1408, 2048, 2880, 4096, 14336):
        cut = code_cut(8, inputs, TUNING.moe_codes_pairs)
        assert -inputs % cut.depth <= inputs // 8, inputs
        assert cut.depth * cut.columns * 8 <= 8192, inputs
    assert code_cut(2, 2048, TUNING.moe_codes_pairs).columns == 4


def test_torch_computes_where_there_is_no_gpu() -> None:
    assert expert_kernels(torch.device("cpu")) is reference
    assert expert_kernels(torch.device("cuda")) is moe
