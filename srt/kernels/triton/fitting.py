"""Keeps tiles within a device: before a launch by what they take, after a refusal by trying smaller ones.

    tile ── by its kernel's formula more than the device's shared memory ──► the next smaller one, and so on
      │
    launch ── Triton's OutOfResources all the same ──────────────────────► the next smaller one, and so on
      │
    the result: sizes of a tile change how sums are cut, never what is summed

What replaced what is logged once (a refusal as a warning), counted (`replaced_tiles`) and remembered. The formulas are
next to the kernels, and checked against what the compiler says for each class of devices (`benchmarks.gpu.ptx`).
Kernels without one take 16 KiB at most, which every device has.

Triton is imported only when a launch has failed: a runner's facts ask for the count without it.
"""

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch

_log = logging.getLogger(__name__)
LEAST = {"keys": 16, "depth": 32}  # of a tile: the least that tensor cores multiply
WARP_GROUPS = (9, 10)  # major capabilities whose products read all stages from shared memory

# Any: `tuning`'s rows and `attention.Tile`, which have stages, and keys or a depth.
Tile = TypeVar("Tile", bound=Any)


@dataclass(frozen=True, slots=True)
class Room:
    """The shared memory of a device.

    Attributes:
        bytes: that a program may take; None: as many as it likes.
        warp_groups: products read all stages from shared memory; elsewhere the one that is computed is in registers.
    """

    bytes: int | None = None
    warp_groups: bool = True


@cache
def room_of(device: torch.device) -> Room:
    """Returns the shared memory of a device; the interpreter has no limit."""
    if device.type != "cuda":
        return Room()
    properties = torch.cuda.get_device_properties(device)
    most = int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # it is not in torch's stubs
    return Room(most, properties.major in WARP_GROUPS)


def shared_bytes(tile: Any, room: Room, stage: int, fixed: int = 0) -> int:
    """Returns the shared memory of a tile, or a little more. stage: bytes of one stage; fixed: of what is read once."""
    stages: int = tile.stages if room.warp_groups else tile.stages - 1
    return max(1, stages) * stage + fixed


def smaller(tile: Tile) -> Tile | None:
    """Returns the next smaller tile: fewer stages, two at least, then half as many keys or inputs, then one stage."""
    if tile.stages > 2:
        return replace(tile, stages=tile.stages - 1)
    for name, least in LEAST.items():
        if getattr(tile, name, 0) > least:
            return replace(tile, **{name: getattr(tile, name) // 2})
    return replace(tile, stages=1) if tile.stages > 1 else None


_REPLACED: dict[Hashable, Any] = {}  # (kernel, tile, shape) → the tile that is launched in its place


def replaced_tiles() -> int:
    """Counts the tiles that are launched in another size than the table says."""
    return len(_REPLACED)


def largest_that_fits(
    kernel: str, tile: Tile, room: Room, needs: Callable[[Tile], int], shape: Hashable = None
) -> Tile:
    """Returns the tile, or the largest smaller one that the device's shared memory holds.

    Args:
        needs: bytes that a tile takes.
        shape: of what is computed, as far as `needs` depends on it.
    """
    if room.bytes is None or needs(tile) <= room.bytes:
        return tile
    key = (kernel, tile, room, shape)
    if key not in _REPLACED:
        found: Tile | None = tile
        while found is not None and needs(found) > room.bytes:
            found = smaller(found)
        reason = f"it takes {needs(tile)} bytes of shared memory, there are {room.bytes}"
        _replace(key, found or tile, reason, logging.INFO)
    fitting: Tile = _REPLACED[key]
    return fitting


def launch_fitting(
    kernel: str,
    tile: Tile,
    launch: Callable[[Tile], object],
    *,
    shape: Hashable = None,
    following: Callable[[Tile], Tile | None] = smaller,
) -> None:
    """Launches a kernel with a tile, or with the next smaller one that the device takes.

    Args:
        launch: raises before the kernel has run, if at all.
        shape: what the kernel is compiled for, as far as its resources depend on it.
        following: returns the next smaller tile; None: there is none.

    Raises:
        OutOfResources: Triton's, where no tile fits.
    """
    key = (kernel, tile, shape)
    if _REPLACED:
        tile = _REPLACED.get(key, tile)
    while True:
        try:
            launch(tile)
            return
        except Exception as error:
            less = following(tile) if _is_refusal(error) else None
            if less is None:
                raise
            _replace(key, less, str(error), logging.WARNING)
            tile = less


def _replace(key: tuple[Any, ...], tile: Any, reason: str, level: int) -> None:
    known = key in _REPLACED
    _REPLACED[key] = tile
    if not known:
        _log.log(level, "%s: a smaller tile in place of %s: %s", key[0], key[1], reason)


def _is_refusal(error: Exception) -> bool:
    from triton.runtime.errors import OutOfResources

    return isinstance(error, OutOfResources)
