"""Maps a file, or several that continue each other, for reading.

Weights that stay as their file stores them are views of the mapping: pages are read when they are used, and processes
share them. What is only converted is read into memory instead, so its pages never count as this process's.
"""

import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...lang.errors import ModelError


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
        self._maps = [_map(path, file) for path, file in zip(paths, self._files, strict=True)]
        self._starts = [0, *accumulate(map(len, self._maps))]

    @property
    def size(self) -> int:
        return self._starts[-1]

    @property
    def beginning(self) -> memoryview:
        """Returns the first of the files, all of it where it is the only one."""
        return memoryview(self._maps[0])

    def view(self, place: int, length: int) -> NDArray[np.uint8]:
        """Returns the mapped bytes; a copy in memory where they lie in several files."""
        ranges = list(self._ranges(place, length))
        if len(ranges) > 1:
            return self.read(place, length)
        ((index, start, _),) = ranges
        return np.frombuffer(self._maps[index], np.uint8, length, start)

    def read(self, place: int, length: int) -> NDArray[np.uint8]:
        """Reads bytes into memory.

        Raises:
            ModelError: a file has become shorter, or cannot be read any more.
        """
        content = np.empty(length, np.uint8)
        done = 0
        for index, start, count in self._ranges(place, length):
            while count:
                try:
                    got = os.preadv(self._files[index], [content[done : done + count].data], start)
                except OSError as error:
                    raise ModelError(
                        f"{self.paths[index]} cannot be read any more ({error.strerror}); open the model again"
                    ) from error
                if not got:
                    raise ModelError(f"{self.paths[index]} has become shorter since it was opened; download it again")
                start, done, count = start + got, done + got, count - got
        return content

    def _ranges(self, place: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Yields (file, first byte in it, bytes) for the files that hold [place, place + length)."""
        assert 0 < length <= self.size - place, "tensors are checked against the size"
        for index, (begin, end) in enumerate(zip(self._starts, self._starts[1:], strict=False)):
            first, last = max(place, begin), min(place + length, end)
            if first < last:
                yield index, first - begin, last - first


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); give the path of a readable .gguf file") from error


def _map(path: Path, file: int) -> mmap.mmap:
    try:
        return mmap.mmap(file, 0, access=mmap.ACCESS_READ)
    except ValueError as error:  # an empty file cannot be mapped
        raise ModelError(f"{path} is empty; download the GGUF file again") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be mapped ({error.strerror}); give the path of a .gguf file") from error
