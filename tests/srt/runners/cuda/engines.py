"""The CUDA engine on the host, and tiny models of every family to run on it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from umbel.srt.cache.kv_pool import PoolSize
from umbel.srt.core.batch import Batch
from umbel.srt.layers.checkpoint import Tensors
from umbel.srt.layers.low_rank import Adapter
from umbel.srt.models.families import is_family, our_names
from umbel.srt.models.transformers_model import build_transformers_model
from umbel.srt.models.vision.parts import Renamed
from umbel.srt.runners.build import build_runner
from umbel.srt.runners.cuda.build import Parts, build_cuda_runner
from umbel.srt.runners.cuda.device import Accelerator, HostAccelerator, StepLimits
from umbel.srt.runners.cuda.runner import CudaRunner
from umbel.srt.runners.torch_runner import TorchRunner

from ...models.reference import Piece, Sequences, random_tokens, reference_model, tensors_of
from .reference import reference_parts

NUM_SLOTS = 200
NUM_STATES = 12
LENGTHS = (23, 9, 31)

# Windows are shorter than the sequences.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 16}),
    "qwen 2": ("qwen2", {"tie_word_embeddings": True, "hidden_size": 64}),
    "qwen 3": ("qwen3", {"head_dim": 16}),
    "gemma 3": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma 2": (
        "gemma2",
        {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 2.5, "final_logit_softcapping": 3.0},
    ),
    "phi 4 mini": (
        "phi3",
        {
            "hidden_size": 64,
            "pad_token_id": 0,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0] * 6,
                "long_factor": [1.2, 1.9, 3.0, 5.0, 9.0, 16.0],
            },
        },
    ),
    "smollm 3": ("smollm3", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0, "hidden_size": 64}),
    "olmo 2": ("olmo2", {"hidden_size": 64}),
    "granite": (
        "granite",
        {
            "hidden_size": 64,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.05,
            "logits_scaling": 8.0,
        },
    ),
    "glm 4 0414": ("glm4", {"head_dim": 32, "pad_token_id": 0}),
}

GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 5,
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": 97,
}
DEEPSEEK = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}

# Layers whose heads differ, or whose keys are another's or latents; sinks, and experts with biases.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma 4": (
        "gemma4_text",
        {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 16},
    ),
    "gemma 4, values that are keys": (
        "gemma4_text",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek v3": ("deepseek_v3", DEEPSEEK),
    "gemma 3n": (
        "gemma3n_text",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.8, 0.3, 0.0, 0.0],
            "vocab_size_per_layer_input": 90,
            "hidden_size_per_layer_input": 16,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "laurel_rank": 8,
        },
    ),
}

DELTA_NET = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}

# Layers with a recurrent state, of one part, with gated attention, and experts and MLPs without gates.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 8, "hidden_size": 64}),
    "qwen 3.5": ("qwen3_5_text", DELTA_NET),
    "qwen 3 next": (
        "qwen3_next",
        {
            **DELTA_NET,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "nemotron h": (
        "nemotron_h",
        {
            "head_dim": 16,
            "mamba_num_heads": 6,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 5,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
}

EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7, "head_dim": 16}),
    "qwen 3, experts": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16},
    ),
    "llama 4": (
        "llama4_text",
        {
            "num_local_experts": 4,
            "head_dim": 16,
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 56,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "floor_scale": 4,
        },
    ),
    "qwen 2, an expert for all": (
        "qwen2_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "hidden_size": 64,
        },
    ),
}

# Models that run through transformers. Heads are multiples of 16, windows are shorter than the sequences.
BORROWED: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt 2": ("gpt2", {"hidden_size": 64, "n_layer": 2, "bos_token_id": 1, "eos_token_id": 1}),
    "gpt neox": ("gpt_neox", {"hidden_size": 64}),
    "phi": ("phi", {"hidden_size": 64}),
    "stablelm": ("stablelm", {"hidden_size": 64, "num_key_value_heads": 4}),
    "cohere 2": ("cohere2", {"head_dim": 16, "sliding_window": 6, "eos_token_id": 1, "pad_token_id": 0}),
    "vaultgemma": ("vaultgemma", {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 2.0}),
    "olmoe": ("olmoe", {"hidden_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 1}),
    "gemma 4, experts": (
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 5,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97,
            "num_kv_shared_layers": 1,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    # Sinks, and values smaller than their keys.
    "mimo 2": (
        "mimo_v2_flash",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "head_dim": 32,
            "v_head_dim": 16,
            "swa_head_dim": 32,
            "swa_v_head_dim": 16,
            "swa_num_key_value_heads": 2,
            "sliding_window": 6,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "eos_token_id": 1,
        },
    ),
}


def tiny_model(family: str, **changes: Any) -> tuple[dict[str, Any], Tensors]:
    """Configuration and float32 tensors. changes: of the family's configuration."""
    model_type, own = {**FAMILIES, **SHAPES, **HYBRIDS, **EXPERTS, **BORROWED}[family]
    reference = reference_model(model_type, **{**own, **changes})
    return reference.config.to_dict(), tensors_of(reference)


def on_host(
    config: dict[str, Any],
    tensors: Tensors,
    *,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    parts: Parts | None = None,
    accelerator: Accelerator | None = None,
    num_slots: int = NUM_SLOTS,
    window_slots: int = 0,
    max_running: int = 8,
    rows: int | None = None,
    adapters: Sequence[Adapter] = (),
    **switches: bool,
) -> CudaRunner:
    """
    Args:
        parts: kernels; None takes the references.
        rows: of the largest step that runs as a graph; None: as many as sequences.
    """
    if (names := our_names(config, tensors)) is not None:
        tensors = Renamed(tensors, names)
    accelerator, borrowed = accelerator or HostAccelerator(), None
    if not is_family(config):
        borrowed = build_transformers_model(config, tensors, dtype=dtype, device=accelerator.device)
    return build_cuda_runner(
        config,
        tensors,
        accelerator=accelerator,
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        size=lambda geometry: PoolSize(num_slots, window_slots),
        num_states=lambda model, slots: 0 if model.state_geometry is None else max(NUM_STATES, 2 * max_running + 1),
        limits=StepLimits(rows=rows or max_running, sequences=max_running, logits=max_running),
        parts=parts or reference_parts(),
        adapters=adapters,
        borrowed=borrowed,
        **switches,
    )


def in_torch(config: dict[str, Any], tensors: Tensors, **options: Any) -> TorchRunner:
    """The runner that the CUDA engine is compared with."""
    runner = build_runner(
        config, tensors, **{"num_slots": NUM_SLOTS, "dtype": "float32", "kernels": "torch", "pack": False, **options}
    )
    assert isinstance(runner, TorchRunner)
    return runner


def sequences(lengths: Sequence[int] = LENGTHS) -> Sequences:
    return Sequences([random_tokens(length, seed) for seed, length in enumerate(lengths)], NUM_SLOTS)


def mixed_steps() -> list[list[Piece]]:
    """Prompts in chunks beside rows that decode, then decoding alone: of three sequences, of two, of one."""
    return [
        [Piece(0, 0, 12), Piece(2, 0, 7)],
        [Piece(0, 12, 1), Piece(1, 0, 4), Piece(2, 7, 13)],
        *([Piece(0, 13 + i, 1), Piece(1, 4 + i, 1), Piece(2, 20 + i, 1)] for i in range(5)),
        *([Piece(0, 18 + i, 1), Piece(2, 25 + i, 1)] for i in range(5)),
        [Piece(2, 30, 1)],
    ]


def only_last_rows(batch: Batch) -> Batch:
    """Logits of the last row of each sequence, as a step of generations asks for them."""
    return replace(batch, logit_rows=np.cumsum(batch.query_lengths, dtype=np.int64) - 1)
