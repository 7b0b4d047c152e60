"""The tokens of simulated answers: a hash of the text before them, so that equal prompts have equal answers."""

import re
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ...fsm.tokens.vocabulary import Spellings
from ..core.batch import PICTURE_BASE
from ..tokenizer.tokenizer import Tokenizer
from .calls import MADE_UP

Hashes = NDArray[np.uint64]


def mix(values: Hashes) -> Hashes:
    """Computes splitmix64's finalizer, element by element; wraps around as arrays of uint64 do."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_rows(token_ids: NDArray[np.integer], positions: NDArray[np.integer]) -> Hashes:
    """Hashes tokens with their places. The sum of those of a text, which wraps around, is the hash of the text. [R]"""
    with np.errstate(over="ignore"):
        return mix(token_ids.astype(np.uint64) * np.uint64(0x100000001B3) + mix(positions.astype(np.uint64)))


class AnswerTokens(Protocol):
    """Chooses tokens of answers by hashes."""

    def pick(self, hashes: Hashes) -> NDArray[np.int64]: ...


class Words:
    """Tokens of a tokenizer that are words: their text is encoded to the same tokens again, mostly."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        word = re.compile(rb" ?[a-z]{2,}")
        ids = (token for token in range(tokenizer.vocab_size) if word.fullmatch(tokenizer.token_bytes(token)))
        found = np.fromiter(ids, dtype=np.int64)
        self._ids = found if len(found) else np.arange(tokenizer.vocab_size, dtype=np.int64)

    def pick(self, hashes: Hashes) -> NDArray[np.int64]:
        return self._ids[(hashes % np.uint64(len(self._ids))).astype(np.int64)]


class MadeUpTokens:
    """Tokens that no made-up prompt begins with."""

    def pick(self, hashes: Hashes) -> NDArray[np.int64]:
        return (hashes % np.uint64(PICTURE_BASE - MADE_UP)).astype(np.int64) + MADE_UP


class NumberTokenizer:
    """The tokenizer of prompts that are given as token ids. Texts are names of token sequences: see `name`."""

    name = "numbers"
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()
    closing_id: int | None = None
    chat_template: str | None = None
    boundary: re.Pattern[str] | None = None
    vocab_size = PICTURE_BASE

    def __init__(self) -> None:
        self.special_ids: dict[str, int] = {}
        self.template_tokens: dict[str, str] = {}
        self._named: dict[str, list[int]] = {}

    def text_of(self, token_ids: tuple[int, ...]) -> str:
        """Returns a text that is encoded to these tokens."""
        text = f"<{len(self._named)}>"
        self._named[text] = list(token_ids)
        return text

    def encode(self, text: str, *, first: bool) -> list[int]:
        return self._named[text]

    def token_bytes(self, token_id: int) -> bytes:
        return b" w"

    def spellings(self) -> Spellings:
        raise AssertionError("simulated calls have no constraints")
