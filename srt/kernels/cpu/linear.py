"""Computes linear maps x → x Wᵀ + b on the CPU, with weights laid out once in the order in which they are read.

The torch reference is `functional.linear` with the weight rounded to its format. Sums are float32 in one fixed order: a
row gives the same bits alone and in a batch, with one thread and with many. On machines with AMX tiles, BF16 rounds x
to bfloat16 as well, unless the matrix is `exact`.
"""

import ctypes
from collections.abc import Sequence
from enum import Enum

import torch

from ....lang.errors import EngineError, ParameterError

_SOURCES = (torch.float32, torch.bfloat16)


class Format(Enum):
    """Storage formats of a weight; the values are those of `umbel::Format`."""

    F32 = 0
    BF16 = 1
    INT8 = 2  # symmetric, one scale for each output


class PackedMatrix:
    """A weight [n, k] in panels of 16 outputs, in memory of its own. Sources may be freed afterwards."""

    def __init__(
        self, library: ctypes.CDLL, sources: Sequence[torch.Tensor], form: Format, *, exact: bool = False
    ) -> None:
        """Stacks `sources`, each [n_i, k], along n: the products of q, k and v are one.

        Args:
            exact: BF16 leaves x in float32, also where tiles would multiply a rounded x faster.

        Raises:
            ParameterError: a source is no float32 or bfloat16 matrix of the CPU, or their widths differ.
            EngineError: there is no memory.
        """
        self._library = _declare(library)
        self.format = form
        self.n, self.k = _stacked_shape(sources)
        self._handle = library.umbel_matrix_create(form.value, self.n, self.k, exact)
        if not self._handle:
            raise EngineError(
                f"there is no memory for a weight of {self.n} × {self.k} in {form.name}; use a smaller model or format"
            )
        first = 0
        for source in sources:
            rows = source if source.stride(1) == 1 else source.contiguous()
            is_bf16 = source.dtype is torch.bfloat16
            library.umbel_matrix_fill(self._handle, first, len(rows), rows.data_ptr(), is_bf16, rows.stride(0))
            first += len(rows)

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
        """Computes outputs 16 · panel and the next 15, of float32 and bfloat16: bit by bit those of a call; undefined
        past n."""
        _check("x", x, (len(x), self.k))
        panels = (self.n + 15) // 16
        if self.format is Format.INT8 or not 0 <= panel < panels:
            raise ParameterError(
                f"panel={panel} of a matrix in {self.format.name}; write 0 to {panels - 1}, of a float"
            )
        out = torch.empty(len(x), 16)
        self._library.umbel_linear_panel(self._handle, x.data_ptr(), len(x), x.stride(0), panel, out.data_ptr())
        return out

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.umbel_matrix_free(self._handle)


def _stacked_shape(sources: Sequence[torch.Tensor]) -> tuple[int, int]:
    if not sources:
        raise ParameterError("sources is empty; give at least one weight")
    for source in sources:
        if source.ndim != 2 or source.dtype not in _SOURCES or source.device.type != "cpu" or not source.numel():
            raise ParameterError(
                f"a weight of shape {tuple(source.shape)}, {source.dtype}, on {source.device}; "
                "give a float32 or bfloat16 matrix on the CPU"
            )
    widths = {source.shape[1] for source in sources}
    if len(widths) > 1:
        raise ParameterError(f"weights of {sorted(widths)} inputs cannot be stacked; they need the same inputs")
    return sum(map(len, sources)), widths.pop()


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, int]) -> None:
    plain = tensor.dtype is torch.float32 and tensor.device.type == "cpu"
    if tuple(tensor.shape) != shape or not plain or (tensor.stride(1) != 1 and shape[1] > 1):
        raise ParameterError(
            f"{name} is {tuple(tensor.shape)}, {tensor.dtype}, strides {tensor.stride()}, on {tensor.device}; give "
            f"{shape} in float32 on the CPU, with elements of a row next to each other"
        )


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, long = ctypes.c_void_p, ctypes.c_long
    library.umbel_matrix_create.argtypes = [ctypes.c_int, long, long, ctypes.c_int]
    library.umbel_matrix_create.restype = pointer
    library.umbel_matrix_fill.argtypes = [pointer, long, long, pointer, ctypes.c_int, long]
    library.umbel_matrix_fill.restype = None
    library.umbel_matrix_free.argtypes = [pointer]
    library.umbel_matrix_free.restype = None
    library.umbel_matrix_bytes.argtypes = [pointer]
    library.umbel_matrix_bytes.restype = long
    library.umbel_linear.argtypes = [pointer, pointer, long, long, pointer, pointer, long]
    library.umbel_linear.restype = None
    library.umbel_linear_panel.argtypes = [pointer, pointer, long, long, long, pointer]
    library.umbel_linear_panel.restype = None
    return library
