"""Families with experts against transformers on tiny random models, and the spellings of their checkpoints."""

from typing import Any

import pytest
import torch
from umbel.lang.errors import ModelError, ParameterError
from umbel.lang.runtime_options import Kernels
from umbel.srt.models.families import read_config
from umbel.srt.models.sharding import require_shardable
from umbel.srt.runners.build import build_runner

from .reference import Piece, Sequences, random_tokens, reference_logits, reference_model, relative_error, run_steps
from .reference import tensors_of as stacked_tensors_of

NUM_SLOTS = 100
LENGTHS = (23, 9, 31)
CHUNKS = [
    [Piece(0, 0, 5), Piece(2, 0, 1)],
    [Piece(2, 1, 20), Piece(0, 5, 1), Piece(1, 0, 8)],
    [Piece(0, 6, 17), Piece(2, 21, 10), Piece(1, 8, 1)],
]

# Of gpt-oss: YaRN stretches 16 positions here, so that the sequences reach past them.
YARN = {"rope_type": "yarn", "factor": 8.0, "rope_theta": 150_000.0, "original_max_position_embeddings": 16}

LATENT = {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "num_key_value_heads": 4,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek v3": (
        "deepseek_v3",
        {**LATENT, "n_group": 4, "topk_group": 2, "q_lora_rank": 20, "first_k_dense_replace": 1},
    ),
    "deepseek v3, queries without a latent, yarn": (
        "deepseek_v3",
        {
            **LATENT,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "rope_interleave": False,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
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
            "attn_scale": 0.7,
        },
    ),
    "llama 4, two experts of a token, heads as they are": (
        "llama4_text",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "moe_layers": [0, 1],
            "use_qk_norm": False,
            "layer_types": ["full_attention", "chunked_attention", "full_attention"],
            "attention_chunk_size": 5,
            "attn_temperature_tuning": False,
        },
    ),
    "glm 4.7 flash": ("glm4_moe_lite", {**LATENT, "q_lora_rank": 20, "routed_scaling_factor": 1.1}),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 6,
            "rope_parameters": {**YARN, "truncate": False},
            "swiglu_limit": 0.7,
        },
    ),
    "granite 3": ("granitemoe", {"num_local_experts": 5, "num_experts_per_tok": 2, "logits_scaling": 3.0}),
    "granite 3, with an MLP for all": ("granitemoeshared", {"num_local_experts": 4, "shared_intermediate_size": 40}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral with window": ("mixtral", {"num_local_experts": 4, "sliding_window": 7, "head_dim": 20}),
    "qwen 3": ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}),
    "qwen 3, renormalised, some layers dense": (
        "qwen3_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [2],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 6,
        },
    ),
    "qwen 3, every second layer": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 2},
    ),
    "qwen 2, with an expert for all": (
        "qwen2_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
            "mlp_only_layers": [1],
        },
    ),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def sequences() -> Sequences:
    return Sequences([random_tokens(length, seed) for seed, length in enumerate(LENGTHS)], NUM_SLOTS)


def reference_of(case: str) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """The model, its configuration, and its tensors as they lie in memory: experts stacked."""
    model_type, changes = CASES[case]
    model = reference_model(model_type, **changes)
    return model, model.config.to_dict(), stacked_tensors_of(model)


def one_by_one(tensors: dict[str, torch.Tensor], block: str, names: tuple[str, str, str]) -> dict[str, torch.Tensor]:
    """Stacked experts → a tensor for each gate, up and down, as the files of published checkpoints have them."""
    spelled = {}
    for name, tensor in tensors.items():
        place = name.replace(".mlp.", f".{block}.") if ".mlp.gate." in name or ".mlp.experts." in name else name
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                spelled[place.replace("gate_up_proj", f"{expert}.{names[0]}.weight")] = gate.clone()
                spelled[place.replace("gate_up_proj", f"{expert}.{names[1]}.weight")] = up.clone()
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                spelled[place.replace("down_proj", f"{expert}.{names[2]}.weight")] = down.clone()
        else:
            spelled[place] = tensor
    return spelled


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(4)
def test_logits_equal_those_of_transformers(case: str, kernels: Kernels) -> None:
    model_type, changes = CASES[case]
    if kernels == "native" and "kv_lora_rank" not in changes and changes.get("head_dim", 12) % 16:
        changes = {**changes, "head_dim": 32}
    reference = reference_model(model_type, **changes)
    config, tensors = reference.config.to_dict(), stacked_tensors_of(reference)
    runner = build_runner(config, tensors, num_slots=NUM_SLOTS, dtype="float32", kernels=kernels)
    expected = [reference_logits(reference, ids.tolist()) for ids in sequences().token_ids]
    for actual, logits in zip(run_steps(runner, sequences(), CHUNKS), expected, strict=True):
        assert relative_error(actual, logits) < 2e-5


@pytest.mark.parametrize("case", ["mixtral", "qwen 3", "qwen 2, with an expert for all"])
def test_bfloat16_logits_are_no_further_from_the_truth_than_those_of_transformers(case: str) -> None:
    reference, config, _ = reference_of(case)
    exact = [reference_logits(reference, ids.tolist()) for ids in sequences().token_ids]
    reference = reference.to(torch.bfloat16)
    runner = build_runner(config, stacked_tensors_of(reference), num_slots=NUM_SLOTS, dtype="bfloat16")
    theirs = [reference_logits(reference, ids.tolist()) for ids in sequences().token_ids]
    ours = run_steps(runner, sequences(), CHUNKS)

    def error(logits: list[torch.Tensor]) -> float:
        """Over all sequences: in one of them rounding may send a token to other experts."""
        pairs = zip(logits, exact, strict=True)
        return float(torch.cat([(some - truth).square().flatten() for some, truth in pairs]).mean().sqrt())

    assert error(ours) < 1.5 * error(theirs)


@pytest.mark.parametrize(
    ("case", "block", "names"),
    [
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
        ("mixtral", "mlp", ("gate_proj", "up_proj", "down_proj")),
        ("qwen 3", "mlp", ("gate_proj", "up_proj", "down_proj")),
        ("qwen 2, with an expert for all", "mlp", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_experts_may_be_spelled_one_by_one(case: str, block: str, names: tuple[str, str, str]) -> None:
    _, config, tensors = reference_of(case)
    batch = sequences().batch([Piece(0, 0, 23)])
    stacked, spelled = (
        build_runner(config, spelling, num_slots=NUM_SLOTS, dtype="float32").forward(batch).values
        for spelling in (tensors, one_by_one(tensors, block, names))
    )
    assert torch.equal(stacked, spelled)


def test_an_expert_that_is_missing_or_has_another_shape_is_named() -> None:
    _, config, tensors = reference_of("mixtral")
    spelled = one_by_one(tensors, "block_sparse_moe", ("w1", "w3", "w2"))
    name = "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    with pytest.raises(
        ModelError, match=r"lacks 1 tensors: model\.layers\.1\.block_sparse_moe\.experts\.3\.w3\.weight"
    ):
        build_runner(config, without(spelled, name), num_slots=9)
    with pytest.raises(
        ModelError, match=r"experts\.3\.w3\.weight has shape \[48, 72\], the configuration says \[72, 48\]"
    ):
        build_runner(config, {**spelled, name: spelled[name].T}, num_slots=9)
    with pytest.raises(ModelError, match=r"lacks 1 tensors: model\.layers\.0\.mlp\.gate\.weight"):
        build_runner(config, without(tensors, "model.layers.0.mlp.gate.weight"), num_slots=9)
    with pytest.raises(ModelError, match="does not use"):
        build_runner(config, {**tensors, "model.layers.0.mlp.down_proj.weight": torch.zeros(48, 72)}, num_slots=9)


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {other: tensor for other, tensor in tensors.items() if other != name}


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"num_experts_per_tok": 9, "num_local_experts": 8}, "num_experts_per_tok=9 of num_local_experts=8"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts=0; write a whole number of at least 1"),
    ("qwen3_moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers"),
    ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size=None"),
    ("qwen2_moe", {"use_sliding_window": True}, "without layer_types"),
    (
        "deepseek_v3",
        {**LATENT, "n_group": 3, "first_k_dense_replace": 0},
        "n_group=3, topk_group=4 of n_routed_experts=8; write groups",
    ),
    (
        "deepseek_v3",
        {**LATENT, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 3, "first_k_dense_replace": 0},
        "of 2 experts in the chosen",
    ),
    ("deepseek_v3", {**LATENT, "q_lora_rank": None, "attention_bias": True}, "attention_bias=true without q_lora_rank"),
    ("glm4_moe_lite", {**LATENT, "mlp_layer_types": ["dense"]}, "write 2 times 'dense' or 'sparse'"),
    ("llama4_text", {"attention_chunk_size": None}, "attention_chunk_size=null: write a size"),
    ("llama4_text", {"layer_types": ["sliding_attention"] * 2}, "write 2 times 'chunked_attention' or 'full_"),
    ("llama4_text", {"moe_layers": "all"}, "moe_layers='all'; write a list"),
    ("gpt_oss", {"sliding_window": None}, "sliding_window=null; write the window"),
]


@pytest.mark.parametrize(("family", "changes", "message"), BAD)
def test_a_configuration_that_cannot_be_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    config = {
        "model_type": family,
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 72,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    with pytest.raises(ModelError, match=message):
        read_config({**config, **changes})


def test_a_silent_configuration_means_what_transformers_takes() -> None:
    config = read_config(
        {
            "model_type": "mixtral",
            "vocab_size": 97,
            "hidden_size": 48,
            "intermediate_size": 72,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
        }
    )
    experts = config.layers[0].experts
    assert experts is not None
    assert (experts.count, experts.chosen, experts.width, experts.renormalise) == (8, 2, 72, True)
    assert (config.norm_eps, config.layers[0].rope.theta, config.windows) == (1e-5, 1_000_000.0, (None,))


def test_layers_of_a_draft_model_are_left_out() -> None:
    _, config, tensors = reference_of("glm 4.7 flash")
    draft = {"model.layers.3.eh_proj.weight": torch.zeros(48, 96)}
    build_runner(config, tensors | draft, num_slots=9)
    with pytest.raises(ModelError, match=r"does not use: model\.layers\.4\.eh_proj\.weight"):
        build_runner(config, tensors | {"model.layers.4.eh_proj.weight": torch.zeros(48, 96)}, num_slots=9)


@pytest.mark.parametrize(("case", "reason"), [("gpt-oss", "its attention sinks"), ("deepseek v3", "its latents")])
def test_what_ranks_cannot_cut_is_named(case: str, reason: str) -> None:
    _, config, _ = reference_of(case)
    with pytest.raises(ParameterError, match=f"tensor_parallel=2: {reason}.*write tensor_parallel=1$"):
        require_shardable(config, 2)
