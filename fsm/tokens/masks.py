"""Masks: the tokens that may come next in a state of an automaton. Made when asked for, kept for all texts.

    inside a JSON string        the plain tokens are allowed at once, by their number of characters;
                                a walk visits the few that are not plain, and the plain ones that may be too long
    where words go on for long  tokens of letters and digits are allowed at once; a walk visits the others
    elsewhere                   a walk through the trie of all tokens, which ends early where little is allowed

A walk follows the trie and the transition table together, and asks for what is UNKNOWN in the table. Making a mask
takes fuel and can be interrupted, so no state of any constraint stalls the other requests. A walk that is interrupted,
or has visited as many nodes as it may, returns the nodes that it has not visited, as work for the next walk:

    work    [n, 3]  (begin, end, state): the sibling nodes from `begin` on, with all below them, up to `end`;
                    the text before them has led to `state`

The walk here is numpy, level by level, along the automaton in Python. A native one (srt/kernels/cpu) may be handed in,
which makes whole masks along an automaton of its own; both make the same masks of the same fuel.

`Endings` are masks of another kind: tokens by which a model says that a complete text is over, although they are no
part of it. After `24` a model says ` years`, `.` or a newline. Where the constraint allows none of these, what is left
of the model's wishes are further digits, and few models end a text with an end-of-sequence token in the middle of a
line. So where a text is complete, a token that begins with a blank or a punctuation mark counts as its end if the
constraint has no use for that character: it takes none there, or the text would be over right after it.

    [0-9]+           24 ▸ ` years` ends          [a-z ]+     go ▸ ` Home` does not: a blank could come
    [0-9]+[ \\n]?     24 ▸ ` years` ends          [0-9.]+     24 ▸ `.` is part of the text
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..automaton.automaton import UNKNOWN, Automaton, LazyAutomaton
from ..errors import Limits
from ..language import Grammar
from .trie import END, EVERYTHING, NO_TOKEN, NOT_PLAIN, NOT_WORDS, STEP, TOKEN, Section, Trie, build_trie
from .vocabulary import WORD_BYTES, Vocabulary, pack, pack_few, unpack_few

# ASCII that is no letter, no digit and no underscore.
SEPARATORS = bytes(byte for byte in range(128) if byte not in (*WORD_BYTES.tolist(), 0x5F))
FEW = 64  # up to so many tokens a mask is kept as their ids, and the sampler may compute their logits alone
NODES_PER_FUEL = 4_096  # visiting so many nodes natively takes as long as a transition in Python, or eight in C++
NODES_PER_WALK = 1 << 16
CACHE_BYTES = 64 << 20
MOST_ENTERED = 64  # nodes of one search for a longer token, each perhaps a new state
MOST_MAKING = 64  # masks in the making; what is begun and never finished goes
FEWEST_FIRST = 26  # letters and digits; with fewer of them a walk through all tokens is short enough
MOST_COUNTED = 48  # characters; longer plain tokens are allowed all together or looked at
MOST_WORD_SETS = 64  # with which words may begin, remembered
MOST_ENDINGS = 16  # masks of endings, by their sets of first bytes; constraints have one or two each
_ENTRY_BYTES = 1_024  # of an entry without its bits


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """The tokens that may come. `bits` of a mask with few tokens are made when they are asked for."""

    few: NDArray[np.int32] | None  # ascending; None: more than FEW
    _bits: NDArray[np.uint32] | None
    _words: int

    @classmethod
    def of(cls, bits: NDArray[np.uint32]) -> Mask:
        """Makes a mask. bits: [words], owned by the mask from now on."""
        if np.count_nonzero(bits) <= FEW:
            tokens = unpack_few(bits)
            if len(tokens) <= FEW:
                return cls(np.array(tokens, np.int32), None, len(bits))
        bits.flags.writeable = False
        return cls(None, bits, len(bits))

    @classmethod
    def only(cls, token: int, words: int) -> Mask:
        return cls(np.array([token], np.int32), None, words)

    @property
    def bits(self) -> NDArray[np.uint32]:
        """[words] bit t % 32 of word t // 32."""
        if self._bits is not None:
            return self._bits
        assert self.few is not None, "a mask has bits or tokens"
        return pack_few(self.few.tolist(), self._words)


class Masks:
    """The masks over one vocabulary: one for each engine. Not safe for threads.

    States that no token can tell apart, such as those of a string that may go on for long, have one mask.

    Args:
        vocabulary: ids are rows of the logits.
        trie: of the vocabulary; built when not given.
        walk: numpy's when not given.
        cache_bytes: bound of what is kept, reckoned by whole masks; those not used for the longest time go first.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        trie: Trie | None = None,
        *,
        walk: Walk | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.vocabulary = vocabulary
        self.trie = trie or build_trie(vocabulary)
        self.walk = walk or NumpyWalk()
        self.endings = Endings(self.trie, vocabulary.words)
        self._most_kept = max(1, cache_bytes // (4 * vocabulary.words + _ENTRY_BYTES))
        self._serials = itertools.count()
        self._kept: OrderedDict[tuple[int, int], Mask] = OrderedDict()
        self._making: OrderedDict[tuple[int, int], MaskWork] = OrderedDict()
        self.most_plain = int(self.trie.plain.max(initial=0))  # characters
        # [counted + 2, words] the plain tokens of at most 0, 1, 2, ... characters, and all
        self.plain = _plain_bits(self.trie.plain, vocabulary.words, min(self.most_plain, MOST_COUNTED))
        self._words: dict[bytes, NDArray[np.uint32]] = {b"": np.zeros(vocabulary.words, np.uint32)}
        self._maker = self.walk.maker(self)

    def register(self) -> int:
        """Numbers an automaton: masks are kept by it, so that they do not keep the automaton alive."""
        return next(self._serials)

    def automaton(self, grammar: Grammar, limits: Limits) -> LazyAutomaton:
        """Makes an automaton whose states `prepare` takes. Raises as `Automaton`."""
        return self.walk.automaton(grammar, limits)

    def prepare(self, serial: int, automaton: LazyAutomaton, state: int, fuel: int) -> tuple[Mask | None, int]:
        """Returns the mask of a state, or None when the fuel was not enough; and the fuel that is left.

        Any positive fuel is progress, which all who ask for the same mask share.

        Raises:
            LimitExceeded: of the automaton.
        """
        state = automaton.lookahead(state, self.vocabulary.longest)
        key = (serial, state)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            return kept, fuel
        work = self._making.get(key)
        if work is None:
            work = self._making[key] = self._maker(automaton, state)
            _trim(self._making, MOST_MAKING)
        fuel = work.resume(fuel)
        mask = work.mask
        if mask is not None:
            self._making.pop(key, None)
            self._kept[key] = mask
            _trim(self._kept, self._most_kept)
        return mask, fuel

    def countable(self, characters: int) -> int:
        """Returns the largest number of characters, not above this one, that `plain_bits` can tell from the next."""
        return characters if characters >= self.most_plain else min(characters, MOST_COUNTED)

    def plain_bits(self, characters: int) -> NDArray[np.uint32]:
        """Returns [words] of the plain tokens of at most so many characters, a countable number. The caller's own."""
        bits: NDArray[np.uint32] = self.plain[min(characters, len(self.plain) - 1)].copy()
        return bits

    def word_bits(self, first: bytes) -> NDArray[np.uint32]:
        """Returns [words] of the tokens of letters and digits that begin with one of these. The caller's own."""
        bits = self._words.get(first)
        if bits is None:
            begins = np.frombuffer(self.vocabulary.blob, np.uint8)
            tokens = np.flatnonzero(self.vocabulary.is_word)
            tokens = tokens[np.isin(begins[self.vocabulary.offsets[tokens]], list(first))]
            if len(self._words) > MOST_WORD_SETS:
                self._words.popitem()
            bits = self._words[first] = pack(tokens.astype(np.int32), self.vocabulary.words)
        return bits.copy()


class MaskWork(Protocol):
    """The mask of one state in the making."""

    mask: Mask | None  # when it is finished

    def resume(self, fuel: int) -> int:
        """Works on → the fuel that is left. Raises LimitExceeded, of the automaton."""


class _MaskWork:
    """Implements `MaskWork` with the walk of its masks."""

    __slots__ = ("_automaton", "_bits", "_left", "_masks", "_state", "mask")

    def __init__(self, masks: Masks, automaton: LazyAutomaton, state: int) -> None:
        self._masks = masks
        self._automaton = automaton
        self._state = state
        self.mask: Mask | None = None
        self._bits: NDArray[np.uint32] | None = None  # None: not begun
        self._left: NDArray[np.int32] = np.empty((0, 3), np.int32)

    def resume(self, fuel: int) -> int:
        masks, automaton = self._masks, self._automaton
        rows = Fuelled(automaton, fuel)
        if self._bits is None:
            if not automaton.expanded(self._state):  # as a whole: all bytes have tokens that begin with them
                before = automaton.steps
                automaton.expand(self._state)
                rows.fuel -= max(1, automaton.steps - before)
                if rows.fuel <= 0:
                    return 0
            self._bits, self._left = self._begin()
        while len(self._left):
            self._left, visited = masks.walk(masks.trie, rows, self._left, self._bits, NODES_PER_WALK)
            rows.fuel -= 1 + visited // NODES_PER_FUEL
            if rows.fuel <= 0 and len(self._left):
                return 0
        if automaton.accepting(self._state):
            self._bits |= masks.vocabulary.eos_mask
        self.mask = Mask.of(self._bits)
        return max(rows.fuel, 0)

    def _begin(self) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
        """Returns the tokens that are allowed without looking, and the work that finds the others."""
        automaton, state, trie = self._automaton, self._state, self._masks.trie
        plain = self._masks.countable(automaton.plain_run(state))
        if plain > 0:
            bits = self._masks.plain_bits(plain)
            sections = [NOT_PLAIN]
            if automaton.plain_limit(state) > plain:
                sections += trie.longer_than(plain)
        else:
            words = self._first_of_words()
            bits, sections = self._masks.word_bits(words), [NOT_WORDS if words else EVERYTHING]
        return bits, work_below(trie, sections, automaton.row(state), state)

    def _first_of_words(self) -> bytes:
        """Letters and digits that lead to one state, from which all of them lead back to it; b"" without such a state.
        The others are dead."""
        automaton = self._automaton
        row = automaton.row(self._state)[WORD_BYTES]
        live = row >= 0
        if np.count_nonzero(live) < FEWEST_FIRST:
            return b""
        target = int(row.max())
        if not (row[live] == target).all():
            return b""
        automaton.expand(target)
        back = (automaton.row(target)[WORD_BYTES] == target).all()
        return WORD_BYTES[live].tobytes() if back else b""


def _plain_bits(characters: NDArray[np.int32], words: int, counted: int) -> NDArray[np.uint32]:
    """Returns the plain tokens of at most 0, 1, 2, ... `counted` characters, and all of them."""
    bits = [np.zeros(words, np.uint32)]
    for number in range(1, counted + 1):
        bits.append(bits[-1] | pack(np.flatnonzero(characters == number).astype(np.int32), words))
    return np.stack([*bits, bits[-1] | pack(np.flatnonzero(characters > counted).astype(np.int32), words)])


def _trim(entries: OrderedDict[tuple[int, int], Any], most: int) -> None:  # Any: whatever the entries are
    while len(entries) > most:
        entries.popitem(last=False)


class Endings:
    """Masks of the tokens that begin with some bytes.

    Args:
        words: length of a mask.
    """

    def __init__(self, trie: Trie, words: int) -> None:
        self._trie = trie
        self._words = words
        self._kept: dict[bytes, NDArray[np.uint32]] = {}

    def mask(self, first: bytes) -> NDArray[np.uint32] | None:
        """Returns [words], shared: never written to. None without such tokens."""
        if not first:
            return None
        bits = self._kept.get(first)
        if bits is None:
            tokens = np.concatenate([self._trie.tokens_below(bytes([byte])) for byte in first])
            bits = pack(tokens.astype(np.int32), self._words)
            bits.flags.writeable = False
            if len(self._kept) >= MOST_ENDINGS:
                self._kept.clear()
            self._kept[first] = bits
        return bits


class Rows(Protocol):
    """The transitions, some of them not known yet."""

    @property
    def table(self) -> NDArray[np.int32]:
        """[states, 256] next state, DEAD or UNKNOWN; another array after `find`, if need be."""

    def find(self, state: int, byte: int) -> bool:
        """Makes an entry of the table known; False: not now, and the walk is to end. Raises what states raise."""


class Fuelled:
    """An automaton that is explored for as long as there is fuel: targets, each of which takes one.

    Attributes:
        fuel: what is left; below 0 where the last target took more than there was.
    """

    __slots__ = ("automaton", "fuel")

    def __init__(self, automaton: LazyAutomaton, fuel: int) -> None:
        self.automaton = automaton
        self.fuel = fuel

    @property
    def table(self) -> NDArray[np.int32]:
        assert isinstance(self.automaton, Automaton), "the table of another is walked along by its own walk"
        return self.automaton.table

    def find(self, state: int, byte: int) -> bool:
        if self.fuel <= 0:
            return False
        before = self.automaton.steps
        self.automaton.step(state, byte)
        self.fuel -= max(1, self.automaton.steps - before)
        return True


class Walk(Protocol):
    def automaton(self, grammar: Grammar, limits: Limits) -> LazyAutomaton:
        """Makes an automaton that this walks along fastest. Raises as `Automaton`."""

    def maker(self, masks: Masks) -> Callable[[LazyAutomaton, int], MaskWork]:
        """Returns what begins the mask of a state of an automaton from `automaton`."""

    def goes_on(self, trie: Trie, automaton: LazyAutomaton, begun: bytes, state: int) -> bool:
        """Tells whether a token that begins with `begun`, and is longer, is allowed: `begun`, not empty, has led to the
        state.

        After MOST_ENTERED states, one is taken to be allowed. Raises LimitExceeded, of the automaton.
        """

    def __call__(
        self, trie: Trie, rows: Fuelled, work: NDArray[np.int32], bits: NDArray[np.uint32], limit: int
    ) -> tuple[NDArray[np.int32], int]:
        """Sets the bits of the tokens that are let through.

        Args:
            work: [n, 3], n > 0.
            bits: [words] of a mask; written to.
            limit: of nodes to visit before the rest is handed back; at least one is visited where it is known.

        Returns:
            The work that is left, and the nodes visited.

        Raises:
            LimitExceeded: of the automaton.
        """


def work_of(sections: list[Section], state: int) -> NDArray[np.int32]:
    """Returns [n, 3] ranges of nodes, all entered in one state."""
    return np.array([(section.begin, section.end, state) for section in sections], np.int32).reshape(-1, 3)


def work_below(trie: Trie, sections: list[int], row: NDArray[np.int32], state: int) -> NDArray[np.int32]:
    """Returns [n, 3] whole sections entered in one state, whose row of the table is known.

    The subtrees of dead bytes are left out: they lie megabytes apart, and looking at one is a cache miss.
    """
    starts = trie.roots[sections][:, row >= 0]
    starts = starts[starts >= 0]
    work = np.empty((len(starts), 3), np.int32)
    work[:, 0] = starts
    work[:, 1] = trie.nodes[starts, END]
    work[:, 2] = state
    return work


class NumpyWalk:
    """Walks with numpy, level by level.

    Needs the children of every node: made at the first walk through a trie, forgotten with it.
    """

    def __init__(self) -> None:
        self._families: weakref.WeakKeyDictionary[Trie, _Families] = weakref.WeakKeyDictionary()

    def automaton(self, grammar: Grammar, limits: Limits) -> LazyAutomaton:
        return Automaton(grammar, limits)

    def maker(self, masks: Masks) -> Callable[[LazyAutomaton, int], MaskWork]:
        return partial(_MaskWork, masks)

    def goes_on(self, trie: Trie, automaton: LazyAutomaton, begun: bytes, state: int) -> bool:
        found = trie.find(begun)
        if found is None:
            return False
        columns = trie.columns
        depth, end = columns[3 * found + STEP] >> 8, columns[3 * found + END]
        states = [state]  # by depth below the node
        node, entered = found + 1, 0
        while node < end:
            step = columns[3 * node + STEP]
            del states[(step >> 8) - depth :]
            following = automaton.step(states[-1], step & 0xFF)
            if following < 0:
                node = columns[3 * node + END]
            elif columns[3 * node + TOKEN] != NO_TOKEN or entered == MOST_ENTERED:
                return True
            else:
                entered += 1
                states.append(following)
                node += 1
        return False

    def __call__(
        self, trie: Trie, rows: Rows, work: NDArray[np.int32], bits: NDArray[np.uint32], limit: int
    ) -> tuple[NDArray[np.int32], int]:
        families = self._families.get(trie)
        if families is None:
            families = self._families[trie] = _Families.of(trie)
        nodes, states = families.siblings(work[:, 0], work[:, 1], work[:, 2])
        left: list[NDArray[np.int32]] = []
        visited = 0
        goes_on = True
        while len(nodes):
            if visited >= limit:
                left.append(np.stack([nodes, trie.nodes[nodes, END], states], axis=1).astype(np.int32))
                break
            goes_on = goes_on and _find_all(rows, states, trie.nodes[nodes, STEP] & 0xFF)
            following = rows.table[states, trie.nodes[nodes, STEP] & 0xFF]
            unknown = following == UNKNOWN
            if unknown.any():
                apart = nodes[unknown]
                left.append(np.stack([apart, trie.nodes[apart, END], states[unknown]], axis=1).astype(np.int32))
            visited += len(nodes) - int(np.count_nonzero(unknown))
            live = following >= 0
            nodes, states = nodes[live], following[live]
            _allow(trie, nodes, bits)
            nodes, states = families.children(nodes, states)
        return (np.concatenate(left) if left else np.empty((0, 3), np.int32)), visited


def _find_all(rows: Rows, states: NDArray[np.int32], steps: NDArray[np.int32]) -> bool:
    """Asks for all that is not known; whether it was to be had."""
    unknown = rows.table[states, steps] == UNKNOWN
    for question in np.unique(states[unknown].astype(np.int64) << 8 | steps[unknown]).tolist():
        state, byte = question >> 8, question & 0xFF
        if rows.table.item(state, byte) == UNKNOWN and not rows.find(state, byte):  # a target is that of many bytes
            return False
    return True


def _allow(trie: Trie, nodes: NDArray[np.int32], bits: NDArray[np.uint32]) -> None:
    """Sets the bits of all tokens that end in these nodes."""
    tokens = trie.nodes[nodes, TOKEN]
    single = tokens[tokens >= 0]
    groups = nodes[tokens < NO_TOKEN].tolist()
    if groups:
        single = np.concatenate([single, np.array([t for node in groups for t in trie.tokens_at(node)], np.int32)])
    np.bitwise_or.at(bits, single >> 5, np.uint32(1) << (single & 31).astype(np.uint32))


@dataclass(frozen=True, slots=True)
class _Families:
    """Nodes by parent: those of parent p are members[first[p + 1] : first[p + 2]]; roots have the parent −1."""

    members: NDArray[np.int32]  # [nodes] ascending within a parent
    first: NDArray[np.int64]  # [nodes + 2]
    parents: NDArray[np.int32]  # [nodes]
    keys: NDArray[np.int64]  # [nodes] of members: parent, then node; ascending

    @classmethod
    def of(cls, trie: Trie) -> _Families:
        count = len(trie.nodes)
        depth = trie.nodes[:, STEP] >> 8
        parents = np.full(count, -1, np.int32)
        by_depth = np.argsort(depth, kind="stable")
        bounds = np.searchsorted(depth[by_depth], np.arange(1, int(depth.max(initial=0)) + 2))
        above: NDArray[np.int64] | None = None
        for low, high in itertools.pairwise(bounds):
            level = by_depth[low:high]
            if above is not None:
                parents[level] = above[np.searchsorted(above, level) - 1]
            above = level
        members = np.argsort(parents, kind="stable").astype(np.int32)
        first = np.searchsorted(parents[members], np.arange(-1, count + 1))
        keys = _keys(parents[members], members, count)
        return cls(members, first, parents, keys)

    def siblings(
        self, begins: NDArray[np.int32], ends: NDArray[np.int32], states: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Returns the nodes of each range that hang where its first one hangs, each with the state of its range."""
        parents, count = self.parents[begins], len(self.members)
        low = np.searchsorted(self.keys, _keys(parents, begins, count))
        high = np.searchsorted(self.keys, _keys(parents, ends, count))
        return self._spread(low, high, states)

    def children(
        self, nodes: NDArray[np.int32], states: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        return self._spread(self.first[nodes + 1], self.first[nodes + 2], states)

    def _spread(
        self, low: NDArray[np.int64], high: NDArray[np.int64], states: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        sizes = high - low
        begins = np.cumsum(sizes) - sizes
        places = np.arange(int(sizes.sum())) - np.repeat(begins, sizes) + np.repeat(low, sizes)
        return self.members[places], np.repeat(states, sizes)


def _keys(parents: NDArray[np.int32], nodes: NDArray[np.int32], count: int) -> NDArray[np.int64]:
    return (parents.astype(np.int64) + 1) * (count + 1) + nodes
