"""Makes masks of tokens along an automaton, in C++. The reference is fsm/tokens/masks.py, which defines work."""

import ctypes
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, finalize

import numpy as np
from numpy.typing import NDArray

from ....fsm.automaton.automaton import LazyAutomaton
from ....fsm.errors import Limits
from ....fsm.language import Grammar
from ....fsm.tokens.masks import FEW, Fuelled, Mask, Masks, MaskWork
from ....fsm.tokens.trie import EVERYTHING, NOT_PLAIN, PLAIN_CLASSES, Trie
from .automaton import AutomatonCalls, CpuAutomaton

_ROOM = 4_096  # pieces of work that a walk may leave beyond those it was given
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long


class _TrieView(ctypes.Structure):
    """struct TrieView."""

    _fields_ = (("nodes", _POINTER), ("groups", _POINTER), ("depth", _LONG))


class _MaskTables(ctypes.Structure):
    """struct MaskTables."""

    _fields_ = (
        *(("trie", _TrieView), ("words", _LONG), ("roots", _POINTER), ("sections", _LONG), ("longest", _POINTER)),
        *(("plain", _POINTER), ("counted", _LONG), ("most_plain", _LONG)),
        *(("word_tokens", _POINTER), ("word_begins", _POINTER), ("eos", _POINTER)),
    )


class CpuTrieWalk:
    """Implements `fsm.tokens.masks.Walk` with the native kernels, along automata of its own. For one thread at a time.

    It keeps Python's GIL: a walk takes microseconds, and a new part of a grammar is asked for in Python.

    Args:
        library: `load_library()` or `load_host_library()`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        def call(name: str, result: Any, *arguments: Any) -> Any:
            return ctypes.PYFUNCTYPE(result, *arguments)((f"umbel_{name}", library))

        self.calls = AutomatonCalls(library)
        self._walk = call(
            *("walk_trie", ctypes.c_int64, _POINTER, _POINTER, _POINTER),
            *(_POINTER, _LONG, _POINTER, _POINTER, _LONG, _LONG, _POINTER),
        )
        self._goes_on = call(
            "goes_on", ctypes.c_int64, _POINTER, _POINTER, _POINTER, ctypes.c_char_p, _LONG, ctypes.c_int32
        )
        self.make_masks = call("masks", _POINTER, _POINTER)
        self.free_masks = call("masks_free", None, _POINTER)
        self.make_mask = call("mask", _POINTER, ctypes.c_int32)
        self.free_mask = call("mask_free", None, _POINTER)
        self.resume = call("mask_resume", ctypes.c_int64, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER)
        self.fuel = ctypes.c_int64()
        self.fuel_address = ctypes.addressof(self.fuel)
        self.few: NDArray[np.int32] = np.empty(FEW, np.int32)
        self.few_address = _address(self.few, np.int32)
        self._left: NDArray[np.int32] = np.empty((2 * _ROOM, 3), np.int32)
        self._visited = ctypes.c_long()
        self._tries: WeakKeyDictionary[Trie, tuple[_TrieView, int]] = WeakKeyDictionary()

    def automaton(self, grammar: Grammar, limits: Limits) -> LazyAutomaton:
        """Makes an automaton in C++. Raises as `fsm.automaton.automaton.Automaton`."""
        return CpuAutomaton(self.calls, grammar, limits)

    def maker(self, masks: Masks) -> Callable[[LazyAutomaton, int], MaskWork]:
        """Returns what begins the mask of a state of an automaton from `automaton`."""
        return _Maker(self, masks)

    def __call__(
        self, trie: Trie, rows: Fuelled, work: NDArray[np.int32], bits: NDArray[np.uint32], limit: int
    ) -> tuple[NDArray[np.int32], int]:
        """Sets the bits of the allowed tokens; returns the work that is left, and the number of visited nodes.

        Raises:
            LimitExceeded: of the automaton.
        """
        assert isinstance(rows.automaton, CpuAutomaton), "automata come from `automaton`"
        assert bits.flags.writeable, "the mask is the caller's own"
        room = len(work) + trie.depth + _ROOM
        if len(self._left) < room:
            self._left = np.empty((2 * room, 3), np.int32)
        view, _ = self._seen(trie)
        self.fuel.value = rows.fuel
        count = self._walk(
            *(rows.automaton.handle, self.fuel_address, ctypes.addressof(view)),
            *(_address(work, np.int32), len(work), _address(bits, np.uint32)),
            *(_address(self._left, np.int32), len(self._left), max(limit, 1), ctypes.addressof(self._visited)),
        )
        rows.automaton.checked(count)
        rows.fuel = self.fuel.value
        return self._left[:count].copy(), self._visited.value

    def goes_on(self, trie: Trie, automaton: LazyAutomaton, begun: bytes, state: int) -> bool:
        """Tells whether a token that begins with `begun`, and is longer, is allowed. Raises LimitExceeded."""
        assert isinstance(automaton, CpuAutomaton), "automata come from `automaton`"
        view, roots = self._seen(trie)
        found = self._goes_on(automaton.handle, ctypes.addressof(view), roots, begun, len(begun), state)
        return bool(automaton.checked(found))

    def _seen(self, trie: Trie) -> tuple[_TrieView, int]:
        """The trie as C++ reads it, and where its roots lie."""
        seen = self._tries.get(trie)
        if seen is None:
            seen = self._tries[trie] = _view(trie), _any_address(trie.roots[EVERYTHING])
        return seen


class _Maker:
    """The masks of one vocabulary. Keeps alive what C++ reads."""

    def __init__(self, walk: CpuTrieWalk, masks: Masks) -> None:
        trie, vocabulary = masks.trie, masks.vocabulary
        self.walk = walk
        self.words = vocabulary.words
        self._spare: NDArray[np.uint32] | None = None
        tokens = np.flatnonzero(vocabulary.is_word)
        first = np.frombuffer(vocabulary.blob, np.uint8)[vocabulary.offsets[tokens]] if len(tokens) else tokens
        longest = [-1] * (NOT_PLAIN + 1) + [*PLAIN_CLASSES, -1]
        self._arrays = (
            trie.roots,
            np.array(longest, np.int32),
            masks.plain,
            tokens[np.argsort(first, kind="stable")].astype(np.int32),
            np.searchsorted(np.sort(first), np.arange(257)).astype(np.int32),
            vocabulary.eos_mask,
        )
        roots, longest_address, plain, word_tokens, word_begins, eos = map(_any_address, self._arrays)
        self._trie = trie
        view = _MaskTables(
            *(_view(trie), self.words, roots, len(trie.sections), longest_address, plain, len(masks.plain) - 2),
            *(masks.most_plain, word_tokens, word_begins, eos),
        )
        self.handle = walk.make_masks(ctypes.addressof(view))
        finalize(self, walk.free_masks, self.handle)

    def __call__(self, automaton: LazyAutomaton, state: int) -> MaskWork:
        assert isinstance(automaton, CpuAutomaton), "automata come from `automaton`"
        return _CpuMaskWork(self, automaton, state)

    def bits(self) -> NDArray[np.uint32]:
        """Returns [words] to write a mask to: those that the last mask gave back, because it has few tokens."""
        bits, self._spare = self._spare, None
        return np.empty(self.words, np.uint32) if bits is None else bits

    def give_back(self, bits: NDArray[np.uint32]) -> None:
        self._spare = bits


class _CpuMaskWork:
    """Implements `fsm.tokens.masks.MaskWork`."""

    __slots__ = ("__weakref__", "_automaton", "_bits", "_handle", "_maker", "mask")

    def __init__(self, maker: _Maker, automaton: CpuAutomaton, state: int) -> None:
        self._maker = maker
        self._automaton = automaton
        self._handle = maker.walk.make_mask(state)
        self._bits: NDArray[np.uint32] | None = None
        self.mask: Mask | None = None

    def __del__(self) -> None:
        self._maker.walk.free_mask(self._handle)

    def resume(self, fuel: int) -> int:
        maker, walk = self._maker, self._maker.walk
        if self._bits is None:
            self._bits = maker.bits()
        walk.fuel.value = fuel
        count = walk.resume(
            *(maker.handle, self._automaton.handle, self._handle),
            *(walk.fuel_address, self._bits.ctypes.data, walk.few_address),
        )
        self._automaton.checked(count)
        if count >= 0:
            if count <= FEW:
                self.mask = Mask(walk.few[:count].copy(), None, maker.words)
                maker.give_back(self._bits)
            else:
                self._bits.flags.writeable = False
                self.mask = Mask(None, self._bits, maker.words)
        return walk.fuel.value


def _view(trie: Trie) -> _TrieView:
    return _TrieView(_any_address(trie.nodes), _any_address(trie.groups), trie.depth)


def _any_address(array: NDArray[Any]) -> int:
    assert array.flags.c_contiguous, "an array lies in one piece"
    return array.ctypes.data


def _address(array: NDArray[np.generic], dtype: type[np.generic]) -> int:
    assert array.dtype == dtype, "nodes, tables and work are int32, masks uint32"
    return _any_address(array)
