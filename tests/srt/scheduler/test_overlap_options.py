"""Who runs the steps when they are to overlap: an AsyncRunner, a thread, or nobody."""

import pytest
from umbel.lang.errors import ParameterError
from umbel.lang.runtime_options import RuntimeOptions
from umbel.lang.sampling import SamplingParams
from umbel.srt.core.batch import AsyncRunner
from umbel.srt.core.clock import VirtualClock
from umbel.srt.core.faults import no_faults
from umbel.srt.core.messages import Ended, EngineGenerate
from umbel.srt.launch import open_engine
from umbel.srt.runners.threaded_runner import ThreadedRunner
from umbel.srt.scheduler.scheduler import Scheduler, SchedulerConfig
from umbel.srt.testing.oracle import OracleRunner
from umbel.srt.testing.slow import Slowed

from ..engine_harness import GREEDY, Engine


def test_steps_of_any_runner_run_in_a_thread() -> None:
    text_only = Slowed(OracleRunner(24, 120, 201), 0.0)
    text_only.pictures = None
    runner = ThreadedRunner(text_only)
    scheduler = Scheduler(runner, lambda _: b"", frozenset({0}), SchedulerConfig(overlap=True), VirtualClock())
    reference = Engine()
    samplings = [
        GREEDY,
        SamplingParams(temperature=0.9, top_p=0.8, seed=4, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.9, top_k=300, seed=4, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.0, presence_penalty=0.5, max_tokens=2, ignore_eos=True),
    ]
    for message_id, sampling in enumerate(samplings):
        scheduler.submit(EngineGenerate(message_id, [1, 2, 3 + message_id], sampling, False))
    ended: dict[int, list[int]] = {}
    while not scheduler.idle:
        ended.update((event.id, event.token_ids) for event in scheduler.step() if isinstance(event, Ended))
    for message_id, sampling in enumerate(samplings):
        assert ended[message_id] == reference.reference([1, 2, 3 + message_id], sampling).token_ids
    assert scheduler.counters["overlapped_steps"] > 0


def test_overlap_needs_a_runner_that_launches() -> None:
    with pytest.raises(ParameterError, match="overlap=False"):
        Scheduler(OracleRunner(), lambda _: b"", frozenset(), SchedulerConfig(overlap=True), VirtualClock())


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"overlap": "on"}, "True or False"),
        ({"overlap": 1}, "True or False"),
        ({"overlap": True, "step_delay": 0.5, "model": "oracle"}, "leave overlap=True out"),
    ],
)
def test_a_wrong_overlap_is_refused_with_what_to_write(options: dict[str, object], hint: str) -> None:
    with pytest.raises(ParameterError, match=hint):
        RuntimeOptions(**options)  # type: ignore[arg-type]


def test_the_option_decides_who_runs_the_steps() -> None:
    for overlap, launches in (("auto", False), (False, False), (True, True)):
        options = RuntimeOptions(model="oracle", overlap=overlap)  # type: ignore[arg-type]
        engine = open_engine(options, clock=VirtualClock(), faults=no_faults, phase=lambda _: None)
        assert engine.scheduler.config.overlap is launches
        assert isinstance(engine.runner, AsyncRunner) is launches


def test_a_model_that_takes_pictures_runs_in_no_thread() -> None:
    assert OracleRunner().pictures is not None
    with pytest.raises(ParameterError, match='overlap="auto"'):
        ThreadedRunner(OracleRunner())
