"""Manages the window slots of requests: which ones they need, and from where on a cached prefix can be used.

    tokens of a request     0 ·········· computed − reach + 1 ······ computed ······ end
    window layers see           freed when slots run out   [ needed by the next rows    )
    full layers see         [ all of it                                                  )

A prefix that is cached in the full layers can be used only up to a token before which the window is whole. Rows after
it are computed again: in full layers they read the keys of the tree and write none, in window layers they write those
that are missing. The tree has them from then on, for every request.

Windows are worth most where requests begin and end: at forks, at the ends of texts and hints, at marks, and at
intervals of long prompts. There they are marked as used. Nothing is locked: when window slots run out, the windows of
the open requests are found by looking at each of them.
"""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from ..cache.radix_cache import Match
from ..cache.slot_allocator import IntegrityError
from ..cache.window_slots import WindowSlots
from ..core.instruments import Counters
from .policy import SchedulerConfig
from .request import Request, Scoring

_STRIDE = 8  # windows of a long prompt from one that is marked to the next, at least
_PROMPT_SHARE = 4  # the windows that one prompt marks at intervals are at most this part of the slots


class WindowManager:
    """Finds room for windows, and marks those to be kept. KVManager calls it, which owns pool and tree.

    Args:
        kept: the prefixes with a pin or a keep.
    """

    def __init__(
        self, slots: WindowSlots, config: SchedulerConfig, counters: Counters, kept: Callable[[], Iterable[Match]]
    ) -> None:
        self.slots = slots
        self._counters = counters
        self._kept = kept
        self._headroom = config.headroom
        self._stride = max(config.snapshot_stride, _STRIDE * slots.reach)
        self._open: dict[int, Request] = {}  # by number
        self._planned: dict[int, int] = {}  # request → end of its rows in the step that is planned
        self.margin = 0  # tokens before a window that are marked with it
        self._attached: list[NDArray[np.int32]] = []  # cached slots whose rows run in the step that is planned

    # ------------------------------------------------------------------------------------------ a request

    def open(self, request: Request) -> None:
        self._open[request.number] = request

    def detach(self, request: Request) -> None:
        self._open.pop(request.number, None)
        self._planned.pop(request.number, None)

    def begin_step(self) -> None:
        self._planned.clear()
        self._attached.clear()

    def attached_now(self, slots: NDArray[np.int32]) -> bool:
        """Returns whether the step that is planned writes window slots of cached tokens in `slots`."""
        return any(bool(np.isin(slots, attached).any()) for attached in self._attached)

    def usable(self, request: Request) -> int:
        """Returns the number of tokens after which the request finds all that its next rows see."""
        most = min(request.kv_length, request.first_logit_row)
        return self.slots.usable(request.slots(0, most), self._reach(request))

    def use(self, request: Request, end: int) -> None:
        """Marks the window of a request before token `end` as one in which a request begins or ends."""
        self.slots.use(request.slots(max(0, end - self._reach(request) - self.margin + 1), end))

    def end(self, request: Request) -> None:
        """Marks the last window of a request that ends."""
        if not isinstance(request.job, Scoring):
            self.use(request, min(request.computed, request.kv_length))

    def fill(self, request: Request, end: int) -> int:
        """Gives window slots to those cached tokens before `end` that lack them and whose rows run.

        Returns the first row that writes to its window slot.
        """
        self._planned[request.number] = end
        first = request.computed
        lacking = self._lacking(request, end)
        if not lacking.any():
            return first + len(lacking)
        attached = request.slots(first, first + len(lacking))[lacking]
        self.slots.attach(attached)
        self._attached.append(attached)
        return first + int(lacking.argmax())

    def mark(self, request: Request, end: int) -> None:
        """Marks windows at intervals of the rows before `end`, which have their slots."""
        stride, prompt = self._stride, request.prompt_length
        while prompt * self.slots.reach > stride * max(1, self.slots.total // _PROMPT_SHARE):
            stride *= 2
        for place in range((request.computed // stride + 1) * stride, min(end, prompt) + 1, stride):
            self.use(request, place)

    # ------------------------------------------------------------------------------------------ loaded pages

    def reserve(self, count: int) -> bool:
        """Frees window slots until `count` are free, and returns whether there are so many."""
        if count > self.slots.free:
            self._reclaim(count - self.slots.free)
        return count <= self.slots.free

    def complete(self, slots: NDArray[np.int32]) -> bool:
        """Gives window slots to those of `slots` that have none; False: there is no room for them."""
        lacking = slots[self.slots.of(slots) == 0]
        if not self.reserve(len(lacking)):
            return False
        self.slots.attach(lacking)
        return True

    # ------------------------------------------------------------------------------------------ room

    def most_rows(self, request: Request) -> int:
        """Returns the most rows of a request that can run in one step, with all window slots for them."""
        return self.slots.total - (self._reach(request) - 1)

    def make_room(self, request: Request, end: int, count: int) -> bool:
        """Reclaims window slots for rows up to `end`, of which `count` get new slots; False: others need too many."""
        needed = count + int(np.count_nonzero(self._lacking(request, end)))
        if needed > self.slots.free:
            self._planned[request.number] = end
            self._reclaim(needed - self.slots.free)
        return needed <= self.slots.free

    def rows_that_fit(self, request: Request, end: int) -> int:
        """Returns the exclusive end of the rows up to `end` for which window slots can be had now; `end` if for none.

        A prompt goes on in shorter chunks where the windows of other requests leave little room. Rows of pictures are
        not cut.
        """
        if self.make_room(request, end, max(0, end - request.slot_end)) or request.pictures.both_ways:
            return end
        costs = np.arange(request.computed, end) >= request.slot_end
        lacking = self._lacking(request, end)
        costs[: len(lacking)] = lacking
        fitting = int(np.searchsorted(np.cumsum(costs), self.slots.free, side="right"))
        return request.computed + fitting if fitting else end

    def fits(self, request: Request, missing: Callable[[Request], int]) -> bool:
        """Returns whether the windows of an opened request and of those that run fit, with the headroom of each.

        One that runs alone always fits.

        Args:
            missing: slots that a request still needs.
        """
        if len(self._open) == 1:
            return True
        ahead = self._headroom + self.slots.reach
        if sum(min(other.length + self._headroom, ahead) for other in self._open.values()) <= self.slots.total:
            return True
        growth = min(request.length - self.usable(request) + self._headroom, ahead)
        for other in self._open.values():
            if other is not request:
                growth += min(missing(other) + self._headroom, ahead)
        return int(np.count_nonzero(self._held())) + growth <= self.slots.total

    def _lacking(self, request: Request, end: int) -> NDArray[np.bool_]:
        """Returns for each cached token from the next row to `end` whether it has no window slot."""
        first = request.computed
        lacking: NDArray[np.bool_] = self.slots.of(request.slots(first, max(first, min(end, request.kv_length)))) == 0
        return lacking

    def _reach(self, request: Request) -> int:
        """Returns the number of tokens that a row of the request may see: more where it sees a whole picture."""
        pictures = request.pictures
        longest = max((span.end - span.start for span in pictures.spans), default=0) if pictures.both_ways else 0
        return self.slots.reach + longest

    def _held(self) -> NDArray[np.bool_]:
        """Returns for each slot whether an open request needs its window slot."""
        held = self.slots.none()
        for request in self._open.values():
            first = request.computed
            end = request.kv_length if request.decoding else max(first, self._planned.get(request.number, first))
            held[request.slots(max(0, first - self._reach(request) + 1), end)] = True
            held[request.slots(request.kv_length, request.slot_end)] = True
        return held

    def _reclaim(self, count: int) -> None:
        spared = self.slots.none()
        for match in self._kept():
            spared[match.slots(max(0, match.length - self.slots.reach + 1))] = True
        self._counters.window_slots_reclaimed += self.slots.reclaim(count, held=self._held(), spared=spared)

    # ------------------------------------------------------------------------------------------ check

    def check(self, running: Iterable[Request]) -> None:
        """Checks that the open requests are those that run, and that each has all that its next row sees.

        Raises:
            IntegrityError: says what contradicts what.
        """
        requests = {request.number: request for request in running if request.match is not None}
        if requests != self._open:
            raise IntegrityError(f"{len(self._open)} requests are open in window layers, and {len(requests)} run")
        for request in requests.values():
            first = max(0, request.computed - self._reach(request) + 1)
            if not self.slots.of(request.slots(first, request.computed)).all():
                raise IntegrityError(f"request {request.number} lacks a part of the window before its next row")
            if not self.slots.of(request.slots(request.kv_length, request.slot_end)).all():
                raise IntegrityError(f"request {request.number} has slots for its next tokens without window slots")
