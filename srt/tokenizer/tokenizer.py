"""The tokenizer protocol, text ↔ tokens. prompt.py turns a prompt's parts into one list of ids.

Bytes are the common ground: every token stands for a byte string, so stop strings are found across
token boundaries, characters are never split in a stream, and detokenization is concatenation.
"""

import re
from typing import Protocol


class Tokenizer(Protocol):
    """A tokenizer as the runtime uses it. The fake is `ByteTokenizer`."""

    name: str
    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]
    special_ids: dict[str, int]  # text of control tokens → id
    chat_template: str | None  # Jinja source
    template_tokens: dict[str, str]  # variables of the template: bos_token, eos_token, …
    # Matches a place of a text (the beginning of the match; it may look at the character before) where the text can
    # be cut: encode(a + b, first=f) == encode(a, first=f) + encode(b, first=False). None: no such place is certain.
    boundary: re.Pattern[str] | None

    def encode(self, text: str, *, first: bool) -> list[int]:
        """Encodes plain text → ids; control tokens in the text stay text. `first`: the text starts the sequence
        (some tokenizers put a space there)."""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token; b"" for control tokens."""


class ByteTokenizer:
    """Encodes one token per byte, plus a few control tokens. For tests and for the oracle model.

    Ids 0-255 are bytes; 256 BOS; 257 EOS; 258 `<|im_start|>`; 259 `<|im_end|>`; the rest stand for common
    pairs and words, so that token boundaries and text boundaries differ as they do in real vocabularies.
    """

    name = "byte tokenizer"
    bos_id: int | None = 256
    eos_ids = frozenset({257})
    chat_template: str | None = None
    boundary: re.Pattern[str] | None = re.compile(r"(?<=[a-zA-Z0-9,]) ")  # one merge ends in a space: ". "

    _MERGES = (b" the", b"th", b"an", b"in", b"er", b"\n\n", b" a", b"es", "é".encode(), b"ing", b". ", b"END")

    def __init__(self) -> None:
        self.special_ids = {"<s>": 256, "</s>": 257, "<|im_start|>": 258, "<|im_end|>": 259}
        self.template_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
        self._bytes = [bytes([i]) for i in range(256)] + [b""] * 4 + list(self._MERGES)
        self.vocab_size = len(self._bytes)
        self._ids = {data: token for token, data in enumerate(self._bytes) if data}
        self._split = re.compile(
            b"|".join(re.escape(m) for m in sorted(self._MERGES, key=len, reverse=True)) + b"|.", re.DOTALL
        )

    def encode(self, text: str, *, first: bool) -> list[int]:
        return [self._ids[piece] for piece in self._split.findall(text.encode("utf-8"))]

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]
