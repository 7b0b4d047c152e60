"""The command `python -m benchmarks`, which `make bench` runs."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from umbel.lang.errors import ParameterError, UmbelError

from . import workload
from .bench import Bench, Settings
from .configuration import ALL, ON_CPU, choose, option
from .measure import CONCURRENCY
from .peers import locate
from .peers.peer import PeerError, PeerOptions
from .record.report import markdown


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run when nothing else is said."""

    workloads: tuple[str, ...]
    configurations: tuple[str, ...]
    repeat: int
    programs: int | None  # of each file; None: all
    minutes: float | None = None  # None: as long as it takes


QUICK = Size(("mmlu_5shot", "few_shot_batch", "tree_of_thought_gsm8k", "no_reuse"), ("no-cache",), 1, 16, 2)
# What `make bench` runs: two-level sharing, forks, chat, an agent and the extremes, in under ten minutes on two cores.
USUAL = Size(
    (
        "mmlu_5shot",
        "hellaswag_20shot",
        "react_agent",
        "tree_of_thought_gsm8k",
        "skeleton_of_thought",
        "multi_turn_chat_short",
        "few_shot_batch",
        "no_reuse",
    ),
    # Torch is many times slower where oneDNN has no bfloat16.
    tuple(each.name for each in ON_CPU if each.name != "torch-kernels"),
    3,
    16,
    9,
)
FULL_SIZE = Size(tuple(workload.available()), tuple(each.name for each in ON_CPU), 3, None)
POOL = {"pool_tokens": 65_536}  # the same for all: a default would depend on what is free just then


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status; errors of umbel and of peers are printed without a traceback."""
    options = parser().parse_args(arguments)
    try:
        bench = Bench(settings(options), options.output, _say, add=options.add)
        results = bench.run()
    except (UmbelError, PeerError) as error:
        print(f"benchmarks: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(markdown(results))
    print(f"written to {bench.folder}")
    return 1 if any(run.failures for run in results.measurements) else 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="The paper's workloads and ablations on this machine: a table, JSON and plots.",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="two minutes: four short workloads, once, against no cache")
    size.add_argument("--full", action="store_true", help="every workload, every configuration and the hit-rate sweep")
    parser.add_argument("--workload", nargs="+", metavar="NAME", help=f"of {', '.join(workload.available())}")
    parser.add_argument("--large", type=Path, metavar="DIR", help="take workload files from this folder")
    parser.add_argument("--configurations", nargs="*", metavar="NAME", help=f"beside full: {', '.join(ALL)}")
    parser.add_argument(
        "--peers", nargs="+", metavar="NAME", help=f"of {', '.join(locate.NAMES)}, or all that lie here"
    )
    locate.add_arguments(parser)
    parser.add_argument("--repeat", type=int, metavar="N", help="runs of each, in turn; 3 if left out")
    parser.add_argument("--programs", type=int, metavar="N", help="the first N programs of each file")
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY, metavar="N", help="programs in flight")
    parser.add_argument("--model", help="as for umbel.Runtime; the default model if left out")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of every runtime")
    parser.add_argument("--without-constraints", action="store_true", help="drop regex and json_schema from programs")
    parser.add_argument("--serial", action="store_true", help="replay workloads marked serial one by one")
    parser.add_argument("--no-figures", action="store_true", help="leave out start, decode and prefill")
    parser.add_argument("--sweep", action="store_true", help="also the cache-hit-rate sweep")
    parser.add_argument("--alive", type=int, metavar="N", help="runtimes at once; by free memory if left out")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="for the results; benchmarks/results/... if left out"
    )
    parser.add_argument("--minutes", type=float, metavar="N", help="begin no run later; 9 if nothing else is said")
    parser.add_argument("--add", action="store_true", help="add to the results that lie in the output folder")
    return parser


def settings(options: argparse.Namespace) -> Settings:
    """
    Raises:
        ParameterError: an unknown workload, configuration or runtime option, or a number that makes no sense.
        PeerError: a peer that is not here.
    """
    folder = options.large or workload.FOLDER
    for name in ("repeat", "programs", "concurrency", "alive"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ParameterError(f"--{name} {value}; write a number of at least 1")
    size = QUICK if options.quick else FULL_SIZE if options.full else USUAL
    names = tuple(options.workload or (workload.available(folder) if options.large else size.workloads))
    for name in names:
        workload.read(name, folder)
    return Settings(
        workloads=names,
        folder=folder,
        model=options.model,
        configurations=tuple(choose(size.configurations if options.configurations is None else options.configurations)),
        common={**POOL, **dict(map(option, options.option))},
        peers=_peers(options),
        repeat=options.repeat or size.repeat,
        programs=options.programs or size.programs,
        concurrency=options.concurrency,
        constraints=not options.without_constraints,
        serial=options.serial,
        micro=not options.no_figures,
        sweep=options.sweep or options.full,
        alive=options.alive,
        minutes=options.minutes or size.minutes,
    )


def _peers(options: argparse.Namespace) -> dict[str, PeerOptions]:
    if not options.peers:
        return {}
    here = locate.find(options.peer_python, options.peer_model, os.environ)
    if options.peers == ["all"]:
        return here
    for name in options.peers:
        if name not in here:
            raise PeerError(f"peer {name!r} is not here; write --peer-python {name}=PATH and --peer-model {name}=PATH")
    return {name: here[name] for name in options.peers}
