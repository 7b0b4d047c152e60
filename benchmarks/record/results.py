"""Everything that a run of the benchmark found, as one record; it is written as JSON after every workload."""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from umbel.lang.errors import ParameterError

from ..measure import Measurement
from ..micro import Figure
from .machine import Machine


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One run with a share of the calls kept from the cache (figure 8 a, b)."""

    workload: str
    salted_share: float
    hit_rate: float
    batch_size: float  # generated tokens per step of the engine
    rate: float  # programs per second
    first_token: float  # mean seconds of a call until its first token
    call_seconds: float  # mean seconds of a call


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of paired runs, and the smallest and largest."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> "Spread | None":
        known = list(values)
        return Spread(statistics.median(known), min(known), max(known)) if known else None


@dataclass(slots=True)
class Results:
    """Grows while the benchmark runs.

    Attributes:
        settings: what was asked for.
        missing: configurations and peers that could not run, and why.
        refused: workloads that could not run, and why.
        about: what the report calls each system.
    """

    machine: Machine
    settings: dict[str, str | int | float | bool | None]
    missing: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    sweep: list[SweepPoint] = field(default_factory=list)

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(measurement.workload for measurement in self.measurements))

    @property
    def systems(self) -> list[str]:
        return list(dict.fromkeys(measurement.system for measurement in self.measurements))

    def of(self, workload: str, system: str) -> list[Measurement]:
        return [m for m in self.measurements if (m.workload, m.system) == (workload, system)]

    def spread(self, workload: str, system: str, quantity: Callable[[Measurement], float]) -> Spread | None:
        return Spread.of(quantity(measurement) for measurement in self.of(workload, system))

    def against(self, workload: str, system: str, base: str, quantity: Callable[[Measurement], float]) -> Spread | None:
        """Ratios of the two systems' runs that followed each other in the same turn."""
        bases = {measurement.repeat: measurement for measurement in self.of(workload, base)}
        return Spread.of(
            quantity(measurement) / quantity(bases[measurement.repeat])
            for measurement in self.of(workload, system)
            if measurement.repeat in bases
        )

    def added_to(self, earlier: "Results") -> "Results":
        """The earlier record, to be gone on with.

        Raises:
            ParameterError: its figures were taken on another processor, commit or setting, and do not go together.
        """
        for name, ours, theirs in (
            ("processor", self.machine.processor, earlier.machine.processor),
            ("commit", self.machine.commit, earlier.machine.commit),
            ("settings", self.settings, earlier.settings),
        ):
            if ours != theirs:
                raise ParameterError(f"--add: the {name} of the results is {theirs}, now it is {ours}; leave --add out")
        return earlier

    def write(self, path: Path) -> None:
        """As JSON, in place of what was there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def read(path: Path) -> Results:
    """What `write` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Results)
