"""GGUF files with experts, latents, or layers that differ compute what transformers does, from the file's blocks."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import pytest
import torch
from umbel.lang.runtime_options import Kernels

from .gguf_checks import (
    Spelled,
    apart,
    assert_equals_transformers,
    assert_near_unpacked,
    assert_refused,
    family,
    open_in_blocks,
)
from .tiny import GEMMA4, auto

PARTS = ((0, "gate"), (1, "up"))


def fused(name: str, tensor: torch.Tensor) -> Spelled:
    """Gate and up of an expert are one matrix, as newer converters may write them."""
    layer = name.removeprefix("model.layers.").partition(".")[0]
    if name.endswith("experts.gate_up_proj"):
        return [(f"blk.{layer}.ffn_gate_up_exps.weight", tensor)]
    return apart(name, tensor)


def turned(name: str, tensor: torch.Tensor) -> Spelled:
    """transformers stores experts with their inputs first."""
    return apart(name, tensor.transpose(1, 2) if ".experts." in name and tensor.dim() == 3 else tensor)


def gpt_oss(name: str, tensor: torch.Tensor) -> Spelled:
    """Outputs of gate and up alternate."""
    if name.endswith("down_proj_bias"):
        return [(name.replace("_bias", ".bias"), tensor)]
    if name.endswith("gate_up_proj_bias"):
        return [
            (name.replace("gate_up_proj_bias", f"{part}_proj.bias"), tensor[:, i::2])
            for i, part in enumerate(("gate", "up"))
        ]
    if name.endswith("gate_up_proj"):
        return [
            (name.replace("gate_up", part) + ".weight", tensor.mT[:, i::2]) for i, part in enumerate(("gate", "up"))
        ]
    return turned(name, tensor)


def granite(name: str, tensor: torch.Tensor) -> Spelled:
    name = name.replace("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight")
    if name.endswith("shared_mlp.input_linear.weight"):
        return [
            (name.replace("input_linear", f"{part}_proj").replace("shared_mlp", "mlp.shared_expert"), half)
            for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True)
        ]
    name = name.replace("shared_mlp.output_linear", "mlp.shared_expert.down_proj")
    return apart(name.replace("block_sparse_moe.experts", "mlp.experts"), tensor)


def latent(name: str, tensor: torch.Tensor) -> Spelled:
    """The map out of latents in two: of keys, transposed, and of values."""
    if not name.endswith("kv_b_proj.weight"):
        return apart(name.replace("gate.e_score_correction_bias", "e_score_correction.bias"), tensor)
    keys, values = tensor.view(4, -1, 32).split([32, 48], dim=1)
    return [(name.replace("kv_b", "k_b"), keys.mT), (name.replace("kv_b", "v_b"), values)]


def old_latent(name: str, tensor: torch.Tensor) -> Spelled:
    return apart(name.replace("gate.e_score_correction_bias", "e_score_correction.bias"), tensor)


SOME = {"num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
DEEPSEEK: dict[str, Any] = {
    **SOME,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "head_dim": 16,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "mscale": 1.5,
        "mscale_all_dim": 1.5,
        "original_max_position_embeddings": 128,
    },
}
DEEPSEEK_FILE = {
    **ROUTED,
    "attention.head_count_kv": 1,
    "attention.kv_lora_rank": 32,
    "attention.q_lora_rank": 64,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": 48,
    "attention.value_length_mla": 48,
    "rope.dimension_count": 16,
    "leading_dense_block_count": 1,
    "expert_shared_count": 2,
    "expert_weights_scale": 2.5,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
    "expert_group_count": 2,
    "expert_group_used_count": 1,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
    "rope.scaling.yarn_log_multiplier": 0.15,
}
OLD_LATENTS = {key: value for key, value in DEEPSEEK_FILE.items() if not key.endswith("_mla")}


ARCH = gguf.MODEL_ARCH
QWEN3 = family(
    "qwen 3",
    ARCH.QWEN3MOE,
    auto("qwen3_moe", **SOME, num_experts=4, moe_intermediate_size=32, norm_topk_prob=True),
    ROUTED,
)
GPT_OSS = family(
    "gpt-oss",
    ARCH.GPT_OSS,
    auto(
        "gpt_oss",
        **SOME,
        num_local_experts=4,
        sliding_window=6,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    ),
    {
        **ROUTED,
        "expert_feed_forward_length": 96,
        "attention.sliding_window": 6,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    },
    gpt_oss,
)
FAMILIES = (
    QWEN3,
    replace(QWEN3, name="qwen 3, gate and up fused", spelled=fused),
    family(
        "qwen 2",
        ARCH.QWEN2MOE,
        auto("qwen2_moe", **SOME, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=64),
        {**ROUTED, "expert_shared_feed_forward_length": 64},
        lambda name, tensor: apart(name, tensor[0] if "shared_expert_gate" in name else tensor),
    ),
    family(
        "mixtral",
        ARCH.LLAMA,
        auto("mixtral", **SOME, num_local_experts=4),
        {"expert_count": 4, "expert_used_count": 2},
        lambda name, tensor: apart(name.replace(".mlp.gate.", ".block_sparse_moe.gate."), tensor),
        rotates_pairs=True,
    ),
    GPT_OSS,
    family(
        "llama 4",
        ARCH.LLAMA4,
        auto(
            "llama4_text",
            num_local_experts=4,
            intermediate_size=64,
            intermediate_size_mlp=96,
            interleave_moe_layer_step=2,
            num_hidden_layers=4,
        ),
        {
            **ROUTED,
            "expert_used_count": 1,
            "expert_feed_forward_length": 64,
            "feed_forward_length": 96,
            "interleave_moe_layer_step": 2,
        },
        turned,
    ),
    family(
        "granite",
        ARCH.GRANITE_MOE,
        auto("granitemoe", **SOME, num_local_experts=4, logits_scaling=4.0, attention_multiplier=0.1),
        {"expert_count": 4, "expert_used_count": 2, "logit_scale": 4.0, "attention.scale": 0.1},
        granite,
        rotates_pairs=True,
    ),
    family(
        "granite, one for all",
        ARCH.GRANITE_MOE,
        auto("granitemoeshared", **SOME, num_local_experts=4, shared_intermediate_size=64),
        {
            "expert_count": 4,
            "expert_used_count": 2,
            "logit_scale": 1.0,
            "expert_shared_feed_forward_length": 64,
        },
        granite,
        rotates_pairs=True,
    ),
    family("deepseek v3", ARCH.DEEPSEEK2, auto("deepseek_v3", **DEEPSEEK), DEEPSEEK_FILE, latent),
    family(
        "deepseek v3, as older files have latents",
        ARCH.DEEPSEEK2,
        auto(
            "deepseek_v3",
            **{**DEEPSEEK, "q_lora_rank": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        ),
        {
            **{key: value for key, value in OLD_LATENTS.items() if "scaling" not in key and "q_lora" not in key},
            "attention.head_count_kv": 4,
            "attention.value_length": 48,
        },
        old_latent,
    ),
)


def gemma3n(name: str, tensor: torch.Tensor) -> Spelled:
    """Maps of streams are stacked: one here, of two streams."""
    if name.startswith("model.altup_"):
        return [(name.replace(".0.", "."), tensor[None])]
    return [(name + ".weight" if name.endswith("correct_output_scale") else name, tensor)]


GEMMA3N = family(
    "gemma 3n",
    ARCH.GEMMA3N,
    auto(
        "gemma3n_text",
        intermediate_size=[96, 96, 96, 64],
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=8,
        activation_sparsity_pattern=[0.75, 0.5, 0.0, 0.0],
        altup_num_inputs=2,
        laurel_rank=32,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=300,
        tie_word_embeddings=True,
    ),
    {
        "feed_forward_length": [96, 96, 96, 64],
        "rope.freq_base": 1_000_000.0,
        "attention.shared_kv_layers": 2,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [True, False] * 2,
        "activation_sparsity_scale": [NormalDist().inv_cdf(0.75), 0.0, -math.inf, -math.inf],
        "altup.num_inputs": 2,
        "altup.active_idx": 0,
        "embedding_length_per_layer_input": 32,
    },
    gemma3n,
)
BY_NAME = {each.name: each for each in (*FAMILIES, GEMMA4, GEMMA3N)}


RUNS = [(name, kernels) for name in BY_NAME for kernels in ("torch", "native")]


@pytest.mark.parametrize(("name", "kernels"), RUNS)
@pytest.mark.sampled(4)
def test_logits_equal_those_of_transformers(name: str, kernels: Kernels, tmp_path: Path) -> None:
    assert_equals_transformers(BY_NAME[name], kernels, tmp_path)


@pytest.mark.parametrize(
    ("name", "kind", "matrix"),
    [
        ("qwen 3", "Q8_0", "layers.1.mlp.experts.2.down_proj"),
        ("gpt-oss", "MXFP4", "layers.1.mlp.experts.3.gate_proj"),
        ("deepseek v3", "Q8_0", "layers.0.self_attn.k_b_proj.2"),
        ("gemma4", "Q8_0", "embed_tokens_per_layer"),
    ],
)
def test_matrices_stay_in_the_blocks_of_the_file(name: str, kind: str, matrix: str, tmp_path: Path) -> None:
    source, tensors = open_in_blocks(BY_NAME[name], kind, tmp_path)
    block = tensors.block(f"model.{matrix}.weight")
    assert block is not None
    assert block.kind == kind
    native = assert_near_unpacked(source, 0.03)
    assert str(native.facts()["weights"]).startswith(kind)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen 3", {"expert_count": 1 << 31}, r"'blk\.0\.ffn_gate_inp\.weight' has shape \(4, 128\), not"),
        ("qwen 3", {"expert_used_count": 5}, "damaged: 5 of 4 experts of 32 numbers"),
        ("qwen 3", {"expert_feed_forward_length": 64}, r"ffn_down_exps\.weight' has shape \(4, 128, 32\), not"),
        ("llama 4", {"interleave_moe_layer_step": 0}, "in steps of 0; download it again"),
        ("deepseek v3", {"expert_gating_func": 1}, "DeepSeek V2, which scores experts by softmax"),
        ("deepseek v3", {"rope.dimension_count": 48}, r"qk_nope_head_dim=0 of latent attention"),
        ("deepseek v3", {"leading_dense_block_count": 2}, r"lacks tensor 'blk\.1\.ffn_down\.weight'|not part of"),
        ("gemma4", {"attention.head_count_kv": [2, 1, 1, 1, 1]}, r"this file has 1 and 2, 2 of 5 layers"),
        ("gemma 3n", {"activation_sparsity_scale": [0.0]}, r"a sparsity for each of its 4 layers \(here 1\)"),
        ("gemma 3n", {"altup.num_inputs": 4}, r"'altup_proj\.weight' has shape \(1, 128, 128\), not \(3, 128, 128\)"),
        ("gemma4", {"attention.head_count_kv": [2, 1]}, "lists no 5 whole numbers"),
        ("gpt-oss", {"attention.sliding_window_pattern": [True]}, "lists 1 of 2 layers"),
    ],
)
def test_what_does_not_fit_the_experts_is_named(
    name: str, change: dict[str, object], message: str, tmp_path: Path
) -> None:
    assert_refused(BY_NAME[name], change, message, tmp_path)
