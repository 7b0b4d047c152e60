"""What a call costs beside a cache that has learnt much: as much as beside one that has learnt little."""

import statistics
import time

import numpy as np
import pytest
from umbel.lang.runtime_options import RuntimeOptions
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.instruments import SystemClock, no_faults
from umbel.srt.core.messages import Ended, EngineGenerate
from umbel.srt.launch import Engine, open_engine
from umbel.srt.scheduler.scheduler import Scheduler, SchedulerConfig

pytestmark = [pytest.mark.nightly, pytest.mark.model]

FEW, MANY = 100, 20_000  # nodes
PAIRS = 25
THREE = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


def scheduler_with(engine: Engine, nodes: int) -> Scheduler:
    """A scheduler of its own over the engine's model, whose tree holds that many leaves of one token."""
    made = Scheduler(engine.runner, lambda token: b"a", frozenset(), SchedulerConfig(), SystemClock())
    cache = made.kv.cache
    for number in range(nodes):
        root = cache.match(np.empty(0, dtype=np.int32), "other")
        cache.lock(root)
        cache.unlock(cache.extend(root, np.array([number], dtype=np.int32), made.kv.pool.allocate(1)))
    return made


def seconds_of_a_call(scheduler: Scheduler, number: int) -> float:
    """CPU seconds until a call of three tokens has its answer; then some slices of the idle check."""
    prompt = [2, *np.random.default_rng(number).integers(1000, 200_000, 8).tolist()]
    began = time.process_time()
    scheduler.handle_message(EngineGenerate(number, prompt, THREE, False))
    while not any(isinstance(event, Ended) for event in scheduler.step()):
        pass
    seconds = time.process_time() - began
    for _ in range(5):
        if scheduler.unchecked:
            scheduler.step()
    return seconds


def test_a_call_costs_the_same_beside_twenty_thousand_nodes() -> None:
    engine = open_engine(
        RuntimeOptions(pool_tokens=60_000), clock=SystemClock(), faults=no_faults, phase=lambda text: None
    )
    few, many = scheduler_with(engine, FEW), scheduler_with(engine, MANY)
    numbers = iter(range(1, 1000))
    for scheduler in (few, many):
        seconds_of_a_call(scheduler, next(numbers))
    pairs = [(seconds_of_a_call(few, next(numbers)), seconds_of_a_call(many, next(numbers))) for _ in range(PAIRS)]
    ratio = statistics.median(beside_many / beside_few for beside_few, beside_many in pairs)
    engine.close()
    print(f"{ratio:.3f} of the CPU time, median of {PAIRS} pairs")
    assert ratio <= 1.1
