"""Describes the architectures of GGUF files whose tensors are known: how each differs from Llama's.

A line here names the model type whose configuration `gguf_config.py` makes, and the spelling that `gguf_parameters.py`
reads. Both libraries' names are meant: llama.cpp's in the file, Hugging Face's in the checkpoint that it becomes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from ...lang.errors import ModelError
from .gguf_file import GgufFile, Metadata

# Norms of a layer: name in GGUF → in Hugging Face.
LLAMA_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
AFTER_ATTENTION = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
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
class ExpertSpelling:
    """The tensors of a layer's experts: their names in Hugging Face, and which of them there are."""

    block: str = "mlp"  # the module of the router and of the experts
    router: str = "gate"
    shared: str | None = None  # the module of the MLP that every token uses; None: the architecture has none
    shared_gate: str | None = None  # multiplies that MLP
    correction: str | None = None  # added to the router's scores
    biased: bool = False  # router and experts have biases
    gated: bool = True


class RecurrentKind(Enum):
    """The recurrent layers of an architecture."""

    CONVOLUTION = "short convolutions"
    MAMBA = "Mamba 2"
    DELTA_NET = "gated delta nets"


@dataclass(frozen=True, slots=True)
class Architecture:
    """The differences of one llama.cpp architecture from the others."""

    name: str  # in general.architecture
    model_type: str
    model_class: str
    rotates_pairs: bool = False  # llama.cpp interleaved the rows of q and k
    adds_one_to_norms: bool = False  # the file holds 1 + w where Hugging Face holds w
    query_key_bias: bool = False  # biases, if there are any, are of queries, keys and values only
    query_key_norm: bool = False
    whole_norm: bool = False  # of all queries of a row, and of all its keys; else of each head
    fused_qkv: bool = False  # queries, keys and values are one tensor
    fused_gate_up: bool = False
    rotates_part: bool = False  # some dimensions of a head, the first ones, are rotated
    latent: bool = False  # latent attention
    sinks: bool = False
    layers_differ: bool = False  # in their heads, and some have tensors that others lack
    recurrent: RecurrentKind | None = None  # of some layers, in place of attention
    gated_attention: bool = False
    gated_mlp: bool = True
    parts_alone: bool = False  # a layer is a mixer or an MLP
    mlp: str = "mlp"  # the module of a dense MLP
    experts: ExpertSpelling | None = None  # None: all MLPs are dense
    norms: Mapping[str, str] = field(default_factory=lambda: LLAMA_NORMS)
    final_norms: tuple[str, ...] = ("output_norm.weight",)  # in the file, the first one that it has
    renamed: Mapping[str, str] = field(default_factory=dict)  # parts of Hugging Face's names → this architecture's own


_QWEN_EXPERTS = ExpertSpelling(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")
_GRANITE_EXPERTS = ExpertSpelling(block="block_sparse_moe", router="router", shared="shared_mlp")
# Architectures whose files have experts or dense MLPs, as they are with experts.
_SPARSE = {
    "llama": Architecture("llama", "mixtral", "MixtralForCausalLM", rotates_pairs=True, experts=ExpertSpelling()),
    "granitehybrid": Architecture(
        "granitehybrid",
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        rotates_pairs=True,
        recurrent=RecurrentKind.MAMBA,
        experts=_GRANITE_EXPERTS,
    ),
}

_QWEN_HYBRID: Any = {  # Any: fields of several types
    "adds_one_to_norms": True,
    "query_key_norm": True,
    "rotates_part": True,
    "recurrent": RecurrentKind.DELTA_NET,
    "gated_attention": True,
    "norms": AFTER_ATTENTION,
}

ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("llama", "llama", "LlamaForCausalLM", rotates_pairs=True),
        Architecture("mistral", "mistral", "MistralForCausalLM", rotates_pairs=True),
        Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", query_key_bias=True),
        Architecture("qwen2vl", "qwen2", "Qwen2ForCausalLM", query_key_bias=True),  # the text part, as of the others
        Architecture(
            "qwen2moe",
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            query_key_bias=True,
            experts=_QWEN_EXPERTS,
        ),
        Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", query_key_norm=True),
        Architecture("qwen3vl", "qwen3", "Qwen3ForCausalLM", query_key_norm=True),
        Architecture("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", query_key_norm=True, experts=ExpertSpelling()),
        Architecture("qwen3vlmoe", "qwen3_moe", "Qwen3MoeForCausalLM", query_key_norm=True, experts=ExpertSpelling()),
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
        Architecture(
            "gemma3n",
            "gemma3n_text",
            "Gemma3nForCausalLM",
            query_key_norm=True,
            layers_differ=True,
            norms=GEMMA_NORMS,
        ),
        Architecture(
            "gemma4",
            "gemma4_text",
            "Gemma4ForCausalLM",
            query_key_norm=True,
            layers_differ=True,
            norms=GEMMA_NORMS,
        ),
        Architecture("phi3", "phi3", "Phi3ForCausalLM", fused_qkv=True, fused_gate_up=True, rotates_part=True),
        Architecture("smollm3", "smollm3", "SmolLM3ForCausalLM", rotates_pairs=True),
        Architecture("olmo2", "olmo2", "Olmo2ForCausalLM", query_key_norm=True, whole_norm=True, norms=OLMO_NORMS),
        Architecture("exaone4", "exaone4", "Exaone4ForCausalLM", query_key_norm=True, norms=OLMO_NORMS),
        Architecture("mistral3", "mistral", "MistralForCausalLM", rotates_pairs=True),  # or Ministral 3
        Architecture("seed_oss", "seed_oss", "SeedOssForCausalLM", query_key_bias=True, norms=AFTER_ATTENTION),
        Architecture("granite", "granite", "GraniteForCausalLM", rotates_pairs=True),
        Architecture(
            "granitemoe",
            "granitemoe",
            "GraniteMoeForCausalLM",
            rotates_pairs=True,
            experts=_GRANITE_EXPERTS,
        ),
        Architecture(
            "glm4",
            "glm4",
            "Glm4ForCausalLM",
            query_key_bias=True,
            fused_gate_up=True,
            rotates_part=True,
            norms=GLM_NORMS,
        ),
        Architecture(
            "llama4",
            "llama4_text",
            "Llama4ForCausalLM",
            mlp="feed_forward",
            experts=ExpertSpelling(block="feed_forward", router="router", shared="feed_forward.shared_expert"),
        ),
        Architecture(
            "gpt-oss",
            "gpt_oss",
            "GptOssForCausalLM",
            sinks=True,
            norms=AFTER_ATTENTION,
            experts=ExpertSpelling(router="router", biased=True),
        ),
        Architecture(
            "deepseek2",
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            latent=True,
            experts=ExpertSpelling(shared="mlp.shared_experts", correction="gate.e_score_correction_bias"),
        ),
        Architecture(
            "lfm2",
            "lfm2",
            "Lfm2ForCausalLM",
            query_key_norm=True,
            recurrent=RecurrentKind.CONVOLUTION,
            norms={"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"},
            final_norms=("token_embd_norm.weight", "output_norm.weight"),
            renamed={
                "self_attn.o_proj.": "self_attn.out_proj.",
                "self_attn.q_norm.": "self_attn.q_layernorm.",
                "self_attn.k_norm.": "self_attn.k_layernorm.",
                "mlp.gate_proj.": "feed_forward.w1.",
                "mlp.up_proj.": "feed_forward.w3.",
                "mlp.down_proj.": "feed_forward.w2.",
            },
        ),
        Architecture(
            "granitehybrid",
            "granitemoehybrid",
            "GraniteMoeHybridForCausalLM",
            rotates_pairs=True,
            recurrent=RecurrentKind.MAMBA,
            mlp="shared_mlp",
        ),
        Architecture(
            "nemotron_h",
            "nemotron_h",
            "NemotronHForCausalLM",
            rotates_pairs=True,
            rotates_part=True,  # none, whatever the file states
            recurrent=RecurrentKind.MAMBA,
            gated_mlp=False,
            parts_alone=True,
            norms={"attn_norm": "norm"},
            renamed={"self_attn.": "mixer.", "mlp.": "mixer."},
        ),
        Architecture(
            "nemotron_h_moe",
            "nemotron_h",
            "NemotronHForCausalLM",
            rotates_pairs=True,
            rotates_part=True,
            recurrent=RecurrentKind.MAMBA,
            parts_alone=True,
            norms={"attn_norm": "norm"},
            renamed={"self_attn.": "mixer."},
            experts=ExpertSpelling(
                block="mixer",
                shared="mixer.shared_experts",
                correction="gate.e_score_correction_bias",
                gated=False,
            ),
        ),
        Architecture("qwen3next", "qwen3_next", "Qwen3NextForCausalLM", experts=_QWEN_EXPERTS, **_QWEN_HYBRID),
        Architecture("qwen35", "qwen3_5_text", "Qwen3_5ForCausalLM", **_QWEN_HYBRID),
        Architecture("qwen35moe", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", experts=_QWEN_EXPERTS, **_QWEN_HYBRID),
    )
}


_NO_MODELS = {  # general.type → what such a file is, and what to give instead
    "mmproj": "the tower of a vision model, which umbel reads from safetensors folders only; give the model's own file",
    "adapter": "a LoRA adapter; umbel reads adapters as PEFT writes them: Runtime(MODEL, adapters={NAME: FOLDER})",
    "imatrix": "a table of importances for quantising a model; give the model's own file",
}


def architecture_of(gguf: GgufFile) -> Architecture:
    """Returns the file's architecture.

    Raises:
        ModelError: an unknown one, experts that it does not have, or a file that holds no language model.
    """
    kind = "mmproj" if gguf.metadata.get("general.architecture") == "clip" else gguf.metadata.get("general.type")
    if isinstance(kind, str) and kind in _NO_MODELS:
        raise ModelError(f"{gguf.path} is {_NO_MODELS[kind]}")
    name = gguf.architecture
    found = ARCHITECTURES.get(name)
    if found is None:
        raise ModelError(
            f"{gguf.path}: architecture {name!r} is not supported as GGUF; supported are "
            f"{', '.join(ARCHITECTURES)}. Use the model's safetensors folder instead"
        )
    has_experts = gguf.metadata.integer(f"{name}.expert_count", 0) > 0
    if has_experts and name in _SPARSE:
        return _SPARSE[name]
    if has_experts and found.experts is None:
        raise ModelError(
            f"{gguf.path}: experts of a {name} model are not supported as GGUF; use the model's safetensors folder "
            "instead"
        )
    return found


class Keys:
    """Reads metadata under the architecture's name."""

    def __init__(self, metadata: Metadata, prefix: str) -> None:
        self.metadata, self.prefix = metadata, prefix

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        return self.metadata.integer(f"{self.prefix}.{key}", default)

    def flag(self, key: str, default: bool) -> bool:
        return self.metadata.flag(f"{self.prefix}.{key}", default)

    def by_layer(self, key: str, layers: int, default: int | None = None) -> list[int]:
        """Reads a whole number for each layer, which may be one for all."""
        name = f"{self.prefix}.{key}"
        if not isinstance(self.metadata.get(name), np.ndarray):
            return [self.integer(key, default)] * layers
        found = self.metadata.numbers(name)
        if len(found) < layers or not np.issubdtype(found.dtype, np.integer):
            raise ModelError(f"{self.metadata.path} is damaged: {name} lists no {layers} whole numbers")
        return [int(value) for value in found[:layers]]

    def flags(self, key: str, layers: int) -> list[bool] | None:
        """Reads a value for each layer; None: the file has no list of them."""
        if not isinstance(self.metadata.get(f"{self.prefix}.{key}"), np.ndarray):
            return None
        found = self.metadata.numbers(f"{self.prefix}.{key}")
        if len(found) < layers:
            raise ModelError(
                f"{self.metadata.path} is damaged: {self.prefix}.{key} lists {len(found)} of {layers} layers"
            )
        return [bool(value) for value in found[:layers]]

    def positive(self, key: str, default: float | None = None) -> float:
        """Reads a finite number above 0, safe as a divisor and for a logarithm."""
        value = self.metadata.number(f"{self.prefix}.{key}", default)
        if not 0 < value < math.inf:
            raise ModelError(f"{self.metadata.path} is damaged: {self.prefix}.{key} is {value}; download it again")
        return value

    def decimal(self, key: str, default: float | None = None) -> float:
        """Reads as `positive`, and undoes the rounding to float32: 1e-06, not 9.999999974752427e-07."""
        return decimal(self.positive(key, default))

    def text(self, key: str, default: str) -> str:
        return self.metadata.text(f"{self.prefix}.{key}", default)


def decimal(value: float) -> float:
    """Returns the short decimal that was rounded to float32."""
    return float(f"{value:.7g}")
