"""Walking a trie of tokens beside an automaton, in C++. The numpy twin, with what work is, is fsm/trie_walk.py."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from ....fsm.trie import Trie

_ROOM = 4_096  # pieces of work that a walk may leave beyond those it was given


class CpuTrieWalk:
    """The `fsm.trie_walk.Walk` of the native kernels. For one thread at a time.

    Args:
        library: `load_library()`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._walk = library.umbel_walk_trie
        self._walk.argtypes = [
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p),
            *(ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p),
            *(ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p),
        ]
        self._walk.restype = ctypes.c_long
        self._left: NDArray[np.int32] = np.empty((2 * _ROOM, 3), np.int32)
        self._visited = ctypes.c_long()

    def __call__(
        self, trie: Trie, table: NDArray[np.int32], work: NDArray[np.int32], bits: NDArray[np.uint32], limit: int
    ) -> tuple[NDArray[np.int32], int]:
        """Sets the bits of the tokens that are let through → the work that is left, and the nodes visited."""
        assert table.shape[1:] == (256,), "a row has a state for each byte"
        assert bits.flags.writeable, "the mask is the caller's own"
        room = len(work) + trie.depth + _ROOM
        if len(self._left) < room:
            self._left = np.empty((2 * room, 3), np.int32)
        count = self._walk(
            *(_address(trie.nodes, np.int32), _address(trie.groups, np.int32), trie.depth),
            *(_address(table, np.int32), _address(work, np.int32), len(work), _address(bits, np.uint32)),
            *(_address(self._left, np.int32), len(self._left), max(limit, 1), ctypes.addressof(self._visited)),
        )
        return self._left[:count].copy(), self._visited.value


def _address(array: NDArray[np.generic], dtype: type[np.generic]) -> int:
    assert array.dtype == dtype, "nodes, tables and work are int32, masks uint32"
    assert array.flags.c_contiguous, "an array lies in one piece"
    return array.ctypes.data
