"""Implements attention and sampling for `CudaRunner` in plain torch, so that it runs, slowly, on any device.

The references of the decoder's kernels are in `kernels.triton.reference`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from umbel.srt.attention.backend import AttentionCounters, AttentionGeometry, TorchBackend, TorchPlan
from umbel.srt.attention.plan import Window, visible_intervals
from umbel.srt.cache.kv_pool import FLOAT8, KVPool
from umbel.srt.core.batch import Batch, Draws
from umbel.srt.kernels.triton import reference
from umbel.srt.runners.cuda.build import Parts
from umbel.srt.runners.cuda.slot_table import SlotTable
from umbel.srt.sampling.sampler import TorchSampling


@dataclass(slots=True)
class HeldPlan:
    """Stands for a plan at a fixed address: a reader gets the plan that was filled in last, and of which batch."""

    plan: TorchPlan | None = None
    batch: Batch | None = None
    window: Window = None


class ReferenceBackend:
    """Implements `graphs.GraphBackend` with `TorchBackend`; takes the same arguments as the one in Triton.

    It reads the slots of the batch, after it has compared them with those in the table.
    """

    def __init__(
        self,
        geometry: AttentionGeometry,
        device: torch.device | str,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        tree_attention: bool = True,
        torch_prompts: bool = True,
        windows: Mapping[Window, AttentionGeometry] | None = None,
    ) -> None:
        del windows, torch_prompts  # as the largest geometry, which all layers fit; all attend in torch
        assert kv_dtype in (dtype, FLOAT8), "keys are as wide as queries, or float8"
        self._torch = TorchBackend(geometry, device, tree_attention=tree_attention)
        self.counters: AttentionCounters = self._torch.counters
        self._table: SlotTable | None = None

    def use_table(self, table: SlotTable) -> None:
        self._table = table

    def plan(self, batch: Batch, window: Window) -> HeldPlan:
        return HeldPlan(self._torch.plan(replace(batch, places=None), window), batch, window)

    def reserve(self, window: Window, *, rows: int, wide: bool = False) -> HeldPlan:
        del window, wide  # they decide how fast a device is
        assert rows > 0, "a step has rows"
        return HeldPlan()

    def plan_into(self, plan: HeldPlan, batch: Batch, window: Window) -> bool:
        assert batch.places is not None, "captured steps read the table"
        held = self.plan(batch, window)
        plan.plan, plan.batch, plan.window = held.plan, held.batch, held.window
        return True

    def _compare(self, plan: HeldPlan) -> None:
        """Compares the slots of keys that some row sees with those in the table."""
        batch = plan.batch
        if batch is None or batch.places is None:
            return
        assert self._table is not None, "the batch has been placed"
        table = self._table.slots_of(windowed=plan.window is not None).numpy()
        low, _, first_row = visible_intervals(batch, plan.window)
        slots = batch.slots_of(windowed=plan.window is not None)
        for place, own, seen in zip(batch.places.tolist(), slots, low[first_row].tolist(), strict=True):
            np.testing.assert_array_equal(table[place + seen : place + len(own)], own[seen:])

    def store(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor | None, pool: KVPool, slots: torch.Tensor
    ) -> None:
        self._torch.store(layer, keys, values, pool, slots)

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        pool: KVPool,
        plan: HeldPlan,
        *,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert plan.plan is not None, "a reserved plan is filled before it is read"
        self._compare(plan)
        return self._torch.attend(layer, queries, pool, plan.plan, scale=scale, softcap=softcap, sinks=sinks, out=out)


class ReferenceChooser(TorchSampling):
    """Implements `DeviceChooser` by waiting for the tokens.

    Raises:
        LogitsError: the logits of a row are not numbers.
    """

    def choose_async(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        return torch.from_numpy(self.choose(logits, draws)).to(logits.device)


def reference_parts() -> Parts:
    """The references in plain torch, which run on any device."""
    return Parts("reference of triton", reference, ReferenceChooser, ReferenceBackend, anywhere=True)
