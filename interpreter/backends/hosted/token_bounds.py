"""How many tokens a prompt has at most, where its tokenizer is not ours.

With the `tiktoken` package the count of an OpenAI model's text is exact. Otherwise a token has at least one byte.
"""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from ....lang.prompt import Media, Part, Text
from .continuation import CONTINUE_TEXT, CONTINUE_TURN

PER_MESSAGE = 8  # tokens around each: 3 or 4 with OpenAI's models, more with some open ones
_ASKING = len(CONTINUE_TEXT) + len(CONTINUE_TURN) + 2 * PER_MESSAGE  # of a request to continue, in bytes


def counter(model: str) -> Callable[[str], int]:
    """Text → its tokens, exactly where the tokenizer is known and installed. Blocks: the package may read a file."""
    try:
        # Any: an optional package without types. The interpreter's own dependencies do not hold it.
        encoding: Any = importlib.import_module("tiktoken").encoding_for_model(model)
    except Exception:  # not installed, a model that it does not know, or a file that it could not fetch
        return count_bytes
    return lambda text: len(encoding.encode_ordinary(text))


def count_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def at_most(parts: Iterable[Part], count: Callable[[str], int], image_tokens: int) -> int:
    """A bound on the tokens of a conversation. What a request to continue adds is in it, unless the prompt ends with
    scaffolding: then an answer begins, and nothing is continued."""
    bound = PER_MESSAGE
    last: Part | None = None
    for part in parts:
        last = part
        if isinstance(part, Media):
            bound += image_tokens
        else:
            bound += count(part.text) + PER_MESSAGE
    return bound if isinstance(last, Text) and last.control else bound + _ASKING


def of_text(parts: Iterable[Part], count: Callable[[str], int]) -> int:
    """A bound on the tokens of a prompt that is sent as it is, to be completed; images are not."""
    return PER_MESSAGE + count("".join(part.text for part in parts if not isinstance(part, Media)))
