"""Describes the tensors of a decoder by their names in the checkpoint. All three executors read this description.

    embedding → layers × [ norm → qkv → (head norms) → rope → attention → output → (norm) → +
                           norm → gate_up → activation → down → (norm) → + ] → norm → head

Only some families have the parts in brackets. Several maps (queries, keys and values; gate and up) are one product.
"""

from dataclasses import dataclass

from ..layers.checkpoint import LinearTensors
from .decoder_config import DecoderConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer. Norms are the full names of their weights, [hidden] or [head_dim]; None: there is no such norm."""

    prefix: str  # of all names
    before_attention: str
    qkv: LinearTensors
    query_norm: str | None
    key_norm: str | None
    output: LinearTensors
    after_attention: str | None
    before_mlp: str
    gate_up: LinearTensors  # this and `down`: of a dense MLP; experts read their own, see `experts.py`
    down: LinearTensors
    after_mlp: str | None


def layer_tensors(config: DecoderConfig, index: int) -> LayerTensors:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    hidden, wide = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def norm(name: str) -> str:
        return f"{prefix}.{name}.weight"

    def optional(name: str | None) -> str | None:
        return None if name is None else norm(name)

    return LayerTensors(
        prefix=prefix,
        before_attention=norm(config.norms.before_attention),
        qkv=LinearTensors(
            (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            (queries, keys, keys),
            hidden,
            config.qkv_bias,
        ),
        query_norm=f"{attention}.q_norm.weight" if config.qk_norm else None,
        key_norm=f"{attention}.k_norm.weight" if config.qk_norm else None,
        output=LinearTensors((f"{attention}.o_proj",), (hidden,), queries, config.output_bias),
        after_attention=optional(config.norms.after_attention),
        before_mlp=norm(config.norms.before_mlp),
        gate_up=LinearTensors((f"{mlp}.gate_proj", f"{mlp}.up_proj"), (wide, wide), hidden, config.mlp_bias),
        down=LinearTensors((f"{mlp}.down_proj",), (hidden,), wide, config.mlp_bias),
        after_mlp=optional(config.norms.after_mlp),
    )


def landmarks(config: DecoderConfig) -> list[str]:
    """Returns names that show, before any tensor is read, whether the checkpoint is of this family and complete."""
    names = [EMBEDDING, FINAL_NORM]
    if not config.tied:
        names.append(HEAD)
    for index, layer in enumerate(config.layers):
        tensors = layer_tensors(config, index)
        names += [tensors.before_attention, f"{tensors.qkv.names[0]}.weight"]
        if layer.experts is None:  # experts are spelled in several ways: see `experts.py`
            names.append(f"{tensors.down.names[0]}.weight")
    return names


def unused(config: DecoderConfig) -> frozenset[str]:
    """Returns the names that a checkpoint may contain although the model does not read them."""
    return frozenset({HEAD}) if config.tied else frozenset()
