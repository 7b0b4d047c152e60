"""Lays out latent attention for the native decoder, which computes it within its step: latent.h."""

import ctypes

import torch

from ..kernels.cpu.linear import PackedMatrix
from ..layers.checkpoint import Checkpoint
from ..layers.linear import QuantMethod
from .decoder_config import LatentConfig, LatentTensors
from .latent import by_head, head_maps, split_expansion

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_long


class LatentArguments(ctypes.Structure):
    """`Latent` of latent.h. Fields that are left out are null: queries are outputs of the first map."""

    _fields_ = [
        *((name, _LONG) for name in ("query_rank", "rank", "plain", "rotated", "value_dim")),
        ("interleaved", ctypes.c_int),
        ("epsilon", ctypes.c_float),
        *((name, _POINTER) for name in ("query", "into_latents", "to_values", "query_norm", "norm")),
    ]


class CpuLatents:
    """Latent attention of one layer. `arguments` points to its matrices, and is valid as long as this object."""

    def __init__(
        self,
        tensors: LatentTensors,
        config: LatentConfig,
        weights: Checkpoint,
        *,
        heads: int,
        interleaved: bool,
        method: QuantMethod[PackedMatrix],
    ) -> None:
        self._kept: list[object] = []
        if by_head(tensors, weights):
            into, out_of = ([method.load(weights, map) for map in maps] for maps in head_maps(tensors, config, heads))
        else:
            whole = split_expansion(weights.take_weights(tensors.expand)[0], config)
            into, out_of = ([method.create([head.contiguous()]) for head in maps] for maps in whole)
        self.arguments = LatentArguments(
            query_rank=config.query_rank,
            rank=config.rank,
            plain=config.plain,
            rotated=config.rotated,
            value_dim=config.value_dim,
            interleaved=interleaved,
            epsilon=config.norm_eps,
            into_latents=self._table(into),
            to_values=self._table(out_of),
            norm=self._norm(weights.take(tensors.norm, config.rank)),
        )
        if tensors.query is not None and tensors.query_norm is not None:
            query = method.load(weights, tensors.query)
            self._kept.append(query)
            self.arguments.query = query.handle
            self.arguments.query_norm = self._norm(weights.take(tensors.query_norm, config.query_rank))

    def _table(self, matrices: list[PackedMatrix]) -> int:
        """Returns the address of the addresses of the maps of the heads, each [outputs, inputs]."""
        table = (_POINTER * len(matrices))(*(matrix.handle for matrix in matrices))
        self._kept += [*matrices, table]
        return ctypes.addressof(table)

    def _norm(self, weight: torch.Tensor) -> int:
        self._kept.append(weight)
        return weight.data_ptr()
