"""Replaces the media of requests by decoded pictures, holds the pictures for calls, and sends them to the engine.

Media(bytes) … Media(bytes)    ──▶ Showing ──▶    Shown(pictures) … Shown(pictures)
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from ...lang.errors import UmbelError
from ...lang.prompt import Media, openings
from ...lang.protocol import CreateCache, FromBackend, GenRequest, Hint, ScoreRequest, ToBackend
from ..core.messages import FromEngine, ToEngine
from ..multimodal.cache import Picture, PictureCache, PictureInquiry
from ..tokenizer.prompt import Showable, Shown, media_of, pictures_of, prompts_of, replace_media, without_bytes
from .calls import Client, PendingCall, ProtocolBreach

log = logging.getLogger("umbel.gateway")


class Showing:
    """Decodes the media of one message. The pictures found are held until `close`.

    Args:
        media: each with the namespace of its place in the prompt.
    """

    def __init__(self, cache: PictureCache, media: Sequence[tuple[Media, str]]) -> None:
        self._cache = cache
        self._media = media
        self._found: list[tuple[Picture, ...] | None] = [None] * len(media)
        self._inquiries: list[PictureInquiry] = []
        self._notify: Callable[[UmbelError | None], None] | None = None
        self._closed = False

    def begin(self, notify: Callable[[UmbelError | None], None]) -> None:
        """Starts decoding; calls `notify` once, now or later, unless it is closed before.

        It is called when all media are decoded, or with the error of the first that cannot be."""
        self._notify = notify
        media, self._media = self._media, ()  # the decoder has the bytes now
        for index, (part, salt) in enumerate(media):
            if self._closed:
                return
            self._inquiries.append(self._cache.find(part, salt, self._listener(index)))

    def replace(self, message: Showable) -> Showable:
        """Returns the message with pictures for its media."""
        found = iter(self._found)
        return replace_media(message, lambda part: _shown(part, next(found)))

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
        def on_found(found: tuple[Picture, ...] | UmbelError) -> None:
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

        return on_found

    def _end(self, error: UmbelError | None) -> None:
        assert self._notify is not None, "it has begun"
        self._notify(error)


def _shown(media: Media, pictures: tuple[Picture, ...] | None) -> Shown:
    assert pictures is not None, "all of them have been found"
    return Shown(media.kind, media.digest, b"", media.num_frames, pictures=pictures)


def _placed_media(message: Showable) -> Iterator[tuple[Media, str]]:
    """Yields the media of a message that are not decoded yet, each with the namespace of its place."""
    for prompt in prompts_of(message):
        opened = dict(openings(message.origin.salt, prompt))
        salt = message.origin.salt
        for place, part in enumerate(prompt):
            salt = opened.get(place, salt)
            if type(part) is Media:
                yield part, salt


@dataclass(slots=True, eq=False)
class PictureCall(PendingCall):
    """Holds a message until its media are decoded. The message is then handled as any other, and this call is gone.

    Until then it ends as calls do: by its deadline, by its client, or by an error of its media."""

    message: Showable
    showing: Showing

    @property
    def waits_for(self) -> str:
        return "its pictures to be decoded"

    def failure(self, error: UmbelError) -> FromBackend | None:
        """Returns None for a hint: hints are never answered."""
        return None if isinstance(self.message, Hint) else PendingCall.failure(self, error)

    def shown(self, now: float) -> Showable:
        """Returns the message with its pictures, and the remaining time."""
        message = self.showing.replace(self.message)
        origin = msgspec.structs.replace(message.origin, timeout=max(0.0, self.deadline - now))
        return msgspec.structs.replace(message, origin=origin)

    def accept(self, event: FromEngine) -> list[FromBackend]:
        raise ProtocolBreach(f"a {type(event).__name__} for a call that the engine does not have")


class Images:
    """Manages the pictures of one gateway.

    Args:
        cache: None for a model that reads text only: nothing is done then, and the encoder refuses media.
        to_engines: for each engine what carries a message to it.
    """

    def __init__(self, cache: PictureCache | None, to_engines: Sequence[Callable[[ToEngine], None]]) -> None:
        self._cache = cache
        self._to_engines = to_engines

    @property
    def counters(self) -> dict[str, int]:
        return {} if self._cache is None else self._cache.counters

    # ------------------------------------------------------------------ messages that show media

    def has_media(self, message: ToBackend) -> bool:
        """Returns whether media of a message are still to be decoded."""
        return self._cache is not None and isinstance(message, Showable) and bool(media_of(message))

    def wait(self, client: Client, message: Showable, deadline: float) -> PictureCall:
        """Makes a call that is held until its media are decoded; decoding begins with its `showing`."""
        assert self._cache is not None, "it has media"
        showing = Showing(self._cache, list(_placed_media(message)))
        return PictureCall(client, message.id, (), deadline, without_bytes(message), showing)

    def settle(self, call: PictureCall) -> None:
        """Ends the wait of a call. Calls that need its pictures hold them by now."""
        call.showing.close()
        self._forget()

    # ------------------------------------------------------------------ calls that hold pictures

    def hold(self, call: PendingCall, message: GenRequest | ScoreRequest | CreateCache) -> None:
        """Holds the pictures of a message until its call ends."""
        if self._cache is not None:
            call.pictures = pictures_of(message.prompt)
            self._cache.hold(call.pictures)

    def release(self, call: PendingCall) -> None:
        if self._cache is not None:
            self._cache.release(call.pictures)
            self._forget()

    # ------------------------------------------------------------------ the engines

    def upload(self, pictures: Sequence[Picture], replica: int) -> None:
        """Sends pictures to an engine, before the message that uses them. Raises EngineError when they are gone."""
        if self._cache is not None:
            self._cache.upload(pictures, self._to_engines[replica], replica)

    def failed(self, call: PendingCall, replica: int) -> None:
        """Notes that an engine failed a call, perhaps for lack of its pictures: they are sent again the next time."""
        if self._cache is not None:
            self._cache.doubt(call.pictures, replica)

    def engine_lost(self, replica: int) -> None:
        if self._cache is not None:
            self._cache.engine_lost(replica)

    def _forget(self) -> None:
        """Tells the engines which pictures to forget. Those that could not be sent are sent the next time."""
        assert self._cache is not None, "a call has held one"
        for replica, send in enumerate(self._to_engines):
            try:
                self._cache.send_forgotten(send, replica)
            except Exception:
                log.exception("that pictures are not needed could not be sent")
