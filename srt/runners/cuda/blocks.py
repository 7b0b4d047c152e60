"""Computes the parts of layers that add to the residual: attention, recurrent mixers, MLPs, per-layer embeddings.

    x = norm(residual)   →   block   →   residual += norm(·), next x

The norms, where a family has them, are fused with the sum (`CudaDecoder.forward`). Latent attention, recurrent mixers,
experts and parallel streams are those of the decoder in torch, over the kernels of `kernels.py`. R rows, D = head_dim.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...attention.backend import AttentionStep
from ...cache.state_pool import StepStates
from ...layers.checkpoint import Checkpoint
from ...layers.linear import ACTIVATIONS, HeadNorm, Linear, keep_highest
from ...layers.low_rank import Adapter, AdapterBlocks
from ...layers.rope import RopeConfig
from ...models.decoder_config import DecoderConfig, LayerTensors, SideTensors, deviations_of, layer_tensors
from ...models.experts import Experts
from ...models.latent import LatentAttention
from ...models.mixers import build_mixer
from ...models.streams import HALF_ROOT, LayerStreams
from .kernels import FusedKernels, FusedMethod

Angles = tuple[RopeConfig, int]  # frequencies, and the size of the heads that they rotate


@dataclass(slots=True)
class LayerStep:
    """Carries what layers read of one step, x apart. Rows that no attention follows are left out of `sides`."""

    positions: torch.Tensor  # int64 [R]
    attention: AttentionStep
    tables: Mapping[Angles, torch.Tensor]
    states: StepStates | None  # None: the model has no recurrent states
    angles: Mapping[Angles, tuple[torch.Tensor, torch.Tensor]] | None = None  # of latent attention
    sides: torch.Tensor | None = None  # [R, layers, width] per-layer embeddings
    adapted: AdapterBlocks | None = None  # None: no row uses an adapter
    adapted_after: AdapterBlocks | None = None  # of the rows that continue after the last attention

    def keep(self, rows: torch.Tensor) -> None:
        """Leaves out what belongs to other rows than those that continue, int64 [O]."""
        self.sides = None if self.sides is None else self.sides.index_select(0, rows)
        self.adapted = self.adapted_after


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One part of a layer, and the norms around it."""

    # x [R, hidden], the step, the rows that continue (None: all) → what is added to them
    compute: Callable[[torch.Tensor, LayerStep, torch.Tensor | None], torch.Tensor]
    before: torch.Tensor | None  # the weight of the norm of its input; None: the input is the residual
    after: torch.Tensor | None  # the weight of the norm of its result
    scale: float = 1.0  # multiplies what is added
    factor: torch.Tensor | None = None  # [1], multiplies the residual after the sum
    mixes: bool = False  # rows read what other rows have written
    summed: bool = True  # each rank has a part of the result
    ends: int | None = None  # the layer whose last block it is; None: another follows


class StreamedLayer:
    """Runs the blocks of a layer over parallel residual streams: see `models.streams`.

    Args:
        blocks: attention, the MLP, and what is added of per-layer embeddings, where the model has them.
    """

    def __init__(
        self,
        index: int,
        blocks: Sequence[Block],
        config: DecoderConfig,
        weights: Checkpoint,
        method: FusedMethod[Any],  # Any: only the method reads its weights
        kernels: FusedKernels,
    ) -> None:
        assert config.streams is not None, "a model with streams"
        self._streams = LayerStreams(config.layer_prefix(index), config, config.streams, weights, method)
        self._attention, self._mlp, *self._sides = blocks
        self._config = config
        self._kernels = kernels

    def __call__(self, x: torch.Tensor, step: LayerStep, kept: torch.Tensor | None) -> torch.Tensor:
        """Returns the streams after the layer: [R, N, hidden] → the same, of the rows that continue."""
        predicted, active = self._streams.predict(x)
        normed = self._norm(active, self._attention.before)
        attended = self._attention.compute(normed, step, kept)
        if kept is not None:
            predicted, active, normed = (part.index_select(0, kept) for part in (predicted, active, normed))
            step.keep(kept)
        attended = active + self._norm(attended, self._attention.after)
        joined = (attended + self._streams.residual(normed)) * HALF_ROOT
        mixed = self._mlp.compute(self._norm(joined, self._mlp.before), step, None)
        x = self._streams.correct(predicted, joined + self._norm(mixed, self._mlp.after))
        for side in self._sides:
            gating = self._streams.scaled(x).contiguous()
            x[:, 1:] += self._norm(side.compute(gating, step, None), side.after)[:, None]
        return x

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return x
        return self._kernels.rms_norm(x, weight, eps=self._config.norm_eps, centered=self._config.centered_norm)


class LayerBlocks:
    """Builds the blocks of one layer; maps that share an input are fused to one product.

    Args:
        index: of the layer.
    """

    # Any: each method has its own form of weight, and only the method reads it.
    def __init__(
        self,
        index: int,
        config: DecoderConfig,
        weights: Checkpoint,
        kernels: FusedKernels,
        method: FusedMethod[Any],
        adapters: Sequence[Adapter],
    ) -> None:
        self._index = index
        self._config = config
        self._layer = config.layers[index]
        self._tensors = layer_tensors(config, index)
        self._weights = weights
        self._kernels = kernels
        self._method = method
        self._adapters = adapters

    def blocks(self) -> Iterator[Block]:
        """Reads the weights of the blocks, in their order."""
        config, layer, tensors = self._config, self._layer, self._tensors
        factor = None if tensors.scale is None else self._weights.take(tensors.scale, 1)
        found: list[Block] = []
        if layer.mixes:
            norms = self._norm(tensors.before_attention), self._norm(tensors.after_attention)
            found.append(Block(self._mixing(), *norms, scale=config.residual_scale, mixes=True))
        if layer.mlp:
            norms = self._norm(tensors.before_mlp), self._norm(tensors.after_mlp)
            found.append(Block(self._mlp(), *norms, scale=config.residual_scale))
        if tensors.side is not None:
            side = SideBlock(self._index, tensors.side, config, self._weights, self._method)
            found.append(Block(side, None, self._norm(tensors.side.norm), summed=False))
        yield from found[:-1]
        yield replace(found[-1], factor=factor, ends=self._index)

    def _norm(self, name: str | None) -> torch.Tensor | None:
        return None if name is None else self._weights.take(name, self._config.hidden_size)

    def _mixing(self) -> Callable[[torch.Tensor, LayerStep, torch.Tensor | None], torch.Tensor]:
        arguments = (self._index, self._config, self._weights, self._method, self._adapters)
        if self._layer.recurrent is not None:
            return RecurrentBlock(*arguments)
        if self._config.latent is not None:
            return LatentBlock(*arguments)
        return AttentionBlock(*arguments, kernels=self._kernels)

    def _mlp(self) -> Callable[[torch.Tensor, LayerStep, torch.Tensor | None], torch.Tensor]:
        layer, config = self._layer, self._config
        if layer.experts is None:
            return MLPBlock(
                *(self._tensors, config, self._weights, self._method, self._adapters),
                kernels=self._kernels,
                sparsity=layer.sparsity,
            )
        return ExpertsBlock(
            Experts(
                self._tensors.prefix,
                layer.experts,
                self._weights,
                hidden=config.hidden_size,
                activation=config.activation,
                kernels=self._kernels,
                method=self._method,
            )
        )


class AttentionBlock:
    """Attention with keys and values of heads: one kernel from the product to what attention reads."""

    def __init__(
        self,
        index: int,
        config: DecoderConfig,
        weights: Checkpoint,
        method: FusedMethod[Any],  # Any: as above
        adapters: Sequence[Adapter],
        *,
        kernels: FusedKernels,
    ) -> None:
        tensors, self._layer = layer_tensors(config, index), config.layers[index]
        self._config = config
        self._kernels = kernels
        self._place = config.place_of(index)
        self._angles = config.angles_of(index)
        self._stores = config.own_kv_heads(index) > 0
        self._rotated = self._layer.rope.rotated(config.head_dim_of(index))
        self._qkv = Linear(method, weights, tensors.qkv, adapters)
        self._head_norm: HeadNorm | None = None
        self._whole_norms: tuple[torch.Tensor, ...] = ()  # of all queries of a row, and of all its keys
        self._take_norms(index, tensors, weights)
        self._output = Linear(method, weights, tensors.output, adapters)
        self._sinks: torch.Tensor | None = None
        if tensors.sinks is not None:
            self._sinks = weights.take(tensors.sinks, config.heads).float()

    def _take_norms(self, index: int, tensors: LayerTensors, weights: Checkpoint) -> None:
        config = self._config
        if tensors.query_norm is None:
            assert tensors.value_norm is None, "values are normalised where queries are"
            return
        head_dim = config.head_dim_of(index)
        if config.qk_norm_whole and tensors.key_norm is not None:
            query = weights.take(tensors.query_norm, config.heads * head_dim)
            key = weights.take(tensors.key_norm, config.own_kv_heads(index) * head_dim)
            self._whole_norms = query, key
            return
        query = weights.take(tensors.query_norm, head_dim)
        self._head_norm = HeadNorm(
            query,
            query if tensors.key_norm is None else weights.take(tensors.key_norm, head_dim),
            eps=config.norm_eps,
            centered=config.centered_norm,
            value_weight=None if tensors.value_norm is None else weights.take(tensors.value_norm, head_dim),
        )

    def __call__(self, x: torch.Tensor, step: LayerStep, kept: torch.Tensor | None) -> torch.Tensor:
        config, layer, attention = self._config, self._layer, step.attention
        qkv = self._qkv(x, step.adapted)
        begin = 0
        for weight in self._whole_norms:  # in place
            part = qkv[:, begin : begin + len(weight)]
            self._kernels.rms_norm(part, weight, eps=config.norm_eps, centered=config.centered_norm, out=part)
            begin += len(weight)
        queries = self._kernels.rope_and_store(
            *(qkv, step.positions, attention.write_slots_of(layer.window), step.tables[self._angles]),
            *((attention.pool.keys[self._place], attention.pool.values[self._place]) if self._stores else (None, None)),
            head_norm=self._head_norm,
            rotated=self._rotated,
            interleaved=layer.rope.interleaved,
            gated=config.gated_attention,
        )  # [R, heads, D]
        if layer.query_scale is not None:
            queries *= layer.query_scale.at(step.positions, queries.dtype)
        attended = attention.backend.attend(
            *(self._place, queries, attention.pool, attention.plans[layer.window]),
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            sinks=self._sinks,
        )
        if config.gated_attention:
            gates = qkv.view(len(qkv), -1, attended.shape[2])[:, 1 : 2 * config.heads : 2]
            attended *= gates.sigmoid()
        attended = attended.flatten(1)
        if kept is None:
            return self._output(attended, step.adapted)
        return self._output(attended.index_select(0, kept), step.adapted_after)


class LatentBlock:
    """Latent attention: see `models.latent`."""

    # Any: as above.
    def __init__(
        self,
        index: int,
        config: DecoderConfig,
        weights: Checkpoint,
        method: FusedMethod[Any],
        adapters: Sequence[Adapter],
    ) -> None:
        self._attention = LatentAttention(index, layer_tensors(config, index), config, weights, method, adapters)
        self._angles = config.angles_of(index)

    def __call__(self, x: torch.Tensor, step: LayerStep, kept: torch.Tensor | None) -> torch.Tensor:
        assert step.angles is not None, "a model with latents has angles"
        mixed = self._attention(x, step.adapted, step.angles[self._angles], step.attention)
        return mixed if kept is None else mixed.index_select(0, kept)


class RecurrentBlock:
    """A layer with a recurrent state: see `models.mixers`."""

    # Any: as above.
    def __init__(
        self,
        index: int,
        config: DecoderConfig,
        weights: Checkpoint,
        method: FusedMethod[Any],
        adapters: Sequence[Adapter],
    ) -> None:
        self._mixer = build_mixer(index, config, weights, method, adapters)

    def __call__(self, x: torch.Tensor, step: LayerStep, kept: torch.Tensor | None) -> torch.Tensor:
        assert step.states is not None, "the batch of a model with recurrent states has their runs"
        mixed = self._mixer(x, step.states, step.adapted)
        return mixed if kept is None else mixed.index_select(0, kept)


class MLPBlock:
    """Computes down(activation(gate(x)) × up(x)), gate and up with one product, or down(activation(up(x)))."""

    def __init__(
        self,
        tensors: LayerTensors,
        config: DecoderConfig,
        weights: Checkpoint,
        method: FusedMethod[Any],  # Any: as above
        adapters: Sequence[Adapter],
        *,
        kernels: FusedKernels,
        sparsity: float,
    ) -> None:
        self._deviations = deviations_of(sparsity) if sparsity else None
        self._method = method
        self._kernels = kernels
        self._gate_up = method.load(weights, tensors.gate_up)
        self._gate_up_bias = weights.take_bias(tensors.gate_up)
        self._changes = method.changes(adapters, tensors.gate_up, dtype=weights.dtype, device=weights.device)
        self._down = Linear(method, weights, tensors.down, adapters)
        self._activation = config.activation
        self._gated = config.gated_mlp

    def __call__(self, x: torch.Tensor, step: LayerStep, kept: torch.Tensor | None) -> torch.Tensor:
        if self._gated and step.adapted is None and self._deviations is None:
            return self._down(self._method.apply_gated(self._gate_up, x, self._gate_up_bias, self._activation))
        inner = self._method.apply(self._gate_up, x, self._gate_up_bias)
        if step.adapted is not None:
            self._changes.add(x, inner, step.adapted)
        if self._deviations is not None:
            gate, _ = inner.chunk(2, dim=-1)
            gate.copy_(keep_highest(gate, self._deviations))
        if self._gated:
            return self._down(self._kernels.act_and_multiply(inner, self._activation), step.adapted)
        return self._down(ACTIVATIONS[self._activation](inner), step.adapted)


class ExpertsBlock:
    """A mixture of experts: see `models.experts`."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts

    def __call__(self, x: torch.Tensor, step: LayerStep, kept: torch.Tensor | None) -> torch.Tensor:
        return self._experts(x)


class SideBlock:
    """Computes what a layer adds of its per-layer embedding: map(activation(gate(x)) · side). See `models.side`."""

    def __init__(
        self,
        index: int,
        tensors: SideTensors,
        config: DecoderConfig,
        weights: Checkpoint,
        method: FusedMethod[Any],  # Any: as above
    ) -> None:
        self._index = index
        self._gate = Linear(method, weights, tensors.gate)
        self._output = Linear(method, weights, tensors.output)
        self._activation = ACTIVATIONS[config.activation]

    def __call__(self, x: torch.Tensor, step: LayerStep, kept: torch.Tensor | None) -> torch.Tensor:
        assert step.sides is not None, "a model whose layers have sides computes them"
        return self._output(self._activation(self._gate(x)) * step.sides[:, self._index])
