"""Whatever arrives, whenever it is aborted, however small the pool: every request ends exactly once, and its tokens
are those of a run without cache, batch or memory limit.
"""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.instruments import FailAt
from umbel.srt.core.messages import Ended, EngineAbort, EngineControl, EngineFailed, ScoreEnded
from umbel.srt.scheduler.scheduler import PolicyName
from umbel.srt.testing.oracle import OracleError

from ..engine_harness import POINTS, Engine

# Few tokens and few stems, so that prompts share prefixes of every length.
stems = st.sampled_from([(1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 9, 9, 9), (4, 4, 4), (1,)])
prompts = st.builds(
    lambda stem, cut, rest: [*stem[: 1 + cut], *rest], stems, st.integers(0, 7), st.lists(st.integers(1, 3), max_size=5)
)
samplings = st.builds(
    lambda max_tokens, least, **fields: SamplingParams(
        max_tokens=max_tokens, min_tokens=min(least, max_tokens), seed=11, **fields
    ),
    st.integers(0, 12),
    st.integers(0, 4),
    temperature=st.sampled_from([0.0, 0.0, 0.8]),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    stop=st.sampled_from([(), ("ab", "cca")]),
    ignore_eos=st.booleans(),
)


@dataclass(frozen=True)
class Arrival:
    """One request: when it comes (steps after the one before), what it is, and when it is aborted."""

    after: int
    kind: str
    prompt: list[int]
    choices: list[list[int]]
    sampling: SamplingParams
    stream: bool
    salt: str
    private: tuple[tuple[int, str], ...]
    priority: int
    program: str
    fork_group: str
    timeout: float | None
    abort_after: int | None


arrivals = st.builds(
    Arrival,
    after=st.integers(0, 3),
    kind=st.sampled_from(["generate", "generate", "generate", "score", "hint", "flush"]),
    prompt=prompts,
    choices=st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=4),
    sampling=samplings,
    stream=st.booleans(),
    salt=st.sampled_from(["", "", "s"]),
    private=st.sampled_from([(), (), ((2, "/x"),), ((2, "/y"),), ((1, "/x"), (3, "/x/y"))]),
    priority=st.sampled_from([0, 0, 0, 1]),
    program=st.sampled_from(["", "p", "q"]),
    fork_group=st.sampled_from(["", "g", "h"]),
    timeout=st.sampled_from([None, None, None, 0.0, 6.0]),
    abort_after=st.sampled_from([None, None, None, 0, 2, 5]),
)


def with_room(room: tuple[int, float], **config: object) -> dict[str, object]:
    """`room`: tokens of the pool, and the share of them that one salt may hold."""
    return {"pool": room[0], "salt_share": room[1], **config}


configs = st.fixed_dictionaries(
    {
        "max_step_tokens": st.sampled_from([1, 3, 16, None]),
        "max_running": st.sampled_from([1, 2, 16]),
        "radix_cache": st.sampled_from([True, True, False]),
        "in_step_sharing": st.booleans(),
        "policy": st.sampled_from(list(PolicyName)),
        "max_wait": st.sampled_from([0.0, 3.0, 1e9]),
        "headroom": st.sampled_from([0, 8]),
        "max_step_logits": st.sampled_from([16, 256]),
        "room": st.sampled_from([(22, 1.0), (30, 1.0), (200, 1.0), (30, 0.75), (66, 0.34), (200, 0.11)]),
        "overlap": st.booleans(),
        "computes": st.sampled_from(["when asked", "when launched"]),
    }
).map(lambda config: with_room(**config))


windowed = st.tuples(
    configs,
    st.sampled_from([(1, 1), (4, 3), (5, 5), (8, 3), (9, 6), (20, 4), (40, 2), (25, 8)]),
    st.sampled_from([2, 4, 512]),
).map(lambda parts: {**parts[0], "windows": parts[1], "snapshot_stride": parts[2]})
stateful = st.tuples(
    configs,
    st.fixed_dictionaries(
        {
            "states": st.sampled_from([3, 5, 9, 40]),
            "snapshot_gap": st.sampled_from([1, 2, 4]),
            "snapshot_stride": st.sampled_from([2, 4, 512]),
        }
    ),
).map(lambda parts: {**parts[0], **parts[1], "overlap": False})
blocks = st.tuples(
    configs,
    st.sampled_from([22, 30, 64, 200]),
    st.sampled_from([2, 4, 7, 16]),
).map(lambda parts: {**parts[0], "pool": parts[1], "salt_share": 1.0, "block_cache": parts[2]})
OTHER_LAYERS = {"windows": windowed, "states": stateful, "blocks": blocks}


def drive(engine: Engine, events: list[Arrival]) -> dict[int, Arrival]:
    """Plays the arrivals and runs until idle."""
    sent: dict[int, Arrival] = {}
    aborts: dict[int, list[int]] = {}
    for arrival in events:
        for _ in range(arrival.after):
            step(engine, aborts)
        common = {
            "salt": arrival.salt,
            "private": tuple((place, arrival.salt + name) for place, name in arrival.private),
            "priority": arrival.priority,
            "timeout": arrival.timeout,
            "program_id": arrival.program,
            "fork_group": arrival.fork_group,
        }
        match arrival.kind:
            case "generate":
                message_id = engine.generate(arrival.prompt, arrival.sampling, stream=arrival.stream, **common)
            case "score":
                sequences = [[*arrival.prompt, *choice] for choice in arrival.choices]
                message_id = engine.score(sequences, len(arrival.prompt), **common)
            case "hint":
                message_id = engine.hint(arrival.prompt, **common)
            case _:
                message_id = engine._id()
                engine.scheduler.handle_message(EngineControl(message_id, "flush_cache"))
        sent[message_id] = arrival
        if arrival.abort_after is not None:
            aborts.setdefault(engine.steps + arrival.abort_after, []).append(message_id)
    while aborts or not engine.scheduler.idle:
        step(engine, aborts)
        assert engine.steps < 3000, "the engine does not come to rest"
    return sent


def step(engine: Engine, aborts: dict[int, list[int]]) -> None:
    for message_id in aborts.pop(engine.steps, []):
        engine.scheduler.handle_message(EngineAbort(message_id))
    engine.step()
    engine.clock.advance(1.0)


def judge(engine: Engine, sent: dict[int, Arrival], *, injected: bool = False) -> None:
    """What has to hold over the history. `injected`: a fault was."""
    for message_id, arrival in sent.items():
        if arrival.kind == "hint":
            assert message_id not in engine.endings
            continue
        ending = engine.endings[message_id]
        if isinstance(ending, EngineFailed):
            allowed = {"DeadlineError"} if arrival.timeout is not None else set()
            allowed |= {"CancelledError"} if arrival.abort_after is not None else set()
            allowed |= {"EngineError"} if injected else set()
            assert ending.kind in allowed, ending
            so_far = engine.streamed.get(message_id, [])
            if arrival.kind == "generate":
                assert so_far == engine.reference(arrival.prompt, arrival.sampling).token_ids[: len(so_far)]
        elif arrival.kind == "generate":
            engine.assert_equals_reference(message_id, arrival.prompt, arrival.sampling)
            assert isinstance(ending, Ended)
            assert 0 <= ending.cached_tokens <= ending.prompt_tokens == len(arrival.prompt)
        elif arrival.kind == "score":
            assert isinstance(ending, ScoreEnded)
            for mine, choice in zip(ending.logprobs, arrival.choices, strict=True):
                truth = engine.reference_score([*arrival.prompt, *choice], len(arrival.prompt))
                assert mine == pytest.approx(truth, abs=1e-4)
    engine.scheduler.check()
    space = engine.scheduler.kv
    assert space.pool.free + space.cache.total_tokens == space.pool.total
    assert space.cache.evictable_tokens == space.cache.total_tokens
    assert engine.scheduler.running == engine.scheduler.waiting == 0


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=configs, events=st.lists(arrivals, min_size=1, max_size=12))
def test_every_request_ends_once_and_equals_the_run_without_cache(
    config: dict[str, object], events: list[Arrival]
) -> None:
    engine = Engine(**config)  # type: ignore[arg-type]
    judge(engine, drive(engine, events))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    config=configs,
    events=st.lists(arrivals, min_size=2, max_size=8),
    point=st.sampled_from(POINTS),
    k=st.integers(1, 25),
)
def test_a_fault_anywhere_costs_no_other_request_anything(
    config: dict[str, object], events: list[Arrival], point: str, k: int
) -> None:
    fault = FailAt(point, k, OracleError("injected"))
    engine = Engine(faults=fault, **config)  # type: ignore[arg-type]
    sent = drive(engine, events)
    judge(engine, sent, injected=True)
    failed = [e for e in engine.endings.values() if isinstance(e, EngineFailed) and e.message == "injected"]
    whole_batch = point == "engine.forward"
    if fault.visits.get(point, 0) < k:
        assert not failed, "the point was never reached"
    elif not whole_batch:
        hint = [i for i, arrival in sent.items() if arrival.kind == "hint"]
        assert len(failed) == 1 or (not failed and hint), "one request ends, the others do not notice"


@pytest.mark.parametrize("layers", OTHER_LAYERS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), events=st.lists(arrivals, min_size=1, max_size=12))
def test_requests_of_other_layers_equal_the_run_without_cache(
    layers: str, data: st.DataObject, events: list[Arrival]
) -> None:
    engine = Engine(**data.draw(OTHER_LAYERS[layers]))
    judge(engine, drive(engine, events))


@pytest.mark.parametrize("layers", OTHER_LAYERS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.data(),
    events=st.lists(arrivals, min_size=2, max_size=8),
    point=st.sampled_from(POINTS),
    k=st.integers(1, 25),
)
def test_a_fault_anywhere_leaves_no_wrong_window_or_state(
    layers: str, data: st.DataObject, events: list[Arrival], point: str, k: int
) -> None:
    engine = Engine(faults=FailAt(point, k, OracleError("injected")), **data.draw(OTHER_LAYERS[layers]))
    judge(engine, drive(engine, events), injected=True)


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.sampled(4)
def test_faults_end_exactly_the_affected_requests(point: str, k: int) -> None:
    fault = FailAt(point, k, OracleError("injected"))
    engine = Engine(faults=fault, max_running=2)
    prompts = [[1, 2, 3, branch] for branch in range(4, 10)]
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    in_batch: list[int] = []
    ids = [engine.generate(prompt, greedy) for prompt in prompts]
    while not engine.scheduler.idle:
        engine.step()
        if fault.visits.get(point, 0) >= k and not in_batch:
            in_batch = engine.scheduler.planned_messages() or [0]
    failed = [i for i in ids if isinstance(engine.endings[i], EngineFailed)]
    if point == "engine.forward":
        assert failed == sorted(in_batch)
        assert engine.count("failed_steps") == engine.count("pool_rebuilds") == 1
    else:
        assert len(failed) == 1
        assert engine.count("failed_steps") == engine.count("pool_rebuilds") == 0
    for message_id, prompt in zip(ids, prompts, strict=True):
        if message_id not in failed:
            engine.assert_equals_reference(message_id, prompt, greedy)
    engine.scheduler.check()


def test_running_requests_outside_a_failed_batch_compute_again() -> None:
    fault = FailAt("engine.forward", 2, RuntimeError("secret text of a library"))
    engine = Engine(faults=fault, max_step_tokens=4)
    greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    long = [[stem] + [1 + i % 5 for i in range(7)] for stem in (7, 8)]
    ids = [engine.generate(prompt, greedy) for prompt in long]
    engine.run()
    failed = [i for i in ids if isinstance(engine.endings[i], EngineFailed)]
    assert len(failed) == 1, "the second prompt had no row in the failed step"
    ending = engine.endings[failed[0]]
    assert isinstance(ending, EngineFailed)
    assert "RuntimeError" in ending.message
    assert "secret" not in ending.message
    assert isinstance(engine.scheduler.last_failure, RuntimeError)
    engine.assert_equals_reference(ids[1], long[1], greedy)
