"""Where breakpoints stand: by the structure of the prompt, the same for the same prefix, never more than four."""

import asyncio
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from umbel.interpreter.backends.hosted.anthropic.cache import (
    LIFETIMES,
    MOST,
    Leaders,
    Role,
    lifetime_of,
    prefix_hashes,
    with_breakpoints,
)
from umbel.interpreter.backends.hosted.places import Block, Places

LONG = "word " * 1000  # about 1,250 tokens


def turn(role: Role, text: str, *, closes: bool = True) -> Block:
    return Block(role, text, opens=True, closes=closes)


def marked(blocks: list[Block]) -> list[int]:
    return [index for index, block in enumerate(blocks) if block.cached]


def test_a_short_prompt_has_no_breakpoints():
    blocks = with_breakpoints([turn("system", "Be brief."), turn("user", "Hello")], Places(), 1024)
    assert marked(blocks) == []


def test_system_turns_and_the_last_turn_have_one():
    blocks = with_breakpoints([turn("system", LONG), turn("user", "Hello")], Places(), 1024)
    assert marked(blocks) == [0, 1]


def test_what_lies_before_the_minimum_has_none():
    blocks = with_breakpoints([turn("system", "Be brief."), turn("user", LONG)], Places(), 1024)
    assert marked(blocks) == [1]


def test_a_conversation_marks_where_the_request_before_has_ended():
    conversation = [turn("system", LONG)]
    before: list[bytes] = []
    for question in ("one", "two", "three", "four"):
        conversation.append(turn("user", question))
        blocks = with_breakpoints(conversation, Places(), 1024)
        hashes = prefix_hashes(blocks)
        assert len(hashes) <= MOST
        assert before == [] or before[-1] in hashes, "what the request before has stored is read"
        before = hashes
        conversation.append(turn("assistant", "an answer"))


def test_a_prefill_is_not_stored():
    blocks = with_breakpoints([turn("user", LONG), turn("assistant", "It is", closes=False)], Places(), 1024)
    assert marked(blocks) == [0]


def test_branches_share_a_breakpoint_where_they_part_inside_a_turn():
    places = Places()
    places.remember([turn("user", LONG, closes=False)])
    first = with_breakpoints([turn("user", LONG + "Question 1")], places, 1024)
    second = with_breakpoints([turn("user", LONG + "Question 2")], places, 1024)
    assert [block.content for block in first] == [LONG, "Question 1"]
    assert prefix_hashes(first)[0] == prefix_hashes(second)[0]


def test_the_last_four_points_go_first_and_longer_times_stand_before_shorter_ones():
    places, conversation = Places(), [turn("system", LONG)]
    for number in range(6):
        conversation.append(turn("user", f"question {number}"))
        places.remember(conversation, "1h" if number == 3 else "5m")
        conversation.append(turn("assistant", "an answer"))
    blocks = with_breakpoints(conversation, places, 1024)
    assert [(index, block.cached) for index, block in enumerate(blocks) if block.cached] == [
        (5, "1h"),
        (7, "1h"),
        (9, "5m"),
        (11, "5m"),
    ]
    places.remember(conversation[:8])  # a branch parts there: the point keeps its time
    assert with_breakpoints(conversation, places, 1024) == blocks


@given(st.floats(0.001, 86_400.0))
@settings(max_examples=50, deadline=None)
def test_a_time_is_kept_unless_it_is_longer_than_the_longest(seconds: float):
    kept = {name: most for most, name in LIFETIMES}[lifetime_of(seconds)]
    assert kept >= seconds or kept == 3600.0
    assert not any(seconds <= most < kept for most, _ in LIFETIMES)


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text("ab \n", max_size=6)), max_size=6))
@settings(max_examples=50, deadline=None)
def test_there_are_never_more_than_the_provider_takes(said: list[tuple[Role, str]]):
    assert len(marked(with_breakpoints([turn(role, text) for role, text in said], Places(), 0))) <= MOST


def test_one_writes_and_the_others_wait_until_it_has_begun():
    async def run() -> None:
        counts: Counter[str] = Counter()
        leaders = Leaders(counts)
        blocks = with_breakpoints([turn("user", LONG)], Places(), 1024)
        leader = await leaders.turn(blocks)
        others = [asyncio.ensure_future(leaders.turn(blocks)) for _ in range(7)]
        for _ in range(3):
            await asyncio.sleep(0)
        assert not any(other.done() for other in others)
        leader.began()
        turns = await asyncio.gather(*others)
        assert counts["waited"] == 7
        for each in (leader, *turns):
            each.over()
        (await leaders.turn(blocks)).over()  # it is stored now: nobody waits
        assert counts["waited"] == 7

    asyncio.run(run())


def test_when_the_first_fails_another_one_goes_first():
    async def run() -> None:
        leaders = Leaders(Counter())
        blocks = with_breakpoints([turn("user", LONG)], Places(), 1024)
        leader = await leaders.turn(blocks)
        second, third = (asyncio.ensure_future(leaders.turn(blocks)) for _ in range(2))
        await asyncio.sleep(0)
        leader.over()
        done, waiting = await asyncio.wait((second, third), return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), len(waiting)) == (1, 1)
        done.pop().result().began()
        (await waiting.pop()).over()

    asyncio.run(run())
