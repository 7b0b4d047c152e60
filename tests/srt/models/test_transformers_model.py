"""Models of transformers on our KV pool: those that can run equal themselves, those that cannot are refused."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from umbel.lang.errors import ModelError
from umbel.srt.cache.kv_pool import KVGeometry
from umbel.srt.models.transformers_model import TransformersModel, build_transformers_model
from umbel.srt.runners.build import build_runner

from .reference import (
    Piece,
    Sequences,
    random_tokens,
    reference_logits,
    reference_model,
    relative_error,
    run_steps,
    tensors_of,
)

NUM_SLOTS = 200
LENGTHS = (23, 9, 31)
CHUNKS = [
    [Piece(0, 0, 5), Piece(2, 0, 1)],
    [Piece(2, 1, 20), Piece(0, 5, 1), Piece(1, 0, 8)],
    [Piece(0, 6, 17), Piece(2, 21, 10), Piece(1, 8, 1)],
]

ABLE: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "phi": {},
    "cohere2": {"sliding_window": 6, "eos_token_id": 1, "pad_token_id": 0},
    "stablelm": {"num_attention_heads": 3, "num_key_value_heads": 3},
    "gpt2": {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 1},
    "vaultgemma": {"head_dim": 12, "sliding_window": 6, "attn_logit_softcapping": 2.0},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    # Layers that differ in heads and share keys, and experts next to MLPs.
    "gemma4_text": {
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
    # Sinks, and values smaller than their keys.
    "mimo_v2_flash": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 24,
        "v_head_dim": 16,
        "swa_head_dim": 24,
        "swa_v_head_dim": 16,
        "swa_num_key_value_heads": 2,
        "eos_token_id": 1,
    },
}
UNABLE: dict[str, tuple[dict[str, Any], str]] = {
    "glm_moe_dsa": ({"n_routed_experts": 4, "index_topk": 8}, "chooses the keys of a row with an indexer"),
    "mamba": ({}, "never called for attention"),
    "bloom": ({"n_head": 4, "n_layer": 2}, "never called for attention"),
    "falcon": ({}, "cannot be loaded"),
    "recurrent_gemma": ({}, "of type 'linear_attention'"),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("model_type", ABLE)
@pytest.mark.sampled(4)
def test_logits_equal_those_of_the_module_itself(model_type: str) -> None:
    reference = reference_model(model_type, **ABLE[model_type])
    runner = build_runner(reference.config.to_dict(), tensors_of(reference), num_slots=NUM_SLOTS, dtype="float32")
    assert isinstance(runner.model, TransformersModel)
    sequences = Sequences([random_tokens(length, seed) for seed, length in enumerate(LENGTHS)], NUM_SLOTS)
    for actual, ids in zip(run_steps(runner, sequences, CHUNKS), sequences.token_ids, strict=True):
        assert relative_error(actual, reference_logits(reference, ids.tolist())) < 2e-5


def test_a_family_of_ours_gives_the_same_logits_through_transformers() -> None:
    reference = reference_model("gemma3_text", head_dim=16, sliding_window=5, sliding_window_pattern=3)
    config, tensors = reference.config.to_dict(), tensors_of(reference)
    model = build_transformers_model(config, tensors, dtype=torch.float32, device=torch.device("cpu"))
    assert model.windows == (5, None)
    assert model.kv_geometry == KVGeometry.uniform(3, 2, 16, torch.float32)


@pytest.mark.parametrize("model_type", UNABLE)
@pytest.mark.sampled(4)
def test_a_model_that_cannot_run_on_our_pool_is_refused_with_the_reason(model_type: str) -> None:
    changes, reason = UNABLE[model_type]
    reference = reference_model(model_type, **changes)
    with pytest.raises(ModelError, match=reason):
        build_runner(reference.config.to_dict(), tensors_of(reference), num_slots=NUM_SLOTS, dtype="float32")


def test_rope_that_depends_on_the_longest_sequence_is_refused() -> None:
    reference = reference_model("cohere2", eos_token_id=1, pad_token_id=0)
    config = reference.config.to_dict()
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ModelError, match="turns all keys anew"):
        build_runner(config, tensors_of(reference), num_slots=NUM_SLOTS, dtype="float32")


def test_missing_tensors_are_named() -> None:
    reference = reference_model("cohere2", eos_token_id=1, pad_token_id=0)
    tensors = tensors_of(reference)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"missing tensors model\.layers\.1\.mlp\.up_proj\.weight"):
        build_runner(reference.config.to_dict(), tensors, num_slots=NUM_SLOTS, dtype="float32")


def test_an_unknown_model_type_is_refused() -> None:
    with pytest.raises(ModelError, match="'no_such_model'"):
        build_runner({"model_type": "no_such_model"}, {}, num_slots=NUM_SLOTS)


def test_a_configuration_cannot_make_transformers_run_code_of_a_checkpoint() -> None:
    reference = reference_model("gpt_neox")
    config = {**reference.config.to_dict(), "auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    runner = build_runner(config, tensors_of(reference), num_slots=NUM_SLOTS, dtype="float32")
    assert runner.vocab_size == 97


def test_a_step_that_wants_no_logits_only_fills_the_pool() -> None:
    reference = reference_model("phi")
    runner = build_runner(reference.config.to_dict(), tensors_of(reference), num_slots=NUM_SLOTS, dtype="float32")
    sequences = Sequences([random_tokens(12, 4)], NUM_SLOTS)
    nothing = dataclasses.replace(sequences.batch([Piece(0, 0, 11)]), logit_rows=np.array([], dtype=np.int64))
    assert runner.forward(nothing).values.shape == (0, 97)
    last = runner.forward(sequences.batch([Piece(0, 11, 1)])).values
    assert relative_error(last, reference_logits(reference, sequences.token_ids[0].tolist())[-1:]) < 2e-5
