"""Text ↔ tokens: the seam, and how a prompt's parts become one list of ids.

Bytes are the common ground: every token stands for a byte string, so stop strings are found across
token boundaries, characters are never split in a stream, and detokenization is concatenation.
"""

import re
from collections.abc import Sequence
from typing import Protocol

from ..lang.errors import CapabilityError
from ..lang.prompt import Generated, Media, Part, Text


class Tokenizer(Protocol):
    """What the runtime needs of a tokenizer. The fake is `ByteTokenizer`."""

    name: str
    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]
    special_ids: dict[str, int]  # text of control tokens → id
    chat_template: str | None  # Jinja source
    template_tokens: dict[str, str]  # what the template may name: bos_token, eos_token, …

    def encode(self, text: str, *, first: bool) -> list[int]:
        """Plain text → ids; control tokens in the text stay text. `first`: the text starts the sequence
        (some tokenizers put a space there)."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; b"" for control tokens."""


class PromptEncoder:
    """A prompt's parts → ids, BOS once.

    Constant text is encoded in maximal runs: control tokens (which only scaffolding may contain) and
    generated ids end a run, part boundaries do not.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        names = sorted(tokenizer.special_ids, key=len, reverse=True)  # the longest name wins
        self._control = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def encode(self, parts: Sequence[Part]) -> list[int]:
        """Raises CapabilityError when the prompt holds media, which this tokenizer cannot place."""
        tokenizer = self.tokenizer
        ids: list[int] = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        start = len(ids)
        run: list[str] = []

        def flush() -> None:
            text = "".join(run)
            run.clear()
            if text:
                ids.extend(tokenizer.encode(text, first=len(ids) == start))

        for part in parts:
            match part:
                case Text(text, False):
                    run.append(text)
                case Text(text, True):
                    for piece in self._control.split(text) if self._control else [text]:
                        special = tokenizer.special_ids.get(piece)
                        if special is None:
                            run.append(piece)
                            continue
                        flush()
                        if special != tokenizer.bos_id or len(ids) > start:  # the template may write BOS itself
                            ids.append(special)
                case Generated(_, token_ids):
                    flush()
                    ids.extend(token_ids)
                case Media(kind):
                    raise CapabilityError(
                        f"{tokenizer.name} reads text only; remove {kind}(...) or load a vision model"
                    )
        flush()
        return ids


class ByteTokenizer:
    """One token per byte, then a few control tokens. For tests and for the oracle model.

    Ids 0-255 are bytes; 256 BOS; 257 EOS; 258 `<|im_start|>`; 259 `<|im_end|>`; the rest stand for common
    pairs and words, so that token boundaries and text boundaries differ as they do in real vocabularies.
    """

    name = "byte tokenizer"
    bos_id: int | None = 256
    eos_ids = frozenset({257})
    chat_template: str | None = None

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
