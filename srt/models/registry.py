"""From a Hugging Face configuration and its tensors to a model: our own decoder, or transformers'."""

import torch

from .decoder import build_decoder
from .decoder_config import FAMILIES, Config
from .layers import can_pack
from .model import Model, Tensors


def build_model(
    config: Config,
    tensors: Tensors,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    pack: bool | None = None,
) -> Model:
    """Build the model that `config["model_type"]` names.

    Args:
        config: config.json as a mapping.
        tensors: parameter name to tensor; may read each tensor when it is asked for.
        dtype: of weights, activations and KV pool.
        device: where all of it lives.
        pack: lay weights out for oneDNN; None does so on a CPU that offers it for `dtype`. The transformers
            path ignores no choice: it refuses `pack=True`.

    Raises:
        ModelError: a configuration or tensors that cannot be used; the message says why.
    """
    target = torch.device(device)
    if config.get("model_type") in FAMILIES:
        packed = (target.type == "cpu" and can_pack(dtype)) if pack is None else pack
        return build_decoder(config, tensors, dtype=dtype, device=target, pack=packed)
    from .transformers_model import build_transformers_model  # imports transformers: seconds, so only when needed

    return build_transformers_model(config, tensors, dtype=dtype, device=target)
