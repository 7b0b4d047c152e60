"""What the language and the runtime cost beside the model: CPU time per program and per call, by process.

    python -m benchmarks.overhead [--model oracle] [--tokenizer default] [--repeat 5] [--shapes NAME ...] [--profile]

CPU time, not wall time: gateway and program share their cores with the model, so every microsecond that they compute
is one that it does not. The oracle model has no weights: with it the engine's column is the scheduler's. With a real
model the engine's column contains the model.

Every shape runs interpreted and compiled, in turns; a compiled program runs in the user's process here, as an
interpreted one does. On a runtime, a third way ships the program to the gateway. "times less" is the program's
column against the interpreter's, the median over pairs of runs.

`--tokenizer default` measures with the tokenizer of a real model and without any engine: answers are canned, and
interpreter and gateway run in this process without sockets (`canned.py`). So does `--profile`, which names the
functions that take the time.
`--json FILE` keeps the figures, `--against FILE` shows how many times less is used than in such a file.
"""

import argparse
import cProfile
import json
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import CodeType

import psutil
import umbel as ul
from umbel.lang.protocol import Backend
from umbel.lang.runtime_options import ORACLE, RuntimeOptions
from umbel.srt.launch import open_tokenizer

from .canned import Canned
from .shapes import Make, Shape, Writer, compiled, interpreted, one_gen, shapes, shipped

IDLE_SECONDS = 3.0
CONTEXT = 16_384
POOL = 1 << 16
ENGINE = "umbel.srt.engine.process"  # the module that the engine's process runs

# ------------------------------------------------------------------------------------------ measuring


def cpu_seconds(process_id: int) -> float:
    """CPU time of a process, all its threads. Linux tells nanoseconds, others what psutil can get."""
    if sys.platform == "linux":
        return time.clock_gettime(~process_id << 3 | 2)  # the clock id of a process: see clock_getcpuclockid(3)
    spent = psutil.Process(process_id).cpu_times()
    return float(spent.user + spent.system)


def measure(runtime: ul.Runtime, work: Callable[[], object]) -> dict[str, float]:
    """Seconds of CPU that `work` took in each process, and seconds of wall time."""
    process = runtime._process
    assert process is not None, "the runtime has started"
    gateway = process.process_id
    children = psutil.Process(gateway).children()  # one more compiles constraints
    (engine,) = (child.pid for child in children if ENGINE in child.cmdline())
    clocks = {
        "program": time.process_time,
        "gateway": lambda: cpu_seconds(gateway),
        "engine": lambda: cpu_seconds(engine),
        "wall": time.perf_counter,
    }
    before = {name: clock() for name, clock in clocks.items()}
    work()
    return {name: clock() - before[name] for name, clock in clocks.items()}


def calibrate(backend: Backend) -> Writer:
    """A writer for the backend's tokenizer."""
    text = Writer(1.0).words(2000)
    state = one_gen.run(text, 1, backend=backend)
    return Writer(len(text) / float(state.get_meta_info("answer")["prompt_tokens"]))


def figures(
    backend: Backend, chosen: list[Shape], repeat: int, measured: Callable[[Callable[[], object]], dict[str, float]]
) -> dict[str, dict[str, float]]:
    """Shape → microseconds per call of each process, medians; and the spread of their sum. The ways to make a program
    take turns."""
    rows = {}
    ways = (interpreted, compiled, shipped) if backend.capabilities.programs else (interpreted, compiled)
    for shape in chosen:
        taken: dict[Make, list[dict[str, float]]] = {make: [] for make in ways}
        for make in ways:
            shape.prepare(make)(backend)  # once unmeasured: imports, first use
        for _ in range(repeat):
            for make in ways:
                run = shape.prepare(make)
                taken[make].append(measured(lambda run=run: run(backend)))
        for make in ways:
            name = shape.name if make is interpreted else f"{shape.name}, {make.__name__}"
            rows[name] = row_of(shape, taken[make])
            pairs = zip(taken[interpreted], taken[make], strict=True)
            rows[name]["less"] = statistics.median(plain["program"] / other["program"] for plain, other in pairs)
            print(line(name, rows[name]), flush=True)
    return rows


def row_of(shape: Shape, measurements: list[dict[str, float]]) -> dict[str, float]:
    calls = shape.programs * shape.calls
    row = {name: statistics.median(one[name] for one in measurements) / calls * 1e6 for name in measurements[0]}
    ours = sorted((one["program"] + one["gateway"]) / calls * 1e6 for one in measurements)
    return row | {"least": ours[0], "most": ours[-1], "calls": shape.calls}


HEADER = (
    f"{'microseconds of CPU per call':<51}{'program':>9}{'gateway':>9}{'sum':>9}{'(spread)':>17}"
    f"{'engine':>9}{'wall':>9}{'sum per program':>17}{'times less':>12}"
)


def line(name: str, row: dict[str, float]) -> str:
    ours = row["program"] + row["gateway"]
    spread = f"({row['least']:.0f}-{row['most']:.0f})"
    return (
        f"{name:<51}{row['program']:>9.0f}{row['gateway']:>9.0f}{ours:>9.0f}{spread:>17}"
        f"{row['engine']:>9.0f}{row['wall']:>9.0f}{ours * row['calls']:>17.0f}{row['less']:>12.2f}"
    )


def compare(now: dict[str, dict[str, float]], before: dict[str, dict[str, float]]) -> None:
    print(f"\n{'times less than before':<41}{'program':>9}{'gateway':>9}{'sum':>9}")
    for name in now.keys() & before.keys():
        new, old = now[name], before[name]
        sums = [(old[part], new[part]) for part in ("program", "gateway")]
        sums.append((old["program"] + old["gateway"], new["program"] + new["gateway"]))
        print(f"{name:<41}" + "".join(f"{then / after:>9.2f}" for then, after in sums))


# ------------------------------------------------------------------------------------------ without an engine


def measure_here(backend: Canned, work: Callable[[], object]) -> dict[str, float]:
    """As `measure`, of a runtime in this process."""
    backend.gateway_seconds = 0.0
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    whole = time.process_time() - cpu
    return {
        "program": whole - backend.gateway_seconds,
        "gateway": backend.gateway_seconds,
        "engine": 0.0,
        "wall": time.perf_counter() - wall,
    }


class Profiler:
    """cProfile of every thread that is started while it is on, by CPU time."""

    def __init__(self) -> None:
        self._profiles: list[cProfile.Profile] = []

    def __enter__(self) -> "Profiler":
        threading.setprofile(self._enter_thread)
        self._enable()
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)
        self._profiles[0].disable()

    def clear(self) -> None:
        for profile in self._profiles:
            profile.clear()

    def show(self, top: int) -> None:
        own: Counter[str] = Counter()
        total: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for profile in list(self._profiles):
            for entry in profile.getstats():
                name = _named(entry.code)
                own[name] += entry.inlinetime
                total[name] += entry.totaltime
                calls[name] += entry.callcount
        whole = sum(own.values())
        for title, counted in (("itself", own), ("with what it calls", total)):
            print(f"  {'share':>6} {'calls':>8}  function {title}")
            for name, seconds in counted.most_common(top):
                print(f"  {seconds / whole:>6.1%} {calls[name]:>8}  {name}")

    def _enter_thread(self, *_: object) -> None:
        self._enable()

    def _enable(self) -> None:
        profile = cProfile.Profile(time.thread_time)
        self._profiles.append(profile)
        profile.enable()


def _named(code: CodeType | str) -> str:
    if isinstance(code, str):
        return code
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_firstlineno} {code.co_qualname}"


def profile(backend: Canned, chosen: list[Shape], top: int, profiler: Profiler) -> None:
    for shape in chosen:
        for make in (interpreted, compiled):
            shape.prepare(make)(backend)
            run = shape.prepare(make)
            profiler.clear()
            run(backend)
            print(f"\n{shape.name}, {make.__name__}")
            profiler.show(top)


def choose_shapes(known: list[Shape], names: list[str] | None) -> list[Shape]:
    """Those whose names begin as asked for."""
    for name in names or ():
        if not any(shape.name.startswith(name) for shape in known):
            raise SystemExit(f"no shape begins with {name!r}; there are: {', '.join(shape.name for shape in known)}")
    return [shape for shape in known if names is None or any(shape.name.startswith(name) for name in names)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="oracle", help="as for umbel.Runtime")
    parser.add_argument("--tokenizer", help="of this model, and no engine: everything in this process")
    parser.add_argument("--no-reuse", action="store_true", help="with --tokenizer: encode every text anew")
    parser.add_argument("--repeat", type=int, default=5, help="measurements, of which the medians are shown")
    parser.add_argument("--shapes", nargs="+", metavar="NAME", help="only those whose names begin so")
    parser.add_argument("--profile", action="store_true", help="name the functions that take the time")
    parser.add_argument("--top", type=int, default=25, help="functions in a profile")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--against", type=Path, help="compare with the figures of this file")
    options = parser.parse_args()
    here = options.profile or options.tokenizer is not None
    rows = without_engine(options) if here else with_processes(options)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))
    if options.against is not None:
        compare(rows, json.loads(options.against.read_text()))


def without_engine(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    tokenizer = open_tokenizer(RuntimeOptions(model=options.tokenizer or ORACLE))[1]
    profiler = Profiler()
    with profiler if options.profile else nullcontext():
        backend = Canned(tokenizer, CONTEXT, reuse=not options.no_reuse)
        chosen = choose_shapes(shapes(calibrate(backend)), options.shapes)
        if options.profile:
            profile(backend, chosen, options.top, profiler)
            return {}
        print(HEADER)
        return figures(backend, chosen, options.repeat, lambda work: measure_here(backend, work))


def with_processes(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    with ul.Runtime(options.model, context_length=CONTEXT, pool_tokens=POOL) as runtime:
        runtime.wait_ready()
        chosen = choose_shapes(shapes(calibrate(runtime)), options.shapes)
        print(HEADER)
        rows = figures(runtime, chosen, options.repeat, lambda work: measure(runtime, work))
        idle = measure(runtime, lambda: time.sleep(IDLE_SECONDS))
        parts = (f"{name} {idle[name] / idle['wall'] * 1e3:.1f}" for name in ("program", "gateway", "engine"))
        print(f"idle, milliseconds of CPU per second: {', '.join(parts)}")
        return rows
