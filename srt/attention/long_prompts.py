"""Attention of long prompts by torch: keys and values are gathered into one piece, which torch's fused kernel reads.

    pool       | k7 | k2 | … | k0 | … | k5 |        the slots of a sequence lie scattered
    scratch    | k0 | k1 | k2 | … | k7 |            some KV heads of it, SCRATCH_BYTES at most
    torch            rows                           the last row sees all keys, each row one less than the next
                     [====··]
                     [=====·]
                     [======]

On an H100 our kernel, which gathers while it multiplies, reaches 0.70 of torch's rate with keys in one piece. So torch
saves 0.43 of its own time, and gathering costs two passes over the keys. With T products and B bytes a second (H100:
600e12 and 3.35e12, so T / B = 180), n query vectors for each key (rows × heads of a group), of which half see it in a
prompt without a prefix, and D numbers in a head, in 16 bits:

    saved      0.43 · n / 2 · 4 D / T         gathered      2 · 2 · 2 D / B         equal at n = 9.3 · T / B = 1,700

LEAST_VECTORS is somewhat more. It is a rule of one card's numbers; on others it was not measured.

Steps that run as captured graphs attend by our kernel: lengths are constants of torch's calls. They have 1,024 rows at
most, where there is little to gain; larger ones run without a graph. Our kernel also has steps in which some sequence
is short, so all that decode, and windows, logits with a cap, sinks, latents, float8 and float32.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from ..cache.kv_pool import KVGeometry, LayerKV
from ..core.batch import Batch
from .backend import AttentionCounters
from .plan import Window

LEAST_VECTORS = 2048  # rows of a prompt × query heads that share a KV head
SCRATCH_BYTES = 128 << 20  # of gathered keys and values: one head of 128 numbers of 262,144 keys in 16 bits
MOST_HEAD_DIM = 256  # of torch's flash kernel, which takes multiples of HEAD_DIM_UNIT
HEAD_DIM_UNIT = 8
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """The rows [first, end) of a step, of one sequence, and the slots of its keys: int32 [keys], those of rows last."""

    first: int
    end: int
    slots: torch.Tensor


class GatheredPrompts:
    """Attends in steps of long prompts alone.

    Args:
        prompts: all sequences of the step.
        counters: count them, once some layer attends here.
    """

    def __init__(self, prompts: tuple[LongPrompt, ...], counters: AttentionCounters) -> None:
        self._prompts = prompts
        self._least_rows = min(prompt.end - prompt.first for prompt in prompts)
        self._most_keys = max(len(prompt.slots) for prompt in prompts)
        self._counters: AttentionCounters | None = counters

    def takes(self, queries: torch.Tensor, layer: LayerKV, kv_dtype: torch.dtype) -> bool:
        """Returns whether torch computes a layer without cap and sinks. queries: [R, heads, head_dim]"""
        return (
            _suits(layer, kv_dtype)
            and queries.dtype is kv_dtype
            and self._least_rows * (queries.shape[1] // layer.kv_heads) >= LEAST_VECTORS
            and self._most_keys * _head_bytes(layer, kv_dtype) <= SCRATCH_BYTES
        )

    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float, out: torch.Tensor
    ) -> None:
        """Writes [R, heads, head_dim] to `out`. keys, values: [slots, kv_heads, head_dim] of a layer of the pool."""
        if self._counters is not None:
            self._counters.torch_prompts += len(self._prompts)
            self._counters = None
        for prompt in self._prompts:
            rows = slice(prompt.first, prompt.end)
            attend_long(queries[rows], keys, values, prompt.slots, scale=scale, out=out[rows])


def long_prompts(
    batch: Batch, window: Window, table: torch.Tensor, *, group: int, counters: AttentionCounters
) -> GatheredPrompts | None:
    """Returns the prompts of a step whose sequences all are long ones; None: one is not, or a row sees other keys.

    Args:
        batch: its sequences have `places`.
        table: int32, has their slots when the step runs.
        group: query heads that share a KV head, at most.
    """
    if batch.places is None or window is not None or any(batch.spans):
        return None
    if int(batch.query_lengths.min()) * group < LEAST_VECTORS:
        return None
    if batch.generated is not None and batch.generated.any():  # they are to have the bits of rows that decode
        return None
    counts, prefixes, places = (part.tolist() for part in (batch.query_lengths, batch.prefix_lengths, batch.places))
    prompts, first = [], 0
    for count, prefix, place in zip(counts, prefixes, places, strict=True):
        prompts.append(LongPrompt(first, first + count, table[place : place + prefix + count]))
        first += count
    return GatheredPrompts(tuple(prompts), counters)


def attend_long(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attends the last rows of one sequence to all its keys, some KV heads at a time.

    Args:
        queries: [N, heads, head_dim].
        keys, values: [pool slots, kv_heads, head_dim], in one piece.
        slots: int32 [keys], at least N.
        out: [N, heads, head_dim], is written.
    """
    rows, kv_heads, head_dim = len(queries), keys.shape[1], keys.shape[2]
    count, group = len(slots), queries.shape[1] // kv_heads
    most = max(1, SCRATCH_BYTES // (2 * count * head_dim * keys.element_size()))
    mask = causal_lower_right(rows, count)
    for first in range(0, kv_heads, most):
        end = min(first + most, kv_heads)
        heads = torch.arange(first, end, dtype=slots.dtype, device=slots.device)
        places = (slots * kv_heads + heads[:, None]).view(-1)  # of the heads' numbers, one head after another
        key, value = (
            part.view(-1, head_dim).index_select(0, places).view(1, end - first, count, head_dim)
            for part in (keys, values)
        )
        own = slice(first * group, end * group)
        attended = functional.scaled_dot_product_attention(
            queries[:, own].transpose(0, 1)[None], key, value, attn_mask=mask, scale=scale, enable_gqa=group > 1
        )
        out[:, own] = attended[0].transpose(0, 1)


def scratch_bytes(geometry: KVGeometry, dtype: torch.dtype, context_length: int) -> int:
    """Returns the most bytes of keys and values that are gathered at once. dtype: of queries."""
    if dtype is not geometry.dtype:
        return 0
    sizes = [
        context_length * layer.kv_heads * _head_bytes(layer, dtype)
        for layer in geometry.layers
        if _suits(layer, dtype) and not layer.windowed
    ]
    return min(SCRATCH_BYTES, max(sizes, default=0))


def _suits(layer: LayerKV, kv_dtype: torch.dtype) -> bool:
    """Returns whether torch's kernel takes the heads of a layer."""
    even = layer.head_dim == layer.value_dim and layer.head_dim % HEAD_DIM_UNIT == 0
    return kv_dtype in DTYPES and even and layer.head_dim <= MOST_HEAD_DIM and not layer.latent


def _head_bytes(layer: LayerKV, kv_dtype: torch.dtype) -> int:
    """Returns the bytes of a key and a value of one head."""
    return (layer.head_dim + layer.value_dim) * kv_dtype.itemsize
