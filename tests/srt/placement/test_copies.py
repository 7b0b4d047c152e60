"""The gateway's copies of the trees of several engines: exact after every step, whatever the engines are asked."""

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.srt.core.messages import CacheEvents, EngineSnapshot, NodeRemoved
from umbel.srt.placement.meta_tree import MetaTree, packed
from umbel.srt.placement.placement import Placement
from umbel.srt.scheduler.scheduler import SchedulerConfig

from ..engine_harness import Engine
from ..scheduler.test_scheduler_properties import Arrival, arrivals, configs, drive
from ..tree_copy import nodes_of


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(work=st.lists(st.tuples(configs, st.lists(arrivals, min_size=1, max_size=6)), min_size=2, max_size=3))
def test_engines_that_share_prompts_have_exact_copies_in_one_tree(
    work: list[tuple[dict[str, object], list[Arrival]]],
) -> None:
    tree = MetaTree()
    engines = [Engine(meta_tree=tree, replica=i, **config) for i, (config, _) in enumerate(work)]  # type: ignore[arg-type]
    rounds = max(len(events) for _, events in work)
    for index in range(rounds):
        for engine, (_, events) in zip(engines, work, strict=True):
            drive(engine, events[index : index + 1])
        for engine in engines:
            engine.check_copies()
    for engine in engines:
        cache = engine.scheduler.kv.cache
        assert tree.tokens_of(engine.replica) == cache.total_tokens
        for _, events in work:
            for arrival in events:
                private = tuple((place, arrival.salt + name) for place, name in arrival.private)
                known = cache.peek(np.array(arrival.prompt, dtype=np.int32), arrival.salt, private)
                found = tree.lengths(packed(arrival.prompt), arrival.salt, private, replicas=len(engines))
                assert found.held[engine.replica] == known


def told(engine: Engine) -> list[CacheEvents]:
    """Runs the engine until it is idle → what it told of its tree."""
    messages = []
    while not engine.scheduler.idle:
        messages += [event for event in engine.scheduler.step() if isinstance(event, CacheEvents)]
    return messages


def copied(placement: Placement) -> set[int]:
    return {node.id for node in placement.tree.nodes_of(0)}


def test_a_copy_is_stale_after_a_lost_frame_until_a_snapshot_came() -> None:
    engine = Engine(check_every_step=False)
    placement = Placement("added-delay", [0])
    engine.generate([1, 2, 3, 4])
    told(engine)  # lost
    placement.gap(0)
    engine.generate([1, 2, 5])
    assert not placement.apply(0, [event for message in told(engine) for event in message.events])
    assert copied(placement) == set()
    engine.scheduler.handle_message(EngineSnapshot())
    (answer,) = told(engine)
    assert placement.apply(0, answer.events)
    assert copied(placement) == set(nodes_of(engine.scheduler.kv.cache))
    engine.generate([7, 8])
    assert placement.apply(0, [event for message in told(engine) for event in message.events])
    assert copied(placement) == set(nodes_of(engine.scheduler.kv.cache))


def test_an_engine_that_tells_nothing_ignores_the_question_for_a_snapshot() -> None:
    engine = Engine(cache_events=False)
    assert not SchedulerConfig().cache_events
    engine.generate([1, 2])
    engine.scheduler.handle_message(EngineSnapshot())
    assert told(engine) == []
    assert engine.count("cache_events") == 0


def test_an_idle_engine_answers_the_question_for_a_snapshot() -> None:
    engine = Engine()
    engine.generate([1, 2, 3])
    engine.run()
    engine.scheduler.handle_message(EngineSnapshot())
    assert not engine.scheduler.idle
    engine.run()
    assert engine.copy.counts["CacheCleared"] == 1


def test_events_are_counted() -> None:
    engine = Engine(pool=20)
    for first in range(1, 6):
        engine.generate([first, *range(1, 9)])
    engine.run()
    assert engine.count("cache_events") == sum(engine.copy.counts.values())
    assert engine.copy.counts[NodeRemoved.__name__]
