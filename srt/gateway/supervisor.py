"""Decides whether the engine is alive and when to start it again; touches no process.

        STARTING ──ready──▶ READY ──exit, silence, endless step──▶ DOWN ──back-off──▶ STARTING …
            └── fails `max_start_failures` times in a row ──▶ GIVEN_UP, with the cause

A thread of the engine sends the number of the current step twice a second. While that is missing, or a step is long,
the server samples the process: one that computes or waits for a core is alive, however busy the machine is; one that is
stopped, or sleeps while an answer is due, is not. The server calls `decide` regularly and carries out the decision.
"""

from dataclasses import dataclass
from enum import Enum, auto

from ...lang.transport.process_life import ProcessSample, TimeSpent, share_in_words
from ..core.config import SupervisionLimits
from ..core.instruments import Clock


class EngineLife(Enum):
    DOWN = auto()
    STARTING = auto()
    READY = auto()
    GIVEN_UP = auto()


@dataclass(frozen=True, slots=True)
class Start:
    """Decision: start an engine process now."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Decision: end the engine process now; report its exit as usual."""

    reason: str


@dataclass(frozen=True, slots=True)
class StartFailure:
    """The cause of a failed start: a class of lang.errors by name, and its message."""

    kind: str
    message: str


class Supervisor:
    """Tracks the life of the engine and decides on it. A new one decides on a start at once."""

    def __init__(self, clock: Clock, limits: SupervisionLimits) -> None:
        self._clock = clock
        self._limits = limits
        self._life = EngineLife.DOWN
        self._since = clock.now()  # of this state
        self._restart_at = clock.now()
        self._failures = 0  # starts in a row that did not become ready
        self._troubles = 0  # deaths in a row, whether ready or not
        self._heard = clock.now()
        self._step = -1
        self._step_since = clock.now()
        self._silence = TimeSpent()  # since the last heartbeat
        self._stepping = TimeSpent()  # in this step; before the engine is ready: in the start
        self._reading: ProcessSample | None = None  # the last one of this process
        self._killing = False
        self._reported: StartFailure | None = None
        self.failure: StartFailure | None = None  # set with GIVEN_UP

    @property
    def life(self) -> EngineLife:
        return self._life

    @property
    def start_explained(self) -> bool:
        """Whether the starting engine has reported why it cannot start."""
        return self._reported is not None

    @property
    def wants_readings(self) -> bool:
        """Whether the process is to be sampled: it starts, owes a heartbeat, or is in one step."""
        now, patience = self._clock.now(), 2 * self._limits.heartbeat_period
        match self._life:
            case EngineLife.STARTING:
                return True
            case EngineLife.READY:
                return now - self._heard > patience or now - self._step_since > patience
            case EngineLife.DOWN | EngineLife.GIVEN_UP:
                return False

    # ------------------------------------------------------------------ what happened

    def started(self) -> None:
        """Notes that a process was started."""
        self._enter(EngineLife.STARTING)
        self._reported = None
        self._killing = False
        self._reading = None
        self._silence.begin()
        self._stepping.begin()

    def start_failed(self, failure: StartFailure) -> None:
        """Notes the cause that the engine reports for not starting; its exit follows."""
        self._reported = failure

    def ready(self) -> None:
        """Notes that the engine is ready."""
        self._enter(EngineLife.READY)
        self._failures = 0
        self._heard = self._clock.now()
        self._begin_step(-1)

    def heartbeat(self, step: int, *, busy: bool) -> None:
        """Notes a heartbeat, sent during step `step`; an idle engine is in no step."""
        self._heard = self._clock.now()
        self._silence.begin()
        if step != self._step or not busy:
            self._begin_step(step)

    def observe(self, engine: ProcessSample, observer: ProcessSample) -> None:
        """Takes a sample of the engine's process and of ours. Call it while `wants_readings`."""
        self._reading = engine
        for stay in (self._silence, self._stepping):
            stay.look(self._clock.now(), engine, observer)

    def exited(self, reason: str) -> None:
        """Notes the exit of the process."""
        now = self._clock.now()
        if self._life is EngineLife.STARTING:
            self._failures += 1
            # A typed cause (an unknown model, a broken file) will not go away by trying again.
            if self._reported is not None or self._failures >= self._limits.max_start_failures:
                self.failure = self._reported or StartFailure(
                    "EngineError", f"the engine ended while it started: {reason}"
                )
                self._enter(EngineLife.GIVEN_UP)
                return
        elif now - self._since > self._limits.stable_life:
            self._troubles = 0
        self._restart_at = now + self._limits.back_off[min(self._troubles, len(self._limits.back_off) - 1)]
        self._troubles += 1
        self._enter(EngineLife.DOWN)

    # ------------------------------------------------------------------ what to do

    def decide(self) -> Start | Kill | None:
        """Returns the action to take now. Call it regularly."""
        now = self._clock.now()
        match self._life:
            case EngineLife.DOWN:
                return Start() if now >= self._restart_at else None
            case EngineLife.STARTING:
                reason = self._start_trouble(now)
            case EngineLife.READY:
                reason = self._trouble()
            case EngineLife.GIVEN_UP:
                return None
        if reason is None or self._killing:
            return None
        self._killing = True
        return Kill(reason)

    def _start_trouble(self, now: float) -> str | None:
        """Returns why to end a start. Silence is no reason: loading libraries hold the interpreter lock for seconds."""
        if self._reported is not None:
            return "its start failed"
        if self._stepping.stopped > self._limits.longest_stop:
            return _stopped(self._stepping)
        seconds = self._limits.start_timeout
        if now - self._since <= seconds:
            return None
        spent = "" if self._reading is None else f"; it {share_in_words(self._reading)}"
        return f"it did not become ready within the startup_timeout of {seconds:g} s{spent}"

    def _trouble(self) -> str | None:
        limits, silence, stepping = self._limits, self._silence, self._stepping
        if silence.stopped > limits.longest_stop:
            return _stopped(silence)
        if silence.idle > limits.heartbeat_silence:
            return f"no sign of life for {silence.idle:.1f} s, in which it neither computed nor waited for a core"
        if stepping.computed > limits.longest_step:
            return f"step {self._step} has taken {stepping.computed:.0f} s of computing"
        if stepping.idle > limits.longest_idle_step:
            return f"step {self._step} has waited for {stepping.idle:.0f} s without computing"
        if stepping.on_disk > limits.longest_disk_wait:
            return f"step {self._step} has waited for a disk for {stepping.on_disk:.0f} s"
        return None

    def _begin_step(self, step: int) -> None:
        self._step, self._step_since = step, self._clock.now()
        self._stepping.begin()

    def _enter(self, life: EngineLife) -> None:
        self._life = life
        self._since = self._clock.now()


def _stopped(stay: TimeSpent) -> str:
    return f"its process was stopped for {stay.stopped:.1f} s (SIGSTOP, or a debugger)"
