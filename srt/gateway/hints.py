"""Prefixes that clients want computed ahead, and those of them that they have pinned. Nothing here is ever answered."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from ...lang.protocol import Hint
from ..core.clock import Clock
from ..core.faults import FaultHook
from ..core.messages import EngineRelease, ToEngine
from ..multimodal.cache import Picture
from ..multimodal.prompts import pictures_of
from .front_end import Client
from .pin_table import PinTable
from .validation import Admission

log = logging.getLogger("umbel.gateway")


class HintDesk:
    """A hint that cannot be used costs nothing and is counted.

    Args:
        bring: sends the engine the pictures that the next message holds.
        counters: "hints" and "hints_unused" go there.
    """

    def __init__(
        self,
        admission: Admission,
        *,
        most_pins: int,
        to_engine: Callable[[ToEngine], None],
        bring: Callable[[Sequence[Picture]], None],
        clock: Clock,
        faults: FaultHook,
        counters: Counter[str],
    ) -> None:
        self._admission = admission
        self._pins = PinTable(most_pins)
        self._to_engine = to_engine
        self._bring = bring
        self._clock = clock
        self._faults = faults
        self._counters = counters

    def take(self, client: Client, hint: Hint, context_length: int | None) -> None:
        """The engine is ready for it."""
        try:
            message = self._admission.hint(hint)
            if context_length is not None and len(message.token_ids) > context_length:
                self.unused()
                return
            now = self._clock.now()
            if hint.pin is not None:
                if not self._pins.room(now):
                    self.unused()
                    return
                self._release(self._pins.take(client, hint.id))
            self._faults("gateway.send")
            self._bring(pictures_of(hint.prompt))
            self._to_engine(message)
            if hint.pin is not None:  # the engine has it; one that could not be sent takes no room
                self._pins.add(client, hint.id, message.id, now + hint.pin)
            self._counters["hints"] += 1
        except Exception as error:
            self.unused()
            log.info("a hint was not used: %s", type(error).__name__)

    def unused(self) -> None:
        self._counters["hints_unused"] += 1

    def release(self, client: Client, label: str) -> None:
        """What the client has pinned under this label, if anything."""
        self._release(self._pins.take(client, label))

    def client_lost(self, client: Client) -> None:
        for number in self._pins.take_all(client):
            self._release(number)

    def engine_lost(self) -> None:
        self._pins.clear()

    def _release(self, number: int | None) -> None:
        """A pin that is not released ends when its time is over."""
        if number is None:
            return
        try:
            self._to_engine(EngineRelease(number))
        except Exception:
            log.exception("the release of pin %d could not be sent", number)
