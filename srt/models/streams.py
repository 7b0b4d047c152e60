"""Computes the parallel residual streams of Gemma 3n in torch: alternating updates (AltUp, Baykal et al. 2023).

    embedding → streams, each a map of it as long as the embedding               StreamEnds.enter
    a layer:  predict all streams, update one, correct all by its change         LayerStreams
    streams → their mean, the maps back being as long as the first               StreamEnds.leave

Next to attention, a map of low rank adds to the residual (Laurel). R rows, N streams. See `StreamsConfig`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from ..layers.checkpoint import Checkpoint, LinearTensors
from ..layers.linear import Linear, QuantMethod, RMSNorm
from .decoder_config import DecoderConfig, StreamsConfig

HALF_ROOT = 0.5**0.5  # of the mean of two residuals
_LEAST_SQUARE = 1e-5  # of a stream's numbers in the mean, below which it is not made longer


def stream_maps(config: DecoderConfig, streams: StreamsConfig, name: str) -> list[LinearTensors]:
    """Returns the maps of one end: "altup_projections" or "altup_unembed_projections"."""
    names = (f"model.{name}.{index}" for index in range(streams.count - 1))
    return [LinearTensors((each,), (config.hidden_size,), config.hidden_size) for each in names]


INTO, OUT_OF = "altup_projections", "altup_unembed_projections"


@dataclass(frozen=True, slots=True)
class StreamTensors:
    """The tensors of a layer's streams. Those that are no maps are the full names of their weights."""

    router_norm: str  # [hidden]
    router: str  # [N, hidden]
    predict: str  # [N · N, N]
    correct: str  # [N, N]
    scale: str  # [hidden]
    down: LinearTensors
    up: LinearTensors
    residual_norm: str  # [hidden]

    @classmethod
    def of(cls, prefix: str, config: DecoderConfig, streams: StreamsConfig) -> "StreamTensors":
        """Returns those of the layer whose names have a prefix."""
        hidden, rank = config.hidden_size, streams.residual_rank
        return cls(
            router_norm=f"{prefix}.altup.router_norm.weight",
            router=f"{prefix}.altup.modality_router.weight",
            predict=f"{prefix}.altup.prediction_coefs.weight",
            correct=f"{prefix}.altup.correction_coefs.weight",
            scale=f"{prefix}.altup.correct_output_scale",
            down=LinearTensors((f"{prefix}.laurel.linear_left",), (rank,), hidden),
            up=LinearTensors((f"{prefix}.laurel.linear_right",), (hidden,), rank),
            residual_norm=f"{prefix}.laurel.post_laurel_norm.weight",
        )


class StreamEnds:
    """Makes the streams of embeddings, and one hidden state of the streams."""

    def __init__(self, config: DecoderConfig, streams: StreamsConfig, weights: Checkpoint, method: QuantMethod[Any]):
        self._into, self._out_of = (
            [Linear(method, weights, tensors) for tensors in stream_maps(config, streams, name)]
            for name in (INTO, OUT_OF)
        )

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
        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights.take(name, hidden), eps=config.norm_eps, centered=config.centered_norm)

        hidden, count, tensors = config.hidden_size, streams.count, StreamTensors.of(prefix, config, streams)
        self._count, self._active = count, streams.active
        self._router_norm, self._router = norm(tensors.router_norm), weights.take(tensors.router, count, hidden)
        self._router_scale = 1.0 / hidden
        self._predict = weights.take(tensors.predict, count * count, count)
        self._correct = weights.take(tensors.correct, count, count)
        scale = weights.take(tensors.scale, hidden)
        self._output_scale = scale if streams.scaled else None
        self._down, self._up = Linear(method, weights, tensors.down), Linear(method, weights, tensors.up)
        self._residual_norm = norm(tensors.residual_norm)

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
