"""Runs the families' decoder in torch, on any device, dense or with experts; `build_model` takes it or transformers.

    token ids → embedding → layers × [ norm → attention → +   norm → MLP → + ] → norm → logits of the rows asked for
                    ↑ in the rows of pictures what a tower sees in them

Rows of all sequences are one flat list: only attention knows which row belongs to which sequence. The rounding of every
intermediate follows transformers, so that greedy text is the same in the same dtype. R rows, D = head_dim.

With several ranks each has some of the heads and a slice of every MLP (sharding.py). The outputs of attention and MLP
are summed over the ranks; everything else is the same on all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ...lang.errors import ModelError, ParameterError
from ..attention.backend import AttentionGeometry, AttentionStep
from ..attention.plan import Window
from ..cache.kv_pool import KVGeometry
from ..cache.state_pool import StateGeometry, StepStates
from ..core.batch import Given
from ..distributed.communicator import SINGLE_RANK, Communicator
from ..layers.checkpoint import Checkpoint, Tensors
from ..layers.config_values import Config
from ..layers.linear import ACTIVATIONS, Linear, QuantMethod, RMSNorm, TorchHead, can_pack, dense_method, keep_highest
from ..layers.low_rank import Adapter, AdapterRows
from ..layers.quantized import packed_vocabulary, vocabulary_matrix
from ..layers.rope import Rope, apply_rope
from .decoder_config import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    DecoderConfig,
    LayerTensors,
    deviations_of,
    is_unused,
    landmarks,
    layer_tensors,
)
from .experts import Experts, expert_kernels
from .families import is_family, read_config
from .latent import LatentAttention
from .mixers import RecurrentMixer, build_mixer
from .sharding import VocabParallelEmbedding, VocabParallelHead, shard_range
from .side import SideEmbedding, SideLayer
from .streams import HALF_ROOT, LayerStreams, StreamEnds


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one step, on the model's device."""

    token_ids: torch.Tensor  # int64 [R] all of the vocabulary; those of given rows are not used
    positions: torch.Tensor  # int64 [R]
    logit_rows: torch.Tensor  # int64 [L]
    given: Given | None = None
    rope_positions: torch.Tensor | None = None  # int64 [3, R]; None: `positions` on all axes
    adapted: AdapterRows | None = None  # None: no row uses an adapter
    states: StepStates | None = None  # None: the model has no recurrent states
    hidden_rows: torch.Tensor | None = None  # int64 [H]; None: no hidden state is asked for


class Model(Protocol):
    """A causal language model: `decoder.TorchDecoder` for the families, `transformers_model` for the rest."""

    vocab_size: int
    context_length: int
    heads: int
    kv_geometry: KVGeometry
    state_geometry: StateGeometry | None  # None: it has no recurrent states
    windows: tuple[Window, ...]  # the window classes that it passes to `AttentionStep`
    device: torch.device

    def forward(self, rows: Rows, attention: AttentionStep, *, out: torch.Tensor) -> torch.Tensor | None:
        """Computes logits of `rows.logit_rows` and writes them to `out` (float32 [L, vocab_size]).

        Returns the hidden states of `rows.hidden_rows` after the final norm, [H, hidden]; None: none are asked for.
        """


def attention_geometry(model: Model) -> AttentionGeometry:
    return AttentionGeometry.covering(model.heads, model.kv_geometry.layers)


MLP_ROWS = 1024  # rows of one pass through an MLP, which has by far the widest intermediates


class TorchAttention:
    """Computes attention of one layer: one product for queries, keys and values, one norm and one rotation for both
    queries and keys."""

    def __init__(
        self,
        index: int,
        tensors: LayerTensors,
        config: DecoderConfig,
        weights: Checkpoint,
        method: QuantMethod[Any],  # Any: each method has its own form of weight, and only the method reads it
        adapters: Sequence[Adapter],
    ) -> None:
        self._index = config.place_of(index)
        self._layer = config.layers[index]
        self._config = config
        self._head_dim, self._kv_heads = config.head_dim_of(index), config.own_kv_heads(index)
        self._qkv = Linear(method, weights, tensors.qkv, adapters)
        self._output = Linear(method, weights, tensors.output, adapters)
        self._sinks: torch.Tensor | None = None
        if tensors.sinks is not None:
            self._sinks = weights.take(tensors.sinks, config.heads).float()
        self._value_norm: RMSNorm | None = None
        if tensors.value_norm is not None:
            self._value_norm = self._norm(weights.take(tensors.value_norm, self._head_dim))
        self._head_norm: RMSNorm | None = None
        self._whole_norms: tuple[RMSNorm, RMSNorm] | None = None
        if tensors.query_norm is None:
            return
        if config.qk_norm_whole and tensors.key_norm is not None:
            query = weights.take(tensors.query_norm, config.heads * self._head_dim)
            key = weights.take(tensors.key_norm, self._kv_heads * self._head_dim)
            self._whole_norms = self._norm(query), self._norm(key)
        else:
            # The weights of all query heads above those of all key heads: [heads + kv_heads, D].
            parts = [weights.take(tensors.query_norm, self._head_dim).expand(config.heads, -1)]
            if tensors.key_norm is not None:
                parts.append(weights.take(tensors.key_norm, self._head_dim).expand(self._kv_heads, -1))
            self._head_norm = self._norm(torch.cat(parts))

    def _norm(self, weight: torch.Tensor) -> RMSNorm:
        return RMSNorm(weight, eps=self._config.norm_eps, centered=self._config.centered_norm)

    def __call__(
        self,
        x: torch.Tensor,
        rows: Rows,
        angles: tuple[torch.Tensor, torch.Tensor],
        attention: AttentionStep,
    ) -> torch.Tensor:
        config = self._config
        rotated = config.heads + self._kv_heads
        qkv = self._qkv(x, rows.adapted).view(len(x), -1, self._head_dim)  # [R, heads + 2 kv_heads, D]
        gates: torch.Tensor | None = None
        if config.gated_attention:  # [R, 2 heads + 2 kv_heads, D], query and gate of a head next to each other
            gates = qkv[:, 1 : 2 * config.heads : 2]
            qkv = torch.cat([qkv[:, : 2 * config.heads : 2], qkv[:, 2 * config.heads :]], dim=1)
        query_key, values = qkv[:, :rotated], qkv[:, rotated:]
        if self._head_norm is not None:
            query_key = self._head_norm(query_key)
        if self._whole_norms is not None:
            parts = torch.split(query_key, [config.heads, self._kv_heads], dim=1)
            normed = [norm(part.flatten(1)) for norm, part in zip(self._whole_norms, parts, strict=True)]
            query_key = torch.cat(normed, dim=1).view(len(x), rotated, self._head_dim)
        query_key = apply_rope(query_key, angles, interleaved=self._layer.rope.interleaved)
        queries = query_key[:, : config.heads]
        if self._layer.query_scale is not None:
            queries = queries * self._layer.query_scale.at(rows.positions, queries.dtype)
        if self._value_norm is not None:
            values = self._value_norm(values)
        attended = attention.attend(
            self._index,
            queries,
            query_key[:, config.heads :] if self._kv_heads else None,
            values if self._kv_heads else None,
            window=self._layer.window,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            sinks=self._sinks,
        )
        if gates is not None:
            attended = attended * gates.sigmoid()
        return self._output(attended.flatten(1), rows.adapted)


class TorchMLP:
    """Computes down(activation(gate(x)) × up(x)), gate and up with one product, or down(activation(up(x)))."""

    def __init__(
        self,
        tensors: LayerTensors,
        config: DecoderConfig,
        weights: Checkpoint,
        method: QuantMethod[Any],  # Any: as above
        adapters: Sequence[Adapter],
        *,
        sparsity: float,
    ) -> None:
        self._deviations: float | None = None  # above the mean, from which on the gate's numbers count
        if sparsity:
            self._deviations = deviations_of(sparsity)
        self._gate_up = Linear(method, weights, tensors.gate_up, adapters)
        self._down = Linear(method, weights, tensors.down, adapters)
        self._activation = ACTIVATIONS[config.activation]
        self._gated = config.gated_mlp

    def __call__(self, x: torch.Tensor, adapted: AdapterRows | None) -> torch.Tensor:
        if len(x) > MLP_ROWS:
            starts = range(0, len(x), MLP_ROWS)
            parts = [None if adapted is None else adapted.part(start, start + MLP_ROWS) for start in starts]
            return torch.cat([self(*rows) for rows in zip(torch.split(x, MLP_ROWS), parts, strict=True)])
        if not self._gated:
            return self._down(self._activation(self._gate_up(x, adapted)), adapted)
        gate, up = self._gate_up(x, adapted).chunk(2, dim=-1)
        if self._deviations is not None:
            gate = keep_highest(gate, self._deviations)
        return self._down(self._activation(gate).mul_(up), adapted)


class TorchLayer:
    """Runs attention (or the mixer of a recurrent layer) and MLP, each inside a residual sum.

    Families normalise their inputs, their results, or both. Some layers are one of the two alone.
    """

    def __init__(
        self,
        index: int,
        config: DecoderConfig,
        weights: Checkpoint,
        communicator: Communicator,
        method: QuantMethod[Any],  # Any: as above
        adapters: Sequence[Adapter],
    ) -> None:
        def norm(name: str | None) -> RMSNorm | None:
            if name is None:
                return None
            weight = weights.take(name, config.hidden_size)
            return RMSNorm(weight, eps=config.norm_eps, centered=config.centered_norm)

        layer, tensors = config.layers[index], layer_tensors(config, index)
        self.angles = config.angles_of(index)
        self._residual_scale = config.residual_scale
        self._communicator = communicator
        self._attention: TorchAttention | LatentAttention | RecurrentMixer | None = None
        if layer.recurrent is not None:
            self._attention = build_mixer(index, config, weights, method, adapters)
        elif layer.mixes and config.latent is None:
            self._attention = TorchAttention(index, tensors, config, weights, method, adapters)
        elif layer.mixes:
            self._attention = LatentAttention(index, tensors, config, weights, method, adapters)
        self._mlp: TorchMLP | Experts | None = None
        if layer.mlp and layer.experts is None:
            self._mlp = TorchMLP(tensors, config, weights, method, adapters, sparsity=layer.sparsity)
        elif layer.mlp and layer.experts is not None:
            self._mlp = Experts(
                tensors.prefix,
                layer.experts,
                weights,
                hidden=config.hidden_size,
                activation=config.activation,
                kernels=expert_kernels(weights.device),
                method=method,
            )
        self._before_attention = norm(tensors.before_attention) if layer.mixes else None
        self._after_attention = norm(tensors.after_attention) if layer.mixes else None
        self._before_mlp = norm(tensors.before_mlp) if layer.mlp else None
        self._after_mlp = norm(tensors.after_mlp) if layer.mlp else None
        self._side = None
        if tensors.side is not None:
            self._side = SideLayer(tensors.side, config, weights, method)
        self._scale = None if tensors.scale is None else weights.take(tensors.scale, 1)
        self._streams: LayerStreams | None = None
        if config.streams is not None:
            self._streams = LayerStreams(tensors.prefix, config, config.streams, weights, method)

    def __call__(
        self,
        x: torch.Tensor,
        rows: Rows,
        angles: tuple[torch.Tensor, torch.Tensor],
        attention: AttentionStep,
        side: torch.Tensor | None,  # [R, width]
    ) -> torch.Tensor:
        if self._streams is not None:
            return self._with_streams(self._streams, x, rows, angles, attention, side)
        if self._attention is not None:
            attended = self._mixed(_normed(self._before_attention, x), rows, angles, attention)
            x = self._add(x, self._communicator.all_reduce(attended), self._after_attention)
        if self._mlp is not None:
            normed = _normed(self._before_mlp, x)
            mixed = self._mlp(normed, rows.adapted) if isinstance(self._mlp, TorchMLP) else self._mlp(normed)
            x = self._add(x, self._communicator.all_reduce(mixed), self._after_mlp)
        if self._side is not None and side is not None:
            x = x + self._side(x, side)
        return x if self._scale is None else x * self._scale

    def _with_streams(
        self,
        streams: LayerStreams,
        x: torch.Tensor,  # [R, N, hidden]
        rows: Rows,
        angles: tuple[torch.Tensor, torch.Tensor],
        attention: AttentionStep,
        side: torch.Tensor | None,
    ) -> torch.Tensor:
        assert isinstance(self._mlp, TorchMLP), "models with streams have dense MLPs"
        predicted, active = streams.predict(x)
        normed = _normed(self._before_attention, active)
        attended = active + _normed(self._after_attention, self._mixed(normed, rows, angles, attention))
        joined = (attended + streams.residual(normed)) * HALF_ROOT
        mixed = self._mlp(_normed(self._before_mlp, joined), rows.adapted)
        x = streams.correct(predicted, joined + _normed(self._after_mlp, mixed))
        if self._side is not None and side is not None:
            x[:, 1:] += self._side(streams.scaled(x), side)[:, None]
        return x

    def _mixed(
        self,
        normed: torch.Tensor,
        rows: Rows,
        angles: tuple[torch.Tensor, torch.Tensor],
        attention: AttentionStep,
    ) -> torch.Tensor:
        """Computes attention, or the mixer."""
        if isinstance(self._attention, TorchAttention):
            return self._attention(normed, rows, angles, attention)
        if isinstance(self._attention, LatentAttention):
            return self._attention(normed, rows.adapted, angles, attention)
        assert self._attention is not None, "the layer mixes"
        assert rows.states is not None, "the batch of a model with recurrent states has their runs"
        return self._attention(normed, rows.states, rows.adapted)

    def _add(self, x: torch.Tensor, update: torch.Tensor, after: RMSNorm | None) -> torch.Tensor:
        update = _normed(after, update)
        return x + (update if self._residual_scale == 1.0 else update * self._residual_scale)


def _normed(norm: RMSNorm | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)


class TorchDecoder:
    """A whole model, or the part of it that a rank of `communicator` has.

    Args:
        config, tensors: of that part; vocab_size is that of the whole model.
        pack: lay weights out for oneDNN (CPU only), see `linear.PackedMethod`.
        method: the weight format of the layers' linear maps; None: floats of the dtype. Experts and head are floats.
        adapters: by the index that `Rows.adapted` has.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Tensors,
        *,
        dtype: torch.dtype,
        device: torch.device,
        pack: bool,
        communicator: Communicator = SINGLE_RANK,
        method: QuantMethod[Any] | None = None,  # Any: as above
        adapters: Sequence[Adapter] = (),
    ) -> None:
        method = method or dense_method(packed=pack)
        weights = Checkpoint(tensors, dtype=dtype, device=device)
        weights.require(landmarks(config, method))
        self.config = config
        self.device = device
        self.vocab_size = config.vocab_size
        self.context_length = config.context_length
        self.heads = config.heads
        self.kv_geometry = config.kv_geometry(dtype)
        self.state_geometry = config.state_geometry(dtype)
        self.windows = config.windows

        # Only the rows of a step are converted, unless the head is the same matrix and has to be converted anyway.
        take = weights.take if config.tied and not pack else weights.take_as_stored
        first, end = shard_range(config.vocab_size, communicator.rank, communicator.ranks)
        shape = end - first, config.hidden_size
        embedding = packed_vocabulary(method, weights, EMBEDDING, *shape) or vocabulary_matrix(
            method, take(EMBEDDING, *shape)
        )
        self._embedding = VocabParallelEmbedding(embedding, config, dtype=dtype, communicator=communicator)
        self._layers = [
            TorchLayer(index, config, weights, communicator, method, adapters) for index in range(len(config.layers))
        ]
        self._side = None if config.side is None else SideEmbedding(config, config.side, weights, method, dtype=dtype)
        self._streams: StreamEnds | None = None
        if config.streams is not None:
            self._streams = StreamEnds(config, config.streams, weights, method)
        final = weights.take(FINAL_NORM, config.hidden_size)
        self._norm = RMSNorm(final, eps=config.norm_eps, centered=config.centered_norm)
        head = embedding
        if not config.tied:
            head = packed_vocabulary(method, weights, HEAD, *shape) or vocabulary_matrix(
                method, weights.take_as_stored(HEAD, *shape)
            )
        self._head = VocabParallelHead(
            TorchHead(head, dtype=dtype, scale=config.logit_scale, softcap=config.logit_softcap, packed=pack),
            vocab_size=config.vocab_size,
            communicator=communicator,
        )
        weights.finish(is_unused=partial(is_unused, config))
        self._ropes = {angles: Rope(*angles, device) for angles in config.angles}

    def forward(self, rows: Rows, attention: AttentionStep, *, out: torch.Tensor) -> torch.Tensor | None:
        x = self._embedding(rows.token_ids, rows.given)  # [R, hidden]
        positions = rows.positions if rows.rope_positions is None else rows.rope_positions
        angles = {config: rope.angles(positions, x.dtype) for config, rope in self._ropes.items()}
        sides = None if self._side is None else self._side(rows.token_ids, x)  # [R, layers, width]
        if self._streams is not None:
            x = self._streams.enter(x)
        for index, layer in enumerate(self._layers):
            side = None if sides is None else sides[:, index]
            x = layer(x, rows, angles[layer.angles], attention, side)
            if rows.given is not None and index < len(rows.given.added):
                x = x.index_add(0, rows.given.rows, rows.given.added[index])
        hidden = None if rows.hidden_rows is None else self._final(x.index_select(0, rows.hidden_rows))
        self._head(self._final(x.index_select(0, rows.logit_rows)), out)
        return hidden

    def _final(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x if self._streams is None else self._streams.leave(x))


def build_model(
    config: Config,
    tensors: Tensors,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    pack: bool | None = None,
    communicator: Communicator = SINGLE_RANK,
    method: QuantMethod[Any] | None = None,  # Any: only the method reads its weights
    adapters: Sequence[Adapter] = (),
) -> Model:
    """Builds the model that `config["model_type"]` names.

    Args:
        config: config.json as a mapping.
        tensors: parameter name → tensor; may read each tensor lazily.
        dtype: of weights, activations and KV pool.
        device: holds weights and KV pool.
        pack: lay weights out for oneDNN; None: on a CPU that supports it for `dtype`. Models that run in transformers
            have no packed form.
        communicator: connects the ranks; `config` and `tensors` are those of this rank's part (sharding.py).
        adapters: read for this model.

    Raises:
        ModelError: a configuration or tensors that cannot be used; the message says why.
    """
    target = torch.device(device)
    if config.get("quantization_config"):
        raise ModelError(
            f"quantization_config {config['quantization_config']!r}: packed weights cannot be read; "
            "load the unquantised checkpoint, or a GGUF file"
        )
    if is_family(config):
        offered = target.type == "cpu" and can_pack(dtype)
        if pack and not offered:
            raise ParameterError(f"pack=True: this machine cannot pack {dtype} on {target}; write pack=None")
        packed = offered if pack is None else pack
        decoder = read_config(config)
        return TorchDecoder(
            decoder,
            tensors,
            dtype=dtype,
            device=target,
            pack=packed,
            communicator=communicator,
            method=method,
            adapters=adapters,
        )
    assert not adapters, "adapters are read for the maps of a family"
    if pack:
        raise ParameterError(f"pack=True: {config.get('model_type')!r} runs in transformers; write pack=None")
    from .transformers_model import build_transformers_model  # imports transformers: seconds, so only when needed

    return build_transformers_model(config, tensors, dtype=dtype, device=target)
