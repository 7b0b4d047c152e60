"""Whole steps of the engine on models of 7 and 8 billion parameters: decoding under a graph, and prompts.

A step is launched as the scheduler launches it: planned, packed and sent by the host, and its tokens are chosen on the
device. Steps follow each other without being waited for, so the host's work counts only where it takes longer.

One of the models runs through transformers, too: what our attention, graphs and launches ahead leave of its time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import torch
from umbel.srt.cache.kv_pool import PoolSize
from umbel.srt.core.batch import Batch, RowNeed, RowRequests
from umbel.srt.runners.build import build_runner
from umbel.srt.runners.cuda.build import build_cuda_runner
from umbel.srt.runners.cuda.device import StepLimits, accelerator_for
from umbel.srt.runners.cuda.runner import CudaRunner
from umbel.srt.testing.random_weights import RandomTensors

from ..figures import Figure, PendingFigure, Unit
from ..hardware import Limits
from ..stopwatch import Stopwatch
from ..subjects.batches import Rows, Step, forked_step, step_of
from .shapes import LLAMA_2_7B, LLAMA_3_8B, TINY, Shape

GROUP = "steps"
MUST, STRETCH = 75.0, 85.0  # % of what reading weights and keys takes at least, of one sequence


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Which steps.

    Attributes:
        decodes: sequences and keys of each.
        large: more of them, of shapes whose heads share keys: the pool of others would not fit.
        fork: branches, keys that they share, keys of each.
        prompts: rows of each.
    """

    shapes: tuple[Shape, ...]
    decodes: tuple[tuple[int, int], ...]
    fork: tuple[int, int, int]
    prompts: tuple[int, ...]
    dtype: str
    large: tuple[tuple[int, int], ...] = ()

    def decodes_of(self, shape: Shape) -> tuple[tuple[int, int], ...]:
        return self.decodes + (self.large if shape.kv_heads < shape.heads else ())


FULL = StepSizes(
    (LLAMA_2_7B, LLAMA_3_8B),
    ((1, 1024), (32, 1024), (64, 512)),
    (32, 920, 104),
    (2048, 8192),
    "bfloat16",
    large=((256, 512),),
)
SMALL = StepSizes((TINY,), ((1, 8),), (3, 300, 2), (6,), "float32", large=((2, 4),))


def step_figures(sizes: StepSizes, stopwatch: Stopwatch, limits: Limits) -> Iterator[PendingFigure]:
    """A runner is made when the first of its figures is taken."""
    for shape in sizes.shapes:
        yield from _of_shape(shape, sizes, stopwatch, limits)


def borrowed_figures(sizes: StepSizes, stopwatch: Stopwatch, limits: Limits) -> Iterator[PendingFigure]:
    """Decode steps of the last shape through transformers, which has to be installed: as graphs, and without."""
    from umbel.srt.models.transformers_model import build_transformers_model

    shape, dtype = sizes.shapes[-1], getattr(torch, sizes.dtype)
    accelerator = accelerator_for(stopwatch.device)
    tensors = RandomTensors(shape.tensor_shapes, dtype, stopwatch.device)
    borrowed = cache(lambda: build_transformers_model(shape.config, tensors, dtype=dtype, device=stopwatch.device))

    def runner(step: Step, sequences: int, *, cuda_graphs: bool) -> CudaRunner:
        return build_cuda_runner(
            shape.config,
            tensors,
            accelerator=accelerator,
            dtype=dtype,
            kv_dtype=dtype,
            size=lambda geometry: PoolSize(step.slots),
            limits=StepLimits(rows=sequences, sequences=sequences, logits=sequences),
            cuda_graphs=cuda_graphs,
            borrowed=borrowed(),
        )

    for cuda_graphs in (True, False):
        for sequences, keys in sizes.decodes:
            step = step_of([Rows(keys - 1)] * sequences)
            name = f"{shape.name} through transformers, {_sequences(sequences)} of {keys} keys"
            name += "" if cuda_graphs else ", no graphs"
            made = partial(runner, step, sequences, cuda_graphs=cuda_graphs)
            yield _decode(name, shape, made, step, (None, None), stopwatch, limits)


def _of_shape(shape: Shape, sizes: StepSizes, stopwatch: Stopwatch, limits: Limits) -> Iterator[PendingFigure]:
    chosen = sizes.decodes_of(shape)
    decodes = [step_of([Rows(keys - 1)] * sequences) for sequences, keys in chosen]
    shared = forked_step(*sizes.fork)
    prompts = [step_of([Rows(0, rows)]) for rows in sizes.prompts]

    @cache
    def runner() -> CudaRunner:
        return random_runner(
            shape,
            stopwatch.device,
            slots=max(step.slots for step in (*decodes, shared, *prompts)),
            limits=StepLimits(
                rows=max(sizes.prompts), sequences=max(sizes.fork[0], *(sequences for sequences, _ in chosen))
            ),
            dtype=sizes.dtype,
        )

    for (sequences, keys), step in zip(chosen, decodes, strict=True):
        goals = (MUST, STRETCH) if sequences == 1 else (None, None)
        yield _decode(
            f"{shape.name}, {_sequences(sequences)} of {keys} keys", shape, runner, step, goals, stopwatch, limits
        )
    branches, prefix, own = sizes.fork
    name = f"{shape.name}, {branches} branches of {own} keys behind {prefix}"
    yield _decode(name, shape, runner, shared, (None, None), stopwatch, limits)
    for rows, step in zip(sizes.prompts, prompts, strict=True):
        yield _prompt(shape, runner, step, rows, stopwatch, limits)


def random_runner(
    shape: Shape,
    device: torch.device,
    *,
    slots: int,
    limits: StepLimits,
    dtype: str,
    kernels: str = "triton",
    **switches: object,
) -> CudaRunner:
    """A model of the shape on our kernels. switches: of `build_runner`."""
    weights = RandomTensors(shape.tensor_shapes, getattr(torch, dtype), device)
    return build_runner(  # type: ignore[return-value]  # of the CUDA engine, unless other kernels are asked for
        shape.config,
        weights,
        num_slots=slots,
        window_slots=0,  # batches are made by hand, with the same slots in all layers
        dtype=dtype,
        device=device.type,
        kernels=kernels,  # type: ignore[arg-type]
        limits=limits,
        **switches,  # type: ignore[arg-type]
    )


def _decode(
    name: str,
    shape: Shape,
    runner: Callable[[], CudaRunner],
    step: Step,
    goals: tuple[float | None, float | None],
    stopwatch: Stopwatch,
    limits: Limits,
) -> PendingFigure:
    name = f"decode, {name}"

    def take() -> Figure:
        batch, made = with_best_tokens(step.batch), runner()
        seconds = stopwatch.seconds_of_calls(lambda: made.launch(batch))
        size = made.model.dtype.itemsize * shape.read_numbers(step.slots - 1)
        return Figure(
            GROUP,
            name,
            Unit.BANDWIDTH,
            100 * size / limits.bandwidth / seconds,
            limit=100.0,
            must=goals[0],
            stretch=goals[1],
            note=f"{seconds * 1e3:.3g} ms, {batch.rows / seconds:,.0f} tokens/s",
        )

    return PendingFigure(name, take)


def _prompt(
    shape: Shape, runner: Callable[[], CudaRunner], step: Step, rows: int, stopwatch: Stopwatch, limits: Limits
) -> PendingFigure:
    name = f"prompt of {rows} tokens, {shape.name}"

    def take() -> Figure:
        batch, made = with_best_tokens(step.batch), runner()
        seconds = stopwatch.seconds_of_calls(lambda: made.launch(batch))
        attention = 2 * rows * (rows + 1) * shape.layers * shape.heads * shape.head_dim
        operations = 2 * rows * shape.multiplied_parameters + attention
        return Figure(
            GROUP,
            name,
            Unit.TOKENS,
            rows / seconds,
            limit=rows / (operations / limits.rate),
            note=f"{seconds * 1e3:.3g} ms, {operations / seconds / 1e12:.0f} TFLOPS",
        )

    return PendingFigure(name, take)


def with_best_tokens(batch: Batch) -> Batch:
    """The most likely token of each row of logits is asked for, as greedy generations ask for it."""
    count = len(batch.logit_rows)
    row_requests = RowRequests(
        kinds=np.full(count, RowNeed.ARGMAX, dtype=np.uint8),
        inverse_temperatures=np.zeros(count),
        keys=np.zeros(count, dtype=np.uint64),
        top_k=np.zeros(count, dtype=np.int32),
        min_p=np.zeros(count),
        top_p=np.ones(count),
    )
    return replace(batch, row_requests=row_requests)


def _sequences(count: int) -> str:
    return "one sequence" if count == 1 else f"{count} sequences"
