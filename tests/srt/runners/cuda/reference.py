"""Implements attention and sampling for `CudaRunner` in plain torch, so that it runs, slowly, on any device.

The references of the decoder's kernels are in `kernels.triton.reference`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from umbel.srt.attention.backend import AttentionCounters, AttentionGeometry, TorchBackend, TorchPlan
from umbel.srt.attention.plan import Window
from umbel.srt.cache.kv_pool import FLOAT8, KVPool
from umbel.srt.core.batch import Batch, Draws
from umbel.srt.kernels.triton import reference
from umbel.srt.runners.cuda.build import Parts
from umbel.srt.sampling.gumbel import TorchSampling


@dataclass(slots=True)
class HeldPlan:
    """Stands for a plan at a fixed address: a reader gets the plan that was filled in last."""

    plan: TorchPlan | None = None


class ReferenceBackend:
    """Implements `graphs.GraphBackend` with `TorchBackend`; takes the same arguments as the one in Triton."""

    def __init__(
        self,
        geometry: AttentionGeometry,
        device: torch.device | str,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        tree_attention: bool = True,
        windows: Mapping[Window, AttentionGeometry] | None = None,
    ) -> None:
        del windows  # as the largest geometry, which all layers fit
        assert kv_dtype in (dtype, FLOAT8), "keys are as wide as queries, or float8"
        self._torch = TorchBackend(geometry, device, tree_attention=tree_attention)
        self.counters: AttentionCounters = self._torch.counters

    def plan(self, batch: Batch, window: Window) -> HeldPlan:
        return HeldPlan(self._torch.plan(batch, window))

    def reserve(self, window: Window, *, rows: int, keys: int, wide: bool = False) -> HeldPlan:
        del window, wide  # they decide how fast a device is
        assert rows > 0, "a step has rows"
        assert keys >= rows, "every row sees its own key"
        return HeldPlan()

    def plan_into(self, plan: HeldPlan, batch: Batch, window: Window) -> bool:
        plan.plan = self._torch.plan(batch, window)
        return True

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
