"""GGUF files of hybrids, as llama.cpp's converter lays them out, compute what transformers does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from umbel.lang.errors import ModelError
from umbel.lang.runtime_options import Kernels
from umbel.srt.models.families import read_config
from umbel.srt.runners.build import build_runner
from umbel.srt.weights import open_model

from .gguf_checks import (
    SLOTS,
    Spelled,
    apart,
    assert_equals_transformers,
    assert_near_unpacked,
    assert_refused,
    family,
    open_in_blocks,
)
from .test_gguf_experts import granite as granite_experts
from .tiny import auto, write_gguf

GROUPS, KEY_HEADS, VALUE_HEADS, KEY, VALUE = 2, 2, 4, 16, 32


def convolution(name: str, tensor: torch.Tensor) -> Spelled:
    return [(name, tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor)]


def state(name: str, tensor: torch.Tensor) -> Spelled | None:
    """The tensors of a memory that the converter changes, whatever the family; None: it is none of them."""
    block = f"blk.{name.removeprefix('model.layers.').partition('.')[0]}"
    if name.endswith(".A_log"):
        return [(f"{block}.ssm_a", -tensor.exp())]
    if name.endswith(".dt_bias"):
        return [(f"{block}.ssm_dt.bias", tensor)]
    if name.endswith("conv1d.weight"):
        return [(f"{block}.ssm_conv1d.weight", tensor.squeeze(1))]
    return None


def mamba(name: str, tensor: torch.Tensor) -> Spelled:
    block = f"blk.{name.removeprefix('model.layers.').partition('.')[0]}"
    if name.endswith((".D", ".A_log")):
        values = tensor if name.endswith(".D") else -tensor.exp()
        return [(f"{block}.ssm_{'d' if name.endswith('.D') else 'a'}", values[:, None])]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        return [(f"{block}.ssm_norm.weight", tensor.view(GROUPS, -1))]
    return state(name, tensor) or [(name, tensor)]


def granite(name: str, tensor: torch.Tensor) -> Spelled:
    """Without experts the MLP for all tokens is the layer's own."""
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = tensor.chunk(2)
        return [
            (name.replace("shared_mlp.input_linear", f"feed_forward.{part}_proj"), half)
            for part, half in (("gate", gate), ("up", up))
        ]
    return mamba(name.replace("shared_mlp.output_linear", "feed_forward.down_proj"), tensor)


def granite_moe(name: str, tensor: torch.Tensor) -> Spelled:
    return mamba(name, tensor) if ".mamba." in name else granite_experts(name, tensor)


def nemotron(name: str, tensor: torch.Tensor) -> Spelled:
    return [(part.replace("model.", "backbone."), values) for part, values in mamba(name, tensor)]


def nemotron_moe(name: str, tensor: torch.Tensor) -> Spelled:
    """Experts are stacked, without gates."""
    if name.endswith(("experts.up_proj", "experts.down_proj")):
        return [(name.replace("mixer.experts", "mlp.experts") + ".weight", tensor)]
    name = name.replace("gate.e_score_correction_bias", "gate.e_score_correction.bias")
    return nemotron(name, tensor)


def next_split(name: str, tensor: torch.Tensor) -> Spelled:
    """The first map parted by kinds of outputs; experts, and the gate of the one that every token uses."""
    if name.endswith("in_proj_qkvz.weight"):
        group = VALUE_HEADS // KEY_HEADS
        parts = tensor.view(KEY_HEADS, -1, tensor.shape[1]).split([KEY, KEY, group * VALUE, group * VALUE], dim=1)
        query, key, value, gates = (part.flatten(0, 1) for part in parts)
        block = f"blk.{name.removeprefix('model.layers.').partition('.')[0]}"
        return [(f"{block}.attn_qkv.weight", torch.cat([query, key, value])), (f"{block}.attn_gate.weight", gates)]
    return state(name, tensor) or apart(name, tensor[0] if "shared_expert_gate" in name else tensor)


def dealt(tensor: torch.Tensor, size: int, dim: int = 0) -> torch.Tensor:
    """Value heads of `size` numbers in turns: the first one of each key head, then the second ones."""
    whole = tensor.movedim(dim, 0)
    heads = whole.view(KEY_HEADS, VALUE_HEADS // KEY_HEADS, size, *whole.shape[1:])
    return heads.transpose(0, 1).reshape(whole.shape).movedim(0, dim)


def dealt_heads(name: str, tensor: torch.Tensor) -> Spelled:
    keys = 2 * KEY_HEADS * KEY
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        tensor = torch.cat([tensor[:keys], dealt(tensor[keys:], VALUE)])
    elif name.endswith("in_proj_z.weight"):
        tensor = dealt(tensor, VALUE)
    elif name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        tensor = dealt(tensor, 1)
    elif name.endswith("linear_attn.out_proj.weight"):
        tensor = dealt(tensor, VALUE, 1)
    return state(name, tensor) or apart(name, tensor[0] if "shared_expert_gate" in name else tensor)


DELTA_NET = {
    "num_hidden_layers": 2,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": KEY,
    "linear_value_head_dim": VALUE,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
}
DELTA_NET_FILE = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": KEY,
    "ssm.group_count": KEY_HEADS,
    "ssm.time_step_rank": VALUE_HEADS,
    "ssm.inner_size": VALUE_HEADS * VALUE,
    "full_attention_interval": 2,
    "rope.dimension_count": 8,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
EXPERTS_FILE = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 64,
}
MAMBA_FILE = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 8,
    "ssm.group_count": GROUPS,
    "ssm.time_step_rank": 8,
    "ssm.inner_size": 256,
}
GRANITE: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 8,
    "mamba_n_groups": GROUPS,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_intermediate_size": 64,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
}
GRANITE_FILE = {
    **MAMBA_FILE,
    "attention.head_count_kv": [0, 2],
    "expert_shared_feed_forward_length": 64,
    "logit_scale": 2.0,
    "attention.scale": 0.2,
    "rope.scaling.finetuned": False,
}


ARCH = gguf.MODEL_ARCH
FAMILIES = (
    family(
        "lfm2",
        ARCH.LFM2,
        auto("lfm2", layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False, tie_word_embeddings=True),
        {
            "shortconv.l_cache": 3,
            "attention.head_count_kv": [0, 2],
            "attention.layer_norm_rms_epsilon": 1e-5,
        },
        convolution,
    ),
    family(
        "granite 4 h",
        ARCH.GRANITE_HYBRID,
        auto("granitemoehybrid", **GRANITE, num_local_experts=0),
        GRANITE_FILE,
        granite,
        rotates_pairs=True,
    ),
    family(
        "granite 4 h with experts",
        ARCH.GRANITE_HYBRID,
        auto("granitemoehybrid", **GRANITE, num_local_experts=4, num_experts_per_tok=2),
        {**GRANITE_FILE, "expert_count": 4, "expert_used_count": 2},
        granite_moe,
        rotates_pairs=True,
    ),
    family(
        "nemotron h",
        ARCH.NEMOTRON_H,
        auto(
            "nemotron_h",
            head_dim=32,
            mamba_num_heads=8,
            mamba_head_dim=32,
            n_groups=GROUPS,
            ssm_state_size=8,
            layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"],
        ),
        {
            **MAMBA_FILE,
            "attention.head_count_kv": [0, 0, 2, 0],
            "feed_forward_length": [0, 96, 0, 96],
            "attention.layer_norm_rms_epsilon": 1e-5,
        },
        nemotron,
        rotates_pairs=True,
    ),
    family(
        "nemotron h with experts",
        ARCH.NEMOTRON_H_MOE,
        auto(
            "nemotron_h",
            head_dim=32,
            mamba_num_heads=8,
            mamba_head_dim=32,
            n_groups=GROUPS,
            ssm_state_size=8,
            layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=64,
            routed_scaling_factor=1.5,
        ),
        {
            **MAMBA_FILE,
            **EXPERTS_FILE,
            "attention.head_count_kv": [0, 0, 2, 0],
            "feed_forward_length": [0, 32, 0, 32],
            "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_group_count": 2,
            "expert_group_used_count": 1,
            "expert_weights_scale": 1.5,
            "expert_weights_norm": True,
        },
        nemotron_moe,
        rotates_pairs=True,
    ),
    family(
        "qwen 3 next",
        ARCH.QWEN3NEXT,
        auto("qwen3_next", **DELTA_NET, **EXPERTS),
        {**DELTA_NET_FILE, **EXPERTS_FILE},
        next_split,
        adds_one_to_norms=True,
    ),
    family(
        "qwen 3.5",
        ARCH.QWEN35,
        auto("qwen3_5_text", **DELTA_NET),
        DELTA_NET_FILE,
        dealt_heads,
        adds_one_to_norms=True,
    ),
    family(
        "qwen 3.5 with experts",
        ARCH.QWEN35MOE,
        auto("qwen3_5_moe_text", **DELTA_NET, **EXPERTS),
        {**DELTA_NET_FILE, **EXPERTS_FILE},
        dealt_heads,
        adds_one_to_norms=True,
    ),
)
BY_NAME = {each.name: each for each in FAMILIES}


# The order of heads is that of the file in torch, too.
TORCH_BY_DAY = ("qwen 3 next", "qwen 3.5")
RUNS = [
    *((name, "native") for name in BY_NAME),
    *(pytest.param(name, "torch", marks=[] if name in TORCH_BY_DAY else pytest.mark.nightly) for name in BY_NAME),
]


@pytest.mark.parametrize(("name", "kernels"), RUNS)
@pytest.mark.sampled(4)
def test_logits_equal_those_of_transformers(name: str, kernels: Kernels, tmp_path: Path) -> None:
    assert_equals_transformers(BY_NAME[name], kernels, tmp_path)


@pytest.mark.parametrize("name", ["lfm2", "granite 4 h", "qwen 3.5"])
def test_maps_of_recurrent_layers_stay_in_the_blocks_of_the_file(name: str, tmp_path: Path) -> None:
    source, tensors = open_in_blocks(BY_NAME[name], "Q8_0", tmp_path)
    config = read_config(source.config)
    recurrent = config.layers[0].recurrent
    assert recurrent is not None
    for maps in recurrent.maps("model.layers.0." + recurrent.name, config.hidden_size):
        blocks = [tensors.block(weight) for weight in maps.weights]
        assert [block.kind for block in blocks if block is not None] == ["Q8_0"] * len(maps.names)
    assert_near_unpacked(source, 0.05)  # inputs of 8 bits, and delta nets scale keys to length 1


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("lfm2", {"attention.head_count_kv": [0]}, "head_count_kv lists no 2 whole numbers"),
        ("lfm2", {"shortconv.l_cache": 9}, r"shortconv\.conv\.weight' has shape \(128, 3\), not"),
        ("granite 4 h", {"attention.head_count_kv": [0, 0]}, r"'blk\.1\.attn_|lacks tensor 'blk\.1\.ssm_"),
        ("granite 4 h", {"ssm.time_step_rank": 0}, "damaged: 0 heads of 256 numbers"),
        ("granite 4 h", {"ssm.time_step_rank": 5}, "damaged: 5 heads of 256 numbers"),
        ("granite 4 h", {"ssm.group_count": 0}, "has shape"),
        ("granite 4 h", {"rope.scaling.finetuned": True}, "Bamba is not supported as GGUF"),
        ("nemotron h", {"attention.head_count_kv": [0, 0, 2, 1]}, r"layers of \[0, 1, 2\] key heads"),
        ("nemotron h with experts", {"moe_latent_size": 8}, "experts on latents are not supported"),
        ("qwen 3.5", {"full_attention_interval": 0}, "every 0-th layer attends"),
        ("qwen 3.5", {"ssm.state_size": 1 << 30}, "has shape"),
    ],
)
def test_what_does_not_fit_the_states_is_named(
    name: str, change: dict[str, object], message: str, tmp_path: Path
) -> None:
    assert_refused(BY_NAME[name], change, message, tmp_path)


def test_a_decay_that_grows_is_refused(tmp_path: Path) -> None:
    def grows(name: str, tensor: torch.Tensor) -> Spelled:
        return [(part, -values if part.endswith("ssm_a") else values) for part, values in granite(name, tensor)]

    write_gguf(tmp_path / "odd.gguf", replace(BY_NAME["granite 4 h"], spelled=grows))
    source = open_model(tmp_path / "odd.gguf", cache=tmp_path / "cache")
    with pytest.raises(ModelError, match="A_log: the file should hold numbers below 0"):
        build_runner(source.config, source.tensors, num_slots=SLOTS, dtype="float32", kernels="torch")
