"""Finds places where a text may be cut so that its parts are tokenized as the whole is.

    encode("… seven wizards") = encode("… seven") + encode(" wizards")

holds for byte-pair encoding at a place that no token of the vocabulary can cover, because merges make nothing but
tokens: if no token holds the characters before and after the place next to each other, no merge joins them in any
context. Here the character after the place is a space or a newline; the vocabulary says which characters may stand
before it. The other components must not look across the place either:

    normalizer      none, NFC (a space and a newline neither compose nor move), a plain replacement of the space
    pre-tokenizer   none, or one of the expressions below, none of which takes a space together with a visible
                    character before it, or a newline together with a letter or digit before it, or looks back
    added tokens    none that strips the white space after it or depends on the character before it

A tokenizer for which one of these is not certain has no boundaries, and its texts are encoded whole. Unigram models
have none: the scores of a long text are added in another order than those of its parts.
"""

import itertools
import re
import string
from collections.abc import Callable

import msgspec
import numpy as np

from .file import Component, TokenizerFile, components
from .vocabulary import Vocabulary

Boundary = re.Pattern[str]  # matches where a part may begin, looking at the character before

SPACE, NEWLINE = " ", "\n"
_VISIBLE = "".join(map(chr, range(0x21, 0x7F)))  # ASCII
_ALPHANUMERIC = string.ascii_letters + string.digits
_CONTINUATION = range(0x80, 0xC0)  # the last byte of a character beyond ASCII
_NOWHERE = r"(?!)"
_LETTER = r"(?![\x00-\x7f])[^\W\d_]"  # beyond ASCII: white space in no version of Unicode

# The alternatives of the expressions that models split text with. Each was checked for the conditions above.
_CONTRACTIONS = {r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"'s|'t|'re|'ve|'m|'ll|'d", r"'(?i:[sdmt]|ll|ve|re)"}
_WORDS = {
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?+\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r" ?\p{L}+",
    r"\p{L}+",
}
_NUMBERS = {r"\p{N}", r"\p{N}{1,3}", r" ?\p{N}+"}
_SIGNS = {
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{N}]+",
}
_SPACES = {r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"}
_KNOWN = frozenset(_CONTRACTIONS | _WORDS | _NUMBERS | _SIGNS | _SPACES)


def find_boundary(file: TokenizerFile, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> Boundary | None:
    """Makes the expression for places where one tokenizer's texts may be cut; None when nothing is certain.

    Args:
        encode: the tokenizer itself, to check whether it spells a space and a newline as tokens of their own.
    """
    if not _merges_only(file) or not _normalizes_in_place(file.normalizer):
        return None
    cuts = _cuts(file.pre_tokenizer)
    if cuts is None or any(token.rstrip or token.single_word for token in file.added_tokens):
        return None
    vocabulary_spells = {
        mark: [vocabulary.token_bytes(token_id) for token_id in encode(mark)] == [mark.encode()]
        for mark in (SPACE, NEWLINE)
    }
    specials = [token.content for token in file.added_tokens if token.special]  # the vocabulary has no bytes for them
    patterns = []
    for mark, before in ((SPACE, _VISIBLE), (NEWLINE, _ALPHANUMERIC if cuts else _VISIBLE)):
        if vocabulary_spells[mark]:
            joined = _joined_before(mark, vocabulary, specials)
            patterns.append(_pattern(mark, before, joined, letters=mark == SPACE or not cuts))
    return re.compile("|".join(patterns)) if patterns else None


def _pattern(mark: str, before: str, joined: frozenset[int], *, letters: bool) -> str:
    """Matches `mark` after one of `before`, or after a letter beyond ASCII, unless a token joins the two.

    The mark comes first in the expression, because a search for one character is fast."""
    allowed = "".join(character for character in before if ord(character) not in joined)
    choices = [f"[{re.escape(allowed)}]"] if allowed else []
    if letters and joined.isdisjoint(_CONTINUATION):
        choices.append(_LETTER)
    return f"{mark}(?<=(?:{'|'.join(choices)}){mark})" if choices else _NOWHERE


def _joined_before(mark: str, vocabulary: Vocabulary, specials: list[str]) -> frozenset[int]:
    """Returns the bytes that stand directly before `mark` inside any token."""
    blob = np.frombuffer(vocabulary.blob, np.uint8)
    first = np.zeros(len(blob) + 1, np.bool_)
    first[vocabulary.offsets[:-1]] = True
    places = np.flatnonzero((blob == ord(mark)) & ~first[:-1])
    joined = set(np.unique(blob[places - 1]).tolist())
    for text in specials:
        data = text.encode("utf-8", "replace")
        joined |= {before for before, byte in itertools.pairwise(data) if byte == ord(mark)}
    return frozenset(joined)


class _MergeModel(msgspec.Struct, frozen=True):
    """The fields of the model that decide whether it consists of merges only."""

    type: str | None = None
    dropout: float | None = None
    merges: msgspec.Raw = msgspec.Raw()  # immutable, and empty when there are none


def _merges_only(file: TokenizerFile) -> bool:
    model = msgspec.json.decode(file.model, type=_MergeModel)
    return bool(bytes(model.merges)) and model.type in ("BPE", None) and not model.dropout


def _normalizes_in_place(normalizer: Component | None) -> bool:
    """Returns whether the normalizer works place by place. A prefix does not count: the tokenizer's wrapper adds it."""
    for part in components(normalizer):
        match part:
            case {"type": "NFC" | "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": " "}}:
                pass
            case _:
                return False
    return True


def _cuts(pre_tokenizer: Component | None) -> bool | None:
    """Returns whether the text is split into words before merging; None for a split not known here."""
    cuts = False
    for part in components(pre_tokenizer):
        match part:
            case {"type": "ByteLevel"}:
                cuts = cuts or bool(part.get("use_regex", True))
            case {"type": "Metaspace"}:
                pass  # splits, if at all, before spaces and at other places
            case {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"}:
                pass  # Gemma's: the normalizer leaves it no space
            case {"type": "Split", "pattern": {"Regex": str(expression)}, "behavior": "Isolated", "invert": False} if (
                _alternatives(expression) <= _KNOWN
            ):
                cuts = True
            case _:
                return None
    return cuts


def _alternatives(expression: str) -> frozenset[str]:
    """Splits an expression into its alternatives; those of contractions stay together."""
    rest = expression
    found = set()
    for contraction in _CONTRACTIONS:
        if rest.startswith(f"{contraction}|"):
            found.add(contraction)
            rest = rest.removeprefix(f"{contraction}|")
    return frozenset(found | set(rest.split("|")))
