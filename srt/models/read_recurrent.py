"""Reads the fields of layers with a recurrent state, as `read_fields.py` does those that all families have."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...lang.errors import ModelError
from ..layers.config_values import GGUF_LAYOUT, Config, flag, positive_int
from ..layers.linear import ACTIVATIONS
from .decoder_config import LayerConfig
from .recurrent_config import DeltaNetConfig, MambaConfig, Recurrent

LINEAR = "linear_attention"  # the name of transformers for layers of several kinds of recurrent states
_MOST = 1 << 20  # of one size; a state of several such sizes would be larger than any memory


def with_recurrent(
    layers: Sequence[LayerConfig], kinds: Sequence[str], kind: str, recurrent: Recurrent
) -> tuple[LayerConfig, ...]:
    """Returns the layers, those of one kind with a recurrent state in place of attention."""
    if all(each == kind for each in kinds):
        raise ModelError(f"layer_types: all layers are {kind!r}; the decoders need at least one that attends")
    return tuple(
        replace(layer, recurrent=recurrent) if each == kind else layer
        for layer, each in zip(layers, kinds, strict=True)
    )


def read_kernel(config: Config, key: str, default: int) -> int:
    """Reads the number of tokens that a convolution looks at."""
    kernel = positive_int(config, key, default, most=_MOST)
    if kernel < 2:
        raise ModelError(f"configuration: {key}={kernel}; write 2 or more, the tokens that the convolution looks at")
    return kernel


def read_delta_net(config: Config, *, interleaved: bool) -> DeltaNetConfig:
    """Reads the gated delta nets of Qwen's configurations.

    Args:
        interleaved: checkpoints of the family are, see `DeltaNetConfig`.
    """
    of_file = config.get(GGUF_LAYOUT, False) is True
    net = DeltaNetConfig(
        name="linear_attn",
        key_heads=positive_int(config, "linear_num_key_heads", 16, most=_MOST),
        value_heads=positive_int(config, "linear_num_value_heads", 32, most=_MOST),
        key_dim=positive_int(config, "linear_key_head_dim", 128, most=_MOST),
        value_dim=positive_int(config, "linear_value_head_dim", 128, most=_MOST),
        kernel=read_kernel(config, "linear_conv_kernel_dim", 4),
        interleaved=interleaved and not of_file,
        interleaved_rates=interleaved,
        tiled=of_file and not interleaved,
    )
    if net.value_heads % net.key_heads:
        raise ModelError(
            f"linear_num_value_heads={net.value_heads} is not a multiple of linear_num_key_heads={net.key_heads}"
        )
    return net


@dataclass(frozen=True, slots=True)
class MambaKeys:
    """The keys of a configuration that describe its Mamba 2 layers. The defaults are those of Bamba and Granite 4."""

    name: str = "mamba"  # of the layer, not a key
    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state_size: str = "mamba_d_state"
    kernel: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"
    activation: str = "hidden_act"


def read_mamba(
    config: Config, keys: MambaKeys, *, limits: tuple[float, float], state_size: int, groups: int = 1
) -> MambaConfig:
    """Reads Mamba 2 layers.

    Args:
        limits: of the time step.
        state_size, groups: the defaults of the family.
    """
    heads = positive_int(config, keys.heads, 128, most=_MOST)
    stated = config.get(keys.head_dim)
    head_dim = positive_int(config, keys.head_dim, 64, most=_MOST) if stated not in (None, "auto") else None
    if head_dim is None:
        width = positive_int(config, "mamba_expand", 2) * positive_int(config, "hidden_size")
        if width % heads:
            raise ModelError(f"{keys.heads}={heads} does not divide mamba_expand · hidden_size = {width}")
        head_dim = width // heads
    activation = str(config.get(keys.activation) or "silu")
    if activation not in ACTIVATIONS:
        raise ModelError(f"{keys.activation} {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    mamba = MambaConfig(
        name=keys.name,
        heads=heads,
        head_dim=head_dim,
        groups=positive_int(config, keys.groups, groups, most=_MOST),
        state_size=positive_int(config, keys.state_size, state_size, most=_MOST),
        kernel=read_kernel(config, keys.kernel, 4),
        conv_bias=flag(config, keys.conv_bias, True),
        biased=flag(config, "mamba_proj_bias", False),
        activation=activation,
        least_step=limits[0],
        most_step=limits[1],
    )
    if mamba.heads % mamba.groups:
        raise ModelError(f"{keys.heads}={mamba.heads} is not a multiple of {keys.groups}={mamba.groups}")
    return mamba


def read_step_limits(config: Config) -> tuple[float, float]:
    """Reads `time_step_limit`, two numbers; absent or null: a step may be any."""
    limits = config.get("time_step_limit")
    if limits is None:
        return 0.0, float("inf")
    parts = [_number(part) for part in limits] if isinstance(limits, list | tuple) else []
    if len(parts) != 2 or not 0 <= parts[0] < parts[1]:
        raise ModelError(f"configuration: time_step_limit={limits!r}; write two numbers, the smaller one first")
    return parts[0], parts[1]


def _number(value: object) -> float:
    """Returns a number of a configuration, which spells infinity in several ways; −1 for what is none."""
    if isinstance(value, dict):
        value = value.get("__float__")
    if isinstance(value, str) and value.lower() in ("inf", "infinity"):
        return float("inf")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value == value else -1.0
