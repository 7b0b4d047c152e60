"""The equality suite on tiny random models of the families, in torch and on the native CPU kernels."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from umbel.lang.runtime_options import Kernels
from umbel.srt.runners.build import build_runner

from .equality import (
    SLOTS,
    VOCABULARY,
    assert_drafts_change_no_text,
    assert_guesses_change_no_text,
    assert_texts_do_not_depend_on_the_schedule,
)
from .reference import reference_model, tensors_of

# model_type and what differs from the tiny default. Windows are shorter than the prompts.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 6}),
    "deepseek v3": (
        "deepseek_v3",
        {
            "kv_lora_rank": 32,
            "q_lora_rank": 20,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 24,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "moe_intermediate_size": 24,
            "num_key_value_heads": 4,
        },
    ),
    "llama 4": (
        "llama4_text",
        {
            "num_local_experts": 4,
            "head_dim": 16,
            "attention_chunk_size": 6,
            "no_rope_layer_interval": 3,
            "interleave_moe_layer_step": 2,
            "floor_scale": 8,
        },
    ),
    "gemma 4": (
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 5,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "gemma 3n": (
        "gemma3n_text",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "activation_sparsity_pattern": [0.8, 0.0, 0.0, 0.0],
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
        },
    ),
    "gemma 3": ("gemma3_text", {"head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 3}),
    "gemma 2": ("gemma2", {"head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 2.0}),
    "phi 4": ("phi3", {"hidden_size": 64, "pad_token_id": 0}),
    "smollm 3": ("smollm3", {"hidden_size": 64, "no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "olmo 3": ("olmo3", {"hidden_size": 64, "sliding_window": 6}),
    "granite": ("granite", {"hidden_size": 64, "residual_multiplier": 0.22, "logits_scaling": 8.0}),
    "ministral 3": (
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 700.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "glm 4": ("glm4", {"head_dim": 16, "pad_token_id": 0}),
}


RUNS = [(case, kernels) for case in CASES for kernels in ("torch", "native")]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("case", "kernels"), RUNS)
def test_texts_do_not_depend_on_the_schedule(case: str, kernels: Kernels) -> None:
    torch.set_num_threads(1)
    model_type, changes = CASES[case]
    model = reference_model(model_type, vocab_size=VOCABULARY, **changes)
    runner = build_runner(model.config.to_dict(), tensors_of(model), num_slots=SLOTS, dtype="float32", kernels=kernels)
    assert_texts_do_not_depend_on_the_schedule(runner)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("case", "kernels", "seeds"),
    [
        *((case, "native", (1,)) for case in CASES),
        *(pytest.param(*run, range(2, 24), marks=pytest.mark.nightly) for run in RUNS),
    ],
)
def test_guesses_change_no_text(case: str, kernels: Kernels, seeds: Sequence[int]) -> None:
    """At night 22 times 14 requests for each family."""
    torch.set_num_threads(1)
    model_type, changes = CASES[case]
    model = reference_model(model_type, vocab_size=VOCABULARY, **changes)
    runner = build_runner(model.config.to_dict(), tensors_of(model), num_slots=SLOTS, dtype="float32", kernels=kernels)
    assert_guesses_change_no_text(runner, seeds)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("case", "kernels", "of_draft"),
    [
        ("gemma 3", "native", "torch"),
        ("llama 4", "torch", "native"),
        *(pytest.param(*run, "native", marks=pytest.mark.nightly) for run in RUNS),
    ],
)
def test_drafts_change_no_text(case: str, kernels: Kernels, of_draft: Kernels) -> None:
    """One that is the model itself is nearly always right, one with other weights hardly ever."""
    torch.set_num_threads(1)
    model_type, changes = CASES[case]
    model = reference_model(model_type, vocab_size=VOCABULARY, **changes)
    runner = build_runner(model.config.to_dict(), tensors_of(model), num_slots=SLOTS, dtype="float32", kernels=kernels)
    kind = "llama" if model_type == "phi3" else "phi3"  # weights of one seed would be those of the model
    other = reference_model(kind, vocab_size=VOCABULARY, hidden_size=64, pad_token_id=0)
    right = []
    for one in (model, other):
        draft = build_runner(
            one.config.to_dict(),
            tensors_of(one),
            num_slots=SLOTS,
            window_slots=0,
            dtype="float32",
            kernels=of_draft,
        )
        right.append(assert_drafts_change_no_text(runner, draft, (1, 2)))
    assert right[0] > 0.95
    assert right[1] < 0.7, "what a constraint leaves open is right by chance"


WINDOW_SLOTS = 40  # for a few windows, and a chunk of 7


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize(
    "case", ["gpt-oss", "gemma 3", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("llama 4", "gemma 4"))]
)
@pytest.mark.sampled(4)
def test_texts_are_those_of_one_pool(case: str, kernels: Kernels) -> None:
    torch.set_num_threads(1)
    model_type, changes = CASES[case]
    model = reference_model(model_type, vocab_size=VOCABULARY, **changes)
    runner, plain = (
        build_runner(
            model.config.to_dict(),
            tensors_of(model),
            num_slots=SLOTS,
            window_slots=window_slots,
            dtype="float32",
            kernels=kernels,
        )
        for window_slots in (WINDOW_SLOTS, 0)
    )
    assert runner.window_pool is not None
    assert plain.window_pool is None
    assert_texts_do_not_depend_on_the_schedule(runner, plain=plain)
