"""Admission that looks ahead: nobody is sent back, and more run at once than if each had its longest from the start."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.lang.sampling import SamplingParams
from umbel.srt.scheduler import foresight

from ..engine_harness import Engine

HEAD = list(range(1, 21))


def sampling(max_tokens: int, *, early: bool = False) -> SamplingParams:
    """`early`: the text may end before its max_tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=not early)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 25), st.booleans(), st.integers(0, 4)), max_size=14),
    st.sampled_from([60, 90, 200]),
    st.sampled_from([4, 16, None]),
    st.sampled_from([2, 16]),
)
def test_nobody_is_ever_sent_back(
    arrivals: list[tuple[int, int, bool, int]], pool: int, step_tokens: int | None, running: int
) -> None:
    engine = Engine(pool=pool, foresight=True, headroom=0, max_step_tokens=step_tokens, max_running=running)
    sent = {}
    for length, max_tokens, early, steps in arrivals:
        prompt = [*HEAD, *([21, 22] * length)[:length]]
        sent[engine.generate(prompt, sampling(max_tokens, early=early))] = (prompt, sampling(max_tokens, early=early))
        for _ in range(steps):
            engine.step()
    engine.run()
    assert (engine.count("retractions"), engine.count("recomputed_tokens")) == (0, 0)
    for message_id, (prompt, params) in sent.items():
        engine.assert_equals_reference(message_id, prompt, params)


def crowd(*, looks_ahead: bool) -> tuple[list[list[int]], Engine]:
    """Sixty requests behind one head, in a pool for a few of them."""
    dice = random.Random(1)
    engine = Engine(
        pool=300, context=300, max_running=32, vocabulary=200, check_every_step=False, foresight=looks_ahead
    )
    ids = [
        engine.generate(
            [*range(1, 120), *(120 + dice.randrange(70) for _ in range(dice.randint(5, 40)))],
            sampling(dice.choice((10, 60, 100))),
        )
        for _ in range(40)
    ]
    engine.run(20_000)
    return [engine.tokens(message_id) for message_id in ids], engine


def test_a_crowd_costs_fewer_rows_and_says_the_same() -> None:
    (texts, headroom), (same, foreseen) = crowd(looks_ahead=False), crowd(looks_ahead=True)
    assert same == texts
    assert headroom.count("retractions") > 10
    assert foreseen.count("retractions") == 0
    assert foreseen.count("forward_rows") < 0.75 * headroom.count("forward_rows")


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8))
@settings(max_examples=20, deadline=None)
def test_the_worst_of_all_moments_is_before_one_of_the_ends(lengths: list[int]) -> None:
    """Requests that decode, looked at step by step: who has ended has given back what he alone held."""
    engine = Engine(pool=400, max_step_tokens=None)
    for length in lengths:
        engine.generate([*HEAD, 21], sampling(length + 1))
    engine.step()
    space, running = engine.scheduler.space, list(engine.scheduler._roster.running.values())
    assert all(request.decoding for request in running)

    def need(step: int) -> int:
        alive = [request for request in running if foresight._growth(request) >= step]
        more = sum(space.missing(request, request.length + min(foresight._growth(request), step)) for request in alive)
        return more - sum(foresight._own(request) for request in running if request not in alive)

    assert foresight.peak_need(running, space, None) == max(need(step) for step in range(max(lengths) + 2))
