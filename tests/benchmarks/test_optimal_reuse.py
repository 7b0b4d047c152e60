"""The bound on what a cache can save, against its definition and against the engine."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from umbel.lang.sampling import SamplingParams
from umbel.srt.scheduler.scheduler import PolicyName
from umbel.srt.simulator.optimum import optimal_cached_tokens

from ..srt.engine_harness import Engine

Batch = list[list[int]]
batches = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=7), min_size=1, max_size=10)


@pytest.mark.parametrize(
    ("prompts", "generated", "cached"),
    [
        ([], [], 0),
        ([[1, 2, 3]], [], 0),
        ([[1, 2, 3], [1, 2, 4]], [], 2),
        ([[1, 2, 3], [1, 2, 3]], [], 2),  # the last token is computed again
        ([[1, 2, 3], [1, 2]], [], 2),  # the shorter one first: then nothing is computed twice
        ([[1], [1], [1]], [], 0),
        ([[1, 2], [1, 2, 7, 8, 9]], [[7, 8], [5]], 3),  # 1, 2 and 7; the key of 8 was never computed
        ([[1, 2], [1, 2, 7]], [[7, 8], [5]], 2),  # 7 is known, but its logits are needed
    ],
)
def test_small_runs(prompts: Batch, generated: Batch, cached: int) -> None:
    assert optimal_cached_tokens(prompts, generated) == cached


def by_definition(prompts: Batch, generated: Sequence[Sequence[int]]) -> int:
    """Sets of prefixes."""
    known = {
        (*prompt, *answer[:length])
        for prompt, answer in zip(prompts, generated, strict=True)
        for length in range(1, len(answer))
    }
    edges = {tuple(prompt[:length]) for prompt in prompts for length in range(1, len(prompt) + 1)}
    lasts = [tuple(prompt) for prompt in prompts]
    computed = len((edges - known) | set(lasts)) + len(lasts) - len(set(lasts))
    return sum(map(len, prompts)) - computed


@settings(max_examples=150, deadline=None)
@given(batches, st.data())
def test_the_bound_is_its_definition_by_sets_of_prefixes(prompts: Batch, data: st.DataObject) -> None:
    answers = [data.draw(st.lists(st.integers(1, 2), max_size=4)) for _ in prompts]
    assert optimal_cached_tokens(prompts, answers) == by_definition(prompts, answers)
    assert optimal_cached_tokens(prompts) == by_definition(prompts, [[] for _ in prompts])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(prompts=batches, policy=st.sampled_from(list(PolicyName)), pool=st.integers(12, 60), count=st.integers(1, 5))
def test_no_run_of_the_engine_saves_more(prompts: Batch, policy: PolicyName, pool: int, count: int) -> None:
    engine = Engine(pool=pool, policy=policy, headroom=0, vocabulary=3)
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    ids = [engine.generate(prompt, sampling) for prompt in prompts]
    engine.run()
    answers = [engine.tokens(message_id) for message_id in ids]
    assert sum(map(engine.cached, ids)) <= optimal_cached_tokens(prompts, answers)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(prompts=batches)
def test_one_request_at_a_time_depth_first_reaches_the_bound(prompts: Batch) -> None:
    engine = Engine(pool=max(map(len, prompts)) + 1, headroom=0, max_running=1, max_wait=1e9)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    for prompt in sorted(prompts):  # of equal matches the shorter prompt first, so that no last token is repeated
        engine.generate(prompt, sampling)
    engine.run()
    assert engine.count("cached_tokens") == optimal_cached_tokens(prompts)
