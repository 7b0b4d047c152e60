"""A tokenizer for models that were never trained: the words of the workloads, and bytes for all else.

Random weights need no particular tokenizer, but prompts should have about as many tokens as they have with a real one.
A word with the space before it is a token where it is among the most frequent; what is not is spelt in bytes.
"""

import re
from collections import Counter
from collections.abc import Iterable

from umbel.fsm.tokens.vocabulary import Spellings

_CONTROL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
PIECE = r" ?[A-Za-z]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]{1,3}|\s+"
_PIECE = re.compile(PIECE)


class WordTokenizer:
    """A `tokenizer.Tokenizer`. Ids: bytes, four control tokens, words by their frequency, and padding up to the size.

    Args:
        texts: from which the words come.
        size: of the vocabulary.
    """

    name = "words of the workloads"
    bos_id: int | None = 256
    eos_ids = frozenset({257})
    closing_id: int | None = None
    chat_template: str | None = None
    # Before a space between two letters a piece ends, whatever follows.
    boundary: re.Pattern[str] | None = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")

    def __init__(self, texts: Iterable[str], size: int) -> None:
        first_word = 256 + len(_CONTROL)
        assert size >= first_word, "every byte is a token"
        self.vocab_size = size
        self.special_ids = {text: 256 + number for number, text in enumerate(_CONTROL)}
        self.template_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        counts = Counter(piece for text in texts for piece in _PIECE.findall(text))
        # Of equally frequent ones in the order of the alphabet, so that all runs have the same.
        frequent = sorted(counts, key=lambda piece: (-counts[piece], piece))
        words = [piece for piece in frequent if len(piece.encode()) > 1][: size - first_word]
        self._ids = {word: first_word + number for number, word in enumerate(words)}
        self._bytes = [bytes([value]) for value in range(256)] + [b""] * len(_CONTROL)
        self._bytes += [word.encode() for word in words]

    def encode(self, text: str, *, first: bool) -> list[int]:
        ids: list[int] = []
        for piece in _PIECE.findall(text):
            token = self._ids.get(piece)
            if token is None:
                ids += piece.encode()
            else:
                ids.append(token)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def spellings(self) -> Spellings:
        return Spellings.of(self._bytes)
