"""What the system says of a child process: whether it can compute, and how much CPU time it has had.

A child that is late is not a child that hangs: on a busy machine it waits for a core. The system tells the two apart,
so nobody has to guess from the wall's clock.
"""

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")  # of the system's accounting, per second
_USER, _SYSTEM = 11, 12  # fields of a `stat` file behind the state


class Condition(Enum):
    """Of all threads of a process together: the first of these that one of them is in."""

    RUNNABLE = "R"  # it computes, or waits for a core
    DISK = "D"  # it waits for a disk
    ASLEEP = "S"  # it waits for something else
    STOPPED = "T"  # by a signal or a debugger


@dataclass(frozen=True, slots=True)
class ChildState:
    """One look at a child. `cpu_seconds`: since its start, in steps of the system's accounting (10 ms)."""

    condition: Condition
    cpu_seconds: float


def look_at(process_id: int) -> ChildState | None:
    """What the child does now; None where it is gone, or the system has no /proc."""
    folder = Path("/proc") / str(process_id)
    try:
        fields = _fields(folder / "stat")
        letters = [_fields(thread / "stat")[0] for thread in (folder / "task").iterdir()]
    except (OSError, IndexError, ValueError):
        return None
    if fields[0] in "ZX":
        return None
    return ChildState(_condition(letters), (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS)


def _condition(letters: list[str]) -> Condition:
    found = {"T" if letter == "t" else letter for letter in letters}
    return next((condition for condition in Condition if condition.value in found), Condition.ASLEEP)


def _fields(path: Path) -> list[str]:
    """From the state on: the name before it may hold blanks and brackets."""
    return path.read_text("ascii", "replace").rpartition(")")[2].split()
