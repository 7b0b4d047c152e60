"""Reads what GGUF files of hybrids have: the kinds of their layers, and the sizes of recurrent states.

llama.cpp's converter parts Qwen3-Next's first map, and deals the value heads of Qwen 3.5 to its key heads in turns; the
decoders take them in that order (`GGUF_LAYOUT`).
"""

from enum import Enum, auto
from typing import assert_never

from ...lang.errors import ModelError
from ..layers.config_values import GGUF_LAYOUT
from .gguf_architectures import Architecture, Keys, RecurrentKind
from .gguf_rope import Config

_ATTENTION_INTERVAL = 4  # of Qwen's hybrids


class LayerKind(Enum):
    """The part of a layer before its MLP; MLP: it is one alone."""

    ATTENTION = auto()
    RECURRENT = auto()
    MLP = auto()


def layer_kinds(architecture: Architecture, read: Keys, layers: int) -> list[LayerKind]:
    """Reads the kinds of the layers: recurrent ones have no key heads, and MLPs alone a width of their own."""
    if architecture.recurrent is None:
        return [LayerKind.ATTENTION] * layers
    if architecture.recurrent is RecurrentKind.DELTA_NET:
        interval = read.integer("full_attention_interval", _ATTENTION_INTERVAL)
        if interval < 1:
            raise ModelError(f"{read.metadata.path} is damaged: every {interval}-th layer attends; download it again")
        return [LayerKind.RECURRENT if (index + 1) % interval else LayerKind.ATTENTION for index in range(layers)]
    heads = read.by_layer("attention.head_count_kv", layers)
    widths = read.by_layer("feed_forward_length", layers) if architecture.parts_alone else [0] * layers
    return [
        LayerKind.ATTENTION if heads[index] > 0 else LayerKind.MLP if widths[index] > 0 else LayerKind.RECURRENT
        for index in range(layers)
    ]


def hybrid_config(architecture: Architecture, read: Keys, layers: int) -> Config:
    """Returns what the configuration of a hybrid has beyond others."""
    kinds = layer_kinds(architecture, read, layers)
    found: Config = {GGUF_LAYOUT: True}
    heads = read.by_layer("attention.head_count_kv", layers)
    found["num_key_value_heads"] = max(heads)
    if any(count not in (0, max(heads)) for count in heads):
        raise ModelError(f"{read.metadata.path}: layers of {sorted(set(heads))} key heads; umbel runs hybrids with one")
    match architecture.recurrent:
        case RecurrentKind.CONVOLUTION:
            found["layer_types"] = _named(kinds, "conv", "full_attention")
            found |= {"conv_L_cache": read.integer("shortconv.l_cache"), "block_auto_adjust_ff_dim": False}
            found |= {"norm_eps": read.decimal("attention.layer_norm_rms_epsilon")}
        case RecurrentKind.MAMBA:
            words = ("mamba", "attention", "mlp" if architecture.experts is None else "moe")
            found["layers_block_type" if architecture.parts_alone else "layer_types"] = _named(kinds, *words)
            found |= _mamba(architecture, read)
        case RecurrentKind.DELTA_NET:
            found["layer_types"] = _named(kinds, "linear_attention", "full_attention")
            found |= _delta_net(read)
        case None:
            raise AssertionError("called for hybrids")
        case other:
            assert_never(other)
    return found


def _named(kinds: list[LayerKind], recurrent: str, attention: str, mlp: str = "") -> list[str]:
    names = {LayerKind.RECURRENT: recurrent, LayerKind.ATTENTION: attention, LayerKind.MLP: mlp}
    return [names[kind] for kind in kinds]


def _mamba(architecture: Architecture, read: Keys) -> Config:
    heads, head_dim = _heads(read)
    groups, states, kernel = (read.integer(f"ssm.{key}") for key in ("group_count", "state_size", "conv_kernel"))
    if architecture.model_type == "nemotron_h":
        return {
            "mamba_num_heads": heads,
            "mamba_head_dim": head_dim,
            "n_groups": groups,
            "ssm_state_size": states,
            "conv_kernel": kernel,
            "layer_norm_epsilon": read.decimal("attention.layer_norm_rms_epsilon"),
        }
    if read.flag("rope.scaling.finetuned", False):
        raise ModelError(
            f"{read.metadata.path}: Bamba is not supported as GGUF; use the model's safetensors folder instead"
        )
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": groups,
        "mamba_d_state": states,
        "mamba_d_conv": kernel,
    }


def _delta_net(read: Keys) -> Config:
    heads, head_dim = _heads(read)
    return {
        "linear_num_key_heads": read.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": read.integer("ssm.state_size"),
        "linear_value_head_dim": head_dim,
        "linear_conv_kernel_dim": read.integer("ssm.conv_kernel"),
    }


def _heads(read: Keys) -> tuple[int, int]:
    """Returns the heads of a memory, and the numbers of each."""
    heads, inner = read.integer("ssm.time_step_rank"), read.integer("ssm.inner_size")
    if heads < 1 or inner < 1 or inner % heads:
        raise ModelError(f"{read.metadata.path} is damaged: {heads} heads of {inner} numbers; download it again")
    return heads, inner // heads
