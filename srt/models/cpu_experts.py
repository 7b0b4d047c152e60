"""Lays out mixtures of experts for the native decoder, which runs them within its step: experts.h."""

import ctypes

import torch

from ..kernels.cpu.linear import Format, PackedMatrix
from ..layers.checkpoint import Checkpoint
from ..layers.linear import QuantMethod
from ..layers.quantized import KeepsQuantized
from .decoder_config import ExpertsConfig, RouterScore
from .expert_tensors import ExpertTensors

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_long
_FLOAT = ctypes.c_float


class ExpertsArguments(ctypes.Structure):
    """`Experts` of experts.h. Fields that are left out are null or 0: the mixture does not have them."""

    _fields_ = [
        *((name, _LONG) for name in ("count", "chosen", "width", "groups", "chosen_groups")),
        *((name, ctypes.c_int) for name in ("sigmoid", "renormalise", "weigh_input", "gated")),
        *((name, _FLOAT) for name in ("scale", "limit", "alpha")),
        *((name, _POINTER) for name in ("router", "router_bias", "correction", "gate_up", "down")),
        *((name, _POINTER) for name in ("gate_up_bias", "down_bias")),
        *((name, _POINTER) for name in ("shared_gate_up", "shared_down", "shared_gate")),
        ("shared_width", _LONG),
    ]


class CpuExperts:
    """The experts of one layer. `arguments` points to its matrices, and is valid as long as this object.

    The router is multiplied in float32: a weight that is rounded could send a token to another expert.
    """

    def __init__(
        self,
        prefix: str,
        config: ExpertsConfig,
        weights: Checkpoint,
        *,
        hidden: int,
        method: QuantMethod[PackedMatrix],
        library: ctypes.CDLL,
    ) -> None:
        self._kept: list[object] = []
        tensors = ExpertTensors(prefix, config, weights, hidden=hidden)
        if isinstance(method, KeepsQuantized) and method.keeps_packed and (packed := tensors.packed_matrices()):
            pairs = [(method.create_quantized(gate_up), method.create_quantized(down)) for gate_up, down in packed]
        elif tensors.stacked:
            pairs = [(method.create([gate_up]), method.create([down])) for gate_up, down in tensors.matrices()]
        else:
            maps = (tensors.maps(expert) for expert in range(config.count))
            pairs = [(method.load(weights, gate_up), method.load(weights, down)) for gate_up, down in maps]
        self.arguments = ExpertsArguments(
            count=config.count,
            chosen=config.chosen,
            width=config.width,
            groups=config.groups,
            chosen_groups=config.chosen_groups,
            sigmoid=config.scoring is RouterScore.SIGMOID,
            renormalise=config.renormalise,
            weigh_input=config.weigh_input,
            gated=config.gated,
            scale=config.scale,
            limit=config.gate.limit if config.gate else 0.0,
            alpha=config.gate.alpha if config.gate else 0.0,
            router=self._matrix(PackedMatrix(library, [tensors.router.float()], Format.F32)),
            router_bias=self._tensor(tensors.router_bias),
            correction=self._tensor(tensors.correction),
            gate_up=self._table([gate_up for gate_up, _ in pairs]),
            down=self._table([down for _, down in pairs]),
            gate_up_bias=self._tensor(tensors.gate_up_bias),
            down_bias=self._tensor(tensors.down_bias),
        )
        if config.shared_width:
            gate_up, down = tensors.shared_maps()
            self.arguments.shared_gate_up = self._matrix(method.load(weights, gate_up))
            self.arguments.shared_down = self._matrix(method.load(weights, down))
            self.arguments.shared_width = config.shared_width
            share = tensors.shared_gate()
            if share is not None:
                self.arguments.shared_gate = self._matrix(PackedMatrix(library, [share.float()], Format.F32))

    def _matrix(self, matrix: PackedMatrix) -> int:
        self._kept.append(matrix)
        return matrix.handle

    def _table(self, matrices: list[PackedMatrix]) -> int:
        table = (_POINTER * len(matrices))(*(self._matrix(matrix) for matrix in matrices))
        self._kept.append(table)
        return ctypes.addressof(table)

    def _tensor(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        contiguous = tensor.float().contiguous()
        self._kept.append(contiguous)
        return contiguous.data_ptr()
