"""Tokens by which a model says that a complete text is over, although they are no part of it.

After `24` a model says ` years`, `.` or a newline. Where the constraint allows none of these, what is left of the
model's wishes are further digits, and few models end a text with an end-of-sequence token in the middle of a line. So
where a text is complete, a token that begins with a blank or a punctuation mark counts as its end if the constraint
has no use for that character: it takes none there, or the text would be over right after it.

    [0-9]+           24 ▸ ` years` ends          [a-z ]+     go ▸ ` Home` does not: a blank could come
    [0-9]+[ \\n]?     24 ▸ ` years` ends          [0-9.]+     24 ▸ `.` is part of the text
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .trie import Trie
from .vocabulary import WORD_BYTES, pack

# ASCII that is no letter, no digit and no underscore.
SEPARATORS = bytes(byte for byte in range(128) if byte not in (*WORD_BYTES.tolist(), 0x5F))
MOST_KEPT = 16  # sets of first bytes; constraints have one or two each


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
        """[words] shared: never written to. None without such tokens."""
        if not first:
            return None
        bits = self._kept.get(first)
        if bits is None:
            tokens = np.concatenate([self._trie.tokens_below(bytes([byte])) for byte in first])
            bits = pack(tokens.astype(np.int32), self._words)
            bits.flags.writeable = False
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[first] = bits
        return bits
