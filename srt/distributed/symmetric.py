"""Adds up small parts in symmetric memory, by kernels of torch in which ranks read each other's parts.

    NCCL       a ring or a tree: two passes through all ranks, and the start of a kernel that is made for large sums
    one-shot   each rank writes its part to its buffer, waits for the others and reads all their parts
    two-shot   each rank adds up one slice of all parts, and then reads the sums of the others

A decode step of 64 rows and 4,096 numbers adds up 0.5 MB twice a layer, where waiting counts and not bandwidth.
One-shot reads (n − 1) × bytes, two-shot 2 (n − 1) / n × bytes and waits once more: so one-shot is for the smallest
parts, and for all that two ranks add up. All ranks add in the same order, so they get the same bits, by which routers
choose experts.

The buffers of the ranks lie at addresses that all of them can read, on links with atomic operations (NVLink). Kernels
of a step run one after another, so one buffer does for all sums, and captured graphs may have its address. Where a rank
lacks anything of this, all ranks add with NCCL, which works everywhere.
"""

import ctypes
import logging
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist

from .communicator import Communicator, first_failed

_log = logging.getLogger(__name__)

MOST_BYTES = 8 << 20  # of a part; larger ones are NCCL's
# Ranks → bytes up to which one-shot is taken, as by vLLM's kernels of this kind. torch's are made for these ranks.
ONE_SHOT_BYTES = {2: MOST_BYTES, 4: 512 << 10, 8: 256 << 10}
ALIGNMENT = 16  # bytes that the kernels read at once
DTYPES = (torch.bfloat16, torch.float32)  # that they add
CLOSE = 1e-2  # relative, of a sum in bfloat16
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class SumKernels(Protocol):
    """The kernels of torch: `torch.ops.symm_mem`. `buffer` is a view of symmetric memory in the form of `part`."""

    def one_shot_all_reduce_copy(
        self, buffer: torch.Tensor, part: torch.Tensor, operation: str, group: str
    ) -> torch.Tensor:
        """Copies the part to the buffer and returns the sum in new memory."""

    def two_shot_all_reduce_out(
        self, buffer: torch.Tensor, operation: str, group: str, out: torch.Tensor
    ) -> torch.Tensor:
        """Writes the sum of all ranks' buffers to `out`."""


class SymmetricSums:
    """Adds up the parts of all ranks.

    Args:
        buffer: uint8 [MOST_BYTES] of this rank, in symmetric memory.
        group: the name of the ranks' process group.
        ranks: one of ONE_SHOT_BYTES.
    """

    name = f"symmetric memory up to {MOST_BYTES >> 20} MiB"

    def __init__(self, buffer: torch.Tensor, group: str, ranks: int, kernels: SumKernels) -> None:
        self._buffer = buffer
        self._group = group
        self._one_shot_bytes = ONE_SHOT_BYTES[ranks]
        self._kernels = kernels

    def takes(self, part: torch.Tensor) -> bool:
        """Returns whether parts of this form are added here; the same on all ranks."""
        return 0 < part.nbytes <= MOST_BYTES and part.nbytes % ALIGNMENT == 0 and part.dtype in DTYPES

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the sum, perhaps in the memory of the part, which is contiguous and `takes` accepts."""
        own = self._buffer[: part.nbytes].view(part.dtype).view(part.shape)
        if part.nbytes <= self._one_shot_bytes:
            return self._kernels.one_shot_all_reduce_copy(own, part, "sum", self._group)
        own.copy_(part)
        return self._kernels.two_shot_all_reduce_out(own, "sum", self._group, part)


def connect_sums(communicator: Communicator, device: torch.device) -> SymmetricSums:
    """Allocates the buffer of this rank and connects it to the others'. They call this at the same time."""
    import torch.distributed._symmetric_memory as symmetric_memory

    group = dist.group.WORLD
    assert group is not None, "the ranks are connected"
    torch.cuda.set_device(device)
    buffer = symmetric_memory.empty(MOST_BYTES, dtype=torch.uint8, device=device)
    symmetric_memory.rendezvous(buffer, group)
    return SymmetricSums(buffer, group.group_name, communicator.ranks, torch.ops.symm_mem)


def symmetric_sums(
    communicator: Communicator,
    device: torch.device,
    *,
    obstacle: Callable[[Communicator, torch.device], str | None],
    connect: Callable[[Communicator, torch.device], SymmetricSums] = connect_sums,
) -> SymmetricSums | None:
    """Connects the ranks through symmetric memory, and compares a sum of each kind with that of the communicator.

    None: some rank cannot, and none does. The first that cannot logs why.

    Args:
        communicator: adds with NCCL.
        obstacle: returns why this rank cannot, without the others.
    """
    found: list[SymmetricSums] = []

    def connected() -> str | None:
        try:
            found.append(connect(communicator, device))
        except Exception as error:  # of the driver or of torch
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return None

    checks: tuple[Callable[[], str | None], ...] = (
        lambda: obstacle(communicator, device),
        connected,
        lambda: _difference(found[0], communicator, device),
    )
    for check in checks:
        reason = check()
        first = first_failed(communicator, failed=reason is not None)
        if first is not None:
            if first == communicator.rank:
                _log.info("ranks add up with NCCL: rank %d: %s", first, reason)
            return None
    return found[0]


def peer_obstacle(communicator: Communicator, device: torch.device) -> str | None:
    """Returns why this rank cannot read the memory of the others, as a clause; None: it can.

    Ranks take devices one after another, see `launch.device_of`.
    """
    if communicator.ranks not in ONE_SHOT_BYTES:
        return f"torch's kernels are made for {', '.join(map(str, ONE_SHOT_BYTES))} ranks"
    if not all(hasattr(torch.ops.symm_mem, name) for name in ("one_shot_all_reduce_copy", "two_shot_all_reduce_out")):
        return f"torch {torch.__version__} has no such kernels"
    assert device.index is not None, "ranks have devices of their own"
    own = device.index
    for rank in range(communicator.ranks):
        other = own - communicator.rank + rank
        if rank != communicator.rank and not _has_atomics(own, other):
            return f"cuda:{own} has no atomic operations on the memory of cuda:{other} (NVLink has)"
    return None


def _has_atomics(own: int, other: int) -> bool:
    """Asks the driver whether a device may read and lock the memory of another one."""
    value = ctypes.c_int()
    driver = ctypes.CDLL("libcuda.so.1")
    found = driver.cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, own, other)
    return found == 0 and value.value == 1 and torch.cuda.can_device_access_peer(own, other)


def _difference(sums: SymmetricSums, communicator: Communicator, device: torch.device) -> str | None:
    """Returns at what size a sum is another than the communicator's, as a clause; None: none is.

    All sizes are tried on all ranks, whatever comes out on this one.
    """
    wrong = None
    for size in (ALIGNMENT, ONE_SHOT_BYTES[communicator.ranks], MOST_BYTES):
        numbers = torch.arange(size // 2, device=device, dtype=torch.float32)
        part = (numbers * (communicator.rank + 1)).sin().bfloat16()
        expected = communicator.all_reduce(part.clone()).float()
        actual = sums.all_reduce(part).float()
        if not float((actual - expected).norm()) <= CLOSE * float(expected.norm()):  # NaN fails as well
            wrong = wrong or f"a sum of {size} bytes is not that of NCCL"
    return wrong
