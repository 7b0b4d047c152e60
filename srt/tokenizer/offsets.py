"""Where the tokens of a prompt begin in its text, counted in characters; for people who ask, not on the way of a call.

    text      <s> T h e   c a t
    tokens    BOS|The| cat|            token 2 begins at character 6

Tokens are laid along the bytes of the text. Control tokens stand for no bytes: their names do, where the template wrote
them. The first token of a picture takes all of its name, the others stand behind it. A token that is not what stands
there (a tokenizer that writes spaces or letters anew) is looked for a little further on, so that such a place is a few
characters off at most.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ...lang.prompt import Generated, Part, Text, told_apart
from ..core.image_token_ids import PICTURE_BASE
from ..multimodal.prompts import Shown
from .tokenizer import Tokenizer

_NEAR = 32  # bytes in which a token is looked for


def text_of(parts: Sequence[Part]) -> str:
    """The text that places are counted in."""
    return "".join(part.text if isinstance(part, Text | Generated) else told_apart(part) for part in parts)


class MediaPlace(NamedTuple):
    """Bytes [start, end) of the text stand for pictures that have so many tokens together."""

    start: int
    end: int
    tokens: int


def media_places(parts: Sequence[Part]) -> list[MediaPlace]:
    """Where the pictures of a prompt stand, in order."""
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
    """The characters at which the tokens with these indices begin; the length of the text for indices behind the last.

    Args:
        token_ids: of the whole prompt.
        wanted: indices, in any order.
        media: all that the prompt shows.
    """
    data = text.encode("utf-8", "surrogatepass")
    names = {token_id: name.encode() for name, token_id in tokenizer.special_ids.items()}
    last = max(wanted, default=0)
    found: dict[int, int] = {}
    place = 0
    shown = iter(media)
    left, behind = 0, 0  # tokens of the pictures that stand here, and where the text goes on
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
    """Where a token begins that is expected at `place`, and where the next one does."""
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
    """A place in bytes as one in characters; inside a character, its beginning."""
    while 0 < place < len(data) and data[place] & 0xC0 == 0x80:
        place -= 1
    return len(data[:place].decode("utf-8", "surrogatepass"))
