"""Declares the options of umbel simulate, and refuses those that a command line has no use for."""

import argparse
import os
from pathlib import Path

from ...lang import checks
from ...lang.errors import ParameterError, shown
from ...lang.traces.calls import CallTrace
from ..placement.policies import POLICIES
from .calls import is_shape
from .recorded import is_recording

MOST_REPLICAS = 10_000
_OUTPUTS = ("json", "svg", "html")
_USED_WITH = {  # what is not simulated as options say → the options that it takes
    "measure": ("measure", "steps"),
    "fit": ("fit", "steps"),
    "check": ("check", "workload", "steps", "json"),
}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="umbel simulate",
        description="Say how a workload would run on a number of replicas: hit rate, waiting, throughput. No model is "
        "computed; docs/simulator.md says what is real.",
    )
    made.add_argument(
        "workload",
        nargs="?",
        help="a workload file (JSON lines of programs), a recording (debug={'recording': FILE}), a journal "
        "(run_batch(journal=FILE)), a saved run (state.save(FILE)), or a shape: "
        "prefixes=64,prefix=1000,own=60,output=1,requests=2000,skew=0,seed=1",
    )
    made.add_argument("--replicas", type=int, default=1, help="default: 1")
    made.add_argument("--placement", choices=list(POLICIES), default="added-delay", help="default: added-delay")
    made.add_argument(
        "--policy", metavar="NAMES", help="order of waiting calls: lpm (default), fcfs, or lpm,fcfs to compare"
    )
    made.add_argument(
        "--pool",
        metavar="TOKENS",
        help="KV pool of each replica; default: 32768; several, such as 10000,20000, compare",
    )
    made.add_argument("--max-running", type=int, help="sequences that run together; default: 64")
    made.add_argument("--chunk", type=int, help="most rows of prompts in a step; default: 512")
    made.add_argument(
        "--tiers",
        default="",
        help="slower tiers: host=TOKENS,disk=TOKENS,store=TOKENS; TOKENS@RATE gives tokens a second",
    )
    made.add_argument("--coarse", action="store_true", help="closed-form steps in place of real schedulers")
    made.add_argument(
        "--arrivals",
        help="all, poisson:RATE (a second) or clients:NUMBER; default: all, or one after the other where "
        "the workload says so",
    )
    made.add_argument("--first", type=int, metavar="N", help="the first N programs of a workload file or a journal")
    made.add_argument("--model", default="default", help="whose tokenizer encodes texts; default: default")
    made.add_argument("--seed", type=int, default=1, help="of random arrivals; default: 1")
    made.add_argument("--steps", metavar="FILE", help="the step model; default: one of a 2-core machine")
    made.add_argument("--json", metavar="FILE", help="write the figures")
    made.add_argument("--svg", metavar="FILE", help="draw them")
    made.add_argument("--html", metavar="FILE", help="write a page with the drawing and all figures")
    made.add_argument(
        "--check",
        action="store_true",
        help="simulate a recording as it was made, and compare: counters, and calls a second",
    )
    made.add_argument("--measure", metavar="MODEL", help="run this model, fit a step model, and write it to --steps")
    made.add_argument("--fit", metavar="RECORDING", help="fit a step model to a recording, and write it to --steps")
    return made


def check_options(options: argparse.Namespace) -> None:
    """Checks options before anything is read or computed.

    Raises:
        ParameterError: an option would be ignored, nothing is to be simulated, or a file cannot be written or would be
            written over another one.
    """
    usual = parser()
    given = [name for name, value in vars(options).items() if value != usual.get_default(name)]
    mode = next((mode for mode in _USED_WITH if mode in given), None)
    for name in given:
        if mode is not None and name not in _USED_WITH[mode]:
            raise ParameterError(f"{_spelled(options, name)} does nothing with --{mode}; leave one of them out")
    makes_steps = mode in ("measure", "fit")
    if makes_steps and options.steps is None:
        raise ParameterError("write --steps FILE: where the step model goes")
    _check_files(options, ("steps",) if makes_steps else _OUTPUTS)
    if not makes_steps and options.workload is None:
        raise ParameterError(
            "nothing to simulate; write a workload file, a recording, a journal, a saved run, or prefixes=64,own=60"
        )
    if not 1 <= options.replicas <= MOST_REPLICAS:
        raise ParameterError(f"--replicas {options.replicas}; write 1 to {MOST_REPLICAS:,}")
    if options.first is not None and options.first < 1:
        raise ParameterError(f"--first {options.first}; write 1 or more")
    if options.seed < 0:
        raise ParameterError(f"--seed {options.seed}; write 0 or more")


def _spelled(options: argparse.Namespace, name: str) -> str:
    return f"the workload {shown(options.workload)}" if name == "workload" else f"--{name.replace('_', '-')}"


def file_named(name: str) -> Path:
    """Returns the file that an argument names; ~ is the user's folder."""
    return Path(os.path.expanduser(name))


def _check_files(options: argparse.Namespace, written: tuple[str, ...]) -> None:
    """Raises ParameterError for a file that cannot be made, or that is read or written under another name."""
    paths = {name: getattr(options, name) for name in ("workload", "fit", "steps", *_OUTPUTS)}
    files = {name: str(file_named(path)) if path else "" for name, path in paths.items() if path is not None}
    seen: list[str] = []
    for name, file in files.items():
        if name in written:
            checks.output(f"--{name}", file)
            for other in seen:
                if checks.is_one_file(file, files[other]):
                    named = "the workload" if other == "workload" else f"--{other}"
                    raise ParameterError(
                        f"--{name} {shown(file)} would overwrite the file of {named}; write another path"
                    )
        elif name != "workload":
            checks.path(f"--{name}", file)
        seen.append(name)


def check_use(options: argparse.Namespace, trace: CallTrace | None) -> None:
    """Raises ParameterError for options that this workload does not use. trace: of a journal or a saved run."""
    kind = None
    if trace is None and is_recording(file_named(options.workload)):
        kind = "recording"
    elif trace is None and is_shape(options.workload):
        kind = "shape"
    if kind is not None and options.first is not None:
        instead = f"write requests={options.first} in it" if kind == "shape" else "leave --first out"
        raise ParameterError(f"--first takes programs of a file, and a {kind} has none; {instead}")
    if kind is not None and options.model != "default":
        raise ParameterError(f"--model encodes texts, and a {kind} has none; leave it out")
    if options.seed != 1 and not (options.arrivals or "").startswith("poisson"):
        seed = f", or seed={options.seed} in the shape" if kind == "shape" else ""
        raise ParameterError(f"--seed is of random arrivals; write --arrivals poisson:RATE with it{seed}")
