"""The engine's supervisor: when it starts one, when it ends one, and when it gives up."""

from umbel.lang.link import MAX_FRAME
from umbel.srt.clock import VirtualClock
from umbel.srt.config import MAX_ENGINE_FRAME, SupervisionLimits
from umbel.srt.supervisor import EngineLife, Kill, Start, StartFailure, Supervisor

LIMITS = SupervisionLimits()


class Watched:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.supervisor = Supervisor(self.clock, LIMITS)

    def ready(self) -> "Watched":
        assert self.supervisor.decide() == Start()
        self.supervisor.started()
        self.supervisor.ready()
        return self

    def wait_for_start(self) -> float:
        """Seconds until a start is wanted."""
        before = self.clock.now()
        while self.supervisor.decide() != Start():
            self.clock.advance(0.25)
            assert self.clock.now() - before < 60
        return self.clock.now() - before


def test_a_fresh_supervisor_wants_a_start() -> None:
    assert Watched().supervisor.decide() == Start()


def test_an_idle_engine_that_beats_is_left_alone() -> None:
    watched = Watched().ready()
    for _ in range(2000):
        watched.clock.advance(LIMITS.heartbeat_period)
        watched.supervisor.heartbeat(7, busy=False)
        assert watched.supervisor.decide() is None


def test_a_silent_engine_is_ended_once_within_five_seconds() -> None:
    watched = Watched().ready()
    for _ in range(int(LIMITS.heartbeat_silence / 0.5)):
        watched.clock.advance(0.5)
        assert watched.supervisor.decide() is None
    watched.clock.advance(0.5)
    decision = watched.supervisor.decide()
    assert isinstance(decision, Kill)
    assert "no sign of life for 4.5 s" in decision.reason
    assert watched.supervisor.decide() is None
    assert LIMITS.heartbeat_silence + 2 * LIMITS.tick < 5


def test_a_silence_during_which_nobody_looked_is_no_proof() -> None:
    watched = Watched().ready()
    watched.clock.advance(3600.0)
    assert watched.supervisor.decide() is None
    watched.supervisor.heartbeat(1, busy=False)
    watched.clock.advance(0.5)
    assert watched.supervisor.decide() is None


def test_a_step_of_a_minute_is_healthy_and_an_endless_one_is_not() -> None:
    watched = Watched().ready()
    decisions = []
    for _ in range(int(LIMITS.longest_step) + 2):
        watched.clock.advance(1.0)
        watched.supervisor.heartbeat(1, busy=True)
        decisions.append(watched.supervisor.decide())
    assert decisions[:-2] == [None] * (len(decisions) - 2)
    assert any(isinstance(decision, Kill) and "step 1" in decision.reason for decision in decisions[-2:])


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


def test_a_start_that_takes_for_ever_is_ended() -> None:
    watched = Watched()
    watched.supervisor.started()
    watched.clock.advance(LIMITS.start_timeout + 1)
    assert isinstance(watched.supervisor.decide(), Kill)


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
    assert (LIMITS.heartbeat_period, LIMITS.heartbeat_silence, LIMITS.longest_step) == (0.5, 4.0, 300.0)
    assert (LIMITS.start_timeout, LIMITS.back_off, LIMITS.max_start_failures) == (600.0, (0.0, 0.5, 2.0), 3)
    assert (LIMITS.away, LIMITS.stable_life, LIMITS.tick) == (1.0, 60.0, 0.05)
    assert (MAX_FRAME, MAX_ENGINE_FRAME) == (32 * 2**20, 256 * 2**20)
