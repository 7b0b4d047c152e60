"""The engine's supervisor: when it starts one, when it ends one, and when it gives up."""

from collections.abc import Callable

import pytest
from umbel.lang.transport.link import MAX_FRAME
from umbel.lang.transport.process_life import ProcessSample, ProcessState
from umbel.srt.core.config import MAX_ENGINE_FRAME, SupervisionLimits
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.gateway.supervisor import EngineLife, Kill, Start, StartFailure, Supervisor

LIMITS = SupervisionLimits()
QUIET = ProcessSample(ProcessState.RUNNABLE)  # an observer that never waits for a core

# What a process does in a second of wall time: its state, CPU time, and time without a core that it wanted.
ASLEEP = ProcessSample(ProcessState.ASLEEP)
WAITING_FOR_LOCK = ProcessSample(ProcessState.ASLEEP, computed=0.03)  # threads look for the interpreter lock
STOPPED = ProcessSample(ProcessState.STOPPED)
STARVED = ProcessSample(ProcessState.RUNNABLE)  # a real-time process has its core
CROWDED = ProcessSample(ProcessState.ASLEEP, computed=0.02, waited=0.97)  # asleep at the look, and queued until then
COMPUTING = ProcessSample(ProcessState.RUNNABLE, computed=1.0)
ON_TWO_CORES = ProcessSample(ProcessState.RUNNABLE, computed=2.0)
SHARING = ProcessSample(ProcessState.RUNNABLE, computed=0.1, waited=0.9)
READING_PAGES = ProcessSample(ProcessState.ON_DISK)


class Watched:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.supervisor = Supervisor(self.clock, LIMITS)

    def ready(self) -> "Watched":
        assert self.supervisor.decide() == Start()
        self.supervisor.started()
        self.supervisor.ready()
        return self

    def watch(
        self,
        seconds: float,
        doing: ProcessSample,
        *,
        observer: ProcessSample = QUIET,
        beat: Callable[[], None] | None = None,
    ) -> Kill | None:
        """The decision that ends it, while the engine does this."""
        begin = self.clock.now()
        while self.clock.now() - begin < seconds:
            if beat is not None:
                beat()
            now = self.clock.now()
            if self.supervisor.wants_readings:
                self.supervisor.observe(*(_at(each, now) for each in (doing, observer)))
            decision = self.supervisor.decide()
            if decision is not None:
                assert isinstance(decision, Kill)
                return decision
            self.clock.advance(LIMITS.look)
        return None

    def seconds(self) -> float:
        return self.clock.now()

    def wait_for_start(self) -> float:
        """Seconds until a start is wanted."""
        before = self.clock.now()
        while self.supervisor.decide() != Start():
            self.clock.advance(0.25)
            assert self.clock.now() - before < 60
        return self.clock.now() - before


def _at(doing: ProcessSample, now: float) -> ProcessSample:
    """What the system says of a process that has done this for `now` seconds."""
    return ProcessSample(doing.state, doing.computed * now, doing.waited * now)


def test_a_fresh_supervisor_wants_a_start() -> None:
    assert Watched().supervisor.decide() == Start()


def test_an_idle_engine_that_beats_is_left_alone() -> None:
    watched = Watched().ready()
    for _ in range(2000):
        watched.clock.advance(LIMITS.heartbeat_period)
        watched.supervisor.heartbeat(7, busy=False)
        assert watched.supervisor.decide() is None


@pytest.mark.parametrize(
    ("doing", "reason"),
    [(ASLEEP, "no sign of life"), (WAITING_FOR_LOCK, "no sign of life"), (STOPPED, "was stopped")],
)
def test_a_silent_engine_that_does_nothing_is_ended_once_within_five_seconds(doing: ProcessSample, reason: str) -> None:
    watched = Watched().ready()
    decision = watched.watch(60.0, doing)
    assert decision is not None
    assert reason in decision.reason
    assert watched.seconds() <= 4.5  # since its last sign of life, so less since it hangs
    assert watched.watch(60.0, doing) is None


@pytest.mark.parametrize("doing", [STARVED, CROWDED, SHARING])
def test_a_silent_engine_that_waits_for_a_core_is_left_alone(doing: ProcessSample) -> None:
    assert Watched().ready().watch(600.0, doing) is None


def test_a_silence_proves_nothing_while_the_gateway_itself_waits_for_a_core() -> None:
    crowded = ProcessSample(ProcessState.RUNNABLE, computed=0.02, waited=0.98)
    assert Watched().ready().watch(60.0, ASLEEP, observer=crowded) is None


def test_a_stopped_engine_is_ended_however_busy_the_machine_is() -> None:
    decision = Watched().ready().watch(60.0, STOPPED, observer=CROWDED)
    assert decision is not None
    assert "SIGSTOP" in decision.reason


def test_a_silence_during_which_nobody_looked_is_no_proof() -> None:
    watched = Watched().ready()
    for _ in range(2):
        watched.clock.advance(3600.0)
        assert watched.supervisor.wants_readings
        watched.supervisor.observe(ASLEEP, QUIET)
        assert watched.supervisor.decide() is None
    watched.supervisor.heartbeat(1, busy=False)
    assert not watched.supervisor.wants_readings


def test_a_sign_of_life_ends_a_silence() -> None:
    watched = Watched().ready()
    for _ in range(100):
        assert watched.watch(2.5, ASLEEP) is None
        watched.supervisor.heartbeat(1, busy=False)


def test_an_engine_that_beats_in_short_steps_is_not_asked_about() -> None:
    watched = Watched().ready()
    for step in range(100):
        watched.supervisor.heartbeat(step, busy=True)
        assert not watched.supervisor.wants_readings
        watched.clock.advance(LIMITS.heartbeat_period)


@pytest.mark.parametrize(
    ("doing", "least", "most", "reason"),
    [
        (COMPUTING, 300, 303, "has taken 300 s of computing"),
        (ON_TWO_CORES, 300, 303, "has taken 300 s of computing"),  # two cores at once are one time
        (SHARING, 3000, 3030, "of computing"),  # a busy machine: ten times the wall time
        (ASLEEP, 120, 123, "has waited for 120 s without computing"),  # a deadlock
        (READING_PAGES, 300, 303, "has waited for a disk"),
    ],
)
def test_a_step_that_never_ends_is_ended_by_what_it_does(
    doing: ProcessSample, least: float, most: float, reason: str
) -> None:
    watched = Watched().ready()
    decision = watched.watch(4000.0, doing, beat=lambda: watched.supervisor.heartbeat(1, busy=True))
    assert decision is not None
    assert "step 1 " in decision.reason
    assert reason in decision.reason
    assert least <= watched.seconds() <= most


def test_an_engine_that_computes_without_any_sign_of_life_is_ended_as_an_endless_step() -> None:
    watched = Watched().ready()
    decision = watched.watch(4000.0, COMPUTING)
    assert decision is not None
    assert "of computing" in decision.reason


def test_a_starting_engine_may_be_silent_and_asleep_until_its_time_is_over() -> None:
    for doing in (ASLEEP, COMPUTING, READING_PAGES, STARVED):
        watched = Watched()
        watched.supervisor.started()
        assert watched.watch(LIMITS.start_timeout, doing) is None
        decision = watched.watch(10.0, doing)
        assert decision is not None
        assert "startup_timeout of 900 s" in decision.reason
        assert "of CPU time and waited" in decision.reason


def test_a_starting_engine_that_is_stopped_is_ended() -> None:
    watched = Watched()
    watched.supervisor.started()
    decision = watched.watch(60.0, STOPPED)
    assert decision is not None
    assert "was stopped" in decision.reason
    assert watched.seconds() < 5


def test_a_new_engine_does_not_inherit_the_time_of_the_one_before_it() -> None:
    watched = Watched().ready()
    assert watched.watch(3.0, ASLEEP) is None
    watched.supervisor.exited("killed")
    watched.wait_for_start()
    watched.supervisor.started()
    watched.supervisor.ready()
    assert watched.watch(3.0, ASLEEP) is None


def test_a_first_death_is_followed_by_a_start_at_once_and_later_ones_by_longer_waits() -> None:
    watched = Watched().ready()
    waits = []
    for _ in range(5):
        watched.supervisor.exited("killed")
        waits.append(watched.wait_for_start())
        watched.supervisor.started()
        watched.supervisor.ready()
    assert waits == [0.0, 0.5, 2.0, 2.0, 2.0]
    watched.clock.advance(LIMITS.stable_life + 1)
    watched.supervisor.exited("killed")
    assert watched.wait_for_start() == 0.0


def test_a_start_that_dies_is_tried_again_three_times_and_then_given_up_with_the_cause() -> None:
    watched = Watched()
    for _ in range(LIMITS.max_start_failures):
        assert watched.supervisor.failure is None
        watched.wait_for_start()
        watched.supervisor.started()
        watched.supervisor.exited("its process ended with status 1")
    assert watched.supervisor.life is EngineLife.GIVEN_UP
    assert watched.supervisor.failure is not None
    assert "status 1" in watched.supervisor.failure.message
    watched.clock.advance(1000)
    assert watched.supervisor.decide() is None


def test_a_start_that_says_why_it_fails_is_not_tried_again() -> None:
    watched = Watched()
    watched.supervisor.started()
    cause = StartFailure("ModelError", "no such model")
    assert not watched.supervisor.start_explained
    watched.supervisor.start_failed(cause)
    assert watched.supervisor.start_explained
    assert isinstance(watched.supervisor.decide(), Kill)
    watched.supervisor.exited("it was ended by SIGKILL")
    assert watched.supervisor.failure == cause


def test_becoming_ready_forgets_failed_starts() -> None:
    watched = Watched()
    for _ in range(LIMITS.max_start_failures - 1):
        watched.supervisor.started()
        watched.supervisor.exited("status 1")
    watched.supervisor.started()
    watched.supervisor.ready()
    watched.supervisor.exited("killed")
    watched.supervisor.started()
    watched.supervisor.exited("status 1")
    assert watched.supervisor.failure is None


def test_every_limit_is_what_was_decided() -> None:
    assert (LIMITS.heartbeat_period, LIMITS.heartbeat_silence, LIMITS.longest_stop) == (0.5, 2.5, 1.5)
    assert (LIMITS.longest_step, LIMITS.longest_idle_step, LIMITS.longest_disk_wait) == (300.0, 120.0, 300.0)
    assert (LIMITS.start_timeout, LIMITS.back_off, LIMITS.max_start_failures) == (900.0, (0.0, 0.5, 2.0), 3)
    assert (LIMITS.stable_life, LIMITS.tick, LIMITS.look) == (60.0, 0.05, 0.5)
    assert (MAX_FRAME, MAX_ENGINE_FRAME) == (32 * 2**20, 256 * 2**20)
