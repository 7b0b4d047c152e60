"""The instruction sets that the kernels' tests run on: all that this machine can execute, emulated tiles included."""

from umbel.srt.kernels.cpu.isa import Isa, cpu_flags, usable


def native_isas() -> list[Isa]:
    here = cpu_flags()
    return [isa for isa in Isa if usable(isa, here)]
