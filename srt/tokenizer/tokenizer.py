"""Converts text ↔ tokens: the Tokenizer protocol, and the Detokenizer, whose pieces are never taken back.

Bytes are the common ground: every token stands for a byte string, so stop strings are found across token boundaries,
characters are never split in a stream, and detokenization is concatenation. prompt.py turns a prompt's parts into one
list of ids.
"""

import codecs
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...fsm.errors import ConstraintRefused
from ...fsm.stops import Stops, stops_of
from ...fsm.tokens.vocabulary import Spellings
from ...lang.errors import ConstraintError
from ...lang.protocol import VocabularyInfo
from ...lang.sampling import SamplingParams


class VocabularyTokenizer(Protocol):
    """A tokenizer as constraints use it."""

    vocab_size: int
    eos_ids: frozenset[int]
    special_ids: dict[str, int]  # text of control tokens → id

    def encode(self, text: str, *, first: bool) -> list[int]:
        """Encodes plain text → ids; control tokens in the text stay text. `first`: the text starts the sequence
        (some tokenizers put a space there)."""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token; b"" for control tokens."""

    def spellings(self) -> Spellings:
        """Returns the bytes of all tokens."""


class Tokenizer(VocabularyTokenizer, Protocol):
    """A tokenizer as the runtime uses it. The fake is `ByteTokenizer`."""

    name: str
    bos_id: int | None
    closing_id: int | None  # ends a text of which a vector is made; None: nothing does
    chat_template: str | None  # Jinja source
    template_tokens: dict[str, str]  # variables of the template: bos_token, eos_token, …
    # Matches a place of a text (the beginning of the match; it may look at the character before) where the text can
    # be cut: encode(a + b, first=f) == encode(a, first=f) + encode(b, first=False). None: no such place is certain.
    boundary: re.Pattern[str] | None


def vocabulary_info(tokenizer: Tokenizer, model_size: int) -> VocabularyInfo:
    """Describes the tokens of a model for its clients. `model_size`: ids that the model has a row for."""
    size = min(tokenizer.vocab_size, model_size)  # a model may lack some tokens, or pad its rows
    return VocabularyInfo(size, tokenizer.bos_id, tuple(sorted(tokenizer.eos_ids)), tokenizer.special_ids)


class ByteTokenizer:
    """Encodes one token per byte, plus a few control tokens. For tests and for the oracle model.

    Ids 0-255 are bytes; 256 BOS; 257 EOS; 258 `<|im_start|>`; 259 `<|im_end|>`; the rest stand for common
    pairs and words, so that token boundaries and text boundaries differ as they do in real vocabularies.
    """

    name = "byte tokenizer"
    bos_id: int | None = 256
    eos_ids = frozenset({257})
    closing_id: int | None = None
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

    def spellings(self) -> Spellings:
        return Spellings.of(self._bytes)


MOST_STOPS = 256  # requests' stops that are kept
MOST_STOP_CHARACTERS = 16_384  # of all of them; each takes some 300 bytes, and more in an expression


class CompiledStops:
    """Compiles stop strings and expressions, and keeps the last ones for one thread: they grow in use."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[tuple[str, ...], tuple[str, ...]], Stops | None] = OrderedDict()
        self._characters = 0

    def of(self, sampling: SamplingParams) -> Stops | None:
        """Returns the compiled stop strings and expressions of a request; None without any.

        Raises:
            ConstraintError: an expression that cannot be used; the message names it.
        """
        strings, patterns = key = sampling.stop, sampling.stop_regex
        if not strings and not patterns:
            return None
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        try:
            compiled = self._kept[key] = stops_of(strings, patterns)
        except ConstraintRefused as error:
            raise ConstraintError(str(error)) from None
        self._characters += _characters(key)
        while len(self._kept) > MOST_STOPS or self._characters > MOST_STOP_CHARACTERS:
            self._characters -= _characters(self._kept.popitem(last=False)[0])
        return compiled


def _characters(stops: tuple[tuple[str, ...], tuple[str, ...]]) -> int:
    return sum(len(text) for texts in stops for text in texts)


@dataclass(frozen=True, slots=True)
class Kept:
    """The number of tokens that lie wholly inside the text, and the rest of the text after them."""

    count: int
    tail: str


class Detokenizer:
    """Turns the token ids of one continuation into text as they come.

        bytes so far   [ shown ............ | held back ...... ]
                                              the beginning of a stop string, perhaps, or of a character

    Only two things hold text back: bytes that may begin a stop string, and the first bytes of an incomplete character.
    Bytes that can never become a character are shown as U+FFFD, as `bytes.decode` does.

    Args:
        token_bytes: returns the bytes of a token, b"" for control tokens.
        stops: compiled stop strings and expressions, shared by continuations with the same stops; None for none.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stops: Stops | None = None) -> None:
        self._token_bytes = token_bytes
        self._stops = stops.matcher() if stops is not None else None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._data = bytearray()
        self._ends: list[int] = []  # per token, the end of its bytes
        self._decoded = 0  # bytes given to the decoder
        self._pieces: list[str] = []
        self._skipped = 0  # bytes of the first token that are no part of the text
        self.token_ids: list[int] = []

    @property
    def text(self) -> str:
        """The text shown so far; the whole text after `finish`."""
        return "".join(self._pieces)

    def skip(self, count: int) -> None:
        """Leaves the first `count` bytes out of the text: they belong to the prompt. Call it before the first token.

        The first token then crosses the beginning of the text, so no token of the text can be sent again."""
        assert count == self._skipped or not self.token_ids, "what has been shown is not taken back"
        self._skipped = count

    def feed(self, token_ids: Sequence[int]) -> str:
        """Adds tokens of a continuation that goes on → the text that is safe to show now, "" if none."""
        self._append(token_ids)
        pending = self._stops.pending if self._stops is not None else 0
        return self._show(len(self._data) - pending, final=False)

    def finish(self, token_ids: Sequence[int], text_bytes: int) -> str:
        """Adds the last tokens, with the length of the whole text in bytes → the text not shown yet."""
        self._append(token_ids)
        assert self._decoded <= text_bytes <= len(self._data), (
            f"the text ends at byte {text_bytes}, but {self._decoded} of {len(self._data)} bytes were shown"
        )
        return self._show(text_bytes, final=True)

    def kept(self, text_bytes: int, *, ends_with_stop_token: bool) -> Kept:
        """Returns the tokens whose KV may be reused when the finished text is sent again, and the text after them.

        A token that ended the text (end-of-sequence, a stop token) is not part of it. The tokens of a
        character that is split by the boundary move to the tail.
        """
        count = 0 if self._skipped else len(self.token_ids) - (1 if ends_with_stop_token else 0)
        while count and (self._ends[count - 1] > text_bytes or self._splits_character(count, text_bytes)):
            count -= 1
        start = self._ends[count - 1] if count else 0
        return Kept(count, bytes(self._data[start:text_bytes]).decode("utf-8", "replace"))

    def characters_before(self, tokens: Iterable[int]) -> list[int]:
        """Counts the characters of the finished text before each of these tokens, given by their numbers, in order.

        A character that several tokens spell counts as before the token after it."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        found: list[int] = []
        reached = count = 0
        for token in tokens:
            end = min(self._ends[token - 1] if token else 0, self._decoded)
            count += len(decoder.decode(bytes(self._data[reached:end])))
            reached = max(reached, end)
            found.append(count)
        return found

    # ------------------------------------------------------------------ how

    def _append(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            piece = self._token_bytes(token_id)
            if not self.token_ids:
                piece = piece[self._skipped :]
            self._data += piece
            self.token_ids.append(token_id)
            self._ends.append(len(self._data))
            if self._stops is not None:
                self._watch(piece)

    def _watch(self, piece: bytes) -> None:
        """Feeds the stop automaton.

        A match while the continuation goes on was overruled by `min_tokens`: the automaton continues from its
        state, and the matched text is held back while it may still begin a longer stop."""
        stops = self._stops
        assert stops is not None
        start = len(self._data) - len(piece)
        while (match := stops.feed(piece)) is not None:
            stops.match = None
            piece = bytes(self._data[match.end :])
            assert match.end > start, "a stop ends in the bytes that were fed"
            if not piece:
                return

    def _show(self, end: int, *, final: bool) -> str:
        if end <= self._decoded and not final:
            return ""
        text = self._decoder.decode(bytes(self._data[self._decoded : end]), final)
        self._decoded = max(self._decoded, end)
        if text:
            self._pieces.append(text)
        return text

    def _splits_character(self, count: int, text_bytes: int) -> bool:
        """Returns whether the boundary after `count` tokens lies inside a character of the text."""
        end = self._ends[count - 1]
        if end == text_bytes or not 0x80 <= self._data[end] < 0xC0:  # only a continuation byte can be inside
            return False
        around = bytes(self._data[max(0, end - 3) : min(text_bytes, end + 3)])
        offset = end - max(0, end - 3)
        whole = around.decode("utf-8", "replace")
        return around[:offset].decode("utf-8", "replace") + around[offset:].decode("utf-8", "replace") != whole
