"""Computes linear maps x → x Wᵀ + b on the CPU, with weights laid out once in the order in which they are read.

The torch reference is `functional.linear` with the weight rounded to its format. Sums are float32 in one fixed order: a
row gives the same bits alone and in a batch, with one thread and with many. On machines with AMX tiles, BF16 rounds x
to bfloat16 as well, unless the matrix is `exact`. A matrix is a stack of parts, each in a format of its own.

Blocks of a GGUF file keep the numbers of the file in another order, at most 4 % more bytes. Their products round x to
signed bytes with a float32 scale for each 32 inputs; the products of integers are summed exactly. A `fine` matrix
rounds x to 16 bits: to two such rows of bytes, the second for what the first lacks, or with AVX2 alone to integers of
16 bits. Codes of 8 bits are multiplied with the latter there anyway: they cost no more than signed bytes.

Codes that stand for floats (FLOAT8, NF4, FP4, E2M1) become the float32 numbers of the file within a product, which
has the bits of one with F32 weights.
"""

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ....lang.errors import EngineError, ParameterError
from ...layers.checkpoint import BlockTensor
from ...layers.quantized import TABLES, Codes

Number = TypeVar("Number", bound=np.generic)

_SLICE = 16 << 20  # bytes of a file that are laid out before their pages are given back
_LARGEST_HALF = 65504.0


class Format(Enum):
    """Storage formats of a weight; the values are those of `umbel::Format`."""

    F32 = 0
    BF16 = 1
    INT8 = 2  # symmetric, one scale for each output
    F16 = 3
    Q4_0 = 4
    Q4_1 = 5
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 9
    Q3_K = 10
    Q4_K = 11
    Q5_K = 12
    Q6_K = 13
    IQ4_NL = 14
    IQ4_XS = 15
    MXFP4 = 16
    INT4 = 17  # codes 0..15 with a float16 scale and an integer zero for each group of 32, 64, 128, ... inputs
    INT8_GROUPS = 18  # codes 0..255, with the same
    FLOAT8 = 19  # e4m3 with a float32 scale for each group of 8, 16, 24, ... inputs
    NF4 = 20  # one of 16 numbers, with the same
    FP4 = 21
    E2M1 = 22


FLOAT_FORMATS = {torch.float32: Format.F32, torch.bfloat16: Format.BF16, torch.float16: Format.F16}
CODED = (Format.FLOAT8, Format.NF4, Format.FP4, Format.E2M1)
_FORMS = (None, Format.F32, Format.BF16, Format.F16, Format.INT8)
_INTEGERS = {4: (Format.Q4_0, Format.INT4), 8: (Format.Q8_0, Format.INT8_GROUPS)}  # without zeros by 32 inputs, others
_SOURCE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `umbel::Source`
_SOURCE_OF_KIND = {"F32": 0, "BF16": 1, "F16": 2}

# ggml's block types: inputs of a block, and its bytes.
BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
}


@dataclass(frozen=True, slots=True, eq=False)
class IntegerRows:
    """A matrix in unsigned integers: weight = scale × (code − zero), one scale and one zero for each group of inputs.

    Attributes:
        codes: uint8, of 8 bits [n, k]; of 4 [n, k / 2], input 2i in the lower half of byte i, 2i + 1 in the upper.
        scales: float16 or float32 [n, groups], of 32, 64, 128, ... inputs each; kept as float16.
        zeros: uint8 [n, groups], in the range of the codes; None: the middle of it everywhere, 8 or 128.
        bits: 4 or 8.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float16] | NDArray[np.float32]
    zeros: NDArray[np.uint8] | None = None
    bits: int = 4

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return len(self.codes), self.codes.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        inputs = self.shape[1]
        return inputs // int(self.scales.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class CodedRows:
    """A matrix in codes that stand for floats: weight = value × scale, one scale for each group of inputs.

    Attributes:
        form: FLOAT8, NF4, FP4 or E2M1, whose codes are those of that name in `layers.quantized`.
        codes: uint8, of FLOAT8 [n, k]; of the others [n, k / 2], input 2i in the lower half of byte i.
        scales: float32 [n, groups], of 8, 16, 24, ... inputs each.
    """

    form: Format
    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return len(self.codes), self.codes.shape[1] * (1 if self.form is Format.FLOAT8 else 2)

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        inputs = self.shape[1]
        return inputs // int(self.scales.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class Dequantised:
    """A matrix in blocks that is packed as floats or INT8, a piece at a time."""

    block: BlockTensor

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.block.shape


Weights = torch.Tensor | BlockTensor | Dequantised | IntegerRows | CodedRows


class PackedMatrix:
    """A weight [n, k] in panels of 16 outputs, in memory of its own. Sources may be freed afterwards."""

    def __init__(
        self,
        library: ctypes.CDLL,
        sources: Sequence[Weights],
        form: Format | None = None,
        *,
        exact: bool = False,
        fine: bool = False,
        order: NDArray[np.int32] | None = None,
    ) -> None:
        """Stacks `sources`, each [n_i, k], along n: the products of q, k and v are one.

        Neighbours in one format become one part. Pages of a mapped file are given back when they have been read.

        Args:
            form: of sources that are tensors or dequantised: F32, BF16, F16 or INT8; None: the type that tensors have,
                F32 of what is dequantised. Blocks, integers and codes keep theirs.
            exact: BF16 leaves x in float32, also where tiles would multiply a rounded x faster.
            fine: blocks and integers round x to 16 bits instead of 8.
            order: int32 [k], of blocks and integers: input i of the sources is input order[i] of x.

        Raises:
            ParameterError: a source is no float32, bfloat16 or float16 matrix of the CPU, nor a sound one in blocks,
                integers or codes, their widths differ, or the order is none of their inputs.
            EngineError: there is no memory.
        """
        self._library = _declare(library)
        if form not in _FORMS:
            raise ParameterError(
                f"form={form} for tensors; write F32, BF16, F16, INT8 or None, and give blocks as they are"
            )
        self.n, self.k = _stacked_shape(sources)
        parts = list(_parts(sources, form))
        self.formats = tuple(part.form for part in parts)
        if order is not None:
            _check_order(order, self.k, self.formats)
        self._handle = library.umbel_matrix_create(
            self.k, 2 if fine else 1, None if order is None else np.ascontiguousarray(order).ctypes.data
        )
        for part in parts:
            added = self._handle and library.umbel_matrix_add(self._handle, part.form.value, part.n, part.group, exact)
            if not added:
                raise EngineError(
                    f"there is no memory for a weight of {self.n} × {self.k} in {part.form.name}; "
                    "use a smaller model or format"
                )
        library.umbel_matrix_place(self._handle)
        for index, part in enumerate(parts):
            first = 0
            for source in part.sources:
                self._fill(index, first, source)
                first += source.shape[0]

    def _fill(self, part: int, first: int, source: Weights) -> None:
        match source:
            case BlockTensor():
                self._fill_blocks(part, first, source)
            case Dequantised():
                self._fill_dequantised(part, first, source.block)
            case IntegerRows():
                self._fill_integers(part, first, source)
            case CodedRows():
                self._fill_codes(part, first, source)
            case _:
                rows = source if source.stride(1) == 1 else source.contiguous()
                kind = _SOURCE[source.dtype]
                self._library.umbel_matrix_fill(
                    self._handle, part, first, len(rows), rows.data_ptr(), kind, rows.stride(0)
                )

    def _fill_blocks(self, part: int, first: int, source: BlockTensor) -> None:
        head_rows = _head_rows(source)
        row_bytes = source.data.strides[0]
        for begin, rows in _slices(source, _SLICE // row_bytes):
            if source.kind in _SOURCE_OF_KIND:
                plain = _in_order(rows, head_rows)
                self._library.umbel_matrix_fill(
                    *(self._handle, part, first + begin, len(rows), plain.ctypes.data),
                    *(_SOURCE_OF_KIND[source.kind], plain.strides[0] // BLOCKS[source.kind][1]),
                )
            else:
                self._library.umbel_matrix_fill_blocks(
                    self._handle, part, first + begin, len(rows), rows.ctypes.data, row_bytes, head_rows
                )
            give_back(rows)

    def _fill_dequantised(self, part: int, first: int, source: BlockTensor) -> None:
        k = source.shape[1]
        for begin, rows in _slices(source, _SLICE // (4 * k)):
            floats = dequantise(self._library, BlockTensor(source.kind, (len(rows), k), rows))
            plain = _in_order(floats.numpy(), _head_rows(source))
            self._library.umbel_matrix_fill(
                self._handle, part, first + begin, len(rows), plain.ctypes.data, _SOURCE[torch.float32], k
            )
            give_back(rows)

    def _fill_integers(self, part: int, first: int, source: IntegerRows) -> None:
        codes = np.ascontiguousarray(source.codes)
        scales = np.ascontiguousarray(source.scales, dtype=np.float16)
        zeros = None if source.zeros is None else np.ascontiguousarray(source.zeros)
        if zeros is None and source.group > 32:
            zeros = np.full(scales.shape, 1 << (source.bits - 1), dtype=np.uint8)
        self._library.umbel_matrix_fill_integers(
            *(self._handle, part, first, len(codes), codes.ctypes.data, scales.ctypes.data),
            None if zeros is None else zeros.ctypes.data,
        )

    def _fill_codes(self, part: int, first: int, source: CodedRows) -> None:
        codes, scales = np.ascontiguousarray(source.codes), np.ascontiguousarray(source.scales)
        table = None if source.form is Format.FLOAT8 else np.array(TABLES[Codes[source.form.name]], dtype=np.float32)
        self._library.umbel_matrix_fill_codes(
            *(self._handle, part, first, len(codes), codes.ctypes.data, scales.ctypes.data),
            None if table is None else table.ctypes.data,
        )

    @property
    def sizes(self) -> tuple[tuple[Format, int], ...]:
        """The parts in order: their formats and bytes."""
        sizes = (self._library.umbel_matrix_part_bytes(self._handle, index) for index in range(len(self.formats)))
        return tuple(zip(self.formats, sizes, strict=True))

    @property
    def format(self) -> Format:
        """The format of the only part, or of the first."""
        return self.formats[0]

    @property
    def handle(self) -> int:
        """`umbel::Matrix*`, valid as long as this object."""
        handle: int = self._handle
        return handle

    @property
    def bytes(self) -> int:
        size: int = self._library.umbel_matrix_bytes(self._handle)
        return size

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes x [rows, k] → out [rows, n], float32; rows may be strided, e.g. columns of a wider matrix.

        Raises:
            ParameterError: a tensor of another shape, type or layout.
        """
        _check("x", x, (len(x), self.k))
        if out is None:
            out = torch.empty(len(x), self.n)
        _check("out", out, (len(x), self.n))
        if bias is not None:
            _check("bias", bias.unsqueeze(0), (1, self.n))
        pointer = None if bias is None else bias.data_ptr()
        self._library.umbel_linear(
            self._handle, x.data_ptr(), len(x), x.stride(0), pointer, out.data_ptr(), out.stride(0)
        )
        return out

    def panel(self, x: torch.Tensor, panel: int) -> torch.Tensor:
        """Computes outputs 16 · panel and the next 15, of a matrix in one format that is not INT8: bit by bit those of
        a call; undefined past n."""
        _check("x", x, (len(x), self.k))
        panels = (self.n + 15) // 16
        if self.formats != (self.format,) or self.format is Format.INT8 or not 0 <= panel < panels:
            names = ", ".join(form.name for form in self.formats)
            raise ParameterError(f"panel={panel} of a matrix in {names}; write 0 to {panels - 1}, of one, not INT8")
        out = torch.empty(len(x), 16)
        self._library.umbel_linear_panel(self._handle, x.data_ptr(), len(x), x.stride(0), panel, out.data_ptr())
        return out

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.umbel_matrix_free(self._handle)


def dequantise(library: ctypes.CDLL, source: BlockTensor, rows: NDArray[np.int64] | None = None) -> torch.Tensor:
    """Computes rows of a matrix in blocks as float32, [rows, k], in the order of the file; None: all of them.

    Raises:
        ParameterError: the matrix is not sound, or a row is not in it.
    """
    _check_blocks(source)
    n, k = source.shape
    count = n if rows is None else len(rows)
    if rows is not None and count and (rows.min() < 0 or rows.max() >= n):
        raise ParameterError(f"rows from {rows.min()} to {rows.max()} of {n}; write numbers from 0 to {n - 1}")
    out = torch.empty(count, k)
    which = None if rows is None else np.ascontiguousarray(rows, dtype=np.int64)
    _declare(library).umbel_blocks_dequantise(
        *(Format[source.kind].value, source.data.ctypes.data, source.data.strides[0]),
        *(None if which is None else which.ctypes.data, count, k, out.data_ptr()),
    )
    return out


@dataclass(frozen=True, slots=True)
class _Stacked:
    """Neighbours in one format."""

    form: Format
    group: int  # inputs that share a scale, of integers with zero points and of codes; else 0
    sources: list[Weights]

    @property
    def n(self) -> int:
        return sum(source.shape[0] for source in self.sources)


def _parts(sources: Sequence[Weights], form: Format | None) -> Iterator[_Stacked]:
    open_part: _Stacked | None = None
    for source in sources:
        own, group = _format_of(source, form)
        if open_part and (open_part.form, open_part.group) == (own, group):
            open_part.sources.append(source)
            continue
        if open_part:
            yield open_part
        open_part = _Stacked(own, group, [source])
    if open_part:
        yield open_part


def _format_of(source: Weights, form: Format | None) -> tuple[Format, int]:
    match source:
        case BlockTensor():
            return Format[source.kind], 0
        case Dequantised():
            return form or Format.F32, 0
        case IntegerRows():
            plain, grouped = _INTEGERS[source.bits]
            return (plain, 0) if source.zeros is None and source.group == 32 else (grouped, source.group)
        case CodedRows():
            return source.form, source.group
        case _:
            return form or FLOAT_FORMATS[source.dtype], 0


def _stacked_shape(sources: Sequence[Weights]) -> tuple[int, int]:
    if not sources:
        raise ParameterError("sources is empty; give at least one weight")
    for source in sources:
        match source:
            case BlockTensor():
                _check_blocks(source)
            case Dequantised():
                _check_blocks(source.block)
            case IntegerRows():
                _check_integers(source)
            case CodedRows():
                _check_codes(source)
            case _:
                _check_floats(source)
    widths = {source.shape[1] for source in sources}
    if len(widths) > 1:
        raise ParameterError(f"weights of {sorted(widths)} inputs cannot be stacked; they need the same inputs")
    return sum(source.shape[0] for source in sources), widths.pop()


def _check_floats(source: torch.Tensor) -> None:
    if source.ndim != 2 or source.dtype not in FLOAT_FORMATS or source.device.type != "cpu" or not source.numel():
        raise ParameterError(
            f"a weight of shape {tuple(source.shape)}, {source.dtype}, on {source.device}; "
            "give a float32, bfloat16 or float16 matrix on the CPU"
        )


def _check_blocks(source: BlockTensor) -> None:
    """Checks what the kernels rely on: they read as many bytes as the shape says."""
    n, k = source.shape
    if source.kind not in BLOCKS:
        raise ParameterError(f"a weight in blocks of type {source.kind}; the kernels read {', '.join(BLOCKS)}")
    inputs, size = BLOCKS[source.kind]
    data = source.data
    whole = n > 0 and k > 0 and k % inputs == 0 and data.shape == (n, k // inputs * size)
    if not whole or data.dtype != np.uint8 or data.strides[1] != 1:
        raise ParameterError(
            f"a weight of {n} × {k} in {source.kind} with data {data.dtype} {data.shape}, strides {data.strides}; give "
            f"uint8 [{n}, inputs / {inputs} × {size}], with bytes of a row next to each other"
        )
    if source.heads and (n % source.heads or n // source.heads % 2):
        raise ParameterError(f"a weight of {n} outputs for {source.heads} heads; each needs the same even number")


def _check_integers(source: IntegerRows) -> None:
    codes, scales, zeros = source.codes, source.scales, source.zeros
    if source.bits not in _INTEGERS:
        raise ParameterError(f"integers of {source.bits} bits; the kernels multiply those of 4 and 8")
    plain = codes.ndim == scales.ndim == 2 and codes.size > 0 and scales.size > 0 and codes.dtype == np.uint8
    if not plain or scales.dtype not in (np.float16, np.float32) or len(scales) != len(codes):
        raise ParameterError(
            f"codes {codes.dtype} {codes.shape} with scales {scales.dtype} {scales.shape}; give uint8 "
            "[n, k × bits / 8] and float16 or float32 [n, groups]"
        )
    k, group = source.shape[1], source.group
    if k != group * scales.shape[1] or group % 32 or (group // 32) & (group // 32 - 1):
        raise ParameterError(f"{k} inputs in {scales.shape[1]} groups; a group has 32, 64, 128, ... of them")
    if not np.abs(scales).max() <= _LARGEST_HALF:
        raise ParameterError(f"scales up to {np.abs(scales).max()}; float16 holds numbers up to {_LARGEST_HALF:.0f}")
    largest = (1 << source.bits) - 1
    if zeros is not None and (zeros.dtype != np.uint8 or zeros.shape != scales.shape or zeros.max() > largest):
        raise ParameterError(f"zeros {zeros.dtype} {zeros.shape}; give uint8 {scales.shape}, from 0 to {largest}")


def _check_codes(source: CodedRows) -> None:
    codes, scales = source.codes, source.scales
    plain = codes.ndim == scales.ndim == 2 and codes.size > 0 and scales.size > 0 and len(scales) == len(codes)
    if source.form not in CODED or not plain or codes.dtype != np.uint8 or scales.dtype != np.float32:
        raise ParameterError(
            f"codes {codes.dtype} {codes.shape} with scales {scales.dtype} {scales.shape} in {source.form.name}; give "
            f"uint8 [n, k] or [n, k / 2] and float32 [n, groups], in {', '.join(form.name for form in CODED)}"
        )
    k, groups = source.shape[1], scales.shape[1]
    if k % (8 * groups):
        raise ParameterError(f"{k} inputs in {groups} groups; a group has 8, 16, 24, ... of them")


def _check_order(order: NDArray[np.int32], k: int, formats: Sequence[Format]) -> None:
    """Checks what the kernels rely on: they read x where the order says."""
    plain = [form.name for form in formats if form in (*FLOAT_FORMATS.values(), Format.INT8, *CODED)]
    if plain or order.dtype != np.int32 or order.shape != (k,) or order.min() < 0 or order.max() >= k:
        raise ParameterError(
            f"order {order.dtype} {order.shape} of {k} inputs, with parts in {', '.join(plain) or 'blocks'}; "
            f"give int32 [{k}] of numbers below {k}, and blocks or integers alone"
        )


def _head_rows(source: BlockTensor) -> int:
    """Returns the rows of a head that are in llama.cpp's order; 0: all rows are in Hugging Face's."""
    return source.shape[0] // source.heads if source.heads else 0


def _slices(source: BlockTensor, rows: int) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yields (first row, rows) for about so many rows at a time: whole heads, or whole panels."""
    unit = _head_rows(source) or 16
    step = max(rows // unit, 1) * unit
    for begin in range(0, source.shape[0], step):
        yield begin, source.data[begin : begin + step]


def _in_order(rows: NDArray[Number], head_rows: int) -> NDArray[Number]:
    """Returns rows of whole heads in Hugging Face's order."""
    if not head_rows:
        return rows
    return np.ascontiguousarray(rows.reshape(-1, head_rows // 2, 2, rows.shape[1]).swapaxes(1, 2)).reshape(rows.shape)


def give_back(rows: NDArray[np.uint8]) -> None:
    """Lets the system take back pages of a mapped file; they would be read again from the file."""
    owner: object = rows
    while isinstance(owner, np.ndarray):
        owner = owner.base
    if isinstance(owner, memoryview):
        owner = owner.obj
    if not isinstance(owner, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
        return
    start = rows.ctypes.data - np.frombuffer(owner, dtype=np.uint8).ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (start + rows.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        owner.madvise(mmap.MADV_DONTNEED, first, end - first)


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, int]) -> None:
    plain = tensor.dtype is torch.float32 and tensor.device.type == "cpu"
    if tuple(tensor.shape) != shape or not plain or (tensor.stride(1) != 1 and shape[1] > 1):
        raise ParameterError(
            f"{name} is {tuple(tensor.shape)}, {tensor.dtype}, strides {tensor.stride()}, on {tensor.device}; give "
            f"{shape} in float32 on the CPU, with elements of a row next to each other"
        )


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, long, integer = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    library.umbel_matrix_create.argtypes = [long, integer, pointer]
    library.umbel_matrix_create.restype = pointer
    library.umbel_matrix_add.argtypes = [pointer, integer, long, long, integer]
    library.umbel_matrix_add.restype = integer
    library.umbel_matrix_place.argtypes = [pointer]
    library.umbel_matrix_place.restype = None
    library.umbel_matrix_fill.argtypes = [pointer, long, long, long, pointer, integer, long]
    library.umbel_matrix_fill.restype = None
    library.umbel_matrix_fill_blocks.argtypes = [pointer, long, long, long, pointer, long, long]
    library.umbel_matrix_fill_blocks.restype = None
    for fill in (library.umbel_matrix_fill_integers, library.umbel_matrix_fill_codes):
        fill.argtypes = [pointer, long, long, long, pointer, pointer, pointer]
        fill.restype = None
    library.umbel_matrix_free.argtypes = [pointer]
    library.umbel_matrix_free.restype = None
    library.umbel_matrix_bytes.argtypes = [pointer]
    library.umbel_matrix_bytes.restype = long
    library.umbel_matrix_part_bytes.argtypes = [pointer, long]
    library.umbel_matrix_part_bytes.restype = long
    library.umbel_linear.argtypes = [pointer, pointer, long, long, pointer, pointer, long]
    library.umbel_linear.restype = None
    library.umbel_linear_panel.argtypes = [pointer, pointer, long, long, long, pointer]
    library.umbel_linear_panel.restype = None
    library.umbel_blocks_dequantise.argtypes = [integer, pointer, long, pointer, long, long, pointer]
    library.umbel_blocks_dequantise.restype = None
    return library
