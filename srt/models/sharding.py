"""Splits a model over ranks while it is read: no rank ever holds the whole.

    rows of the weight (outputs)      queries, keys, values, gate, up         each rank computes some of the outputs
    columns of the weight (inputs)    attention's output, down                each rank reads these outputs of its own
                                                                              and the sums are added (`all_reduce`)
    rows of the vocabulary            embedding, head
    whole                             norms, routers, towers

Every rank has a slice of every expert, so all ranks have the same work, whatever the router chooses. With fewer key
heads than ranks, several ranks hold the same head and its keys.

To the code that builds it, the part of a rank is a model with fewer heads and narrower MLPs.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...lang.errors import ParameterError
from ..distributed.communicator import Communicator
from ..layers.checkpoint import Tensors
from ..layers.config_values import Config
from .decoder_config import DecoderConfig
from .families import FAMILIES, is_family, read_config

MOST_RANKS = 64

_OUTPUTS = frozenset({"q_proj", "gate_proj", "up_proj", "w1", "w3", "embed_tokens", "lm_head"})
_INPUTS = frozenset({"o_proj", "down_proj", "w2"})
_KEY_HEADS = frozenset({"k_proj", "v_proj"})
_OUTPUT_PAIRS = frozenset({"gate_up_proj"})  # of stacked experts: gate above up


def shard_range(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Returns the interval [first, end) of `size` rows that a rank has. Ranks differ by one row at most."""
    return size * rank // ranks, size * (rank + 1) // ranks


def require_shardable(config: Config, ranks: int) -> None:
    """Checks that a model can be split over `ranks` ranks.

    Raises:
        ModelError: a configuration that cannot be used.
        ParameterError: it cannot be split; the message says why, and which numbers of ranks are possible.
    """
    if not is_family(config):
        raise ParameterError(
            f"tensor_parallel={ranks}: {config.get('model_type')!r} runs in transformers, whose layers are not cut; "
            f"write tensor_parallel=1, or take a model of {', '.join(FAMILIES)}"
        )
    whole = read_config(config)
    reason = _obstacle(whole, ranks)
    if reason is not None:
        fitting = [str(count) for count in range(1, MOST_RANKS + 1) if _obstacle(whole, count) is None]
        raise ParameterError(f"tensor_parallel={ranks}: {reason}; write tensor_parallel={' or '.join(fitting)}")


def shard_config(config: Config, ranks: int) -> dict[str, Any]:
    """Returns the configuration of the model that one rank builds, with the whole vocabulary. Any: parsed JSON.

    Raises:
        ModelError, ParameterError: as `require_shardable`.
    """
    require_shardable(config, ranks)
    whole = read_config(config)
    share = dict(config)
    share["head_dim"] = whole.head_dim  # by default it follows from the number of heads
    share["num_attention_heads"] = whole.heads // ranks
    share["num_key_value_heads"] = max(1, whole.kv_heads // ranks)
    for key in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if isinstance(share.get(key), int) and share[key] % ranks == 0:  # the others are of MLPs that it has not
            share[key] //= ranks
    experts = next((layer.experts for layer in whole.layers if layer.experts is not None), None)
    if experts is not None and experts.shared_width:  # a configuration may leave it to its default
        share["shared_expert_intermediate_size"] = experts.shared_width // ranks
    return share


def _obstacle(config: DecoderConfig, ranks: int) -> str | None:
    """Returns why a model cannot be split over `ranks` ranks, as a clause; None: it can."""
    if config.heads % ranks:
        return f"its {config.heads} attention heads cannot be dealt out to {ranks} ranks evenly"
    if config.kv_heads % ranks and ranks % config.kv_heads:
        return f"its {config.kv_heads} key heads can be neither dealt out to {ranks} ranks evenly nor repeated"
    widths = {layer.experts.width for layer in config.layers if layer.experts is not None}
    widths |= {layer.experts.shared_width for layer in config.layers if layer.experts is not None}
    if any(layer.experts is None for layer in config.layers):
        widths.add(config.intermediate_size)
    for width in sorted(widths):
        if width % ranks:
            return f"its MLPs of width {width} cannot be cut into {ranks} equal slices"
    if config.vocab_size < ranks:
        return f"its vocabulary has {config.vocab_size} tokens only"
    return None


class ShardedTensors(Mapping[str, torch.Tensor]):
    """Presents a checkpoint as one rank reads it, under the same names.

    A part is a view where possible, so only its pages are read; it is copied when it is taken.

    Args:
        tensors: the whole checkpoint of a text model.
        config: of the whole model.
    """

    def __init__(self, tensors: Tensors, config: Config, communicator: Communicator) -> None:
        self._tensors = tensors
        self._communicator = communicator
        self._kv_heads = read_config(config).kv_heads

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        stem, _, kind = name.rpartition(".")
        leaf = stem.rpartition(".")[2] if kind in ("weight", "bias") else kind
        if leaf in _OUTPUTS:
            return self._slice(tensor, 0)
        if leaf in _KEY_HEADS:
            return self._key_heads(tensor)
        if leaf in _INPUTS:
            if kind == "bias":  # it is added once
                return tensor if self._communicator.rank == 0 else torch.zeros_like(tensor)
            return self._slice(tensor, tensor.dim() - 1)
        if leaf in _OUTPUT_PAIRS:
            return torch.cat([self._slice(half, 1) for half in tensor.chunk(2, dim=1)], dim=1)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _slice(self, tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        first, end = shard_range(tensor.shape[dimension], self._communicator.rank, self._communicator.ranks)
        return tensor.narrow(dimension, first, end - first)

    def _key_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the rows of this rank's key heads: some of them, or the one that it shares with other ranks."""
        rank, ranks = self._communicator.rank, self._communicator.ranks
        if self._kv_heads >= ranks:
            return self._slice(tensor, 0)
        size = len(tensor) // self._kv_heads
        return tensor.narrow(0, rank * self._kv_heads // ranks * size, size)
