"""Runs the families' decoder on fused kernels: like `models.decoder`, with fewer passes over the rows.

                          in torch                                       here
    residual + norm       sum, norm, cast                                one kernel
    queries, keys         norm, cast, rope, two copies to the pool       one kernel
    gate                  activation, product                            one kernel; with few rows, its map included
    logits                product, conversion                            with few rows, one kernel

Products of few rows use umbel's kernels, all others torch's (cuBLAS). Kernels add to the residual in place. A layer is
one or more blocks (blocks.py): attention, MLP, and what else adds to the residual. After the last attention only rows
whose logits are needed continue. R rows, L of them with logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ...attention.backend import AttentionGeometry, AttentionStep
from ...attention.plan import Window
from ...cache.kv_pool import KVGeometry
from ...cache.state_pool import StateGeometry, StepStates
from ...core.batch import Given
from ...distributed.communicator import SINGLE_RANK, Communicator
from ...layers.checkpoint import Checkpoint, Tensors
from ...layers.linear import HEAD_ROWS
from ...layers.low_rank import Adapter
from ...layers.quantized import QuantizedTensor, packed_vocabulary, vocabulary_matrix
from ...layers.rope import Rope, rope_rows, rope_table
from ...models.decoder import Rows, attention_geometry
from ...models.decoder_config import EMBEDDING, FINAL_NORM, HEAD, DecoderConfig, is_unused, landmarks
from ...models.sharding import VocabParallelEmbedding, VocabParallelHead, shard_range
from ...models.side import SideEmbedding
from ...models.streams import StreamEnds
from .blocks import Angles, LayerBlocks, LayerStep, StreamedLayer
from .kernels import FusedKernels, FusedMethod, KernelMethod

if TYPE_CHECKING:  # it imports transformers: seconds
    from ...models.transformers_model import TransformersModel


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The rows of one step, on the device."""

    token_ids: torch.Tensor  # int64 [R]
    positions: torch.Tensor  # int64 [R]
    output_rows: torch.Tensor | None  # int64 [O] ascending: what the last layer computes; None: all
    given: Given | None = None
    rope_positions: torch.Tensor | None = None  # int64 [3, R], see `Batch`; None: `positions` on all axes
    states: StepStates | None = None  # None: the model has no recurrent states
    # Places among the outputs, of the rows of logits and of hidden states; None: all are rows of logits.
    hidden: tuple[torch.Tensor, torch.Tensor] | None = None
    adapters: torch.Tensor | None = None  # int32 [R], the number of adapters where a row uses none; None: no row does


class DeviceModel(Protocol):
    """A model that `CudaRunner` runs."""

    device: torch.device
    dtype: torch.dtype
    weights: str  # the name of their format
    vocab_size: int
    context_length: int
    adapters: int
    windows: tuple[Window, ...]  # the window classes that it passes to `AttentionStep`
    kv_geometry: KVGeometry
    state_geometry: StateGeometry | None  # None: it has no recurrent states
    attention_geometry: AttentionGeometry  # the heads that steps are planned for
    geometry_by_window: dict[Window, AttentionGeometry]  # those of the layers of a window class

    def forward(self, rows: DeviceRows, attention: AttentionStep, *, out: torch.Tensor) -> torch.Tensor | None:
        """Writes keys and values of all rows to the pool, and logits to `out` (float32 [L, vocab]).

        Returns hidden states after the final norm, [H, hidden]; None: `rows.hidden` asks for none.
        """


class CudaDecoder:
    """A whole model on one device, or the part of it that a rank of `communicator` has; see `TorchDecoder`.

    Args:
        kv_dtype: of the KV pool, which may be float8.
        kernels: the decoder's kernels.
        method: the weight format of the layers' linear maps, experts, embedding and head; None: floats of the dtype.
        adapters: by the index that `DeviceRows.adapters` has.

    Raises:
        ModelError: configuration or tensors that cannot be used.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Tensors,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        kernels: FusedKernels,
        communicator: Communicator = SINGLE_RANK,
        method: FusedMethod[Any] | None = None,  # Any: only the method reads its weights
        adapters: Sequence[Adapter] = (),
    ) -> None:
        method = method or KernelMethod(kernels)
        weights = Checkpoint(tensors, dtype=dtype, device=device)
        weights.require(landmarks(config, method))
        self.weights = dtype_name(dtype) if method.name == "dense" else method.name
        self.config = config
        self.device = device
        self.dtype = dtype
        self.vocab_size = config.vocab_size
        self.context_length = config.context_length
        self.windows = config.windows
        self.attention_geometry = config.attention_geometry
        self.geometry_by_window = config.geometry_by_window
        self.kv_geometry = config.kv_geometry(kv_dtype)
        self.state_geometry = config.state_geometry(dtype)
        self.adapters = len(adapters)
        self._kernels = kernels
        self._communicator = communicator
        first, end = shard_range(config.vocab_size, communicator.rank, communicator.ranks)
        shape = end - first, config.hidden_size
        embedding = packed_vocabulary(method, weights, EMBEDDING, *shape) or vocabulary_matrix(
            method, weights.take(EMBEDDING, *shape)
        )
        self._embedding = VocabParallelEmbedding(embedding, config, dtype=dtype, communicator=communicator)
        layers = [
            list(LayerBlocks(index, config, weights, kernels, method, adapters).blocks())
            for index in range(len(config.layers))
        ]
        self._blocks = [block for layer in layers for block in layer]
        self._last = [block for block in self._blocks if block.mixes][-1]
        self._streams: StreamEnds | None = None
        self._streamed: list[StreamedLayer] = []
        if config.streams is not None:
            self._streams = StreamEnds(config, config.streams, weights, method)
            self._streamed = [
                StreamedLayer(index, blocks, config, weights, method, kernels) for index, blocks in enumerate(layers)
            ]
        self._side = None if config.side is None else SideEmbedding(config, config.side, weights, method, dtype=dtype)
        self._norm = weights.take(FINAL_NORM, config.hidden_size)
        head = embedding
        if not config.tied:
            head = packed_vocabulary(method, weights, HEAD, *shape) or vocabulary_matrix(
                method, weights.take(HEAD, *shape)
            )
        own = CudaHead(head, scale=config.logit_scale, softcap=config.logit_softcap, kernels=kernels)
        self._head = VocabParallelHead(own, vocab_size=config.vocab_size, communicator=communicator)
        weights.finish(is_unused=partial(is_unused, config))
        self._tables: dict[Angles, torch.Tensor] = {}
        self._ropes: dict[Angles, Rope] = {}
        self._on_axes: dict[Angles, Rope] = {}  # for rows that do not turn by one position
        if config.latent is not None:
            self._ropes = {angles: Rope(*angles, device) for angles in config.angles}
        else:
            self._tables = {
                angles: rope_table(*angles, config.context_length, dtype=dtype, device=device)
                for angles in config.angles
            }
            self._on_axes = {angles: Rope(*angles, device) for angles in config.angles if angles[0].axes}

    def forward(self, rows: DeviceRows, attention: AttentionStep, *, out: torch.Tensor) -> torch.Tensor | None:
        """See `DeviceModel.forward`."""
        kernels = self._kernels
        residual = self._embedding(rows.token_ids, rows.given)  # [R, hidden]
        positions, tables = self._turns(rows)
        step = LayerStep(positions, attention, tables, rows.states)
        step.angles = {angles: rope.angles(rows.positions, self.dtype) for angles, rope in self._ropes.items()}
        step.sides = None if self._side is None else self._side(rows.token_ids, residual)
        if rows.adapters is not None:
            step.adapted = kernels.adapter_blocks(rows.adapters, self.adapters)
            if rows.output_rows is not None:
                continuing = rows.adapters.index_select(0, rows.output_rows)
                step.adapted_after = kernels.adapter_blocks(continuing, self.adapters)
        if self._streams is None:
            x = self._through_blocks(residual, step, rows)
        else:
            x = self._through_streams(self._streams, residual, step, rows)
        if rows.hidden is None:
            self._head(x, out)
            return None
        logits, hidden = rows.hidden
        self._head(x.index_select(0, logits), out)
        return x.index_select(0, hidden)

    def _through_blocks(self, residual: torch.Tensor, step: LayerStep, rows: DeviceRows) -> torch.Tensor:
        """Returns the hidden states of output rows after the final norm; residual: [R, hidden], of embeddings."""
        config, kernels = self.config, self._kernels
        x, first = residual, self._blocks[0].before
        if first is not None:
            x = kernels.rms_norm(residual, first, eps=config.norm_eps, centered=config.centered_norm)
        followers = [*(block.before for block in self._blocks[1:]), self._norm]
        for block, before in zip(self._blocks, followers, strict=True):
            kept = rows.output_rows if block is self._last else None
            x = block.compute(x, step, kept)
            if kept is not None:
                residual = residual.index_select(0, kept)
                step.keep(kept)
            if block.summed:
                x = self._communicator.all_reduce(x)
            if rows.given is not None and block.ends is not None and block.ends < len(rows.given.added):
                residual.index_add_(0, rows.given.rows, rows.given.added[block.ends])
            x = kernels.add_rms_norm(
                *(x, residual, before),
                eps=config.norm_eps,
                centered=config.centered_norm,
                after=block.after,
                scale=block.scale,
                factor=block.factor,
            )
        return x

    def _through_streams(
        self, streams: StreamEnds, embedded: torch.Tensor, step: LayerStep, rows: DeviceRows
    ) -> torch.Tensor:
        """Returns the same of a model with parallel streams."""
        x, last = streams.enter(embedded), len(self._streamed) - 1
        for index, layer in enumerate(self._streamed):
            x = layer(x, step, rows.output_rows if index == last else None)
        config = self.config
        return self._kernels.rms_norm(streams.leave(x), self._norm, eps=config.norm_eps, centered=config.centered_norm)

    def _turns(self, rows: DeviceRows) -> tuple[torch.Tensor, Mapping[Angles, torch.Tensor]]:
        """Returns the place of each row in the tables of angles, and the tables.

        By position where there is one axis, and in steps of text. In a step with pictures every row has its own.
        """
        turned = rows.rope_positions
        if turned is None:
            return rows.positions, self._tables
        assert len(self._on_axes) == len(self._tables), "all layers of a model turn by three axes, or by one"
        assert all(layer.query_scale is None for layer in self.config.layers), "it would read places as positions"
        tables = {
            angles: rope_rows(rope, angles[1], turned, dtype=self.dtype) for angles, rope in self._on_axes.items()
        }
        return torch.arange(turned.shape[1], device=turned.device), tables


class CudaHead:
    """Computes logits, with the cap that some models put on them.

    Args:
        weight: [vocab, hidden] in the model's dtype, or packed.
        scale: multiplies the logits.
        softcap: logits stay between it and its negative; 0: no cap.
    """

    def __init__(
        self, weight: torch.Tensor | QuantizedTensor, *, scale: float, softcap: float, kernels: FusedKernels
    ) -> None:
        self._weight = weight
        self._scale = scale
        self._softcap = softcap
        self._kernels = kernels

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [L, hidden] → out float32 [L, vocab]"""
        for rows, target in zip(torch.split(x, HEAD_ROWS), torch.split(out, HEAD_ROWS), strict=True):
            if not self._softcap:
                self._multiply(rows, target)
                if self._scale != 1.0:
                    target *= self._scale
                continue
            logits = self._multiply(rows)
            if self._scale != 1.0:
                logits = logits * self._scale
            target.copy_((logits / self._softcap).tanh() * self._softcap)

    def _multiply(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(self._weight, QuantizedTensor):
            return self._kernels.quantized_linear(x, self._weight, out=out)
        return self._kernels.linear(x, self._weight, out=out)


class TransformersDecoder:
    """A model of transformers whose attention is that of a `CudaRunner`; its layers are launched kernel by kernel.

    Args:
        kv_dtype: of the KV pool, which may be float8.
    """

    state_geometry: StateGeometry | None = None  # models with such states are refused
    adapters = 0

    def __init__(self, model: "TransformersModel", *, kv_dtype: torch.dtype) -> None:
        self._model = model
        self.device = model.device
        self.dtype = model.dtype
        self.weights = dtype_name(model.dtype)
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        self.windows = model.windows
        self.kv_geometry = model.kv_geometry.rounded_to(kv_dtype)
        self.attention_geometry = attention_geometry(model)
        self.geometry_by_window = model.geometry_by_window

    def forward(self, rows: DeviceRows, attention: AttentionStep, *, out: torch.Tensor) -> torch.Tensor | None:
        """See `DeviceModel.forward`."""
        assert rows.given is None, "models that see have a decoder of ours"
        outputs = rows.output_rows
        if outputs is None:
            outputs = torch.arange(len(rows.token_ids), device=self.device)
        hidden: torch.Tensor | None = None
        if rows.hidden is not None:
            outputs, hidden = (outputs.index_select(0, places) for places in rows.hidden)
        return self._model.forward(
            Rows(rows.token_ids, rows.positions, outputs, hidden_rows=hidden), attention, out=out
        )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
