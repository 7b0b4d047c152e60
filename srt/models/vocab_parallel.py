"""Splits embedding and head by tokens over the ranks.

A rank embeds the tokens that it has, with zeros for the others; the sum over ranks is exact, because all but one of its
terms are zero. Each rank computes the logits of its tokens, and rank 0, which samples, gathers all of them.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from ..distributed.communicator import Communicator
from ..layers.linear import HEAD_ROWS
from .sharding import shard_range


class VocabParallelEmbedding:
    """Embeds token ids as rows of a matrix in the model's dtype.

    Args:
        weight: [own tokens, hidden] the part of this rank; with one rank all of it.
        vocab_size: of the whole model.
    """

    def __init__(
        self, weight: torch.Tensor, *, vocab_size: int, dtype: torch.dtype, communicator: Communicator
    ) -> None:
        self._weight = weight
        self._dtype = dtype
        self._communicator = communicator
        self._first, _ = shard_range(vocab_size, communicator.rank, communicator.ranks)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [R] → [R, hidden]"""
        if self._communicator.ranks == 1:
            return functional.embedding(token_ids, self._weight).to(self._dtype)
        places = token_ids - self._first
        elsewhere = (places < 0) | (places >= len(self._weight))
        rows = functional.embedding(places.masked_fill(elsewhere, 0), self._weight).to(self._dtype)
        return self._communicator.all_reduce(rows.masked_fill(elsewhere[:, None], 0))


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
