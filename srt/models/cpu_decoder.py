"""The decoder families of `decoder.py` on the native kernels: one call per step.

Arithmetic is float32. Weights are rounded when they are packed (not at all when the checkpoint has them in that
format), keys and values when the pool is bfloat16. Where the CPU multiplies bfloat16 in tiles (AMX), a bfloat16 pool
also means that what is multiplied with BF16 weights is rounded; nothing else is, so logits lie closer to those of
float32 than the ones of a model that computes in bfloat16.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ..attention.backend import AttentionGeometry
from ..cache.kv_pool import KVGeometry, KVPool
from ..core.model import Given
from ..kernels.cpu.attention import CpuPlan, LayerArguments, layer_arguments
from ..kernels.cpu.decoder import DecoderKernel, DecoderLayer, DecoderShape, DecoderStep
from ..kernels.cpu.head import Head
from ..kernels.cpu.linear import Format, PackedMatrix
from ..layers.checkpoint import Checkpoint, Tensors
from ..layers.rope import Rope, RopeConfig
from .decoder import landmarks
from .decoder_config import DecoderConfig

ACTIVATION_CODES = {
    "silu": 0,
    "swish": 0,
    "gelu_new": 1,
    "gelu_pytorch_tanh": 1,
    "gelu": 2,
    "relu": 3,
}
ANGLES_AHEAD = 512  # positions of which angles are computed at once


@dataclass(frozen=True, slots=True)
class CpuRows:
    """The rows of one step, all on the host and contiguous."""

    token_ids: NDArray[np.int64]  # [R]
    positions: NDArray[np.int64]  # [R]
    write_slots: NDArray[np.int64]  # [R]
    output_rows: NDArray[np.int64]  # [L] ascending
    given: Given | None = None


class CpuDecoder:
    """A whole model: hidden states from `forward`, tokens and logits from `head`.

    Raises:
        ModelError: configuration or tensors that cannot be used.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Tensors,
        *,
        weights: Format,
        kv_dtype: torch.dtype,
        screened: bool,
        library: ctypes.CDLL,
    ) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.context_length = config.context_length
        self.kv_geometry = KVGeometry(len(config.layers), config.kv_heads, config.head_dim, kv_dtype)
        self.attention_geometry = AttentionGeometry(config.heads, config.kv_heads, config.head_dim)
        self.windows = config.windows
        self._kept: list[object] = []  # what the native structures point to
        self._checkpoint = Checkpoint(tensors, dtype=torch.float32, device=torch.device("cpu"))
        self._checkpoint.require(landmarks(config))
        self.weights = weights
        self._exact = kv_dtype is torch.float32
        self._library = library
        self._ropes = {rope: Angles(rope, config) for rope in dict.fromkeys(layer.rope for layer in config.layers)}

        embedding = self._checkpoint.take_as_stored("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        head = embedding
        if not config.tied:
            head = self._checkpoint.take_as_stored("lm_head.weight", config.vocab_size, config.hidden_size)
        self.head = Head(library, self._packed([_readable(head)]), screen=screened)
        embedding = _readable(embedding)
        self._kept.append(embedding)
        shape = DecoderShape(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            layers=len(config.layers),
            epsilon=config.norm_eps,
            attention_scale=config.attention_scale,
            embedding_scale=config.embedding_scale or 1.0,
            activation=ACTIVATION_CODES[config.activation],
            embedding=embedding.data_ptr(),
            embedding_is_bf16=int(embedding.dtype is torch.bfloat16),
            final_norm=self._norm("model.norm.weight", config.hidden_size),
        )
        layers = [self._layer(index) for index in range(len(config.layers))]
        self._checkpoint.finish(ignored=frozenset({"lm_head.weight"}) if config.tied else frozenset())
        self._kernel = DecoderKernel(library, shape, layers)

    def forward(
        self,
        rows: CpuRows,
        plans: Sequence[CpuPlan],  # by place in `windows`
        pool: "PoolTable",
        hidden: torch.Tensor,  # float32 [L, hidden], written
    ) -> None:
        """One step: keys and values of all rows go to the pool, hidden states of the output rows to `hidden`."""
        most = int(rows.positions.max()) + 1
        angles = [rope.upto(most) for rope in self._ropes.values()]
        plan_table = _array([ctypes.addressof(plan.arguments) for plan in plans])
        angle_table = _array(angles)
        given_rows = given_values = None
        if rows.given is not None:
            given_rows, given_values = rows.given.rows.contiguous(), rows.given.values.float().contiguous()
        step = DecoderStep(
            rows=len(rows.token_ids),
            outputs=len(rows.output_rows),
            token_ids=rows.token_ids.ctypes.data,
            positions=rows.positions.ctypes.data,
            write_slots=rows.write_slots.ctypes.data,
            output_rows=rows.output_rows.ctypes.data,
            plans=ctypes.addressof(plan_table),
            pools=ctypes.addressof(pool.layers),
            angles=ctypes.addressof(angle_table),
            hidden=hidden.data_ptr(),
            given=0 if given_rows is None else len(given_rows),
            given_rows=None if given_rows is None else given_rows.data_ptr(),
            given_values=None if given_values is None else given_values.data_ptr(),
        )
        self._kernel.forward(step)

    def _layer(self, index: int) -> DecoderLayer:
        config, layer = self.config, self.config.layers[index]
        hidden, wide = config.hidden_size, config.intermediate_size
        prefix = f"model.layers.{index}"
        heads, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv, qkv_bias = self._matrix(
            {f"{attention}.q_proj": heads, f"{attention}.k_proj": kv, f"{attention}.v_proj": kv},
            hidden,
            config.qkv_bias,
        )
        output, output_bias = self._matrix({f"{attention}.o_proj": hidden}, heads, config.output_bias)
        gate_up, gate_up_bias = self._matrix(
            {f"{mlp}.gate_proj": wide, f"{mlp}.up_proj": wide}, hidden, config.mlp_bias
        )
        down, down_bias = self._matrix({f"{mlp}.down_proj": hidden}, wide, config.mlp_bias)
        norm = {
            "before_attention": "input_layernorm",
            "after_attention": "post_attention_layernorm" if config.sandwich_norm else None,
            "before_mlp": "pre_feedforward_layernorm" if config.sandwich_norm else "post_attention_layernorm",
            "after_mlp": "post_feedforward_layernorm" if config.sandwich_norm else None,
        }
        return DecoderLayer(
            qkv=qkv,
            output=output,
            gate_up=gate_up,
            down=down,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            gate_up_bias=gate_up_bias,
            down_bias=down_bias,
            query_norm=self._norm(f"{attention}.q_norm.weight", config.head_dim) if config.qk_norm else None,
            key_norm=self._norm(f"{attention}.k_norm.weight", config.head_dim) if config.qk_norm else None,
            rope=list(self._ropes).index(layer.rope),
            plan=self.windows.index(layer.window),
            **{field: self._norm(f"{prefix}.{name}.weight", hidden) if name else None for field, name in norm.items()},
        )

    def _matrix(self, outputs: dict[str, int], inputs: int, biased: bool) -> tuple[int, int | None]:
        """Addresses of the packed matrix of maps stacked in this order, and of their bias."""
        take = self._checkpoint.take_as_stored
        sources = [_readable(take(f"{name}.weight", count, inputs)) for name, count in outputs.items()]
        matrix = self._packed(sources)
        self._kept.append(matrix)
        if not biased:
            return matrix.handle, None
        return matrix.handle, self._keep(
            torch.cat([self._checkpoint.take(f"{name}.bias", count) for name, count in outputs.items()])
        )

    def _packed(self, sources: Sequence[torch.Tensor]) -> PackedMatrix:
        return PackedMatrix(self._library, sources, self.weights, exact=self._exact)

    def _norm(self, name: str, size: int) -> int:
        weight = self._checkpoint.take(name, size)
        return self._keep(weight + 1.0 if self.config.centered_norm else weight)

    def _keep(self, tensor: torch.Tensor) -> int:
        contiguous = tensor.contiguous()
        self._kept.append(contiguous)
        return contiguous.data_ptr()


class PoolTable:
    """Where the keys and values of every layer are. Valid until the pool is cleared."""

    def __init__(self, pool: KVPool) -> None:
        entries = [layer_arguments(pool, layer) for layer in range(pool.geometry.layers)]
        self.layers = (LayerArguments * len(entries))(*entries)


class Angles:
    """Cosines and sines by position, [positions, head_dim], computed when a step first needs them."""

    def __init__(self, rope: RopeConfig, config: DecoderConfig) -> None:
        self._rope = Rope(rope, config.head_dim, "cpu")
        self._half = config.head_dim // 2
        self._table = np.zeros((config.context_length, config.head_dim), dtype=np.float32)  # untouched until filled
        self._known = 0

    def upto(self, positions: int) -> int:
        """The table's address; rows below `positions` are filled."""
        if positions > self._known:
            end = min(len(self._table), positions + ANGLES_AHEAD)
            cos, sin = self._rope.angles(torch.arange(self._known, end), torch.float32)  # [n, 1, head_dim]
            self._table[self._known : end, : self._half] = cos[:, 0, : self._half]
            self._table[self._known : end, self._half :] = sin[:, 0, self._half :]
            self._known = end
        return self._table.ctypes.data


def _readable(weight: torch.Tensor) -> torch.Tensor:
    """As stored where the kernels read that, else in float32."""
    return weight if weight.dtype in (torch.float32, torch.bfloat16) else weight.float()


def _array(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(addresses))(*addresses)
