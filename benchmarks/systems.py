"""What is measured: umbel in one configuration, or a peer. Both run programs one at a time and many at once."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

import umbel as ul
from umbel.srt.simulator.workload import Program, Values

from .configuration import Configuration, Value
from .record import machine
from .replay.evaluate import Completer, evaluate, evaluate_all
from .replay.program import play
from .replay.recorder import Call, Recorder

Counters = Mapping[str, float]


class System(Protocol):
    """An engine that is running. Whoever started it stops it."""

    name: str
    can_flush: bool  # its cache can be emptied between two runs

    def flush(self) -> None:
        """An empty cache. Does nothing where that cannot be had."""

    def one(self, program: Program) -> Values:
        """One program, to its end."""

    def many(self, programs: Sequence[Program], concurrency: int) -> list[Values | Exception]:
        """All of them, so many at once; the error in place of one that failed."""

    def counters(self) -> Counters:
        """Cumulative counters of the engine; empty where it has none."""

    def take_calls(self) -> list[Call]:
        """Calls since the last time; empty where they are not seen."""

    def resident_bytes(self) -> int: ...


class Umbel:
    """A runtime and the way in which programs run on it.

    Args:
        configuration: what is on and off.
        runtime: it may serve several configurations that differ in the frontend only.
        pids: the runtime's processes.
        recorder: in front of the runtime; made from the configuration if left out.
    """

    can_flush = True

    def __init__(
        self,
        configuration: Configuration,
        runtime: ul.Runtime,
        pids: frozenset[int] = frozenset(),
        recorder: Recorder | None = None,
    ) -> None:
        self.name = configuration.name
        self._configuration = configuration
        self._runtime = runtime
        self._pids = pids
        self._recorder = recorder or Recorder(runtime, hints=configuration.hints)

    @property
    def frontend(self) -> bool:
        """It shares its runtime with the full configuration."""
        return self._configuration.frontend

    def flush(self) -> None:
        ul.flush_cache(self._recorder)

    def one(self, program: Program) -> Values:
        state = play.run(program.ops, self._configuration.parallel, backend=self._recorder)
        values: Values = state.ret_value
        return values

    def many(self, programs: Sequence[Program], concurrency: int) -> list[Values | Exception]:
        states = play.run_batch(
            [(program.ops, self._configuration.parallel) for program in programs],
            backend=self._recorder,
            num_threads=concurrency,
            on_error="return",
        )
        return [_outcome(state) for state in states]

    def counters(self) -> Counters:
        facts = ul.get_server_info(self._recorder)
        return {name: value for name, value in facts.items() if isinstance(value, int | float)}

    def take_calls(self) -> list[Call]:
        return self._recorder.take()

    def resident_bytes(self) -> int:
        return machine.resident_bytes(self._pids)


def _outcome(state: object) -> Values | Exception:
    """A state's values, or the error of a `Failure`."""
    if isinstance(state, ul.State):
        values: Values = state.ret_value
        return values
    error = getattr(state, "error", None)
    assert isinstance(error, Exception), "run_batch gives states and failures"
    return error


def start(
    configuration: Configuration, model: str | None, common: Mapping[str, Value]
) -> tuple[ul.Runtime, frozenset[int]]:
    """A runtime that is ready, and its processes."""
    before = machine.children()
    options = configuration.runtime_options(common)
    runtime = ul.Runtime(model, **options).wait_ready()  # type: ignore[arg-type]  # checked by runtime_options
    return runtime, frozenset(machine.children() - before)


class Measured(Completer, Protocol):
    """The part of a peer that is needed here; `benchmarks/peers/peer.py` has all of it."""

    def resident_bytes(self) -> int: ...


class PeerSystem:
    """A peer that is running, asked for the same programs by the evaluator."""

    can_flush = False

    def __init__(self, name: str, peer: Measured) -> None:
        self.name = name
        self._peer = peer
        self._runner = asyncio.Runner()  # one loop for all calls: connections are kept

    def flush(self) -> None:
        """No peer offers it; texts are marked instead, see `measure.marked`."""

    def one(self, program: Program) -> Values:
        return self._runner.run(evaluate(program, self._peer))

    def many(self, programs: Sequence[Program], concurrency: int) -> list[Values | Exception]:
        return self._runner.run(evaluate_all(programs, self._peer, concurrency))

    def counters(self) -> Counters:
        return {}

    def take_calls(self) -> list[Call]:
        return []

    def resident_bytes(self) -> int:
        return self._peer.resident_bytes()

    def close(self) -> None:
        self._runner.close()
