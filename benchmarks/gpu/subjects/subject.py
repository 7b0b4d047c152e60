"""A piece of work and what it costs at least: from that and its time comes a figure."""

from collections.abc import Callable
from dataclasses import dataclass

from ..figures import Figure, PendingFigure, Unit
from ..hardware import Limits
from ..stopwatch import Stopwatch

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is timed.

    Attributes:
        work: what a model would launch. Memory is made by whoever makes the subject.
        size: bytes that must be read and written.
        operations: that must be done in products.
        times: that the work is done in one call.
        beside: what torch does in its place.
        base: work that it is compared with; the unit is then how many times faster it is.
        most: times faster that it can be, by the bytes that both read.
    """

    group: str
    name: str
    unit: Unit
    work: Work
    size: float
    operations: float = 0.0
    times: int = 1
    must: float | None = None
    stretch: float | None = None
    beside: Work | None = None
    base: Work | None = None
    most: float | None = None
    note: str = ""

    def pending(self, stopwatch: Stopwatch, limits: Limits) -> PendingFigure:
        return PendingFigure(self.name, lambda: self.figure(stopwatch, limits))

    def figure(self, stopwatch: Stopwatch, limits: Limits) -> Figure:
        measured = self._quantity(stopwatch.seconds(self.work) / self.times, stopwatch, limits)
        beside = None
        if self.beside is not None:
            beside = self._quantity(stopwatch.seconds(self.beside) / self.times, stopwatch, limits)
        return Figure(
            self.group,
            self.name,
            self.unit,
            measured,
            limit=self._limit(limits),
            must=self.must,
            stretch=self.stretch,
            beside=beside,
            note=self.note,
        )

    def _quantity(self, seconds: float, stopwatch: Stopwatch, limits: Limits) -> float:
        match self.unit:
            case Unit.BANDWIDTH:
                return 100 * self.size / seconds / limits.bandwidth
            case Unit.RATE:
                return self.operations / seconds / 1e12
            case Unit.MICROSECONDS:
                return seconds * 1e6
            case Unit.TIMES:
                assert self.base is not None, "something to be compared with"
                return stopwatch.seconds(self.base) / seconds
            case _:
                raise AssertionError(f"{self.unit} is not had from a time")

    def _limit(self, limits: Limits) -> float | None:
        match self.unit:
            case Unit.BANDWIDTH:
                return 100.0
            case Unit.RATE:
                return limits.rate / 1e12
            case Unit.MICROSECONDS:
                return limits.seconds(self.size, self.operations) * 1e6
            case _:
                return self.most
