"""Opens constraints for a model's vocabulary: holds its trie and masks, and the tokenizer for forced texts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import msgspec

from ...fsm.engines.selection import Engines
from ...fsm.engines.source import Source
from ...fsm.errors import ConstraintRefused
from ...fsm.language import Chars, Concat, Grammar, Literal, Repeat, Spelled
from ...fsm.tokens.masks import Masks, Walk
from ...fsm.tokens.trie import Trie, build_trie, kept_trie
from ...fsm.tokens.vocabulary import Vocabulary
from ...lang.errors import ModelError
from ..core.cache_folder import read_trusted
from ..core.messages import EngineConstraint
from ..tokenizer.tokenizer import VocabularyTokenizer
from .matcher import SharedConstraint

_ENOUGH = 1 << 30  # of a mask's fuel


@dataclass(frozen=True, slots=True)
class ConstraintVocabulary:
    """A model's vocabulary as constraints read it, and the tokenizer of forced texts."""

    tokenizer: VocabularyTokenizer
    vocabulary: Vocabulary
    trie: Trie


def open_vocabulary(
    open_tokenizer: Callable[[], VocabularyTokenizer], folder: Path | None, vocab_size: int
) -> ConstraintVocabulary:
    """Opens a vocabulary; 0.15 s for 262,144 tokens whose tokenizer and trie are kept.

    Args:
        folder: keeps the trie for the next start; None makes it anew.
        vocab_size: width of the model's logits.
    """
    tokenizer = open_tokenizer()
    vocabulary = Vocabulary(
        tokenizer.spellings().first(vocab_size),  # the model may lack some
        [token for token in tokenizer.eos_ids if token < vocab_size],
        control=[token for token in tokenizer.special_ids.values() if token < vocab_size],
        size=vocab_size,
    )
    trie = build_trie(vocabulary) if folder is None else kept_trie(vocabulary, folder, _read_ours)
    return ConstraintVocabulary(tokenizer, vocabulary, trie)


class VocabularyMatcherFactory:
    """Opens constraints over an open vocabulary.

    Args:
        walk: walks the trie; None takes numpy's.
    """

    def __init__(self, opened: ConstraintVocabulary, walk: Walk | None) -> None:
        self.eos_ids = frozenset(opened.vocabulary.eos_ids)
        self.trie = opened.trie
        self._tokenizer = opened.tokenizer
        self._engines = Engines(Masks(opened.vocabulary, opened.trie, walk=walk), encode=self._encode)

    @property
    def jumps_cut(self) -> int:
        return self._engines.counters.cut

    def open(self, compiled: EngineConstraint) -> SharedConstraint:
        match compiled.engine:
            case "fsm":
                return self._engines.open_grammar(msgspec.msgpack.decode(compiled.data, type=Grammar))
            case "llguidance":
                kind = compiled.kind
                assert kind != "tools", "our own automata enforce them"
                assert kind != "expression", "likewise"
                source = Source(kind, compiled.data.decode(), compiled.whitespace)
                try:
                    return self._engines.open_llguidance(source, compiled.nbytes)
                except ConstraintRefused as error:
                    raise ConstraintRefused(compiled.why or str(error)) from error
            case _:
                assert_never(compiled.engine)

    def prepare(self) -> None:
        """Opens constraints whose masks walk the whole vocabulary."""
        plain = Repeat(Chars(((0x20, 0x10FFFF),)))
        for language in (Literal(b"a"), Repeat(Chars(((0x30, 0x7A),))), Concat((Literal(b'"'), Spelled(plain)))):
            state = self._engines.open_grammar(Grammar(language)).begin(b"a")
            state.prepare(_ENOUGH)

    def prepare_llguidance(self) -> None:
        """Makes llguidance's view of the vocabulary, which takes 0.5 s of the interpreter lock for 262,144 tokens."""
        self._engines.prepare_llguidance()

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, first=False)


def _read_ours(path: Path) -> bytes:
    """Reads a file that no other user can have written. Raises OSError for any other."""
    try:
        return read_trusted(path)
    except ModelError as error:
        raise PermissionError(str(error)) from error
