"""What a program says is ahead of its calls orders them among themselves, and moves nobody else."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.lang.protocol import Origin
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.messages import EngineGenerate
from umbel.srt.scheduler.policy import CriticalPath
from umbel.srt.scheduler.request import Request

from ..engine_harness import Engine
from ..gateway_harness import Harness, generate
from .test_policy import drain, order, request

STEM = [1, 2, 3, 4, 5, 6]


def calls(*aheads: tuple[str, int], cached: int = 0) -> list[Request]:
    return [
        request(number, [*STEM[:cached], number], program_id=program, ahead=ahead)
        for number, (program, ahead) in enumerate(aheads, 1)
    ]


def test_the_calls_of_a_program_exchange_their_places() -> None:
    waiting = calls(("p", 10), ("p", 20), ("q", 0), ("p", 90))
    assert drain(order(waiting)) == [4, 2, 3, 1]


def test_calls_that_say_nothing_keep_the_order_of_arrival() -> None:
    assert drain(order(calls(("p", 0), ("p", 0), ("q", 0)))) == [1, 2, 3]


def test_a_program_has_no_place_that_it_did_not_have_however_much_it_claims() -> None:
    """One is admitted in each step: what is left keeps the places that are left."""
    waiting = calls(("p", 1), ("p", 2), ("q", 0), ("q", 0), ("p", 10**9))
    path, given_ = CriticalPath(), []
    while waiting:
        places = path.arrange(waiting)
        following = min(waiting, key=lambda one: places.get(one.number, one.number))
        given_.append(following.schedule.program_id)
        waiting.remove(following)
    assert given_ == ["p", "p", "q", "q", "p"]


def test_requests_without_a_program_are_left_alone() -> None:
    assert CriticalPath().arrange(calls(("", 5), ("", 9))) == {}


def test_priorities_and_salts_are_apart() -> None:
    waiting = [
        request(1, [1], program_id="p"),
        request(2, [2], program_id="p", priority=1, ahead=50),
        request(3, [3], program_id="p", salt="s", ahead=70),
    ]
    assert CriticalPath().arrange(waiting) == {2: 2, 3: 3}


programs = st.sampled_from(["", "p", "q", "r"])


@given(st.lists(st.tuples(programs, st.integers(0, 5)), max_size=12), st.lists(st.integers(0, 3), max_size=8))
def test_every_program_keeps_its_places_over_any_number_of_steps(
    arriving: list[tuple[str, int]], admissions: list[int]
) -> None:
    waiting, path = calls(*arriving), CriticalPath()
    owned = {one.number: one.schedule.program_id for one in waiting}
    taken: set[int] = set()
    for index in admissions:
        places = path.arrange(waiting)
        held = [places.get(one.number, one.number) for one in waiting]
        assert len(set(held)) == len(held)
        assert not taken & set(held)
        for one in waiting:
            assert owned[places.get(one.number, one.number)] == one.schedule.program_id
        if waiting:
            gone = waiting.pop(index % len(waiting))
            taken.add(places.get(gone.number, gone.number))


# -------------------------------------------------------------------------------- what it is worth


def makespan(
    lengths: Sequence[int], ahead: Sequence[int], running: int, **settings_: object
) -> tuple[int, list[list[int]]]:
    """Steps until the last branch of one program has ended, and what the branches said."""
    engine = Engine(pool=2000, context=200, max_running=running, **settings_)
    engine.hint(STEM, program_id="p", fork_group="g")
    ids = [
        engine.generate(
            [*STEM, 7 + number],
            SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True),
            program_id="p",
            fork_group="g",
            ahead=tokens,
        )
        for number, (length, tokens) in enumerate(zip(lengths, ahead, strict=True))
    ]
    engine.run()
    return engine.steps, [engine.tokens(message_id) for message_id in ids]


def test_a_long_branch_that_was_said_last_is_begun_first() -> None:
    """Seven branches of 20 tokens and one of 100 on four places: 5 × 20 steps at least, 20 more when it comes last."""
    lengths = [20] * 7 + [100]
    without, texts = makespan(lengths, [0] * 8, 4)
    with_, same = makespan(lengths, lengths, 4)
    assert same == texts
    assert with_ <= 100 + 2
    assert without >= 100 + 20


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=10), st.integers(1, 4))
def test_longest_first_is_never_far_from_the_best(lengths: list[int], running: int) -> None:
    """List scheduling by longest time: within 4/3 of the best, which is no less than either bound (Graham 1969)."""
    steps, _ = makespan(lengths, lengths, running)
    best = max(max(lengths), -(-sum(lengths) // running))
    assert steps <= 4 * best / 3 + len(lengths)


@pytest.mark.parametrize("ahead", [0, 7])
def test_what_is_ahead_reaches_the_engine(ahead: int) -> None:
    harness = Harness()
    message = generate("a")
    harness.send(type(message)(message.id, message.prompt, message.sampling, origin=Origin("p", ahead=ahead)))
    (sent,) = harness.to_engine
    assert isinstance(sent, EngineGenerate)
    assert (sent.schedule.program_id, sent.schedule.ahead) == ("p", ahead)
