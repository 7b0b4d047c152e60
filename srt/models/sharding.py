"""Splits a model over ranks while it is read: no rank ever holds the whole.

    rows of the weight (outputs)      queries, keys, values, gate, up         each rank computes some of the outputs
    columns of the weight (inputs)    attention's output, down                each rank reads these outputs of its own
                                                                              and the sums are added (`all_reduce`)
    rows of the vocabulary            embedding, head
    whole                             norms, routers, towers

Every rank has a slice of every expert, so all ranks have the same work, whatever the router chooses. With fewer key
heads than ranks, several ranks hold the same head and its keys.

To the code that builds it, the part of a rank is a model with fewer heads and narrower MLPs.

A rank embeds the tokens that it has, with zeros for the others; the sum over ranks is exact, because all but one of its
terms are zero. Each rank computes the logits of its tokens, and rank 0, which samples, gathers all of them.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional

from ...lang.errors import ParameterError
from ..core.batch import Given
from ..distributed.communicator import Communicator
from ..layers.checkpoint import Tensors
from ..layers.config_values import Config
from ..layers.linear import HEAD_ROWS
from ..layers.quantized import QuantizedTensor
from .decoder_config import DecoderConfig, ExpertNames, uncut_part
from .families import FAMILIES, is_family, read_config

MOST_RANKS = 64

_OUTPUTS = frozenset({"q_proj", "gate_proj", "up_proj", "w1", "w3", "embed_tokens", "lm_head"})
_INPUTS = frozenset({"o_proj", "down_proj", "w2", "output_linear"})
_KEY_HEADS = frozenset({"k_proj", "v_proj"})
_OUTPUT_PAIRS = frozenset({"gate_up_proj", "input_linear"})  # gate above up; of stacked experts, too
_QKV = frozenset({"qkv_proj"})  # queries above keys above values


# Keys of the configuration that are cut like MLPs.
_WIDTHS = (
    *("intermediate_size", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "shared_intermediate_size"),
)


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
    for key in _WIDTHS:
        if isinstance(share.get(key), int) and share[key] % ranks == 0:  # the others are of MLPs that it has not
            share[key] //= ranks
    experts = next((layer.experts for layer in whole.layers if layer.experts is not None), None)
    if experts is not None and experts.shared_width:  # a configuration may leave it to its default
        share["shared_expert_intermediate_size"] = experts.shared_width // ranks
    return share


def _obstacle(config: DecoderConfig, ranks: int) -> str | None:
    """Returns why a model cannot be split over `ranks` ranks, as a clause; None: it can."""
    if config.value_norm:
        return None if ranks == 1 else "its layers differ in heads and share keys, and are not cut"
    if config.latent is not None:
        return None if ranks == 1 else "its latents are those of all heads, and are not cut"
    if config.sinks or any(layer.experts and layer.experts.names != ExpertNames() for layer in config.layers):
        return None if ranks == 1 else "its attention sinks, or experts with names of their own, are not cut"
    if (parts := uncut_part(config)) is not None and ranks > 1:
        return f"it has {parts}, which are not cut"
    if config.heads % ranks:
        return f"its {config.heads} attention heads cannot be dealt out to {ranks} ranks evenly"
    if config.kv_heads % ranks and ranks % config.kv_heads:
        return f"its {config.kv_heads} key heads can be neither dealt out to {ranks} ranks evenly nor repeated"
    if config.qk_norm_whole and ranks > 1:
        return "its queries are normalised over all heads, which no rank has"
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
        whole = read_config(config)
        self._kv_heads = whole.kv_heads
        self._qkv_rows = [whole.heads * whole.head_dim, *[whole.kv_heads * whole.head_dim] * 2]

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
            outputs = max(tensor.dim() - 2, 0)  # the dimension of outputs: of a bias, a matrix, a stack of matrices
            halves = tensor.chunk(2, dim=outputs)
            return torch.cat([self._slice(half, outputs) for half in halves], dim=outputs)
        if leaf in _QKV:
            queries, keys, values = torch.split(tensor, self._qkv_rows)
            return torch.cat([self._slice(queries, 0), self._key_heads(keys), self._key_heads(values)])
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


class VocabParallelEmbedding:
    """Embeds token ids as rows of a matrix in the model's dtype, and puts the rows of pictures in their places.

    Args:
        weight: [own tokens, hidden] the part of this rank; with one rank all of it.
    """

    def __init__(
        self,
        weight: torch.Tensor | QuantizedTensor,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        communicator: Communicator,
    ) -> None:
        self._weight = weight
        self._dtype = dtype
        self._communicator = communicator
        self._first, _ = shard_range(config.vocab_size, communicator.rank, communicator.ranks)
        self._scale = None
        if config.embedding_scale is not None:  # rounded to the model's dtype before the product, as trained
            device = weight.codes.device if isinstance(weight, QuantizedTensor) else weight.device
            self._scale = torch.tensor(config.embedding_scale, dtype=dtype, device=device)

    def __call__(self, token_ids: torch.Tensor, given: Given | None) -> torch.Tensor:
        """int64 [R] → [R, hidden]"""
        x = self._of_tokens(token_ids)
        if self._scale is not None:
            x = x * self._scale
        return x if given is None else x.index_copy_(0, given.rows, given.values)

    def _of_tokens(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self._communicator.ranks == 1:
            return self._rows(token_ids)
        places = token_ids - self._first
        elsewhere = (places < 0) | (places >= self._weight.shape[0])
        rows = self._rows(places.masked_fill(elsewhere, 0))
        return self._communicator.all_reduce(rows.masked_fill(elsewhere[:, None], 0))

    def _rows(self, places: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        rows = weight.take(places) if isinstance(weight, QuantizedTensor) else functional.embedding(places, weight)
        return rows.to(self._dtype)


class VocabParallelHead:
    """Computes logits of the whole vocabulary, complete on rank 0 and undefined on the others.

    Args:
        head: computes the logits of this rank's tokens into its second argument.
    """

    def __init__(
        self, head: Callable[[torch.Tensor, torch.Tensor], None], *, vocab_size: int, communicator: Communicator
    ) -> None:
        self._head = head
        self._communicator = communicator
        self._ranges = [shard_range(vocab_size, rank, communicator.ranks) for rank in range(communicator.ranks)]
        self._widest = max(end - first for first, end in self._ranges)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [L, hidden] → out [L, vocab]"""
        if self._communicator.ranks == 1:
            self._head(x, out)
            return
        if not len(x):
            return
        first, end = self._ranges[self._communicator.rank]
        for rows, target in zip(torch.split(x, HEAD_ROWS), torch.split(out, HEAD_ROWS), strict=True):
            part = out.new_zeros((len(rows), self._widest))  # parts of one shape, though some have a token less
            self._head(rows, part[:, : end - first])
            parts = self._communicator.gather(part)
            for (start, stop), other in zip(self._ranges[: len(parts)], parts, strict=True):
                target[:, start:stop] = other[:, : stop - start]
