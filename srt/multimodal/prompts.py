"""Replaces the media of prompts by decoded pictures, in the gateway.

Media(bytes) … Media(bytes)    ──▶ Showing ──▶    Shown(pictures) … Shown(pictures)
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from ...lang.errors import UmbelError
from ...lang.prompt import Media, Part
from ...lang.protocol import GenRequest, Hint, Locate, ScoreRequest
from .cache import Picture, PictureCache, PictureInquiry

Showable = GenRequest | ScoreRequest | Hint | Locate  # the messages that have a prompt


class Shown(Media, frozen=True, kw_only=True, tag="shown"):
    """A decoded picture, or the frames of a clip. It is never sent and has no bytes: the cache has the pixels."""

    pictures: tuple[Picture, ...]


def pictures_of(prompt: Iterable[Part]) -> tuple[Picture, ...]:
    """Returns all pictures of a prompt, in order."""
    return tuple(picture for part in prompt if isinstance(part, Shown) for picture in part.pictures)


def media_of(message: Showable) -> list[Media]:
    """Returns the media of a message that are not decoded yet."""
    return [part for prompt in prompts_of(message) for part in prompt if type(part) is Media]


def prompts_of(message: Showable) -> tuple[tuple[Part, ...], ...]:
    """Returns the prompts of a message: a Locate may have several."""
    return (message.prompt, *message.others) if isinstance(message, Locate) else (message.prompt,)


def without_bytes(message: Showable) -> Showable:
    """Removes the media bytes of a waiting message: the decoder holds them once for all messages."""
    return _replaced(message, lambda part: msgspec.structs.replace(part, data=b""))


def _replaced(message: Showable, change: Callable[[Media], Media]) -> Showable:
    """Replaces the media of a message, in the order of `media_of`."""

    def changed(prompt: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(change(part) if type(part) is Media else part for part in prompt)

    prompt = changed(message.prompt)
    if isinstance(message, Locate):
        return msgspec.structs.replace(message, prompt=prompt, others=tuple(map(changed, message.others)))
    return msgspec.structs.replace(message, prompt=prompt)


class Showing:
    """Decodes the media of one message. The pictures found are held until `close`."""

    def __init__(self, cache: PictureCache, media: Sequence[Media], salt: str) -> None:
        self._cache = cache
        self._media = media
        self._salt = salt
        self._found: list[tuple[Picture, ...] | None] = [None] * len(media)
        self._inquiries: list[PictureInquiry] = []
        self._tell: Callable[[UmbelError | None], None] | None = None
        self._closed = False

    def begin(self, tell: Callable[[UmbelError | None], None]) -> None:
        """Starts decoding; calls `tell` once, now or later, unless it is closed before.

        It is called when all media are decoded, or with the error of the first that cannot be."""
        self._tell = tell
        media, self._media = self._media, ()  # the decoder has the bytes now
        for index, part in enumerate(media):
            if self._closed:
                return
            self._inquiries.append(self._cache.find(part, self._salt, self._listener(index)))

    def replace(self, message: Showable) -> Showable:
        """Returns the message with pictures for its media."""
        found = iter(self._found)
        return _replaced(message, lambda part: _shown(part, next(found)))

    def close(self) -> None:
        """Ends the wait and releases the pictures; may be called again."""
        if self._closed:
            return
        self._closed = True
        for inquiry in self._inquiries:
            inquiry.forget()
        for pictures in self._found:
            self._cache.release(pictures or ())

    def _listener(self, index: int) -> Callable[[tuple[Picture, ...] | UmbelError], None]:
        def hear(found: tuple[Picture, ...] | UmbelError) -> None:
            if self._closed:
                return
            if isinstance(found, UmbelError):
                self.close()
                self._end(found)
                return
            self._cache.hold(found)
            self._found[index] = found
            if all(pictures is not None for pictures in self._found):
                self._end(None)

        return hear

    def _end(self, error: UmbelError | None) -> None:
        assert self._tell is not None, "it has begun"
        self._tell(error)


def _shown(media: Media, pictures: tuple[Picture, ...] | None) -> Shown:
    assert pictures is not None, "all of them have been found"
    return Shown(media.kind, media.digest, b"", media.num_frames, pictures=pictures)
