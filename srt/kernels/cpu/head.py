"""Computes the head of a model on the CPU: hidden states → tokens, mostly without all logits.

A row that needs its best token, or one drawn with at most top_k and min_p, needs few of 262,144 logits. With `screen`,
a copy of the matrix in INT8 estimates all of them to within a proven bound, and exact logits are computed only for
tokens that can still be chosen. A matrix that is INT8 itself needs no copy; nor, with AVX2 alone, one in Q8_0. The
tokens are the same as those of a choice that reads all logits (`choose_from_logits` in the tests).

`CpuSampling` chooses from full logits. Its reference is sampling/sampler.py.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ....lang.errors import EngineError, ParameterError
from ...core.batch import Draws, LogitsError, RowNeed, RowRequests, Summary
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
        """`screen=False`: every row computes all its logits. `coarse=False`: estimates never use inputs of 7 bits, from
        which alone blocks are estimated.

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
        """Returns whether the head screens; False without `screen`, for other blocks, and if a weight is not finite."""
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
        rows = x.shape[0]
        draws = _check_requests(row_requests, rows)
        masks = self._masks(row_requests, rows) if row_requests.allowed else None
        mask_addresses = None if masks is None else masks.ctypes.data
        if not draws:
            return self._choose(x, (*(None,) * 5, mask_addresses))
        arrays = (
            np.ascontiguousarray(row_requests.kinds, dtype=np.uint8),
            np.ascontiguousarray(row_requests.inverse_temperatures, dtype=np.float64),
            np.ascontiguousarray(row_requests.keys, dtype=np.uint64),
            np.ascontiguousarray(row_requests.top_k, dtype=np.int32),
            np.ascontiguousarray(row_requests.min_p, dtype=np.float64),
        )
        return self._choose(x, (*(array.ctypes.data for array in arrays), mask_addresses))

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
        rows = x.shape[0]
        tokens, logits = np.empty(rows, dtype=np.int32), np.empty(rows, dtype=np.float32)
        self._library.umbel_head_choose(
            self._handle, x.data_ptr(), rows, x.stride(0), *row_requests, tokens.ctypes.data, logits.ctypes.data
        )
        return HeadChoice(tokens, logits)

    def _check(self, x: torch.Tensor) -> None:
        width = self._matrix.k
        plain = x.dtype is torch.float32 and x.is_cpu and x.ndim == 2
        if not plain or x.shape[1] != width or (x.stride(1) != 1 and width > 1):
            raise ParameterError(
                f"x is {tuple(x.shape)}, {x.dtype}, strides {x.stride()}, on {x.device}; give [rows, {width}] in "
                "float32 on the CPU, with elements of a row next to each other"
            )

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.umbel_head_free(self._handle)


_ARGMAX, _SAMPLE = int(RowNeed.ARGMAX), int(RowNeed.SAMPLE)


def _check_requests(row_requests: RowRequests, rows: int) -> bool:
    """Returns whether a row draws its token; False: all take the most likely one."""
    arrays = (
        row_requests.kinds,
        row_requests.inverse_temperatures,
        row_requests.keys,
        row_requests.top_k,
        row_requests.min_p,
    )
    if any(array.shape != (rows,) for array in arrays):
        raise ParameterError(
            f"row requests of shapes {[array.shape for array in arrays]} for {rows} rows; give one of each"
        )
    kinds = set(row_requests.kinds.tolist())
    if not kinds <= {_ARGMAX, _SAMPLE}:
        raise ParameterError(f"kinds={row_requests.kinds}; rows that need LOGITS are computed by `all`")
    if _SAMPLE not in kinds:
        return False
    drawn = row_requests.kinds == _SAMPLE
    scales, least = row_requests.inverse_temperatures[drawn], row_requests.min_p[drawn]
    if not (np.isfinite(scales).all() and (scales > 0).all()):
        raise ParameterError(
            f"inverse_temperatures={scales}; write finite numbers above 0, ARGMAX rows for temperature 0"
        )
    if not ((least >= 0).all() and (least <= 1).all()) or (row_requests.top_k[drawn] < 0).any():
        raise ParameterError(f"min_p={least}, top_k={row_requests.top_k[drawn]}; write 0 to 1, and 0 or more")
    return True


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


class CpuSampling:
    """Implements `batch.Chooser` with the native kernels, for float32 logits in the memory of the CPU.

    Args:
        library: `load_library()`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._sample = library.umbel_sample
        self._sample.argtypes = [ctypes.c_void_p, *[ctypes.c_long] * 3, *[ctypes.c_void_p] * 8]
        self._sample.restype = ctypes.c_int
        self._normalisers = library.umbel_log_normalisers
        self._normalisers.argtypes = [
            *(ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_long),
            *[ctypes.c_void_p] * 3,
        ]
        self._normalisers.restype = ctypes.c_int

    def choose(self, logits: torch.Tensor, draws: Draws) -> NDArray[np.int64]:
        """Chooses one token for each draw. logits: [_, vocab], rows may be strided."""
        count, vocab = len(draws), logits.shape[1]
        tokens = np.empty(count, dtype=np.int64)
        if not count:
            return tokens
        _require_rows(logits, draws.rows)
        masks = _addresses(draws.masks, vocab)
        status = self._sample(
            *(logits.data_ptr(), logits.stride(0), vocab, count, _address(draws.rows, np.int64)),
            *(_address(draws.inverse_temperatures, np.float64), _address(draws.keys, np.uint64)),
            *(_address(draws.top_k, np.int32), _address(draws.top_p, np.float64), _address(draws.min_p, np.float64)),
            *(None if masks is None else masks.ctypes.data, tokens.ctypes.data),
        )
        _check(status)
        return tokens

    def summarise(self, logits: torch.Tensor, rows: NDArray[np.int64], top: int) -> Summary:
        """Computes log-normalisers of rows and their `top` largest logits."""
        count, vocab = len(rows), logits.shape[1]
        top = min(top, vocab)
        summary = Summary(
            np.empty(count), np.empty((count, top), dtype=np.int32), np.empty((count, top), dtype=np.float32)
        )
        if not count:
            return summary
        _require_rows(logits, rows)
        status = self._normalisers(
            *(logits.data_ptr(), logits.stride(0), vocab, count, _address(rows, np.int64), top),
            *(summary.normalisers.ctypes.data, summary.top_tokens.ctypes.data, summary.top_logits.ctypes.data),
        )
        _check(status)
        return summary


def _require_rows(logits: torch.Tensor, rows: NDArray[np.int64]) -> None:
    """Checks what the kernel cannot: the type, the layout and the number of rows."""
    assert (logits.dtype, logits.device.type) == (torch.float32, "cpu"), "the kernels read float32 on the CPU"
    assert logits.stride(1) == 1, "the logits of a row lie side by side"
    assert int(rows.min()) >= 0, "a row that is not there"
    assert int(rows.max()) < len(logits), "a row that is not there"


def _address(array: NDArray[np.generic], dtype: type[np.generic]) -> int:
    assert array.dtype == dtype, "columns have the types that `batch.Draws` names"
    assert array.flags.c_contiguous, "a column lies in one piece"
    return array.ctypes.data


def _addresses(masks: Sequence[NDArray[np.uint32] | None] | None, vocab: int) -> NDArray[np.uint64] | None:
    if masks is None:
        return None
    for mask in masks:
        assert mask is None or len(mask) == (vocab + 31) // 32, "a mask has one bit for each token"
    return np.array([0 if mask is None else _address(mask, np.uint32) for mask in masks], dtype=np.uint64)


def _check(status: int) -> None:
    if status > 0:
        raise LogitsError
    if status < 0:
        raise EngineError("there is no memory left for choosing tokens; give the runtime a smaller pool")
