"""Cache hit rates of the radix tree, of blocks found by their hash (vLLM's scheme), and the most that can be had.

    python -m benchmarks.block_reuse                 # all workloads; two minutes, no weights
    python -m benchmarks.block_reuse --pool 60000    # a pool that evicts

The programs of the workload files run on the oracle with 32 in flight, once on each cache, by the same scheduler. Its
tokens are bytes, of which the default model's tokenizer puts four to five into a token, so 64 of them stand for a block
of 16 tokens. The oracle checks the keys of every step. Where a file samples nothing, the texts must be the same on all
caches; else the seeds of branches depend on which of them comes first.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from umbel.interpreter import loop
from umbel.srt.in_process import LocalBackend
from umbel.srt.simulator.workload import Fork, Gen, Ops, Program, Values, Workload
from umbel.srt.tokenizer.prompt import PromptEncoder
from umbel.srt.tokenizer.tokenizer import ByteTokenizer

from . import workload
from .configuration import FULL
from .measure import Reuse, measure
from .systems import Umbel

TREE = 0
SIZES = (TREE, 64, 256)  # bytes of a block: about 16 and 64 tokens
POOL = 2_000_000  # tokens; nothing is evicted


@dataclass(frozen=True, slots=True)
class Found:
    """What one cache found of a workload.

    Attributes:
        texts: the values of all programs, in order.
        evicted: tokens.
    """

    reuse: Reuse
    texts: tuple[str, ...]
    evicted: int


def run(file: Workload, block: int, pool: int) -> Found:
    """Runs the programs of a file on one cache. block: bytes of a block, or TREE."""
    backend = LocalBackend(
        pool_tokens=pool,
        context_length=min(pool, 40_000),
        chunk_size=8192,
        max_running=64,
        seed=1,
        debug={"check_every_step": False, "block_cache": block},
    )
    try:
        system = _Kept(FULL, backend)  # type: ignore[arg-type]  # a backend is all it asks
        found = measure(system, file, warm=0, encoder=PromptEncoder(ByteTokenizer()))
        assert not found.failures, found.failures[0]
        assert found.reuse is not None, "an encoder was given"
        return Found(found.reuse, system.texts, round(found.counters.get("evicted_tokens", 0)))
    finally:
        loop.streams.run(backend.close(), 60.0)


class _Kept(Umbel):
    """Keeps the values of its programs."""

    texts: tuple[str, ...] = ()

    def many(self, programs: Sequence[Program], concurrency: int) -> list[Values | Exception]:
        results = super().many(programs, concurrency)
        self.texts = tuple(repr(result) for result in results)
        return results


def compare(name: str, programs: int | None, pool: int) -> list[Found]:
    """Runs a workload on every cache. Constraints are dropped: the oracle's tokens are bytes at random."""
    file = workload.read(name).first(programs).relaxed()
    found = [run(file, block, pool) for block in SIZES]
    sampled = any(op.temperature for program in file.programs for op in _generations(program.ops))
    assert sampled or len({one.texts for one in found}) == 1, f"{name}: a cache changed a text"
    return found


def _generations(ops: Ops) -> Iterator[Gen]:
    for op in ops:
        if isinstance(op, Gen):
            yield op
        elif isinstance(op, Fork):
            for branch in op.branches:
                yield from _generations(branch)


def row(name: str, found: Sequence[Found]) -> str:
    rates = " | ".join(f"{one.reuse.achieved:.1%}" for one in found)
    evicted = " / ".join(f"{one.evicted:,}" for one in found)
    return f"| {name} | {found[0].reuse.prompt:,} | {found[0].reuse.optimal:.1%} | {rates} | {evicted} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.block_reuse", description=__doc__.split("\n")[0])
    parser.add_argument("--workload", nargs="+", default=workload.available(), metavar="NAME")
    parser.add_argument("--programs", type=int, metavar="N", help="the first N programs of each file")
    parser.add_argument("--pool", type=int, default=POOL, metavar="TOKENS", help="bytes that the cache holds")
    given = parser.parse_args()
    sizes = " | ".join("tree" if size == TREE else f"blocks of {size}" for size in SIZES)
    print(f"| workload | prompt bytes | optimum | {sizes} | evicted |")
    print("| --- | ---: | ---: |" + " ---: |" * len(SIZES) + " ---: |")
    for name in given.workload:
        print(row(name, compare(name, given.programs, given.pool)), flush=True)


if __name__ == "__main__":
    main()
