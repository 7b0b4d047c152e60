"""`python -m benchmarks.overhead.host_work`: what a decode step on a GPU costs the host, without one.

Scheduler and CUDA runner are the real ones; the device does nothing, and its graphs are empty. A step is planned and
launched while the one before runs, and that one is read and committed. Printed are medians of CPU time, in
milliseconds: the whole step, the launch in it, and in that the attention plan.
"""

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch

os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are imported: they are not launched

from umbel.lang.sampling import SamplingParams
from umbel.srt.attention.backend import AttentionGeometry
from umbel.srt.cache.kv_pool import KVGeometry, LayerKV, PoolSize
from umbel.srt.core.batch import Draws
from umbel.srt.core.instruments import SystemClock
from umbel.srt.core.messages import EngineGenerate, Schedule
from umbel.srt.kernels.triton.attention_backend import TritonBackend
from umbel.srt.runners.cuda.device import HostAccelerator, StepLimits
from umbel.srt.runners.cuda.graphs import GraphPlans
from umbel.srt.runners.cuda.runner import CudaRunner
from umbel.srt.scheduler.scheduler import Scheduler, SchedulerConfig

HEADS = AttentionGeometry(32, 8, 128)  # those of Llama 3 8B
MULTIPROCESSORS = 132  # of an H100
VOCABULARY, CHUNK, STEPS = 256, 8192, 120
SIZES = ("32x4096", "256x4096", "256x4096:2048")


class NullDevice(HostAccelerator):
    """Replays nothing."""

    def capture(self, work: Callable[[], None]) -> "NullDevice":
        del work
        return self

    def replay(self) -> None:
        """Does nothing."""


class NullModel:
    """Implements `runners.cuda.decoder.DeviceModel` as far as a captured step asks for it; computes nothing."""

    weights = "none"
    vocab_size = VOCABULARY
    context_length = 1 << 17
    state_geometry = None
    adapters = 0
    device = torch.device("cpu")
    kv_geometry = KVGeometry((LayerKV(1, 16, 16),), torch.bfloat16)
    attention_geometry = HEADS
    windows = (None,)

    def forward(self, *_: object, **__: object) -> None:
        """Leaves logits as they are."""


class NullChooser:
    """Implements `runners.cuda.runner.DeviceChooser`: always the same token."""

    def choose_async(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        return torch.full((len(draws),), 7, dtype=torch.int64)


def runner_of(sequences: int, slots: int) -> CudaRunner:
    backend = TritonBackend(HEADS, "cpu", dtype=torch.bfloat16, multiprocessors=MULTIPROCESSORS)
    limits = StepLimits(rows=CHUNK + sequences, sequences=sequences, logits=2 * sequences)
    parts: dict[str, Any] = {"backend": backend, "chooser": NullChooser(), "limits": limits, "cuda_graphs": True}
    model: Any = NullModel()
    return CudaRunner(model, NullDevice(), name="null", size=PoolSize(slots), **parts)


def measure(rows: int, keys: int, shared: int) -> dict[str, float]:
    """Returns medians of milliseconds. shared: keys that all texts begin with."""
    runner = runner_of(rows, rows * (keys + STEPS + 128 + rows) + 4096)
    config = SchedulerConfig(
        max_running=1024, max_step_logits=2048, max_step_tokens=CHUNK, overlap=True, cache_events=False
    )
    scheduler = Scheduler(runner, lambda token: b"ab", frozenset(), config, SystemClock())
    dice = np.random.default_rng(0)
    head = dice.integers(1, VOCABULARY, shared).tolist()
    sampling = SamplingParams(temperature=0.0, max_tokens=STEPS + 60 + rows, ignore_eos=True)
    for number in range(rows):
        own = [number % 250 + 1, number // 250 + 1, *dice.integers(1, VOCABULARY, keys - shared - 2).tolist()]
        scheduler.handle_message(EngineGenerate(number, head + own, sampling, False, Schedule()))
    while int(runner.facts()["graph_replays"]) < (6 if rows > 4 else 30):  # until all of them decode
        scheduler.step()
    spent: defaultdict[str, float] = defaultdict(float)
    runner.launch = _timed(runner.launch, spent, "launch")  # type: ignore[method-assign]
    fill = GraphPlans.fill
    GraphPlans.fill = _timed(fill, spent, "plan")  # type: ignore[method-assign]
    found: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(STEPS):
        spent.clear()
        began = time.process_time()
        scheduler.step()
        spent["step"] = time.process_time() - began
        for name, seconds in spent.items():
            found[name].append(1e3 * seconds)
    GraphPlans.fill = fill  # type: ignore[method-assign]
    return {name: median(milliseconds) for name, milliseconds in found.items()}


# Any: any method.
def _timed(method: Callable[..., Any], spent: dict[str, float], name: str) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        began = time.process_time()
        try:
            return method(*arguments)
        finally:
            spent[name] += time.process_time() - began

    return timed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead.host_work", description=__doc__)
    parser.add_argument("sizes", nargs="*", default=SIZES, metavar="ROWSxKEYS[:SHARED]", help=", ".join(SIZES))
    torch.set_num_threads(1)
    print("| texts x keys, shared | step | launch | plan |\n| --- | ---: | ---: | ---: |")
    for size in parser.parse_args(arguments).sizes:
        counts, _, shared = size.partition(":")
        rows, _, keys = counts.partition("x")
        found = measure(int(rows), int(keys), int(shared or 0))
        print(f"| {size} | {found['step']:.2f} | {found['launch']:.2f} | {found['plan']:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
