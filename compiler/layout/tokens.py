"""How many tokens of their prompts two runs with different arguments have in common.

Counted with the default model's tokenizer where it is at hand, else estimated as a token for four bytes. Scaffolding of
chat templates counts as nothing, and so do images, and arguments that are shared.
"""

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...lang.errors import ModelError, UmbelError
from .pieces import PRIVATE, Call, Kind, Piece

BYTES_PER_TOKEN = 4  # of English text, for the estimate
_DIFFERENT = ("Alpha", "7 beta", "\nGamma")  # what two runs may have behind the text they share


@dataclass(frozen=True, slots=True)
class Counter:
    """Attributes:
    name: how it counts, for people.
    encode: text → tokens; None for the estimate.
    """

    name: str
    encode: Callable[[str], Sequence[int]] | None = None

    def tokens(self, text: str) -> int:
        """Of a whole text."""
        if self.encode is None:
            return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)
        return len(self.encode(text)) if text else 0

    def shared_tokens(self, text: str) -> int:
        """Of a text with other text behind it, which is different in every run: a token that may reach into that
        text is not shared."""
        if self.encode is None:
            return len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN
        if not text:
            return 0
        alone = self.encode(text)
        return min(_common(alone, self.encode(text + other)) for other in _DIFFERENT)


ESTIMATE = Counter(f"an estimate of {BYTES_PER_TOKEN} bytes per token")


def default_counter() -> Counter:
    """The default model's tokenizer where the model has been used before, else the estimate: nothing is converted
    to count tokens."""
    try:
        return _model_counter()
    except (ImportError, UmbelError, OSError):
        return ESTIMATE


@functools.cache  # a second to open; errors are not kept
def _model_counter() -> Counter:
    # By name: the compiler imports no runtime.
    weights: Any = importlib.import_module("umbel.srt.weights.source")
    if all(model.name != weights.FOLDER_NAME for model in weights.list_models()):
        raise ModelError("the default model is not in the cache folder")
    tokenizer: Any = weights.open_model().tokenizer()
    return Counter(f"the tokenizer of {tokenizer.name}", lambda text: tokenizer.encode(text, first=False))


@dataclass(frozen=True, slots=True)
class Shareable:
    """Tokens that runs share: of the first call's prompt, and of all prompts together."""

    first: int
    total: int

    def __sub__(self, other: "Shareable") -> "Shareable":
        return Shareable(self.first - other.first, self.total - other.total)


def shareable(calls: Iterable[Call], counter: Counter) -> Shareable:
    lengths = [prefix_tokens(call.pieces, counter) for call in calls]
    return Shareable(lengths[0] if lengths else 0, sum(lengths))


def prefix_tokens(pieces: Iterable[Piece], counter: Counter) -> int:
    """Tokens in front of the first piece that differs between runs.

    Text runs from one end of a turn, or shared argument, to the next and is encoded as one.
    """
    tokens, text = 0, ""
    for piece in pieces:
        if piece.kind is Kind.CONSTANT:
            text += piece.text
        elif piece.kind in PRIVATE or (piece.kind is Kind.MEDIA and piece.name):
            return tokens + counter.shared_tokens(text)
        else:
            tokens, text = tokens + counter.tokens(text), ""
    return tokens + counter.tokens(text)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length
