"""Workloads on a device that computes nothing: steps are counted, and constrained rows run ahead."""

import pytest

from benchmarks.back_to_back import measured

pytestmark = pytest.mark.model


@pytest.mark.parametrize(("name", "late"), [("few_shot_batch", False), ("json_decode_regex", True)])
@pytest.mark.nightly
def test_steps_of_a_workload_are_counted(name: str, late: bool) -> None:
    options = {"overlap": True, "pool_tokens": 65_536}
    row = measured(name, options, 0.002, programs=4, concurrency=4)
    assert row.failures == 0
    assert row.steps > 5
    assert 0 <= row.back_to_back <= row.steps
    assert 0 < row.busy <= 1
    assert (row.late > 20) is late
    assert str(row).startswith(f"| {name} | {row.steps} | ")
