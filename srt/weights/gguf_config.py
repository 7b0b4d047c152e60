"""Converts GGUF metadata to a Hugging Face config dict, for the architectures whose tensors are known.

GGUF stores the values that llama.cpp needs to run a model. Values that llama.cpp derives (layer types of Gemma 3, the
parameters of Llama 3's precomputed RoPE factors) are derived here too and, where the file has the result, checked
against it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...lang.errors import ModelError
from .gguf_file import GgufFile, Metadata

Config = dict[str, object]

GEMMA3_SLIDING_PATTERN = 6  # every sixth layer attends to everything
GEMMA2_27B_LAYERS = 46  # this and the following: the one size whose queries are not scaled by head_dim
GEMMA3_27B_LAYERS = 62
GEMMA3_LOCAL_ROPE = 10_000.0
LONGROPE_FACTORS = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
LLAMA3_CONTEXTS = (8192, 4096, 16384)  # original context lengths that Llama 3 scaling may start from


# Norms of a layer: name in GGUF → in Hugging Face.
LLAMA_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OLMO_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
GLM_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The differences of one llama.cpp architecture from the others."""

    name: str  # in general.architecture
    model_type: str
    model_class: str
    rotates_pairs: bool = False  # llama.cpp interleaved the rows of q and k
    adds_one_to_norms: bool = False  # the file holds 1 + w where Hugging Face holds w
    query_key_bias: bool = False
    query_key_norm: bool = False
    whole_norm: bool = False  # of all queries of a row, and of all its keys; else of each head
    fused_qkv: bool = False  # queries, keys and values are one tensor
    fused_gate_up: bool = False
    rotates_part: bool = False  # some dimensions of a head, the first ones, are rotated
    norms: Mapping[str, str] = field(default_factory=lambda: LLAMA_NORMS)


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("llama", "llama", "LlamaForCausalLM", rotates_pairs=True),
        Architecture("mistral", "mistral", "MistralForCausalLM", rotates_pairs=True),
        Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", query_key_bias=True),
        Architecture("qwen2vl", "qwen2", "Qwen2ForCausalLM", query_key_bias=True),  # the text part; so is qwen3vl
        Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", query_key_norm=True),
        Architecture("qwen3vl", "qwen3", "Qwen3ForCausalLM", query_key_norm=True),
        Architecture("gemma", "gemma", "GemmaForCausalLM", adds_one_to_norms=True),
        Architecture("gemma2", "gemma2", "Gemma2ForCausalLM", adds_one_to_norms=True, norms=GEMMA_NORMS),
        Architecture(
            "gemma3",
            "gemma3_text",
            "Gemma3ForCausalLM",
            adds_one_to_norms=True,
            query_key_norm=True,
            norms=GEMMA_NORMS,
        ),
        Architecture("phi3", "phi3", "Phi3ForCausalLM", fused_qkv=True, fused_gate_up=True, rotates_part=True),
        Architecture("smollm3", "smollm3", "SmolLM3ForCausalLM", rotates_pairs=True),
        Architecture("olmo2", "olmo2", "Olmo2ForCausalLM", query_key_norm=True, whole_norm=True, norms=OLMO_NORMS),
        Architecture("granite", "granite", "GraniteForCausalLM", rotates_pairs=True),
        Architecture(
            "glm4",
            "glm4",
            "Glm4ForCausalLM",
            query_key_bias=True,
            fused_gate_up=True,
            rotates_part=True,
            norms=GLM_NORMS,
        ),
    )
}


def architecture_of(gguf: GgufFile) -> Architecture:
    """Returns the file's architecture. Raises ModelError for an unknown one and for a mixture of experts."""
    name = gguf.architecture
    found = ARCHITECTURES.get(name)
    if found is None:
        raise ModelError(
            f"{gguf.path}: architecture {name!r} is not supported as GGUF; supported are "
            f"{', '.join(ARCHITECTURES)}. Use the model's safetensors folder instead"
        )
    if gguf.metadata.integer(f"{name}.expert_count", 0) > 0:
        raise ModelError(
            f"{gguf.path}: mixtures of experts are not supported as GGUF; use the model's safetensors folder instead"
        )
    return found


def config_of(gguf: GgufFile) -> Config:
    """Builds the config.json that Hugging Face would have for this file."""
    architecture = architecture_of(gguf)
    read = _Keys(gguf.metadata, architecture.name)
    hidden = read.integer("embedding_length")
    heads = read.integer("attention.head_count")
    layers = read.integer("block_count")
    if heads < 1 or hidden < 1 or not 0 < layers <= len(gguf.tensors):
        raise ModelError(
            f"{gguf.path} is damaged: {layers} layers of {heads} attention heads and a width of {hidden} "
            f"in {len(gguf.tensors)} tensors"
        )
    head_dim = read.integer("attention.key_length", read.integer("rope.dimension_count", hidden // heads))
    _check_head_dim(gguf, read, head_dim, rotates_part=architecture.rotates_part)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{gguf.path} holds no embedding 'token_embd.weight'; give a GGUF of a whole language model")
    config: Config = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "torch_dtype": "bfloat16",
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": read.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": read.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": read.integer("context_length"),
        "rms_norm_eps": _decimal(read.positive("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(read.positive("rope.freq_base", 10_000.0)),
        "rope_scaling": rope_scaling(gguf, head_dim),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        key = f"tokenizer.ggml.{theirs}_token_id"
        if key in gguf.metadata:
            config[f"{ours}_token_id"] = gguf.metadata.integer(key)
    config.update(_particulars(architecture, read, config))
    return config


class _Keys:
    """Reads metadata under the architecture's name."""

    def __init__(self, metadata: Metadata, prefix: str) -> None:
        self.metadata, self.prefix = metadata, prefix

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        return self.metadata.integer(f"{self.prefix}.{key}", default)

    def positive(self, key: str, default: float | None = None) -> float:
        """Reads a finite number above 0, safe as a divisor and for a logarithm."""
        value = self.metadata.number(f"{self.prefix}.{key}", default)
        if not 0 < value < math.inf:
            raise ModelError(f"{self.metadata.path} is damaged: {self.prefix}.{key} is {value}; download it again")
        return value

    def text(self, key: str, default: str) -> str:
        return self.metadata.text(f"{self.prefix}.{key}", default)


def _particulars(architecture: Architecture, read: _Keys, config: Config) -> Config:
    match architecture.model_type:
        case "llama":
            return {"hidden_act": "silu", "mlp_bias": False}
        case "mistral":
            window = read.integer("attention.sliding_window", 0)
            return {"hidden_act": "silu", "sliding_window": window or None}
        case "qwen2" | "qwen3":
            return {"hidden_act": "silu", "use_sliding_window": False, "sliding_window": None}
        case "gemma":
            return {"hidden_act": "gelu_pytorch_tanh"}
        case "gemma2":
            return _gemma2(read, config)
        case "gemma3_text":
            return _gemma3(read, config)
        case "phi3":
            window = read.integer("attention.sliding_window", 0)
            original = read.integer("rope.scaling.original_context_length", read.integer("context_length"))
            return {
                "hidden_act": "silu",
                "sliding_window": window or None,
                "original_max_position_embeddings": original,
                "partial_rotary_factor": _rotated_part(read, config),
            }
        case "smollm3":
            return {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}
        case "olmo2":
            return _olmo(read)
        case "granite":
            return {
                "hidden_act": "silu",
                "mlp_bias": False,
                "embedding_multiplier": _decimal(read.positive("embedding_scale", 1.0)),
                "residual_multiplier": _decimal(read.positive("residual_scale", 1.0)),
                "attention_multiplier": _decimal(read.positive("attention.scale", 1.0)),
                "logits_scaling": _decimal(read.positive("logit_scale", 1.0)),
            }
        case "glm4":
            return {"hidden_act": "silu", "partial_rotary_factor": _rotated_part(read, config)}
        case other:
            raise AssertionError(f"no particulars for {other}")


def _gemma3(read: _Keys, config: Config) -> Config:
    layers = read.integer("block_count")
    heads = read.integer("attention.head_count")
    whole_width_scale = layers == GEMMA3_27B_LAYERS
    softcap = read.positive("final_logit_softcapping") if read.has("final_logit_softcapping") else None
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": read.integer("embedding_length") // heads if whole_width_scale else config["head_dim"],
        "sliding_window": read.integer("attention.sliding_window"),
        "layer_types": [
            "full_attention" if (layer + 1) % GEMMA3_SLIDING_PATTERN == 0 else "sliding_attention"
            for layer in range(layers)
        ],
        "rope_local_base_freq": read.positive("rope.freq_base_swa", GEMMA3_LOCAL_ROPE),
        "rope_theta": read.positive("rope.freq_base", 1_000_000.0),
        "final_logit_softcapping": softcap,
        "attn_logit_softcapping": None,
    }


def _gemma2(read: _Keys, config: Config) -> Config:
    layers, heads = read.integer("block_count"), read.integer("attention.head_count")
    whole_width_scale = layers == GEMMA2_27B_LAYERS
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": read.integer("embedding_length") // heads if whole_width_scale else config["head_dim"],
        "sliding_window": read.integer("attention.sliding_window", 4096),
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)],
        "final_logit_softcapping": read.positive("final_logit_softcapping", 30.0),
        "attn_logit_softcapping": read.positive("attn_logit_softcapping", 50.0),
    }


def _olmo(read: _Keys) -> Config:
    """OLMo 3 has the architecture of OLMo 2, and a window."""
    if not read.has("attention.sliding_window"):
        return {"hidden_act": "silu"}
    raise ModelError(
        f"{read.metadata.path}: OLMo 3 is not supported as GGUF; use the model's safetensors folder instead"
    )


def _rotated_part(read: _Keys, config: Config) -> float:
    head_dim = config["head_dim"]
    assert isinstance(head_dim, int), "config_of put it there"
    return read.integer("rope.dimension_count", head_dim) / head_dim


def _check_head_dim(gguf: GgufFile, read: _Keys, head_dim: int, *, rotates_part: bool) -> None:
    value_dim = read.integer("attention.value_length", head_dim)
    rotated = read.integer("rope.dimension_count", head_dim)
    if rotates_part and 0 < rotated < head_dim:
        rotated = head_dim
    if head_dim < 2 or head_dim % 2 or value_dim != head_dim or rotated != head_dim:
        raise ModelError(
            f"{gguf.path}: heads of {head_dim} for keys, {value_dim} for values and {rotated} rotated dimensions; "
            "umbel runs models where the three are one even number"
        )


# ------------------------------------------------------------------------------------------ RoPE


def rope_scaling(gguf: GgufFile, head_dim: int) -> Config | None:
    """Builds the `rope_scaling` of the Hugging Face config; None: plain RoPE."""
    read = _Keys(gguf.metadata, gguf.architecture)
    factors = gguf.tensors.get("rope_freqs.weight")
    if factors is not None:
        return _llama3_scaling(gguf, head_dim)
    if any(name in gguf.tensors for name in LONGROPE_FACTORS):
        return _long_scaling(gguf, read, head_dim)
    match read.text("rope.scaling.type", "none"):
        case "none":
            factor = read.positive("rope.scale_linear", 1.0)  # the older spelling of linear scaling
            return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        case "linear":
            factor = read.positive("rope.scaling.factor", 1.0)
            return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        case "yarn":
            return _yarn_scaling(read)
        case other:
            raise ModelError(
                f"{gguf.path}: RoPE scaling {other!r} is not supported; supported are none, linear, yarn and llama3"
            )


def _yarn_scaling(read: _Keys) -> Config:
    factor = read.positive("rope.scaling.factor")
    scaling: Config = {"rope_type": "yarn", "factor": factor}
    if read.has("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = read.integer("rope.scaling.original_context_length")
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if read.has(f"rope.scaling.{key}"):
            scaling[name] = read.positive(f"rope.scaling.{key}")
    multiplier = read.positive("rope.scaling.attn_factor", 1.0)
    if multiplier != 1.0:  # llama.cpp multiplies YaRN's own attention factor by it
        scaling["attention_factor"] = multiplier * (0.1 * math.log(factor) + 1.0)
    return scaling


def _long_scaling(gguf: GgufFile, read: _Keys, head_dim: int) -> Config:
    rotated = read.integer("rope.dimension_count", head_dim)
    scaling: Config = {"rope_type": "longrope"}
    for name, key in LONGROPE_FACTORS.items():
        tensor = gguf.tensors.get(name)
        if tensor is None or tensor.type_name != "F32" or tensor.shape != (rotated // 2,):
            raise ModelError(
                f"{gguf.path} is damaged: {name} is no list of {rotated // 2} factors; download the whole model again"
            )
        scaling[key] = list(map(_decimal, tensor.read(0, 1).view("<f4")[0].tolist()))
    if read.has("rope.scaling.attn_factor"):
        scaling["attention_factor"] = _decimal(read.positive("rope.scaling.attn_factor"))
    return scaling


def _llama3_scaling(gguf: GgufFile, head_dim: int) -> Config | None:
    """Finds the parameters that give the factors in `rope_freqs.weight`, by trying the known context lengths."""
    tensor = gguf.tensors["rope_freqs.weight"]
    if tensor.type_name != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelError(f"{gguf.path} is damaged: rope_freqs.weight is {tensor.type_name} of shape {tensor.shape}")
    found = tensor.read(0, 1).view("<f4")[0].tolist()
    factor = max(found)
    if factor == min(found) == 1.0:
        return None
    read = _Keys(gguf.metadata, gguf.architecture)
    theta = read.positive("rope.freq_base", 10_000.0)
    stated = (read.integer("rope.scaling.original_context_length", 0),)
    for context in (*stated, *LLAMA3_CONTEXTS):
        if context and _close(found, llama3_factors(theta, head_dim, factor, context)):
            return {
                "rope_type": "llama3",
                "factor": _decimal(factor),
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": context,
            }
    raise ModelError(
        f"{gguf.path}: the factors in rope_freqs.weight are not those of Llama 3 scaling; use the safetensors folder"
    )


def llama3_factors(theta: float, head_dim: int, factor: float, context: int) -> list[float]:
    """Computes the divisors of Llama 3 for each RoPE frequency: 1 for short waves, `factor` for long ones."""
    low, high = 1.0, 4.0
    factors = []
    for pair in range(head_dim // 2):
        turns = context / (2 * math.pi * theta ** (2 * pair / head_dim))  # of this wave in the original context
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def _close(found: Sequence[float], expected: Sequence[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(found, expected, strict=True))


def _decimal(value: float) -> float:
    """Returns the short decimal that was rounded to float32: 1e-06, not 9.999999974752427e-07."""
    return float(f"{value:.7g}")
