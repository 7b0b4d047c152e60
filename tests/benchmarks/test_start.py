"""A start is measured in processes of its own."""

import pytest

from benchmarks.start import measure

pytestmark = pytest.mark.processes


def test_a_start_is_timed_from_its_process_on_and_leaves_none() -> None:
    start = measure("oracle")
    assert 0 < start.runtime < start.whole
    assert 0 < start.engine < start.all
