"""Everything that is public, called with odd arguments: an UmbelError or a result comes out, and nothing stays behind.

public_calls.py has the calls and says what a fault is; it runs in a process of its own, which may hang or die.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("public_calls.py")
SEED = 20261122


def called(tmp_path: Path, calls: int, seed: int) -> None:
    """Fails with what the process says of its calls; where it died, with the one that it was at."""
    here = tmp_path / "call"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--calls", str(calls), "--seed", str(seed)],
        env={**os.environ, "UMBEL_CALL": str(here)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    if f"{calls} calls, " not in done.stdout:
        pytest.fail(f"it died or hung at --seed {seed} --only {here.read_text()}:\n{done.stderr[-4000:]}")
    assert done.returncode == 0, done.stdout[-8000:]


def test_odd_arguments_of_public_callables_are_refused_by_name(tmp_path: Path) -> None:
    called(tmp_path, 1000, SEED)


@pytest.mark.nightly
def test_forty_thousand_odd_calls_end_well(tmp_path: Path) -> None:
    called(tmp_path, 40_000, SEED + 1)
