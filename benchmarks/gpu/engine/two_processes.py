"""The decisive workloads as users run them: a gateway and an engine, each in a process of its own, on random weights.

Each configuration is a runtime that starts, so they come in the order of their worth, each with all workloads:
everything on, without the cache, without what hides the host's work, then without the other parts.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import umbel as ul
from umbel.srt.simulator.workload import Workload

from ...configuration import ALL, FULL, Configuration
from ...measure import Measurement
from ...record import machine
from .model_folder import write_model
from .workloads import BASE, Engine, Job, Loaded, TimedSystem

BY_WORTH = (
    FULL,
    BASE,
    *(ALL[name] for name in ("no-overlap", "no-cuda-graphs", "no-guesses", "no-tree-attention", "torch-kernels")),
)


class TwoProcesses(Engine):
    """One shape of model in runtimes with two processes."""

    group = "runtime"
    process = "two, gateway and engine, and that of the programs"

    def _jobs(self, configurations: Sequence[Configuration]) -> list[Job]:
        """Returns all configurations on all workloads, then the first two again, the other one first."""
        first = [(one, file, 0) for one in configurations for file in self._workloads]
        pair = [one for one in (BASE, FULL) if one in configurations]
        again = [(one, file, turn) for turn in range(1, self._sizes.turns) for one in pair for file in self._workloads]
        return [*first, *again]

    def _key(self, configuration: Configuration) -> str:
        return ", ".join(f"{name}={value}" for name, value in configuration.options.items())

    @cached_property
    def _model(self) -> Path:
        return write_model(self.shape, self._tokenizer, Path(self._folder.name) / "model")

    def _load(self, configuration: Configuration) -> Loaded:
        sizes = self._sizes
        options = configuration.runtime_options(
            {
                **sizes.options,
                "device": self._device.type,
                "dtype": sizes.dtype,
                "pool_tokens": self._pool_tokens(),
            }
        )
        debug = {"random_weights": True, "trace": str(self._trace)}
        runtime = ul.Runtime(str(self._model), debug=debug, **options)  # type: ignore[arg-type]  # checked above
        try:
            return runtime.wait_ready()
        except BaseException:
            runtime.shutdown()
            raise

    def _end(self, loaded: Loaded | None) -> None:
        if isinstance(loaded, ul.Runtime):
            loaded.shutdown()

    def _run(self, configuration: Configuration, file: Workload, loaded: Loaded) -> Measurement:
        assert isinstance(loaded, ul.Runtime), "as this class loads it"
        system = TimedSystem(configuration, loaded, frozenset(machine.children()))
        run = self._measured(system, file)
        return self._with_idle(configuration, run, system.ran)
