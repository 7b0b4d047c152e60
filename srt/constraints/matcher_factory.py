"""Opens constraints for a model's vocabulary: holds its trie and masks, and the tokenizer for forced texts."""

from collections.abc import Callable
from pathlib import Path
from typing import assert_never

import msgspec

from ...fsm.engines.selection import Engines
from ...fsm.engines.source import Source
from ...fsm.errors import ConstraintRefused
from ...fsm.language import Chars, Concat, Grammar, Literal, Repeat, Spelled
from ...fsm.tokens.masks import Masks, Walk
from ...fsm.tokens.trie import kept_trie
from ...fsm.tokens.vocabulary import Vocabulary
from ...lang.errors import ModelError
from ..core.cache_folder import read_trusted
from ..core.messages import EngineConstraint
from ..tokenizer.tokenizer import Tokenizer
from .matcher import SharedConstraint

_ENOUGH = 1 << 30  # of a mask's fuel


class VocabularyMatcherFactory:
    """Opens constraints. Made once: about half a second for 262,144 tokens, without its tokenizer.

    Args:
        open_tokenizer: opens the model's own.
        vocab_size: width of the model's logits.
        walk: walks the trie; None takes numpy's.
        folder: keeps the trie for the next start; None makes it anew.
    """

    def __init__(
        self, open_tokenizer: Callable[[], Tokenizer], vocab_size: int, *, walk: Walk | None, folder: Path | None
    ) -> None:
        tokenizer = open_tokenizer()
        size = min(tokenizer.vocab_size, vocab_size)  # a model may lack some tokens
        self.eos_ids = frozenset(token for token in tokenizer.eos_ids if token < vocab_size)
        self._tokenizer = tokenizer
        vocabulary = Vocabulary(
            [tokenizer.token_bytes(token) for token in range(size)],
            self.eos_ids,
            control=[token for token in tokenizer.special_ids.values() if token < vocab_size],
            size=vocab_size,
        )
        trie = kept_trie(vocabulary, folder, _read_ours) if folder is not None else None
        masks = Masks(vocabulary, trie, walk=walk)
        self.trie = masks.trie
        self._engines = Engines(masks, encode=self._encode)

    @property
    def jumps_cut(self) -> int:
        return self._engines.counters.cut

    def open(self, compiled: EngineConstraint) -> SharedConstraint:
        match compiled.engine:
            case "fsm":
                return self._engines.open_grammar(msgspec.msgpack.decode(compiled.data, type=Grammar))
            case "llguidance":
                assert compiled.kind != "tools", "our own automata enforce them"
                source = Source(compiled.kind, compiled.data.decode(), compiled.whitespace)
                try:
                    return self._engines.open_llguidance(source, compiled.nbytes)
                except ConstraintRefused as error:
                    raise ConstraintRefused(compiled.why or str(error)) from error
            case _:
                assert_never(compiled.engine)

    def prepare(self) -> None:
        """Opens constraints whose masks walk the whole vocabulary, and makes llguidance's view of it."""
        plain = Repeat(Chars(((0x20, 0x10FFFF),)))
        for language in (Literal(b"a"), Repeat(Chars(((0x30, 0x7A),))), Concat((Literal(b'"'), Spelled(plain)))):
            state = self._engines.open_grammar(Grammar(language)).begin(b"a")
            state.prepare(_ENOUGH)
        self._engines.prepare_llguidance()

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, first=False)


def _read_ours(path: Path) -> bytes:
    """Reads a file that no other user can have written. Raises OSError for any other."""
    try:
        return read_trusted(path)
    except ModelError as error:
        raise PermissionError(str(error)) from error
