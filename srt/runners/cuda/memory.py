"""Divides a device's memory: the weights, the workspace of the largest step, and the KV pool from the rest.

| weights | workspace      | features | KV pool                                   | left: graphs, fragments |
          '-------- measured ---------'-- POOL_SHARE of the rest -----------------'

The tower runs before the decoder, so the workspace of a step is that of the larger one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ....lang.errors import ParameterError
from ...cache.kv_pool import KVGeometry, slots_for_bytes
from ...core.batch import Batch, Runner
from ...multimodal.store import VisionStore
from .device import Accelerator

POOL_SHARE = 0.92  # of the memory that weights and the largest step leave
MOST_POOL_TOKENS = 1 << 20  # unless an option gives the size: the idle check walks the whole pool


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The size of the largest step."""

    rows: int = 576  # prompt tokens of a chunk, and a row of every sequence that decodes
    sequences: int = 64
    logits: int = 256  # rows


def require_room_for_weights(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, accelerator: Accelerator) -> None:
    """Checks that the weights fit, before any tensor is read.

    Raises:
        ParameterError: they do not fit; the message has the numbers and what to write.
    """
    needed, free = weight_bytes(tensors, dtype), accelerator.free_memory()
    if needed > free:
        raise shortage(needed, free, dtype, accelerator)


def shortage(needed: int, free: int, dtype: torch.dtype, accelerator: Accelerator) -> ParameterError:
    smaller = 'write dtype="bfloat16" for half of them, ' if dtype is torch.float32 else ""
    return ParameterError(
        f"the weights take {needed} bytes in {str(dtype).removeprefix('torch.')}, {accelerator.name} has {free} free; "
        f"{smaller}spread the model over several devices with tensor_parallel, or take a smaller one"
    )


def weight_bytes(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> int:
    """Returns the bytes of all tensors in the model's dtype."""
    return sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize


def measured_workspace(
    probe: Runner, accelerator: Accelerator, limits: StepLimits, pictures: VisionStore | None = None
) -> int:
    """Measures the bytes that the largest step takes, on a probe that is discarded afterwards.

    Args:
        probe: the model with a pool of `probe_slots(limits)`.
        pictures: the store with the vision tower; None: the model reads text only.
    """
    step = largest_step(limits, probe.context_length)
    probe.forward(step)  # the first one compiles kernels and allocates the libraries' workspaces
    workspace = accelerator.peak_memory(lambda: probe.forward(step))
    if pictures is not None:
        pictures.see_largest()
        workspace = max(workspace, accelerator.peak_memory(pictures.see_largest)) + pictures.feature_bytes
    # While a step runs, the logits of the previous one may still be read.
    return workspace + len(step.logit_rows) * probe.vocab_size * 4


def probe_slots(limits: StepLimits) -> int:
    return limits.rows + 1


def largest_step(limits: StepLimits, context_length: int) -> Batch:
    """Builds a batch of prompts with as many rows in total as a step may have."""
    lengths = [context_length] * (limits.rows // context_length)
    if limits.rows % context_length:
        lengths.append(limits.rows % context_length)
    ends = np.cumsum(lengths)
    slots = np.arange(1, limits.rows + 1, dtype=np.int32)
    return Batch(
        token_ids=np.zeros(limits.rows, dtype=np.int64),
        positions=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        write_slots=slots.astype(np.int64),
        query_lengths=np.array(lengths, dtype=np.int32),
        prefix_lengths=np.zeros(len(lengths), dtype=np.int32),
        slots=tuple(np.split(slots, ends[:-1])),
        logit_rows=np.arange(max(0, limits.rows - limits.logits), limits.rows, dtype=np.int64),
    )


def pool_slots(geometry: KVGeometry, accelerator: Accelerator, *, workspace: int) -> int:
    """Returns the number of slots of the KV pool when no option gives it, with the weights loaded.

    Args:
        workspace: bytes to leave for steps.

    Raises:
        ParameterError: there is too little memory for a usable pool.
    """
    free = accelerator.free_memory()
    try:
        slots = slots_for_bytes(geometry, int(POOL_SHARE * max(0, free - workspace)))
    except ParameterError as error:
        raise ParameterError(
            f"{accelerator.name} has {free} bytes free beside the weights, and the largest step takes {workspace} of "
            f'them: {error}; make room by a smaller chunk_size or max_running, by kv_dtype="fp8" or by tensor_parallel'
        ) from error
    return min(slots, MOST_POOL_TOKENS + 1)
