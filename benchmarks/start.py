"""Start of a runtime in a fresh Python process: seconds to the first token, and the memory of all processes then.

    python -m benchmarks.start [MODEL] --turns 5

Every turn starts Python, which imports umbel and generates one token. "Whole" counts from the start of Python,
"runtime" from the end of its imports. The first turn is not counted: it reads the model's file from the disk and may
compile kernels. Run it on an idle machine: gateway and engine start at the same time, on two cores.

Memory counts a page that several processes share once (`machine.resident_bytes`), also one that they share with the
runtimes of others: end those before. "All" has the program that uses umbel, and the part of the KV pool that one token
touches: 2 MiB for the keys and the values of each layer. In a virtual machine that gives free memory back to its host,
fresh pages may take ten times as long a few seconds after their last use: repeat such a run.
"""

import argparse
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import psutil  # type: ignore[import-untyped]  # its stubs are a package of their own

from .record import machine

PROGRAM = """
import sys, time
import umbel as ul

@ul.function
def first(s):
    s += "The capital of France is" + ul.gen("x", max_tokens=1, temperature=0)

imported = time.monotonic()
with ul.Runtime(*sys.argv[1:]) as runtime:
    first.run(backend=runtime)["x"]
    print(imported, time.monotonic(), flush=True)
    sys.stdin.read()
"""
ENGINE = "umbel.srt.engine.process"


@dataclass(frozen=True, slots=True)
class Start:
    """One start: seconds, and MiB of resident memory at its end."""

    whole: float
    runtime: float
    engine: float
    all: float


def measure(model: str | None) -> Start:
    """Starts one program and ends it."""
    begun = time.monotonic()  # the same clock in every process
    command = [sys.executable, "-c", PROGRAM, *([] if model is None else [model])]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None, "a pipe was asked for"
    assert child.stdout is not None, "a pipe was asked for"
    try:
        imported, first = map(float, child.stdout.readline().split())
        program = psutil.Process(child.pid)
        pids = [each.pid for each in (program, *program.children(recursive=True))]
        engine = next(pid for pid in pids if ENGINE in psutil.Process(pid).cmdline())
        memory, memory_of_all = machine.resident_bytes([engine]), machine.resident_bytes(pids)
    finally:
        child.stdin.close()
        child.wait()
    return Start(first - begun, first - imported, memory / 2**20, memory_of_all / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    parser.add_argument("model", nargs="?", help="name or path; the default model when it is left out")
    parser.add_argument("--turns", type=int, default=5, help="starts that count")
    arguments = parser.parse_args()
    measure(arguments.model)
    starts = [measure(arguments.model) for _ in range(arguments.turns)]
    for name, unit in (("whole", "s"), ("runtime", "s"), ("engine", "MiB"), ("all", "MiB")):
        values = sorted(getattr(start, name) for start in starts)
        print(f"| {name} | {statistics.median(values):.4g} {unit} | {values[0]:.4g}-{values[-1]:.4g} |")


if __name__ == "__main__":
    main()
