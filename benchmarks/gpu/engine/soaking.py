"""Starts the runtimes of a soak: shortage and soak one after the other, on the device or in a dry run.

The shortage comes first: a runtime that has run large steps keeps their memory for the next ones.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import umbel as ul
from umbel.interpreter import loop
from umbel.srt.in_process import LocalBackend
from umbel.srt.launch import LoadedModel
from umbel.srt.runners.cuda.device import StepLimits

from ...record import machine
from ..figures import Record
from .model_folder import write_model
from .shapes import LLAMA_3_8B, TINY, Shape
from .soak import (
    GROUP,
    SAID,
    SHORTAGE,
    Backend,
    DeviceSqueeze,
    ScarceRunner,
    Soak,
    SoakSizes,
    Squeeze,
    on_device,
    on_host,
    shortage_figure,
    soak_figures,
    whole_pool,
)
from .steps import random_runner
from .words import WordTokenizer
from .workloads import ON_DEVICE, ON_HOST

POOL_SHARE = 0.3  # of a device's memory; the rest is for weights and steps


def soak_on_device(record: Record, device: torch.device, seconds: float) -> None:
    """Runs both on one runtime in two processes. A shortage that the record has is left out."""
    sizes = on_device(seconds)
    room = int(POOL_SHARE * torch.cuda.mem_get_info(device)[1]) // (2 * LLAMA_3_8B.kv_numbers)
    options = {**ON_DEVICE.options, "pool_tokens": min(ON_DEVICE.pool_tokens, room)}
    with _runtime(LLAMA_3_8B, sizes, device, options) as runtime:
        if not record.has(GROUP, SHORTAGE):
            _shortage(record, runtime, DeviceSqueeze(device), sizes)
        loop.streams.run(_soak(record, runtime, sizes))


def soak_on_host(record: Record, seconds: float) -> None:
    """Runs the shortage in this process, on a runner that has no memory for larger steps, and the soak in two."""
    sizes, device = on_host(seconds), torch.device("cpu")
    limits = StepLimits(rows=96, sequences=8, logits=64)
    options = {"max_running": 8, "chunk_size": 64}
    runner = ScarceRunner(
        random_runner(TINY, device, slots=1 + ON_HOST.pool_tokens, limits=limits, dtype=sizes.dtype, kernels="torch")
    )
    loaded = LoadedModel(TINY.name, WordTokenizer([SAID], TINY.vocab), runner)  # type: ignore[arg-type]  # it delegates
    backend = LocalBackend(loaded=loaded, seed=1, **options)  # type: ignore[arg-type]  # two numbers
    try:
        _shortage(record, backend, runner, sizes)  # type: ignore[arg-type]  # a backend like the runtime's
    finally:
        loop.streams.run(backend.close())
    with _runtime(TINY, sizes, device, {**options, "pool_tokens": ON_HOST.pool_tokens}) as runtime:
        loop.streams.run(_soak(record, runtime, sizes))


def _shortage(record: Record, backend: Backend, squeeze: Squeeze, sizes: SoakSizes) -> None:
    async def work() -> None:
        await backend.start()  # type: ignore[attr-defined]  # of both kinds
        figure = await shortage_figure(backend, squeeze, sizes)
        if figure is None:
            record.leave_out(GROUP, f"{SHORTAGE}: every step found memory, however little was left")
        else:
            record.add(figure)

    loop.streams.run(work())


async def _soak(record: Record, runtime: ul.Runtime, sizes: SoakSizes) -> None:
    soak, pids = Soak(runtime, sizes, time.monotonic), machine.children()

    async def memory_of_a_third() -> int:
        await asyncio.sleep(sizes.seconds / 3)
        return await asyncio.to_thread(machine.resident_bytes, pids)

    _, early = await asyncio.gather(soak.run(), memory_of_a_third())
    late = machine.resident_bytes(pids)
    pool = await whole_pool(runtime)
    record.add(*soak_figures(soak.outcome, await soak.check(), pool, (early, late), sizes))


@contextmanager
def _runtime(shape: Shape, sizes: SoakSizes, device: torch.device, options: Mapping[str, int]) -> Iterator[ul.Runtime]:
    """A runtime in two processes on random weights, ready."""
    with tempfile.TemporaryDirectory(prefix="umbel-gpu-soak-") as folder:
        model = write_model(shape, WordTokenizer([SAID], shape.vocab), Path(folder))
        with ul.Runtime(
            str(model),
            device=device.type,  # type: ignore[arg-type]  # "cuda" or "cpu"
            dtype=sizes.dtype,  # type: ignore[arg-type]  # one of its names
            debug={"random_weights": True},
            **options,  # type: ignore[arg-type]  # numbers
        ) as runtime:
            yield runtime.wait_ready()
