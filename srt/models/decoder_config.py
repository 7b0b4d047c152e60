"""Describes a decoder as data: families differ by these fields, not by code.

A file of `families/` reads them from a Hugging Face configuration. Three executors run them: `decoder.py` in torch,
`cpu_decoder.py` on the native CPU kernels, `runners/cuda/decoder.py` on Triton's.
"""

from dataclasses import dataclass

from ..layers.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts: every token uses the `chosen` of `count` MLPs that a router finds most probable."""

    count: int
    chosen: int
    width: int
    renormalise: bool  # the weights of a token's experts sum to one
    rounded: bool  # weights are rounded to the model's dtype before they multiply
    shared_width: int = 0  # of one more MLP that every token uses, times a gate of its own; 0: there is none


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The fields that may differ from layer to layer."""

    window: int | None  # a row sees this many positions, its own included; None: all
    rope: RopeConfig
    experts: ExpertsConfig | None = None  # None: the MLP is dense


@dataclass(frozen=True, slots=True)
class NormNames:
    """The norms of a layer, by the names of their weights in the checkpoint. None: there is no such norm."""

    before_attention: str = "input_layernorm"
    after_attention: str | None = None  # before the residual sum
    before_mlp: str = "post_attention_layernorm"  # Llama names it by its place, not its use
    after_mlp: str | None = None  # before the residual sum


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One decoder, whole or the part of one rank. The defaults are those of a plain decoder like Llama's."""

    vocab_size: int
    context_length: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    activation: str
    norm_eps: float
    tied: bool  # the output map is the embedding
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # each head of queries and keys is normalised before its rotary embedding
    norms: NormNames = NormNames()
    centered_norm: bool = False  # norm weights are stored minus one
    embedding_scale: float | None = None
    attention_scale: float = 1.0
    logit_softcap: float = 0.0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window classes, each once, in the order of the layers."""
        return tuple(dict.fromkeys(layer.window for layer in self.layers))
