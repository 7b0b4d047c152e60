"""How long a request waits: the bound of `policy.Ageing`, under traffic that never ends."""

import itertools
from collections.abc import Iterable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.lang.sampling import SamplingParams
from umbel.srt.scheduler.request import Request

from ..engine_harness import Engine

HOT = [1, 2, 3, 4, 5, 6, 7, 8]
MAX_WAIT = 20.0
ANSWER = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


class Watched(Engine):
    """Records every admission together with who was waiting then; one step is one second."""

    def __init__(self, **settings_: object) -> None:
        super().__init__(**settings_)  # type: ignore[arg-type]
        self.admissions: list[tuple[float, Request, list[Request]]] = []
        table = self.scheduler._table
        admit = table.admit

        def recording(request: Request) -> None:
            others = [other for other in table.waiting.values() if other is not request]
            self.admissions.append((self.clock.now(), request, others))
            admit(request)

        table.admit = recording  # type: ignore[method-assign]

    def tick(self) -> None:
        self.step()
        self.clock.advance(1.0)

    def admitted_at(self, message_id: int) -> float | None:
        return next((now for now, request, _ in self.admissions if request.message_id == message_id), None)


def overload(engine: Watched, clients: int, *, priority: int = 0) -> Iterable[None]:
    """So many clients that each send a hot request as soon as the last one was answered, for ever."""
    numbers = itertools.count()
    flying: list[int] = []
    while True:
        flying = [message_id for message_id in flying if message_id not in engine.endings]
        while len(flying) < clients:
            number = next(numbers)
            prompt = [*HOT, 9 + number % 7, 9 + number // 7 % 7]
            flying.append(engine.generate(prompt, ANSWER, program_id=f"p{number % 3}", fork_group="g"))
        yield


def test_a_cold_request_under_endless_hot_traffic_starts_within_the_bound() -> None:
    """In front of it when it has aged: the one that runs, and the hot ones that came before it, one per client."""
    clients = 6
    engine = Watched(max_running=1, max_wait=MAX_WAIT, check_every_step=False)
    traffic = iter(overload(engine, clients))
    for _ in range(10):
        next(traffic)
        engine.tick()
    cold = engine.generate([23, 22, 21], ANSWER)
    arrived = engine.clock.now()
    while (started := engine.admitted_at(cold)) is None and engine.clock.now() < 500:
        next(traffic)
        engine.tick()
    assert started is not None
    drain = ANSWER.max_tokens * (1 + clients)
    assert started - arrived <= MAX_WAIT + drain
    assert started - arrived >= MAX_WAIT, "the policy would have let it wait on"
    assert engine.count("aged_admissions") > 0


def test_without_ageing_the_same_request_starves() -> None:
    engine = Watched(max_running=1, max_wait=1e9, check_every_step=False)
    traffic = iter(overload(engine, 6))
    for _ in range(10):
        next(traffic)
        engine.tick()
    cold = engine.generate([23, 22, 21], ANSWER, program_id="p0")
    for _ in range(400):
        next(traffic)
        engine.tick()
    assert engine.admitted_at(cold) is None, "else the test before would prove nothing"


requests = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps until it comes
        st.sampled_from([0, 0, 0, 1]),  # priority
        st.lists(st.integers(1, 3), min_size=1, max_size=8),
        st.sampled_from(["", "g"]),
        st.sampled_from([None, 8.0, 15.0]),
        st.integers(1, 6),  # tokens
    ),
    min_size=5,
    max_size=16,
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arrivals=requests, max_wait=st.sampled_from([0.0, 2.0, 6.0]))
def test_nobody_who_came_later_is_admitted_before_an_aged_request(
    arrivals: list[tuple[int, int, list[int], str, float | None, int]], max_wait: float
) -> None:
    engine = Watched(pool=24, max_running=2, max_wait=max_wait, check_every_step=False)
    for after, priority, tokens, group, timeout, count in arrivals:
        for _ in range(after):
            engine.tick()
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        engine.generate(tokens, sampling, priority=priority, fork_group=group, program_id="p", timeout=timeout)
    while not engine.scheduler.idle:
        engine.tick()
    for now, admitted, others in engine.admissions:
        for other in others:
            aged = now - other.arrival >= max_wait
            if aged and other.schedule.priority >= admitted.schedule.priority:
                later_rank = other.rank < admitted.rank
                assert not later_rank, f"{admitted.number} went before {other.number}, which waited {now} s"


def test_a_program_of_one_call_waits_for_one_branch_and_not_for_all() -> None:
    """A fork of 16 and then a single call, all on one prefix that is cached."""
    engine = Watched(max_running=1, max_wait=1e9, check_every_step=False)
    engine.generate(HOT, ANSWER)
    engine.run()
    engine.admissions.clear()
    for i in range(16):
        engine.generate([*HOT, 20, i], ANSWER, program_id="wide")
    single = engine.generate([*HOT, 20, 22], ANSWER, program_id="narrow")
    engine.run()
    assert [request.message_id for _, request, _ in engine.admissions].index(single) == 1
    assert engine.count("fair_admissions") > 0


def test_a_fork_is_admitted_together_and_its_program_ends_earlier() -> None:
    """Another program has more cached than the branches share; with the call, they are in before it goes on."""
    steps = {}
    for group in ("g", ""):
        engine = Watched(max_running=2, max_wait=1e9, check_every_step=False)
        engine.generate([9] * 12, ANSWER)
        engine.run()
        branches = [engine.generate([1, 2, i], ANSWER, program_id="p", fork_group=group) for i in range(3, 7)]
        engine.step()
        for i in range(6):
            engine.generate([*[9] * 12, 10 + i], ANSWER, program_id="q")
        engine.run()
        steps[group] = max(engine.ended_in[branch] for branch in branches)
        assert (engine.count("sibling_admissions") > 0) is bool(group)
        for branch, i in zip(branches, range(3, 7), strict=True):
            engine.assert_equals_reference(branch, [1, 2, i], ANSWER)
    assert steps["g"] < steps[""]


def test_a_hint_of_which_little_is_missing_is_left_to_the_branches() -> None:
    engine = Watched(least_ahead=len(HOT))
    engine.hint(HOT[:-1])
    engine.run()
    assert (engine.count("dropped_hints"), engine.count("computed_prompt_tokens")) == (1, 0)
    engine.hint(HOT)
    engine.run()
    assert (engine.count("dropped_hints"), engine.count("computed_prompt_tokens")) == (1, len(HOT))
