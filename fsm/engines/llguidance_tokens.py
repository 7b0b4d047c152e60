"""A vocabulary as llguidance reads it, its matchers over it, and how much they may take."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..errors import ConstraintRefused, LimitExceeded, Unsupported
from ..tokens.masks import Endings
from ..tokens.trie import Trie, build_trie, fewest_tokens
from ..tokens.vocabulary import Encode, Vocabulary
from .source import MissingEngine, Source


@dataclass(frozen=True, slots=True)
class MatcherLimits:
    """Bounds what llguidance may take for one constraint, in its own units. Beyond, it ends the text with an error.

    They bound each step of a text. Reading a source they do not bound: a multiple of 1,000,003 takes it seconds and
    300 MB whatever they say, so sources are read where that can be killed first (`rehearse`).
    """

    grammar: int = 500_000  # symbols
    initial_fuel: int = 1_000_000  # of reading expressions; 50,000 take a millisecond
    step_fuel: int = 200_000  # of one mask; 14,000 take a millisecond
    step_items: int = 50_000  # of one mask; 20,000 take a millisecond
    row_items: int = 2_000  # of a place in the text: how ambiguous it may be
    lexer_states: int = 25_000  # 1-2 kB each, shared by all texts of the constraint


class LlguidanceTokens:
    """A vocabulary as llguidance reads it; half a second and 40 MB for 262,144 tokens, once for all constraints.

    Args:
        slices: expressions whose tokens get tries of their own, as the library makes them; None takes its usual ones.
            Those make a mask inside a string 2 ms cheaper, and take twice the time and three times the memory at the
            start of every engine.

    Raises:
        MissingEngine: the package is not installed.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        trie: Trie,
        encode: Encode | None,
        limits: MatcherLimits | None = None,
        *,
        slices: Sequence[str] | None = (),
    ) -> None:
        try:
            self._library = importlib.import_module("llguidance")
        except ImportError as error:
            raise MissingEngine("llguidance") from error
        self.vocabulary = vocabulary
        self.trie = trie
        self.endings = Endings(trie, vocabulary.words)
        self._encode = encode
        self._limits = self._library_limits(limits or MatcherLimits())
        self.tokenizer = self._library.LLTokenizer(
            self._library.TokenizerWrapper(_Table(vocabulary, self.spell)),
            eos_token=list(vocabulary.eos_ids),
            slices=None if slices is None else list(slices),
        )

    @staticmethod
    def installed() -> bool:
        return importlib.util.find_spec("llguidance") is not None

    def matcher(self, source: Source) -> Any:  # Any: llguidance.LLMatcher, a compiled class
        """Returns a matcher at the beginning of a text, whose every step is within the limits.

        Raises:
            Unsupported: llguidance does not honour the constraint.
            ConstraintRefused: it is no constraint.
        """
        matcher = self._library.LLMatcher(self.tokenizer, self._grammar(source), log_level=0, limits=self._limits)
        if matcher.is_error():
            why = matcher.get_error().strip().splitlines()[0][:300]
            raise Unsupported(f"llguidance: {why}", keyword=source.kind)
        return matcher

    def spell(self, text: bytes) -> list[int]:
        """Spells in canonical tokens where the tokenizer has them, else in the fewest; [] where there are none."""
        tokens = self.vocabulary.canonical(text, self._encode)
        return (fewest_tokens(self.trie, text) or []) if tokens is None else tokens

    def _library_limits(self, limits: MatcherLimits) -> Any:  # Any: llguidance.LLParserLimits, a compiled class
        return self._library.LLParserLimits(
            max_grammar_size=limits.grammar,
            initial_lexer_fuel=limits.initial_fuel,
            step_lexer_fuel=limits.step_fuel,
            step_max_items=limits.step_items,
            max_items_in_row=limits.row_items,
            max_lexer_states=limits.lexer_states,
            verbose_errors=False,  # they would repeat the source
        )

    def _grammar(self, source: Source) -> str:
        matcher = self._library.LLMatcher
        try:
            match source.kind:
                case "regex":
                    grammar: str = matcher.grammar_from_regex(source.text)
                case "json_schema":
                    grammar = matcher.grammar_from_json_schema(source.text, overrides=_FORMATS[source.whitespace])
                case "lark":
                    grammar = matcher.grammar_from_lark(source.text)
        except ValueError as error:
            raise ConstraintRefused(f"llguidance: {error}", keyword=source.kind) from error
        return grammar


def rehearse(source: Source) -> int:
    """Reads the source as `LlguidanceTokens.matcher` does, over single bytes → the memory that its matcher takes, in
    bytes as far as the system says. It may take long: run it where it can be killed, and read here what passed.

    Raises:
        MissingEngine: the package is not installed.
        Unsupported: llguidance does not honour the constraint.
        ConstraintRefused: it is no constraint, or its texts cannot begin within the limits.
    """
    tokens, before = _byte_tokens(), _resident_bytes()
    matcher = tokens.matcher(source)
    matcher.compute_bitmask()
    require_sound(matcher)
    return max(0, _resident_bytes() - before)


def require_sound(matcher: Any) -> None:  # Any: llguidance.LLMatcher
    """Raises LimitExceeded when a step took more than the limits."""
    if matcher.is_error():
        raise LimitExceeded(f"llguidance: {matcher.get_error().strip().splitlines()[0][:300]}")


@cache
def _byte_tokens() -> LlguidanceTokens:
    """Returns a vocabulary of the 256 bytes: what reading a source takes does not depend on the vocabulary."""
    vocabulary = Vocabulary([*(bytes([byte]) for byte in range(256)), b""], [256])
    return LlguidanceTokens(vocabulary, build_trie(vocabulary), None)


def _resident_bytes() -> int:
    """Reads the memory of this process; 0 on a system without /proc."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


_FORMATS: dict[str, dict[str, object]] = {
    "spaced": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False},
    "compact": {"item_separator": ",", "key_separator": ":", "whitespace_flexible": False},
    "flexible": {"item_separator": ",", "key_separator": ":", "whitespace_pattern": r"\n?[ ]{0,20}"},
}


class _Table:
    """Answers what llguidance.TokenizerWrapper asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary, spell: Callable[[bytes], list[int]]) -> None:
        self.tokens = [vocabulary.token_bytes(token) for token in range(len(vocabulary))]
        for token in vocabulary.eos_ids:
            self.tokens[token] = b"<eos %d>" % token  # special tokens have names, which no text is taken for
        self.special_token_ids = list(vocabulary.eos_ids)
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self._spell = spell

    def __call__(self, text: bytes) -> list[int]:
        return self._spell(text)
