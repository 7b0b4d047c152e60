"""Reads the tensors of a mixture of experts, however a checkpoint spells them.

stacked        mlp.experts.gate_up_proj  [E, 2 width, hidden]     mlp.experts.down_proj  [E, hidden, width]
               or with inputs first, [E, hidden, 2 width] and [E, width, hidden]
one by one     mlp.experts.3.gate_proj.weight, up_proj, down_proj (GGUF files, whatever the family)
Mixtral's own  block_sparse_moe.experts.3.w1.weight (gate), w3 (up), w2 (down)
"""

from collections.abc import Iterable, Iterator, Sequence

import torch

from ..layers.checkpoint import Checkpoint, LinearTensors
from ..layers.quantized import (
    QuantizedMethod,
    QuantizedSource,
    QuantizedStack,
    QuantizedStacks,
    QuantizedTensor,
    take_quantized,
)
from .decoder_config import ExpertsConfig, ProjectionNames

# [E · 2 width, hidden], each expert's gates above its ups (or ups alone), and [E · hidden, width].
ExpertStacks = tuple[QuantizedTensor, QuantizedTensor]


class ExpertTensors:
    """The tensors of one layer's experts. All are in float32, or the dtype of the checkpoint's reader.

    Args:
        prefix: of the layer's names in the checkpoint, `model.layers.3`.

    Raises:
        ModelError: tensors that are missing or have other shapes.
    """

    def __init__(self, prefix: str, config: ExpertsConfig, weights: Checkpoint, *, hidden: int) -> None:
        self._config = config
        self._weights = weights
        self._hidden = hidden
        self._prefix = prefix
        names, sparse = config.names, f"{prefix}.block_sparse_moe"
        block = sparse if weights.holds(f"{sparse}.gate.weight") else f"{prefix}.{names.block}"
        self._experts, self._shared = f"{block}.experts", f"{block}.{names.shared}"
        self.router = weights.take(f"{block}.{names.router}.weight", config.count, hidden)
        self.router_bias: torch.Tensor | None = None
        self.gate_up_bias: torch.Tensor | None = None  # [E, 2 width]
        self.down_bias: torch.Tensor | None = None  # [E, hidden]
        if config.biased:
            self.router_bias = weights.take(f"{block}.{names.router}.bias", config.count)
            self.gate_up_bias = self._gate_up_bias()
            self.down_bias = weights.take(f"{self._experts}.down_proj_bias", config.count, hidden)
        self.correction: torch.Tensor | None = None
        if names.correction is not None:
            self.correction = weights.take_as_stored(f"{block}.{names.correction}", config.count).float()

    def _gate_up_bias(self) -> torch.Tensor:
        count, width = self._config.count, self._config.width
        parts = [f"{self._experts}.{part}_proj_bias" for part in ("gate", "up")]
        if self._weights.holds(parts[0]):
            return torch.cat([self._weights.take(part, count, width) for part in parts], dim=1)
        bias = self._weights.take(f"{self._experts}.gate_up_proj_bias", count, 2 * width)
        return torch.cat([bias[:, ::2], bias[:, 1::2]], dim=1) if self._config.names.alternating else bias

    @property
    def stacked(self) -> bool:
        return self._weights.holds(f"{self._experts}.{self._into}")

    @property
    def _into(self) -> str:
        """The name of the stacked maps into the experts."""
        return "gate_up_proj" if self._config.gated else "up_proj"

    def maps(self, expert: int) -> tuple[LinearTensors, LinearTensors]:
        """Returns the names of one expert's maps, gate and up, and down, where they are spelled one by one."""
        gate, up, down = "gate_proj", "up_proj", "down_proj"
        if self._weights.holds(f"{self._experts}.0.w1.weight"):
            gate, up, down = "w1", "w3", "w2"
        prefix, width = f"{self._experts}.{expert}", self._config.width
        names = (f"{prefix}.{gate}", f"{prefix}.{up}") if self._config.gated else (f"{prefix}.{up}",)
        return (
            LinearTensors(names, (width,) * len(names), self._hidden),
            LinearTensors((f"{prefix}.{down}",), (self._hidden,), width),
        )

    def shared_maps(self) -> tuple[LinearTensors, LinearTensors]:
        """Returns the names of the maps of the MLP that every token uses."""
        width, names, shared = self._config.shared_width, self._config.names.shared_maps, self._shared
        if names is not None:
            shared = f"{self._prefix}.{names.mlp}"
        if names is None or self._weights.holds(f"{shared}.gate_proj.weight"):
            names = ProjectionNames()
        leaves = names.gate_up if self._config.gated else names.gate_up[-1:]
        widths = (2 * width,) if self._config.gated and len(leaves) == 1 else (width,) * len(leaves)
        return (
            LinearTensors(tuple(f"{shared}.{leaf}" for leaf in leaves), widths, self._hidden),
            LinearTensors((f"{shared}.{names.down}",), (self._hidden,), width),
        )

    def shared_gate(self) -> torch.Tensor | None:
        """Takes the map [1, hidden] whose sigmoid multiplies that MLP; None: nothing does."""
        return self._weights.take(f"{self._shared}_gate.weight", 1, self._hidden) if self._config.shared_gated else None

    def matrices(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Takes each expert's matrices, gate above up [2 width, hidden] and down [hidden, width], as stored.

        Without gates the former are up alone, [width, hidden].
        """
        if not self.stacked:
            for expert in range(self._config.count):
                gate_up, down = (self._weights.take_weights(maps, as_stored=True) for maps in self.maps(expert))
                yield torch.cat(gate_up), down[0]
            return
        names = self._config.names
        gate_ups = self._stack(self._into, (1 + self._config.gated) * self._config.width, self._hidden)
        downs = self._stack("down_proj", self._hidden, self._config.width)
        for gate_up, down in zip(gate_ups, downs, strict=True):
            yield torch.cat([gate_up[::2], gate_up[1::2]]) if names.alternating else gate_up, down

    def packed_stacks(self) -> ExpertStacks | None:
        """Takes all experts' matrices as the checkpoint packs them; None: some are floats, or cannot be stacked."""
        experts = self._packed_one_by_one()
        if experts is None and (pairs := self.packed_matrices()) is not None:
            experts = (([gate_up], [down]) for gate_up, down in pairs)
        return None if experts is None else self._stacked(experts)

    def rounded_stacks(self, method: QuantizedMethod) -> ExpertStacks | None:
        """Takes all experts' matrices and rounds them; None: the format leaves some as floats."""
        return self._stacked(([method.round(gate_up)], [method.round(down)]) for gate_up, down in self.matrices())

    def _stacked(
        self, experts: Iterable[tuple[Sequence[QuantizedTensor | None], Sequence[QuantizedTensor | None]]]
    ) -> ExpertStacks | None:
        """Stacks the parts of each expert's matrices on the reader's device; None: see `QuantizedStack.add`."""
        config, device = self._config, self._weights.device
        into = QuantizedStack(config.count * (1 + config.gated) * config.width, device)
        out = QuantizedStack(config.count * self._hidden, device)
        for gate_up, down in experts:
            for stack, parts in ((into, gate_up), (out, down)):
                if not all(part is not None and stack.add(part) for part in parts):
                    return None
        return into.matrix, out.matrix

    def _packed_one_by_one(self) -> Iterator[tuple[list[QuantizedTensor], list[QuantizedTensor]]] | None:
        """Takes each expert's packed matrices, gate and up, and down; None: not all of them are packed one by one."""
        source = self._weights.tensors
        maps = [self.maps(expert) for expert in range(self._config.count)]
        names = {name for pair in maps for tensors in pair for name in tensors.weights}
        if not isinstance(source, QuantizedSource) or not names <= source.quantized_names:
            return None
        return ((self._take_packed(gate_up), self._take_packed(down)) for gate_up, down in maps)

    def _take_packed(self, tensors: LinearTensors) -> list[QuantizedTensor]:
        pairs = zip(tensors.weights, tensors.widths, strict=True)
        taken = [take_quantized(self._weights, name, width, tensors.inputs) for name, width in pairs]
        return [matrix for matrix in taken if matrix is not None]

    def packed_matrices(self) -> Iterator[tuple[QuantizedTensor, QuantizedTensor]] | None:
        """Takes each expert's matrices as the checkpoint packs them in stacks, one by one; None: it stores floats."""
        source, width = self._weights.tensors, self._config.width
        into, down = f"{self._experts}.{self._into}", f"{self._experts}.down_proj"
        if not isinstance(source, QuantizedStacks) or not {into, down} <= source.stacked_names:
            return None
        count, hidden = self._config.count, self._hidden
        shapes = (count, (1 + self._config.gated) * width, hidden), (count, hidden, width)
        for name in (into, down):
            self._weights.mark_taken(name, (), ())
        return self._packed(source, (into, down), shapes)

    def _packed(
        self, source: QuantizedStacks, names: tuple[str, str], shapes: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> Iterator[tuple[QuantizedTensor, QuantizedTensor]]:
        order = torch.arange(shapes[0][1])
        for expert in range(self._config.count):
            gate_up, down = (
                source.quantized_expert(name, expert, *shape) for name, shape in zip(names, shapes, strict=True)
            )
            if self._config.names.alternating:
                gate_up = gate_up.select(torch.cat([order[::2], order[1::2]]))
            yield gate_up, down

    def _stack(self, name: str, outputs: int, inputs: int) -> torch.Tensor:
        """Takes the maps of all experts, viewed as [E, outputs, inputs].

        Where a family has inputs first, what newer versions of transformers save has outputs first: the shape tells.
        """
        name, count = f"{self._experts}.{name}", self._config.count
        if self._config.names.inputs_first:
            other = (count, outputs, inputs)
            stack = self._weights.take_as_stored(name, count, inputs, outputs, other_shape=other)
            return stack if inputs != outputs and stack.shape == other else stack.transpose(1, 2)
        return self._weights.take_as_stored(name, count, outputs, inputs)
