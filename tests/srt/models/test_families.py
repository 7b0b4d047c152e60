"""Our decoders against transformers on tiny random models of every family, float32 and bfloat16."""

from typing import Any

import numpy as np
import pytest
import torch
from umbel.lang.runtime_options import Kernels
from umbel.srt.runners.build import build_runner
from umbel.srt.runners.torch_runner import TorchRunner

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

ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPE_YARN = {"rope_type": "yarn", "rope_theta": 700.0, "factor": 4.0, "original_max_position_embeddings": 64}

# Phi-4-mini's: 12 of 16 dimensions of a head rotate.
ROPE_LONG = {
    "rope_type": "longrope",
    "rope_theta": 900.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.5, 4.0],
    "long_factor": [1.2, 1.9, 3.0, 5.0, 9.0, 16.0],
}

GEMMA3N = {
    "head_dim": 16,
    "hidden_size": 48,
    "intermediate_size": [72, 64, 72, 72, 40],
    "sliding_window": 5,
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.0, 0.5],
    "vocab_size_per_layer_input": 90,
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 3,
    "laurel_rank": 6,
}

PHI = {"hidden_size": 64, "pad_token_id": 0}

# model_type and what differs from the tiny default. Windows are shorter than the sequences.
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 5,
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": 97,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases everywhere": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, one kv head, own head size": ("llama", {"num_key_value_heads": 1, "head_dim": 20}),
    "llama 3 rope": ("llama", {"rope_parameters": ROPE_LLAMA3}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "yarn rope": ("qwen2", {"rope_parameters": ROPE_YARN}),
    "yarn rope, every parameter": (
        "llama",
        {
            "rope_parameters": {
                **ROPE_YARN,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
                "mscale": 0.8,
                "mscale_all_dim": 0.6,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "ministral": (
        "ministral",
        {"head_dim": 16, "sliding_window": 7, "layer_types": ["full_attention", *["sliding_attention"] * 2]},
    ),
    "ministral 3": (
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                **ROPE_YARN,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "qwen 2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen 2 with window": ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen 3": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "gemma 3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24},
    ),
    "gemma 3, long context and soft cap": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "gemma 1": ("gemma", {"head_dim": 16}),
    "gemma 2": (
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 3.0,
        },
    ),
    "phi 4": ("phi3", {**PHI, "sliding_window": 7}),
    "phi 4 mini": (
        "phi3",
        {**PHI, "rope_parameters": ROPE_LONG, "original_max_position_embeddings": 256, "tie_word_embeddings": True},
    ),
    "phi 4 mini, long context": (
        "phi3",
        {**PHI, "rope_parameters": ROPE_LONG, "original_max_position_embeddings": 5},
    ),
    "smollm 3": ("smollm3", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "smollm 3 with window": (
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 6, "pad_token_id": 0},
    ),
    "olmo 2": ("olmo2", {"attention_bias": True}),
    "olmo 3": (
        "olmo3",
        {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": ROPE_YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            },
        },
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.05,
            "logits_scaling": 8.0,
        },
    ),
    "granite 4, dense": (
        "granitemoehybrid",
        {
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 40,
            "position_embedding_type": "rope",
            "residual_multiplier": 0.3,
            "mamba_n_heads": 4,
        },
    ),
    "glm 4": ("glm", {"head_dim": 16, "pad_token_id": 0}),
    "glm 4 0414": ("glm4", {"head_dim": 32, "pad_token_id": 0, "tie_word_embeddings": True}),
    "exaone 4": (
        "exaone4",
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "exaone 4 without window": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "seed oss": ("seed_oss", {"head_dim": 16, "attention_out_bias": True}),
    "gemma 4, shared keys and per-layer embeddings": (
        "gemma4_text",
        {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8},
    ),
    "gemma 3n": ("gemma3n_text", GEMMA3N),
    "gemma 3n, without a scale": (
        "gemma3n_text",
        {**GEMMA3N, "altup_correct_scale": False, "altup_active_idx": 1, "num_kv_shared_layers": 0},
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
}

WHOLE = [[Piece(index, 0, length) for index, length in enumerate(LENGTHS)]]
CHUNKS = [
    [Piece(0, 0, 5), Piece(2, 0, 1)],
    [Piece(2, 1, 20), Piece(0, 5, 1), Piece(1, 0, 8)],
    [Piece(0, 6, 17), Piece(2, 21, 10), Piece(1, 8, 1)],
]
TOKENS = [
    [Piece(index, start, 1) for index, length in enumerate(LENGTHS) if start < length] for start in range(max(LENGTHS))
]
WAYS = {"whole": WHOLE, "in chunks": CHUNKS, "token by token": TOKENS}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def sequences() -> Sequences:
    return Sequences([random_tokens(length, seed) for seed, length in enumerate(LENGTHS)], NUM_SLOTS)


def native_if(kernels: Kernels, case: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """The native kernels take head sizes that are multiples of 16."""
    model_type, changes = case
    suits = kernels == "torch" or changes.get("head_dim", changes.get("hidden_size", 48) // 4) % 16 == 0
    return model_type, changes if suits else {**changes, "head_dim": 32}


RUNS = [(case, kernels) for case in CASES for kernels in ("torch", "native")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("case", "kernels"), RUNS)
def test_logits_equal_those_of_transformers_however_the_prompts_are_cut(case: str, kernels: Kernels) -> None:
    model_type, changes = native_if(kernels, CASES[case])
    reference = reference_model(model_type, **changes)
    runner = build_runner(
        reference.config.to_dict(), tensors_of(reference), num_slots=NUM_SLOTS, dtype="float32", kernels=kernels
    )
    expected = [reference_logits(reference, ids.tolist()) for ids in sequences().token_ids]
    for way, steps in WAYS.items():
        runner.clear()
        for actual, logits in zip(run_steps(runner, sequences(), steps), expected, strict=True):
            assert relative_error(actual, logits) < 2e-5, way


# In bfloat16 one rounding is 2^-8 of a value; ours and transformers' attention round at different places.
BFLOAT16_TOLERANCE = 0.04


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("case", ["llama", "mistral", "qwen 2", "qwen 3", "gemma 3", "olmo 2", "granite", "glm 4 0414"])
@pytest.mark.sampled(4)
def test_bfloat16_logits_differ_from_those_of_transformers_by_rounding_only(case: str, kernels: Kernels) -> None:
    model_type, changes = native_if(kernels, CASES[case])
    reference = reference_model(model_type, **changes)
    exact = [reference_logits(reference, ids.tolist()) for ids in sequences().token_ids]
    reference = reference.to(torch.bfloat16)
    runner = build_runner(
        reference.config.to_dict(), tensors_of(reference), num_slots=NUM_SLOTS, dtype="bfloat16", kernels=kernels
    )
    expected = [reference_logits(reference, ids.tolist()) for ids in sequences().token_ids]
    ours = run_steps(runner, sequences(), CHUNKS)
    for actual, logits, truth in zip(ours, expected, exact, strict=True):
        if kernels == "torch":  # the native kernels round less, so they part from transformers by its rounding too
            assert relative_error(actual, logits) < BFLOAT16_TOLERANCE
        # Nor are we further from the float32 truth than transformers is.
        assert (actual - truth).square().mean().sqrt() < 1.3 * (logits - truth).square().mean().sqrt()


def spell_as_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` → `rope_theta`, `rope_scaling`, `rope_local_base_freq`."""
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    parameters = config["rope_parameters"]
    if "full_attention" in parameters:
        old["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    old["rope_theta"] = parameters["rope_theta"]
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    old["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    return old


@pytest.mark.parametrize("case", ["llama", "llama 3 rope", "yarn rope", "gemma 3, long context and soft cap"])
def test_both_spellings_of_rope_parameters_give_the_same_model(case: str) -> None:
    model_type, changes = CASES[case]
    reference = reference_model(model_type, **changes)
    config, tensors = reference.config.to_dict(), tensors_of(reference)
    new, old = (
        build_runner(spelling, tensors, num_slots=NUM_SLOTS, dtype="float32")
        for spelling in (config, spell_as_transformers_4(config))
    )
    batch = sequences().batch(WHOLE[0])
    assert torch.equal(new.forward(batch).values, old.forward(batch).values)


def test_longrope_takes_the_factors_of_the_longest_sequence_that_may_come() -> None:
    """transformers takes those of each sequence: the same for lengths on one side of the original length."""
    changes = {**PHI, "rope_parameters": ROPE_LONG, "original_max_position_embeddings": 24}
    reference = reference_model("phi3", **changes)
    config, tensors = reference.config.to_dict(), tensors_of(reference)
    for context, length in ((24, 23), (None, 31)):
        runner = build_runner(config, tensors, num_slots=NUM_SLOTS, dtype="float32", context_length=context)
        assert runner.context_length == (context or 256)
        ids = random_tokens(length, 4)
        ours = run_steps(runner, Sequences([ids], NUM_SLOTS), [[Piece(0, 0, 9)], [Piece(0, 9, length - 9)]])[0]
        assert relative_error(ours, reference_logits(reference, ids)) < 2e-5


def shared_prefix_run(runner: TorchRunner) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of a sequence's tail: computed alone, and in the step that computes its prefix for another."""
    ids = random_tokens(20, 5)
    alone = run_steps(runner, Sequences([ids], NUM_SLOTS), [[Piece(0, 0, 20)]])[0][12:]
    runner.clear()
    both = Sequences([ids[:14], ids], NUM_SLOTS)
    both.slots[1][:12] = both.slots[0][:12]
    logits = runner.forward(
        both.batch([Piece(1, 12, 8), Piece(0, 0, 14)])
    ).values  # the reader stands before the writer
    return logits[:8].clone(), alone


def test_a_sequence_may_read_a_prefix_that_another_computes_in_the_same_step() -> None:
    reference = reference_model("gemma3_text", head_dim=16, sliding_window=5, sliding_window_pattern=3)
    runner = build_runner(reference.config.to_dict(), tensors_of(reference), num_slots=NUM_SLOTS, dtype="float32")
    shared, alone = shared_prefix_run(runner)
    assert relative_error(shared, alone) < 1e-5


def test_the_last_token_of_a_wholly_cached_prompt_is_computed_again_without_being_stored() -> None:
    reference = reference_model("llama")
    runner = build_runner(reference.config.to_dict(), tensors_of(reference), num_slots=NUM_SLOTS, dtype="float32")
    prompt = sequences()
    first = runner.forward(prompt.batch([Piece(0, 0, 23)])).values[-1].clone()
    keys = runner.pool.keys[0][1:].clone()
    again = prompt.batch([Piece(0, 22, 1)])
    again.write_slots[:] = 0
    assert relative_error(runner.forward(again).values[0], first) < 1e-5
    assert torch.equal(runner.pool.keys[0][1:], keys)


# One of each kind of difference; the logits of all are compared above.
GREEDY = ("qwen 3", "gemma 2", "phi 4 mini", "smollm 3", "olmo 3", "granite", "glm 4 0414", "ministral 3")


@pytest.mark.parametrize("case", GREEDY)
@pytest.mark.sampled(4)
def test_greedy_text_equals_that_of_transformers_generate(case: str) -> None:
    model_type, changes = native_if("native", CASES[case])
    reference = reference_model(model_type, **changes)
    runner = build_runner(reference.config.to_dict(), tensors_of(reference), num_slots=NUM_SLOTS, dtype="float32")
    prompt = random_tokens(11, 3)
    generated = reference.generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0].tolist()
    ids = np.array(generated)
    whole = Sequences([generated], NUM_SLOTS)
    steps = [[Piece(0, 0, 11)], *[[Piece(0, start, 1)] for start in range(11, len(ids) - 1)]]
    logits = run_steps(runner, whole, steps)[0]
    assert logits[10:].argmax(-1).tolist() == generated[11:]
