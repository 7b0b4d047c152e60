"""The benchmark as a whole: which systems meet in which groups, and in which order they run.

Runs of a group follow each other in turn, workload by workload, so that a ratio compares runs that are seconds apart;
then all workloads again. When the time is up, repeats are left out rather than workloads.

    group 1   full, no-cache, fcfs, ...   as many runtimes as memory holds, all alive
    group 2   full, fcfs, ...           the rest, again with the full configuration as their partner
    group 3   full, vllm_cpu              a peer at a time
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import umbel as ul
from umbel.lang.errors import UmbelError
from umbel.lang.runtime_options import DEFAULT, RuntimeOptions
from umbel.srt.launch import open_tokenizer
from umbel.srt.simulator.workload import Workload
from umbel.srt.tokenizer.prompt import PromptEncoder

from . import micro, systems, workload
from .configuration import FULL, Configuration, Value, available
from .measure import CONCURRENCY, WARM, Clock, marked, measure
from .peers.locate import create
from .peers.peer import PeerError, PeerOptions
from .record import plots
from .record.machine import describe, free_bytes
from .record.report import markdown
from .record.results import Results, read
from .replay.program import check
from .sweep import sweep
from .systems import PeerSystem, System, Umbel

RECORD = "results.json"
RUNTIME_BYTES = 3 << 30  # what one runtime may take, when groups are made
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is run.

    Attributes:
        workloads: names of files in `folder`.
        configurations: beside the full one, which always runs.
        common: runtime options of every configuration.
        programs: of each file, from its start; None runs all.
        constraints: False drops `regex` and `json_schema` from all programs, for every system.
        serial: honour the header's `replay: serial`; the peers' record did not.
        alive: runtimes at once; None derives it from free memory.
        minutes: of which every group gets its share; no run is begun after it. None: no limit.
    """

    workloads: tuple[str, ...]
    folder: Path = workload.FOLDER
    model: str | None = None
    configurations: tuple[Configuration, ...] = ()
    common: Mapping[str, Value] = field(default_factory=dict)
    peers: Mapping[str, PeerOptions] = field(default_factory=dict)
    repeat: int = 3
    programs: int | None = None
    concurrency: int = CONCURRENCY
    warm: int = WARM
    constraints: bool = True
    serial: bool = False
    micro: bool = True
    sweep: bool = False
    alive: int | None = None
    minutes: float | None = None

    def as_facts(self) -> dict[str, str | int | float | bool | None]:
        return {
            "model": self.model or DEFAULT,
            "repeat": self.repeat,
            "programs": self.programs,
            "concurrency": self.concurrency,
            "warm": self.warm,
            "constraints": self.constraints,
            "serial": self.serial,
            "minutes": self.minutes,
            **{f"option_{name}": value for name, value in self.common.items()},
        }


class Bench:
    """One run of the benchmark. `results` is written to `folder` after every workload.

    Args:
        folder: `results/DATE-PROCESSOR` if None.
        add: what lies in the folder is kept, and this run's figures are added to it.
        say: told what happens.
        clock: seconds, for the limit of time.

    Raises:
        ParameterError: what is to be added to is of another commit or has other settings.
    """

    def __init__(
        self, settings: Settings, folder: Path | None, say: Say, *, add: bool = False, clock: Clock = time.monotonic
    ) -> None:
        self._settings = settings
        self._say = say
        self._clock = clock
        self._began = clock()
        self.results = Results(describe(), settings.as_facts())
        self.folder = folder or Path(__file__).parent / "results" / self.results.machine.slug
        if add and (self.folder / RECORD).is_file():
            self.results = self.results.added_to(read(self.folder / RECORD))
        tokenizer = open_tokenizer(RuntimeOptions(model=settings.model or DEFAULT)).tokenizer
        self._encoder = PromptEncoder(tokenizer)
        self._turns = itertools.count(1 + max((run.repeat for run in self.results.measurements), default=-1))
        self._micro = micro.Micro(self._encoder, settings.repeat)
        self._measured = {figure.system for figure in self.results.figures}  # their small figures are taken

    def run(self) -> Results:
        settings = self._settings
        workloads = self._runnable()
        configurations, missing = available(settings.configurations, settings.common)
        self.results.missing |= missing
        self.results.about |= {configuration.name: configuration.about for configuration in configurations}
        if settings.micro and not any(figure.name == micro.START for figure in self.results.figures):
            self._say("start to first token")
            self.results.figures.append(micro.start_to_first_token(settings.model, settings.common, settings.repeat))
        groups = list(self._groups(configurations))
        if groups == [[FULL]] and settings.peers:
            groups = []  # it runs beside each peer
        parts = len(groups) + len(settings.peers)
        for part, group in enumerate(groups, 1):
            with ExitStack() as stack:
                self._run_group(self._start(group, stack), workloads, part / parts)
        for part, (name, options) in enumerate(settings.peers.items(), len(groups) + 1):
            with ExitStack() as stack:
                self._start_peer(name, options, stack, workloads, part / parts)
        if settings.sweep:
            self._sweep()
        self._write()
        return self.results

    # ------------------------------------------------------------------------------------ what is run

    def _runnable(self) -> list[Workload]:
        """The files whose programs the language takes; the others are listed with the reason."""
        settings = self._settings
        usable = []
        for name in settings.workloads:
            file = workload.read(name, settings.folder).first(settings.programs)
            if not settings.constraints:
                file = file.relaxed()
            try:
                for program in file.programs:
                    check(program)
            except UmbelError as error:
                self.results.refused[name] = str(error)
            else:
                usable.append(file)
        return usable

    def _groups(self, configurations: Sequence[Configuration]) -> Iterator[list[Configuration]]:
        """The full configuration with as many others as memory has room for; those of the frontend need none."""
        free = [c for c in configurations if c.frontend]
        others = [c for c in configurations if not c.frontend and c is not FULL]
        alive = self._settings.alive or max(2, free_bytes() // RUNTIME_BYTES)
        yield [FULL, *free, *others[: alive - 1]]
        for start in range(alive - 1, len(others), alive - 1):
            yield [FULL, *others[start : start + alive - 1]]

    def _start(self, group: Sequence[Configuration], stack: ExitStack) -> list[System]:
        """Runtimes that are ready. One that does not start is listed with the reason, except the full one."""
        settings = self._settings
        started: list[System] = []
        full: tuple[ul.Runtime, frozenset[int]] | None = None
        for configuration in group:
            if configuration.frontend and full is not None:
                started.append(Umbel(configuration, *full))
                continue
            self._say(f"starting {configuration.name}")
            try:
                runtime, pids = systems.start(configuration, settings.model, settings.common)
            except UmbelError as error:
                if configuration is FULL:
                    raise
                self.results.missing[configuration.name] = f"{type(error).__name__}: {error}"
                continue
            stack.callback(runtime.shutdown)
            full = full or (runtime, pids)
            started.append(Umbel(configuration, runtime, pids))
        return started

    def _start_peer(
        self, name: str, options: PeerOptions, stack: ExitStack, workloads: Sequence[Workload], part: float
    ) -> None:
        self._say(f"starting {name}")
        try:
            peer = create(name, options)
            peer.start()
        except PeerError as error:
            self.results.missing[name] = str(error)
            return
        stack.callback(peer.stop)
        self.results.about[name] = f"{name} {peer.version}"
        system = PeerSystem(name, peer)
        stack.callback(system.close)
        self._run_group([*self._start([FULL], stack), system], workloads, part)

    # ---------------------------------------------------------------------------------------- running

    def _run_group(self, group: Sequence[System], workloads: Sequence[Workload], part: float) -> None:
        """Until `part` of the time has passed."""
        if self._settings.micro:
            for system in group:
                self._take_figures(system)
        for repeat in range(self._settings.repeat):
            for file in workloads:
                if not self._is_up(part):
                    self._run_turn(group, file, repeat)
                    self._write()
                elif not repeat:
                    names = ", ".join(system.name for system in group)
                    self.results.missing[f"{file.name} on {names}"] = "the time was up; write a larger --minutes"

    def _is_up(self, part: float) -> bool:
        minutes = self._settings.minutes
        return minutes is not None and self._clock() - self._began >= 60 * minutes * part

    def _take_figures(self, system: System) -> None:
        frontend = isinstance(system, Umbel) and system.frontend
        if system.name in self._measured or frontend:
            return
        self._measured.add(system.name)
        self._say(f"small figures of {system.name}")
        self.results.figures += self._micro.all_of(system)
        self.results.figures.append(self._micro.fork_step(system))

    def _run_turn(self, group: Sequence[System], file: Workload, repeat: int) -> None:
        """Every system once, in an order that turns with the repeats."""
        settings = self._settings
        turn = next(self._turns)
        concurrency = 1 if settings.serial and file.serial else settings.concurrency
        if repeat and not all(system.can_flush for system in group):
            file = marked(file, f"({repeat}) ")
        shift = repeat % len(group)
        for system in (*group[shift:], *group[:shift]):
            run = measure(system, file, repeat=turn, concurrency=concurrency, warm=settings.warm, encoder=self._encoder)
            self.results.measurements.append(run)
            failed = f", {len(run.failures)} failed: {run.failures[0]}" if run.failures else ""
            hits = f", hit rate {run.reuse.achieved:.1%} of {run.reuse.optimal:.1%}" if run.reuse else ""
            self._say(f"{file.name}, {system.name}: {run.rate:.3g} programs/s, {run.latency:.3g} s alone{hits}{failed}")

    def _sweep(self) -> None:
        settings = self._settings
        file = workload.read(sweep_workload(settings), settings.folder).first(settings.programs)
        self._say(f"cache hit rates on {file.name}")
        runtime, _ = systems.start(FULL, settings.model, settings.common)
        with runtime:
            self.results.sweep += sweep(runtime, file, self._encoder, concurrency=settings.concurrency)

    def _write(self) -> None:
        self.results.write(self.folder / RECORD)
        (self.folder / "results.md").write_text(markdown(self.results), encoding="utf-8")
        plots.write(self.results, self.folder)


def sweep_workload(settings: Settings) -> str:
    """The paper's, when the folder has it."""
    from .sweep import WORKLOAD

    names = workload.available(settings.folder)
    return next((name for name in names if name.startswith(WORKLOAD)), settings.workloads[0])
