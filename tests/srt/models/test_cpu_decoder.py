"""The native decoder on every instruction set that runs here: with rounded inputs (tiles) and with exact ones."""

import ctypes
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from umbel.srt.cache.kv_pool import PoolSize
from umbel.srt.kernels.cpu.library import load_library
from umbel.srt.layers.rope import RopeConfig, RopeType
from umbel.srt.models.cpu_decoder import ANGLES_AHEAD, FIRST_ANGLES, Angles
from umbel.srt.models.families import our_names
from umbel.srt.runners.cpu_runner import CpuRunner, build_cpu_runner

from ..kernels.native import isa_cases, with_each_team
from .reference import Piece, Sequences, random_tokens, reference_logits, reference_model, relative_error, tensors_of
from .test_equality import CASES as FAMILIES

NUM_SLOTS = 120
LENGTHS = (40, 17, 1)
# Intermediate sizes with whole tiles (gate and up are multiplied and activated together) and without.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "silu, whole tiles": ("llama", {"head_dim": 16, "intermediate_size": 96}),
    "silu, biases, whole tiles": ("llama", {"head_dim": 16, "intermediate_size": 64, "mlp_bias": True}),
    "silu, cut tiles": ("llama", {"head_dim": 16, "intermediate_size": 72}),
    "gelu, whole tiles": ("gemma3_text", {"head_dim": 32, "intermediate_size": 160}),
    "streams in parallel, sparse gates, whole tiles": (
        "gemma3n_text",
        {
            "head_dim": 16,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.8, 0.4, 0.0, 0.0],
            "vocab_size_per_layer_input": 90,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "laurel_rank": 8,
        },
    ),
    "short convolutions": ("lfm2", {"head_dim": 16, "full_attn_idxs": [1]}),
    "delta nets, gated attention": (
        "qwen3_5_text",
        {
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 9,
            "linear_value_head_dim": 80,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "mamba, layers and MLPs alone, without gates": (
        "nemotron_h",
        {
            "head_dim": 16,
            "mamba_num_heads": 6,
            "mamba_head_dim": 80,
            "n_groups": 2,
            "ssm_state_size": 5,
            "layers_block_type": ["mlp", "attention", "linear_attention", "mlp"],
        },
    ),
}

# What else a step may have, for the tests in which teams of threads share its loops.
MORE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "latents, groups of experts, one for all": (
        "deepseek_v3",
        {**FAMILIES["deepseek v3"][1], "first_k_dense_replace": 1},
    ),
    "experts, one for all behind a gate": (
        "qwen2_moe",
        {
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "experts with limits, sinks": FAMILIES["gpt-oss"],
    "per-layer embeddings, scaled layers": (
        "gemma4_text",
        {**FAMILIES["gemma 4"][1], "vocab_size_per_layer_input": 97},
    ),
}
ROUNDED = {
    "delta nets, gated attention": 0.05,  # keys of nine numbers are scaled to length 1, and what is rounded too
    "streams in parallel, sparse gates, whole tiles": 0.03,  # gates are what is left above a limit, with its rounding
}


@pytest.fixture(params=isa_cases())
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    loaded = load_library(request.param)
    loaded.umbel_set_threads(2)
    return loaded


def runner_of(reference: Any, library: ctypes.CDLL, dtype: torch.dtype, num_slots: int = NUM_SLOTS) -> CpuRunner:
    config = reference.config.to_dict()
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(reference).items()}
    if (names := our_names(config, tensors)) is not None:
        tensors = {ours: tensors[stored] for ours, stored in names.items()}
    return build_cpu_runner(
        config,
        tensors,
        library=library,
        size=lambda geometry: PoolSize(num_slots),
        num_states=lambda model, slots: 80 if model.state_geometry else 0,
        dtype=dtype,
        weights="bf16",
        tree_attention=True,
        screened_head=False,
    )


def sequences() -> Sequences:
    return Sequences([random_tokens(length, seed) for seed, length in enumerate(LENGTHS)], NUM_SLOTS)


def whole() -> list[Piece]:
    return [Piece(index, 0, length) for index, length in enumerate(LENGTHS)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_part_from_those_of_float32_by_what_dtype_rounds(
    library: ctypes.CDLL, dtype: torch.dtype, case: str
) -> None:
    model_type, changes = CASES[case]
    runner = runner_of(reference_model(model_type, **changes), library, dtype)
    rounded = reference_model(model_type, **changes)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16().float()
    actual = runner.forward(sequences().batch(whole())).values
    expected = torch.cat([reference_logits(rounded, ids.tolist()) for ids in sequences().token_ids])
    assert relative_error(actual, expected) < (2e-5 if dtype is torch.float32 else ROUNDED.get(case, 0.02))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(4)
def test_a_row_has_the_same_hidden_state_alone_and_among_others(library: ctypes.CDLL, case: str) -> None:
    model_type, changes = CASES[case]
    runner = runner_of(reference_model(model_type, **changes), library, torch.bfloat16)
    first_tokens = [[token] for token in random_tokens(37, 3)]  # one token attends to itself: no order of keys
    together = Sequences(first_tokens, NUM_SLOTS).batch([Piece(index, 0, 1) for index in range(37)])
    among = runner.forward(together).values.clone()
    for index in (0, 15, 16, 36):
        alone = runner.forward(Sequences(first_tokens, NUM_SLOTS).batch([Piece(index, 0, 1)])).values
        assert torch.equal(alone[0], among[index])


@pytest.mark.parametrize("case", ["silu, whole tiles", "gelu, whole tiles"])
def test_generated_rows_have_the_same_logits_together_and_one_by_one(library: ctypes.CDLL, case: str) -> None:
    model_type, changes = CASES[case]
    runner = runner_of(reference_model(model_type, **changes), library, torch.bfloat16)
    of_one = Sequences([random_tokens(40, 5)], NUM_SLOTS)
    runner.forward(of_one.batch([Piece(0, 0, 31)]))
    one_by_one = [runner.forward(of_one.batch([Piece(0, at, 1)])).values[0].clone() for at in range(31, 40)]
    runner.clear()
    runner.forward(of_one.batch([Piece(0, 0, 31)]))
    batch = dataclasses.replace(of_one.batch([Piece(0, 31, 9)]), generated=np.array([9], dtype=np.int32))
    assert torch.equal(runner.forward(batch).values, torch.stack(one_by_one))
    runner.clear()
    batch = dataclasses.replace(of_one.batch([Piece(0, 0, 40)]), generated=np.array([9], dtype=np.int32))
    assert torch.equal(runner.forward(batch).values[31:], torch.stack(one_by_one))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", [*CASES, *MORE_CASES])
def test_the_number_of_threads_changes_no_bit_of_a_step(library: ctypes.CDLL, case: str) -> None:
    """Rows enough for all loops to be shared, of sequences too short for their keys to be; then a row of each."""
    count, length = 39, 41
    model_type, changes = (CASES | MORE_CASES)[case]
    runner = runner_of(reference_model(model_type, **changes), library, torch.bfloat16, count * length + 1)
    prompts = Sequences([random_tokens(length, seed) for seed in range(count)], count * length + 1)
    steps = [[Piece(index, 0, length - 1) for index in range(count)], [Piece(i, length - 1, 1) for i in range(count)]]

    def logits() -> torch.Tensor:
        runner.clear()
        return torch.cat([runner.forward(prompts.batch(pieces)).values.clone() for pieces in steps])

    first, *others = with_each_team(library, logits)
    assert first.isfinite().all()
    assert all(torch.equal(other, first) for other in others)


def test_the_table_of_angles_grows_with_the_sequences() -> None:
    angles = Angles(RopeConfig(RopeType.DEFAULT, 1e4), 16)
    known = angles.upto(5)[:5].copy()
    assert len(angles.upto(3 * FIRST_ANGLES)) < 4 * FIRST_ANGLES + ANGLES_AHEAD
    assert np.array_equal(angles.upto(1)[:5], known)
    at_once = Angles(RopeConfig(RopeType.DEFAULT, 1e4), 16).upto(3 * FIRST_ANGLES)
    assert np.array_equal(angles.upto(1)[: 3 * FIRST_ANGLES], at_once[: 3 * FIRST_ANGLES])
