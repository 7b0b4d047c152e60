"""Estimates the duration of a step from its shape: a line through recorded steps of a real engine.

    seconds = step + row · rows + key · keys + prefill_row · prefill rows + sequence · sequences + logit · logits

Rows of guesses are among the prefill rows, and cost what each logit costs as well. A step lasts until the next one
begins where work is left: answers are sent and calls read in between. The coefficients are those that make the squares
of the relative errors least, then all are scaled so that the steps of the fit last as long together as they did; none
is negative. Each fifth recorded step is left out of the fit, and tells how good it is.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...lang import checks
from ...lang.errors import ParameterError
from ..core.batch import StepShape

HELD_OUT = 5  # of so many recorded steps one is left out of the fit
LEAST_STEPS = 20
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e6  # of a step of one row; of a coefficient
_OUTLIER = 3.0  # a step that took so many times as long as the first fit says was interrupted


class RecordedStep(NamedTuple):
    shape: StepShape
    seconds: float


class FitError(msgspec.Struct, frozen=True):
    """The errors on the steps that were left out of a fit.

    Attributes:
        steps: how many there were.
        median, mean: of |estimate − seconds| / seconds.
        total: (sum of all estimates − sum of all seconds) / sum of all seconds.
    """

    steps: int
    median: float
    mean: float
    total: float


class StepModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients in seconds, and where they are from.

    Attributes:
        machine: the processor whose steps were recorded.
        model: the name of the model that ran them.
        held_out: errors of the fit; None: the coefficients were written by hand.
    """

    machine: str
    model: str
    step: float
    row: float
    key: float
    prefill_row: float
    sequence: float
    logit: float = 0.0
    held_out: FitError | None = None

    def seconds(self, shape: StepShape) -> float:
        return (
            self.step
            + self.row * shape.rows
            + self.key * shape.keys
            + self.prefill_row * shape.prefill_rows
            + self.sequence * shape.sequences
            + self.logit * shape.logits
        )

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second, of one long prompt in chunks of 512."""
        rows = 512
        return rows / self.seconds(StepShape(rows, rows * rows // 2, rows, 1, 1))

    @property
    def decode_rate(self) -> float:
        """Tokens a second that 16 sequences of 1,000 tokens generate together."""
        count = 16
        return count / self.seconds(StepShape(count, 1_000 * count, 0, count, count))


# Recorded with `umbel simulate --measure default`.
DEFAULT_STEPS = StepModel(
    machine="AMD EPYC, 2 cores, with other work on them",
    model="default",
    step=0.0168,
    row=0.0,
    key=2.21e-6,
    prefill_row=0.000622,
    sequence=0.00213,
    held_out=FitError(steps=38, median=0.262, mean=0.258, total=-0.061),
)


def fit(steps: Sequence[RecordedStep], *, machine: str, model: str) -> StepModel:
    """Fits the coefficients. Raises ParameterError for fewer than LEAST_STEPS steps."""
    if len(steps) < LEAST_STEPS:
        raise ParameterError(f"{len(steps)} steps are recorded; a fit takes {LEAST_STEPS} or more")
    table = np.array([[1.0, *step.shape] for step in steps])
    seconds = np.array([step.seconds for step in steps])
    held = np.arange(len(steps)) % HELD_OUT == HELD_OUT - 1
    first = _coefficients(table[~held], seconds[~held])
    usual = seconds[~held] < _OUTLIER * (table[~held] @ first)
    table_used, seconds_used = table[~held][usual], seconds[~held][usual]
    found = _coefficients(table_used, seconds_used)
    found *= seconds_used.sum() / (table_used @ found).sum()
    estimates = table[held] @ found
    errors = np.abs(estimates - seconds[held]) / seconds[held]
    total = float(estimates.sum() / seconds[held].sum() - 1)
    error = FitError(int(held.sum()), float(np.median(errors)), float(errors.mean()), total)
    step, row, key, prefill_row, sequence, logit = found.tolist()
    return StepModel(machine, model, step, row, key, prefill_row, sequence, logit, error)


def _coefficients(table: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solves for coefficients that are not negative: what comes out below 0 is left out, and the rest solved anew."""
    used = np.ones(table.shape[1], dtype=np.bool_)
    weighted, ones = table / seconds[:, None], np.ones(len(seconds))
    scale = np.maximum(np.abs(weighted).max(axis=0), 1e-30)
    while True:
        found = np.zeros(table.shape[1])
        found[used] = np.linalg.lstsq((weighted / scale)[:, used], ones, rcond=None)[0] / scale[used]
        if (found >= 0).all():
            return found
        used &= found >= 0


def read_steps(path: Path) -> tuple[list[RecordedStep], str]:
    """Reads the steps of a recording (docs/simulator.md), and the name of its model.

    Raises:
        ParameterError: the file cannot be read, or is no recording.
    """
    try:
        header, *lines = path.read_text(encoding="utf-8").splitlines()
        model = str(json.loads(header)["model"])
        records = [record for line in lines if "step" in (record := json.loads(line))]
        return [
            RecordedStep(StepShape(*record["step"]), _duration(record, after))
            for record, after in zip_longest(records, records[1:])
        ], model
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ParameterError(f"{path} is no recording of a runtime: {error!r}") from error


def _duration(record: Mapping[str, Any], after: Mapping[str, Any] | None) -> float:  # Any: JSON
    """Returns the seconds of a step: up to the next one where that had work at once."""
    if after is None or not record.get("more"):
        return float(record["seconds"])
    return max(float(record["seconds"]), float(after["at"]) - float(record["at"]))


def read_step_model(path: Path) -> StepModel:
    """Reads a file that `write_step_model` has written. Raises ParameterError."""
    try:
        model = msgspec.json.decode(path.read_bytes(), type=StepModel)
    except (OSError, msgspec.DecodeError) as error:
        raise ParameterError(
            f"--steps {path} holds no step model: {error}; make one with umbel simulate --measure MODEL --steps {path}"
        ) from error
    for name in ("step", "row", "key", "prefill_row", "sequence", "logit"):
        checks.number(f"--steps {path}: {name}", getattr(model, name), 0, MOST_SECONDS)
    if model.seconds(StepShape(1, 1, 0, 1, 1)) < LEAST_SECONDS:
        raise ParameterError(f"--steps {path}: a step of one row takes no time; write a step above 0, in seconds")
    return model


def write_step_model(model: StepModel, path: Path) -> None:
    """Writes a step model as JSON. Raises ParameterError."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(model), indent=2) + b"\n")
    except OSError as error:
        raise ParameterError(f"the step model cannot be written: {error}") from error


def this_machine() -> str:
    """Names the processor and the number of its cores."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {len(os.sched_getaffinity(0))} cores"
