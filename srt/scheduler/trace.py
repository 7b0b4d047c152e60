"""Records when a device ran steps and what the host did meanwhile, to find out what the device waits for.

    host     │ plan │ admit │ launch │ wait ......... │ commit │ plan │ …        a mark at each change of phase
    device            (idle)         [══ step 1 ══════]   (idle)      [══ …      a record of each step

A mark costs a reading of the clock and an append, and a step has about ten. They are kept in memory and are
written when no request is left, so that no step waits for the file. `benchmarks/gpu/engine/gaps.py` reads it.
"""

import json
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from ...lang.errors import ParameterError
from ..core.batch import Pending, StepTimes
from ..core.instruments import Clock
from .step import StepPlan

_MOST_MARKS = 1 << 18  # in memory; then they are written between two steps


class HostPhase(IntEnum):
    """Names what the thread of the scheduler does, from a mark to the next one."""

    RESTING = 0  # outside of steps, without a request
    OUTSIDE = 1  # outside of steps, with requests: messages, garbage collection
    BEGIN = 2  # controls, ends, deadlines
    PLAN = 3  # rows of texts that decode
    PREFILL = 4  # rows of prompts of admitted requests
    ADMIT = 5  # waiting requests
    LAUNCH = 6  # the batch is built and sent
    WAIT = 7  # for the result of a step
    COMMIT = 8  # tokens are read, chosen, appended
    MASK = 9  # tokens are chosen late, under masks
    END = 10  # counters, checks, answers


class TracedStep(NamedTuple):
    """One step, as the file has it.

    Attributes:
        launched: on the host's clock, before its launch.
        ended: on the host's clock, when its result had been waited for.
        times: on the device's clock; None of a runner that does not tell, which ran from `launched` to `ended`.
        mask: seconds that masks took while it was planned, and the steps before it were committed.
        texts: sequences that decode; prompts: rows of the other ones, and `prompt_sequences` how many these are.
        guesses: rows of guessed tokens. late: rows that chose later.
    """

    launched: float
    ended: float
    times: StepTimes | None
    mask: float
    texts: int
    prompts: int
    prompt_sequences: int
    guesses: int
    late: int


class StepTrace:
    """Writes a trace, one JSON object for each time that no request is left. Used by the thread of the scheduler.

    Args:
        path: of a new file; one of this name is replaced.

    Raises:
        ParameterError: the file cannot be written.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ParameterError(f"debug.trace: {error}") from error
        self._now = clock.now
        self._marks: list[tuple[int, float]] = []
        self._steps: list[TracedStep] = []
        self._note = self._marks.append
        self._masks = 0.0  # seconds, when the last step was noted

    def enter(self, phase: HostPhase) -> None:
        """Notes that the host begins with something else."""
        self._note((phase, self._now()))

    def completed(self, plan: StepPlan, pending: Pending, launched: float, masks: float, late: int) -> None:
        """Notes a step whose result has just been waited for. masks: seconds that masks took until now."""
        tell = getattr(pending, "times", None)  # of a TimedStep; isinstance takes longer than all else here
        times = None if tell is None else tell()
        texts, prompts, sequences = composition(plan)
        mask, self._masks = masks - self._masks, masks
        self._steps.append(
            TracedStep(launched, self._now(), times, mask, texts, prompts, sequences, plan.guess_rows, late)
        )

    @property
    def is_full(self) -> bool:
        return len(self._marks) > _MOST_MARKS

    def flush(self) -> None:
        """Writes what was noted since the last time."""
        if self._steps:
            json.dump({"marks": self._marks, "steps": self._steps}, self._file, separators=(",", ":"))
            self._file.write("\n")
            self._file.flush()
        del self._marks[:-1]  # the last phase goes on
        self._steps.clear()

    def close(self) -> None:
        self.flush()
        self._file.close()


def composition(plan: StepPlan) -> tuple[int, int, int]:
    """Returns the texts that decode, the rows of all other sequences, and how many these are."""
    if plan.single_rows == len(plan.planned):
        return plan.single_rows, 0, 0
    lengths = [rows.end - rows.start for rows in plan.planned]
    texts = sum(length == 1 for length in lengths)
    return texts, sum(lengths) - texts, len(lengths) - texts


def read_trace(path: Path) -> tuple[list[tuple[HostPhase, float]], list[TracedStep]]:
    """Reads the marks and the steps of a file, in order."""
    marks: list[tuple[HostPhase, float]] = []
    steps: list[TracedStep] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        found = json.loads(line)
        marks += [(HostPhase(phase), at) for phase, at in found["marks"]]
        steps += [_step(one) for one in found["steps"]]
    return marks, steps


def _step(found: Sequence[object]) -> TracedStep:
    launched, ended, times, *rest = found
    read = None if times is None else StepTimes(*times)  # type: ignore[misc]  # four numbers, as it was written
    return TracedStep(launched, ended, read, *rest)  # type: ignore[arg-type]
