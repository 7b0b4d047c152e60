"""One forward pass, described whole: what the scheduler plans, the model runs and the oracle checks.

A step is a flat list of rows (query tokens). Each sequence contributes consecutive rows:

    sequence i:   slots[i] = [ ---- already in the pool ---- | --- rows of this step --- ]
                               prefix_lengths[i] keys           query_lengths[i] keys

Rows of a step may read keys that other rows of the same step write: every layer stores before it attends.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

DUMMY_SLOT = 0  # never handed out; rows whose key is already in the pool write here


@dataclass(frozen=True, slots=True)
class Batch:
    """All arrays are on the host. R rows, B sequences, L rows whose logits are needed."""

    token_ids: NDArray[np.int64]  # [R]
    positions: NDArray[np.int64]  # [R] logical position in the sequence
    write_slots: NDArray[np.int64]  # [R] where each row's key and value go; DUMMY_SLOT = nowhere
    query_lengths: NDArray[np.int32]  # [B] rows of each sequence, at least 1
    prefix_lengths: NDArray[np.int32]  # [B] keys before its first row
    slots: tuple[NDArray[np.int32], ...]  # B arrays [prefix + query]: physical slots in logical order
    logit_rows: NDArray[np.int64]  # [L] ascending rows of which the logits are needed
    # Radix path of each sequence, root first: (node id, first position, length). Empty: no grouping.
    paths: tuple[tuple[tuple[int, int, int], ...], ...] = ()

    @property
    def rows(self) -> int:
        return len(self.token_ids)


class Runner(Protocol):
    """A model and its KV pool. The fake is `oracle.OracleRunner`."""

    vocab_size: int
    context_length: int
    num_slots: int  # including DUMMY_SLOT

    def forward(self, batch: Batch) -> "object":
        """Run one step. Returns float32 logits, a torch tensor [L, vocab_size], valid until the next call."""

    def clear(self) -> None:
        """Forget the KV pool's content (after a failed step or a flush)."""
