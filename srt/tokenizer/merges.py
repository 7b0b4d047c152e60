"""Encodes the texts that constraints force, as a BPE tokenizer does, from tables instead of objects.

The `tokenizers` library takes 0.8 s and 100 MB for the 514,906 merges of Gemma's vocabulary, and holds the interpreter
lock meanwhile. An engine needs few tokens of it: those of quotes, names and punctuation that a constraint leaves no
choice about. So here the library has a vocabulary of single characters and no merges. It normalizes and cuts a text as
ever; the merges are made here, the one of lowest rank first, looked up in a sorted array.

    "nation"  ──library──▶  n a t i o n  ──merges──▶  n at ion  ──▶  nation
                            one word      ("a" "t"): rank 14 → "at"

`MergeTables` are made once for a model and kept in the cache folder (`weights/source.py`). Tokenizers of other kinds
(Unigram), and BPE with rules that are not implemented here, have none.
"""

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...fsm.tokens.vocabulary import Spellings
from .file import TokenizerFile, components, model_type, unknown_id
from .hf import HFTokenizer, library_tokenizer, without_prefix
from .vocabulary import Vocabulary

FORMAT = 1  # of the kept tables; raised when they would be made differently
_DIGEST = 32  # bytes, before the tables
_MOST_ID = (1 << 31) - 1
MOST_WORDS, MOST_PAIRS = 1 << 13, 1 << 15  # that a tokenizer remembers: some 10 MB
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


class _BPE(msgspec.Struct, frozen=True):
    """The model of tokenizer.json, as far as it matters here."""

    vocab: dict[str, int]
    merges: list[str | tuple[str, str]] = []
    dropout: float | None = None
    unk_token: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False


class MergeTables(msgspec.Struct, frozen=True):
    """The merges of a BPE tokenizer, and the tokenizer of its characters.

    Attributes:
        characters: tokenizer.json with the characters, the bytes and the added tokens as its vocabulary, no merges.
        pairs: int64 [merges], ascending: the left id << 32 | the right id.
        ranks: int32 [merges] of the pairs; the lowest is merged first.
        merged: int32 [merges] their ids.
        words: UTF-8 of the vocabulary, ascending, for tokenizers that look a whole word up first; else empty.
        word_ends: int64 [words], where each ends in `words`.
        word_ids: int32 [words].
        special: text of control tokens → id.
        control: ids that a text must not have.
    """

    characters: bytes
    pairs: bytes
    ranks: bytes
    merged: bytes
    words: bytes
    word_ends: bytes
    word_ids: bytes
    special: dict[str, int]
    control: list[int]

    def to_bytes(self) -> bytes:
        """Returns the file's content."""
        content = msgspec.msgpack.encode(self)
        return sha256(content).digest() + content

    @classmethod
    def of_bytes(cls, content: bytes) -> Self:
        """Parses the output of `to_bytes`. Raises ValueError for any other content."""
        rest = memoryview(content)[_DIGEST:]
        if sha256(rest).digest() != content[:_DIGEST]:
            raise ValueError("merge tables that are damaged")
        return msgspec.msgpack.decode(rest, type=cls)


def merge_tables(file: TokenizerFile, path: Path) -> MergeTables | None:
    """Makes the tables of a tokenizer; a second for 514,906 merges. None: it is not one that they can stand for.

    Raises:
        ModelError: the file cannot be read.
    """
    if model_type(file, path) != "BPE":
        return None
    try:
        model = msgspec.json.decode(file.model, type=_BPE)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # the library may know this form
    ids = model.vocab.values()
    if model.dropout or min(ids, default=0) < 0 or max(ids, default=0) > _MOST_ID or not _is_plain(model, file):
        return None
    try:
        merges = list(_numbered(model))
    except KeyError:  # a merge of what is not in the vocabulary: the library says so
        return None
    pairs = np.array([left << 32 | right for left, right, _ in merges], np.int64)
    order = np.argsort(pairs, kind="stable")
    if len(pairs) and (np.diff(pairs[order]) == 0).any():
        return None  # a pair that is merged twice
    words = sorted((word.encode(), token) for word, token in model.vocab.items()) if model.ignore_merges else []
    special = {token.content: token.id for token in file.added_tokens if token.special}
    return MergeTables(
        characters=msgspec.json.encode(_of_characters(model, file)),
        pairs=pairs[order].tobytes(),
        ranks=order.astype(np.int32).tobytes(),
        merged=np.array([token for _, _, token in merges], np.int32)[order].tobytes(),
        words=b"".join(word for word, _ in words),
        word_ends=np.cumsum([len(word) for word, _ in words], dtype=np.int64).tobytes(),
        word_ids=np.array([token for _, token in words], np.int32).tobytes(),
        special=special,
        control=sorted(set(special.values()) - {unknown_id(file, path)}),
    )


def _is_plain(model: _BPE, file: TokenizerFile) -> bool:
    """Returns whether single characters decide how a word begins to be merged, with and without the other tokens."""
    if any(len(added.content) == 1 and added.content not in model.vocab for added in file.added_tokens):
        return False  # the small vocabulary would have a character that the model has not
    if not model.ignore_merges:
        return True
    byte_level = any(part["type"] == "ByteLevel" for part in components(file.pre_tokenizer))
    whole = sum(len(token) == 1 for token in model.vocab) >= 256  # no character of a word is unknown
    return byte_level and whole and not model.byte_fallback and model.unk_token is None


def _numbered(model: _BPE) -> Iterator[tuple[int, int, int]]:
    """Yields the ids of every merge in order: left, right, merged. Raises KeyError for one outside the vocabulary."""
    ids = model.vocab
    for merge in model.merges:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        yield ids[left], ids[right], ids[left + right]


def _of_characters(model: _BPE, file: TokenizerFile) -> TokenizerFile:
    """Returns the tokenizer with the vocabulary that words are spelled in before anything is merged."""
    kept = {token: number for token, number in model.vocab.items() if len(token) == 1 or token in _BYTE_TOKENS}
    if model.unk_token is not None and model.unk_token in model.vocab:
        kept[model.unk_token] = model.vocab[model.unk_token]
    for token in file.added_tokens:
        kept[token.content] = model.vocab.get(token.content, token.id)
    small: dict[str, object] = {
        "type": "BPE",
        "vocab": kept,
        "merges": [],
        "unk_token": model.unk_token,
        "fuse_unk": model.fuse_unk,
        "byte_fallback": model.byte_fallback,
    }
    bare, _, _ = without_prefix(file)
    return msgspec.structs.replace(bare, model=msgspec.Raw(msgspec.json.encode(small)))


class MergeTokenizer:
    """Implements `VocabularyTokenizer` from tables.

    Args:
        eos_ids: the tokens that end a text.
        path: of tokenizer.json, for messages.
        open_whole: opens the library's tokenizer, for the rare text that must not have its usual tokens.
    """

    def __init__(
        self,
        tables: MergeTables,
        vocabulary: Vocabulary,
        *,
        eos_ids: Iterable[int],
        path: Path,
        open_whole: Callable[[], HFTokenizer],
    ) -> None:
        self.vocab_size = len(vocabulary)
        self.eos_ids = frozenset(eos_ids)
        self.special_ids = tables.special
        self._vocabulary = vocabulary
        self._control = frozenset(tables.control)
        self._pairs = np.frombuffer(tables.pairs, np.int64)
        self._ranks = np.frombuffer(tables.ranks, np.int32)
        self._merged = np.frombuffer(tables.merged, np.int32)
        self._words = _Words(tables) if tables.word_ids else None
        self._characters = library_tokenizer(tables.characters, path)
        self._open_whole = open_whole
        # Constraints force the same names again and again: of a word, and of a pair in another one, it is known how.
        self._merge = lru_cache(MOST_WORDS)(self._merged_word)
        self._find = lru_cache(MOST_PAIRS)(self._looked_up)

    def token_bytes(self, token_id: int) -> bytes:
        return self._vocabulary.token_bytes(token_id)

    def spellings(self) -> Spellings:
        return Spellings(self._vocabulary.blob, self._vocabulary.offsets)

    def encode(self, text: str, *, first: bool) -> list[int]:
        """Encodes plain text in the middle of a sequence → ids: those of `HFTokenizer`."""
        assert not first, "a constrained text does not begin a sequence"
        encoding = self._characters.encode(text, add_special_tokens=False)
        tokens: list[int] = []
        for _, group in itertools.groupby(zip(encoding.word_ids, encoding.ids, encoding.tokens, strict=True), _word):
            symbols = list(group)
            known = None if self._words is None else self._words.find("".join(symbol[2] for symbol in symbols))
            tokens += self._merge(tuple([symbol[1] for symbol in symbols])) if known is None else [known]
        if self._control.isdisjoint(tokens):
            return tokens
        return self._whole.encode(text, first=False)

    @cached_property
    def _whole(self) -> HFTokenizer:
        return self._open_whole()

    def _merged_word(self, symbols: tuple[int, ...]) -> list[int]:
        """Merges neighbours, those of the lowest rank first and of equal ones the leftmost, until none can be."""
        find = self._find
        ids: list[int | None] = list(symbols)  # None: merged into the one before
        ahead, back = list(range(1, len(ids) + 1)), list(range(-1, len(ids) - 1))
        waiting = [
            (rank, place, merged)
            for place, pair in enumerate(itertools.pairwise(symbols))
            if (found := find(*pair)) is not None
            for rank, merged in [found]
        ]
        heapq.heapify(waiting)
        while waiting:
            rank, place, merged = heapq.heappop(waiting)
            left, after = ids[place], ahead[place]
            right = ids[after] if after < len(ids) else None
            if left is None or right is None or find(left, right) != (rank, merged):
                continue  # one of the two is part of another merge
            ids[place], ids[after] = merged, None
            ahead[place] = ahead[after]
            if ahead[after] < len(ids):
                back[ahead[after]] = place
            for begin, end in ((back[place], place), (place, ahead[place])):
                first, second = ids[begin] if begin >= 0 else None, ids[end] if end < len(ids) else None
                if first is not None and second is not None and (found := find(first, second)) is not None:
                    heapq.heappush(waiting, (found[0], begin, found[1]))
        return [token for token in ids if token is not None]

    def _looked_up(self, left: int, right: int) -> tuple[int, int] | None:
        """Returns rank and id of a pair's merge; None: it is not merged."""
        pair = left << 32 | right
        place = int(np.searchsorted(self._pairs, pair))
        if place == len(self._pairs) or self._pairs[place] != pair:
            return None
        return int(self._ranks[place]), int(self._merged[place])


def _word(symbol: tuple[int, int, str]) -> int:
    return symbol[0]


class _Words:
    """Finds whole words in a vocabulary."""

    def __init__(self, tables: MergeTables) -> None:
        self._text = tables.words
        self._ends = np.frombuffer(tables.word_ends, np.int64)
        self._ids: NDArray[np.int32] = np.frombuffer(tables.word_ids, np.int32)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, place: int) -> bytes:
        begin = int(self._ends[place - 1]) if place else 0
        return self._text[begin : int(self._ends[place])]

    def find(self, word: str) -> int | None:
        """Returns the id of a word; None: it is none of the vocabulary."""
        wanted = word.encode()
        place = bisect_left(self, wanted)
        return int(self._ids[place]) if place < len(self) and self[place] == wanted else None
