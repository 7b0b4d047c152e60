"""Content of prompts as hosted models take it and count it: images in base64, and bounds on tokens.

With the `tiktoken` package the count of an OpenAI model's text is exact. Otherwise a token has at least one byte.
"""

import base64
import importlib
from collections.abc import Callable, Iterable
from typing import Any

from ....lang.errors import CapabilityError
from ....lang.prompt import Media, Part, Text
from .conversation import CONTINUE_TEXT, CONTINUE_TURN

_TYPES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)


def media_type(part: Media, backend: str) -> str:
    """The MIME type of an image, read from its first bytes.

    Raises:
        CapabilityError: a video, or a format that hosted models do not take.
    """
    if part.kind != "image":
        raise CapabilityError(f"{backend} takes images and no {part.kind}; give single frames with image(...)")
    for beginning, kind in _TYPES:
        if part.data.startswith(beginning):
            return kind
    if part.data[:4] == b"RIFF" and part.data[8:12] == b"WEBP":
        return "image/webp"
    raise CapabilityError(f"{backend} takes PNG, JPEG, GIF and WebP images; convert this one, which is none of them")


def in_base64(part: Media) -> str:
    return base64.b64encode(part.data).decode("ascii")


PER_MESSAGE = 8  # tokens around each: 3 or 4 with OpenAI's models, more with some open ones
_ASKING = len(CONTINUE_TEXT) + len(CONTINUE_TURN) + 2 * PER_MESSAGE  # of a request to continue, in bytes


def token_counter(model: str) -> Callable[[str], int]:
    """Returns a function that counts tokens, exactly if the tokenizer is installed. Blocks: it may read a file."""
    try:
        # Any: an optional package without types. The interpreter's own dependencies do not hold it.
        encoding: Any = importlib.import_module("tiktoken").encoding_for_model(model)
    except Exception:  # not installed, a model that it does not know, or a file that it could not fetch
        return count_bytes
    return lambda text: len(encoding.encode_ordinary(text))


def count_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def conversation_tokens_at_most(parts: Iterable[Part], count: Callable[[str], int], image_tokens: int) -> int:
    """Returns a bound on the tokens of a conversation. It includes a request to continue, unless the prompt ends with
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


def text_tokens_at_most(parts: Iterable[Part], count: Callable[[str], int]) -> int:
    """Returns a bound on the tokens of a prompt that is sent as it is, to be completed; images are not."""
    return PER_MESSAGE + count("".join(part.text for part in parts if not isinstance(part, Media)))
