"""The tokens of a vocabulary as tries that a walk passes through in one direction.

Nodes lie in depth-first order, so a walk goes to the next node, or skips a subtree by jumping to its end:

    tokens  a, an, at, b          node   0   1   2   3
                                  byte   a   n   t   b
                                  end    3   2   3   4      where the subtree is over
                                  depth  1   2   2   1

There is one trie of all tokens, and there are tries of what remains when many are allowed without looking: of the
tokens that are not plain (see `Vocabulary.plain_characters`) and of the plain ones by their number of characters, for
the inside of JSON strings; of the tokens that are not words, for states that letters and digits lead back to.

`kept_trie` keeps a trie on disk, because reading it takes a quarter of the time of building it:
<folder>/<digest of the vocabulary>-<format>.trie, one file for each vocabulary, about 20 MB for 262,144 tokens, is the
SHA-256 of an archive of arrays, and the archive. The caller chooses the folder, and says who may write there. A file
that is damaged, or that cannot be written, costs the time and nothing else.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import itertools
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..automaton.automaton import LazyAutomaton
from .vocabulary import Vocabulary

END, TOKEN, STEP = 0, 1, 2  # columns of a node; STEP is depth << 8 | byte
NO_TOKEN = -1
EVERYTHING, NOT_WORDS, NOT_PLAIN = 0, 1, 2  # sections; after them the plain tokens by their number of characters
PLAIN_CLASSES = (1, 2, 3, 4, 6, 8, 12, 16, 24)  # most characters of a class; the last class has no end
_DIGEST = 32  # bytes, before the arrays
_FORMAT = 4  # to be raised when nodes or sections change their meaning


@dataclass(frozen=True, slots=True)
class Section:
    """A range of nodes: a trie of its own."""

    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class Trie:
    """The tries of one vocabulary in one array. Immutable; made by `build_trie`.

    A node's token is an id, NO_TOKEN, or −2 − i when several ids spell it: groups[i] of them, which follow there.
    """

    nodes: NDArray[np.int32]  # [nodes, 3] END, TOKEN, STEP
    groups: NDArray[np.int32]
    texts: NDArray[np.int32]  # [texts] ids by their bytes, one of each spelling
    leaves: NDArray[np.int32]  # [texts] their nodes in the trie of all
    sections: tuple[Section, ...]  # EVERYTHING, NOT_WORDS, NOT_PLAIN, the plain ones by PLAIN_CLASSES
    depth: int  # of the deepest node
    plain: NDArray[np.int32]  # `Vocabulary.plain_characters`
    token_bytes: Callable[[int], bytes]  # what a token spells

    @property
    def everything(self) -> Section:
        return self.sections[EVERYTHING]

    def longer_than(self, characters: int) -> list[int]:
        """Sections of the plain tokens of more characters, and perhaps shorter ones too."""
        most = (*PLAIN_CLASSES, None)
        return [
            section for section, longest in enumerate(most, NOT_PLAIN + 1) if longest is None or longest > characters
        ]

    def tokens_at(self, node: int) -> list[int]:
        """Returns ids that end in this node."""
        token = int(self.nodes[node, TOKEN])
        if token >= 0:
            return [token]
        if token == NO_TOKEN:
            return []
        count = int(self.groups[-2 - token])
        ids: list[int] = self.groups[-1 - token : -1 - token + count].tolist()
        return ids

    def find(self, prefix: bytes) -> int | None:
        """Returns the node of the trie of all tokens where those that begin with these bytes hang; None without any."""
        order = self._order
        first = bisect.bisect_left(order, prefix, key=self.token_bytes)
        if first == len(order) or not (text := self.token_bytes(order[first])).startswith(prefix):
            return None
        # The first text with the prefix made the nodes below it, so they lie in one row.
        return int(self.leaves[first]) - (len(text) - len(prefix))

    def tokens_below(self, prefix: bytes) -> NDArray[np.int32]:
        """Returns all ids whose bytes begin with the prefix, itself included, in no order."""
        node = self.find(prefix)
        if node is None:
            return np.empty(0, np.int32)
        tokens = self.nodes[node : self.nodes[node, END], TOKEN]
        several = [
            np.array(self.tokens_at(node + place), np.int32) for place in np.flatnonzero(tokens < NO_TOKEN).tolist()
        ]
        return np.concatenate([tokens[tokens >= 0], *several])

    @cached_property
    def roots(self) -> NDArray[np.int32]:
        """[sections, 256] the first node of each byte; −1 where no token begins with it."""
        table = np.full((len(self.sections), 256), -1, np.int32)
        top = self.nodes[:, STEP] >> 8 == 1
        for row, section in zip(table, self.sections, strict=True):
            nodes = section.begin + np.flatnonzero(top[section.begin : section.end])
            row[self.nodes[nodes, STEP] & 0xFF] = nodes
        return table

    @cached_property
    def _order(self) -> memoryview:
        """`texts` as plain integers, to search in."""
        return self.texts.data

    @cached_property
    def columns(self) -> memoryview:
        """The nodes' numbers one after the other: gives plain integers, faster than the array."""
        return self.nodes.reshape(-1).data

    @property
    def nbytes(self) -> int:
        arrays = (self.nodes, self.groups, self.texts, self.leaves, self.plain)
        return sum(array.nbytes for array in arrays)


def build_trie(vocabulary: Vocabulary) -> Trie:
    """Returns the tries of a vocabulary; half a second for 262,144 tokens."""
    texts = vocabulary.texts
    plain = vocabulary.plain_characters[texts]
    lowest = (1, *(most + 1 for most in PLAIN_CLASSES))
    highest = (*PLAIN_CLASSES, int(plain.max(initial=0)))
    lengths = [(plain >= low) & (plain <= high) for low, high in zip(lowest, highest, strict=True)]
    classes = [~vocabulary.is_word[texts], plain == 0, *lengths]
    parts, groups, sections = [], [], []
    nodes = group_length = 0
    whole = _Nodes.of(vocabulary, texts)
    for made in [whole, *(_Nodes.of(vocabulary, texts[chosen]) for chosen in classes)]:
        parts.append(made.table(nodes, group_length))
        groups.append(made.groups)
        sections.append(Section(nodes, nodes + len(made.step)))
        nodes += len(made.step)
        group_length += len(made.groups)
    return Trie(
        np.concatenate(parts),
        np.concatenate(groups),
        whole.texts,
        whole.leaves,
        tuple(sections),
        vocabulary.longest,
        vocabulary.plain_characters,
        vocabulary.token_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Nodes:
    """One trie, counted from node 0 and group 0."""

    end: NDArray[np.int32]
    token: NDArray[np.int32]
    step: NDArray[np.int32]
    groups: NDArray[np.int32]
    texts: NDArray[np.int32]
    leaves: NDArray[np.int32]

    def table(self, node: int, group: int) -> NDArray[np.int32]:
        """Returns the nodes when `node` nodes and `group` numbers of groups lie before them."""
        token = np.where(self.token < NO_TOKEN, self.token - group, self.token)
        return np.stack([self.end + node, token, self.step], axis=1).astype(np.int32)

    @classmethod
    def of(cls, vocabulary: Vocabulary, ordered: NDArray[np.int32]) -> _Nodes:
        """Builds one trie. ordered: ids sorted by their bytes, none of them empty."""
        lengths = vocabulary.lengths[ordered]
        common = _common_prefixes(vocabulary, ordered)
        same = common == lengths  # spells what the one before it spells
        first = np.flatnonzero(~same)
        fresh = (lengths - common)[first]  # nodes that a text adds after what it shares with the one before
        begin = np.cumsum(fresh) - fresh
        count = int(fresh.sum())
        offset = np.arange(count) - np.repeat(begin, fresh) + np.repeat(common[first], fresh)  # in its token, 0-based
        data = np.frombuffer(vocabulary.blob, np.uint8)
        byte = data[np.repeat(vocabulary.offsets[ordered[first]], fresh) + offset].astype(np.int32)
        depth = (offset + 1).astype(np.int32)
        leaves = (begin + fresh - 1).astype(np.int32)
        token = np.full(count, NO_TOKEN, np.int32)
        token[leaves] = ordered[first]
        groups = _groups(ordered, first, leaves, token)
        return cls(_subtree_ends(depth), token, depth << 8 | byte, groups, ordered[first], leaves)


def _groups(
    ordered: NDArray[np.int32], first: NDArray[np.int64], leaves: NDArray[np.int32], token: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Lists the ids that spell the same; writes to `token` where they are."""
    sizes = np.diff(np.append(first, len(ordered)))
    groups: list[int] = []
    for text in np.flatnonzero(sizes > 1).tolist():
        token[leaves[text]] = -2 - len(groups)
        groups += [int(sizes[text]), *ordered[first[text] : first[text] + sizes[text]].tolist()]
    return np.array(groups, np.int32)


def _common_prefixes(vocabulary: Vocabulary, ordered: NDArray[np.int32]) -> NDArray[np.int64]:
    """Counts, [n], the bytes that each text shares with the one before it."""
    data = np.frombuffer(vocabulary.blob, np.uint8)
    starts, lengths = vocabulary.offsets[ordered], vocabulary.lengths[ordered]
    common = np.zeros(len(ordered), np.int64)
    pairs = np.arange(1, len(ordered))
    shorter = np.minimum(lengths[1:], lengths[:-1])
    for offset in range(int(shorter.max(initial=0))):  # pairs that are equal so far; fewer at every offset
        pairs = pairs[shorter[pairs - 1] > offset]
        pairs = pairs[data[starts[pairs] + offset] == data[starts[pairs - 1] + offset]]
        if not len(pairs):
            break
        common[pairs] += 1
    return common


def _subtree_ends(depth: NDArray[np.int32]) -> NDArray[np.int32]:
    """Finds, [nodes], the next node that is not deeper: the next one of the same depth, or where the parent ends."""
    count = len(depth)
    ends = np.full(count, count, np.int32)
    above = np.empty(0, np.int64)  # nodes of the level above, ascending
    by_depth = np.argsort(depth, kind="stable")
    bounds = np.searchsorted(depth[by_depth], np.arange(1, int(depth.max(initial=0)) + 2))
    for low, high in itertools.pairwise(bounds):
        level = by_depth[low:high]
        following = np.append(level[1:], count)
        if len(above):
            parent_ends = ends[above[np.searchsorted(above, level) - 1]]
            following = np.minimum(following, parent_ends)
        ends[level] = following
        above = level
    return ends


def grows(trie: Trie, said: bytes, texts: Iterable[bytes]) -> bool:
    """Tells whether a token begins with these bytes and goes on with the beginning of a text, or past its end."""
    for text in texts:
        whole = said + text
        lengths = [length for length, _ in nodes_of_prefixes(trie, whole, 0, len(whole))]
        if (lengths and lengths[-1] > len(said)) or trie.find(whole) is not None:
            return True
    return False


def fewest_tokens(trie: Trie, text: bytes) -> list[int] | None:
    """Tokens that spell the text, as few as possible, of equally few the longest first; None when there are none.

    Works backwards: best[i] = the number of tokens for text[i:].
    """
    best: list[int | None] = [None] * len(text) + [0]
    chosen: list[tuple[int, int]] = [(0, 0)] * len(text)  # the token that begins there, and its length
    for begin in range(len(text) - 1, -1, -1):
        for length, token in tokens_of_prefixes(trie, text, begin):
            rest = best[begin + length]
            so_far = best[begin]
            if rest is not None and (so_far is None or rest + 1 <= so_far):
                best[begin] = rest + 1
                chosen[begin] = (token, length)
    if best[0] is None:
        return None
    tokens, place = [], 0
    while place < len(text):
        token, length = chosen[place]
        tokens.append(token)
        place += length
    return tokens


def fewest_of_any_text(automaton: LazyAutomaton, trie: Trie, most_visited: int) -> int:
    """No text of the automaton is spelled in fewer tokens; the fewest of any text where `most_visited` nodes of the
    trie are enough to find it.

    Breadth first: after n rounds all states are known that n tokens lead to.
    """
    columns = trie.columns
    seen = {automaton.start}
    reached = [automaton.start]
    tokens = visited = 0
    while reached and not any(map(automaton.accepting, reached)):
        tokens += 1
        following: dict[int, None] = {}
        for begun in reached:
            states = [begun]  # by depth
            node, end = trie.everything.begin, trie.everything.end
            while node < end:
                visited += 1
                if visited > most_visited:
                    return tokens
                step = columns[3 * node + STEP]
                del states[step >> 8 :]
                state = automaton.step(states[-1], step & 0xFF)
                if state < 0:
                    node = columns[3 * node + END]
                    continue
                if columns[3 * node + TOKEN] != NO_TOKEN and state not in seen:
                    seen.add(state)
                    following[state] = None
                states.append(state)
                node += 1
        reached = list(following)
    return tokens


def tokens_of_prefixes(trie: Trie, text: bytes, begin: int) -> list[tuple[int, int]]:
    """(length, token) of the tokens that text[begin:] begins with, the shortest first; one of each spelling."""
    return [(length, trie.tokens_at(node)[0]) for length, node in nodes_of_prefixes(trie, text, begin, len(text))]


def nodes_of_prefixes(trie: Trie, text: bytes, begin: int, end: int) -> list[tuple[int, int]]:
    """(length, node) of what text[begin:end] begins with and tokens spell, the shortest first."""
    found = []
    columns = trie.columns
    node, last = trie.everything.begin, trie.everything.end
    for place in range(begin, end):
        while node < last and columns[3 * node + STEP] & 0xFF != text[place]:
            node = columns[3 * node + END]
        if node >= last:
            break
        if columns[3 * node + TOKEN] != NO_TOKEN:
            found.append((place - begin + 1, node))
        last = columns[3 * node + END]
        node += 1
    return found


def kept_trie(vocabulary: Vocabulary, folder: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> Trie:
    """Returns the trie from its file; built, and written for the next time, where there is none.

    Args:
        read: gives a file's content, or raises OSError where it is not to be used.
    """
    path = folder / f"{vocabulary.digest}-{_FORMAT}.trie"
    trie = _read(vocabulary, path, read)
    if trie is None:
        trie = build_trie(vocabulary)
        with contextlib.suppress(OSError):
            _write(trie, path)
    return trie


def _read(vocabulary: Vocabulary, path: Path, read: Callable[[Path], bytes]) -> Trie | None:
    try:
        content = read(path)
        digest, arrays = content[:_DIGEST], memoryview(content)[_DIGEST:]
        if sha256(arrays).digest() != digest:
            return None
        with np.load(io.BytesIO(arrays), allow_pickle=False) as file:
            texts = file["texts"]
            if not ((texts >= 0) & (texts < vocabulary.size)).all():
                return None
            trie = Trie(
                nodes=file["nodes"],
                groups=file["groups"],
                texts=texts,
                leaves=file["leaves"],
                sections=tuple(Section(begin, end) for begin, end in file["sections"].tolist()),
                depth=vocabulary.longest,
                plain=file["plain"],
                token_bytes=vocabulary.token_bytes,
            )
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    return trie if _sound(trie, vocabulary) else None


def _sound(trie: Trie, vocabulary: Vocabulary) -> bool:
    """Checks what a walk relies on without looking: the file has a digest, so this is about files of another kind."""
    arrays = (trie.nodes, trie.groups, trie.texts, trie.leaves, trie.plain)
    if any(array.dtype != np.int32 for array in arrays) or trie.nodes.shape[1:] != (3,) or not trie.sections:
        return False
    count = len(trie.nodes)
    ends, depths = trie.nodes[:, END], trie.nodes[:, STEP] >> 8
    return bool(
        len(trie.texts) == len(trie.leaves) <= vocabulary.size == len(trie.plain)
        and (trie.plain >= 0).all()
        and (ends > np.arange(count)).all()
        and (ends <= count).all()
        and (depths <= trie.depth).all()
        and (np.array([section.end for section in trie.sections]) <= count).all()
    )


def _write(trie: Trie, path: Path) -> None:
    """Writes under another name until the file is whole."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".making-", suffix=".trie")
    try:
        with os.fdopen(handle, "wb") as file:
            sections = np.array([(section.begin, section.end) for section in trie.sections], np.int64)
            archive = io.BytesIO()
            arrays = {name: getattr(trie, name) for name in ("nodes", "groups", "texts", "leaves", "plain")}
            np.savez(archive, sections=sections, **arrays)
            file.write(sha256(archive.getbuffer()).digest())
            file.write(archive.getbuffer())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
