"""Plans of steps at addresses that stay, which is where captured graphs read them.

step 1 ── plan_into ──► | plan of window class 0 | plan of window class 1 |  ◄── read by the graphs of all sizes
step 2 ── plan_into ──► |          "             |          "             |
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from ...attention.backend import AttentionBackend
from ...core.batch import Batch

MOST_KEYS = 1 << 21  # of all sequences of a step together; what has more is launched kernel by kernel

Prepared = TypeVar("Prepared")


class GraphBackend(AttentionBackend[Prepared], Protocol[Prepared]):
    """An attention backend whose plans can stay where they are. In Triton it is `TritonBackend`."""

    def reserve(self, *, rows: int, keys: int, wide: bool = False) -> Prepared:
        """An empty plan for steps of at most so many rows, and keys of all sequences together. wide: laid out for
        prompts, else for steps that mostly decode."""

    def plan_into(self, plan: Prepared, batch: Batch, window: int | None) -> bool:
        """Fill a reserved plan with a step. False: it does not fit, which a step that only decodes always does."""


class GraphPlans:
    """One plan for each window class, filled anew for each step.

    Args:
        rows: most rows of a step.
        keys: most keys of its sequences together.
        wide: as `GraphBackend.reserve` takes it.
    """

    # Any: each backend has its own prepared form, and only the backend reads it.
    def __init__(
        self, backend: GraphBackend[Any], windows: Sequence[int | None], *, rows: int, keys: int, wide: bool
    ) -> None:
        self._backend = backend
        self._keys = min(keys, MOST_KEYS)
        # A row of padding has a key of its own.
        self.by_window = {window: backend.reserve(rows=rows, keys=self._keys + rows, wide=wide) for window in windows}

    def holds(self, batch: Batch) -> bool:
        """The sequences of the step are not too long."""
        return int(batch.prefix_lengths.sum()) + batch.rows <= self._keys

    def fill(self, batch: Batch) -> bool:
        """False: a plan does not fit."""
        return all(self._backend.plan_into(plan, batch, window) for window, plan in self.by_window.items())
