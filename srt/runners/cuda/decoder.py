"""Runs the families' decoder on fused kernels: like `models.decoder`, with fewer passes over the rows.

                          in torch                                       here
    residual + norm       sum, norm, cast                                one kernel
    queries, keys         norm, cast, rope, two copies to the pool       one kernel
    gate                  activation, product                            one kernel; with few rows, its map included
    logits                product, conversion                            with few rows, one kernel

Products of few rows use umbel's kernels, all others torch's (cuBLAS). Kernels add to the residual in place. After the
last attention only rows whose logits are needed continue. R rows, L of them with logits, D = head_dim.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch

from ...attention.backend import AttentionStep
from ...core.batch import Given
from ...distributed.communicator import SINGLE_RANK, Communicator
from ...layers.checkpoint import Checkpoint, LinearTensors, Tensors
from ...layers.linear import HEAD_ROWS, DenseMethod, HeadNorm, Linear, QuantMethod
from ...layers.quantized import QuantizedMethod, QuantizedTensor, QuantizedWeight, vocabulary_matrix
from ...layers.rope import RopeConfig, rope_table
from ...models.decoder_config import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    DecoderConfig,
    LayerTensors,
    is_unused,
    landmarks,
    layer_tensors,
)
from ...models.experts import ExpertKernels, Experts
from ...models.sharding import VocabParallelEmbedding, VocabParallelHead, shard_range

Weight = TypeVar("Weight")


class FusedKernels(ExpertKernels, Protocol):
    """The decoder's kernels: those in Triton, or `kernels.triton.reference` in plain torch.

    The files in `kernels/triton` document their arguments and results.
    """

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, *, eps: float, centered: bool, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        *,
        eps: float,
        centered: bool,
        after: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor: ...

    def gated(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor: ...

    def rope_and_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        table: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        head_norm: HeadNorm | None = None,
        rotated: int | None = None,
        interleaved: bool = False,
    ) -> torch.Tensor: ...

    def act_and_multiply(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor: ...

    def quantized_linear(
        self, x: torch.Tensor, weight: QuantizedTensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...


class FusedMethod(QuantMethod[Weight], Protocol[Weight]):
    """A weight format of the CUDA decoder, which can multiply and gate in one call."""

    def apply_gated(self, weight: Weight, x: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
        """Computes activation(gate) × up for [gate, up] = x Wᵀ + bias: [R, inputs] → [R, outputs / 2]"""


class KernelMethod(DenseMethod):
    """Stores weights as floats of the model's dtype and multiplies them with the decoder's kernels."""

    def __init__(self, kernels: FusedKernels) -> None:
        self._kernels = kernels

    def apply(self, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._kernels.linear(x, weight, bias)

    def apply_gated(
        self, weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        return self._kernels.gated(x, weight, bias, activation)


class QuantizedKernelMethod(QuantizedMethod):
    """Multiplies what another method loads, packed matrices, with the decoder's kernels.

    Args:
        loader: loads the weights.
    """

    def __init__(self, loader: QuantizedMethod, kernels: FusedKernels) -> None:
        self._loader = loader
        self._kernels = kernels
        self.name = loader.name
        self.rounds_vocabulary = loader.rounds_vocabulary

    def load(self, checkpoint: Checkpoint, tensors: LinearTensors) -> QuantizedWeight:
        return self._loader.load(checkpoint, tensors)

    def apply(self, weight: QuantizedWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        products = [
            self._kernels.quantized_linear(x, part)
            if isinstance(part, QuantizedTensor)
            else self._kernels.linear(x, part)
            for part in weight
        ]
        out = products[0] if len(products) == 1 else torch.cat(products, dim=1)
        return out if bias is None else out + bias

    def apply_gated(
        self, weight: QuantizedWeight, x: torch.Tensor, bias: torch.Tensor | None, activation: str
    ) -> torch.Tensor:
        return self._kernels.act_and_multiply(self.apply(weight, x, bias), activation)


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """The rows of one step, on the device."""

    token_ids: torch.Tensor  # int64 [R]
    positions: torch.Tensor  # int64 [R]
    logit_rows: torch.Tensor | None  # int64 [L] ascending; None: all
    given: Given | None = None


class CudaDecoder:
    """A whole model on one device, or the part of it that a rank of `communicator` has; see `TorchDecoder`.

    Args:
        kv_dtype: of the KV pool, which may be float8.
        kernels: the decoder's kernels.
        method: the weight format of the layers' linear maps; None: floats of the dtype. Experts and head are floats.

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
    ) -> None:
        method = method or KernelMethod(kernels)
        weights = Checkpoint(tensors, dtype=dtype, device=device)
        weights.require(landmarks(config, method))
        self.method = method
        self.config = config
        self.device = device
        self.dtype = dtype
        self.vocab_size = config.vocab_size
        self.context_length = config.context_length
        self.windows = config.windows
        self.kv_geometry = config.kv_geometry(kv_dtype)
        self._kernels = kernels
        self._communicator = communicator
        first, end = shard_range(config.vocab_size, communicator.rank, communicator.ranks)
        embedding = vocabulary_matrix(method, weights.take(EMBEDDING, end - first, config.hidden_size))
        self._embedding = VocabParallelEmbedding(embedding, config, dtype=dtype, communicator=communicator)
        self._layers = [_LayerWeights(index, config, weights, kernels, method) for index in range(len(config.layers))]
        self._norm = weights.take(FINAL_NORM, config.hidden_size)
        head = embedding
        if not config.tied:
            head = vocabulary_matrix(method, weights.take(HEAD, end - first, config.hidden_size))
        own = CudaHead(head, scale=config.logit_scale, softcap=config.logit_softcap, kernels=kernels)
        self._head = VocabParallelHead(own, vocab_size=config.vocab_size, communicator=communicator)
        weights.finish(is_unused=partial(is_unused, config))
        self._tables: dict[RopeConfig, torch.Tensor] = {
            rope: rope_table(rope, config.head_dim, config.context_length, dtype=dtype, device=device)
            for rope in {layer.rope for layer in config.layers}
        }

    def forward(self, rows: DeviceRows, attention: AttentionStep, *, out: torch.Tensor) -> None:
        """Writes keys and values of all rows to the pool, and logits to `out` (float32 [L, vocab])."""
        config, kernels = self.config, self._kernels
        residual = self._embedding(rows.token_ids, rows.given)  # [R, hidden]
        first, last = self._layers[0], self._layers[-1]
        x = residual
        if first.before_attention is not None:
            x = kernels.rms_norm(residual, first.before_attention, eps=config.norm_eps, centered=self._centered)
        for layer, following in zip(self._layers, [*self._layers[1:], None], strict=True):
            attended = self._attend(layer, x, rows, attention)
            if layer is last and rows.logit_rows is not None:
                attended = attended.index_select(0, rows.logit_rows)
                residual = residual.index_select(0, rows.logit_rows)
            x = self._communicator.all_reduce(layer.output(attended))
            x = self._add_norm(x, residual, layer.before_mlp, after=layer.after_attention)
            x = self._communicator.all_reduce(layer.mlp(x))
            following_norm = self._norm if following is None else following.before_attention
            x = self._add_norm(x, residual, following_norm, after=layer.after_mlp)
        self._head(x, out)

    @property
    def _centered(self) -> bool:
        return self.config.centered_norm

    def _add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, *, after: torch.Tensor | None
    ) -> torch.Tensor:
        config = self.config
        return self._kernels.add_rms_norm(
            *(x, residual, weight),
            eps=config.norm_eps,
            centered=config.centered_norm,
            after=after,
            scale=config.residual_scale,
        )

    def _attend(
        self, layer: "_LayerWeights", x: torch.Tensor, rows: DeviceRows, attention: AttentionStep
    ) -> torch.Tensor:
        """Computes the input of the output map: [R, hidden] → [R, heads · D]."""
        pool, config = attention.pool, self.config
        qkv = layer.qkv(x)
        begin = 0
        for weight in layer.whole_norms:  # of the queries and of the keys, in place
            part = qkv[:, begin : begin + len(weight)]
            self._kernels.rms_norm(part, weight, eps=config.norm_eps, centered=self._centered, out=part)
            begin += len(weight)
        queries = self._kernels.rope_and_store(
            qkv,
            rows.positions,
            attention.write_slots,
            self._tables[layer.rope],
            pool.keys[layer.index],
            pool.values[layer.index],
            head_norm=layer.head_norm,
            rotated=layer.rope.rotated(config.head_dim),
            interleaved=layer.rope.interleaved,
        )
        if layer.query_scale is not None:
            queries *= layer.query_scale.at(rows.positions, queries.dtype)
        attended = attention.backend.attend(
            *(layer.index, queries, pool, attention.plans[layer.window]),
            scale=config.attention_scale,
            softcap=config.attention_softcap,
        )
        return attended.flatten(1)


class _LayerWeights:
    """The weights of one layer; maps that share an input are fused to one product."""

    # Any: each method has its own form of weight, and only the method reads it.
    def __init__(
        self, index: int, config: DecoderConfig, weights: Checkpoint, kernels: FusedKernels, method: FusedMethod[Any]
    ) -> None:
        layer, tensors = config.layers[index], layer_tensors(config, index)
        self.index = index
        self.window = layer.window
        self.rope = layer.rope
        self.query_scale = layer.query_scale
        hidden, head_dim = config.hidden_size, config.head_dim

        def norm(name: str | None) -> torch.Tensor | None:
            return None if name is None else weights.take(name, hidden)

        self.before_attention = norm(tensors.before_attention)
        self.qkv = Linear(method, weights, tensors.qkv)
        self.head_norm: HeadNorm | None = None
        self.whole_norms: tuple[torch.Tensor, ...] = ()  # of all queries of a row, and of all its keys
        if tensors.query_norm is not None and tensors.key_norm is not None:
            sizes = (config.heads * head_dim, config.kv_heads * head_dim) if config.qk_norm_whole else (head_dim,) * 2
            query, key = weights.take(tensors.query_norm, sizes[0]), weights.take(tensors.key_norm, sizes[1])
            if config.qk_norm_whole:
                self.whole_norms = query, key
            else:
                self.head_norm = HeadNorm(query, key, eps=config.norm_eps, centered=config.centered_norm)
        self.output = Linear(method, weights, tensors.output)
        self.after_attention = norm(tensors.after_attention)
        self.before_mlp = norm(tensors.before_mlp)
        self.after_mlp = norm(tensors.after_mlp)
        self.mlp: _GatedMLP | Experts
        if layer.experts is None:
            self.mlp = _GatedMLP(tensors, config, weights, method)
        else:
            self.mlp = Experts(
                tensors.prefix, layer.experts, weights, hidden=hidden, activation=config.activation, kernels=kernels
            )


class _GatedMLP:
    """Computes down(activation(gate(x)) × up(x)), gate and up with one product."""

    # Any: as above.
    def __init__(
        self, tensors: LayerTensors, config: DecoderConfig, weights: Checkpoint, method: FusedMethod[Any]
    ) -> None:
        self._method = method
        self._gate_up = method.load(weights, tensors.gate_up)
        self._gate_up_bias = weights.take_bias(tensors.gate_up)
        self._down = Linear(method, weights, tensors.down)
        self._activation = config.activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._method.apply_gated(self._gate_up, x, self._gate_up_bias, self._activation))


class CudaHead:
    """Computes logits, with the cap that some models put on them.

    Args:
        weight: [vocab, hidden] in the model's dtype, or in 8 bits.
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
