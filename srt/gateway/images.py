"""Pictures of requests: waits for them to be decoded, holds them for calls, and sends them to the engine."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ...lang.errors import UmbelError
from ...lang.prompt import Media
from ...lang.protocol import FromBackend, GenRequest, Hint, ScoreRequest, ToBackend
from ..core.messages import FromEngine, ToEngine
from ..multimodal.cache import Picture, PictureCache
from ..multimodal.prompts import Showable, Showing, media_of, pictures_of, without_bytes
from .calls import Client, PendingCall, ProtocolBreach


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


log = logging.getLogger("umbel.gateway")


class Images:
    """Manages the pictures of one gateway.

    Args:
        cache: None for a model that reads text only: nothing is done then, and the encoder refuses media.
    """

    def __init__(self, cache: PictureCache | None, to_engine: Callable[[ToEngine], None]) -> None:
        self._cache = cache
        self._to_engine = to_engine

    @property
    def counters(self) -> dict[str, int]:
        return {} if self._cache is None else self._cache.counters

    # ------------------------------------------------------------------ messages that show media

    def media(self, message: ToBackend) -> list[Media]:
        """Returns the media of a message that are still to be decoded."""
        return media_of(message) if self._cache is not None and isinstance(message, Showable) else []

    def wait(self, client: Client, message: Showable, media: Sequence[Media], deadline: float) -> PictureCall:
        """Makes a call that is held until these media are decoded; decoding begins with its `showing`."""
        assert self._cache is not None, "it has media"
        showing = Showing(self._cache, media, message.origin.salt)
        return PictureCall(client, message.id, (), deadline, without_bytes(message), showing)

    def settle(self, call: PictureCall) -> None:
        """Ends the wait of a call. Calls that need its pictures hold them by now."""
        call.showing.close()
        self._forget()

    # ------------------------------------------------------------------ calls that hold pictures

    def hold(self, call: PendingCall, message: GenRequest | ScoreRequest) -> None:
        """Holds the pictures of a message until its call ends."""
        if self._cache is not None:
            call.pictures = pictures_of(message.prompt)
            self._cache.hold(call.pictures)

    def release(self, call: PendingCall) -> None:
        if self._cache is not None:
            self._cache.release(call.pictures)
            self._forget()

    # ------------------------------------------------------------------ the engine

    def upload(self, pictures: Sequence[Picture]) -> None:
        """Sends pictures to the engine, before the message that uses them. Raises EngineError when they are gone."""
        if self._cache is not None:
            self._cache.upload(pictures, self._to_engine)

    def failed(self, call: PendingCall) -> None:
        """Notes that the engine failed a call, perhaps for lack of its pictures: they are sent again the next time."""
        if self._cache is not None:
            self._cache.doubt(call.pictures)

    def engine_lost(self) -> None:
        if self._cache is not None:
            self._cache.engine_lost()

    def _forget(self) -> None:
        """Tells the engine which pictures to forget. Those that could not be sent are sent the next time."""
        assert self._cache is not None, "somebody has held one"
        try:
            self._cache.send_forgotten(self._to_engine)
        except Exception:
            log.exception("that pictures are not needed could not be sent")
