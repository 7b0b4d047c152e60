"""The spelling of every token of a model: the table that masks are made from.

Ids are rows of the model's logits. A token that spells nothing (control tokens, padding of the matrix, end of text) is
never part of a constrained text. Tokens that the tokenizer calls user-defined spell text like any other. Several ids
may spell the same bytes: masks allow all of them, and the tokenizer says which is canonical.

    blob     ... Ġ t h e c a t ...
    offsets       ^0      ^4    ^7         token i is blob[offsets[i] : offsets[i + 1]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

WORD_BYTES = np.array(sorted(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"), np.uint8)
TOKEN_BYTES = 1 << 20  # longest token; longer ones exist in no vocabulary, and 2**23 is what a trie's node can count
Encode = Callable[[str], list[int]]  # the canonical tokens of plain text in the middle of a sequence


MOST_ENCODED = 4_096  # texts whose tokens are remembered
LONGEST_ENCODED = 64  # characters of such a text


def remembered(encode: Encode) -> Encode:
    """Remembers the tokens of short texts: constraints force the same ones again and again, `": "` and `, "` above all,
    and a tokenizer takes 30 µs for each."""

    @lru_cache(MOST_ENCODED)
    def tokens_of(text: str) -> tuple[int, ...]:
        return tuple(encode(text))

    return lambda text: list(tokens_of(text)) if len(text) <= LONGEST_ENCODED else encode(text)


@dataclass(frozen=True, slots=True, eq=False)
class Spellings:
    """The bytes of many tokens without an object for each: number i is blob[offsets[i] : offsets[i + 1]]."""

    blob: bytes
    offsets: NDArray[np.integer]  # one more than there are tokens; the first is 0, and none is below the one before

    @classmethod
    def of(cls, tokens: Sequence[bytes]) -> Spellings:
        offsets = np.zeros(len(tokens) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, tokens), np.int64, len(tokens)), out=offsets[1:])
        return cls(b"".join(tokens), offsets)

    def first(self, count: int) -> Spellings:
        """Returns the first tokens, or all where there are fewer."""
        offsets = self.offsets[: count + 1]
        return Spellings(self.blob[: int(offsets[-1])], offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1


class Vocabulary:
    """A vocabulary: token id → bytes, and the ids that end a text. Immutable.

    Args:
        token_bytes: of every id in order; b"" for ids that stand for no text. `Spellings` take a tenth of the time.
        eos_ids: all ids that end a text: of the model, of its tokenizer, of the request.
        control: further ids that are never part of a text, whatever their bytes.
        size: width of the model's logits when it is padded beyond the table.

    Raises:
        ValueError: an id outside the table, no EOS id at all, or a token that is too long.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes] | Spellings,
        eos_ids: Iterable[int],
        *,
        control: Iterable[int] = (),
        size: int | None = None,
    ) -> None:
        self.size = len(token_bytes) if size is None else size
        self.eos_ids = tuple(sorted(set(eos_ids)))
        blank = {*self.eos_ids, *control}
        if self.size < len(token_bytes):
            raise ValueError(f"size={self.size} for {len(token_bytes)} tokens; it is at least their number")
        if not self.eos_ids:
            raise ValueError("a vocabulary without EOS ids; name the ids that end a text")
        outside = [token for token in blank if not 0 <= token < self.size]
        if outside:
            raise ValueError(f"EOS or control id {outside[0]} in a vocabulary of {self.size}; ids begin at 0")
        table = token_bytes if isinstance(token_bytes, Spellings) else Spellings.of(token_bytes)
        lengths = np.zeros(self.size, np.int64)
        lengths[: len(table)] = np.diff(table.offsets)
        self.blob = _without(table, sorted(token for token in blank if lengths[token]))
        lengths[list(blank)] = 0
        self.offsets: NDArray[np.int64] = np.zeros(self.size + 1, np.int64)
        np.cumsum(lengths, out=self.offsets[1:])
        self.longest = int(self.lengths.max(initial=0))  # bytes of the longest token
        if self.longest > TOKEN_BYTES:
            raise ValueError(f"a token of {self.longest} bytes; tokens have at most {TOKEN_BYTES}")
        self._bounds = self.offsets.data  # gives plain integers, faster than the array

    def __len__(self) -> int:
        return self.size

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes that a token spells; b"" when it is never part of a text."""
        assert token >= 0, "token ids are not negative"
        return self.blob[self._bounds[token] : self._bounds[token + 1]]

    def spell(self, tokens: Iterable[int]) -> bytes:
        """Returns the bytes that several tokens spell together."""
        return b"".join(map(self.token_bytes, tokens))

    def spells(self, tokens: Sequence[int], text: bytes) -> bool:
        """Tells whether the tokens are these bytes exactly, and all of them may be part of a text."""
        if not all(0 <= token < self.size and self.token_bytes(token) for token in tokens):
            return False
        return self.spell(tokens) == text

    def canonical(self, text: bytes, encode: Encode | None) -> list[int] | None:
        """Returns the tokenizer's own tokens of a text; None without a tokenizer, in the middle of a character, and
        where they spell another text."""
        if encode is None:
            return None
        try:
            tokens = encode(text.decode())
        except UnicodeDecodeError:
            return None
        return tokens if self.spells(tokens, text) else None

    @property
    def words(self) -> int:
        """Length of a mask: bit t % 32 of word t // 32 stands for token t."""
        return -(-self.size // 32)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[size] bytes of every token."""
        return np.diff(self.offsets)

    @cached_property
    def texts(self) -> NDArray[np.int32]:
        """Ids that spell something, ordered by what they spell; those that spell the same by id."""
        bounds, blob = self._bounds, self.blob
        spelling = np.flatnonzero(self.lengths).tolist()
        spelling.sort(key=lambda token: blob[bounds[token] : bounds[token + 1]])
        return np.array(spelling, np.int32)

    @cached_property
    def plain_characters(self) -> NDArray[np.int32]:
        """[size] characters of the tokens that are whole characters and stand for themselves inside a JSON string:
        no ASCII control characters, no `"`, no backslash, no U+2028 or U+2029 (see `automaton.characters.PLAIN`). 0 for
        all others."""
        data = np.frombuffer(self.blob, np.uint8)
        is_special = (data < 0x20) | (data == 0x22) | (data == 0x5C) | (data == 0x7F)
        is_special[2:] |= (data[:-2] == 0xE2) & (data[1:-1] == 0x80) & (data[2:] & 0xFE == 0xA8)  # ends of lines
        special = np.concatenate(([0], np.cumsum(is_special)))
        begins = np.concatenate(([0], np.cumsum((data & 0xC0) != 0x80)))  # bytes that begin a character
        starts, ends = self.offsets[:-1], self.offsets[1:]
        characters = (begins[ends] - begins[starts]).astype(np.int32)
        characters[special[ends] > special[starts]] = 0
        wide = np.concatenate(([0], np.cumsum(data >= 0x80)))
        for token in np.flatnonzero((wide[ends] > wide[starts]) & (characters > 0)).tolist():
            try:
                self.token_bytes(token).decode()
            except UnicodeDecodeError:
                characters[token] = 0
        return characters

    @cached_property
    def is_word(self) -> NDArray[np.bool_]:
        """[size] the tokens that are ASCII letters and digits and nothing else."""
        data = np.frombuffer(self.blob, np.uint8)
        others = np.concatenate(([0], np.cumsum(~np.isin(data, WORD_BYTES))))
        starts, ends = self.offsets[:-1], self.offsets[1:]
        words: NDArray[np.bool_] = (others[ends] == others[starts]) & (ends > starts)
        return words

    @cached_property
    def eos_mask(self) -> NDArray[np.uint32]:
        """[words] with the bits of the EOS ids."""
        return pack(np.array(self.eos_ids, np.int32), self.words)

    @cached_property
    def digest(self) -> str:
        """Names the table on disk."""
        return sha256(self.offsets.tobytes() + self.blob).hexdigest()


def pack(tokens: NDArray[np.int32], words: int) -> NDArray[np.uint32]:
    """Packs tokens: [words] with their bits."""
    bits = np.zeros(words, np.uint32)
    np.bitwise_or.at(bits, tokens >> 5, np.uint32(1) << (tokens & 31).astype(np.uint32))
    return bits


def unpack(bits: NDArray[np.uint32]) -> NDArray[np.int32]:
    """Returns the tokens of a mask, ascending."""
    occupied = np.flatnonzero(bits != 0)
    spread = np.unpackbits(bits[occupied].view(np.uint8), bitorder="little").reshape(-1, 32)
    word, bit = np.nonzero(spread)
    return (occupied[word] * 32 + bit).astype(np.int32)


def pack_few(tokens: Sequence[int], words: int) -> NDArray[np.uint32]:
    """Packs as `pack` some dozens of tokens, several times as fast."""
    bits = np.zeros(words, np.uint32)
    values: dict[int, int] = {}
    for token in tokens:
        values[token >> 5] = values.get(token >> 5, 0) | 1 << (token & 31)
    for word, value in values.items():
        bits[word] = value
    return bits


def unpack_few(bits: NDArray[np.uint32]) -> list[int]:
    """Unpacks as `unpack` masks with some dozens of words that are not 0, several times as fast."""
    words = np.flatnonzero(bits != 0)  # of booleans it is found four times as fast
    tokens = []
    for word, value in zip(words.tolist(), bits[words].tolist(), strict=True):
        while value:
            lowest = value & -value
            tokens.append(32 * word + lowest.bit_length() - 1)
            value ^= lowest
    return tokens


def _without(table: Spellings, tokens: Sequence[int]) -> bytes:
    """Returns the bytes of all tokens but these, which are in ascending order."""
    if not tokens:
        return table.blob
    begins = [0, *(int(table.offsets[token + 1]) for token in tokens)]
    ends = [*(int(table.offsets[token]) for token in tokens), len(table.blob)]
    return b"".join(table.blob[begin:end] for begin, end in zip(begins, ends, strict=True))
