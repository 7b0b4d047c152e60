"""Walks a trie of tokens along an automaton, in C++. The reference is fsm/tokens/masks.py, which defines work."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from ....fsm.tokens.masks import Rows
from ....fsm.tokens.trie import Trie

_ROOM = 4_096  # pieces of work that a walk may leave beyond those it was given
_FIND = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32)


class CpuTrieWalk:
    """Implements `fsm.tokens.masks.Walk` with the native kernels. For one thread at a time.

    It keeps Python's GIL: it calls Python for every unknown transition, and waiting for the GIL each time would take
    longer than the walk.

    Args:
        library: `load_library()`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        walk = ctypes.PYFUNCTYPE(
            ctypes.c_long,
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p, _FIND),
            *(ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p),
            *(ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p),
        )
        self._walk = walk(("umbel_walk_trie", library))
        self._find = _FIND(self._find_for_walk)
        self._left: NDArray[np.int32] = np.empty((2 * _ROOM, 3), np.int32)
        self._visited = ctypes.c_long()
        self._known: dict[str, tuple[NDArray[np.int32], int]] = {}  # arrays that most calls share, with their addresses
        self._table = ctypes.c_void_p()  # where the table lies that is walked along
        self._rows: Rows | None = None
        self._error: BaseException | None = None

    def __call__(
        self, trie: Trie, rows: Rows, work: NDArray[np.int32], bits: NDArray[np.uint32], limit: int
    ) -> tuple[NDArray[np.int32], int]:
        """Sets the bits of the allowed tokens; returns the work that is left, and the number of visited nodes.

        Raises:
            LimitExceeded: of the automaton.
        """
        assert bits.flags.writeable, "the mask is the caller's own"
        room = len(work) + trie.depth + _ROOM
        if len(self._left) < room:
            self._left = np.empty((2 * room, 3), np.int32)
        self._rows = rows
        self._table.value = self._kept("table", rows.table)
        count = self._walk(
            *(self._kept("nodes", trie.nodes), self._kept("groups", trie.groups), trie.depth),
            *(ctypes.addressof(self._table), self._find),
            *(_address(work, np.int32), len(work), _address(bits, np.uint32)),
            *(self._kept("left", self._left), len(self._left), max(limit, 1), ctypes.addressof(self._visited)),
        )
        self._rows = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._left[:count].copy(), self._visited.value

    def _find_for_walk(self, state: int, byte: int) -> int:
        """Finds a transition for the walk. An error ends the walk and is raised after it, never through C++."""
        assert self._rows is not None, "a walk is under way"
        try:
            found = self._rows.find(state, byte)
            self._table.value = self._kept("table", self._rows.table)
        except BaseException as error:
            self._error = error
            return 0
        return int(found)

    def _kept(self, name: str, array: NDArray[np.int32]) -> int:
        """Returns the address of an array, cached: numpy takes a microsecond for it."""
        known = self._known.get(name)
        if known is None or known[0] is not array:
            assert name != "table" or array.shape[1:] == (256,), "a row has a state for each byte"
            known = self._known[name] = (array, _address(array, np.int32))
        return known[1]


def _address(array: NDArray[np.generic], dtype: type[np.generic]) -> int:
    assert array.dtype == dtype, "nodes, tables and work are int32, masks uint32"
    assert array.flags.c_contiguous, "an array lies in one piece"
    return array.ctypes.data
