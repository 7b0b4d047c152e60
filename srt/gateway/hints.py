"""Hints: prefixes that clients want computed ahead, and their pins. Hints are never answered."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...lang.protocol import Hint
from ..core.instruments import Clock, FaultHook
from ..core.messages import EnginePrefill, EngineRelease, ToEngine
from ..multimodal.cache import Picture
from ..tokenizer.prompt import pictures_of
from .calls import Client
from .validation import RequestValidator

log = logging.getLogger("umbel.gateway")


class Hints:
    """Sends hints to the engines and releases their pins. A hint that cannot be used is counted and dropped.

    Args:
        to_engines: for each engine what carries a message to it.
        place: returns the engine for a hint.
        upload: sends an engine the pictures of the next message.
        counters: receives "hints" and "hints_unused".
    """

    def __init__(
        self,
        validator: RequestValidator,
        *,
        most_pins: int,
        to_engines: Sequence[Callable[[ToEngine], None]],
        place: Callable[[EnginePrefill], int],
        upload: Callable[[Sequence[Picture], int], None],
        clock: Clock,
        faults: FaultHook,
        counters: Counter[str],
    ) -> None:
        self._validator = validator
        self._pins = ClientPins(most_pins)
        self._to_engines = to_engines
        self._place = place
        self._upload = upload
        self._clock = clock
        self._faults = faults
        self._counters = counters

    def take(self, client: Client, hint: Hint, context_length: int | None) -> None:
        """Sends a hint to an engine; one must be ready."""
        try:
            message = self._validator.hint(hint)
            if context_length is not None and len(message.token_ids) > context_length:
                self.unused()
                return
            now = self._clock.now()
            if hint.pin is not None:
                if not self._pins.room(now):
                    self.unused()
                    return
                self.release(client, hint.id)
            self._faults("gateway.send")
            replica = self._place(message)
            self._upload(pictures_of(hint.prompt), replica)
            self._to_engines[replica](message)
            if hint.pin is not None:  # only now: a hint that could not be sent takes no room
                self._pins.add(client, hint.id, EnginePin(replica, message.id, now + hint.pin))
            self._counters["hints"] += 1
        except Exception as error:
            self.unused()
            log.info("a hint was not used: %s", type(error).__name__)

    def unused(self) -> None:
        self._counters["hints_unused"] += 1

    def release(self, client: Client, request_id: str) -> None:
        """Releases the pin of the client under this request id, if there is one."""
        pin = self._pins.take(client, request_id)
        if pin is not None:
            self.end(pin.replica, pin.number)

    def client_lost(self, client: Client) -> None:
        for pin in self._pins.take_all(client):
            self.end(pin.replica, pin.number)

    def engine_lost(self, replica: int) -> None:
        self._pins.forget(replica)

    def end(self, replica: int, number: int) -> None:
        """Ends a hint that an engine may still compute, and its pin.

        A lost message does no harm: the hint is computed once, and the pin ends when its time is over.
        """
        try:
            self._to_engines[replica](EngineRelease(number))
        except Exception:
            log.exception("the release of hint %d could not be sent", number)


class EnginePin(NamedTuple):
    """A pin of one engine."""

    replica: int
    number: int  # the engine's id for it
    ends: float  # if it is not used; on the clock


class ClientPins:
    """Maps clients and request ids to pins of engines: these know no clients.

    Args:
        most: pins of all clients together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._pins: dict[tuple[Client, str], EnginePin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def room(self, now: float) -> bool:
        """Returns whether one more pin may be added; forgets expired ones first if the table is full.

        The engine ends an expired pin by itself, a while later if it was used."""
        if len(self._pins) >= self._most:
            self._pins = {name: pin for name, pin in self._pins.items() if pin.ends > now}
        return len(self._pins) < self._most

    def add(self, client: Client, request_id: str, pin: EnginePin) -> None:
        assert (client, request_id) not in self._pins, "take the former one first"
        self._pins[client, request_id] = pin

    def take(self, client: Client, request_id: str) -> EnginePin | None:
        """Removes a pin and returns it; None for an unknown request id."""
        return self._pins.pop((client, request_id), None)

    def take_all(self, client: Client) -> list[EnginePin]:
        """Removes all pins of one client and returns them."""
        request_ids = [request_id for owner, request_id in self._pins if owner == client]
        return [self._pins.pop((client, request_id)) for request_id in request_ids]

    def forget(self, replica: int) -> None:
        """Forgets all pins of an engine that is gone."""
        self._pins = {name: pin for name, pin in self._pins.items() if pin.replica != replica}
