"""Computes the head of a model on the CPU: hidden states → tokens, mostly without all logits.

A row that needs its best token, or one drawn with at most top_k and min_p, needs few of 262,144 logits. With `screen`,
a copy of the matrix in INT8 estimates all of them to within a proven bound, and exact logits are computed only for
tokens that can still be chosen. A matrix that is INT8 itself needs no copy. The tokens are the same as those of the
reference, `choose_from_logits`, which reads all logits.
"""

import ctypes
import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ....lang.errors import EngineError, ParameterError
from ...core.batch import RowNeed, RowRequests
from ...sampling.gumbel import gumbel
from .linear import PackedMatrix


@dataclass(frozen=True, slots=True)
class HeadCounters:
    """Cumulative counts."""

    rows: int  # that needed a token
    candidates: int  # tokens that the screen left over
    exact: int  # logits computed one by one
    fallbacks: int  # rows that computed all logits although there is a screen


@dataclass(frozen=True, slots=True, eq=False)
class HeadChoice:
    tokens: NDArray[np.int32]  # [rows]; −1 where logits are not finite
    logits: NDArray[np.float32]  # [rows], of the tokens


class Head:
    """A head over `matrix`, [vocab, hidden]."""

    def __init__(self, library: ctypes.CDLL, matrix: PackedMatrix, *, screen: bool = True, coarse: bool = True) -> None:
        """`screen=False`: every row computes all its logits. `coarse=False`: estimates never use inputs of 7 bits.

        Raises:
            EngineError: there is no memory.
        """
        self._library = _declare(library)
        self._matrix = matrix  # the head reads it
        self._handle = library.umbel_head_create(matrix.handle, screen, coarse)
        if not self._handle:
            raise EngineError(
                f"there is no memory for the INT8 copy of a head of {matrix.n} × {matrix.k}; "
                "use a smaller model, a smaller KV pool, or screen=False"
            )

    @property
    def handle(self) -> int:
        """`umbel::Head*`, valid as long as this object."""
        handle: int = self._handle
        return handle

    @property
    def bytes(self) -> int:
        """Bytes of the copy and its bounds, without the matrix."""
        size: int = self._library.umbel_head_bytes(self._handle)
        return size

    @property
    def screens(self) -> bool:
        """Returns whether the head screens; False without `screen`, and if a weight is not finite: no bound holds."""
        return bool(self._library.umbel_head_screens(self._handle))

    @property
    def counters(self) -> HeadCounters:
        values = (ctypes.c_long * 4)()
        self._library.umbel_head_counters(self._handle, values)
        return HeadCounters(*values)

    def best(self, x: torch.Tensor) -> HeadChoice:
        """Chooses the most likely token of each row, of equal ones the first. x: float32 [rows, hidden]."""
        return self._choose(x, (None,) * 6)

    def choose(self, x: torch.Tensor, row_requests: RowRequests) -> HeadChoice:
        """Chooses one of the allowed tokens for each row. x: float32 [rows, hidden].

        Raises:
            ParameterError: a row that wants its logits, numbers that are no parameters of a draw, or arrays of
                another length; a row that is allowed few tokens, not bits of all.
        """
        rows = len(x)
        _check_picks(row_requests, rows)
        arrays = (
            np.ascontiguousarray(row_requests.kinds, dtype=np.uint8),
            np.ascontiguousarray(row_requests.inverse_temperatures, dtype=np.float64),
            np.ascontiguousarray(row_requests.keys, dtype=np.uint64),
            np.ascontiguousarray(row_requests.top_k, dtype=np.int32),
            np.ascontiguousarray(row_requests.min_p, dtype=np.float64),
        )
        masks = self._masks(row_requests, rows) if row_requests.allowed else None
        addresses = [array.ctypes.data for array in arrays]
        return self._choose(x, (*addresses, None if masks is None else masks.ctypes.data))

    def _masks(self, row_requests: RowRequests, rows: int) -> NDArray[np.uint64]:
        """Returns the addresses [rows] of each row's mask, whose memory the row requests own; 0: all tokens."""
        words = -(-self._matrix.n // 32)
        addresses = np.zeros(rows, dtype=np.uint64)
        for row, allowed in row_requests.allowed.items():
            bits = allowed.bits
            if bits is None or bits.shape != (words,) or bits.dtype != np.uint32 or not bits.flags.c_contiguous:
                raise ParameterError(
                    f"row {row} is allowed {allowed}; give {words} words of bits, uint32, in one piece"
                )
            addresses[row] = bits.ctypes.data
        return addresses

    def some(self, x: torch.Tensor, tokens: NDArray[np.int32]) -> torch.Tensor:
        """Computes logits [rows, len(tokens)] of these tokens, bit by bit those of `all`. Ascending ones are fastest.

        Raises:
            ParameterError: a token is outside the vocabulary.
        """
        self._check(x)
        ids = np.ascontiguousarray(tokens, dtype=np.int32)
        if ids.ndim != 1 or (len(ids) and (ids.min() < 0 or ids.max() >= self._matrix.n)):
            raise ParameterError(f"tokens={tokens!r}; give a list of token ids from 0 to {self._matrix.n - 1}")
        out = torch.empty(len(x), len(ids))
        self._library.umbel_head_rows(
            self._handle, x.data_ptr(), len(x), x.stride(0), ids.ctypes.data, len(ids), out.data_ptr()
        )
        return out

    def all(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Computes all logits: [rows, vocab]."""
        return self._matrix(x, out=out)

    def _choose(self, x: torch.Tensor, row_requests: tuple[int | None, ...]) -> HeadChoice:
        self._check(x)
        tokens, logits = np.empty(len(x), dtype=np.int32), np.empty(len(x), dtype=np.float32)
        self._library.umbel_head_choose(
            self._handle, x.data_ptr(), len(x), x.stride(0), *row_requests, tokens.ctypes.data, logits.ctypes.data
        )
        return HeadChoice(tokens, logits)

    def _check(self, x: torch.Tensor) -> None:
        width = self._matrix.k
        plain = x.dtype is torch.float32 and x.device.type == "cpu" and x.ndim == 2
        if not plain or x.shape[1] != width or (x.stride(1) != 1 and width > 1):
            raise ParameterError(
                f"x is {tuple(x.shape)}, {x.dtype}, strides {x.stride()}, on {x.device}; give [rows, {width}] in "
                "float32 on the CPU, with elements of a row next to each other"
            )

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.umbel_head_free(self._handle)


def choose_from_logits(logits: torch.Tensor, row_requests: RowRequests) -> NDArray[np.int32]:
    """Chooses tokens by definition, as the reference; −1 where a logit is not finite. logits: float32 [rows, vocab]"""
    values = logits.double().numpy()
    return np.array([_choose_row(values[row], row_requests, row) for row in range(len(values))], dtype=np.int32)


def _choose_row(logits: NDArray[np.float64], row_requests: RowRequests, row: int) -> int:
    if not np.isfinite(logits).all():
        return -1
    if row in row_requests.allowed:
        bits = row_requests.allowed[row].bits
        assert bits is not None, "a choice among few tokens needs no head"
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: len(logits)]
        logits = np.where(allowed, logits, -np.inf)
    if row_requests.kinds[row] == RowNeed.ARGMAX:
        return int(logits.argmax())
    kept = logits > -np.inf
    if 0 < row_requests.top_k[row] < np.count_nonzero(kept):
        kept &= logits >= np.sort(logits)[-int(row_requests.top_k[row])]
    scale = row_requests.inverse_temperatures[row]
    if row_requests.min_p[row] > 0:
        kept &= (logits - logits.max()) * scale >= math.log(row_requests.min_p[row])
    scores = logits * scale + gumbel(row_requests.keys[row : row + 1], np.arange(len(logits)))
    return int(np.where(kept, scores, -np.inf).argmax())


def _check_picks(row_requests: RowRequests, rows: int) -> None:
    arrays = (
        row_requests.kinds,
        row_requests.inverse_temperatures,
        row_requests.keys,
        row_requests.top_k,
        row_requests.min_p,
    )
    if any(array.shape != (rows,) for array in arrays):
        raise ParameterError(f"picks of shapes {[array.shape for array in arrays]} for {rows} rows; give one of each")
    if not np.isin(row_requests.kinds, (RowNeed.ARGMAX, RowNeed.SAMPLE)).all():
        raise ParameterError(
            f"kinds={row_requests.kinds}; a row that wants ALL its logits has to be computed with `all`"
        )
    drawn = row_requests.kinds == RowNeed.SAMPLE
    scales, least = row_requests.inverse_temperatures[drawn], row_requests.min_p[drawn]
    if not (np.isfinite(scales).all() and (scales > 0).all()):
        raise ParameterError(
            f"inverse_temperatures={scales}; write finite numbers above 0, ARGMAX rows for temperature 0"
        )
    if not ((least >= 0).all() and (least <= 1).all()) or (row_requests.top_k[drawn] < 0).any():
        raise ParameterError(f"min_p={least}, top_k={row_requests.top_k[drawn]}; write 0 to 1, and 0 or more")


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, long = ctypes.c_void_p, ctypes.c_long
    library.umbel_head_create.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    library.umbel_head_create.restype = pointer
    library.umbel_head_free.argtypes = [pointer]
    library.umbel_head_free.restype = None
    library.umbel_head_bytes.argtypes = [pointer]
    library.umbel_head_bytes.restype = long
    library.umbel_head_screens.argtypes = [pointer]
    library.umbel_head_screens.restype = ctypes.c_int
    library.umbel_head_choose.argtypes = [pointer, pointer, long, long, *[pointer] * 8]
    library.umbel_head_choose.restype = None
    library.umbel_head_rows.argtypes = [pointer, pointer, long, long, pointer, long, pointer]
    library.umbel_head_rows.restype = None
    library.umbel_head_counters.argtypes = [pointer, pointer]
    library.umbel_head_counters.restype = None
    return library
