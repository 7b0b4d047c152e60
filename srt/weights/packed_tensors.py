"""Translates the tensors of packed checkpoints to the one layout of `layers/quantized.py`, each when it is read.

A folder presents itself with the names of an unquantised one: NAME.qweight, NAME.scales, ... are NAME.weight. By name a
matrix is dequantised; `quantized` gives it as stored. Every shape, type and index is checked before it is used.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...lang.errors import ModelError, shown
from ..layers.checkpoint import Tensors
from ..layers.config_values import Config
from ..layers.quantized import TABLES, Codes, QuantizedTensor
from .packed_config import PackedConfig, WeightScheme, read_packed_config

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Of quantised KV caches and attention, which nothing here reads: keys and values are kept as Runtime(kv_dtype=) says.
_CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".q_zero_point")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word is output _AWQ_ORDER[i]
_NESTED = 256  # scales that share one scale of scales, in bitsandbytes
_MXFP4_GROUP = 32


def dense_view(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Returns configuration and tensors of a packed checkpoint as those of an unquantised one; others as given.

    Raises:
        ModelError: a format that is not implemented, or parts of a matrix that are missing.
    """
    packed = read_packed_config(config)
    if packed is None:
        return config, tensors
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    nested = plain.get("text_config")
    if isinstance(nested, Mapping):
        plain["text_config"] = {key: value for key, value in nested.items() if key != "quantization_config"}
    return plain, PackedTensors(tensors, packed)


class PackedTensors(Mapping[str, torch.Tensor]):
    """Presents a packed checkpoint under the names of an unquantised one; see `layers.quantized.QuantizedSource`."""

    def __init__(self, tensors: Tensors, config: PackedConfig) -> None:
        self._tensors = tensors
        self._config = config
        self._form = _FORMS[config.method]
        self._parts = _grouped(tensors, self._form)
        self.quantized_names = frozenset(
            name for name, parts in self._parts.items() if not self._form.stacks and self._is_packed(parts)
        )

    @property
    def stacked_names(self) -> frozenset[str]:
        """The names of stacks of experts; see `layers.quantized.QuantizedStacks`."""
        if not self._form.stacks:
            return frozenset()
        return frozenset(name for name, parts in self._parts.items() if self._is_packed(parts))

    def quantized_expert(self, name: str, expert: int, *shape: int) -> QuantizedTensor:
        """Returns one matrix [outputs, inputs] of a stack. Raises ModelError if the stack has another shape."""
        blocks, exponents = _mxfp4_parts(_Parts(name, self._tensors, self._parts[name]))
        count, outputs, groups, _ = blocks.shape
        if (count, outputs, groups * _MXFP4_GROUP) != shape:
            raise ModelError(
                f"tensor {name} has shape {[count, outputs, groups * _MXFP4_GROUP]}, the configuration says "
                f"{list(shape)}; check that config.json belongs to these weights"
            )
        return _mxfp4_expert(name, blocks[expert], exponents[expert])

    def quantized(self, name: str) -> QuantizedTensor | None:
        """Returns the matrix as stored; None: it is stored as floats. Raises ModelError for damaged parts."""
        if name not in self.quantized_names:
            return None
        return self._form.read(_Parts(name, self._tensors, self._parts[name]), self._config)

    def packed_bytes(self, name: str) -> int:
        """Returns the bytes of a packed matrix in the file; nothing is read."""
        return sum(self._tensors[stored].nbytes for stored in self._parts[name].values())

    def __getitem__(self, name: str) -> torch.Tensor:
        parts = self._parts[name]
        if not self._is_packed(parts):
            return self._plain(name)
        if self._form.stacks:
            return _mxfp4_experts(_Parts(name, self._tensors, parts))
        matrix = self.quantized(name)
        assert matrix is not None, "its parts are there"
        return matrix.dense()

    def __contains__(self, name: object) -> bool:  # Mapping's own would dequantise the matrix
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def _is_packed(self, parts: Mapping[str, str]) -> bool:
        return parts.keys() != {""}

    def _plain(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        if tensor.dtype not in FLOATS and name.endswith("weight"):
            raise ModelError(
                f"tensor {name} is stored as {_named(tensor.dtype)} without the scales of {self._config.method}; "
                "download the model again"
            )
        return tensor


@dataclass(frozen=True, slots=True)
class _Form:
    """The tensors of one format.

    Attributes:
        layouts: sets of suffixes; a matrix has all of one set. "" is the plain weight.
        others: suffixes that it may have as well.
        read: makes the matrix of its parts.
        stem: the suffixes take the place of this at the end of the dense name.
        stacks: the format packs stacked experts, not matrices.
    """

    layouts: tuple[frozenset[str], ...]
    others: frozenset[str]
    read: "Callable[[_Parts, PackedConfig], QuantizedTensor]"
    stem: str = ".weight"
    stacks: bool = False


@dataclass(frozen=True, slots=True)
class _Parts:
    """The stored tensors of one matrix."""

    name: str  # of the matrix
    tensors: Tensors
    stored: Mapping[str, str]  # suffix → name in the file

    def has(self, suffix: str) -> bool:
        return suffix in self.stored

    def any(self, suffix: str, *kinds: torch.dtype) -> torch.Tensor:
        """Reads a part of one of these types. Raises ModelError for another one."""
        tensor = self.tensors[self.stored[suffix]]
        if tensor.dtype not in kinds:
            raise self.error(suffix, f"has type {_named(tensor.dtype)}, not {' or '.join(map(_named, kinds))}")
        return tensor

    def of_shape(self, suffix: str, shape: Sequence[int], *kinds: torch.dtype) -> torch.Tensor:
        tensor = self.any(suffix, *kinds)
        if list(tensor.shape) != list(shape):
            raise self.error(suffix, f"has shape {list(tensor.shape)}, the others say {list(shape)}")
        return tensor.contiguous()

    def matrix(self, suffix: str, *kinds: torch.dtype) -> torch.Tensor:
        tensor = self.any(suffix, *kinds)
        if tensor.dim() != 2 or not tensor.numel():
            raise self.error(suffix, f"has shape {list(tensor.shape)}; it should be a matrix")
        return tensor.contiguous()

    def scales(self, suffix: str, *shapes: Sequence[int]) -> torch.Tensor:
        """Reads scales of one of these shapes, all of them numbers."""
        tensor = self.any(suffix, *FLOATS)
        if list(tensor.shape) not in [list(shape) for shape in shapes]:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise self.error(suffix, f"has shape {list(tensor.shape)}, the weights and the configuration say {wanted}")
        if not bool(tensor.isfinite().all()):
            raise self.error(suffix, "has scales that are no numbers")
        return tensor.contiguous()

    def error(self, suffix: str, what: str) -> ModelError:
        name = self.stored.get(suffix, self.name)
        return ModelError(
            f"tensor {name} {what}; check that config.json belongs to these weights, or download them again"
        )

    def groups(self, inputs: int, size: int | None) -> int:
        """Returns the number of groups of a row."""
        if size is None or size == inputs:
            return 1
        if inputs % size:
            raise self.error("", f"has {inputs} inputs, which groups of {size} do not divide")
        return inputs // size


# ------------------------------------------------------------------------------------------ AWQ, GPTQ


def _awq(parts: _Parts, config: PackedConfig) -> QuantizedTensor:
    """qweight int32 [inputs, outputs / 8], qzeros int32 [groups, outputs / 8], scales [groups, outputs]"""
    words = parts.matrix("qweight", torch.int32)
    inputs, outputs = len(words), 8 * words.shape[1]
    groups = parts.groups(inputs, config.schemes[0].group)
    zeros = parts.of_shape("qzeros", (groups, outputs // 8), torch.int32)
    scales = parts.scales("scales", (groups, outputs))
    order = torch.tensor(_AWQ_ORDER).argsort()  # output j of a word is nibble order[j]

    def columns(packed: torch.Tensor) -> torch.Tensor:
        return _nibbles(packed).view(len(packed), -1, 8)[:, :, order].flatten(1)

    codes = _pack(columns(words).t())
    return QuantizedTensor(Codes.INT4, codes, scales.t().contiguous(), _signed(columns(zeros).t(), 4))


def _gptq(parts: _Parts, config: PackedConfig) -> QuantizedTensor:
    """qweight int32 [inputs · bits / 32, outputs], qzeros int32 [groups, outputs · bits / 32], g_idx int32 [inputs],
    scales [groups, outputs]"""
    scheme = config.schemes[0]
    bits, a_word = scheme.bits, 32 // scheme.bits
    words = parts.matrix("qweight", torch.int32)
    inputs, outputs = a_word * len(words), words.shape[1]
    if outputs % a_word:
        raise parts.error("qweight", f"has {outputs} outputs, no multiple of {a_word}")
    groups = parts.groups(inputs, scheme.group)
    packed_zeros = parts.of_shape("qzeros", (groups, outputs // a_word), torch.int32)
    scales = parts.scales("scales", (groups, outputs)).t().contiguous()
    codes = words.t().contiguous().view(torch.uint8)  # [outputs, inputs · bits / 8]: low nibble first
    stored = _nibbles(packed_zeros) if bits == 4 else packed_zeros.view(torch.uint8)
    zeros = _signed((stored.t().int() + config.zero_step) & (2**bits - 1), bits)  # v1 stores −1 as all ones
    order = _order_of_inputs(parts, inputs, groups, config.act_order)
    if bits == 8:
        kind, numbers = Codes.INT8, codes.bitwise_xor(128).view(torch.int8)
        numbers = numbers if order is None else numbers[:, order]
    else:
        kind, numbers = Codes.INT4, codes if order is None else _pack(_nibbles(codes)[:, order])
    return QuantizedTensor(kind, numbers, scales, zeros if bool(zeros.any()) else None, order)


def _order_of_inputs(parts: _Parts, inputs: int, groups: int, act_order: bool) -> torch.Tensor | None:
    """Returns the permutation that makes the inputs of each group adjacent; None: they are."""
    if not parts.has("g_idx"):
        if act_order:
            raise parts.error("", "lacks g_idx, which desc_act=true promises")
        return None
    group_of = parts.of_shape("g_idx", (inputs,), torch.int32, torch.int64).long()
    if bool((group_of == -1).all()):  # the compressor's way to say that inputs are in order
        return None
    if int(group_of.min()) < 0 or int(group_of.max()) >= groups:
        raise parts.error("g_idx", f"names groups outside 0 to {groups - 1}")
    in_order = torch.arange(inputs) // (inputs // groups)
    if torch.equal(group_of, in_order):
        return None
    if not act_order:
        raise parts.error("g_idx", "reorders inputs, where the configuration says desc_act=false")
    order = group_of.argsort(stable=True)
    if not torch.equal(group_of[order], in_order):
        raise parts.error("g_idx", f"makes groups of different sizes; each should have {inputs // groups} inputs")
    return order


# ------------------------------------------------------------------------------------------ compressed-tensors


def _compressed(parts: _Parts, config: PackedConfig) -> QuantizedTensor:
    """weight_packed int32 [outputs, inputs · bits / 32] and weight_shape, or weight int8 or float8 [outputs, inputs];
    weight_scale [outputs, groups]"""
    if parts.has("weight_packed"):
        return _compressed_words(parts, config)
    codes = parts.matrix("", torch.int8, torch.float8_e4m3fn)
    scheme = _scheme_of(parts, config, 8, integer=codes.dtype is torch.int8)
    scales = _spread_scales(parts, "weight_scale", (len(codes), codes.shape[1]), scheme)
    zeros = None
    if scheme.integer and parts.has("weight_zero_point"):
        stored = parts.any("weight_zero_point", torch.int8, torch.int32, torch.int64)
        zeros = stored.reshape(-1, 1 if stored.numel() == len(codes) else scales.shape[1])
        if tuple(zeros.shape) != tuple(scales.shape) or int(zeros.min()) < -128 or int(zeros.max()) > 127:
            raise parts.error("weight_zero_point", f"has shape {list(stored.shape)} or numbers beyond int8")
        zeros = zeros.to(torch.int8).contiguous() if bool(zeros.any()) else None
    kind = Codes.INT8 if scheme.integer else Codes.FLOAT8
    return QuantizedTensor(kind, codes, scales, zeros)


def _compressed_words(parts: _Parts, config: PackedConfig) -> QuantizedTensor:
    words = parts.matrix("weight_packed", torch.int32)
    outputs, inputs = parts.of_shape("weight_shape", (2,), torch.int64, torch.int32).tolist()
    bits = next((bits for bits in (4, 8) if words.shape[1] * 32 // bits == inputs), 0)
    if outputs != len(words) or not bits or not any(scheme.bits == bits for scheme in config.schemes):
        raise parts.error(
            "weight_packed",
            f"has shape {list(words.shape)} for a matrix of {[outputs, inputs]}: no 4 or 8 bits a weight",
        )
    scheme = _scheme_of(parts, config, bits, integer=True)
    groups = parts.groups(inputs, scheme.group)
    scales = parts.scales("weight_scale", (outputs, groups))
    zeros = None
    if parts.has("weight_zero_point"):
        a_word = 32 // bits
        packed = parts.of_shape("weight_zero_point", (-(-outputs // a_word), groups), torch.int32)
        flat = packed.t().contiguous()
        codes = _nibbles(flat) if bits == 4 else flat.view(torch.uint8)
        zeros = _signed(codes[:, :outputs].t(), bits)
    order = None
    if parts.has("weight_g_idx"):
        renamed = replace(parts, stored={**parts.stored, "g_idx": parts.stored["weight_g_idx"]})
        order = _order_of_inputs(renamed, inputs, groups, act_order=True)
    numbers = words.view(torch.uint8)
    if bits == 8:
        signed = numbers.bitwise_xor(128).view(torch.int8)
        signed = signed if order is None else signed[:, order]
        return QuantizedTensor(Codes.INT8, signed, scales, zeros, order)
    numbers = numbers if order is None else _pack(_nibbles(numbers)[:, order])
    return QuantizedTensor(Codes.INT4, numbers, scales, zeros, order)


def _scheme_of(parts: _Parts, config: PackedConfig, bits: int, *, integer: bool) -> WeightScheme:
    """Returns the scheme of the configuration that a matrix is stored in; its group is that of the file."""
    fitting = [scheme for scheme in config.schemes if scheme.bits == bits and scheme.integer == integer]
    if not fitting:
        kind = f"{bits}-bit {'integers' if integer else 'floats'}"
        raise parts.error("", f"is stored as {kind}, which no group of the configuration has")
    if len(fitting) == 1:
        return fitting[0]
    # A group names its modules in patterns. The shape of the scales gives the group's size without them.
    scales = parts.any("weight_scale", *FLOATS)
    count = scales.shape[1] if scales.dim() == 2 else 1
    inputs = parts.any("").shape[1] if parts.has("") else int(parts.any("weight_shape", torch.int64, torch.int32)[1])
    by_size = [scheme for scheme in fitting if (inputs // scheme.group if scheme.group else 1) == count]
    if not by_size:
        raise parts.error("weight_scale", f"has shape {list(scales.shape)}, which fits no group of the configuration")
    return by_size[0]


# ------------------------------------------------------------------------------------------ FP8


def _fp8(parts: _Parts, config: PackedConfig) -> QuantizedTensor:
    """weight float8 [outputs, inputs]; weight_scale_inv or weight_scale of a tensor, of outputs, or of blocks"""
    codes = parts.matrix("", torch.float8_e4m3fn)
    suffix = "weight_scale_inv" if parts.has("weight_scale_inv") else "weight_scale"
    scheme = config.schemes[0]
    scales = _spread_scales(parts, suffix, (len(codes), codes.shape[1]), scheme)
    return QuantizedTensor(Codes.FLOAT8, codes, scales)


def _spread_scales(parts: _Parts, suffix: str, shape: tuple[int, int], scheme: WeightScheme) -> torch.Tensor:
    """Reads scales of a tensor, of outputs, of groups or of blocks → [outputs, groups]."""
    outputs, inputs = shape
    block = scheme.block
    if block is None:
        groups = parts.groups(inputs, scheme.group)
        scales = parts.scales(suffix, (), (1,), (1, 1), (outputs,), (outputs, groups))
        return (scales.reshape(-1, 1) if groups == 1 else scales).expand(outputs, groups).contiguous()
    rows, columns = -(-outputs // block[0]), -(-inputs // block[1])
    scales = parts.scales(suffix, (rows, columns)).repeat_interleave(block[0], 0)[:outputs]
    if inputs % block[1] == 0:
        return scales.contiguous()
    size = _common_size(inputs, block[1])  # the last block is narrower: smaller groups, some with equal scales
    return scales[:, torch.arange(0, inputs, size) // block[1]].contiguous()


def _common_size(inputs: int, block: int) -> int:
    size = block
    while inputs % size:
        size //= 2
    return size


# ------------------------------------------------------------------------------------------ bitsandbytes, MXFP4

_STATES = {kind: f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}


def _bitsandbytes(parts: _Parts, config: PackedConfig) -> QuantizedTensor:
    """weight int8 [outputs, inputs] with SCB [outputs], or uint8 [weights / 2, 1], high nibble first, in blocks."""
    if parts.has("SCB"):
        codes = parts.matrix("", torch.int8)
        scales = parts.scales("SCB", (len(codes),)).float()[:, None] / 127
        return QuantizedTensor(Codes.INT8, codes, scales)
    suffix = next((suffix for suffix in _STATES.values() if parts.has(suffix)), "")
    state = _quant_state(parts, suffix)
    kind = Codes.NF4 if suffix == _STATES["nf4"] else Codes.FP4
    outputs, inputs = state.shape
    table = parts.of_shape("weight.quant_map", (16,), torch.float32)
    if not torch.allclose(table, torch.tensor(TABLES[kind]), atol=2e-3):
        raise parts.error("weight.quant_map", f"is not the table of {kind.value}")
    if inputs % state.block:
        raise parts.error("", f"has {inputs} inputs, which blocks of {state.block} do not divide")
    packed = parts.of_shape("", (outputs * inputs // 2, 1), torch.uint8).view(outputs, inputs // 2)
    scales = _absmax(parts, state, outputs * inputs // state.block)
    swapped = (packed << 4) | (packed >> 4)
    return QuantizedTensor(kind, swapped, scales.view(outputs, -1))


@dataclass(frozen=True, slots=True)
class _QuantState:
    """The header that bitsandbytes stores with a matrix."""

    shape: tuple[int, int]
    block: int
    offset: float  # of nested scales


def _quant_state(parts: _Parts, suffix: str) -> _QuantState:
    raw = parts.any(suffix, torch.uint8)
    try:
        state: Any = json.loads(bytes(raw.flatten()[: 1 << 12].tolist()))  # Any: JSON
        shape, block, offset = state["shape"], state["blocksize"], state.get("nested_offset", 0.0)
        fits = len(shape) == 2 and all(type(size) is int and 0 < size < 1 << 31 for size in (*shape, block))
        if not fits or state.get("nested_blocksize", _NESTED) != _NESTED or not -1e9 < float(offset) < 1e9:
            raise ValueError(shown(state))
        return _QuantState((shape[0], shape[1]), block, float(offset))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise parts.error(suffix, f"is no state of a 4-bit matrix ({shown(str(error))})") from None


def _absmax(parts: _Parts, state: _QuantState, count: int) -> torch.Tensor:
    """Returns the scale of each block, float32 [count]."""
    if not parts.has("weight.nested_absmax"):
        return parts.of_shape("weight.absmax", (count,), torch.float32)
    codes = parts.of_shape("weight.absmax", (count,), torch.uint8)
    table = parts.of_shape("weight.nested_quant_map", (256,), torch.float32)
    outer = parts.scales("weight.nested_absmax", (-(-count // _NESTED),)).float()
    return table[codes.int()] * outer.repeat_interleave(_NESTED)[:count] + state.offset


def _mxfp4_matrix(parts: _Parts, config: PackedConfig) -> QuantizedTensor:
    raise parts.error("", "is a stack of experts, not a matrix")


def _mxfp4_experts(parts: _Parts) -> torch.Tensor:
    """blocks uint8 [experts, outputs, groups, 16] and scales uint8 [experts, outputs, groups] → bfloat16 [experts,
    inputs, outputs], as gpt-oss multiplies them. Every number is exact in bfloat16."""
    blocks, exponents = _mxfp4_parts(parts)
    experts, outputs, groups, _ = blocks.shape
    out = torch.empty(experts, groups * _MXFP4_GROUP, outputs, dtype=torch.bfloat16)
    for expert in range(experts):
        out[expert] = _mxfp4_expert(parts.name, blocks[expert], exponents[expert]).dense().t()
    return out


def _mxfp4_parts(parts: _Parts) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = parts.any("_blocks", torch.uint8)
    if blocks.dim() != 4 or blocks.shape[-1] != _MXFP4_GROUP // 2 or not blocks.numel():
        raise parts.error("_blocks", f"has shape {list(blocks.shape)}; it should be [experts, outputs, groups, 16]")
    experts, outputs, groups, _ = blocks.shape
    return blocks, parts.of_shape("_scales", (experts, outputs, groups), torch.uint8)


def _mxfp4_expert(name: str, blocks: torch.Tensor, exponents: torch.Tensor) -> QuantizedTensor:
    if bool((exponents == 255).any()):
        raise ModelError(f"tensor {name}_scales has scales that are no numbers; download the model again")
    scales = exponents.contiguous().view(torch.float8_e8m0fnu)  # 2 to the power of exponent − 127
    return QuantizedTensor(Codes.E2M1, blocks.flatten(1).contiguous(), scales)


# ------------------------------------------------------------------------------------------ how


def _grouped(tensors: Tensors, form: _Form) -> dict[str, dict[str, str]]:
    """Groups stored names by the matrix that they are parts of: dense name → suffix → stored name.

    Raises:
        ModelError: a matrix lacks some of its parts.
    """
    suffixes = sorted({suffix for layout in form.layouts for suffix in layout} | form.others, key=len, reverse=True)
    separator = "." if form.stem else ""
    grouped: dict[str, dict[str, str]] = {}
    for stored in tensors:
        if stored.endswith(_CACHE_SCALES):
            continue
        found = next((suffix for suffix in suffixes if suffix and stored.endswith(f"{separator}{suffix}")), "")
        name = stored.removesuffix(f"{separator}{found}") + form.stem if found else stored
        grouped.setdefault(name, {})[found] = stored
    for name, parts in grouped.items():
        if parts.keys() != {""} and not any(layout <= parts.keys() for layout in form.layouts):
            likely = min(form.layouts, key=lambda layout: len(layout - parts.keys()))
            missing = ", ".join(sorted(suffix or "weight" for suffix in likely - parts.keys()))
            raise ModelError(f"the packed matrix {name} lacks {missing}; check that all files of the model are there")
    return grouped


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 [r, c] or uint8 [r, c] → uint8 [r, nibbles of a row], the lowest first."""
    packed = words.contiguous().view(torch.uint8)
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)


def _pack(nibbles: torch.Tensor) -> torch.Tensor:
    """uint8 [outputs, inputs] → [outputs, inputs / 2], that of the even input in the low nibble."""
    packed: torch.Tensor = nibbles[:, ::2] | (nibbles[:, 1::2] << 4)
    return packed


def _signed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned codes → int8, less the middle of their range."""
    middle: int = 1 << (bits - 1)
    return (codes.int() - middle).to(torch.int8).contiguous()


def _named(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


_FORMS: Mapping[str, _Form] = {
    "awq": _Form((frozenset({"qweight", "qzeros", "scales"}),), frozenset(), _awq),
    "gptq": _Form((frozenset({"qweight", "qzeros", "scales"}),), frozenset({"g_idx"}), _gptq),
    "compressed-tensors": _Form(
        (frozenset({"weight_packed", "weight_scale", "weight_shape"}), frozenset({"", "weight_scale"})),
        frozenset({"weight_zero_point", "weight_g_idx", "input_scale", "input_zero_point"}),
        _compressed,
    ),
    "fp8": _Form(
        (frozenset({"", "weight_scale_inv"}), frozenset({"", "weight_scale"})),
        frozenset({"input_scale", "activation_scale", "input_scale_ub"}),
        _fp8,
    ),
    "bitsandbytes": _Form(
        (
            frozenset({"", "SCB"}),
            *(frozenset({"", "weight.absmax", "weight.quant_map", state}) for state in _STATES.values()),
        ),
        frozenset({"weight.nested_absmax", "weight.nested_quant_map", "weight_format"}),
        _bitsandbytes,
    ),
    "mxfp4": _Form((frozenset({"_blocks", "_scales"}),), frozenset(), _mxfp4_matrix, stem="", stacks=True),
}
