"""Finds the workload files of the benchmark by name. `umbel.srt.simulator.workload` has their format."""

from pathlib import Path

from umbel.lang.errors import ParameterError
from umbel.srt.simulator.workload import Workload, read_workload

FOLDER = Path(__file__).parent / "workloads"


def available(folder: Path = FOLDER) -> list[str]:
    """Names of the workload files of a folder."""
    return sorted(path.name.removesuffix(".jsonl") for path in folder.glob("*.jsonl"))


def read(name: str, folder: Path = FOLDER) -> Workload:
    """A workload by its file's name.

    Raises:
        ParameterError: there is no such file, or a line of it is not in the format; the message says which.
    """
    path = folder / f"{name}.jsonl"
    if not path.is_file():
        raise ParameterError(f"no workload {name!r} in {folder}; there are {', '.join(available(folder)) or 'none'}")
    return read_workload(path)
