"""A prompt's parts → one list of ids, encoding only what is new.

    parts     [ Text  Text ][ Generated ][ Text(control) Text ]
    runs      "constant text"    ids      <id> "constant text"       a run is encoded as one string
    blocks    [ about 1,024 characters ][ … ][ 64 ][ 64 ][ rest ]    cut where the tokenizer allows it (boundaries.py)

Blocks are found again by their text. The prompt of the next call of a program begins with the parts of the last one,
the prompts of a batch begin with the same examples, and the branches of a fork with the same document: what they
share is cut at the same places, so only what is behind it is encoded. A large block is made of small ones when it is
new, so a text that grows is encoded from its last small block on.
"""

import re
from collections.abc import Iterator, Sequence

from ..lang.errors import CapabilityError
from ..lang.prompt import Generated, Media, Part, Text
from .token_cache import TokenCache
from .tokenizer import Tokenizer

CACHE_BYTES = 64 * 2**20  # some 1,500,000 tokens
BLOCK = 1024  # characters, and more until the next boundary
SMALL_BLOCK = 64
LONG = 8192  # new characters: about 3 ms
_SCAFFOLDING = 1024  # characters; longer control text is split anew each time
_SCAFFOLDINGS = 1024  # control texts whose pieces are remembered; a template has a handful

Key = str | tuple[str]  # a text, or in a tuple the text that begins a sequence


class PromptEncoder:
    """A prompt's parts → ids, BOS once.

    Constant text is encoded in maximal runs: control tokens (which only scaffolding may contain) and
    generated ids end a run, part boundaries do not.

    Args:
        cache_bytes: of memory for the tokens of earlier texts; 0 encodes every text whole and anew.
    """

    def __init__(self, tokenizer: Tokenizer, *, cache_bytes: int = CACHE_BYTES) -> None:
        self.tokenizer = tokenizer
        self._asked = self._tokenized = 0  # characters
        self._cache = TokenCache(cache_bytes) if cache_bytes else None
        names = sorted(tokenizer.special_ids, key=len, reverse=True)  # the longest name wins
        self._control = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self._pieces: dict[str, list[str]] = {}

    @property
    def counters(self) -> dict[str, int]:
        """How many characters went through the tokenizer, and how many were found instead."""
        return {
            "tokenized_characters": self._tokenized,
            "reused_characters": max(0, self._asked - self._tokenized),  # what was learned may not be asked for yet
        }

    def encode(self, parts: Sequence[Part]) -> list[int]:
        """Raises CapabilityError when the prompt holds media, which this tokenizer cannot place."""
        ids: list[int] = []
        for item in self._items(parts):
            match item:
                case list():
                    ids += item
                case str():
                    self._extend(ids, item, first=False)
                case (text,):
                    self._extend(ids, text, first=True)
        return ids

    def is_long(self, parts: Sequence[Part]) -> bool:
        """Whether `encode` would take so long that it should not be done on an event loop."""
        if self._cache is None or sum(len(part.text) for part in parts if isinstance(part, Text)) < LONG:
            return False
        texts = (item for item in self._items(parts) if not isinstance(item, list))
        blocks = (block for text in texts for block in self._blocks(text, BLOCK))
        return sum(len(_text(block)) for block in blocks if block not in self._cache) >= LONG

    def new_texts(self, parts: Sequence[Part]) -> list[Key]:
        """What `encode` would have to encode of these parts, for `learn`; nothing where nothing is kept."""
        if self._cache is None:
            return []
        return [
            key
            for item in self._items(parts)
            if not isinstance(item, list)
            for block in self._blocks(item, BLOCK)
            if block not in self._cache
            for key in self._blocks(block, SMALL_BLOCK)
            if key not in self._cache
        ]

    def encode_texts(self, keys: Sequence[Key]) -> list[list[int]]:
        """Their ids. Changes nothing here, so another thread may do it; tokenizers let other threads run meanwhile."""
        encode = self.tokenizer.encode
        return [encode(key, first=False) if isinstance(key, str) else encode(key[0], first=True) for key in keys]

    def learn(self, keys: Sequence[Key], token_ids: Sequence[list[int]]) -> None:
        """Keep what `encode_texts` found."""
        assert self._cache is not None, "there are no new texts where nothing is kept"
        for key, ids in zip(keys, token_ids, strict=True):
            self._cache.put(key, ids)
            self._tokenized += len(_text(key))

    # ------------------------------------------------------------------ runs

    def _items(self, parts: Sequence[Part]) -> Iterator[Key | list[int]]:
        """Runs of text and ids between them. A run that begins the sequence comes in a tuple."""
        tokenizer = self.tokenizer
        beginning = True  # nothing but BOS so far
        if tokenizer.bos_id is not None:
            yield [tokenizer.bos_id]
        run: list[str] = []

        def flush() -> Iterator[Key]:
            text = "".join(run)
            run.clear()
            if text:
                yield (text,) if beginning else text

        for part in parts:
            match part:
                case Text(text, False):
                    run.append(text)
                case Text(text, True):
                    for piece in self._split(text):
                        special = tokenizer.special_ids.get(piece)
                        if special is None:
                            run.append(piece)
                            continue
                        for key in flush():
                            yield key
                            beginning = False
                        if special != tokenizer.bos_id or not beginning:  # the template may write BOS itself
                            yield [special]
                            beginning = False
                case Generated(_, token_ids):
                    for key in flush():
                        yield key
                        beginning = False
                    if token_ids:
                        yield list(token_ids)
                        beginning = False
                case Media(kind):
                    raise CapabilityError(
                        f"{tokenizer.name} reads text only; remove {kind}(...) or load a vision model"
                    )
        yield from flush()

    def _split(self, text: str) -> list[str]:
        """Control text → names of control tokens, and what is between them. Models have thousands of names."""
        if self._control is None:
            return [text]
        pieces = self._pieces.get(text)
        if pieces is None:
            pieces = self._control.split(text)
            if len(text) <= _SCAFFOLDING:
                if len(self._pieces) >= _SCAFFOLDINGS:
                    self._pieces.clear()
                self._pieces[text] = pieces
        return pieces

    # ------------------------------------------------------------------ blocks

    def _extend(self, ids: list[int], text: str, *, first: bool) -> None:
        self._asked += len(text)
        if self._cache is None:
            self._tokenized += len(text)
            ids += self.tokenizer.encode(text, first=first)
            return
        for block in self._blocks((text,) if first else text, BLOCK):
            ids += self._block(self._cache, block)

    def _block(self, cache: TokenCache, key: Key) -> Sequence[int]:
        """A large block is made of small ones."""
        known = cache.get(key)
        if known is not None:
            return known
        parts = tuple(self._blocks(key, SMALL_BLOCK))
        if len(parts) == 1:
            self._tokenized += len(_text(key))
            (ids,) = self.encode_texts(parts)
        else:
            ids = [token_id for part in parts for token_id in self._block(cache, part)]
        cache.put(key, ids)
        return ids

    def _blocks(self, key: Key, size: int) -> Iterator[Key]:
        """Cut at the first boundary behind every `size` characters."""
        text = _text(key)
        boundary = self.tokenizer.boundary
        start = 0
        while boundary is not None and len(text) - start > size:
            found = boundary.search(text, start + size)
            if found is None:
                break
            yield _part(key, text, start, found.start())
            start = found.start()
        if start == 0:
            yield key
        else:
            yield text[start:]


def _text(key: Key) -> str:
    return key if isinstance(key, str) else key[0]


def _part(key: Key, text: str, start: int, end: int) -> Key:
    """What begins a sequence is the first part of what began it."""
    return (text[start:end],) if start == 0 and isinstance(key, tuple) else text[start:end]
