"""Messages that wait for their pictures."""

from dataclasses import dataclass

import msgspec

from ...lang.errors import UmbelError
from ...lang.protocol import FromBackend, Hint
from ..core.messages import FromEngine
from ..multimodal.prompts import Showable, Showing
from .calls import Call, ProtocolBreach


@dataclass(slots=True, eq=False)
class PictureCall(Call):
    """A message that shows media. It is no request of the engine yet: when its media are pictures it is taken as any
    other, and this call is gone. Until then it ends as calls do: by its deadline, its client or its media."""

    message: Showable
    showing: Showing

    @property
    def waits_for(self) -> str:
        return "its pictures to be decoded"

    def failure(self, error: UmbelError) -> FromBackend | None:
        """Hints are never answered."""
        return None if isinstance(self.message, Hint) else Call.failure(self, error)

    def shown(self, now: float) -> Showable:
        """The message with its pictures, and the time that is left."""
        message = self.showing.replace(self.message)
        origin = msgspec.structs.replace(message.origin, timeout=max(0.0, self.deadline - now))
        return msgspec.structs.replace(message, origin=origin)

    def accept(self, event: FromEngine) -> list[FromBackend]:
        raise ProtocolBreach(f"a {type(event).__name__} for a call that the engine does not have")
