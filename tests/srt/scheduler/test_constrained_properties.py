"""Whatever arrives with whatever constraint, however small the pool and the steps: every text is the one that its
request would have got alone, with every token in a step of its own.
"""

from dataclasses import dataclass
from itertools import product

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.instruments import FailAt
from umbel.srt.core.messages import Ended, EngineAbort, EngineFailed

from ..engine_harness import POINTS, Engine
from ..toy_constraint import TOKENIZER, encode, texts, toy_shelf

CONSTRAINTS = (
    None,
    texts('{"the end": "in"}', '{"the end": "a"}', '{"the end": "theo"}', "{}"),
    texts("yes", "no", "not in the end", "é", cost=30),
    texts("the only one"),
    texts("", "a", "aab", "aabinges"),
    texts(*("".join(letters) for length in (4, 7) for letters in product("in", repeat=length)), cost=3),
)
STEMS = ((), tuple(encode("in th")), tuple(encode("in the end ")), tuple(encode("say ")))

samplings = st.builds(
    lambda most, least, **fields: SamplingParams(max_tokens=most, min_tokens=min(most, least), **fields),
    st.integers(1, 30),
    st.integers(0, 3),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
    stop=st.sampled_from([(), ("he", '"')]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    top_k=st.sampled_from([-1, 2]),
    logprobs=st.sampled_from([False, False, True]),
    ignore_eos=st.booleans(),
)


@dataclass(frozen=True)
class Arrival:
    after: int
    constraint: int
    stem: int
    sampling: SamplingParams
    heal: bool
    stream: bool
    abort_after: int | None


arrivals = st.builds(
    Arrival,
    after=st.integers(0, 3),
    constraint=st.integers(0, len(CONSTRAINTS) - 1),
    stem=st.integers(0, len(STEMS) - 1),
    sampling=samplings,
    heal=st.booleans(),
    stream=st.booleans(),
    abort_after=st.sampled_from([None, None, None, 0, 3]),
)
configs = st.fixed_dictionaries(
    {
        "max_step_tokens": st.sampled_from([1, 3, 16, None]),
        "max_running": st.sampled_from([1, 2, 16]),
        "radix_cache": st.sampled_from([True, True, False]),
        "in_step_sharing": st.booleans(),
        "headroom": st.sampled_from([0, 8]),
        "max_step_logits": st.sampled_from([16, 256]),
        "pool": st.sampled_from([52, 70, 400]),
        "constraint_fuel": st.sampled_from([7, 2000]),
        "jump_forward": st.sampled_from([True, True, False]),
        "partial_logits": st.booleans(),
        "overlap": st.booleans(),
        "computes": st.sampled_from(["when asked", "when launched"]),
    }
)


def machine(**settings_: object) -> Engine:
    return Engine(
        vocabulary=TOKENIZER.vocab_size,
        token_bytes=TOKENIZER.token_bytes,
        eos_ids=TOKENIZER.eos_ids,
        constraints=toy_shelf(),
        **{"context": 60, **settings_},  # type: ignore[arg-type]
    )


def send(engine: Engine, arrival: Arrival) -> int:
    prompt, constraint = [256, *STEMS[arrival.stem]], CONSTRAINTS[arrival.constraint]
    if constraint is None:
        return engine.generate(prompt, arrival.sampling, stream=arrival.stream)
    return engine.constrain(prompt, constraint, arrival.sampling, stream=arrival.stream, heal=arrival.heal)


def drive(engine: Engine, events: list[Arrival]) -> dict[int, Arrival]:
    sent: dict[int, Arrival] = {}
    aborts: dict[int, list[int]] = {}
    for arrival in events:
        for _ in range(arrival.after):
            step(engine, aborts)
        message_id = send(engine, arrival)
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


def alone(arrival: Arrival) -> tuple[list[int], object]:
    engine = machine(jump_forward=False, radix_cache=False, pool=400, partial_logits=False)
    engine.run()
    message_id = send(engine, arrival)
    ending = engine.run().endings[message_id]
    if isinstance(ending, EngineFailed):
        return [], ending.kind
    assert isinstance(ending, Ended)
    return engine.tokens(message_id), (
        ending.finish_reason,
        ending.matched_stop,
        ending.text_bytes,
        ending.enforced,
        ending.healed,
        ending.prompt_tokens,
        ending.completion_tokens,
    )


def judge(engine: Engine, sent: dict[int, Arrival], *, injected: bool = False) -> None:
    for message_id, arrival in sent.items():
        ending = engine.endings[message_id]
        tokens, truth = alone(arrival)
        if isinstance(ending, EngineFailed):
            assert ending.kind == truth or (injected and ending.kind == "EngineError"), ending
            continue
        assert isinstance(ending, Ended)
        mine = engine.tokens(message_id)
        if ending.finish_reason == "abort":
            assert arrival.abort_after is not None
            assert mine == tokens[: len(mine)]
            continue
        assert mine == tokens
        assert truth == (
            ending.finish_reason,
            ending.matched_stop,
            ending.text_bytes,
            ending.enforced,
            ending.healed,
            ending.prompt_tokens,
            ending.completion_tokens,
        )
    engine.scheduler.check()
    space = engine.scheduler.kv
    assert space.pool.free + space.cache.total_tokens == space.pool.total
    assert engine.scheduler.running == engine.scheduler.waiting == 0


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(config=configs, events=st.lists(arrivals, min_size=1, max_size=10))
def test_every_text_is_the_one_its_request_would_get_alone(config: dict[str, object], events: list[Arrival]) -> None:
    engine = machine(**config)
    judge(engine, drive(engine, events))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    config=configs,
    events=st.lists(arrivals, min_size=2, max_size=8),
    point=st.sampled_from(POINTS),
    k=st.integers(1, 25),
)
def test_a_fault_anywhere_costs_no_other_text_anything(
    config: dict[str, object], events: list[Arrival], point: str, k: int
) -> None:
    engine = machine(faults=FailAt(point, k, RuntimeError("injected")), **config)
    judge(engine, drive(engine, events), injected=True)
