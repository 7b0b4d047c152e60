"""Sizes of the attention kernels: what a program computes at once, and with how many threads.

Items come in kinds by their number of query vectors (rows × heads of a group), each with a tile of its own:

    FEW      at most 16, or one row      decode: a stream of keys, limited by memory
    SOME     at most 32                  branches of a tree in captured decode steps, in one launch with FEW
    MANY     at most 128, or 64          prompts: limited by products

Where keys are streamed, a tile of keys and one of values are 16 KiB each, and a program has one pair: it waits for it,
computes it, and asks for the next. Four programs share a multiprocessor, so three pairs are on their way meanwhile, and
short runs, of which there are many, start four at a time. For that a thread may take 128 registers. Larger vectors and
narrow keys that are widened take more: there two programs have two pairs on their way each.

Where products count, a tile has as many keys as leave room for the results in the registers. By the compiler a program
takes up to 192 KiB of shared memory on Hopper and Blackwell, 104 on an A100. Devices with 99 have one pair on its way:
72 KiB.
"""

from dataclasses import dataclass, replace

import torch

from ....lang.errors import ParameterError
from ...attention.backend import AttentionGeometry
from ...cache.kv_pool import FLOAT8
from .jit import block_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_HEAD_DIM = 256
HEAD_DIM_UNIT = 16
MOST_GROUP = 128  # query heads of one KV head, which are in one tile
TILE_BYTES = 16 << 10  # of keys
ROOM_FOR_THREE = 128 << 10  # bytes of shared memory; a program on a device with less has two stages
SMALL_VECTOR, LARGE_VECTOR = 128, 256  # bytes
STREAM_REGISTERS = 128  # of a thread: a quarter of a multiprocessor's for 128 threads
ROOM_FOR_LARGE = 196 << 10  # bytes of shared memory, for MANY large vectors and two tiles of 64 keys and values
FEW, SOME, HALF, MANY = 16, 32, 64, 128  # query vectors


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes with which one kind of item is computed."""

    vectors: int  # query vectors: rows × heads of a group
    keys: int
    warps: int
    stages: int  # tiles of keys that are under way at once, the one that is computed included
    resident: int  # programs on a multiprocessor
    two_loops: bool  # tiles that need no mask are computed without one
    registers: int | None = None  # of a thread, at most; None: as the compiler likes

    def rows(self, geometry: AttentionGeometry) -> int:
        """Most rows of an item."""
        return self.vectors // geometry.group


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Of one model. `some` and `many` are never in the same plan."""

    few: Tile
    some: Tile
    many: Tile


def tiles_for(
    geometry: AttentionGeometry, dtype: torch.dtype, kv_dtype: torch.dtype, *, shared_memory: int | None = None
) -> AttentionTiles:
    """For queries and results of `dtype`, keys and values of `kv_dtype`.

    Args:
        shared_memory: bytes of it that a program may take on the device; None: as many as it likes.

    Raises:
        ParameterError: a head_dim, a group or a dtype that the kernels do not take.
    """
    head_dim, group = geometry.head_dim, geometry.group
    if head_dim % HEAD_DIM_UNIT or not 0 < head_dim <= MOST_HEAD_DIM:
        raise ParameterError(
            f"head_dim={head_dim}: the Triton kernels take multiples of {HEAD_DIM_UNIT} up to {MOST_HEAD_DIM}; "
            'write kernels="torch"'
        )
    if group > MOST_GROUP:
        raise ParameterError(
            f"{geometry.heads} heads over {geometry.kv_heads} KV heads: the Triton kernels take up to {MOST_GROUP} "
            'heads for each; write kernels="torch"'
        )
    if dtype not in DTYPES:
        known = ", ".join(map(_name, DTYPES))
        raise ParameterError(f'dtype={_name(dtype)}: the Triton kernels take {known}; write kernels="torch"')
    if kv_dtype not in (dtype, FLOAT8):
        raise ParameterError(
            f"keys and values in {_name(kv_dtype)} for queries in {_name(dtype)}: the Triton kernels take a pool of "
            f'the same dtype, or of {_name(FLOAT8)}; write kv_dtype="auto"'
        )
    vector = block_of(head_dim, least=HEAD_DIM_UNIT) * dtype.itemsize  # bytes
    keys = min(128, TILE_BYTES // vector)
    least = block_of(group)  # one row at least
    exact = dtype is torch.float32  # multiplied without tensor cores: operands are in registers
    stages = 3 if shared_memory is None or shared_memory >= ROOM_FOR_THREE else 2
    warps = 8 if exact or least > HALF else 4
    few = Tile(max(FEW, least), keys, warps, stages, resident=2, two_loops=False)
    if warps == 4 and vector <= LARGE_VECTOR and kv_dtype is dtype:
        few = replace(few, stages=2, resident=4, registers=STREAM_REGISTERS)
    fewer = max(HEAD_DIM_UNIT, keys // 2) if exact else keys
    return AttentionTiles(
        few=few,
        some=replace(few, vectors=max(SOME, least), keys=fewer),
        many=_many(vector, keys, least, stages, shared_memory, plain=not exact and kv_dtype is dtype),
    )


def _many(vector: int, keys: int, least: int, stages: int, shared_memory: int | None, *, plain: bool) -> Tile:
    """`plain` is what was measured on an H100, where the others take from 5 percent longer to twice as long."""
    if vector > LARGE_VECTOR:
        if plain and (shared_memory is None or shared_memory >= ROOM_FOR_LARGE):
            return Tile(MANY, 64, 8, 2, resident=1, two_loops=True)
        return Tile(max(HALF, least), keys, 8, stages, resident=1, two_loops=True)
    if plain and (least <= HALF or vector <= SMALL_VECTOR):
        return Tile(MANY if vector <= SMALL_VECTOR else HALF, 64, 4, stages, resident=2, two_loops=True)
    return Tile(MANY, keys, 8, stages, resident=1, two_loops=True)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
