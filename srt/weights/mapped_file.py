"""Maps a file, or several that continue each other, as one run of bytes.

Weights that stay as their file stores them are views of the mapping: pages are read when they are used, and processes
share them. What is only converted is read into memory instead, so its pages never count as this process's.

    files        [ piece 0        ][ piece 1       ][ piece 2  ]
    addresses    [ mapped         ][ mapped        ][ mapped   ]     where all but the last end with a page

Pieces of other lengths are read into memory, all of them.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...lang.errors import ModelError

MAP_FIXED = 0x10  # of Linux and macOS, which the mmap module does not name
PAGE = mmap.ALLOCATIONGRANULARITY


class MappedFile:
    """The bytes of `paths`, one after the other. Closed with the last reference to it and to its views.

    Raises:
        ModelError: a file cannot be read, or is empty.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._files = [_open(path) for path in paths]
        for file in self._files:
            weakref.finalize(self, os.close, file)
        self._starts = [0, *accumulate(map(_size, paths, self._files))]
        self._content: mmap.mmap | NDArray[np.uint8] = self._map()

    @property
    def size(self) -> int:
        return self._starts[-1]

    @property
    def content(self) -> memoryview:
        """Returns all bytes."""
        content = self._content if isinstance(self._content, mmap.mmap) else self._content.data
        return memoryview(content).toreadonly()

    def view(self, place: int, length: int) -> NDArray[np.uint8]:
        """Returns the bytes in the mapping."""
        return np.frombuffer(self.content, np.uint8, length, place)

    def read(self, place: int, length: int) -> NDArray[np.uint8]:
        """Reads bytes into memory.

        Raises:
            ModelError: a file has become shorter, or cannot be read any more.
        """
        content = np.empty(length, np.uint8)
        for index, (begin, end) in enumerate(pairwise(self._starts)):
            first, last = max(place, begin), min(place + length, end)
            if first < last:
                self._read(index, first - begin, content[first - place : last - place].data)
        return content

    def _read(self, index: int, start: int, target: memoryview) -> None:
        path = self.paths[index]
        while target:
            try:
                count = os.preadv(self._files[index], [target], start)
            except OSError as error:
                raise ModelError(f"{path} cannot be read any more ({error.strerror}); open the model again") from error
            if not count:
                raise ModelError(f"{path} has become shorter since it was opened; download it again")
            start, target = start + count, target[count:]

    def _map(self) -> "mmap.mmap | NDArray[np.uint8]":
        if len(self.paths) == 1:
            try:
                return mmap.mmap(self._files[0], 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise ModelError(f"{self.paths[0]} cannot be mapped ({error}); give a .gguf file") from error
        if any(start % PAGE for start in self._starts[:-1]):
            return self.read(0, self.size)
        whole = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        for file, (begin, end) in zip(self._files, pairwise(self._starts), strict=True):
            if not _map_over(address + begin, end - begin, file):
                return self.read(0, self.size)
        return whole


def _map_over(address: int, length: int, file: int) -> bool:
    """Maps the beginning of a file over pages that the process has → whether the system did."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
    return bool(libc.mmap(address, length, mmap.PROT_READ, mmap.MAP_PRIVATE | MAP_FIXED, file, 0) == address)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); give the path of a readable .gguf file") from error


def _size(path: Path, file: int) -> int:
    size = os.fstat(file).st_size
    if not size:
        raise ModelError(f"{path} is empty; download the GGUF file again")
    return size
