"""Named points at which a test can make the system fail. In production the hook is `no_faults`.

Points: `gateway.tokenize`, `gateway.send`, `engine.plan`, `engine.forward`, `engine.sample`, `engine.commit`,
`memory.allocate`, `engine.start`. A hook raises what it wants the point to raise, or returns.
"""

from collections.abc import Callable

FaultHook = Callable[[str], None]


def no_faults(point: str) -> None:
    """Does nothing: no point fails on purpose."""


class FailAt:
    """Raises `error` at the k-th visit of one point, once. `visits` counts all points."""

    def __init__(self, point: str, k: int, error: Exception) -> None:
        assert k >= 1, "visits are counted from 1"
        self.point, self.k, self.error = point, k, error
        self.visits: dict[str, int] = {}

    def __call__(self, point: str) -> None:
        self.visits[point] = self.visits.get(point, 0) + 1
        if point == self.point and self.visits[point] == self.k:
            raise self.error
