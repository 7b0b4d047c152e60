"""Builds a model from a Hugging Face configuration and its tensors: umbel's decoder in torch, or transformers'."""

from typing import Any

import torch

from ...lang.errors import ModelError, ParameterError
from ..distributed.communicator import SINGLE_RANK, Communicator
from ..layers.checkpoint import Tensors
from ..layers.config_values import Config
from ..layers.linear import QuantMethod, can_pack
from .decoder import TorchDecoder
from .families import is_family, read_config
from .model import Model


def build_model(
    config: Config,
    tensors: Tensors,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    pack: bool | None = None,
    communicator: Communicator = SINGLE_RANK,
    method: QuantMethod[Any] | None = None,  # Any: only the method reads its weights
) -> Model:
    """Builds the model that `config["model_type"]` names.

    Args:
        config: config.json as a mapping.
        tensors: parameter name → tensor; may read each tensor lazily.
        dtype: of weights, activations and KV pool.
        device: holds weights and KV pool.
        pack: lay weights out for oneDNN; None: on a CPU that supports it for `dtype`. Models that run in transformers
            have no packed form.
        communicator: connects the ranks; `config` and `tensors` are those of this rank's part (sharding.py).

    Raises:
        ModelError: a configuration or tensors that cannot be used; the message says why.
    """
    target = torch.device(device)
    if config.get("quantization_config"):
        raise ModelError(
            f"quantization_config {config['quantization_config']!r}: packed weights cannot be read; "
            "load the unquantised checkpoint, or a GGUF file"
        )
    if is_family(config):
        offered = target.type == "cpu" and can_pack(dtype)
        if pack and not offered:
            raise ParameterError(f"pack=True: this machine cannot pack {dtype} on {target}; write pack=None")
        packed = offered if pack is None else pack
        decoder = read_config(config)
        return TorchDecoder(
            decoder, tensors, dtype=dtype, device=target, pack=packed, communicator=communicator, method=method
        )
    if pack:
        raise ParameterError(f"pack=True: {config.get('model_type')!r} runs in transformers; write pack=None")
    from .transformers_model import build_transformers_model  # imports transformers: seconds, so only when needed

    return build_transformers_model(config, tensors, dtype=dtype, device=target)
