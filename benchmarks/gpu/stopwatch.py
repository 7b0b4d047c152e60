"""How long work takes on the device, and how much time there is for all of it.

Work is captured once and replayed as a graph, so that launches from Python are no part of it. Before each replay the
second level of the cache is filled with something else. The median of replays is taken, by the device's own clock:

    | fill the cache | event | replay | event | fill the cache | event | replay | event | …
                       '-- time --'                              '-- time --'
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch
from umbel.srt.runners.cuda.device import CudaAccelerator, HostAccelerator

WARM_UP = 3  # replays
FEWEST, MOST = 10, 100  # replays that are timed
TURNS, CALLS = 3, 10  # of calls that follow each other
# Bytes: more than the cache holds, and so many that the next replay is launched before they are written.
FILLER = 512 << 20


class Stopwatch(Protocol):
    device: torch.device

    def seconds(self, work: Callable[[], object]) -> float:
        """Of a piece of work on the device: the median of several runs."""

    def seconds_of_calls(self, work: Callable[[], object]) -> float:
        """Of one of several calls that follow each other, the host's work included where the device waits for it."""


class DeviceStopwatch:
    """On a CUDA device.

    Args:
        enough: seconds after which a piece of work has been measured, if `FEWEST` replays are done.
    """

    def __init__(self, device: torch.device, *, enough: float = 0.3) -> None:
        self.device = CudaAccelerator(device).device
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size
        self._filler = torch.empty(max(FILLER, 2 * cache), dtype=torch.uint8, device=self.device)
        self._enough = enough

    def seconds(self, work: Callable[[], object]) -> float:
        # Each with an accelerator of its own: torch refuses to capture into a pool whose graphs are all gone.
        graph = CudaAccelerator(self.device).capture(lambda: _forget(work()))
        for _ in range(WARM_UP):
            graph.replay()
        torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        taken: list[float] = []
        while len(taken) < FEWEST or (len(taken) < MOST and time.perf_counter() - began < self._enough):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._filler.zero_()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1000)
        return statistics.median(taken)

    def seconds_of_calls(self, work: Callable[[], object]) -> float:
        for _ in range(WARM_UP):
            work()
        taken: list[float] = []
        for _ in range(TURNS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(CALLS):
                work()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1000 / CALLS)
        return statistics.median(taken)


class HostStopwatch:
    """On the CPU, for dry runs: once, by the wall."""

    def __init__(self) -> None:
        self.device = HostAccelerator().device

    def seconds(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return max(time.perf_counter() - began, 1e-9)

    def seconds_of_calls(self, work: Callable[[], object]) -> float:
        return self.seconds(work)


class Budget:
    """Time that is shared out: a group that is done early leaves the rest to those behind it.

    Args:
        seconds: for all of it.
        clock: seconds that pass.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - self._clock())

    def part(self, share: float) -> "Budget":
        """A share of what is left."""
        return Budget(self.left * share, self._clock)

    @property
    def is_up(self) -> bool:
        return self.left == 0.0


def give_memory_back() -> None:
    """What nobody holds any more, to the device: other processes and graphs' pools need it, too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _forget(result: object) -> None:
    """What a graph's work returns lies in the graph's memory."""
    del result
