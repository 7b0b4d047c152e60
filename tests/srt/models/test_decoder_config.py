"""Configurations: what is read, and what is refused with the value and the remedy."""

import re
from typing import Any

import pytest
import torch
from umbel.lang.errors import ModelError, ParameterError
from umbel.srt.cache.kv_pool import PoolSize, size_for_bytes, size_for_slots
from umbel.srt.layers.rope import RopeType
from umbel.srt.models.families import is_family, read_config
from umbel.srt.models.read_fields import CONTEXT_LENGTH
from umbel.srt.runners.build import build_runner
from umbel.srt.runners.cpu_runner import obstacle

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def gemma(**changes: Any) -> dict[str, Any]:
    return {**LLAMA, "model_type": "gemma3_text", "head_dim": 16, **changes}


def test_what_a_silent_configuration_means_is_what_transformers_takes() -> None:
    config = read_config(LLAMA)
    assert (config.head_dim, config.norm_eps, config.tied, config.activation) == (12, 1e-6, False, "silu")
    assert config.layers[0].rope.theta == 10_000.0
    assert config.windows == (None,)
    assert read_config(gemma()).tied
    assert read_config({**LLAMA, "model_type": "qwen3"}).head_dim == 128


def test_gemma_3_alternates_windows_and_rotary_bases() -> None:
    config = read_config(gemma(num_hidden_layers=7, sliding_window=512, sliding_window_pattern=3))
    assert [layer.window for layer in config.layers] == [512, 512, None, 512, 512, None, 512]
    assert [layer.rope.theta for layer in config.layers[:3]] == [10_000.0, 10_000.0, 1_000_000.0]
    assert config.windows == (512, None)


def test_yarn_extends_the_context_that_the_configuration_states() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    config = read_config({**LLAMA, "rope_scaling": scaling})
    assert config.context_length == 1024
    assert config.layers[0].rope.type is RopeType.YARN


def test_longrope_chooses_its_factors_by_the_context_of_the_runtime() -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    phi = {**LLAMA, "model_type": "phi3", "rope_scaling": scaling, "original_max_position_embeddings": 64}
    whole, short = read_config(phi), read_config({**phi, CONTEXT_LENGTH: 64})
    assert (whole.context_length, whole.layers[0].rope.divisors[0]) == (256, 2.0)
    assert (short.context_length, short.layers[0].rope.divisors[0]) == (64, 1.0)
    assert whole.layers[0].rope.attention_factor == short.layers[0].rope.attention_factor > 1.1


def test_llama_3_states_its_extended_context_itself() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    assert read_config({**LLAMA, "rope_scaling": scaling}).context_length == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "'bert' is not one of llama"),
        ({"hidden_size": None}, "hidden_size=None; write a whole number"),
        ({"vocab_size": "97"}, "vocab_size='97'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"hidden_act": "selu"}, "'selu' is not one of silu"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small'; write a positive number"),
        ({"rope_theta": 0}, "rope_theta=0; write a positive number"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not one of default, linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor=None; write a positive number"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor=None"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 0.5}}, "original_max_position"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'; write an object"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "is not one of default"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false'; write true or false"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"model_type": "qwen2", "layer_types": 3}, "layer_types 3: write 2 times"),
        ({"model_type": ["llama"]}, "is not one of llama"),
        ({"partial_rotary_factor": None, "rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "write 2 times"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "chunked_attention"]}, "'sliding_attention' or"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "makes an encoder"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": "all"}, "write true or false"),
        ({"model_type": "gemma2", "attn_logit_softcapping": -1.0}, "attn_logit_softcapping=-1.0; write a positive"),
        ({"rope_scaling": {"rope_type": "none"}}, "'none' is not one of default, linear"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su"}}, "short_factor=None; write a list"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0]}}, "has 1 numbers; write 6"),
        ({"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [0] * 6}}, "short_factor=0; write a"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.3}, "write a part of head_dim=12 that is a number of pairs"),
        ({"model_type": "glm4", "partial_rotary_factor": 2}, "partial_rotary_factor=2.0; write a part"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "write 1 .with positions. or 0 for 2 layers"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling=0; write a positive number"),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, "write layer_types, one for each layer"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "write null"),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1e4}}, "write them per layer type"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_with_its_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config({**LLAMA, **changes})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "int8"}, ParameterError, "dtype='int8'; write \"auto\" or one of float32"),
        ({"device": "tpu"}, ParameterError, "device='tpu'; write \"cpu\""),
        ({"device": "meta"}, ParameterError, "device='meta'"),
        ({"num_slots": None}, ParameterError, "write exactly one of them"),
        ({"kv_bytes": 1 << 20}, ParameterError, "write exactly one of them"),
        ({"config": {**LLAMA, "quantization_config": {"bits": 4}}}, ModelError, "which umbel does not read"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_before_weights_are_read(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    values = {"num_slots": 10, "config": LLAMA, **options}
    with pytest.raises(error, match=message):
        build_runner(values.pop("config"), {}, **values)


def gemma_4(**changes: Any) -> dict[str, Any]:
    return gemma(model_type="gemma4_text", **changes)


def test_gemma_4_reads_the_shapes_of_layers_in_both_spellings() -> None:
    config = read_config(gemma_4(num_hidden_layers=6, global_head_dim=64, num_global_key_value_heads=1))
    assert [layer.head_dim for layer in config.layers] == [*[None] * 5, 64]
    assert [config.kv_heads_of(index) for index in (4, 5)] == [2, 2]  # the other number needs attention_k_eq_v
    listed = {"5": {"head_dim": 48, "num_key_value_heads": 1}}
    config = read_config(gemma_4(num_hidden_layers=6, per_layer_config=listed))
    assert [(config.head_dim_of(index), config.kv_heads_of(index)) for index in (4, 5)] == [(16, 2), (48, 1)]


def test_layers_that_share_keys_read_those_of_the_last_of_their_kind() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = read_config(gemma_4(num_hidden_layers=5, layer_types=kinds, num_kv_shared_layers=2))
    assert [layer.keys_of for layer in config.layers] == [None, None, None, 2, 1]
    assert config.kv_geometry(torch.float32).bytes_per_slot == 4 * (2 * 2 * 2 * 16 + 2 * 2 * 512)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "makes an encoder"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers=1: no layer before those has keys of each kind"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers=2; write a whole number of at least 1, at most 1"),
        ({"per_layer_config": {"0": {"sliding_window": 3}}}, "write head_dim and num_key_value_heads only"),
    ],
)
def test_what_gemma_4_cannot_have_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(gemma_4(**changes))


def test_gemma_4_with_experts_is_left_to_transformers() -> None:
    assert is_family(gemma_4())
    assert not is_family(gemma_4(enable_moe_block=True))


# Layers, key heads, window and context of models as published.
GEMMA_3 = {"270M": (18, 1, 512, 32_768), "1B": (26, 1, 512, 32_768), "4B": (34, 4, 1024, 131_072)}
GIGABYTE = 10**9


def pool_of(config: dict[str, Any], budget: int = GIGABYTE) -> tuple[PoolSize, int]:
    """Returns the size of a pool of so many bytes, and the tokens of one in which layers have the same slots."""
    geometry = read_config(config).kv_geometry(torch.bfloat16)
    size = size_for_bytes(geometry, budget, least_windows=2 * geometry.reach + 576)
    assert 0.99 * budget < geometry.bytes_of(size) <= budget
    return size, size_for_bytes(geometry, budget, one_pool=True).slots


@pytest.mark.parametrize("name", GEMMA_3)
def test_a_pool_for_gemma_3_holds_about_three_times_the_tokens(name: str) -> None:
    layers, kv_heads, window, context = GEMMA_3[name]
    size, plain = pool_of(
        gemma(
            num_hidden_layers=layers,
            num_key_value_heads=kv_heads,
            head_dim=256,
            sliding_window=window,
            max_position_embeddings=context,
        )
    )
    assert 2.9 < size.slots / plain < 3.3
    texts = min(size.slots // 8192, (size.window_slots - 1) // window)
    assert texts >= 2.5 * (plain // 8192), "texts of 8,192 tokens, each with the window before its end"


def test_layers_have_the_same_slots_where_windows_save_little() -> None:
    half = ["sliding_attention", "full_attention"] * 13
    gemma_2 = {"model_type": "gemma2", "num_hidden_layers": 26, "layer_types": half, "max_position_embeddings": 8192}
    for config in (
        {**LLAMA, "head_dim": 16, **gemma_2, "sliding_window": 4096},
        {**LLAMA, "model_type": "mistral", "max_position_embeddings": 32_768, "sliding_window": 4096},
        gemma(num_hidden_layers=6, max_position_embeddings=256, sliding_window=512),
        LLAMA,
    ):
        size, plain = pool_of(config, 10**8)
        assert size == PoolSize(plain)


def test_a_pool_of_given_tokens_has_windows_for_all_requests_or_no_pool_of_windows() -> None:
    geometry = read_config(gemma(num_hidden_layers=6, max_position_embeddings=8192, sliding_window=512)).kv_geometry(
        torch.bfloat16
    )
    assert size_for_slots(geometry, 4001, least_windows=576, sequences=64) == PoolSize(4001)
    assert size_for_slots(geometry, 100_001, least_windows=576, sequences=64) == PoolSize(100_001, 64 * 512 + 576)
    assert size_for_slots(geometry, 400_001, least_windows=576, sequences=64) == PoolSize(400_001, 80_000)


def test_a_pool_too_small_for_windows_has_one_kind_of_slots() -> None:
    config = gemma(num_hidden_layers=6, head_dim=256, max_position_embeddings=8192, sliding_window=512)
    size, plain = pool_of(config, 12_288 * 600)
    assert size == PoolSize(plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"altup_active_idx": 4}, "altup_active_idx=4 of altup_num_inputs=4; write a number below"),
        ({"activation_sparsity_pattern": [0.5]}, "write 6 numbers of at least 0 and below 1"),
        ({"activation_sparsity_pattern": [1.0] * 6}, "write 6 numbers of at least 0 and below 1"),
        ({"intermediate_size": [64, 64]}, "intermediate_size lists 2 numbers; write one, or 6"),
        ({"num_kv_shared_layers": 4, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}, "write fewer"),
    ],
)
def test_what_gemma_3n_cannot_have_is_refused(changes: dict[str, Any], message: str) -> None:
    shape = {"num_hidden_layers": 6, "num_kv_shared_layers": 0}
    with pytest.raises(ModelError, match=message):
        read_config(gemma(model_type="gemma3n_text", **{**shape, **changes}))


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        (
            "gemma3n_text",
            {"num_kv_shared_layers": 0, "altup_num_inputs": 17},
            r"they have at most 16 residual streams in parallel \(AltUp\), not 17",
        ),
        ("gemma4_text", {"head_dim": 12}, "head_dim=12 is no multiple of 16"),
    ],
)
def test_the_native_kernels_say_what_they_do_not_have(model_type: str, changes: dict[str, Any], reason: str) -> None:
    config = gemma(model_type=model_type, **changes)
    found = obstacle(config, dtype=torch.float32, device=torch.device("cpu"))
    assert found is not None
    assert re.match(reason, found)
