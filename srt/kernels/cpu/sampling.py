"""Chooses tokens and computes log-probabilities from full logits, in C++. Reference: sampling/gumbel.py."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ....lang.errors import EngineError
from ...core.batch import Draws, LogitsError, Summary


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
    assert array.dtype == dtype, "columns have the types that draw.py names"
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
