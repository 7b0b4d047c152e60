"""Counts tokens of prompts, and cuts prompts into sentences and lines, the smallest pieces that can be told apart.

Tokens are counted with the default model's tokenizer where it is at hand, else estimated as a token for four bytes.
Scaffolding of chat templates counts as nothing, and so do images, and arguments that are shared.
"""

import functools
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...lang.errors import ModelError, UmbelError
from .pieces import Marked, is_mark

LIST_ITEM = re.compile(
    r"[ \t]*(?:[-*•+]|\(?\d{1,3}[.):]|\(?[a-zA-Z][.)])[ \t]+\S|[ \t]*(?:First|Step \d+)\b", re.IGNORECASE
)
HEADING = re.compile(r"[ \t]*(#{1,6})[ \t]+\S")
TAG = re.compile(r"<(/?)([A-Za-z][\w.-]*)(?:\s[^<>]*)?>|\[(/?)([A-Z]{3,})\]")

# After these a new sentence begins. A capital, a quote or a hole must follow, so that "e.g. this" stays whole.
SENTENCE_END = re.compile(
    r"(?<![A-Z])(?<!\be\.g)(?<!\bi\.e)(?<!\betc)(?<!\b[DM]r)(?<!\bvs)(?<!\bNo)[.!?]+[\"'”’)\]*_]*[ \t]+"
    r"|[。！？]+[”’」』）]*"
)

BYTES_PER_TOKEN = 4  # of English text, for the estimate


@dataclass(frozen=True, slots=True)
class Counter:
    """Attributes:
    name: how it counts, for people.
    encode: text → tokens; None for the estimate.
    """

    name: str
    encode: Callable[[str], Sequence[int]] | None = None

    def tokens(self, text: str) -> int:
        """Counts those of a whole text."""
        if self.encode is None:
            return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)
        return len(self.encode(text)) if text else 0


ESTIMATE = Counter(f"an estimate of {BYTES_PER_TOKEN} bytes per token")


def default_counter() -> Counter:
    """Counts with the default model's tokenizer where the model has been used before, else by the estimate: nothing is
    converted to count tokens."""
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


def sentences_of(text: str) -> Iterator[str]:
    """Yields sentences and lines, without white space after them.

    Lines that are no list items or headings are cut at the ends of sentences.
    """
    for line in text.splitlines():
        whole = LIST_ITEM.match(line) or HEADING.match(line)
        for sentence in [line] if whole else _cut(line):
            if bare := sentence.strip():
                yield bare


def _cut(line: str) -> list[str]:
    sentences, start = [], 0
    for end in SENTENCE_END.finditer(line):
        behind = line[end.end() : end.end() + 1]
        if behind and (not behind.islower() or is_mark(behind)):
            sentences.append(line[start : end.end()])
            start = end.end()
    return [*sentences, line[start:]]


def free_tokens(marked: Marked, counter: Counter) -> int:
    """Counts tokens of sentences and lines without a hole, except labels and tags: they go where their values go."""
    return sum(
        counter.tokens(sentence)
        for sentence in sentences_of(marked.text)
        if not any(character in marked.holes for character in sentence) and _is_saying(sentence)
    )


def _is_saying(sentence: str) -> bool:
    """Returns whether a sentence is more than a label, a separator or a tag."""
    bare = TAG.sub("", sentence.rstrip("*_ "))  # stars make the last letters bold
    return not bare.endswith((":", "：")) and (len(bare.split()) > 2 or len(bare) > 12)
