"""Tiny models of every family: as transformers holds them, as safetensors folders, and as GGUF files.

The GGUF files are written as llama.cpp's converter does it, with the `gguf` library's own table of
names, so that reading them back is checked against another library's idea of the format.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .. import toy_tokenizers

# Trained once: a model, its file and what the file is compared with share one tokenizer, and nobody changes it.
byte_level, gemma_like, prepend_bpe = map(
    cache, (toy_tokenizers.byte_level, toy_tokenizers.gemma_like, toy_tokenizers.prepend_bpe)
)

SIZES: dict[str, Any] = {  # Any: fields of several config classes
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}


@dataclass(frozen=True)
class Family:
    """One family as transformers configures it and as llama.cpp names it."""

    name: str
    architecture: gguf.MODEL_ARCH
    build: Callable[[int], PreTrainedModel]  # of a vocabulary size
    tokenizer: Callable[[], Tokenizer]
    rotates_pairs: bool = False
    adds_one_to_norms: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)  # Any: values of GGUF metadata; they replace the usual ones
    # a tensor of transformers → those of llama.cpp's converter, by names of the library's table or of the file
    spelled: Callable[[str, torch.Tensor], list[tuple[str, torch.Tensor]]] = lambda name, tensor: [(name, tensor)]
    pre_tokenizer: str = "default"


def _llama(**options: Any) -> Callable[[int], PreTrainedModel]:
    return lambda size: LlamaForCausalLM(LlamaConfig(vocab_size=size, **{**SIZES, **options}))


def auto(model_type: str, **options: Any) -> Callable[[int], PreTrainedModel]:
    sizes = {
        **SIZES,
        "hidden_size": 128,
        "pad_token_id": 0,
    }  # heads of 32 where they follow from it

    def build(size: int) -> PreTrainedModel:
        config = AutoConfig.for_model(model_type, vocab_size=size, **{**sizes, **options})
        return AutoModelForCausalLM.from_config(config)

    return build


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1 + place / 8 for place in range(12)],
    "long_factor": [1.0 + place for place in range(12)],
}
FAMILIES = (
    Family("llama", gguf.MODEL_ARCH.LLAMA, _llama(), prepend_bpe, rotates_pairs=True),
    Family("llama, tied", gguf.MODEL_ARCH.LLAMA, _llama(tie_word_embeddings=True), byte_level, rotates_pairs=True),
    Family("llama, biased", gguf.MODEL_ARCH.LLAMA, _llama(attention_bias=True), prepend_bpe, rotates_pairs=True),
    Family("llama, llama3 rope", gguf.MODEL_ARCH.LLAMA, _llama(rope_parameters=LLAMA3_ROPE), byte_level, True),
    Family(
        "llama, yarn",
        gguf.MODEL_ARCH.LLAMA,
        _llama(rope_parameters=YARN_ROPE),
        byte_level,
        rotates_pairs=True,
        metadata=YARN,
    ),
    Family(
        "llama, linear rope",
        gguf.MODEL_ARCH.LLAMA,
        _llama(rope_parameters=LINEAR_ROPE),
        byte_level,
        rotates_pairs=True,
        metadata={"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    ),
    Family(
        "mistral, as llama",
        gguf.MODEL_ARCH.LLAMA,
        lambda size: MistralForCausalLM(MistralConfig(vocab_size=size, **{**SIZES, "sliding_window": None})),
        prepend_bpe,
        rotates_pairs=True,
    ),
    Family(
        "qwen2",
        gguf.MODEL_ARCH.QWEN2,
        lambda size: Qwen2ForCausalLM(Qwen2Config(vocab_size=size, **SIZES)),
        byte_level,
    ),
    Family(
        "qwen3",
        gguf.MODEL_ARCH.QWEN3,
        lambda size: Qwen3ForCausalLM(Qwen3Config(vocab_size=size, **SIZES)),
        byte_level,
    ),
    Family(
        "gemma3",
        gguf.MODEL_ARCH.GEMMA3,
        lambda size: Gemma3ForCausalLM(
            Gemma3TextConfig(
                vocab_size=size,
                sliding_window=8,
                query_pre_attn_scalar=32,
                **{**SIZES, "tie_word_embeddings": True, "num_hidden_layers": 7},
            )
        ),
        gemma_like,
        adds_one_to_norms=True,
        metadata={"attention.sliding_window": 8},
    ),
    Family(
        "gemma2",
        gguf.MODEL_ARCH.GEMMA2,
        auto("gemma2", sliding_window=8, query_pre_attn_scalar=32, tie_word_embeddings=True),
        gemma_like,
        adds_one_to_norms=True,
        metadata={
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    Family(
        "phi3",
        gguf.MODEL_ARCH.PHI3,
        auto("phi3", rope_parameters=LONG_ROPE, original_max_position_embeddings=64),
        byte_level,
        metadata={"rope.dimension_count": 24, "rope.scaling.original_context_length": 64},
    ),
    Family(
        "smollm3",
        gguf.MODEL_ARCH.SMOLLM3,
        auto("smollm3", num_hidden_layers=4),
        byte_level,
        rotates_pairs=True,
    ),
    Family("olmo2", gguf.MODEL_ARCH.OLMO2, auto("olmo2"), byte_level),
    Family(
        "olmo3",
        gguf.MODEL_ARCH.OLMO2,
        auto(
            "olmo3",
            num_hidden_layers=4,
            sliding_window=8,
            rope_parameters={
                "full_attention": YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        ),
        byte_level,
        metadata={"attention.sliding_window": 8, "attention.sliding_window_pattern": [True, True, True, False], **YARN},
    ),
    Family(
        "exaone4",
        gguf.MODEL_ARCH.EXAONE4,
        auto("exaone4", num_hidden_layers=4, sliding_window=8, rope_parameters=LLAMA3_ROPE),
        byte_level,
        metadata={"attention.sliding_window": 8},
    ),
    Family(
        "exaone4, no window",
        gguf.MODEL_ARCH.EXAONE4,
        auto("exaone4", sliding_window=None, layer_types=["full_attention"] * 2),
        byte_level,
    ),
    Family("seed_oss", gguf.MODEL_ARCH.SEED_OSS, auto("seed_oss", attention_bias=True), byte_level),
    Family(
        "mistral small 3",
        gguf.MODEL_ARCH.MISTRAL3,
        auto("mistral", sliding_window=None),
        byte_level,
        rotates_pairs=True,
    ),
    Family(
        "ministral 3",
        gguf.MODEL_ARCH.MISTRAL3,
        auto(
            "ministral3",
            sliding_window=None,
            rope_parameters={**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        ),
        byte_level,
        rotates_pairs=True,
        metadata={**YARN, "attention.temperature_scale": 0.1, "rope.scaling.yarn_log_multiplier": 1.0},
    ),
    Family(
        "granite",
        gguf.MODEL_ARCH.GRANITE,
        auto(
            "granite",
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.05,
            logits_scaling=8.0,
        ),
        byte_level,
        rotates_pairs=True,
        metadata={"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.05, "logit_scale": 8.0},
    ),
    Family(
        "glm4",
        gguf.MODEL_ARCH.GLM4,
        auto("glm4", head_dim=32),
        byte_level,
        metadata={"rope.dimension_count": 16},
    ),
)
# Its configuration differs by layer, which transformers does not give as one set of values.
GEMMA4 = Family(
    "gemma4",
    gguf.MODEL_ARCH.GEMMA4,
    auto(
        "gemma4_text",
        global_head_dim=64,
        allow_global_per_layer_attribute_access=True,
        num_hidden_layers=5,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=512,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=8,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"] + ["full_attention"] * 2,
    ),
    gemma_like,
    metadata={
        "attention.head_count_kv": [2, 1, 2, 1, 1],
        "feed_forward_length": [96, 96, 96, 192, 192],
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.key_length_swa": 32,
        "attention.value_length_swa": 32,
        "rope.freq_base": 1_000_000.0,
        "rope.freq_base_swa": 10_000.0,
        "attention.shared_kv_layers": 2,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [True, False, True, False, False],
        "embedding_length_per_layer_input": 32,
        "final_logit_softcapping": 30.0,
    },
    pre_tokenizer="gemma4",
    spelled=lambda name, tensor: [(name + ".weight" if name.endswith("layer_scalar") else name, tensor)],
)
BY_NAME = {family.name: family for family in FAMILIES}


def random_model(family: Family) -> PreTrainedModel:
    """A model whose every parameter, norms and biases too, is random and exact in bfloat16."""
    torch.manual_seed(7)
    model = family.build(family.tokenizer().get_vocab_size()).eval()
    stored = ("e_score_correction_bias", "layer_scalar")
    buffers = (buffer for name, buffer in model.named_buffers() if name.endswith(stored))
    with torch.no_grad():
        for parameter in (*model.parameters(), *buffers):
            parameter.copy_(torch.randn_like(parameter).mul(0.2).to(torch.bfloat16).float())
    return model


def write_folder(folder: Path, family: Family) -> PreTrainedModel:
    """A safetensors folder as it is downloaded."""
    model = random_model(family)
    folder.mkdir()
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    (folder / "tokenizer.json").write_text(family.tokenizer().to_str())
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    return model


def write_gguf(path: Path, family: Family, *, kind: str = "F32") -> PreTrainedModel:
    """A GGUF file as llama.cpp's converter writes it."""
    model = random_model(family)
    config = model.config
    arch = gguf.MODEL_ARCH_NAMES[family.architecture]
    writer = gguf.GGUFWriter(path, arch)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    usual = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "rope.freq_base": _theta(model),
    }
    adders = {
        bool: writer.add_bool,
        str: writer.add_string,
        float: writer.add_float32,
        int: writer.add_uint32,
        list: writer.add_array,
    }
    for key, value in (usual | family.metadata).items():
        if value is not None:
            whole = key.startswith(("general.", "tokenizer."))  # else the architecture's name goes before
            adders[type(value)](key if whole else f"{arch}.{key}", value)
    add_tokenizer(writer, family.tokenizer(), family.pre_tokenizer)
    _add_tensors(writer, family, model, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, pre_tokenizer: str) -> None:
    """A toy tokenizer as GGUF metadata."""
    spec = json.loads(tokenizer.to_str())
    byte_level_kind = spec["decoder"]["type"] == "ByteLevel"
    pieces = sorted(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda entry: entry[1])
    added = {token["id"]: token["special"] for token in spec["added_tokens"]}
    types = []
    for piece, token in pieces:
        if token in added:
            types.append(gguf.TokenType.CONTROL if added[token] else gguf.TokenType.USER_DEFINED)
        else:
            is_byte = not byte_level_kind and piece.startswith("<0x") and len(piece) == 6
            types.append(gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL)
    gemma4 = pre_tokenizer == "gemma4"
    writer.add_tokenizer_model("gpt2" if byte_level_kind else "gemma4" if gemma4 else "llama")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list([piece for piece, _ in pieces])
    writer.add_token_types(types)
    merges = [tuple(merge) for merge in spec["model"]["merges"]]
    if byte_level_kind or gemma4:
        writer.add_token_merges([" ".join(merge) for merge in merges])
    else:  # SentencePiece keeps the rank of the merge as the score of what it makes
        rank = {left + right: place for place, (left, right) in reversed(list(enumerate(merges)))}
        writer.add_token_scores([-float(rank.get(piece, 1_000_000)) for piece, _ in pieces])
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix("Prepend" in json.dumps(spec["normalizer"]))
    writer.add_bos_token_id(tokenizer.token_to_id("<s>"))
    writer.add_eos_token_id(tokenizer.token_to_id("</s>"))
    writer.add_eot_token_id(tokenizer.token_to_id("<|im_end|>"))
    writer.add_chat_template("{{ messages }}")


def _theta(model: PreTrainedModel) -> float:
    rope = getattr(model.config, "rope_parameters", None) or {"rope_theta": 10_000.0}  # written where nothing rotates
    return float((rope.get("full_attention") or rope)["rope_theta"])


def _add_tensors(writer: gguf.GGUFWriter, family: Family, model: PreTrainedModel, kind: str) -> None:
    config = model.config
    names = gguf.get_tensor_name_map(family.architecture, config.num_hidden_layers)
    stored = dict(model.state_dict())
    if config.tie_word_embeddings:
        del stored["lm_head.weight"]
    for name, tensor in (pair for entry in stored.items() for pair in family.spelled(*entry)):
        values = np.ascontiguousarray(tensor.float().numpy())
        if family.rotates_pairs and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            values = np.ascontiguousarray(
                values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
                .swapaxes(1, 2)
                .reshape(values.shape)
            )
        if family.adds_one_to_norms and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            values = values + np.float32(1)
        stem, _, suffix = name.rpartition(".")
        target = f"{names.get_name(stem) or stem}.{suffix}"
        plain = values.ndim < 2 or values.shape[-1] % 32 or suffix == "bias" or "ffn_gate_inp" in target
        raw_type = gguf.GGMLQuantizationType["F32" if plain else kind]
        writer.add_tensor(target, gguf.quants.quantize(values, raw_type), raw_dtype=raw_type)
    rope = getattr(config, "rope_parameters", None) or {}
    proportional = rope.get("full_attention", {})
    if proportional.get("rope_type") == "proportional":
        half, part = family.metadata["attention.key_length"] // 2, proportional["partial_rotary_factor"]
        divisors = [1.0] * int(half * part) + [1e30] * (half - int(half * part))
        writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
    if rope.get("rope_type") == "longrope":
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], dtype=np.float32))
    if rope.get("rope_type") == "llama3":
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = rope["rope_theta"] ** (-torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / frequencies).float().numpy())
