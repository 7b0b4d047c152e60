"""GGUF files on the CPU beside llama.cpp, in paired turns: decode at batch 1 and 8, prefill, memory, start.

    python -m benchmarks.gguf_speed FILE.gguf... --llama-cpp DIR --turns 5

DIR holds llama.cpp's `llama-batched-bench`, compiled for this machine (cmake -DGGML_NATIVE=ON). In every turn both
engines run once, each in a process of its own, and a plain read of memory is timed between them; a ratio is taken
within its turn, and the table gives medians and ranges. The limit of a decode step is the time to read the file's
tensors once at the speed of that read.

umbel runs as its users run it: a runtime in processes of its own, asked by programs. llama.cpp runs without a server.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from umbel.srt.tokenizer.prompt import PromptEncoder
from umbel.srt.weights import open_model

from .configuration import FULL
from .micro import Micro, start_to_first_token
from .record import machine
from .systems import Umbel, start

PREFILL = 1024  # tokens
BATCH = 8
NEW = 64  # tokens of a sequence
READ = 1 << 30  # bytes of the plain read

Turn = dict[str, float]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one file, over all turns."""

    name: str
    unit: str
    ours: tuple[float, ...]
    theirs: tuple[float, ...] = ()

    def __str__(self) -> str:
        text = f"| {self.name} | {statistics.median(self.ours):.3g} {self.unit} |"
        if not self.theirs:
            return f"{text} | |"
        ratios = [a / b for a, b in zip(self.ours, self.theirs, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        return f"{text} {statistics.median(self.theirs):.3g} | {spread} |"


def read_speed() -> float:
    """Returns the bytes per second that all threads read from memory together."""
    words = np.ones(READ // 8, dtype=np.int64)
    tensor = torch.from_numpy(words).view(torch.float64)  # sums of floats use several accumulators
    best = 0.0
    for _ in range(3):
        started = time.perf_counter()
        tensor.sum()
        best = max(best, READ / (time.perf_counter() - started))
    return best


def llama_cpp(folder: Path, model: Path, threads: int) -> Turn:
    """Runs llama.cpp once: one sequence with a long prompt, then a batch."""
    one = _batched(folder, model, threads, prompt=PREFILL, batch=1)
    many = _batched(folder, model, threads, prompt=32, batch=BATCH)
    return {"prefill": one["speed_pp"], "decode 1": one["speed_tg"], "decode 8": many["speed_tg"]}


def _batched(folder: Path, model: Path, threads: int, *, prompt: int, batch: int) -> dict[str, float]:
    command = [str(folder / "llama-batched-bench"), "-m", str(model), "-t", str(threads), "-tb", str(threads)]
    command += ["-c", str(2 * PREFILL + batch * (prompt + NEW)), "-npp", str(prompt), "-ntg", str(NEW)]
    command += ["-npl", str(batch), "--output-format", "jsonl"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line: dict[str, float] = json.loads(next(text for text in shown.splitlines() if text.startswith("{")))
    return line


def umbel_turn(model: Path, options: dict[str, str]) -> Turn:
    """Runs umbel once: start, decode, prefill, and the memory of all its processes."""
    begun = start_to_first_token(str(model), options, 1).runs[0]
    runtime, pids = start(FULL, str(model), options)
    try:
        system = Umbel(FULL, runtime, pids)
        micro = Micro(PromptEncoder(open_model(model).tokenizer()), 1)
        micro.warm(system)
        turn = {
            "prefill": PREFILL / micro.prefill(system, PREFILL),
            "decode 1": micro.decode(system, 1, NEW),
            "decode 8": micro.decode(system, BATCH, NEW),
        }
        resident = system.resident_bytes()
    finally:
        runtime.shutdown()
    return {**turn, "start": begun, "resident": resident / 2**20}


def compare(model: Path, folder: Path, turns: int, options: dict[str, str]) -> list[Row]:
    """Runs both engines in turns and returns the rows of the table."""
    ours, theirs, reads = [], [], []
    for turn in range(turns):
        order: list[Callable[[], None]] = [
            lambda: ours.append(_in_own_process(model, options)),
            lambda: theirs.append(llama_cpp(folder, model, torch.get_num_threads())),
        ]
        for run in order if turn % 2 == 0 else reversed(order):
            run()
            reads.append(read_speed())
    size = model.stat().st_size
    limit = statistics.median(reads) / size
    rows = [Row(name, "tokens/s", _column(ours, name), _column(theirs, name)) for name in theirs[0]]
    share = tuple(turn["decode 1"] / limit for turn in ours)
    rows.append(Row(f"decode 1, share of the limit {limit:.1f} tokens/s ({limit * size / 1e9:.1f} GB/s)", "", share))
    rows.append(Row("start to first token", "s", _column(ours, "start")))
    rows.append(Row(f"resident, file {size / 2**20:.0f} MiB", "MiB", _column(ours, "resident")))
    return rows


def _in_own_process(model: Path, options: dict[str, str]) -> Turn:
    command = [sys.executable, "-m", "benchmarks.gguf_speed", str(model), "--one-turn", json.dumps(options)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    turn: Turn = json.loads(shown.splitlines()[-1])
    return turn


def _column(turns: Sequence[Turn], name: str) -> tuple[float, ...]:
    return tuple(turn[name] for turn in turns)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gguf_speed", description=__doc__)
    parser.add_argument("models", nargs="+", type=Path, metavar="FILE.gguf")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="the folder of llama-batched-bench")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the runtime")
    parser.add_argument("--one-turn", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one_turn is not None:
        print(json.dumps(umbel_turn(chosen.models[0], json.loads(chosen.one_turn))))
        return
    if chosen.llama_cpp is None:
        parser.error("write --llama-cpp DIR, the folder of llama-batched-bench")
    options = dict(option.split("=", 1) for option in chosen.option)
    here = machine.describe()
    print(f"{here.processor}, {here.cores} cores, {' '.join(here.instructions)}; commit {here.commit}")
    print(f"UMBEL_CPU_ISA={os.environ.get('UMBEL_CPU_ISA', '')}; {chosen.turns} turns")
    for model in chosen.models:
        print(f"\n{model.name}\n\n| | umbel | llama.cpp | ratio |\n| --- | --- | --- | --- |")
        for row in compare(model, chosen.llama_cpp, chosen.turns, options):
            print(row, flush=True)


if __name__ == "__main__":
    main()
