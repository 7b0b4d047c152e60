"""Walking a trie of tokens beside an automaton, in C++. fsm/tokens/trie_walk.py is the twin, and says what work is."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from ....fsm.tokens.trie import Trie

_ROOM = 4_096  # pieces of work that a walk may leave beyond those it was given


class CpuTrieWalk:
    """The `fsm.trie_walk.Walk` of the native kernels. For one thread at a time.

    Args:
        library: `load_walk()` or `load_library()`.
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
        self._known: dict[str, tuple[NDArray[np.int32], int]] = {}  # arrays that most calls share, with their addresses

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
            *(self._kept("nodes", trie.nodes), self._kept("groups", trie.groups), trie.depth),
            *(self._kept("table", table), _address(work, np.int32), len(work), _address(bits, np.uint32)),
            *(self._kept("left", self._left), len(self._left), max(limit, 1), ctypes.addressof(self._visited)),
        )
        return self._left[:count].copy(), self._visited.value

    def _kept(self, name: str, array: NDArray[np.int32]) -> int:
        """Its address; asking numpy takes a microsecond."""
        known = self._known.get(name)
        if known is None or known[0] is not array:
            known = self._known[name] = (array, _address(array, np.int32))
        return known[1]


def _address(array: NDArray[np.generic], dtype: type[np.generic]) -> int:
    assert array.dtype == dtype, "nodes, tables and work are int32, masks uint32"
    assert array.flags.c_contiguous, "an array lies in one piece"
    return array.ctypes.data
