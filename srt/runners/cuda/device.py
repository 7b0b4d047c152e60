"""Wraps the features that only a CUDA device has: asynchronous copies, events (marks), graphs and its own memory.

    Accelerator   CudaAccelerator   a device: work is enqueued, the host continues at once
                  HostAccelerator   a fake that ships: the CPU, where all work is done when its call returns

Everything else in this folder is torch, Triton and numpy, so the same code runs on both.

Memory is divided into the weights, the workspace of the largest step, and the KV pool from the rest. The tower runs
before the decoder, so the workspace of a step is that of the larger one.

    | weights | workspace      | features | KV pool                                   | left: graphs, fragments |
              '-------- measured ---------'-- POOL_SHARE of the rest -----------------'

With memory_share=0.4 the whole line, CUDA's context included, is 0.4 of the device: others may have the rest.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ....lang.errors import ModelError, ParameterError
from ...cache.kv_pool import KVGeometry, PoolSize, size_for_bytes
from ...cache.state_slots import NO_STATE
from ...core.batch import Batch, Runner, StateRun
from ...layers.quantized import QuantizedSource, QuantizedStacks
from ...multimodal.store import VisionStore

POOL_SHARE = 0.92  # of the memory that weights and the largest step leave
CONTEXT_BYTES = (
    512 << 20
)  # of a share: CUDA's context, its libraries and graphs, which torch's allocator does not count
MUCH_TAKEN = 0.05  # of a device's memory: other programs that take more are named where it is short
MOST_POOL_TOKENS = 1 << 20  # unless an option gives the size: the idle check walks the whole pool
ALIGNMENT = 16  # bytes; Triton reads 16 at once where it knows that an address is a multiple of it
_DTYPES = {
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "float32": torch.float32,
    "float64": torch.float64,
}


class Mark(Protocol):
    """Marks a point in the enqueued work of a device."""

    def wait(self) -> None:
        """Waits until all work enqueued before the mark is done. Also selects the device for the calling thread."""

    def seconds_since(self, earlier: "Mark") -> float:
        """Returns the time between two marks of one device, by its own clock. Both have been waited for."""


class CaptureFailed(Exception):
    """A device cannot capture work that it has run; the text says why."""


class Graph(Protocol):
    """Replays captured work: the same kernels on the same addresses."""

    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device, in bytes.

    Attributes:
        free: can still be allocated.
        own: allocated by this runtime, without CUDA's context.
    """

    total: int
    free: int
    own: int

    @property
    def others(self) -> int:
        """Returns the bytes that other programs take, without one context."""
        return max(0, self.total - self.free - self.own - CONTEXT_BYTES)

    def left(self, share: float | None) -> int:
        """Returns the bytes that this runtime may still allocate. share: of the total, that it may take; None: all."""
        return (
            self.free if share is None else min(self.free, max(0, int(share * self.total) - CONTEXT_BYTES - self.own))
        )


class Accelerator(Protocol):
    """One device and its one stream of work. `memory_share`: see `RuntimeOptions`; None: all that is free."""

    device: torch.device
    name: str
    memory_share: float | None

    def use(self) -> None:
        """Selects the device for the calling thread. CUDA gives every new thread the first device."""

    def host_buffer(self, size: int) -> torch.Tensor:
        """Allocates bytes [size] on the host for asynchronous copies from and to the device."""

    def mark(self) -> Mark:
        """Marks the end of all work that is enqueued so far."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Runs the work of a call and captures it. `work` is called once or more; each call must write the same memory.

        Raises:
            CaptureFailed: the work ran, and cannot be captured.
        """

    def waits(self, work: Callable[[], object]) -> str | None:
        """Calls `work`, and returns at what the host waits for the device in it, as a clause; None: at nothing.

        Work that waits cannot be captured: for a number that it reads, or to send one that is not in pinned memory.
        """

    def memory(self) -> DeviceMemory:
        """Returns who has how much of its memory. What torch keeps for reuse is free."""

    def free_memory(self) -> int:
        """Returns the bytes that can still be allocated, in the share of this runtime."""

    def peak_memory(self, work: Callable[[], object]) -> int:
        """Returns the peak bytes of a call, in addition to those already allocated. `work` is called once."""

    def give_back(self) -> None:
        """Gives memory that is kept for reuse back to the device."""


class CudaAccelerator:
    """A CUDA device. Its work is torch's current stream.

    Raises:
        ModelError: torch cannot use the device; the message says why, and what to write instead.
    """

    def __init__(self, device: torch.device, memory_share: float | None = None) -> None:
        try:
            index = torch.cuda.current_device() if device.index is None else device.index
            torch.cuda.set_device(index)
            self.name = torch.cuda.get_device_name(index)
            torch.cuda.mem_get_info(index)  # the first call that needs the device itself
        except (AssertionError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            if "busy" in reason:
                reason += " (another program may have it alone: nvidia-smi -q -d COMPUTE)"
            raise ModelError(f'device="{device}" cannot be used: {reason}; write "cpu", or another device') from error
        self.device = torch.device("cuda", index)
        self.memory_share = memory_share
        self._before = torch.cuda.memory_reserved(index)  # of other runtimes in this process
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
        """Captures on the second call: the first compiles kernels and allocates workspaces, which no capture may do.

        Exchanges between ranks connect in the first call, and are done before the capture, which waits for the device.
        The thread in which torch watches exchanges asks the driver meanwhile, so only this thread is restricted.
        """
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            work()
        torch.cuda.current_stream().wait_stream(self._aside)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._graphs, stream=self._aside, capture_error_mode="thread_local"):
                work()
        except Exception as error:  # of the driver, of a library or of memory
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own
            raise CaptureFailed(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
        return graph

    def waits(self, work: Callable[[], object]) -> str | None:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return None

    def memory(self) -> DeviceMemory:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return DeviceMemory(total, free, torch.cuda.memory_reserved(self.device) - self._before)

    def free_memory(self) -> int:
        return self.memory().left(self.memory_share)

    def give_back(self) -> None:
        torch.cuda.empty_cache()

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
    """Uses the CPU in place of a device, for tests. A graph is replayed by calling its work again.

    Args:
        free: the bytes that are free.
        peak: the bytes that `peak_memory` returns.
        total: the bytes of the device; None: those that are free.
        own: the bytes that this runtime has taken.
    """

    def __init__(
        self,
        *,
        free: int = 1 << 30,
        peak: int = 0,
        total: int | None = None,
        own: int = 0,
        memory_share: float | None = None,
    ) -> None:
        self.device = torch.device("cpu")
        self.name = "the host"
        self.memory_share = memory_share
        self._memory = DeviceMemory(free if total is None else total, free, own)
        self._peak = peak

    def use(self) -> None:
        """Does nothing: there is one device."""

    def host_buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def mark(self) -> Mark:
        return _Done()

    def capture(self, work: Callable[[], None]) -> Graph:
        """Calls the work once and keeps it for replays."""
        work()
        return _Again(work)

    def waits(self, work: Callable[[], object]) -> str | None:
        """Calls the work; there is no device to wait for."""
        work()
        return None

    def memory(self) -> DeviceMemory:
        return self._memory

    def free_memory(self) -> int:
        return self.memory().left(self.memory_share)

    def peak_memory(self, work: Callable[[], object]) -> int:
        work()
        return self._peak

    def give_back(self) -> None:
        """Does nothing: the host keeps none."""


class _Done:
    def __init__(self) -> None:
        self._made = time.perf_counter()

    def wait(self) -> None:
        """Returns at once: all work is done when it is enqueued."""

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _Done), "marks of one device"
        return self._made - earlier._made


class _Again:
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()


def accelerator_for(device: torch.device, memory_share: float | None = None) -> Accelerator:
    """Returns the accelerator of a device. Raises ModelError for a device that torch cannot use.

    memory_share: see `Accelerator`.
    """
    return CudaAccelerator(device, memory_share) if device.type == "cuda" else HostAccelerator()


class Staging:
    """Sends arrays to one device, in one pinned buffer and with one asynchronous copy.

        host     | token ids | positions | write slots | sources |      fresh for each step: torch's pinned allocator
                         one copy, in stream order                      gives memory out again when its copy is done
        device   | token ids | positions | write slots | sources |      the same memory for all steps

    Copies and kernels run in one stream, so a step's arrays are overwritten only after the previous step has read its
    own. Arrays of the same lengths always get the same addresses, as captured graphs need, until the buffer grows.

    Args:
        capacity: initial size in bytes.
    """

    def __init__(self, accelerator: Accelerator, capacity: int) -> None:
        self._accelerator = accelerator
        self._buffer = torch.empty(capacity, dtype=torch.uint8, device=accelerator.device)
        self._layout = _Layout((), 0, (), ())  # of the last call; steps that decode have the same one for long

    # Any: arrays of several dtypes travel together.
    def send(self, arrays: Sequence[NDArray[np.generic]]) -> list[torch.Tensor]:
        """Returns each array as a tensor on the device, with its shape and dtype; valid until the next call."""
        forms = tuple([(array.dtype, array.shape) for array in arrays])
        if forms != self._layout.forms:
            self._layout = self._lay_out(arrays, forms)
        layout = self._layout
        host = self._accelerator.host_buffer(layout.size)
        numbers = host.numpy()
        for array, start in zip(arrays, layout.starts, strict=True):
            numbers[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._buffer[: layout.size].copy_(host, non_blocking=True)
        return list(layout.tensors)

    def _lay_out(self, arrays: Sequence[NDArray[np.generic]], forms: "_Forms") -> "_Layout":
        ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
        starts, size = (0, *ends[:-1]), ends[-1]
        if size > len(self._buffer):
            self._buffer = torch.empty(2 * size, dtype=torch.uint8, device=self._accelerator.device)
        parts = [self._buffer[start : start + array.nbytes] for array, start in zip(arrays, starts, strict=True)]
        tensors = [
            part.view(_DTYPES[array.dtype.name]).view(array.shape) for array, part in zip(arrays, parts, strict=True)
        ]
        return _Layout(forms, size, starts, tuple(tensors))


_Forms = tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]  # of arrays: dtype and shape; Any: of several dtypes


class _Layout(NamedTuple):
    """Describes where arrays lie in the buffer."""

    forms: _Forms
    size: int  # bytes
    starts: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The size of the largest step."""

    rows: int = 576  # prompt tokens of a chunk, and a row of every sequence that decodes
    sequences: int = 64
    logits: int = 256  # rows
    graph_rows: int = 1024  # steps of more rows keep the device busy without graphs


@contextmanager
def room_for_weights(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, accelerator: Accelerator
) -> Iterator[None]:
    """Checks that the weights fit, before any tensor is read, and says the same where memory runs out in the block.

    Raises:
        ParameterError: they do not fit; the message has the numbers and what to write.
    """
    needed = weight_bytes(tensors, dtype)
    if needed > accelerator.free_memory():
        raise _shortage(needed, dtype, accelerator)
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _shortage(needed, dtype, accelerator) from error


def _shortage(needed: int, dtype: torch.dtype, accelerator: Accelerator) -> ParameterError:
    smaller = 'write dtype="bfloat16" for half of them, ' if dtype is torch.float32 else ""
    return ParameterError(
        f"the weights take {needed} bytes in {str(dtype).removeprefix('torch.')}, {_room(accelerator)}; "
        f"{_more(accelerator)}{smaller}spread the model over several devices with tensor_parallel, or take a smaller "
        "one"
    )


def _room(accelerator: Accelerator) -> str:
    """Returns a clause about the memory that a runtime may still take, and who has the rest."""
    share, memory, free = accelerator.memory_share, accelerator.memory(), accelerator.free_memory()
    if share is not None and free < memory.free:
        return f"memory_share={share} of {accelerator.name} ({memory.total} bytes) leaves {free} free"
    taken = memory.others if memory.others > MUCH_TAKEN * memory.total else 0
    others = f" (other programs take {taken} of {memory.total})" if taken else ""
    return f"{accelerator.name} has {free} free{others}"


def _more(accelerator: Accelerator) -> str:
    """Returns what to write for more memory, where the share of a runtime is what is short."""
    short = accelerator.free_memory() < accelerator.memory().free
    return "write a larger memory_share, " if short else ""


def weight_bytes(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> int:
    """Returns the bytes of all tensors in the model's dtype; packed matrices stay packed."""
    packed = tensors.quantized_names if isinstance(tensors, QuantizedSource) else frozenset[str]()
    packed |= tensors.stacked_names if isinstance(tensors, QuantizedStacks) else frozenset[str]()
    floats = sum(tensors[name].numel() for name in tensors if name not in packed) * dtype.itemsize
    return floats + sum(tensors.packed_bytes(name) for name in packed if isinstance(tensors, QuantizedSource))


def measured_workspace(
    probe: Runner, accelerator: Accelerator, limits: StepLimits, pictures: VisionStore | None = None
) -> int:
    """Measures the bytes that the largest step takes, on a probe that is discarded afterwards.

    Args:
        probe: the model with a pool of `probe_size(limits)`.
        pictures: the store with the vision tower; None: the model reads text only.
    """
    step = largest_step(limits, probe.context_length)
    probe.forward(step)  # the first one compiles kernels and allocates the libraries' workspaces
    workspace = accelerator.peak_memory(lambda: probe.forward(step))
    if pictures is not None:
        pictures.see_largest()
        workspace = max(workspace, accelerator.peak_memory(pictures.see_largest)) + pictures.feature_bytes
    # While a step runs, the logits of the previous one may still be read.
    return workspace + len(step.logit_rows) * probe.vocab_size * 4


def probe_size(limits: StepLimits) -> PoolSize:
    return PoolSize(limits.rows + 1)


def largest_step(limits: StepLimits, context_length: int) -> Batch:
    """Builds a batch of prompts with as many rows in total as a step may have."""
    lengths = [context_length] * (limits.rows // context_length)
    if limits.rows % context_length:
        lengths.append(limits.rows % context_length)
    ends = np.cumsum(lengths)
    slots = np.arange(1, limits.rows + 1, dtype=np.int32)
    return Batch(
        token_ids=np.zeros(limits.rows, dtype=np.int64),
        positions=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        write_slots=slots.astype(np.int64),
        query_lengths=np.array(lengths, dtype=np.int32),
        prefix_lengths=np.zeros(len(lengths), dtype=np.int32),
        slots=tuple(np.split(slots, ends[:-1])),
        logit_rows=np.arange(max(0, limits.rows - limits.logits), limits.rows, dtype=np.int64),
        states=tuple(StateRun(length, NO_STATE, NO_STATE + 1) for length in lengths),
    )


def pool_size(
    geometry: KVGeometry, accelerator: Accelerator, *, workspace: int, limits: StepLimits, one_pool: bool = False
) -> PoolSize:
    """Returns the size of the KV pool when no option gives it, with the weights loaded.

    Args:
        workspace: bytes to leave for steps.
        limits: the size of the largest step.
        one_pool: layers with a window have the slots of the others.

    Raises:
        ParameterError: there is too little memory for a usable pool.
    """
    try:
        budget = int(POOL_SHARE * max(0, accelerator.free_memory() - workspace))
        size = size_for_bytes(geometry, budget, least_windows=least_windows(geometry, limits), one_pool=one_pool)
    except ParameterError as error:
        raise ParameterError(
            f"after the weights {_room(accelerator)}, and the largest step takes {workspace} of them: {error}; "
            f'{_more(accelerator)}make room by a smaller chunk_size or max_running, by kv_dtype="fp8" or by '
            "tensor_parallel"
        ) from error
    return PoolSize(min(size.slots, MOST_POOL_TOKENS + 1), size.window_slots)


def least_windows(geometry: KVGeometry, limits: StepLimits) -> int:
    """Returns the fewest window slots of a pool: for the largest step after a window, and for a picture in it."""
    return 2 * geometry.reach + limits.rows
