"""A kernel with what its launches compile it for: dtypes, sizes, warps, stages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled kernel.

    Attributes:
        kernel: what the decorator `jit` made of a function.
        arguments: of those that are not constants, by name: "*bf16", "*fp32", "*i32", "i32", "fp32" and the like.
        constants: the others, by name.
        aligned: integers that are multiples of 16 in every launch; all pointers are.
        products: it multiplies matrices, and has to do so on tensor cores.
        gathers: it reads what its products need by asynchronous copies.
        fused: products and sums may be one instruction, as its launches say.
        registers: of a thread, at most, as its launches say; None: as the compiler likes.
        spills: bytes that may, where a device has shown that it is faster so.
    """

    name: str
    kernel: Any  # Any: Triton gives no types
    arguments: Mapping[str, str]
    constants: Mapping[str, object]
    warps: int = 4
    stages: int = 3
    aligned: frozenset[str] = field(default_factory=frozenset)
    products: bool = False
    gathers: bool = False
    fused: bool = True
    registers: int | None = None
    spills: int = 0

    @property
    def reads_float8(self) -> bool:
        return any("fp8" in kind for kind in self.arguments.values())
