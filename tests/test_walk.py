"""A reader who follows one `gen()` from the program to the kernel and back opens few files."""

import json
import subprocess
import sys

import pytest

from .test_house import ROOT

LIMITS = {"plain": 49, "constrained": 55}  # files


@pytest.fixture(scope="module")
def walks() -> dict[str, list[str]]:
    done = subprocess.run([sys.executable, "-m", "tests.walk"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    walks: dict[str, list[str]] = json.loads(done.stdout)
    return walks


@pytest.mark.processes
@pytest.mark.parametrize("program", LIMITS)
def test_a_call_passes_through_few_files(walks: dict[str, list[str]], program: str) -> None:
    files = walks[program]
    assert files[0].startswith("interpreter/")
    assert len(files) <= LIMITS[program], "\n".join(files)
