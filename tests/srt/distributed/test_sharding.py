"""A model spread over ranks is the model: families, ways to cut prompts, engines. Ranks are threads here."""

from typing import Any

import pytest
import torch
from umbel.lang.errors import ParameterError
from umbel.srt.layers.checkpoint import Tensors
from umbel.srt.models.sharding import ShardedTensors, require_shardable, shard_config, shard_range
from umbel.srt.runners.build import build_runner
from umbel.srt.runners.torch_runner import TorchRunner

from ..models.reference import Piece, Sequences, random_tokens, reference_model, relative_error, run_steps, tensors_of
from .threads import ThreadCommunicator, on_ranks

NUM_SLOTS = 100
LENGTHS = (23, 9)
CHUNKS = [[Piece(0, 0, 5), Piece(1, 0, 8)], [Piece(0, 5, 18), Piece(1, 8, 1)]]

# Four heads: one for each of four ranks. With 97 tokens no two ranks need have equally many.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biased": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, a key head for each head": ("llama", {"num_key_value_heads": 4}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 16}),
    "qwen 2": ("qwen2", {}),
    "qwen 3": ("qwen3", {"head_dim": 20}),
    "gemma 3": ("gemma3_text", {"head_dim": 16, "sliding_window": 8, "final_logit_softcapping": 20.0}),
    "phi 4, fused projections": ("phi3", {"pad_token_id": 0}),
    "granite 4, dense": (
        "granitemoehybrid",
        {
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 40,
            "mamba_n_heads": 4,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen 3, experts in some layers": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
    "qwen 2, with an expert for all": (
        "qwen2_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 32,
        },
    ),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def tiny(case: str) -> tuple[dict[str, Any], Tensors]:
    model_type, changes = CASES[case]
    model = reference_model(model_type, **changes)
    return model.config.to_dict(), tensors_of(model)


def sequences() -> Sequences:
    return Sequences([random_tokens(length, seed) for seed, length in enumerate(LENGTHS)], NUM_SLOTS)


def in_torch(config: dict[str, Any], tensors: Tensors, **options: Any) -> TorchRunner:
    runner = build_runner(config, tensors, num_slots=NUM_SLOTS, dtype="float32", kernels="torch", **options)
    assert isinstance(runner, TorchRunner)
    return runner


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_ranks_together_give_the_logits_of_one(case: str, ranks: int) -> None:
    config, tensors = tiny(case)
    expected = run_steps(in_torch(config, tensors), sequences(), CHUNKS)

    def one(communicator: ThreadCommunicator) -> list[torch.Tensor]:
        return run_steps(in_torch(config, tensors, communicator=communicator), sequences(), CHUNKS)

    for actual, whole in zip(on_ranks(ranks, one)[0], expected, strict=True):
        assert relative_error(actual, whole) < 1e-5


@pytest.mark.parametrize(("case", "heads"), [("qwen 2", [1, 1]), ("llama, one key head", [1, 1])])
def test_a_rank_has_keys_of_its_own_heads_only(case: str, heads: list[int]) -> None:
    config, tensors = tiny(case)
    runners = on_ranks(2, lambda communicator: in_torch(config, tensors, communicator=communicator))
    assert [runner.pool.geometry.layers[0].kv_heads for runner in runners] == heads


def test_no_rank_holds_more_than_its_part() -> None:
    config, tensors = tiny("qwen 2")

    def held(communicator: ThreadCommunicator) -> int:
        cut = ShardedTensors(tensors, config, communicator)
        return sum(cut[name].numel() for name in cut if tensors[name].dim() > 1)

    whole = sum(tensor.numel() for tensor in tensors.values() if tensor.dim() > 1)
    assert sum(on_ranks(2, held)) == whole


def test_every_row_belongs_to_one_rank() -> None:
    for size in range(4, 20):
        parts = [shard_range(size, rank, 4) for rank in range(4)]
        assert [row for first, end in parts for row in range(first, end)] == list(range(size))


@pytest.mark.parametrize(
    ("changes", "ranks", "says"),
    [
        ({}, 3, "its 4 attention heads cannot be dealt out to 3 ranks evenly; write tensor_parallel=1 or 2 or 4"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "its 3 key heads can be neither dealt out"),
        ({"intermediate_size": 73}, 2, "its MLPs of width 73 cannot be cut into 2 equal slices; write .*=1$"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused_with_what_can(changes: dict[str, int], ranks: int, says: str) -> None:
    config = reference_model("llama", num_hidden_layers=1).config.to_dict() | {"head_dim": 8} | changes
    with pytest.raises(ParameterError, match=f"tensor_parallel={ranks}: {says}"):
        require_shardable(config, ranks)


def test_norms_of_whole_queries_are_not_cut() -> None:
    config = reference_model("olmo2", num_hidden_layers=1).config.to_dict()
    with pytest.raises(ParameterError, match=r"its queries are normalised over all heads.*=1$"):
        require_shardable(config, 2)


def test_a_model_that_runs_in_transformers_is_refused() -> None:
    with pytest.raises(ParameterError, match="'gpt2' runs in transformers, whose layers are not cut"):
        shard_config({"model_type": "gpt2"}, 2)


def test_native_kernels_are_refused_with_the_reason() -> None:
    config, tensors = tiny("qwen 2")

    def one(communicator: ThreadCommunicator) -> None:
        build_runner(config, tensors, num_slots=NUM_SLOTS, dtype="float32", kernels="native", communicator=communicator)

    with pytest.raises(ParameterError, match="a step in one call, in which 2 ranks cannot meet"):
        on_ranks(2, one)
