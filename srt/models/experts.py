"""Runs mixtures of experts, MLPs of which every token uses a few: Mixtral, Qwen 2 MoE and Qwen 3 MoE.

    router(x) → weights and experts of each token → Σ weight · expert(x)   [ + sigmoid(gate(x)) · shared(x) ]

Checkpoints spell the same tensors in three ways, and all are read:

    stacked        mlp.experts.gate_up_proj  [E, 2 width, hidden]     mlp.experts.down_proj  [E, hidden, width]
    one by one     mlp.experts.3.gate_proj.weight, up_proj, down_proj
    Mixtral's own  block_sparse_moe.experts.3.w1.weight (gate), w3 (up), w2 (down)
"""

from typing import Protocol

import torch
from torch.nn import functional

from ..kernels.triton import reference
from ..layers.checkpoint import Checkpoint, LinearTensors
from ..layers.linear import ACTIVATIONS
from .decoder_config import ExpertsConfig


class ExpertKernels(Protocol):
    """The kernels of experts: the module `kernels.triton.moe`, or its reference, `kernels.triton.reference`."""

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def route(self, logits: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]: ...

    def fused_experts(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        *,
        activation: str,
    ) -> torch.Tensor: ...


def expert_kernels(device: torch.device) -> ExpertKernels:
    """Returns the Triton kernels on a CUDA device if Triton is installed, else those in torch."""
    if device.type == "cuda":
        try:
            from ..kernels.triton import moe
        except ModuleNotFoundError:  # the wheels of some systems come without Triton
            return reference
        return moe
    return reference


class Experts:
    """The MLP of one layer.

    Args:
        prefix: of the layer's names in the checkpoint, `model.layers.3`.
        activation: one of `linear.ACTIVATIONS`.

    Raises:
        ModelError: tensors that are missing or have other shapes.
    """

    def __init__(
        self,
        prefix: str,
        config: ExpertsConfig,
        weights: Checkpoint,
        *,
        hidden: int,
        activation: str,
        kernels: ExpertKernels,
    ) -> None:
        self._config = config
        self._activation = activation
        self._kernels = kernels
        sparse = f"{prefix}.block_sparse_moe"
        block = sparse if weights.holds(f"{sparse}.gate.weight") else f"{prefix}.mlp"
        self._router = weights.take(f"{block}.gate.weight", config.count, hidden)
        if weights.holds(f"{block}.experts.gate_up_proj"):
            shape = config.count, 2 * config.width, hidden
            self._gate_up = weights.take(f"{block}.experts.gate_up_proj", *shape).contiguous()
            shape = config.count, hidden, config.width
            self._down = weights.take(f"{block}.experts.down_proj", *shape).contiguous()
        else:
            self._gate_up, self._down = self._stack(f"{block}.experts", hidden, weights)
        self._shared = None
        if config.shared_width:
            self._shared = _SharedExpert(block, config.shared_width, weights, hidden=hidden, activation=activation)

    def _stack(self, block: str, hidden: int, weights: Checkpoint) -> tuple[torch.Tensor, torch.Tensor]:
        """Stacks the experts one by one, so that at most one of them is in memory twice."""
        config = self._config
        gate, up, down = "gate_proj", "up_proj", "down_proj"
        if weights.holds(f"{block}.0.w1.weight"):
            gate, up, down = "w1", "w3", "w2"
        gates_ups = self._router.new_empty((config.count, 2, config.width, hidden))
        downs = self._router.new_empty((config.count, hidden, config.width))
        for expert in range(config.count):
            names = [f"{block}.{expert}.{name}.weight" for name in (gate, up, down)]
            weights.require(names)
            for place, name in enumerate(names[:2]):
                gates_ups[expert, place] = weights.take_as_stored(name, config.width, hidden)
            downs[expert] = weights.take_as_stored(names[2], hidden, config.width)
        return gates_ups.flatten(1, 2), downs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[R, hidden] → [R, hidden]"""
        config = self._config
        logits = self._kernels.linear(x, self._router)
        weights, experts = self._kernels.route(logits, config.chosen, renormalise=config.renormalise)
        if config.rounded:
            weights = weights.to(x.dtype)
        mixed = self._kernels.fused_experts(x, self._gate_up, self._down, weights, experts, activation=self._activation)
        return mixed if self._shared is None else mixed + self._shared(x)


class _SharedExpert:
    """The MLP that every token uses, times the sigmoid of a gate computed from the token."""

    def __init__(self, block: str, width: int, weights: Checkpoint, *, hidden: int, activation: str) -> None:
        names = f"{block}.shared_expert.gate_proj", f"{block}.shared_expert.up_proj"
        self._gate_up = torch.cat(weights.take_weights(LinearTensors(names, (width, width), hidden)))
        self._down = weights.take(f"{block}.shared_expert.down_proj.weight", hidden, width)
        self._share = weights.take(f"{block}.shared_expert_gate.weight", 1, hidden)
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(x, self._gate_up).chunk(2, dim=-1)
        mixed = functional.linear(self._activation(gate) * up, self._down)
        return functional.linear(x, self._share).sigmoid() * mixed
