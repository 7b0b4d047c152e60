"""The seam around what only a CUDA device has: memory that copies do not wait for, marks in its work, graphs.

    Accelerator   CudaAccelerator   a device: work is enqueued, the host goes on at once
                  HostAccelerator   the fake that ships: the CPU, where all work is done when its call returns

Everything else in this folder is torch, Triton and numpy, and so the same code runs in both.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ....lang.errors import ModelError


class Mark(Protocol):
    """A place in the work of a device."""

    def wait(self) -> None:
        """Returns when all that was enqueued before it is done. The calling thread works on the device from then on."""

    def seconds_since(self, earlier: "Mark") -> float:
        """Between two marks of one device, by its own clock. Both have been waited for."""


class Graph(Protocol):
    """Work that was captured: the same kernels on the same addresses."""

    def replay(self) -> None: ...


class Accelerator(Protocol):
    """One device and its one stream of work."""

    device: torch.device
    name: str

    def use(self) -> None:
        """The calling thread works on the device. CUDA gives every new thread the first one."""

    def host_buffer(self, size: int) -> torch.Tensor:
        """Bytes [size] on the host, from and to which the device copies while the host goes on."""

    def mark(self) -> Mark:
        """Marks the end of all work that is enqueued so far."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """The work of a call, to be replayed. It is called once or more; every call must do the same to memory."""

    def free_memory(self) -> int:
        """Bytes that can still be taken, those that torch keeps for reuse included."""

    def peak_memory(self, work: Callable[[], object]) -> int:
        """Bytes that a call takes at its worst moment, on top of what is taken already. It is called once."""


class CudaAccelerator:
    """A CUDA device. Its work is torch's current stream.

    Raises:
        ModelError: torch cannot use the device; the message says why, and what to write instead.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.set_device(index)
            self.name = torch.cuda.get_device_name(index)
        except (AssertionError, RuntimeError) as error:
            raise ModelError(f'device="{device}" cannot be used: {error}; write "cpu", or another device') from error
        self.device = torch.device("cuda", index)
        self._graphs = torch.cuda.graph_pool_handle()  # graphs run one after another, and share their memory
        # One for all captures, and for the calls before them: cuBLAS keeps tens of MiB for every stream it was used in.
        self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def use(self) -> None:
        torch.cuda.set_device(self.device)

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return _CudaMark(event, self)

    def capture(self, work: Callable[[], None]) -> Graph:
        """Called twice: the first call compiles kernels and makes the libraries' workspaces, which no graph may do."""
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            work()
        torch.cuda.current_stream().wait_stream(self._aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graphs, stream=self._aside):
            work()
        return graph

    def free_memory(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def peak_memory(self, work: Callable[[], object]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


class _CudaMark:
    def __init__(self, event: torch.cuda.Event, accelerator: CudaAccelerator) -> None:
        self._event = event
        self._accelerator = accelerator

    def wait(self) -> None:
        self._accelerator.use()
        self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _CudaMark), "marks of one device"
        return float(earlier._event.elapsed_time(self._event)) / 1000


class HostAccelerator:
    """The CPU in place of a device, for tests of everything but speed. A graph is replayed by calling its work again.

    Args:
        free: bytes that it says are free.
        peak: bytes that it says every call takes.
    """

    def __init__(self, *, free: int = 1 << 30, peak: int = 0) -> None:
        self.device = torch.device("cpu")
        self.name = "the host"
        self._free = free
        self._peak = peak

    def use(self) -> None:
        """There is one."""

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def mark(self) -> Mark:
        return _Done()

    def capture(self, work: Callable[[], None]) -> Graph:
        """Called once, as a capture must be able to."""
        work()
        return _Again(work)

    def free_memory(self) -> int:
        return self._free

    def peak_memory(self, work: Callable[[], object]) -> int:
        work()
        return self._peak


class _Done:
    def __init__(self) -> None:
        self._made = time.perf_counter()

    def wait(self) -> None:
        """All work is done when it is enqueued."""

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _Done), "marks of one device"
        return self._made - earlier._made


class _Again:
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()


ALIGNMENT = 16  # bytes; Triton reads 16 at once where it knows that an address is a multiple of it


class Staging:
    """Sends arrays to one device, in one pinned buffer and by one transfer that the host does not wait for.

        host     | token ids | positions | write slots | sources |      fresh for each step: torch's pinned allocator
                         one copy, in stream order                      gives memory out again when its copy is done
        device   | token ids | positions | write slots | sources |      the same memory for all steps

    Copies and kernels run in one stream, so a step's arrays are overwritten when the step before has read its own.
    Arrays of the same lengths always come to the same addresses, as captured graphs need it, until the buffer has to
    grow.

    Args:
        capacity: bytes that are there from the beginning.
    """

    def __init__(self, accelerator: Accelerator, capacity: int) -> None:
        self._accelerator = accelerator
        self._buffer = torch.empty(capacity, dtype=torch.uint8, device=accelerator.device)

    # Any: arrays of several dtypes travel together.
    def send(self, arrays: Sequence[NDArray[np.generic]]) -> list[torch.Tensor]:
        """Each as a tensor on the device, with its shape and dtype; valid until the next call."""
        ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
        starts = [0, *ends[:-1]]
        size = ends[-1]
        if size > len(self._buffer):
            self._buffer = torch.empty(2 * size, dtype=torch.uint8, device=self._accelerator.device)
        host = self._accelerator.host_buffer(size)
        bytes_of_host = host.numpy()
        tensors: list[torch.Tensor] = []
        for array, start in zip(arrays, starts, strict=True):
            bytes_of_host[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
            part = self._buffer[start : start + array.nbytes]
            tensors.append(part.view(_DTYPES[array.dtype.name]).view(array.shape))
        self._buffer[:size].copy_(host, non_blocking=True)
        return tensors


_DTYPES = {
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "float32": torch.float32,
    "float64": torch.float64,
}
