"""What the language and the runtime cost beside the model: CPU time per program and per call, by process.

    python -m benchmarks.overhead [--model oracle] [--tokenizer default] [--repeat 5] [--shapes NAME ...] [--profile]

CPU time, not wall time: gateway and program share their cores with the model, so every microsecond that they compute
is one that it does not. The oracle model has no weights: with it the engine's column is the scheduler's. With a real
model the engine's column contains the model.

`--tokenizer default` measures with the tokenizer of a real model and without any engine: answers are canned, and
interpreter and gateway run in this process without sockets (`canned.py`). So does `--profile`, which names the
functions that take the time.
`--json FILE` keeps the figures, `--against FILE` shows how many times less is used than in such a file.
"""

import argparse
import cProfile
import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import psutil
import umbel as ul
from umbel.lang.protocol import Backend
from umbel.lang.runtime_options import ORACLE, RuntimeOptions
from umbel.srt.assembly import open_tokenizer

from .canned import Canned

TURNS = 8
IDLE_SECONDS = 3.0
CONTEXT = 16_384
POOL = 1 << 16

# ------------------------------------------------------------------------------------------ programs


@ul.function
def one_gen(s: ul.State, text: str, tokens: int) -> None:
    s += text + ul.gen("answer", max_tokens=tokens, temperature=0, ignore_eos=True)


@ul.function
def chat(s: ul.State, turns: list[str]) -> None:
    for number, turn in enumerate(turns):
        s += ul.user(turn)
        s += ul.assistant(ul.gen(f"answer {number}", max_tokens=2, temperature=0, ignore_eos=True))


@ul.function
def fan(s: ul.State, text: str, branches: int) -> None:
    s += text
    forks = s.fork(branches)
    forks += lambda i: f"\nQuestion {i}:" + ul.gen("answer", max_tokens=2, temperature=0, ignore_eos=True)
    forks.join()


@ul.function
def choose(s: ul.State, text: str) -> None:
    s += text + ul.select("answer", choices=["red", "green", "blue", "yellow"])


# ------------------------------------------------------------------------------------------ shapes


Run = Callable[[Backend], None]


@dataclass(frozen=True)
class Shape:
    """One kind of program: how often it runs in a measurement, how many calls each makes, and how to run them all.

    `prepare` makes the texts, none of which has been seen before, and gives what is to be measured.
    """

    name: str
    programs: int
    calls: int
    prepare: Callable[[], Run]


class Writer:
    """Texts of a wanted length that do not repeat themselves.

    Args:
        characters_per_token: of the tokenizer, for such texts.
    """

    def __init__(self, characters_per_token: float) -> None:
        self._dice = random.Random(time.time_ns())
        self._ratio = characters_per_token
        self._vocabulary = ["".join(self._dice.choices("etaoinshrdlucm", k=n % 8 + 2)) for n in range(5000)]

    def words(self, tokens: int) -> str:
        wanted = int(tokens * self._ratio)
        return " ".join(self._dice.choices(self._vocabulary, k=wanted // 5))[:wanted]


def shapes(writer: Writer) -> list[Shape]:
    words = writer.words

    def gens() -> Run:
        texts = [words(100) for _ in range(40)]
        return lambda backend: [one_gen.run(text, 1, backend=backend).sync() for text in texts][-1]

    def chats(tokens: int) -> Callable[[], Run]:
        def prepare() -> Run:
            conversations = [[words(tokens // TURNS) for _ in range(TURNS)] for _ in range(2)]
            return lambda backend: [chat.run(turns, backend=backend).sync() for turns in conversations][-1]

        return prepare

    def forks(branches: int, programs: int) -> Callable[[], Run]:
        def prepare() -> Run:
            texts = [words(500) for _ in range(programs)]
            return lambda backend: [fan.run(text, branches, backend=backend).sync() for text in texts][-1]

        return prepare

    def selects() -> Run:
        texts = [words(100) for _ in range(40)]
        return lambda backend: [choose.run(text, backend=backend).sync() for text in texts][-1]

    def streams() -> Run:
        texts = [words(10) for _ in range(4)]

        def run(backend: Backend) -> None:
            for text in texts:
                for _ in one_gen.run(text, 64, backend=backend, stream=True).text_iter("answer"):
                    pass

        return run

    def batch() -> Run:
        head = words(400)  # what a few-shot prompt has in common
        items = [{"text": f"{head}\nQuestion: {words(12)}", "tokens": 4} for _ in range(1000)]

        def run(backend: Backend) -> None:
            for state in one_gen.run_batch(items, num_threads=32, backend=backend, generator_style=True):
                state.sync()

        return run

    return [
        Shape("one gen", 40, 1, gens),
        Shape("chat, 8 turns to 2k tokens", 2, TURNS, chats(2000)),
        Shape("chat, 8 turns to 8k tokens", 2, TURNS, chats(8000)),
        Shape("fork of 8", 10, 8, forks(8, 10)),
        Shape("fork of 64", 2, 64, forks(64, 2)),
        Shape("select of 4", 40, 1, selects),
        Shape("streaming 64 tokens", 4, 1, streams),
        Shape("run_batch, 1,000 programs, 32 in flight", 1000, 1, batch),
    ]


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
    (engine,) = (child.pid for child in psutil.Process(gateway).children())
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
    """Shape → microseconds per call of each process, medians; and the spread of their sum."""
    rows = {}
    for shape in chosen:
        shape.prepare()(backend)  # once unmeasured: imports, first use
        taken = []
        for _ in range(repeat):
            run = shape.prepare()
            taken.append(measured(lambda run=run: run(backend)))
        calls = shape.programs * shape.calls
        row = {name: statistics.median(one[name] for one in taken) / calls * 1e6 for name in taken[0]}
        ours = sorted((one["program"] + one["gateway"]) / calls * 1e6 for one in taken)
        rows[shape.name] = row | {"least": ours[0], "most": ours[-1], "calls": shape.calls}
        print(line(shape.name, rows[shape.name]), flush=True)
    return rows


HEADER = (
    f"{'microseconds of CPU per call':<41}{'program':>9}{'gateway':>9}{'sum':>9}{'(spread)':>17}"
    f"{'engine':>9}{'wall':>9}{'sum per program':>17}"
)


def line(name: str, row: dict[str, float]) -> str:
    ours = row["program"] + row["gateway"]
    spread = f"({row['least']:.0f}-{row['most']:.0f})"
    return (
        f"{name:<41}{row['program']:>9.0f}{row['gateway']:>9.0f}{ours:>9.0f}{spread:>17}"
        f"{row['engine']:>9.0f}{row['wall']:>9.0f}{ours * row['calls']:>17.0f}"
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
        shape.prepare()(backend)
        run = shape.prepare()
        profiler.clear()
        run(backend)
        print(f"\n{shape.name}")
        profiler.show(top)


def choose_shapes(known: list[Shape], names: list[str] | None) -> list[Shape]:
    """Those whose names begin as asked for."""
    for name in names or ():
        if not any(shape.name.startswith(name) for shape in known):
            raise SystemExit(f"no shape begins with {name!r}; there are: {', '.join(shape.name for shape in known)}")
    return [shape for shape in known if names is None or any(shape.name.startswith(name) for name in names)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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


if __name__ == "__main__":
    main()
