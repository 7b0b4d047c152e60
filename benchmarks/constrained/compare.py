"""Constrained decoding, engine beside engine: `python -m benchmarks.constrained`.

Every constraint is compiled and its texts are walked token by token, as a decoder would: a mask before each token. An
engine works on each constraint in a forked child of its own, so that none learns from the one before and one that hangs
or grows can be ended. Umbel and llguidance are shown a second time in one warm process, which is how they serve.

    compile   until the first mask can be asked for        valid     texts of the constraint that are taken whole
    mask      of one token, forced ones included           invalid   other texts that are refused
    jump      the look for tokens that are known without the model, where an engine has jumps; it comes before the mask
    both      of one token, jump and mask

Times are of the processor: on a machine with other work the clock on the wall shows that work too. Python's garbage is
collected between tokens, as the runtime's engine does between steps.
"""

import argparse
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from umbel.fsm.tokens.masks import Masks
from umbel.fsm.tokens.vocabulary import Vocabulary
from umbel.srt.engine.process import StepCollector

from .data import SETS, Item, read_items
from .engines import Refused, Subject, subjects

COLLECTOR = StepCollector()
MEMORY = 6 << 30  # bytes that a child may map beyond what it was born with
WARM = ("umbel", "llguidance")

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One engine on one constraint. Times in seconds; `refused`: why, or "" when it was compiled."""

    refused: str = ""
    compile: float = 0.0
    masks: tuple[float, ...] = ()
    jumps: tuple[float, ...] = ()
    forced: int = 0  # masks of tokens that the engine knew beforehand
    accepted: tuple[int, int] = (0, 0)  # valid texts, of so many
    rejected: tuple[int, int] = (0, 0)  # invalid texts, of so many


@dataclass(slots=True)
class Row:
    """One engine on a set of constraints."""

    name: str
    outcomes: list[Outcome] = field(default_factory=list)
    late: int = 0  # constraints on which it was ended

    def cells(self, seconds: float) -> list[str]:
        compiled = [outcome for outcome in self.outcomes if not outcome.refused]
        compiling = [outcome.compile * 1e3 for outcome in compiled] + [seconds * 1e3] * self.late
        masks = [1e6 * mask for outcome in compiled for mask in outcome.masks]
        jumps = [1e6 * jump for outcome in compiled for jump in outcome.jumps]
        forced = sum(outcome.forced for outcome in compiled)
        return [
            self.name,
            str(len(self.outcomes) + self.late),
            str(len(compiled)),
            str(len(self.outcomes) - len(compiled)),
            str(self.late),
            _percentiles(compiling, (50, 95, 100), 1),
            _percentiles(masks, (50, 90, 99, 100), 0),
            _percentiles(jumps, (50, 90, 99, 100), 0) if forced else "-",
            _mean_and_tail([mask + jump for mask, jump in zip(masks, jumps, strict=True)]),
            f"{forced / len(masks):.0%}" if forced else "-",
            _of(outcome.accepted for outcome in compiled),
            _of(outcome.rejected for outcome in compiled),
        ]


COLUMNS = [
    *("engine", "n", "compiled", "refused", "late", "compile ms p50 / p95 / max"),
    *("mask us p50 / p90 / p99 / max", "jump us", "both us mean / p99", "forced", "valid accepted", "invalid rejected"),
]


def measure(subject: Subject, item: Item, encode: Encode) -> Outcome:
    """Compiles a constraint and walks its texts."""
    begun = time.process_time()
    try:
        begin = subject.compile(item)
    except Refused as refusal:
        return Outcome(refused=str(refusal) or "refused")
    compiling = time.process_time() - begun
    masks: list[float] = []
    jumps: list[float] = []
    accepted = forced = 0
    for value in item.valid:
        cursor, good = begin(), True
        for token in encode(item.text(value, subject.separators)):
            begun = time.process_time()
            forced += cursor.look_ahead()
            looked = time.process_time()
            cursor.make_mask()
            masks.append(time.process_time() - looked)
            jumps.append(looked - begun)
            COLLECTOR.after_step(idle=False)
            good = cursor.advance(token)
            if not good:
                break
        accepted += good and cursor.accepting
    rejected = 0
    for value in item.invalid:
        cursor = begin()
        taken = all(cursor.advance(token) for token in encode(item.text(value, subject.separators)))
        rejected += not (taken and cursor.accepting)
    return Outcome(
        compile=compiling,
        masks=tuple(masks),
        jumps=tuple(jumps),
        forced=forced,
        accepted=(accepted, len(item.valid)),
        rejected=(rejected, len(item.invalid)),
    )


def measure_apart(subject: Subject, item: Item, encode: Encode, seconds: float) -> Outcome | None:
    """`measure` in a forked child; None when it had to be ended. One that dies has refused, whatever it died of."""
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_serve, args=(there, subject, item, encode))
    child.start()
    there.close()
    try:
        return here.recv() if here.poll(seconds) else None
    except EOFError:
        return Outcome(refused="the engine's process died")
    finally:
        child.kill()
        child.join()
        here.close()


def _serve(answer: Connection, subject: Subject, item: Item, encode: Encode) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (panics of libraries; the child ends soon)
    answer.send(measure(subject, item, encode))


def compare(found: Sequence[Subject], items: Sequence[Item], encode: Encode, *, seconds: float) -> list[Row]:
    """Every engine on every constraint; engines of WARM a second time in this process."""
    rows = []
    for subject in found:
        row = Row(subject.name)
        for item in items:
            outcome = measure_apart(subject, item, encode, seconds)
            if outcome is None:
                row.late += 1
            else:
                row.outcomes.append(outcome)
        rows.append(row)
        if subject.name in WARM:
            rows.append(Row(f"{subject.name}, warm", [measure(subject, item, encode) for item in items]))
    return rows


def table(rows: Sequence[Row], seconds: float) -> str:
    """Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(row.cells(seconds) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _percentiles(values: Sequence[float], percents: Sequence[int], digits: int) -> str:
    return " / ".join(f"{np.percentile(values, percent):,.{digits}f}" for percent in percents) if values else "-"


def _mean_and_tail(values: list[float]) -> str:
    return f"{sum(values) / len(values):.0f} / {_percentiles(values, (99,), 0)}" if values else "-"


def _of(pairs: Iterable[tuple[int, int]]) -> str:
    counted = list(pairs)
    return f"{sum(pair[0] for pair in counted)}/{sum(pair[1] for pair in counted)}"


def open_vocabulary(model: str) -> tuple[Masks, Encode]:
    """Of a model, with the native walk where it runs."""
    from umbel.srt.kernels.cpu.library import NoKernels
    from umbel.srt.weights import open_model

    source = open_model(model)
    tokenizer = source.tokenizer()
    vocabulary = Vocabulary(list(source.vocabulary()), tokenizer.eos_ids)
    try:
        from umbel.srt.kernels.cpu.library import load_library
        from umbel.srt.kernels.cpu.trie_walk import CpuTrieWalk

        masks = Masks(vocabulary, walk=CpuTrieWalk(load_library()))
    except NoKernels as error:
        print(f"without native kernels: {error}", file=sys.stderr)
        masks = Masks(vocabulary)
    return masks, lambda text: tokenizer.encode(text, first=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.constrained", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/constrained"), help="folder of the three files")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--engines", nargs="+", default=["umbel", "llguidance", "outlines-core", "xgrammar"])
    parser.add_argument("--every", type=int, default=1, help="take every nth constraint only")
    parser.add_argument("--seconds", type=float, default=10.0, help="for one constraint of one engine")
    parser.add_argument("--model", default="default", help="whose vocabulary")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # children are forked
    masks, encode = open_vocabulary(options.model)
    found, missing = subjects(options.engines, masks, encode)
    COLLECTOR.begin()  # as in the runtime's engine: a quarter of a million tokens are not to be looked through
    print(f"vocabulary of {len(masks.vocabulary):,} tokens, at most {options.seconds:g} s for a constraint")
    print("\n".join(missing))
    for name in options.sets:
        items = read_items(options.data, name, every=options.every)
        rows = compare(found, items, encode, seconds=options.seconds)
        print(f"\n{len(items)} {name}\n\n{table(rows, options.seconds)}", flush=True)
    return 0
