"""Computes the parallel residual streams of Gemma 3n in torch: alternating updates (AltUp, Baykal et al. 2023).

    embedding → streams, each a map of it as long as the embedding               StreamEnds.enter
    a layer:  predict all streams, update one, correct all by its change         LayerStreams
    streams → their mean, the maps back being as long as the first               StreamEnds.leave

Next to attention, a map of low rank adds to the residual (Laurel). R rows, N streams. See `StreamsConfig`.
"""

from typing import Any

import torch
from torch.nn import functional

from ..layers.checkpoint import Checkpoint, LinearTensors
from ..layers.linear import Linear, QuantMethod, RMSNorm
from .decoder_config import DecoderConfig, StreamsConfig

HALF_ROOT = 0.5**0.5  # of the mean of two residuals
_LEAST_SQUARE = 1e-5  # of a stream's numbers in the mean, below which it is not made longer


class StreamEnds:
    """Makes the streams of embeddings, and one hidden state of the streams."""

    def __init__(self, config: DecoderConfig, streams: StreamsConfig, weights: Checkpoint, method: QuantMethod[Any]):
        def maps(name: str) -> list[Linear]:
            names = (f"model.{name}.{index}" for index in range(streams.count - 1))
            sizes = (config.hidden_size,), config.hidden_size
            return [Linear(method, weights, LinearTensors((each,), *sizes)) for each in names]

        self._into, self._out_of = maps("altup_projections"), maps("altup_unembed_projections")

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """[R, hidden] → [R, N, hidden]"""
        return torch.stack([x, *(_as_long(linear(x), x) for linear in self._into)], dim=1)

    def leave(self, streams: torch.Tensor) -> torch.Tensor:
        """[R, N, hidden] → [R, hidden]"""
        first = streams[:, 0]
        rest = (_as_long(linear(streams[:, 1 + index]), first) for index, linear in enumerate(self._out_of))
        return torch.stack([first, *rest]).mean(dim=0)


def _as_long(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Scales rows to the length of another's."""
    wanted = other.square().mean(dim=-1, keepdim=True).sqrt()
    return x * wanted / x.square().mean(dim=-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()


class LayerStreams:
    """The streams at one layer, and the map of low rank next to its attention.

    Args:
        prefix: of the layer's names in the checkpoint.
    """

    def __init__(
        self,
        prefix: str,
        config: DecoderConfig,
        streams: StreamsConfig,
        weights: Checkpoint,
        method: QuantMethod[Any],  # Any: each method has its own form of weight, and only the method reads it
    ) -> None:
        def linear(name: str, outputs: int, inputs: int) -> Linear:
            return Linear(method, weights, LinearTensors((f"{prefix}.{name}",), (outputs,), inputs))

        def small(name: str, outputs: int, inputs: int) -> torch.Tensor:
            return weights.take(f"{prefix}.{name}.weight", outputs, inputs)

        def norm(name: str) -> RMSNorm:
            weight = weights.take(f"{prefix}.{name}.weight", config.hidden_size)
            return RMSNorm(weight, eps=config.norm_eps, centered=config.centered_norm)

        hidden, count = config.hidden_size, streams.count
        self._count, self._active = count, streams.active
        self._router_norm, self._router = norm("altup.router_norm"), small("altup.modality_router", count, hidden)
        self._router_scale = 1.0 / hidden
        self._predict = small("altup.prediction_coefs", count * count, count)
        self._correct = small("altup.correction_coefs", count, count)
        scale = weights.take(f"{prefix}.altup.correct_output_scale", hidden)
        self._output_scale = scale if streams.scaled else None
        self._down = linear("laurel.linear_left", streams.residual_rank, hidden)
        self._up = linear("laurel.linear_right", hidden, streams.residual_rank)
        self._residual_norm = norm("laurel.post_laurel_norm")

    def predict(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the streams as they are expected after the layer, [R, N, hidden], and of them the one that the layer
        reads, [R, hidden]."""
        coefficients = functional.linear(self._routed(streams[:, self._active]), self._predict)
        coefficients = coefficients.view(-1, self._count, self._count)
        predicted = streams + coefficients @ streams
        return predicted, predicted[:, self._active]

    def residual(self, normed: torch.Tensor) -> torch.Tensor:
        """Returns what is averaged with the residual after attention, of the input of attention, [R, hidden]."""
        return normed + self._residual_norm(self._up(self._down(normed)))

    def correct(self, predicted: torch.Tensor, updated: torch.Tensor) -> torch.Tensor:
        """Adds the layer's update to all streams, to each with a factor."""
        factors = functional.linear(self._routed(updated), self._correct) + 1.0  # [R, N]
        return predicted + (updated - predicted[:, self._active])[:, None] * factors[..., None]

    def scaled(self, streams: torch.Tensor) -> torch.Tensor:
        """Returns the stream that a layer's embeddings are gated by."""
        active = streams[:, self._active]
        return active if self._output_scale is None else active * self._output_scale

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        """[R, hidden] → [R, N]"""
        routed = functional.linear(self._router_norm(x) * self._router_scale, self._router)
        return routed.float().tanh().to(x.dtype)
