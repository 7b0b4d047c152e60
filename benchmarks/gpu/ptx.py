"""`python -m benchmarks.gpu.ptx`: what Triton's compiler makes of the kernels for a Hopper GPU; none is needed.

Every variant is compiled for sm_90, and the assembler says what it takes: registers of a thread, shared memory of a
program, registers that spill to local memory. The instructions of the PTX say whether products run on tensor cores
(`wgmma`, or `mma` for tiles of 16 rows) and whether what they read is on its way before (`cp.async`). A variant that
spills, does not fit, or lacks what it should have is named, and the command fails.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from .variants.attention import attention_variants
from .variants.linear import linear_variants
from .variants.moe import moe_variants
from .variants.quantized import quantized_variants
from .variants.sampling import sampling_variants
from .variants.small import small_variants
from .variants.variant import Variant

CAPABILITY = 90
ARCHITECTURE = "sm_90a"
SHARED_BYTES = 227 << 10  # of a program, at most
SYSTEM_BYTES = 1024  # of shared memory that each program takes beside
REGISTERS, WARPS, PROGRAMS = 65_536, 64, 32  # of a multiprocessor
_SETS = {
    "attention": attention_variants,
    "linear": linear_variants,
    "moe": moe_variants,
    "quantized": quantized_variants,
    "sampling": sampling_variants,
    "small": small_variants,
}


_LEGEND = """\
By `python -m benchmarks.gpu.ptx`, without a GPU: nothing here was timed. Registers of a thread, bytes of shared memory
of a program, bytes that spill to local memory, instructions in the PTX, and how many programs fit a multiprocessor at
once. Of `attend`, `few`, `some` and `many` are tiles of 16, 32 and 128 query vectors."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a variant takes, and which instructions it has."""

    name: str
    warps: int
    stages: int
    registers: int  # of a thread
    shared: int  # bytes of a program
    spilled: int  # bytes written to local memory
    wgmma: int
    mma: int
    cp_async: int

    @property
    def resident(self) -> int:
        """Programs that fit a multiprocessor at once."""
        by_registers = REGISTERS // (self.registers * self.warps * 32)
        by_shared = (SHARED_BYTES + SYSTEM_BYTES) // (self.shared + SYSTEM_BYTES)
        return min(by_registers, by_shared, WARPS // self.warps, PROGRAMS)


def complaints(variant: Variant, found: Inspection) -> list[str]:
    """What is wrong with a variant, in words."""
    wrong = {
        f"{found.spilled} bytes spill to local memory": found.spilled > variant.spills,
        f"{found.shared} bytes of shared memory, there are {SHARED_BYTES}": found.shared > SHARED_BYTES,
        "no program fits a multiprocessor": found.resident < 1,
        "products do not run on tensor cores": variant.products and not (found.wgmma or found.mma),
        "gathers are not asynchronous": variant.gathers and not found.cp_async,
    }
    return [f"{variant.name}: {words}" for words, holds in wrong.items() if holds]


def inspect(variant: Variant) -> Inspection:
    names = list(variant.kernel.arg_names)
    signature = {name: variant.arguments.get(name, "constexpr") for name in names}
    aligned = [
        (index,)
        for index, name in enumerate(names)
        if name in variant.aligned or variant.arguments.get(name, "").startswith("*")
    ]
    source = ASTSource(
        fn=variant.kernel,
        signature=signature,
        constexprs=dict(variant.constants),
        attrs={index: [["tt.divisibility", 16]] for index in aligned},
    )
    options = {
        "num_warps": variant.warps,
        "num_stages": variant.stages,
        "maxnreg": variant.registers,
        "enable_fp_fusion": variant.fused,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    ptx = compiled.asm["ptx"]
    registers, spilled = _assemble(ptx)
    return Inspection(
        name=variant.name,
        warps=variant.warps,
        stages=variant.stages,
        registers=registers,
        shared=compiled.metadata.shared,
        spilled=spilled,
        wgmma=len(re.findall(r"wgmma\.mma_async", ptx)),
        mma=len(re.findall(r"\bmma\.sync", ptx)),
        cp_async=len(re.findall(r"cp\.async\.c[ag]\.", ptx)),
    )


def _assemble(ptx: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that spill, by the assembler that Triton brings."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [
            get_ptxas(CAPABILITY).path,
            "-v",
            f"--gpu-name={ARCHITECTURE}",
            str(source),
            "-o",
            f"{folder}/kernel.cubin",
        ]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
    said = finished.stdout + finished.stderr
    assert finished.returncode == 0, f"the assembler refuses what the compiler made: {said}"
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None, f"the assembler says nothing of registers: {said}"
    return int(registers[1]), int(spilled[1]) if spilled else 0


def table(inspections: Iterable[Inspection]) -> str:
    """Markdown."""
    heads = [field.name.replace("_", ".") for field in fields(Inspection)] + ["resident"]
    lines = [" | ".join(heads), " | ".join(["---"] * len(heads))]
    for found in inspections:
        cells = [getattr(found, field.name) for field in fields(Inspection)]
        lines.append(" | ".join(map(str, [*cells, found.resident])))
    return "\n".join(f"| {line} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.ptx", description=__doc__)
    parser.add_argument("--kernels", choices=sorted(_SETS), help="those of one file; else all")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORDS", help="variants with any of these in the name"
    )
    parser.add_argument("--output", type=Path, help="a Markdown file; else standard output")
    options = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, and interpreted kernels cannot be compiled; unset it")
    sets = [_SETS[options.kernels]] if options.kernels else list(_SETS.values())
    variants = [
        variant for variants in sets for variant in variants() if any(words in variant.name for words in options.only)
    ]
    if not variants:
        parser.error(f"--only {options.only}: no variant has one of these in its name; leave it out to see all names")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        inspections = list(pool.map(inspect, variants))
    page = (
        f"# Kernels compiled for {ARCHITECTURE} by Triton {triton.__version__}\n\n{_LEGEND}\n\n{table(inspections)}\n"
    )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(page)
    else:
        sys.stdout.write(page)
    wrong = [line for pair in zip(variants, inspections, strict=True) for line in complaints(*pair)]
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
