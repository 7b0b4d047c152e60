"""Steps of the default model in a thread beside the scheduler."""

import pytest
from umbel.lang.runtime_options import RuntimeOptions
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.clock import SystemClock
from umbel.srt.core.faults import no_faults
from umbel.srt.core.messages import Ended, EngineGenerate
from umbel.srt.launch import open_engine

pytestmark = pytest.mark.model

SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.9, seed=5, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=1.0, top_k=20, min_p=0.02, seed=6, max_tokens=10, ignore_eos=True, logprobs=True),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=4, ignore_eos=True),
)


def answers(*, overlap: bool) -> tuple[dict[int, Ended], float]:
    """Endings of sixteen requests, and the share of steps that overlapped."""
    options = RuntimeOptions(overlap=overlap, pool_tokens=2000, check_every_step=True)
    scheduler = open_engine(options, clock=SystemClock(), faults=no_faults, phase=lambda _: None).scheduler
    for number in range(16):
        prompt = [2, *(5000 + 37 * (number % 4) + i for i in range(12 + number))]
        scheduler.submit(EngineGenerate(number, prompt, SAMPLINGS[number % 4], False))
    endings: dict[int, Ended] = {}
    while not scheduler.idle:
        endings.update((event.id, event) for event in scheduler.step() if isinstance(event, Ended))
    return endings, scheduler.counters["overlapped_steps"] / scheduler.counters["steps"]


def test_texts_and_log_probabilities_are_those_of_steps_that_wait() -> None:
    alone, none = answers(overlap=False)
    together, share = answers(overlap=True)
    assert none == 0
    assert share > 0.4
    assert len(alone) == len(together) == 16
    for number, ending in alone.items():
        assert together[number].token_ids == ending.token_ids
        for mine, theirs in zip(together[number].logprobs, ending.logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
