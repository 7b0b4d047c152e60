"""Runs mixtures of experts, MLPs of which every token uses a few, in torch or with Triton's kernels.

    router(x) → weights and experts of each token → Σ weight · expert(x)   [ + sigmoid(gate(x)) · shared(x) ]

How the router scores, what the weights multiply and what an expert computes are fields of `ExpertsConfig`.
"""

from typing import Any, Protocol

import torch
from torch.nn import functional

from ..kernels.triton import reference
from ..layers.checkpoint import Checkpoint
from ..layers.linear import ACTIVATIONS, Linear, QuantMethod
from ..layers.quantized import QuantizedMethod, QuantizedTensor
from .decoder_config import ExpertsConfig, RouterScore
from .expert_tensors import ExpertTensors


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
        gate_up: torch.Tensor | QuantizedTensor,
        down: torch.Tensor | QuantizedTensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        *,
        activation: str,
        gated: bool = True,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        clamp: tuple[float, float] | None = None,
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
        method: multiplies the shared expert, and says whether experts stay packed, or are rounded.

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
        method: QuantMethod[Any],  # Any: only the method reads its weights
    ) -> None:
        self._config = config
        self._activation = activation
        self._kernels = kernels
        tensors = ExpertTensors(prefix, config, weights, hidden=hidden)
        self._router, self._router_bias, self._correction = tensors.router, tensors.router_bias, tensors.correction
        self._biases: tuple[torch.Tensor, torch.Tensor] | None = None
        if tensors.gate_up_bias is not None and tensors.down_bias is not None:
            self._biases = tensors.gate_up_bias, tensors.down_bias
        packed = None
        if isinstance(method, QuantizedMethod):
            packed = tensors.packed_stacks() if method.keeps_packed else tensors.rounded_stacks(method)
        self._gate_up: torch.Tensor | QuantizedTensor
        self._down: torch.Tensor | QuantizedTensor
        self._gate_up, self._down = packed or self._floats(tensors, hidden)
        self._shared = _SharedExpert(tensors, weights, activation, method) if config.shared_width else None

    def _floats(self, tensors: ExpertTensors, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns gates above ups [E, 2 width, hidden], or ups alone, and downs [E, hidden, width]."""
        config = self._config
        gate_ups = self._router.new_empty((config.count, (1 + config.gated) * config.width, hidden))
        downs = self._router.new_empty((config.count, hidden, config.width))
        for expert, (gate_up, down) in enumerate(tensors.matrices()):  # at most one of them is in memory twice
            gate_ups[expert], downs[expert] = gate_up, down
        return gate_ups, downs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[R, hidden] → [R, hidden]"""
        config = self._config
        weights, experts = self._route(x)
        if config.rounded:
            weights = weights.to(x.dtype)
        mixed = self._weigh_input(x, weights, experts) if config.weigh_input else self._mix(x, weights, experts)
        return mixed if self._shared is None else mixed + self._shared(x)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes weights, float32 [R, chosen], and experts, int32 [R, chosen]."""
        config = self._config
        if config.scoring is RouterScore.SOFTMAX:
            logits = self._kernels.linear(x, self._router, self._router_bias)
            return self._kernels.route(logits, config.chosen, renormalise=config.renormalise)
        logits = functional.linear(x.float(), self._router.float(), self._router_bias)
        scores = logits.sigmoid()
        ranked = scores if self._correction is None else scores + self._correction
        if config.groups > config.chosen_groups:
            grouped = ranked.view(len(ranked), config.groups, -1)
            merits = grouped.topk(2, dim=-1).values.sum(-1)  # [R, groups]
            kept = torch.zeros_like(merits).scatter_(1, merits.topk(config.chosen_groups).indices, 1.0).bool()
            ranked = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
        experts = ranked.topk(config.chosen).indices
        weights = scores.gather(1, experts)
        if config.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * config.scale, experts.int()

    def _weigh_input(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Runs each token once for each of its experts, times its weight there."""
        weighed = (x[:, None] * weights.to(x.dtype)[..., None]).flatten(0, 1)  # [R · chosen, hidden]
        mixed = self._mix(weighed, torch.ones_like(weights).view(-1, 1), experts.reshape(-1, 1))
        return mixed.view(*experts.shape, -1).sum(1)

    def _mix(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        gate = self._config.gate
        return self._kernels.fused_experts(
            *(x, self._gate_up, self._down, weights, experts),
            activation=self._activation,
            gated=self._config.gated,
            biases=self._biases,
            clamp=None if gate is None else (gate.limit, gate.alpha),
        )


class _SharedExpert:
    """The MLP that every token uses, times the sigmoid of a gate computed from the token, if it has one."""

    def __init__(
        self,
        tensors: ExpertTensors,
        weights: Checkpoint,
        activation: str,
        method: QuantMethod[Any],  # Any: as above
    ) -> None:
        gate_up, down = tensors.shared_maps()
        self._gate_up = Linear(method, weights, gate_up)
        self._down = Linear(method, weights, down)
        self._share = tensors.shared_gate()
        self._activation = ACTIVATIONS[activation]
        self._gated = sum(gate_up.widths) == 2 * down.inputs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        inner = self._gate_up(x)
        if self._gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = self._activation(gate) * up
        else:
            inner = self._activation(inner)
        mixed = self._down(inner)
        return mixed if self._share is None else functional.linear(x, self._share).sigmoid() * mixed
