"""`python -m benchmarks.gpu.ptx`: what Triton's compiler makes of the kernels for a class of GPUs; none is needed.

Every variant is compiled with the numbers of the class, and the assembler says what it takes: registers of a thread,
shared memory of a program, registers that spill to local memory. The instructions of the PTX say whether products run
on tensor cores (`wgmma`, or `mma` for tiles of 16 rows) and whether what they read is on its way before (`cp.async`). A
variant that does not fit, or on Hopper spills or lacks what it should have, is named, and the command fails.
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
from umbel.srt.kernels.triton.fitting import WARP_GROUPS, Room
from umbel.srt.kernels.triton.tuning import read_tuning

from .variants.attention import attention_variants
from .variants.linear import linear_variants
from .variants.moe import moe_variants
from .variants.quantized import quantized_variants
from .variants.sampling import sampling_variants
from .variants.small import small_variants
from .variants.variant import Variant


@dataclass(frozen=True, slots=True)
class Target:
    """A class of devices, as a compiler and a multiprocessor of it.

    Attributes:
        shared: bytes of shared memory that a program may take.
        system: bytes of shared memory that each program takes without asking.
        warps, programs: that a multiprocessor holds at once.
        measured: the numbers were chosen on such a device: what spills there, or misses the tensor cores, is wrong.
    """

    capability: int
    architecture: str
    shared: int
    system: int
    warps: int
    programs: int
    measured: bool = False

    @property
    def room(self) -> Room:
        return Room(self.shared, warp_groups=self.capability // 10 in WARP_GROUPS)

    @property
    def float8(self) -> bool:
        """Whether Triton reads float8_e4m3fn there."""
        return self.capability >= 89


TARGETS = {
    "turing": Target(75, "sm_75", 64 << 10, 0, 32, 16),
    "ampere": Target(80, "sm_80", 163 << 10, 1024, 64, 32),
    "geforce_ampere": Target(86, "sm_86", 99 << 10, 1024, 48, 16),
    "ada": Target(89, "sm_89", 99 << 10, 1024, 48, 24),
    "hopper": Target(90, "sm_90a", 227 << 10, 1024, 64, 32, measured=True),
    "geforce_blackwell": Target(120, "sm_120a", 99 << 10, 1024, 48, 24),
}
REGISTERS = 65_536  # of a multiprocessor
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
once. Of `attend`, `few`, `some` and `many` are tiles of 16, 64 (or 32) and 128 query vectors."""


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
    resident: int  # programs that fit a multiprocessor at once


def resident(registers: int, shared: int, warps: int, target: Target) -> int:
    """Counts the programs that fit a multiprocessor at once."""
    by_registers = REGISTERS // (registers * warps * 32)
    by_shared = (target.shared + target.system) // max(shared + target.system, 1)
    return min(by_registers, by_shared, target.warps // warps, target.programs)


def complaints(variant: Variant, found: Inspection, target: Target) -> list[str]:
    """What is wrong with a variant, in words."""
    wrong = {
        f"{found.shared} bytes of shared memory, there are {target.shared}": found.shared > target.shared,
        "no program fits a multiprocessor": found.shared <= target.shared and found.resident < 1,
    }
    if target.measured:
        wrong |= {
            f"{found.spilled} bytes spill to local memory": found.spilled > variant.spills,
            "products do not run on tensor cores": variant.products and not (found.wgmma or found.mma),
            "gathers are not asynchronous": variant.gathers and not found.cp_async,
        }
    return [f"{variant.name}: {words}" for words, holds in wrong.items() if holds]


def inspect(variant: Variant, target: Target) -> Inspection:
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
        constexprs={**variant.constants, **({"PDL": target.capability >= 90} if "PDL" in names else {})},
        attrs={index: [["tt.divisibility", 16]] for index in aligned},
    )
    options = {
        "num_warps": variant.warps,
        "num_stages": variant.stages,
        "maxnreg": variant.registers,
        "enable_fp_fusion": variant.fused,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", target.capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    registers, spilled = _assemble(ptx, target)
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
        resident=resident(registers, compiled.metadata.shared, variant.warps, target),
    )


def _assemble(ptx: str, target: Target) -> tuple[int, int]:
    """Registers of a thread, and bytes that spill, by the assembler that Triton brings."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [
            get_ptxas(target.capability).path,
            "-v",
            f"--gpu-name={target.architecture}",
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
    heads = [field.name.replace("_", ".") for field in fields(Inspection)]
    lines = [" | ".join(heads), " | ".join(["---"] * len(heads))]
    for found in inspections:
        cells = [getattr(found, field.name) for field in fields(Inspection)]
        lines.append(" | ".join(map(str, cells)))
    return "\n".join(f"| {line} |" for line in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.ptx", description=__doc__)
    parser.add_argument("--kernels", choices=sorted(_SETS), help="those of one file; else all")
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORDS", help="variants with any of these in the name"
    )
    parser.add_argument("--devices", choices=sorted(TARGETS), default="hopper", help="the class; hopper if left out")
    parser.add_argument("--output", type=Path, help="a Markdown file; else standard output")
    options = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, and interpreted kernels cannot be compiled; unset it")
    target, tuning = TARGETS[options.devices], read_tuning(options.devices)
    sets = [_SETS[options.kernels]] if options.kernels else list(_SETS.values())
    asked = [
        variant
        for variants in sets
        for variant in variants(tuning, target.room)
        if any(words in variant.name for words in options.only)
    ]
    variants = [variant for variant in asked if target.float8 or not variant.reads_float8]
    if not variants:
        parser.error(f"--only {options.only}: no variant has one of these in its name; leave it out to see all names")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        inspections = list(pool.map(lambda variant: inspect(variant, target), variants))
    page = (
        f"# Kernels compiled for {target.architecture} by Triton {triton.__version__}\n\n{_LEGEND}\n\n"
        f"{table(inspections)}\n"
    )
    if left_out := len(asked) - len(variants):
        page += f"\n{left_out} variants that read float8 are left out: Triton compiles them from sm_89 on.\n"
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(page)
    else:
        sys.stdout.write(page)
    wrong = [line for pair in zip(variants, inspections, strict=True) for line in complaints(*pair, target)]
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
