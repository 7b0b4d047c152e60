"""What a decoder is, as data: families differ by these fields, not by code.

`read_config` reads a Hugging Face configuration, in the spelling of transformers 4 (`rope_theta`, `rope_scaling`)
or 5 (`rope_parameters`). A value that the decoder does not implement is refused, never ignored.
"""

from dataclasses import dataclass

from ...lang.errors import ModelError
from ..layers.config_values import MOST_LAYERS, Config, flag, positive_int, positive_number
from ..layers.layers import ACTIVATIONS
from ..layers.rope import RopeConfig, RopeType
from .experts_config import EXPERT_FAMILIES, ExpertsConfig, read_experts
from .rope_config import read_rope, read_rope_by_layer_type

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", *EXPERT_FAMILIES)
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    window: int | None  # a row sees this many positions, its own included; None: all
    rope: RopeConfig
    experts: ExpertsConfig | None = None  # None: the MLP is dense


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    family: str
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
    qk_norm: bool = False  # each head of queries and keys is normalised before it is turned
    sandwich_norm: bool = False  # norms after attention and MLP too, before the residual sum
    centered_norm: bool = False  # norm weights are stored minus one
    embedding_scale: float | None = None
    attention_scale: float = 1.0
    logit_softcap: float = 0.0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window classes, each once, in the order of the layers."""
        return tuple(dict.fromkeys(layer.window for layer in self.layers))


def read_config(config: Config) -> DecoderConfig:
    """Raises ModelError for a value that is missing, wrong, or not implemented here."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"model_type {family!r} is not one of {', '.join(FAMILIES)}")
    heads = positive_int(config, "num_attention_heads")
    hidden_size = positive_int(config, "hidden_size")
    kv_heads = positive_int(config, "num_key_value_heads", heads)
    head_dim = positive_int(config, "head_dim", _default_head_dim(family, hidden_size, heads))
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if head_dim % 2:
        raise ModelError(f"head_dim={head_dim} is odd, so its dimensions cannot be turned in pairs")
    gemma = family == "gemma3_text"
    if gemma and flag(config, "use_bidirectional_attention", False):
        raise ModelError("use_bidirectional_attention=true makes an encoder; load a text-generating Gemma 3")
    if gemma and config.get("attn_logit_softcapping"):
        raise ModelError("attn_logit_softcapping: Gemma 3 has none (Gemma 2 had); write null")
    attention_bias = family not in ("mistral", "mixtral", "qwen2_moe") and flag(config, "attention_bias", False)
    qkv_bias = family == "qwen2" or (family == "qwen2_moe" and flag(config, "qkv_bias", True))
    query_scalar = positive_number(config, "query_pre_attn_scalar", 256.0) if gemma else float(head_dim)
    layers = _read_layers(config, family, positive_int(config, "num_hidden_layers", most=MOST_LAYERS))
    return DecoderConfig(
        family=family,
        vocab_size=positive_int(config, "vocab_size"),
        context_length=_context_length(config, layers),
        hidden_size=hidden_size,
        intermediate_size=positive_int(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=layers,
        activation=_activation(config, gemma=gemma),
        norm_eps=positive_number(config, "rms_norm_eps", 1e-5 if family == "mixtral" else 1e-6),
        tied=flag(config, "tie_word_embeddings", gemma),
        qkv_bias=qkv_bias or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        mlp_bias=family == "llama" and flag(config, "mlp_bias", False),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        sandwich_norm=gemma,
        centered_norm=gemma,
        embedding_scale=hidden_size**0.5 if gemma else None,
        attention_scale=query_scalar**-0.5,
        logit_softcap=_logit_softcap(config) if gemma else 0.0,
    )


def _logit_softcap(config: Config) -> float:
    """Null means none, and so does an explicit 0."""
    return positive_number(config, "final_logit_softcapping") if config.get("final_logit_softcapping") else 0.0


def _default_head_dim(family: str, hidden_size: int, heads: int) -> int:
    """What transformers takes when the configuration is silent."""
    return {"qwen3": 128, "gemma3_text": 256}.get(family, hidden_size // heads)


def _activation(config: Config, *, gemma: bool) -> str:
    key, default = ("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu")
    name = str(config.get(key) or default)
    if name not in ACTIVATIONS:
        raise ModelError(f"{key} {name!r} is not one of {', '.join(ACTIVATIONS)}")
    return name


def _read_layers(config: Config, family: str, count: int) -> tuple[LayerConfig, ...]:
    types = _layer_types(config, family, count)
    windows = [positive_int(config, "sliding_window", 4096) if kind == SLIDING else None for kind in types]
    if family == "gemma3_text":
        ropes = read_rope_by_layer_type(config)
        return tuple(LayerConfig(window, ropes[kind]) for window, kind in zip(windows, types, strict=True))
    rope = read_rope(config, default_theta=1_000_000.0 if family == "mixtral" else 10_000.0)
    experts = read_experts(config, family, count)
    return tuple(LayerConfig(window, rope, some) for window, some in zip(windows, experts, strict=True))


def _layer_types(config: Config, family: str, count: int) -> list[str]:
    if family == "llama":
        return [FULL] * count
    if family == "mistral":  # an absent window means 4096 to transformers, a null one means none
        return [FULL if config.get("sliding_window", 4096) is None else SLIDING] * count
    if family == "mixtral":  # here an absent one means none, too
        return [FULL if config.get("sliding_window") is None else SLIDING] * count
    sliding = flag(config, "use_sliding_window", False) and config.get("sliding_window", 4096) is not None
    if family == "qwen3_moe":
        return [SLIDING if sliding else FULL] * count
    given = config.get("layer_types")
    if given is not None:
        if not isinstance(given, list) or len(given) != count or not set(given) <= {SLIDING, FULL}:
            raise ModelError(f"layer_types {given!r}: write {count} times {SLIDING!r} or {FULL!r}")
        return list(given)
    if family == "gemma3_text":
        pattern = positive_int(config, "sliding_window_pattern", 6)
        return [FULL if (index + 1) % pattern == 0 else SLIDING for index in range(count)]
    if family == "qwen2_moe":
        if sliding:  # transformers 4 and 5 differ in which layers these are
            raise ModelError(
                "configuration: use_sliding_window=true without layer_types; write them, one for each layer"
            )
        return [FULL] * count
    given_first = config.get("max_window_layers", 28)  # 0 is meant: every layer slides
    if not isinstance(given_first, int):
        raise ModelError(f"configuration: max_window_layers={given_first!r}; write a whole number")
    first_sliding = given_first if sliding else count
    return [SLIDING if index >= first_sliding else FULL for index in range(count)]


def _context_length(config: Config, layers: tuple[LayerConfig, ...]) -> int:
    """YaRN configurations often keep the original length in max_position_embeddings; the factor extends it."""
    stated = positive_int(config, "max_position_embeddings")
    ropes = [layer.rope for layer in layers if layer.rope.type is RopeType.YARN]
    return max([stated, *(int(rope.original_length * rope.factor) for rope in ropes)])
