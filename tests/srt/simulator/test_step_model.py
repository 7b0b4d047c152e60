"""The step model: fitted to recorded steps, read and written."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from umbel.lang.errors import ParameterError
from umbel.srt.core.batch import StepShape
from umbel.srt.simulator.measuring import measure
from umbel.srt.simulator.step_model import DEFAULT_STEPS, RecordedStep, fit, read_step_model, write_step_model

TRUTH = DEFAULT_STEPS


def steps(count: int, noise: float = 0.0) -> list[RecordedStep]:
    draw = np.random.default_rng(1)
    found = []
    for _ in range(count):
        sequences = int(draw.integers(1, 33))
        prefill = int(draw.integers(0, 500))
        shape = StepShape(sequences + prefill, int(draw.integers(100, 200_000)), prefill, sequences, sequences)
        found.append(RecordedStep(shape, TRUTH.seconds(shape) * (1 + noise * draw.standard_normal())))
    return found


def test_a_fit_finds_the_coefficients_of_steps_without_noise() -> None:
    found = fit(steps(200), machine="m", model="n")
    shape = StepShape(300, 50_000, 280, 20, 20)
    assert found.seconds(shape) == pytest.approx(TRUTH.seconds(shape), rel=1e-6)
    assert found.held_out is not None
    assert found.held_out.mean < 1e-6


def test_the_error_is_that_of_steps_the_fit_has_not_seen() -> None:
    found = fit(steps(400, noise=0.1), machine="m", model="n")
    assert found.held_out is not None
    assert found.held_out.steps == 80
    assert 0.04 < found.held_out.median < 0.1


def test_steps_that_were_interrupted_do_not_count() -> None:
    recorded = steps(200)
    recorded[3] = RecordedStep(recorded[3].shape, recorded[3].seconds * 40)
    found = fit(recorded, machine="m", model="n")
    shape = StepShape(300, 50_000, 280, 20, 20)
    assert found.seconds(shape) == pytest.approx(TRUTH.seconds(shape), rel=0.01)


def test_no_coefficient_is_below_zero() -> None:
    less_with_keys = [RecordedStep(s.shape, 0.1 + 0.001 * s.shape.rows - 1e-7 * s.shape.keys) for s in steps(100)]
    found = fit(less_with_keys, machine="m", model="n")
    assert min(found.step, found.row, found.key, found.prefill_row, found.sequence) >= 0


def test_a_few_steps_are_no_basis() -> None:
    with pytest.raises(ParameterError, match="5 steps are recorded; a fit takes 20 or more"):
        fit(steps(5), machine="m", model="n")


def test_a_model_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_step_model(TRUTH, tmp_path / "steps.json")
    assert read_step_model(tmp_path / "steps.json") == TRUTH


def test_another_file_is_refused_with_what_makes_one(tmp_path: Path) -> None:
    (tmp_path / "steps.json").write_text('{"step": 1}')
    with pytest.raises(ParameterError, match="umbel simulate --measure MODEL"):
        read_step_model(tmp_path / "steps.json")


def test_steps_of_a_model_are_recorded() -> None:
    recorded = measure("oracle", most=2)
    assert all(step.seconds > 0 and step.shape.rows >= step.shape.sequences > 0 for step in recorded)
    assert any(step.shape.prefill_rows for step in recorded)
    assert any(step.shape.prefill_rows == 0 for step in recorded)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"row": -1e-9}, r"row=-1e-09 is out of range; write 0 to 1000000"),
        ({"step": 1e300}, "step=1e[+]300 is out of range"),
        ({"step": 0.0, "row": 0.0, "key": 0.0, "sequence": 0.0}, "a step of one row takes no time"),
    ],
)
def test_a_step_takes_time(tmp_path: Path, changed: dict[str, float], message: str) -> None:
    path = tmp_path / "steps.json"
    write_step_model(msgspec.structs.replace(DEFAULT_STEPS, **changed), path)
    with pytest.raises(ParameterError, match=message):
        read_step_model(path)
