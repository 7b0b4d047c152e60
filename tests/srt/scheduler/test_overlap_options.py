"""Who runs the steps when they are to overlap: an AsyncRunner, or nobody."""

import pytest
from umbel.lang.errors import ParameterError
from umbel.lang.runtime_options import DebugOptions, RuntimeOptions
from umbel.srt.core.batch import AsyncRunner
from umbel.srt.core.instruments import VirtualClock, no_faults
from umbel.srt.launch import LoadedModel, open_engine
from umbel.srt.scheduler.scheduler import Scheduler, SchedulerConfig
from umbel.srt.testing.oracle import OracleRunner
from umbel.srt.tokenizer.tokenizer import ByteTokenizer


def test_overlap_needs_a_runner_that_launches() -> None:
    with pytest.raises(ParameterError, match="overlap=False"):
        Scheduler(OracleRunner(), lambda _: b"", frozenset(), SchedulerConfig(overlap=True), VirtualClock())


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"overlap": "on"}, "True or False"),
        ({"overlap": 1}, "True or False"),
        ({"overlap": True, "debug": DebugOptions(step_delay=0.5), "model": "oracle"}, "leave overlap=True out"),
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


def test_overlap_is_refused_where_steps_are_waited_for() -> None:
    options = RuntimeOptions(overlap=True)
    loaded = LoadedModel("oracle", ByteTokenizer(), OracleRunner())
    with pytest.raises(ParameterError, match='write overlap="auto"'):
        open_engine(options, clock=VirtualClock(), faults=no_faults, phase=lambda _: None, loaded=loaded)
