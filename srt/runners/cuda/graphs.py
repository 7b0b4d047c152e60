"""Captured graphs of steps: one for each number of rows that steps are padded to.

A step of a 7B model is some 300 kernels of a few microseconds each; launching them one by one takes longer than
running them. A captured step is launched by one call. What it reads lies at fixed addresses, and its number of rows is
fixed, so that steps are padded to the next of a few sizes.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from .device import Accelerator, Graph


def sizes_upto(most: int) -> tuple[int, ...]:
    """Numbers of rows that steps are padded to: 1, 2, 4, 8, 12, 16, 24, 32, 48, 64 and so on, the last is `most`.

    From 8 rows on at most a third of a padded step is padding, and more graphs would take longer to capture.
    """
    sizes = [1, 2, 4]
    power = 8
    while sizes[-1] < most:
        sizes += [power, power * 3 // 2]
        power *= 2
    return (*(size for size in sizes if size < most), most)


class StepGraphs:
    """Captures a size when it is first run, or when it is asked to.

    Args:
        sizes: ascending.
        work: what a step of so many rows does.
    """

    def __init__(self, accelerator: Accelerator, sizes: Sequence[int], work: Callable[[int], None]) -> None:
        self.sizes = sizes
        self.replays = 0
        self._accelerator = accelerator
        self._work = work
        self._graphs: dict[int, Graph] = {}

    def __len__(self) -> int:
        """How many are captured."""
        return len(self._graphs)

    @property
    def most_rows(self) -> int:
        return self.sizes[-1]

    def size_for(self, rows: int) -> int:
        """The smallest size that holds so many rows; there is one up to `most_rows`."""
        return self.sizes[bisect_left(self.sizes, rows)]

    def capture(self, size: int) -> None:
        if size not in self._graphs:
            self._graphs[size] = self._accelerator.capture(lambda: self._work(size))

    def run(self, size: int) -> None:
        """One step of so many rows."""
        self.capture(size)
        self._graphs[size].replay()
        self.replays += 1
