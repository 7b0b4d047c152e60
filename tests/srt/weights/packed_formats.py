"""Packed checkpoints written by the layouts that their libraries document, number by number, for the readers' tests.

Each writer rounds a matrix and returns its tensors by suffix, and the matrix that they stand for.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Parts = tuple[dict[str, torch.Tensor], torch.Tensor]
GROUP = 32


@dataclass(frozen=True)
class PackedFolder:
    """One format: what config.json says, and how a matrix is written."""

    name: str
    config: Mapping[str, Any]  # Any: JSON
    write: Callable[[torch.Tensor], Parts]


def words(codes: NDArray[np.int64], bits: int) -> torch.Tensor:
    """Packs along the columns, the first code in the lowest bits."""
    count = 32 // bits
    assert codes.shape[1] % count == 0
    packed = np.zeros((codes.shape[0], codes.shape[1] // count), dtype=np.uint64)
    for place in range(count):
        packed |= codes[:, place::count].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def rounded(
    weight: torch.Tensor, bits: int, group: int, *, zeros: bool
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64], torch.Tensor]:
    """Rounds groups of a row: unsigned codes [n, k], scales and zero points [n, groups], and the values."""
    matrix = weight.float().numpy()
    blocks = matrix.reshape(len(matrix), -1, group)
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    if zeros:
        low, high = np.minimum(blocks.min(-1), 0), np.maximum(blocks.max(-1), 0)
        scales = ((high - low) / top).astype(np.float16).astype(np.float32)
        points = np.clip(np.round(-low / scales), 0, top).astype(np.int64)
    else:
        scales = (np.abs(blocks).max(-1) / (middle - 1)).astype(np.float16).astype(np.float32)
        points = np.full(scales.shape, middle, dtype=np.int64)
    codes = np.clip(np.round(blocks / scales[..., None]) + points[..., None], 0, top).astype(np.int64)
    values = (codes - points[..., None]) * scales[..., None]
    return codes.reshape(matrix.shape), scales, points, torch.from_numpy(values.reshape(matrix.shape)).float()


def half(array: NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).half()


def awq(weight: torch.Tensor) -> Parts:
    codes, scales, points, values = rounded(weight, 4, GROUP, zeros=True)
    order = [8 * (column // 8) + (0, 2, 4, 6, 1, 3, 5, 7)[column % 8] for column in range(len(weight))]
    parts = {
        "qweight": words(codes.T[:, order], 4),
        "qzeros": words(points.T[:, order], 4),
        "scales": half(scales.T),
    }
    return parts, values


def gptq(
    weight: torch.Tensor, *, bits: int = 4, zeros: bool = False, act_order: bool = False, version: int = 1
) -> Parts:
    inputs = weight.shape[1]
    order = np.random.default_rng(5).permutation(inputs) if act_order else np.arange(inputs)
    codes, scales, points, values = rounded(weight[:, torch.from_numpy(order)], bits, GROUP, zeros=zeros)
    back = np.argsort(order)
    stored = (points - 1) & (2**bits - 1) if version == 1 else points
    parts = {
        "qweight": _down(codes[:, back].T, bits),
        "qzeros": words(stored.T, bits),
        "scales": half(scales.T),
        "g_idx": torch.from_numpy((back // GROUP).astype(np.int32)),
    }
    return parts, values[:, torch.from_numpy(back)]


def _down(codes: NDArray[np.int64], bits: int) -> torch.Tensor:
    """Packs along the rows."""
    return words(np.ascontiguousarray(codes.T), bits).t().contiguous()


def compressed(weight: torch.Tensor, *, bits: int = 4, zeros: bool = False) -> Parts:
    codes, scales, points, values = rounded(weight, bits, GROUP, zeros=zeros)
    parts = {
        "weight_packed": words(codes, bits),
        "weight_scale": torch.from_numpy(scales).bfloat16() if not zeros else torch.from_numpy(scales),
        "weight_shape": torch.tensor(weight.shape),
    }
    if zeros:
        parts["weight_zero_point"] = _down(points, bits)
    else:
        exact = parts["weight_scale"].float().numpy()
        values = torch.from_numpy(((codes - 8) * np.repeat(exact, GROUP, 1)).astype(np.float32))
    return parts, values


def int8(weight: torch.Tensor) -> Parts:
    codes, scales, _, values = rounded(weight, 8, weight.shape[1], zeros=False)
    return {"weight": torch.from_numpy((codes - 128).astype(np.int8)), "weight_scale": torch.from_numpy(scales)}, values


def float8(weight: torch.Tensor, *, by: str, suffix: str = "weight_scale", block: int = 32) -> Parts:
    """by: "tensor", "output" or "block"."""
    outputs, inputs = weight.shape
    if by == "block":
        scales = torch.empty(-(-outputs // block), -(-inputs // block))
        spread = torch.empty_like(weight)
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                place = slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block)
                scales[row, column] = weight[place].abs().max() / 448
                spread[place] = scales[row, column]
    else:
        scales = weight.abs().amax(1, keepdim=True) / 448 if by == "output" else (weight.abs().max() / 448).reshape(1)
        spread = scales.expand_as(weight)
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, suffix: scales}, codes.float() * spread


def static_float8(weight: torch.Tensor) -> Parts:
    parts, values = float8(weight, by="tensor")
    return {**parts, "input_scale": torch.tensor([0.01])}, values


NF4 = [-1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0]
NF4 += [0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0]


FP4 = [0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25]
FP4 += [-value for value in FP4]


def four_bits(weight: torch.Tensor, *, kind: str = "nf4", nested: bool = False) -> Parts:
    block, table = 32, torch.tensor({"nf4": NF4, "fp4": FP4}[kind])
    blocks = weight.reshape(-1, block)
    scales = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
    parts = {"weight.quant_map": table}
    if nested:
        offset = float(scales.mean())
        outer = torch.stack([piece.abs().max() for piece in (scales - offset).split(256)])
        levels = torch.linspace(-1, 1, 256)
        spread = outer.repeat_interleave(256)[: len(scales)]
        indices = ((scales - offset) / spread)[:, None].sub(levels).abs().argmin(1)
        scales = levels[indices] * spread + offset
        parts |= {"weight.absmax": indices.to(torch.uint8), "weight.nested_absmax": outer}
        parts["weight.nested_quant_map"] = levels
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        parts["weight.absmax"] = scales
    codes = (blocks / scales[:, None])[..., None].sub(table).abs().argmin(-1)
    flat = codes.flatten().to(torch.uint8)
    parts["weight"] = ((flat[::2] << 4) | flat[1::2])[:, None]
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(
        list(json.dumps(state).encode()), dtype=torch.uint8
    )
    return parts, (table[codes] * scales[:, None]).view_as(weight)


def bnb_int8(weight: torch.Tensor) -> Parts:
    scales = weight.abs().amax(1)
    codes = (weight * 127 / scales[:, None]).round().to(torch.int8)
    return {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}, (
        codes * scales[:, None] / 127
    )


def mxfp4(experts: torch.Tensor) -> Parts:
    """[experts, inputs, outputs] → blocks and scales, and the values in that order."""
    steps = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([steps, -steps])
    blocks = experts.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = (blocks.abs().amax(-1) / 6).log2().ceil()
    codes = (blocks / exponents.exp2()[..., None])[..., None].sub(table).abs().argmin(-1).to(torch.uint8)
    values = (table[codes.long()] * exponents.exp2()[..., None]).flatten(2).transpose(1, 2)
    return {"blocks": codes[..., ::2] | (codes[..., 1::2] << 4), "scales": (exponents + 127).to(torch.uint8)}, values


def compressed_config(form: str, activations: Mapping[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
_DYNAMIC = {"num_bits": 8, "dynamic": True, "strategy": "token"}
FOLDERS = (
    PackedFolder(
        "awq", {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq
    ),
    PackedFolder("gptq", _GPTQ, gptq),
    PackedFolder(
        "gptq, act-order, zeros",
        {**_GPTQ, "desc_act": True, "sym": False},
        lambda weight: gptq(weight, zeros=True, act_order=True),
    ),
    PackedFolder(
        "gptq, v2, 8 bits",
        {**_GPTQ, "bits": 8, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq(weight, bits=8, zeros=True, version=2),
    ),
    PackedFolder(
        "gptq, 8 bits, act-order", {**_GPTQ, "bits": 8, "desc_act": True}, lambda w: gptq(w, bits=8, act_order=True)
    ),
    PackedFolder(
        "auto-round",
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": GROUP,
            "sym": True,
            "packing_format": "auto_round:auto_gptq",
        },
        gptq,
    ),
    PackedFolder(
        "compressed, 4 bits",
        compressed_config("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP),
        compressed,
    ),
    PackedFolder(
        "compressed, 4 bits, zeros",
        compressed_config(
            "pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False
        ),
        lambda weight: compressed(weight, zeros=True),
    ),
    PackedFolder(
        "compressed, int8",
        compressed_config("int-quantized", {**_DYNAMIC, "type": "int"}, num_bits=8, type="int", strategy="channel"),
        int8,
    ),
    PackedFolder(
        "compressed, float8, outputs",
        compressed_config(
            "float-quantized", {**_DYNAMIC, "type": "float"}, num_bits=8, type="float", strategy="channel"
        ),
        lambda weight: float8(weight, by="output"),
    ),
    PackedFolder(
        "compressed, float8, static",
        compressed_config(
            "float-quantized", {"num_bits": 8, "type": "float"}, num_bits=8, type="float", strategy="tensor"
        ),
        static_float8,
    ),
    PackedFolder(
        "fp8, blocks",
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
        lambda weight: float8(weight, by="block", suffix="weight_scale_inv"),
    ),
    PackedFolder("fbgemm", {"quant_method": "fbgemm_fp8"}, lambda weight: float8(weight, by="output")),
    PackedFolder(
        "nf4, nested",
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        lambda weight: four_bits(weight, nested=True),
    ),
    PackedFolder(
        "nf4",
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        four_bits,
    ),
    PackedFolder(
        "fp4", {"quant_method": "bitsandbytes", "load_in_4bit": True}, lambda weight: four_bits(weight, kind="fp4")
    ),
    PackedFolder("bitsandbytes, int8", {"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_int8),
)
BY_NAME = {folder.name: folder for folder in FOLDERS}


def pack(
    tensors: Mapping[str, torch.Tensor], folder: PackedFolder
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Packs every matrix of the layers: the checkpoint, and the tensors that it stands for."""
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            stored[name] = values[name] = tensor
            continue
        parts, values[name] = folder.write(tensor)
        stored |= {f"{stem}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    return stored, values
