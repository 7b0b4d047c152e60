"""The slot pool conserves its slots."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.lang.sampling import SamplingParams
from umbel.srt.cache.radix_cache import Match, RadixCache, RadixNode
from umbel.srt.cache.slot_allocator import IntegrityError, SlotAllocator
from umbel.srt.core.instruments import FailAt
from umbel.srt.core.messages import Ended, EngineAbort, EngineControl

from ..engine_harness import Engine


def test_slots_come_in_ascending_runs_and_never_the_dummy() -> None:
    pool = SlotAllocator(11)
    assert pool.total == pool.free == 10
    assert pool.allocate(4).tolist() == [1, 2, 3, 4]
    assert pool.allocate(6).tolist() == [5, 6, 7, 8, 9, 10]


def test_released_slots_are_merged_into_runs() -> None:
    pool = SlotAllocator(9)
    slots = pool.allocate(8)
    pool.release(slots[[5, 1]])
    pool.release(slots[[3, 2]])
    assert pool.allocate(4).tolist() == [2, 3, 4, 6]


def test_releasing_twice_is_found_at_once() -> None:
    pool = SlotAllocator(5)
    slots = pool.allocate(2)
    pool.release(slots)
    with pytest.raises(IntegrityError, match="released twice"):
        pool.release(slots[:1])


def test_asking_for_more_than_is_free_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="5 slots asked for, 4 are free"):
        SlotAllocator(5).allocate(5)


def test_a_failing_allocation_takes_nothing() -> None:
    pool = SlotAllocator(5, FailAt("memory.allocate", 1, MemoryError("injected")))
    with pytest.raises(MemoryError):
        pool.allocate(2)
    pool.check([])


@pytest.mark.parametrize(
    ("held", "message"), [([[1]], "1 lost, 0 held twice"), ([[1, 2], [2]], "held twice"), ([[0, 1, 2]], "dummy")]
)
def test_check_says_what_is_wrong(held: list[list[int]], message: str) -> None:
    pool = SlotAllocator(5)
    pool.allocate(2)
    with pytest.raises(IntegrityError, match=message):
        pool.check([np.array(slots, dtype=np.int32) for slots in held])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-6, 12), max_size=60))
def test_slots_are_conserved_under_any_order_of_taking_and_giving(moves: list[int]) -> None:
    pool = SlotAllocator(40)
    held: list[np.ndarray] = []
    for move in moves:
        if move >= 0 and move <= pool.free:
            slots = pool.allocate(move)
            assert (np.diff(slots) > 0).all()
            held.append(slots)
        elif move < 0 and held:
            pool.release(held.pop(move % len(held)))
        pool.check(held)
        assert pool.free + sum(map(len, held)) == pool.total


GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
SLICE = 128


def engine(**changes: object) -> Engine:
    return Engine(**{"pool": 4000, "check_every_step": False, **changes})  # type: ignore[arg-type]


def fill(machine: Engine, nodes: int) -> None:
    """So many leaves that no request will match, as sequences of another salt leave them."""
    space = machine.scheduler.kv
    root = space.cache.match(np.empty(0, dtype=np.int32), "another tenant")
    space.cache.lock(root)
    for number in range(nodes):
        leaf = space.cache.extend(root, np.array([1000 + number], dtype=np.int32), space.pool.allocate(1))
        space.cache.unlock(leaf)
        space.cache.lock(root)
    space.cache.unlock(root)


def visits(machine: Engine) -> int:
    return machine.scheduler.kv.cache.idle_check.visits


def rest(machine: Engine) -> int:
    """Steps until all is checked."""
    steps = 0
    while machine.scheduler.unchecked:
        assert machine.step() == []
        steps += 1
    return steps


def test_no_node_is_visited_between_a_message_and_its_answer() -> None:
    machine = engine()
    fill(machine, 2000)
    for call in range(5):
        before = visits(machine)
        message_id = machine.generate([1 + call, 2, 3], GREEDY)
        while message_id not in machine.endings:
            machine.step()
        assert visits(machine) == before
    assert machine.scheduler.unchecked
    rest(machine)
    assert visits(machine) >= 2000
    assert machine.count("idle_checks") == 1


def test_an_answer_leaves_before_the_tree_is_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = engine()
    fill(machine, 2000)
    looked_at = 0

    def counted(self: RadixCache) -> Iterator[tuple[int, RadixNode]]:
        nonlocal looked_at
        for entry in walk(self):
            looked_at += 1
            yield entry

    walk = RadixCache.walk
    monkeypatch.setattr(RadixCache, "walk", counted)
    message_id = machine.generate([1, 2, 3], GREEDY)
    while message_id not in machine.endings:
        machine.step()
    assert looked_at == 0


def test_a_step_of_an_idle_engine_visits_one_slice() -> None:
    machine = engine()
    fill(machine, 1000)
    machine.generate([1, 2, 3], GREEDY)
    machine.run()
    seen = visits(machine)
    steps = 0
    while machine.scheduler.unchecked:
        machine.step()
        steps += 1
        assert visits(machine) - seen <= SLICE
        seen = visits(machine)
    assert 1000 / SLICE < steps < 1000 / SLICE + 3


def test_the_check_goes_on_where_it_was_when_requests_have_run_in_between() -> None:
    """One slice behind each call: with less than that between its calls, a program would never see an end."""
    machine = engine()
    fill(machine, 1000)
    calls = 0
    while not machine.count("idle_checks"):
        machine.generate([1 + calls % 20, 2, 3, 4], GREEDY)
        machine.run()
        machine.step()
        calls += 1
        assert calls < 20
    assert visits(machine) < 1000 + 10 * calls


def test_an_engine_that_has_nothing_to_check_rests() -> None:
    machine = engine()
    assert not machine.scheduler.unchecked
    machine.generate([1, 2, 3], GREEDY)
    machine.run()
    rest(machine)
    before = visits(machine)
    for _ in range(5):
        assert machine.step() == []
    assert visits(machine) == before
    machine.generate([1, 2, 3], GREEDY)
    machine.run()
    assert rest(machine)
    assert machine.count("idle_checks") == 2
    assert visits(machine) == before + len(machine.scheduler.kv.cache.idle_check), "every round visits every node"


def test_steps_that_are_checked_one_by_one_leave_nothing_to_check() -> None:
    machine = engine(check_every_step=True)
    machine.generate([1, 2, 3], GREEDY)
    machine.run()
    assert not machine.scheduler.unchecked
    assert machine.count("idle_checks") == 0


# --------------------------------------------------------------------------------------------- what it finds


def _leaf(machine: Engine) -> RadixNode:
    nodes = [node for _, node in machine.scheduler.kv.cache.walk()]
    return next(node for node in nodes if not node.children)


def lose_a_slot(machine: Engine) -> None:
    machine.scheduler.kv.pool.allocate(1)


def free_a_slot_that_is_held(machine: Engine) -> None:
    machine.scheduler.kv.pool.release(_leaf(machine).slots[:1])


def hold_a_slot_twice(machine: Engine) -> None:
    first, second = [node for _, node in machine.scheduler.kv.cache.walk()][:2]
    second.slots = second.slots.copy()
    second.slots[0] = first.slots[0]


def repeat_a_slot_in_one_node(machine: Engine) -> None:
    node = next(node for _, node in machine.scheduler.kv.cache.walk() if len(node.slots) > 1)
    node.slots = node.slots.copy()
    node.slots[1] = node.slots[0]


def leave_a_lock(machine: Engine) -> None:
    machine.scheduler.kv.cache.lock(Match(_leaf(machine), 0))


def leave_a_pin(machine: Engine) -> None:
    machine.scheduler.kv.cache.pin(Match(_leaf(machine), 0))


def forget_a_leaf_in_the_queue(machine: Engine) -> None:
    machine.scheduler.kv.cache.eviction._known.discard(_leaf(machine).id)  # type: ignore[attr-defined]


def unlink_a_leaf(machine: Engine) -> None:
    leaf = _leaf(machine)
    assert leaf.parent is not None
    del leaf.parent.children[int(leaf.tokens[0])]


def move_a_leaf(machine: Engine) -> None:
    leaf = _leaf(machine)
    leaf.tokens = leaf.tokens + 1


def cut_a_node(machine: Engine) -> None:
    leaf = _leaf(machine)
    leaf.tokens = leaf.tokens[:0]


def count_wrongly(machine: Engine) -> None:
    machine.scheduler.kv.cache._tokens += 1


DAMAGES = [
    lose_a_slot,
    free_a_slot_that_is_held,
    hold_a_slot_twice,
    repeat_a_slot_in_one_node,
    leave_a_lock,
    leave_a_pin,
    forget_a_leaf_in_the_queue,
    unlink_a_leaf,
    move_a_leaf,
    cut_a_node,
    count_wrongly,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_found_in_idle_time_and_costs_the_cache_only(damage: Callable[[Engine], None]) -> None:
    machine = engine()
    for prompt in ([1, 2, 3, 4], [1, 2, 5, 6], [7, 8, 9]):
        machine.generate(prompt, GREEDY)
    machine.run()
    damage(machine)
    with pytest.raises(IntegrityError):
        machine.scheduler.check()
    rest(machine)
    assert machine.count("integrity_failures") == machine.count("pool_rebuilds") == 1
    assert isinstance(machine.scheduler.last_failure, IntegrityError)
    message_id = machine.generate([1, 2, 3, 4], GREEDY)
    machine.run()
    machine.assert_equals_reference(message_id, [1, 2, 3, 4], GREEDY)
    rest(machine)
    assert machine.count("integrity_failures") == 1


events = st.one_of(
    st.tuples(st.just("generate"), st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(0, 6)),
    st.tuples(st.just("abort"), st.just([]), st.integers(1, 5)),
    st.tuples(st.just("pin"), st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(1, 9)),
    st.tuples(st.just("release"), st.just([]), st.integers(1, 5)),
    st.tuples(st.just("flush"), st.just([]), st.just(0)),
    st.tuples(st.just("rest"), st.just([]), st.integers(1, 3)),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    happened=st.lists(events, max_size=25),
    pool=st.sampled_from([30, 60, 200]),
    overlap=st.booleans(),
    piece=st.sampled_from([1, 2, 128]),
)
def test_whatever_runs_between_two_slices_nothing_sound_is_taken_for_damage(
    happened: list[tuple[str, list[int], int]], pool: int, overlap: bool, piece: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("umbel.srt.cache.slot_allocator._SLICE", piece)
        machine = engine(pool=pool, overlap=overlap, max_running=3)
        sent: dict[int, list[int]] = {}
        hints: list[int] = []
        for kind, tokens, number in happened:
            match kind:
                case "generate":
                    sent[
                        machine.generate(tokens, SamplingParams(temperature=0.0, max_tokens=number, ignore_eos=True))
                    ] = tokens
                case "abort" if sent:
                    machine.scheduler.handle_message(EngineAbort(list(sent)[-number % len(sent)]))
                case "pin":
                    hints.append(machine.hint(tokens, pin=float(number)))
                case "release" if hints:
                    machine.release(hints[-number % len(hints)])
                case "flush":
                    machine.scheduler.handle_message(EngineControl(machine._id(), "flush_cache"))
                case "rest":
                    machine.run()
                    for _ in range(number):
                        machine.step()
            machine.step()
            machine.clock.advance(1.0)
        machine.run()
        rest(machine)
        assert machine.count("integrity_failures") == 0
        assert all(isinstance(machine.endings[message_id], Ended) for message_id in sent)
        machine.scheduler.check()


def test_a_contradiction_that_stays_is_checked_again_only_after_another_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = engine()

    def contradiction() -> None:
        raise IntegrityError("two requests have one slot")

    monkeypatch.setattr(machine.scheduler._table, "check", contradiction)
    message_id = machine.generate([1, 2, 3], GREEDY)
    while message_id not in machine.endings:
        machine.step()
    assert rest(machine) < 10
    assert machine.scheduler._counters.integrity_failures == 1
