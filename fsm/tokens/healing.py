"""Token healing: the first token of a constrained text may begin inside the token before it.

    prompt      ... The answer is | ␣ |            the prompt's last token is dropped, and sampled again among
    text                               yes          itself and the tokens that begin with it: "␣", "␣y", "␣yes"

A prompt that ends in the middle of what the tokenizer would write as one token leaves the model with a beginning that
it has never seen; healing lets it write that token.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from .explored import Explored
from .masks import NODES_PER_FUEL, NODES_PER_WALK, Mask
from .spelling import nodes_of_prefixes
from .trie import END, Section, Trie
from .trie_walk import Fuelled, work_of
from .vocabulary import pack


def grows(trie: Trie, said: bytes, texts: Iterable[bytes]) -> bool:
    """Whether a token begins with these bytes and goes on with a beginning of one of the texts, or past its end."""
    for text in texts:
        whole = said + text
        lengths = [length for length, _ in nodes_of_prefixes(trie, whole, 0, len(whole))]
        if (lengths and lengths[-1] > len(said)) or trie.find(whole) is not None:
            return True
    return False


class Healing:
    """The tokens that begin with some bytes and go on with a beginning of the constraint's texts.

    Made like a mask: `prepare` works on it, and can be interrupted.

    Args:
        said: what the token spells that may be replaced.
    """

    def __init__(self, explored: Explored, said: bytes) -> None:
        self._explored = explored
        masks = explored.masks
        node = masks.trie.find(said)
        start = explored.automaton.start
        below = [] if node is None else [Section(node + 1, int(masks.trie.nodes[node, END]))]
        self._left = work_of([section for section in below if section.end > section.begin], start)
        self._bits: NDArray[np.uint32] = np.zeros(masks.vocabulary.words, np.uint32)

    def prepare(self, fuel: int) -> int | None:
        """Works on → the fuel that is left, or None when more is needed.

        Raises:
            LimitExceeded: of the automaton.
        """
        masks, rows = self._explored.masks, Fuelled(self._explored.automaton, fuel)
        while len(self._left):
            if rows.fuel <= 0:
                return None
            self._left, visited = masks.walk(masks.trie, rows, self._left, self._bits, NODES_PER_WALK)
            rows.fuel -= 1 + visited // NODES_PER_FUEL
        return max(rows.fuel, 0)

    @property
    def possible(self) -> bool:
        """There is such a token."""
        assert not len(self._left), "prepare has to finish first"
        return bool(self._bits.any())

    def mask(self, token: int) -> Mask:
        """Those tokens, and the one that may be replaced."""
        assert not len(self._left), "prepare has to finish first"
        return Mask.of(self._bits | pack(np.array([token], np.int32), len(self._bits)))
