"""Finds where tokens of a prompt begin in its text, in characters; for explanations, on no call's path.

    text      <s> T h e   c a t
    tokens    BOS|The| cat|            token 2 begins at character 6

Tokens are aligned with the bytes of the text. A control token takes the bytes of its name where the template wrote it.
The first token of a picture takes all of its name; the others begin after it. A token that differs from the text (a
tokenizer may rewrite spaces or letters) is searched a little further on, so such a place is a few characters off at
most.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ...lang.prompt import Generated, Part, Text, told_apart
from ..core.image_token_ids import PICTURE_BASE
from .prompt import Shown
from .tokenizer import Tokenizer

_NEAR = 32  # bytes in which a token is searched


def text_of(parts: Sequence[Part]) -> str:
    """Returns the text in which places are counted."""
    return "".join(part.text if isinstance(part, Text | Generated) else told_apart(part) for part in parts)


class MediaPlace(NamedTuple):
    """Bytes [start, end) of the text that stand for pictures, and the number of their tokens."""

    start: int
    end: int
    tokens: int


def media_places(parts: Sequence[Part]) -> list[MediaPlace]:
    """Finds the places of the pictures of a prompt, in order."""
    found: list[MediaPlace] = []
    place = 0
    for part in parts:
        size = len(text_of((part,)).encode("utf-8", "surrogatepass"))
        if isinstance(part, Shown):
            found.append(MediaPlace(place, place + size, sum(picture.tokens for picture in part.pictures)))
        place += size
    return found


def token_places(
    tokenizer: Tokenizer,
    text: str,
    token_ids: Sequence[int],
    wanted: Sequence[int],
    media: Sequence[MediaPlace] = (),
) -> list[int]:
    """Returns the characters at which tokens begin; the length of the text for indices after the last token.

    Args:
        token_ids: ids of the whole prompt.
        wanted: token indices, in any order.
        media: all pictures of the prompt.
    """
    data = text.encode("utf-8", "surrogatepass")
    names = {token_id: name.encode() for name, token_id in tokenizer.special_ids.items()}
    last = max(wanted, default=0)
    found: dict[int, int] = {}
    place = 0
    shown = iter(media)
    left, behind = 0, 0  # remaining tokens of the pictures here, and where the text goes on
    for index, token_id in enumerate(token_ids[: last + 1]):
        if token_id >= PICTURE_BASE:
            if not left:
                place, behind, left = next(shown)
            found[index], place, left = place, behind, left - 1
            continue
        spelled = tokenizer.token_bytes(token_id)
        start, place = _laid(data, place, spelled or names.get(token_id, b""), control=not spelled)
        found[index] = start
    return [_characters(data, found[index]) if index in found else len(text) for index in wanted]


def _laid(data: bytes, place: int, spelled: bytes, *, control: bool) -> tuple[int, int]:
    """Aligns a token expected at `place` → where it begins, and where the next one does."""
    if data.startswith(spelled, place):
        return place, place + len(spelled)
    if control:  # put there by the encoder, not by the text
        return place, place
    bare = spelled.lstrip()  # the first text of a sequence may have got a space
    if data.startswith(bare, place):
        return place, place + len(bare)
    near = data.find(spelled, place, place + len(spelled) + _NEAR)
    if near >= 0:
        return near, near + len(spelled)
    return place, min(len(data), place + len(spelled))


def _characters(data: bytes, place: int) -> int:
    """Converts a place in bytes to characters; inside a character, to its beginning."""
    while 0 < place < len(data) and data[place] & 0xC0 == 0x80:
        place -= 1
    return len(data[:place].decode("utf-8", "surrogatepass"))
