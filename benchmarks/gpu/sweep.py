"""`python -m benchmarks.gpu --sweep [KERNEL ...]`: chooses the numbers of `srt/kernels/triton/tuned/` on the card here.

    candidates.json ──► a number of a row at a time: the best one so far, with each other value in its place
                          │  equal results?   else it is left out
                          │  as asked for?    what was replaced by a smaller tile is left out
                        time of all cases of the kernel, next to those of the row as it is
                          │
    tuned/CLASS.json ◄── the winner, with card, driver, versions, date, time and gain, where it gains enough

A row is written as soon as its kernel is done, so a call that is stopped loses the kernel under way. In a dry run,
shapes are tiny, kernels are interpreted, each number has two values, and the tables are copies in a temporary folder.
"""

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from umbel.srt.cache.kv_pool import FLOAT8
from umbel.srt.kernels.triton.fitting import replaced_tiles
from umbel.srt.kernels.triton.linear import gated, linear
from umbel.srt.kernels.triton.quantized import quantized_linear, widen
from umbel.srt.kernels.triton.tuning import (
    DEFAULT,
    FOLDER,
    device_class,
    tuned,
    tuning_for,
    write_row,
)

from .hardware import Hardware
from .stopwatch import Budget, Stopwatch, give_memory_back
from .subjects.attention import decode_work, prompt_work
from .subjects.batches import Rows, nested_step, normal, pool_for, step_of
from .subjects.experts import Experts, dense_experts, prompt, single, stacks_of
from .subjects.packed import FORMS, ROW_MUST
from .subjects.sizes import Sizes
from .subjects.small import DTYPE, activation, heads, norm

CANDIDATES = Path(__file__).parent / "candidates.json"
GAIN = 1.02  # times faster; less is noise, and a row that stays needs no reason
CLOSE = 2e-3  # of the results' norm: sums in another order are rounded elsewhere
DRY_VALUES = 2  # of each number
MATRICES = 4  # in one graph: more than a cache holds

Say = Callable[[str], None]
Numbers = dict[str, Any]  # a row. Any: numbers, or none
Work = Callable[[], Any]  # Any: what kernels return
# Makes work under the numbers that are in use: plans have tiles when they are made.
Case = Callable[[], Work]


def candidates() -> dict[str, dict[str, list[Any]]]:
    """Returns the values that are tried: kernel → number → values."""
    found: dict[str, dict[str, list[Any]]] = json.loads(CANDIDATES.read_text())
    return found


@dataclass(frozen=True, slots=True)
class Sweep:
    """What kernels are swept with.

    Attributes:
        folder: of the tables.
        name: the class of devices whose table is written.
    """

    stopwatch: Stopwatch
    sizes: Sizes
    hardware: Hardware
    folder: Path
    name: str
    dry: bool
    say: Say

    def kernel(self, kernel: str, values: Mapping[str, Sequence[Any]]) -> Numbers | None:
        """Tries the candidates of one kernel, and writes the winner; None where the row stays as it is."""
        device = self.stopwatch.device
        row = getattr(tuning_for(device), kernel)
        cases = list(cases_of(kernel, self.sizes, device))
        works = [case() for case in cases]
        expected = [_kept(work()) for work in works]
        before = [self.stopwatch.seconds(work) for work in works]
        best, ratio = row, 1.0
        for number, tried in values.items():
            for value in tried[:DRY_VALUES] if self.dry else tried:
                candidate = replace(best, **{number: value})
                if candidate in (best, row):
                    continue
                took = self._ratio(kernel, candidate, cases, expected, before)
                self.say(f"{kernel}: {number}={value}: {took if isinstance(took, str) else f'{took:.3f} of the time'}")
                if not isinstance(took, str) and took < ratio:
                    best, ratio = candidate, took
        if ratio * GAIN > 1.0:
            return None
        winner = asdict(best)
        write_row(self.name, kernel, winner, self._measured(sum(before), ratio), self.folder)
        return winner

    def _ratio(
        self, kernel: str, candidate: Any, cases: Sequence[Case], expected: Sequence[Any], before: Sequence[float]
    ) -> float | str:
        """Returns the part of the time that a candidate takes, as a geometric mean; why it is left out, in words."""
        device, replaced = self.stopwatch.device, replaced_tiles()
        try:
            with tuned(device, **{kernel: candidate}):
                works = [case() for case in cases]
                if not all(map(equal, [work() for work in works], expected)):
                    return "other results"
                if replaced_tiles() != replaced:
                    return "more than the device has"
                seconds = [self.stopwatch.seconds(work) for work in works]
        except Exception as error:  # a compiler that refuses numbers says so in many ways
            return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return math.exp(sum(math.log(a / b) for a, b in zip(seconds, before, strict=True)) / len(seconds))

    def _measured(self, seconds: float, ratio: float) -> dict[str, str | float]:
        versions = self.hardware.versions
        return {
            "card": self.hardware.name,
            **{name: versions[name] for name in ("driver", "torch", "triton") if name in versions},
            "date": self.hardware.date,
            "microseconds": round(seconds * ratio * 1e6, 2),
            "gain": round(1 / ratio, 3),
        }


def sweep(
    kernels: Sequence[str],
    *,
    stopwatch: Stopwatch,
    sizes: Sizes,
    hardware: Hardware,
    budget: Budget,
    output: Path | None,
    dry: bool,
    say: Say,
) -> int:
    """Sweeps kernels while there is time. Returns the exit status: 0, or 1 where time was short.

    Args:
        kernels: rows of the table; none: all that have candidates.
        output: a folder that the tables are copied into and written in; None: those of the package, of a dry run a
            temporary one.
    """
    known = candidates()
    if unknown := [kernel for kernel in kernels if kernel not in known]:
        raise SystemExit(f"--sweep {' '.join(unknown)}: no such kernel; there are {', '.join(known)}")
    name = device_class(stopwatch.device)
    if name == DEFAULT and not dry:
        raise SystemExit(f"{hardware.name} is of no class of devices; add one to CLASSES in kernels/triton/tuning.py")
    folder = _tables(output, dry=dry)
    one = Sweep(stopwatch, sizes, hardware, folder, name, dry, say)
    left = list(kernels or known)
    while left and not budget.is_up:
        kernel = left.pop(0)
        winner = one.kernel(kernel, known[kernel])
        say(f"{kernel}: {'stays as it is' if winner is None else winner}")
        give_memory_back()
    say(f"tables of {name}: {folder}")
    if left:
        say(f"the time was up; go on with --sweep {' '.join(left)}")
    return 1 if left else 0


def _tables(output: Path | None, *, dry: bool) -> Path:
    if output is None and not dry:
        return FOLDER
    folder = (output or Path(tempfile.mkdtemp(prefix="umbel-gpu-"))) / "tuned"
    if not folder.exists():
        shutil.copytree(FOLDER, folder)
    return folder


def equal(found: Any, expected: Any) -> bool:
    """Whether results are the same: whole numbers exactly, others up to how sums are rounded."""
    if not found.is_floating_point():
        return bool(torch.equal(found, expected))
    apart = (found.float() - expected.float()).norm()
    return bool(apart <= CLOSE * expected.float().norm())  # what is no number is not equal


def _kept(result: torch.Tensor) -> torch.Tensor:
    return result.clone()


# ------------------------------------------------------------------------------------------ cases


def cases_of(kernel: str, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Yields what a kernel is timed with. Inputs are made once, plans by each case."""
    family, _, part = kernel.partition("_")
    match family:
        case "attention":
            yield from _attention(part, sizes, device)
        case "linear" | "quantized":
            yield from _products(kernel, sizes, device)
        case "moe":
            yield from _experts(part, sizes, device)
        case "sampling":
            yield from _sampling(part, sizes, device)
        case "norm":
            yield _always(norm(sizes, device).work)
        case "rope":
            yield _always(heads(sizes, device).work)
        case _:
            raise AssertionError(f"{kernel} has candidates and no case")


def _always(work: Work) -> Case:
    return lambda: work


# Which shape meets which row: by the bytes of a vector and the dtype of keys (`attention.tiles_for`).
_HEAD_DIMS = {"many_small": 64, "many_large": 256}


def _attention(part: str, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    if part in ("plan", "merge"):
        for fork in sizes.forks:
            step = nested_step(fork.levels)
            pool = pool_for(step.slots, fork.geometry, DTYPE, device)
            yield partial(decode_work, step, pool, fork.geometry, DTYPE, device)
        decodes = sizes.singles
    else:
        decodes = (sizes.streams[3:4] or sizes.streams) if part in ("stream", "few") else ()
    kv_dtype = FLOAT8 if part in ("few", "many") else DTYPE
    for decode in decodes:
        step = step_of([Rows(decode.keys - 1)] * decode.sequences)
        pool = pool_for(step.slots, decode.geometry, kv_dtype, device)
        yield partial(decode_work, step, pool, decode.geometry, DTYPE, device)
    if part.startswith("many"):
        wanted = _HEAD_DIMS.get(part)
        fitting = [one for one in sizes.extends if wanted is None or one.geometry.head_dim == wanted]
        extend = (fitting or sizes.extends)[0]
        step = step_of([Rows(extend.prefix, extend.rows)])
        pool = pool_for(step.slots, extend.geometry, kv_dtype, device)
        yield partial(prompt_work, step, pool, extend.geometry, DTYPE, device)


def _products(kernel: str, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    shape = 2 * sizes.width, sizes.hidden
    if kernel == "linear_act":
        yield _always(activation(sizes, device).work)
        return
    if kernel.startswith("quantized"):
        for form in FORMS:
            codes = [form.matrix(*shape, device, seed=seed) for seed in range(MATRICES)]
            if kernel == "quantized_widen":
                yield _always(partial(_last, [partial(widen, one, 0, shape[0], DTYPE) for one in codes]))
                continue
            x = normal(1 if kernel == "quantized_row" else 32, sizes.hidden, device=device, dtype=DTYPE)
            yield _always(partial(_last, [partial(quantized_linear, x, one) for one in codes]))
        return
    weights = [normal(*shape, device=device, dtype=DTYPE, seed=seed) * sizes.hidden**-0.5 for seed in range(MATRICES)]
    for rows in (16, 32) if kernel == "linear_rows" else (1,):
        x = normal(rows, sizes.hidden, device=device, dtype=DTYPE)
        if kernel == "linear_gate":
            yield _always(partial(_last, [partial(gated, x, weight, None, "silu") for weight in weights]))
        else:
            yield _always(partial(_last, [partial(linear, x, weight) for weight in weights]))


def _last(works: Sequence[Work]) -> torch.Tensor:
    """Does all of them; returns what the last one does."""
    results = [work() for work in works]
    last: torch.Tensor = results[-1]
    return last


# Pairs of an expert, of which each cut is used for some.
_PAIRS = {"decode": 8, "middle": 64, "codes_decode": 8}


def _experts(part: str, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    packed = part.startswith("codes")
    for shape in (sizes.packed if packed else sizes.experts)[-1:]:
        layers = (
            [Experts(shape, form.name, *stacks_of(form, shape, device), ROW_MUST) for form in FORMS]
            if packed
            else [dense_experts(shape, device)]
        )
        for layer in layers:
            if part in ("gate_pairs", "down_tokens", "codes_pairs"):
                yield _always(single(layer, device).work)
            else:
                pairs = _PAIRS.get(part)
                tokens = sizes.prompt if pairs is None else max(1, pairs * shape.experts // shape.top_k)
                yield _always(prompt(layer, min(tokens, sizes.prompt), device).work)


def _sampling(part: str, sizes: Sizes, device: torch.device) -> Iterator[Case]:
    from umbel.srt.kernels.triton.sampling import DeviceDraws, TritonSampling

    from .subjects.sampling import WISHES, draws

    logits = 3 * normal(sizes.draws, sizes.vocab, device=device)
    for wish in WISHES.values():
        limited = len(wish) > 1
        if limited == (part == "select"):
            columns = DeviceDraws.of(draws(sizes.draws, **wish), device)
            yield _always(partial(TritonSampling().choose_sent, logits, columns))
