"""What a device waits for: traces of the scheduler, laid out on a virtual clock and on the pretended device."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
import umbel as ul
from umbel.lang.errors import ParameterError
from umbel.lang.runtime_options import DebugOptions, RuntimeOptions
from umbel.srt.core.batch import StepTimes
from umbel.srt.core.instruments import SystemClock, VirtualClock
from umbel.srt.scheduler.trace import HostPhase, StepTrace, TracedStep, read_trace

from benchmarks.gpu.engine.gaps import Cause, described, idle_of, page, quantile
from benchmarks.gpu.engine.timeline import timeline

STEP = TracedStep(0.0, 0.0, None, 0.0, texts=2, prompts=0, prompt_sequences=0, guesses=0, late=0)
P = HostPhase


def step(ended: float, *times: float, mask: float = 0.0, late: int = 0) -> TracedStep:
    return replace_step(ended=ended, times=StepTimes(*times), mask=mask, late=late)


def replace_step(**changes: object) -> TracedStep:
    return STEP._replace(**changes)  # type: ignore[arg-type]


def test_a_gap_is_shared_out_among_what_the_host_did_meanwhile() -> None:
    # The device runs from 10.00 to 10.10 and from 10.16 to 10.26; the result of the first is had at once.
    steps = [step(10.10, 0.0, 0.10, 0.0, 0.0), step(10.27, 0.06, 0.10, 0.0, 0.0)]
    marks = [(P.LAUNCH, 9.99), (P.WAIT, 10.0), (P.COMMIT, 10.10), (P.ADMIT, 10.11), (P.PLAN, 10.14), (P.LAUNCH, 10.15)]
    idle = idle_of([*marks, (P.WAIT, 10.16)], steps)
    assert idle is not None
    assert idle.steps == 2
    assert idle.busy == pytest.approx(0.20 / 0.26)
    (gap,) = idle.gaps
    assert gap.seconds == pytest.approx(0.06)
    assert gap.cause is Cause.ADMISSION
    causes = {cause: round(seconds, 6) for cause, seconds in gap.causes.items()}
    assert causes == {Cause.RESULT: 0.01, Cause.ADMISSION: 0.03, Cause.PLAN: 0.02}
    assert sum(idle.seconds_by_cause().values()) == pytest.approx(gap.seconds)


def test_masks_are_taken_from_the_phases_that_make_them_and_late_choices_wait_for_them_alone() -> None:
    steps = [step(1.0, 0.0, 1.0, 0.0, 0.0), step(2.5, 0.2, 1.0, 0.25, 0.05, mask=0.1, late=3)]
    marks = [(P.WAIT, 0.0), (P.PLAN, 1.0), (P.WAIT, 1.2)]
    idle = idle_of(marks, steps)
    assert idle is not None
    between, late = idle.gaps
    assert between.causes == pytest.approx({Cause.MASK: 0.1, Cause.PLAN: 0.1})
    assert late.causes == pytest.approx({Cause.MASK: 0.25})
    assert [span.late for span in idle.spans] == [False, False, True]
    assert idle.steps == 2


def test_a_device_without_requests_waits_for_programs() -> None:
    steps = [step(1.0, 0.0, 1.0, 0.0, 0.0), step(4.0, 2.0, 1.0, 0.0, 0.0)]
    idle = idle_of([(P.COMMIT, 1.0), (P.RESTING, 1.01), (P.BEGIN, 2.98), (P.PLAN, 2.99), (P.WAIT, 3.0)], steps)
    assert idle is not None
    assert idle.gaps[0].cause is Cause.PROGRAMS
    assert idle.gaps[0].causes[Cause.PROGRAMS] == pytest.approx(1.97)


def test_the_clock_of_a_device_is_laid_on_that_of_the_host_by_the_result_that_was_had_soonest() -> None:
    steps = [step(5.5, 0.0, 1.0, 0.0, 0.0), step(6.2, 0.1, 1.0, 0.0, 0.0)]  # the host came for the first 0.4 s late
    idle = idle_of([(P.WAIT, 0.0)], steps)
    assert idle is not None
    assert (idle.begin, idle.end) == (pytest.approx(4.1), pytest.approx(6.2))
    assert all(span.end <= span.step.ended + 1e-9 for span in idle.spans)


def test_steps_of_runners_that_tell_no_times_run_from_launch_to_result_and_a_window_cuts_a_workload_out() -> None:
    steps = [replace_step(launched=float(at), ended=at + 0.5) for at in range(4)]
    idle = idle_of([(P.WAIT, 0.0)], steps, begin=1.0, end=2.9)
    assert idle is not None
    assert (idle.begin, idle.end, idle.steps) == (1.0, 2.5, 2)
    assert idle_of([], steps, begin=9.0) is None


def test_steps_are_described_and_quantiles_are_values() -> None:
    assert described(replace_step(prompts=512, prompt_sequences=2, guesses=3, late=1)) == (
        "2 texts, 512 rows of 2 prompts, 3 guessed rows, 1 late rows"
    )
    assert quantile([], 0.99) == 0.0
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0


def test_a_trace_is_written_when_no_request_is_left_and_read_back(tmp_path: Path) -> None:
    clock = VirtualClock()
    trace = StepTrace(tmp_path / "trace", clock)
    trace.enter(P.PLAN)
    trace.flush()
    assert (tmp_path / "trace").read_text() == "", "nothing ran"
    clock.advance(1.0)
    trace.enter(P.WAIT)
    trace._steps.append(step(1.0, 0.0, 1.0, 0.0, 0.0))
    trace.flush()
    clock.advance(1.0)
    trace.enter(P.END)
    trace._steps.append(step(2.0, 0.5, 0.5, 0.0, 0.0))
    trace.close()
    marks, steps = read_trace(tmp_path / "trace")
    assert marks == [(P.PLAN, 0.0), (P.WAIT, 1.0), (P.WAIT, 1.0), (P.END, 2.0)]
    assert [one.times for one in steps] == [StepTimes(0.0, 1.0, 0.0, 0.0), StepTimes(0.5, 0.5, 0.0, 0.0)]
    with pytest.raises(ParameterError, match=r"debug\.trace"):
        StepTrace(tmp_path / "nowhere" / "trace", SystemClock())


@ul.function
def digits(s: ul.State) -> None:
    s += "A number: " + ul.gen("n", regex="[0-9]{3}", max_tokens=8)
    s += " and a text: " + ul.gen("t", max_tokens=12, ignore_eos=True)


@pytest.mark.nightly
def test_a_runtime_writes_when_its_device_ran_and_every_idle_second_has_a_cause(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    options = {"overlap": True, "debug": {"pretend_step": 0.002, "trace": str(path)}}
    with ul.Runtime(**options) as runtime:  # type: ignore[arg-type]  # checked there
        digits.run_batch([{}] * 4, backend=runtime.wait_ready())
        counted = ul.get_server_info(runtime)
    marks, steps = read_trace(path)
    assert len(steps) >= int(counted["steps"])  # type: ignore[arg-type]  # a number
    idle = idle_of(marks, steps)
    assert idle is not None
    assert sum(one.late for one in steps) > 0, "texts under a regex choose late"
    assert 0 < idle.busy <= 1
    for gap in idle.gaps:
        assert sum(gap.causes.values()) == pytest.approx(gap.seconds, rel=1e-6)
    written = page("toy", {"digits": idle})
    assert f"| digits | {idle.end - idle.begin:.2f} | {idle.steps} | {idle.busy:.1%} |" in written
    picture = ElementTree.fromstring(timeline("digits", idle))
    assert picture.tag.endswith("svg")
    assert len(list(picture)) > 20


def test_switches_that_do_not_go_with_others_say_so() -> None:
    with pytest.raises(ParameterError, match=r"debug\.trace is of one engine"):
        RuntimeOptions(replicas=2, debug=DebugOptions(trace="x"))
    with pytest.raises(ParameterError, match="leave tensor_parallel out"):
        RuntimeOptions(tensor_parallel=2, debug=DebugOptions(random_weights=True))
    with pytest.raises(ParameterError, match="the oracle has no weights"):
        RuntimeOptions(model="oracle", debug=DebugOptions(random_weights=True))
