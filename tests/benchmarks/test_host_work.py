"""What a decode step costs the host is measured on a device that does nothing."""

import pytest

from benchmarks.overhead.host_work import main


def test_a_step_is_timed_with_its_launch_and_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["2x40:16"]) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    size, step, launch, plan = (cell.strip() for cell in row.strip("|").split("|"))
    assert size == "2x40:16"
    assert float(step) >= float(launch) >= float(plan) >= 0
    assert float(step) > 0
