"""Whether the engine lives, and when to start it again: decisions, no processes.

        STARTING ──ready──▶ READY ──exit, silence, endless step──▶ DOWN ──back-off──▶ STARTING …
            └── fails `max_start_failures` times in a row ──▶ GIVEN_UP, with the cause

A sign of life comes from a thread of the engine and carries the number of the current step, so a long
step is healthy and a stopped process is not. The caller looks regularly and carries out what is decided.
"""

from dataclasses import dataclass
from enum import Enum, auto

from .clock import Clock
from .config import SupervisionLimits


class EngineLife(Enum):
    DOWN = auto()
    STARTING = auto()
    READY = auto()
    GIVEN_UP = auto()


@dataclass(frozen=True, slots=True)
class Start:
    """Start an engine process now."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End the engine process now; report its exit as usual."""

    reason: str


@dataclass(frozen=True, slots=True)
class StartFailure:
    """Why an engine could not start: a class of lang.errors by name, and its message."""

    kind: str
    message: str


class Supervisor:
    """The engine's life as far as decisions go. A fresh one wants a start at once."""

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
        self._killing = False
        self._looked = clock.now()
        self._told: StartFailure | None = None
        self.failure: StartFailure | None = None  # set with GIVEN_UP

    @property
    def life(self) -> EngineLife:
        return self._life

    @property
    def start_explained(self) -> bool:
        """The engine that starts has said why it cannot."""
        return self._told is not None

    # ------------------------------------------------------------------ what happened

    def started(self) -> None:
        """A process has been started."""
        self._enter(EngineLife.STARTING)
        self._told = None
        self._killing = False

    def start_failed(self, failure: StartFailure) -> None:
        """The engine says why it cannot start; its exit follows."""
        self._told = failure

    def ready(self) -> None:
        """The engine has made a token."""
        self._enter(EngineLife.READY)
        self._failures = 0
        self._heard = self._step_since = self._clock.now()
        self._step = -1

    def heartbeat(self, step: int, *, busy: bool) -> None:
        """A sign of life in the middle of step `step`; an idle engine makes none."""
        now = self._clock.now()
        self._heard = now
        if step != self._step or not busy:
            self._step, self._step_since = step, now

    def exited(self, reason: str) -> None:
        """The process is gone."""
        now = self._clock.now()
        if self._life is EngineLife.STARTING:
            self._failures += 1
            # A typed cause (an unknown model, a broken file) will not go away by trying again.
            if self._told is not None or self._failures >= self._limits.max_start_failures:
                self.failure = self._told or StartFailure("EngineError", f"the engine ended while it started: {reason}")
                self._enter(EngineLife.GIVEN_UP)
                return
        elif now - self._since > self._limits.stable_life:
            self._troubles = 0
        self._restart_at = now + self._limits.back_off[min(self._troubles, len(self._limits.back_off) - 1)]
        self._troubles += 1
        self._enter(EngineLife.DOWN)

    # ------------------------------------------------------------------ what to do

    def decide(self) -> Start | Kill | None:
        """What has to be done now; asked for again and again."""
        now = self._clock.now()
        self._excuse(now)
        match self._life:
            case EngineLife.DOWN:
                return Start() if now >= self._restart_at else None
            case EngineLife.STARTING:
                reason = self._start_trouble(now)
            case EngineLife.READY:
                reason = self._trouble(now)
            case EngineLife.GIVEN_UP:
                return None
        if reason is None or self._killing:
            return None
        self._killing = True
        return Kill(reason)

    def _excuse(self, now: float) -> None:
        """When we ourselves were away (a stopped process, a sleeping machine, a very long tokenization), silence
        meanwhile proves nothing: signs of life may wait to be read."""
        away = now - self._looked
        self._looked = now
        if away > self._limits.away:
            self._heard += away
            self._step_since += away

    def _start_trouble(self, now: float) -> str | None:
        if self._told is not None:
            return "its start failed"
        seconds = self._limits.start_timeout
        return f"it did not become ready within {seconds:.0f} s" if now - self._since > seconds else None

    def _trouble(self, now: float) -> str | None:
        if now - self._heard > self._limits.heartbeat_silence:
            return f"no sign of life for {now - self._heard:.1f} s"
        if now - self._step_since > self._limits.longest_step:
            return f"step {self._step} has been running for {now - self._step_since:.0f} s"
        return None

    def _enter(self, life: EngineLife) -> None:
        self._life = life
        self._since = self._clock.now()
