"""What fits on a device: the weights, the work of the largest step, and of the rest a KV pool.

| weights | work of a step | features | KV pool                                   | left: graphs, fragments |
          '-------- measured ---------'-- POOL_SHARE of what is left of the rest -'

A tower works before the decoder does, so a step takes what the larger of the two takes.
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

POOL_SHARE = 0.92  # of what weights and the largest step leave
MOST_POOL_TOKENS = 1 << 20  # unless asked for: the check of the whole pool at idle walks all of it


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that there will be."""

    rows: int = 576  # prompt tokens of a chunk, and a row of every sequence that decodes
    sequences: int = 64
    logits: int = 256  # rows


def require_room_for_weights(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, accelerator: Accelerator) -> None:
    """Before anything is read.

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
    """Of all tensors in the dtype in which the model computes."""
    return sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize


def measured_workspace(
    probe: Runner, accelerator: Accelerator, limits: StepLimits, pictures: VisionStore | None = None
) -> int:
    """Bytes that the largest step takes. Its pool is the probe's, who is not needed any more afterwards.

    Args:
        probe: the model with a pool of `probe_slots(limits)`.
        pictures: what sees for it; None: it reads text only.
    """
    step = largest_step(limits, probe.context_length)
    probe.forward(step)  # the first one compiles kernels, and makes what libraries keep
    workspace = accelerator.peak_memory(lambda: probe.forward(step))
    if pictures is not None:
        pictures.see_largest()
        workspace = max(workspace, accelerator.peak_memory(pictures.see_largest)) + pictures.feature_bytes
    # While a step runs, the logits of the one before it may still be read.
    return workspace + len(step.logit_rows) * probe.vocab_size * 4


def probe_slots(limits: StepLimits) -> int:
    return limits.rows + 1


def largest_step(limits: StepLimits, context_length: int) -> Batch:
    """Prompts of as many rows together as a step has."""
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
    """How many slots the KV pool gets when no option says, with the weights loaded.

    Args:
        workspace: bytes that are left next to it.

    Raises:
        ParameterError: there is too little memory for a pool that is of any use.
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
