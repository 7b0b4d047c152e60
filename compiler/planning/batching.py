"""What a batch of one graph knows before it runs: what its programs share, and how much each may hold.

begin    the head that all have in common goes to the backend once, pinned
admits   a program starts when the peaks of those in flight leave room for its own: nothing has to be computed twice
leaves   its room is free
end      the head may be evicted

pool     [ head, once | rest of program 3 | rest of program 4 | rest of 5 |   6 does not fit yet   ]
"""

import threading
from collections.abc import Mapping, Sequence
from inspect import BoundArguments
from typing import Any

from ...interpreter import loop
from ...interpreter.arguments import RunOptions
from ...lang.errors import CapabilityError, UmbelError
from ..graph import Graph
from .heads import common_head, shared_arguments
from .memory import peak_tokens
from .pinning import Cached, pin


class BatchPlan:
    """Of one call of run_batch; a `batch.Companion`.

    Args:
        defaults: arguments that may be left out.
        pin_head: keep the common head in the backend's cache while the batch runs, where it can be kept.
        plan_memory: start programs so that what they may hold fits the backend's pool.

    Attributes:
        head: what was pinned.
        most_tokens: that programs in flight were allowed to hold, the head counted once.
        waited: programs that did not start as soon as they could have.
    """

    def __init__(
        self, graph: Graph, options: RunOptions, defaults: Mapping[str, Any], *, pin_head: bool, plan_memory: bool
    ) -> None:
        self._graph = graph
        self._options = options
        self._defaults = defaults
        self._pins_head = pin_head
        self._plans_memory = plan_memory
        self._lock = threading.Lock()  # programs leave on the streams' loop
        self._rests: dict[int, int] = {}  # program → tokens that it may hold beside the head
        self._pool: int | None = None
        self._head_tokens = 0
        self._turned_away = -1
        self.head: Cached | None = None
        self.most_tokens = 0
        self.waited = 0

    def begin(self, calls: Sequence[BoundArguments] | None) -> None:
        """Before the first program starts. `calls`: all of them, where they are known.

        Raises:
            CapabilityError: memory is to be planned, and the backend has no pool.
        """
        alone = calls is not None and len(calls) < 2
        if self._plans_memory or (self._pins_head and not alone):
            loop.streams.run(self._prepare(calls))

    def admits(self, index: int, call: BoundArguments) -> bool:
        """Whether the program may start now; then its room is taken. One that is alone always may."""
        if self._pool is None:
            return True
        rest = self._rest(call)
        with self._lock:
            held = self._head_tokens + sum(self._rests.values()) + rest
            if self._rests and held > self._pool:
                self.waited += index != self._turned_away
                self._turned_away = index
                return False
            self._rests[index] = rest
            self.most_tokens = max(self.most_tokens, held)
            return True

    def leaves(self, index: int) -> None:
        with self._lock:
            self._rests.pop(index, None)

    def end(self) -> None:
        if self.head is not None:
            self.head.release()

    # -------------------------------------------------------------------------------- how

    async def _prepare(self, calls: Sequence[BoundArguments] | None) -> None:
        backend = self._options.backend
        try:
            await backend.start()
        except Exception:  # every program will say so itself
            return
        shared = shared_arguments([self._arguments(call) for call in calls]) if calls else {}
        template = backend.chat_template
        parts = await template.away(common_head, self._graph, template, shared)
        if parts:
            self._head_tokens = backend.tokens_at_most(parts)
        if self._pins_head:
            self.head = pin(backend, parts, salt=self._options.salt)
        if self._plans_memory:
            size = (await backend.control("info")).result.get("total_slots")
            if not isinstance(size, int | float):
                raise CapabilityError(
                    f"{backend.capabilities.name} tells of no KV pool whose memory could be planned; leave out "
                    "plan_memory=True, or run the batch on umbel.Runtime()"
                )
            self._pool = int(size)

    def _rest(self, call: BoundArguments) -> int:
        try:
            peak = peak_tokens(self._graph, self._options.backend, self._arguments(call), self._options.sampling)
        except UmbelError:  # the run will say what is wrong
            return 0
        return max(0, peak - self._head_tokens)

    def _arguments(self, call: BoundArguments) -> dict[str, Any]:
        return {**self._defaults, **call.arguments}
