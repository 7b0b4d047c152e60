"""Norms, residual sums, activations and the rotation of heads, against the torch layers they stand in for."""

import ctypes

import gguf
import pytest
import torch
from umbel.srt.kernels.cpu.library import load_library
from umbel.srt.kernels.cpu.linear import Format
from umbel.srt.layers.linear import ACTIVATIONS, RMSNorm
from umbel.srt.layers.rope import Rope, RopeConfig, RopeType, apply_rope

from .native import isa_cases

SHAPES = [(1, 640), (3, 48), (7, 33), (33, 640), (70, 2048)]
EPSILON = 1e-6


class HeadTurn(ctypes.Structure):
    _fields_ = [
        ("heads", ctypes.c_long),
        ("kv_heads", ctypes.c_long),
        ("head_dim", ctypes.c_long),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("value_norm", ctypes.c_void_p),
        ("whole_norm", ctypes.c_int),
        ("epsilon", ctypes.c_float),
        ("angles", ctypes.c_void_p),
        ("rotated", ctypes.c_long),
        ("interleaved", ctypes.c_int),
        ("query_beta", ctypes.c_float),
        ("query_length", ctypes.c_long),
        ("query_offset", ctypes.c_long),
    ]


@pytest.fixture(params=isa_cases())
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    loaded = load_library(request.param)
    loaded.umbel_set_threads(2)
    return loaded


def at(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    assert tensor is None or tensor.is_contiguous()
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def ragged(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers with a few outliers, as hidden states have them."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    values.view(-1)[::97] *= 50
    return values


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return RMSNorm(weight, eps=EPSILON, centered=False)(x)


@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_rms_norm_is_that_of_torch(library: ctypes.CDLL, rows: int, size: int) -> None:
    x, weight = ragged(rows, size), ragged(size, seed=1)
    out = torch.empty_like(x)
    library.umbel_rms_norm(
        at(x), at(weight), at(out), ctypes.c_long(rows), ctypes.c_long(size), ctypes.c_float(EPSILON)
    )
    torch.testing.assert_close(out, norm(x, weight), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(("rows", "size"), SHAPES)
@pytest.mark.parametrize(
    ("after_too", "next_too", "scale"), [(False, True, 1.0), (True, True, 1.0), (True, False, 0.3)]
)
def test_residual_sums_and_norms_are_those_of_torch(
    library: ctypes.CDLL, rows: int, size: int, after_too: bool, next_too: bool, scale: float
) -> None:
    x, update, following = ragged(rows, size), ragged(rows, size, seed=1), ragged(size, seed=2)
    after = ragged(size, seed=3) if after_too else None
    expected = x + (update if after is None else norm(update, after)) * scale
    normed = torch.empty_like(x)
    library.umbel_add_and_norm(
        *(at(x), at(update), at(after), ctypes.c_float(scale), at(following if next_too else None), at(normed)),
        *(ctypes.c_long(rows), ctypes.c_long(size), ctypes.c_float(EPSILON)),
    )
    torch.testing.assert_close(x, expected, rtol=2e-6, atol=1e-5)
    torch.testing.assert_close(normed, norm(expected, following) if next_too else x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "size"), SHAPES)
@pytest.mark.parametrize(("code", "name"), list(enumerate(["silu", "gelu_pytorch_tanh", "gelu", "relu"])))
def test_activations_are_those_of_torch(library: ctypes.CDLL, rows: int, size: int, code: int, name: str) -> None:
    gate_up = ragged(rows, 2 * size)
    out = torch.empty(rows, size)
    library.umbel_activate(at(gate_up), at(out), ctypes.c_long(rows), ctypes.c_long(size), code)
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(out, ACTIVATIONS[name](gate) * up, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "head_dim"), [(1, 4, 1, 256), (5, 4, 2, 16), (37, 6, 2, 24)])
def test_heads_are_turned_as_in_torch_and_keys_and_values_lie_in_their_slots(
    library: ctypes.CDLL, rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, normed: bool
) -> None:
    rope = Rope(RopeConfig(RopeType.DEFAULT, 10_000.0), head_dim, "cpu")
    qkv = ragged(rows, heads + 2 * kv_heads, head_dim)
    positions = torch.randint(0, 300, (rows,), generator=torch.Generator().manual_seed(3))
    slots = torch.randperm(rows + 9, generator=torch.Generator().manual_seed(4))[:rows]
    weights = [ragged(head_dim, seed=5), ragged(head_dim, seed=6)] if normed else [None, None]
    cos, sin = rope.angles(torch.arange(300), torch.float32)
    angles = torch.cat([cos[:, 0, : head_dim // 2], sin[:, 0, head_dim // 2 :]], dim=-1).contiguous()

    query_key = qkv[:, : heads + kv_heads]
    if normed:
        query, key = query_key[:, :heads], query_key[:, heads:]
        query_key = torch.cat([norm(query, weights[0]), norm(key, weights[1])], dim=1)
    expected = apply_rope(query_key.contiguous(), rope.angles(positions, torch.float32))
    values = qkv[:, heads + kv_heads :].clone()

    pools = [torch.zeros(rows + 9, kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    norms = at(weights[0]), at(weights[1]), None, 0, EPSILON
    shape = HeadTurn(heads, kv_heads, head_dim, *norms, at(angles), head_dim, 0, 0.0, 1, 0)
    library.umbel_turn_and_store(
        *(ctypes.byref(shape), at(qkv), at(positions), at(slots), ctypes.c_long(rows)),
        *(at(pools[0]), at(pools[1]), int(dtype is torch.bfloat16)),
    )
    torch.testing.assert_close(qkv[:, :heads], expected[:, :heads], rtol=1e-5, atol=2e-4)
    tolerance = {"rtol": 1e-5, "atol": 2e-4} if dtype is torch.float32 else {"rtol": 8e-3, "atol": 1e-3}
    torch.testing.assert_close(pools[0][slots].float(), expected[:, heads:], **tolerance)
    assert torch.equal(pools[1][slots], values.to(dtype))
    untouched = torch.ones(rows + 9, dtype=torch.bool)
    untouched[slots] = False
    assert not pools[0][untouched].any()


FORMATS = {torch.float32: Format.F32, torch.bfloat16: Format.BF16, torch.float16: Format.F16}


@pytest.mark.parametrize("dtype", FORMATS)
def test_embeddings_are_looked_up_and_scaled(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    table = ragged(50, 40).to(dtype)
    tokens = torch.tensor([3, 49, 0, 3])
    out = torch.empty(4, 40)
    library.umbel_embed(
        *(at(table), FORMATS[dtype].value, ctypes.c_long(table.nbytes // 50), at(tokens), ctypes.c_float(25.25)),
        *(at(out), ctypes.c_long(4), ctypes.c_long(40)),
    )
    assert torch.equal(out, table[tokens].float() * 25.25)


def test_embeddings_of_blocks_are_what_gguf_dequantises(library: ctypes.CDLL) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    table = torch.from_numpy(gguf.quants.quantize(ragged(50, 64).numpy(), kind))
    tokens = torch.tensor([3, 49, 0, 3])
    out = torch.empty(4, 64)
    library.umbel_embed(
        *(at(table), Format.Q8_0.value, ctypes.c_long(table.shape[1]), at(tokens), ctypes.c_float(0.5)),
        *(at(out), ctypes.c_long(4), ctypes.c_long(64)),
    )
    assert torch.equal(out, torch.from_numpy(gguf.quants.dequantize(table.numpy(), kind))[tokens] * 0.5)
