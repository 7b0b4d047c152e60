"""Hints: prefixes that clients want computed ahead, and their pins. Hints are never answered."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from ...lang.protocol import Hint
from ..core.instruments import Clock, FaultHook
from ..core.messages import EngineRelease, ToEngine
from ..multimodal.cache import Picture
from ..tokenizer.prompt import pictures_of
from .calls import Client
from .validation import RequestValidator

log = logging.getLogger("umbel.gateway")


class Hints:
    """Sends hints to the engine and releases their pins. A hint that cannot be used is counted and dropped.

    Args:
        upload: sends the engine the pictures of the next message.
        counters: receives "hints" and "hints_unused".
    """

    def __init__(
        self,
        validator: RequestValidator,
        *,
        most_pins: int,
        to_engine: Callable[[ToEngine], None],
        upload: Callable[[Sequence[Picture]], None],
        clock: Clock,
        faults: FaultHook,
        counters: Counter[str],
    ) -> None:
        self._validator = validator
        self._pins = ClientPins(most_pins)
        self._to_engine = to_engine
        self._upload = upload
        self._clock = clock
        self._faults = faults
        self._counters = counters

    def take(self, client: Client, hint: Hint, context_length: int | None) -> None:
        """Sends a hint to the engine, which must be ready."""
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
                self.end(self._pins.take(client, hint.id))
            self._faults("gateway.send")
            self._upload(pictures_of(hint.prompt))
            self._to_engine(message)
            if hint.pin is not None:  # only now: a hint that could not be sent takes no room
                self._pins.add(client, hint.id, message.id, now + hint.pin)
            self._counters["hints"] += 1
        except Exception as error:
            self.unused()
            log.info("a hint was not used: %s", type(error).__name__)

    def unused(self) -> None:
        self._counters["hints_unused"] += 1

    def release(self, client: Client, request_id: str) -> None:
        """Releases the pin of the client under this request id, if there is one."""
        self.end(self._pins.take(client, request_id))

    def client_lost(self, client: Client) -> None:
        for number in self._pins.take_all(client):
            self.end(number)

    def engine_lost(self) -> None:
        self._pins.clear()

    def end(self, number: int | None) -> None:
        """Ends a hint that the engine may still compute, and its pin; None: nothing.

        A lost message does no harm: the hint is computed once, and the pin ends when its time is over.
        """
        if number is None:
            return
        try:
            self._to_engine(EngineRelease(number))
        except Exception:
            log.exception("the release of hint %d could not be sent", number)


class ClientPins:
    """Maps clients and request ids to the engine's pins: the engine knows no clients.

    Args:
        most: pins of all clients together.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._pins: dict[tuple[Client, str], tuple[int, float]] = {}  # → (engine's id, end if unused)

    def __len__(self) -> int:
        return len(self._pins)

    def room(self, now: float) -> bool:
        """Returns whether one more pin may be added; forgets expired ones first if the table is full.

        The engine ends an expired pin by itself, a while later if it was used."""
        if len(self._pins) >= self._most:
            self._pins = {name: pin for name, pin in self._pins.items() if pin[1] > now}
        return len(self._pins) < self._most

    def add(self, client: Client, request_id: str, number: int, ends: float) -> None:
        assert (client, request_id) not in self._pins, "take the former one first"
        self._pins[client, request_id] = (number, ends)

    def take(self, client: Client, request_id: str) -> int | None:
        """Removes a pin → the engine's id; None for an unknown request id."""
        pin = self._pins.pop((client, request_id), None)
        return None if pin is None else pin[0]

    def take_all(self, client: Client) -> list[int]:
        """Removes all pins of one client → the engine's ids."""
        request_ids = [request_id for owner, request_id in self._pins if owner == client]
        return [self._pins.pop((client, request_id))[0] for request_id in request_ids]

    def clear(self) -> None:
        """Forgets all pins, when their engine is gone."""
        self._pins.clear()
