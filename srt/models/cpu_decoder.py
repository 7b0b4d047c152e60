"""Runs the families' decoder on the native CPU kernels, with one call per step.

Arithmetic is float32. Weights are rounded when they are packed (unless the checkpoint already has that format), keys
and values when the pool is bfloat16. Where the CPU multiplies bfloat16 (AMX, AVX512-BF16), a bfloat16 pool also rounds
the inputs of products with BF16 weights. Nothing else is rounded, so logits are closer to those of float32 than the
logits of a model that computes in bfloat16.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from ...lang.errors import EngineError
from ..cache.kv_pool import KVPool
from ..core.batch import Given, StateRun
from ..kernels.cpu.attention import CpuPlan, LayerArguments, layer_arguments
from ..kernels.cpu.head import Head
from ..kernels.cpu.linear import Format, PackedMatrix
from ..kernels.cpu.low_rank import AdaptedRows, AdapterGroups, AdapterMemory, CpuChanges
from ..kernels.cpu.recurrent import RunTable, StateRuns, StateTable
from ..layers.checkpoint import Checkpoint, LinearTensors, Tensors
from ..layers.linear import QuantMethod
from ..layers.low_rank import Adapter
from ..layers.rope import Rope, RopeConfig
from .cpu_experts import CpuExperts
from .cpu_latents import CpuLatents
from .cpu_recurrent import CpuRecurrent
from .cpu_side import CpuSide, EmbeddingRows
from .cpu_streams import CpuStreams
from .decoder_config import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    DecoderConfig,
    ExpertsConfig,
    LayerTensors,
    deviations_of,
    is_unused,
    landmarks,
    layer_tensors,
)

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_long
_FLOAT = ctypes.c_float


class DecoderShape(ctypes.Structure):
    """`DecoderShape` of decoder.h."""

    _fields_ = [
        *((name, _LONG) for name in ("hidden", "heads", "layers")),
        *((name, _FLOAT) for name in ("epsilon", "attention_scale", "attention_softcap")),
        *((name, _FLOAT) for name in ("embedding_scale", "residual_scale")),
        ("activation", ctypes.c_int),
        *((name, ctypes.c_int) for name in ("whole_norm", "gated_mlp", "gated_attention")),
        ("embedding", _POINTER),
        ("embedding_format", ctypes.c_int),
        ("embedding_row_bytes", _LONG),
        ("final_norm", _POINTER),
        *((name, _POINTER) for name in ("side", "streams")),
    ]


class DecoderLayer(ctypes.Structure):
    """`DecoderLayer` of decoder.h. Fields that are left out are null: the layer does not have them."""

    _fields_ = [
        *((name, _LONG) for name in ("pool", "kv_heads", "own_kv_heads", "head_dim", "width")),
        ("sparse", ctypes.c_int),
        ("deviations", _FLOAT),
        *((name, _POINTER) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _POINTER) for name in ("qkv_bias", "output_bias", "gate_up_bias", "down_bias")),
        *((name, _POINTER) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp")),
        *((name, _POINTER) for name in ("query_norm", "key_norm", "value_norm", "sinks")),
        *((name, _POINTER) for name in ("latent", "recurrent", "side", "streams")),
        ("scale", _FLOAT),
        ("experts", _POINTER),
        ("rope", _LONG),
        ("plan", _LONG),
        ("rotated", _LONG),
        ("interleaved", ctypes.c_int),
        ("query_beta", _FLOAT),
        ("query_length", _LONG),
        ("query_offset", _LONG),
        *((name, _POINTER) for name in ("qkv_changes", "output_changes", "gate_up_changes", "down_changes")),
    ]


class DecoderStep(ctypes.Structure):
    """`DecoderStep` of decoder.h."""

    _fields_ = [
        ("rows", _LONG),
        ("outputs", _LONG),
        *((name, _POINTER) for name in ("token_ids", "positions", "write_slots", "output_rows")),
        *((name, _POINTER) for name in ("plans", "pools", "states")),
        ("runs", StateRuns),
        *((name, _POINTER) for name in ("angles", "hidden")),
        ("given", _LONG),
        *((name, _POINTER) for name in ("given_rows", "given_values")),
        ("added", _LONG),
        ("added_values", _POINTER),
        *((name, AdapterGroups) for name in ("adapted", "adapted_outputs")),
    ]


class DecoderKernel:
    """The native decoder. The caller owns the memory that its structures point to and keeps it alive."""

    def __init__(self, library: ctypes.CDLL, shape: DecoderShape, layers: Sequence[DecoderLayer]) -> None:
        library.umbel_decoder_create.argtypes = [_POINTER]
        library.umbel_decoder_create.restype = _POINTER
        library.umbel_decoder_free.argtypes = [_POINTER]
        library.umbel_decoder_free.restype = None
        library.umbel_decoder_set_layer.argtypes = [_POINTER, _LONG, _POINTER]
        library.umbel_decoder_set_layer.restype = None
        library.umbel_decoder_forward.argtypes = [_POINTER, _POINTER]
        library.umbel_decoder_forward.restype = ctypes.c_int
        self._library = library
        self._handle = library.umbel_decoder_create(ctypes.byref(shape))
        for index, layer in enumerate(layers):
            library.umbel_decoder_set_layer(self._handle, index, ctypes.byref(layer))

    def forward(self, step: DecoderStep) -> None:
        """Runs one step. Raises EngineError when there is no memory for its buffers."""
        if not self._library.umbel_decoder_forward(self._handle, ctypes.byref(step)):
            raise EngineError(
                f"there is no memory for the buffers of a step of {step.rows} rows; write a smaller chunk_size or pool"
            )

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.umbel_decoder_free(self._handle)


ACTIVATION_CODES = {
    "silu": 0,
    "swish": 0,
    "gelu_new": 1,
    "gelu_pytorch_tanh": 1,
    "gelu": 2,
    "relu": 3,
    "relu2": 4,
}
ANGLES_AHEAD = 512  # positions whose angles are computed ahead
FIRST_ANGLES = 4096  # positions of a new table
ANGLES_AT_ONCE = 64  # positions; torch divides more among OpenMP threads, and starting those takes 0.1 s


@dataclass(frozen=True, slots=True)
class CpuRows:
    """The rows of one step, all on the host and contiguous."""

    token_ids: NDArray[np.int64]  # [R]
    positions: NDArray[np.int64]  # [R]
    write_slots: Sequence[NDArray[np.int64]]  # [R] for each window class, by place in `windows`
    output_rows: NDArray[np.int64]  # [L] ascending
    given: Given | None = None
    adapters: NDArray[np.int32] | None = None  # [R], see `Batch.adapters`
    runs: Sequence[StateRun] = ()
    rope_positions: NDArray[np.int64] | None = None  # [3, R], see `Batch.rope_positions`


class CpuDecoder:
    """A whole model: `forward` computes hidden states, `head` tokens and logits.

    Args:
        method: the weight format of the layers' linear maps. The native step multiplies the weights
            that it creates, without a call of `apply`.
        screened: the head chooses tokens without computing all logits where it can.
        adapters: by the index that `CpuRows.adapters` has.
        head_method: the weight format of the head; None: that of the layers.

    Raises:
        ModelError: configuration or tensors that cannot be used.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Tensors,
        *,
        method: QuantMethod[PackedMatrix],
        kv_dtype: torch.dtype,
        screened: bool,
        library: ctypes.CDLL,
        adapters: Sequence[Adapter] = (),
        head_method: QuantMethod[PackedMatrix] | None = None,
    ) -> None:
        self.config = config
        self._library = library
        self._adapters, self._adapter_memory = adapters, AdapterMemory(library)
        self.vocab_size = config.vocab_size
        self.context_length = config.context_length
        self.kv_geometry = config.kv_geometry(kv_dtype)
        self.state_geometry = config.state_geometry(torch.float32)
        self.attention_geometry = config.attention_geometry
        self.windows = config.windows
        self._kept: list[object] = []  # tensors that the native structures point to
        self._checkpoint = Checkpoint(tensors, dtype=torch.float32, device=torch.device("cpu"))
        self._checkpoint.require(landmarks(config, method))
        self.method = method
        self._ropes = {angles: Angles(*angles) for angles in config.angles}

        head = LinearTensors(
            ((EMBEDDING if config.tied else HEAD).removesuffix(".weight"),),
            (config.vocab_size,),
            config.hidden_size,
            fine_inputs=True,
        )
        self.head = Head(library, (head_method or method).load(self._checkpoint, head), screen=screened)
        self._embedding = EmbeddingRows(self._checkpoint, EMBEDDING, config.vocab_size, config.hidden_size)
        self._side: CpuSide | None = None
        if config.side is not None:
            self._side = CpuSide(config, config.side, self._checkpoint, method=method)
        self._streams: CpuStreams | None = None
        if config.streams is not None:
            self._streams = CpuStreams(config, config.streams, self._checkpoint, method=method)
        shape = DecoderShape(
            hidden=config.hidden_size,
            heads=config.heads,
            layers=len(config.layers),
            epsilon=config.norm_eps,
            attention_scale=config.attention_scale,
            attention_softcap=config.attention_softcap,
            embedding_scale=config.embedding_scale or 1.0,
            residual_scale=config.residual_scale,
            activation=ACTIVATION_CODES[config.activation],
            whole_norm=int(config.qk_norm_whole),
            gated_mlp=int(config.gated_mlp),
            gated_attention=int(config.gated_attention),
            embedding=self._embedding.address,
            embedding_format=self._embedding.format.value,
            embedding_row_bytes=self._embedding.row_bytes,
            # The head multiplies what this norm gives, so scaled weights scale the logits.
            final_norm=self._norm(FINAL_NORM, config.hidden_size, scale=config.logit_scale),
            side=None if self._side is None else ctypes.addressof(self._side.arguments),
            streams=None if self._streams is None else ctypes.addressof(self._streams.arguments),
        )
        layers = [self._layer(index) for index in range(len(config.layers))]
        self._checkpoint.finish(is_unused=partial(is_unused, config))
        self._kernel = DecoderKernel(library, shape, layers)

    def forward(
        self,
        rows: CpuRows,
        plans: Sequence[CpuPlan],  # by place in `windows`
        pool: "PoolTable",
        hidden: torch.Tensor,  # float32 [L, hidden], written
        states: StateTable | None = None,  # None: the model has no recurrent states
    ) -> None:
        """Runs one step: writes keys and values of all rows to the pool, hidden states of output rows to `hidden`.

        States move as `rows.runs` say.
        """
        places, tables = self._angles(rows)
        plan_table = _array([ctypes.addressof(plan.arguments) for plan in plans])
        write_table = _array([slots.ctypes.data for slots in rows.write_slots])
        angle_table = _array([table.ctypes.data for table in tables])
        step = DecoderStep(  # what few steps have is null, or added below
            rows=len(rows.token_ids),
            outputs=len(rows.output_rows),
            token_ids=rows.token_ids.ctypes.data,
            positions=places.ctypes.data,
            write_slots=ctypes.addressof(write_table),
            output_rows=rows.output_rows.ctypes.data,
            plans=ctypes.addressof(plan_table),
            pools=ctypes.addressof(pool.layers),
            states=None if states is None else ctypes.addressof(states.layers),
            angles=ctypes.addressof(angle_table),
            hidden=hidden.data_ptr(),
        )
        if rows.runs:
            runs = RunTable(rows.runs)
            step.runs = runs.arguments
        if rows.given is not None:
            added = [values.float().contiguous() for values in rows.given.added]
            given_rows, given_values = rows.given.rows.contiguous(), rows.given.values.float().contiguous()
            added_table = _array([values.data_ptr() for values in added])
            step.given, step.given_rows = len(given_rows), given_rows.data_ptr()
            step.given_values = given_values.data_ptr()
            step.added, step.added_values = len(added), ctypes.addressof(added_table)
        if rows.adapters is not None:
            adapted, adapted_outputs = AdaptedRows(rows.adapters), AdaptedRows(rows.adapters[rows.output_rows])
            step.adapted, step.adapted_outputs = adapted.arguments, adapted_outputs.arguments
        self._kernel.forward(step)
        self._embedding.used(len(rows.token_ids))
        if self._side is not None:
            self._side.embedding.used(len(rows.token_ids))

    def _angles(self, rows: CpuRows) -> tuple[NDArray[np.int64], list[NDArray[np.float32]]]:
        """Returns the place of each row in the tables of angles, and the tables, by place in `_ropes`.

        By position where there is one axis, and in steps of text. In a step with pictures every row has its own.
        """
        positions = rows.positions
        if rows.rope_positions is not None:
            assert all(layer.query_scale is None for layer in self.config.layers), "it would read other positions"
            if rows.given is not None:
                places = np.arange(len(rows.token_ids), dtype=np.int64)
                return places, [rope.at(rows.rope_positions) for rope in self._ropes.values()]
            positions = rows.rope_positions[0]  # text is at one position on all axes
        most = int(positions.max()) + 1
        return positions, [rope.upto(most) for rope in self._ropes.values()]

    def _layer(self, index: int) -> DecoderLayer:
        config, layer, tensors = self.config, self.config.layers[index], layer_tensors(self.config, index)
        hidden = config.hidden_size
        native = DecoderLayer(scale=1.0 if tensors.scale is None else float(self._checkpoint.take(tensors.scale, 1)))
        if layer.mixes:
            native.before_attention = self._norm(tensors.before_attention, hidden)
            native.after_attention = self._norm(tensors.after_attention, hidden)
        if layer.recurrent is not None:
            self._add_recurrent(native, index)
        elif layer.mixes:
            self._add_attention(native, index, tensors)
        if self._side is not None and tensors.side is not None:
            native.side = ctypes.addressof(self._side.layer(tensors.side))
        if self._streams is not None:
            native.streams = ctypes.addressof(self._streams.layer(tensors.prefix))
        if layer.mlp:
            native.before_mlp = self._norm(tensors.before_mlp, hidden)
            native.after_mlp = self._norm(tensors.after_mlp, hidden)
        if layer.mlp and layer.experts is None:
            native.width = config.width_of(index)
            if layer.sparsity:
                native.sparse, native.deviations = 1, deviations_of(layer.sparsity)
            native.gate_up, native.gate_up_bias, native.gate_up_changes = self._linear(tensors.gate_up)
            native.down, native.down_bias, native.down_changes = self._linear(tensors.down)
        elif layer.mlp and layer.experts is not None:
            native.experts = self._experts(tensors.prefix, layer.experts)
        return native

    def _add_attention(self, native: DecoderLayer, index: int, tensors: LayerTensors) -> None:
        config, layer = self.config, self.config.layers[index]
        scale, head_dim, own_kv_heads = layer.query_scale, config.head_dim_of(index), config.own_kv_heads(index)
        native.pool = sum(before.attends for before in config.layers[:index])
        native.kv_heads, native.own_kv_heads, native.head_dim = config.kv_heads_of(index), own_kv_heads, head_dim
        native.qkv, native.qkv_bias, native.qkv_changes = self._linear(tensors.qkv)
        native.output, native.output_bias, native.output_changes = self._linear(tensors.output)
        whole = config.qk_norm_whole
        native.query_norm = self._norm(tensors.query_norm, head_dim * (config.heads if whole else 1))
        native.key_norm = self._norm(tensors.key_norm, head_dim * (own_kv_heads if whole else 1))
        native.value_norm = self._norm(tensors.value_norm, head_dim)
        if tensors.sinks is not None:
            native.sinks = self._keep(self._checkpoint.take(tensors.sinks, config.heads))
        native.rope = list(self._ropes).index(config.angles_of(index))
        native.plan = self.windows.index(layer.window)
        native.rotated, native.interleaved = layer.rope.rotated(head_dim), int(layer.rope.interleaved)
        native.query_length = 1
        if scale is not None:
            native.query_beta, native.query_length, native.query_offset = scale.beta, scale.length, scale.offset
        if tensors.latent is not None and config.latent is not None:
            latents = CpuLatents(
                tensors.latent,
                config.latent,
                self._checkpoint,
                heads=config.heads,
                interleaved=layer.rope.interleaved,
                method=self.method,
            )
            self._kept.append(latents)
            native.latent = ctypes.addressof(latents.arguments)

    def _add_recurrent(self, native: DecoderLayer, index: int) -> None:
        recurrent = CpuRecurrent(index, self.config, self._checkpoint, ACTIVATION_CODES)
        self._kept.append(recurrent)
        native.recurrent = ctypes.addressof(recurrent.arguments)
        native.pool = sum(before.recurrent is not None for before in self.config.layers[:index])
        native.qkv, native.qkv_bias, native.qkv_changes = self._linear(recurrent.into)
        native.output, native.output_bias, native.output_changes = self._linear(recurrent.output)

    def _experts(self, prefix: str, config: ExpertsConfig) -> int:
        """Loads the experts of a layer and returns the address of their description."""
        hidden = self.config.hidden_size
        experts = CpuExperts(prefix, config, self._checkpoint, hidden=hidden, method=self.method, library=self._library)
        self._kept.append(experts)
        return ctypes.addressof(experts.arguments)

    def _linear(self, tensors: LinearTensors) -> tuple[int, int | None, int | None]:
        """Loads linear maps and returns the addresses of their weight, their bias and what adapters change of them."""
        matrix, bias = self.method.load(self._checkpoint, tensors), self._checkpoint.take_bias(tensors)
        exact = set(matrix.formats) == {Format.F32}
        changes = CpuChanges(self._adapters, tensors, self._adapter_memory, exact=exact)
        self._kept += [matrix, changes]
        return matrix.handle, None if bias is None else self._keep(bias), changes.address

    def _norm(self, name: str | None, size: int, *, scale: float = 1.0) -> int | None:
        """Loads a norm and returns the address of its weight, times `scale`; None: the layer has no such norm."""
        if name is None:
            return None
        weight = self._checkpoint.take(name, size)
        return self._keep((weight + 1.0 if self.config.centered_norm else weight) * scale)

    def _keep(self, tensor: torch.Tensor) -> int:
        contiguous = tensor.contiguous()
        self._kept.append(contiguous)
        return contiguous.data_ptr()


class PoolTable:
    """Holds the addresses of every layer's keys and values. Valid until the pool is cleared."""

    def __init__(self, pool: KVPool) -> None:
        entries = [layer_arguments(pool, layer) for layer in range(len(pool.geometry.layers))]
        self.layers = (LayerArguments * len(entries))(*entries)


class Angles:
    """Caches cosines and sines by position, [positions, head_dim], computed when a step first needs them.

    The table grows with the longest sequence, so that a long context costs no memory before it is used. Where only some
    dimensions of a head are rotated, the places of the others are not used.
    """

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        self._rope = Rope(rope, head_dim, "cpu")
        self._half, self._pairs = head_dim // 2, rope.rotated(head_dim) // 2
        self._table = np.zeros((FIRST_ANGLES, head_dim), dtype=np.float32)  # untouched until filled
        self._known = 0

    def upto(self, positions: int) -> NDArray[np.float32]:
        """Fills the rows below `positions` and returns the table, which is another one when it has grown."""
        if positions > self._known:
            end = positions + ANGLES_AHEAD
            if end > len(self._table):
                longer = np.zeros((max(end, 2 * len(self._table)), self._table.shape[1]), dtype=np.float32)
                longer[: self._known] = self._table[: self._known]
                self._table = longer
            for first in range(self._known, end, ANGLES_AT_ONCE):
                rows = slice(first, min(first + ANGLES_AT_ONCE, end))
                self._fill(self._table[rows], torch.arange(rows.start, rows.stop))
            self._known = end
        return self._table

    def at(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """Computes a table for positions on three axes, [3, R]: [R, head_dim]"""
        count = positions.shape[1]
        table = np.zeros((count, self._table.shape[1]), dtype=np.float32)
        for first in range(0, count, ANGLES_AT_ONCE):
            rows = slice(first, first + ANGLES_AT_ONCE)
            self._fill(table[rows], torch.from_numpy(positions[:, rows]))
        return table

    def _fill(self, table: NDArray[np.float32], positions: torch.Tensor) -> None:
        cos, sin = self._rope.angles(positions, torch.float32)  # [n, 1, 2 pairs]
        table[:, : self._pairs] = cos[:, 0, : self._pairs]
        table[:, self._half : self._half + self._pairs] = sin[:, 0, self._pairs :]


def _array(addresses: Sequence[int]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(addresses))(*addresses)
