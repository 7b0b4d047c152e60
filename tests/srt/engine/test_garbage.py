"""The collector between steps."""

import gc
import weakref
from collections.abc import Iterator

import pytest
from umbel.srt.engine import process
from umbel.srt.engine.process import StepCollector


class Knot:
    """Refers to itself: only a collector finds that nobody else does."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[StepCollector]:
    monkeypatch.setattr(process, "YOUNG", 1_000)
    monkeypatch.setattr(process, "DUE", 10_000)
    monkeypatch.setattr(process, "OVERDUE", 100_000)
    gc.collect()
    yield StepCollector()
    gc.unfreeze()
    gc.freeze()  # as conftest.py left it
    gc.enable()


def objects(count: int) -> list[list[int]]:
    return [[number] for number in range(count)]


def test_nothing_is_collected_inside_of_a_step(collector: StepCollector) -> None:
    collector.begin()
    knot = weakref.ref(Knot())
    kept = objects(5_000)
    assert knot() is not None
    collector.after_step(idle=False)
    assert knot() is None
    assert len(kept) == 5_000


def test_a_step_that_made_little_is_followed_by_the_next_one(collector: StepCollector) -> None:
    collector.begin()
    knot = weakref.ref(Knot())
    collector.after_step(idle=False)
    collector.after_step(idle=True)
    assert knot() is not None


@pytest.mark.parametrize(("idle", "made"), [(True, 10_000), (False, 100_000)])
def test_what_was_old_already_goes_when_nobody_waits_or_at_last(
    collector: StepCollector, idle: bool, made: int
) -> None:
    collector.begin()
    knot = Knot()
    gone = weakref.ref(knot)
    kept = [objects(2_000)]
    collector.after_step(idle=False)  # the knot is old from here on
    del knot
    while gone() is not None:
        assert len(kept) * 2_000 <= made + 2_000
        kept.append(objects(2_000))
        collector.after_step(idle=idle)
    assert len(kept) * 2_000 >= made


def test_what_was_loaded_is_not_looked_through(collector: StepCollector) -> None:
    before = gc.get_freeze_count()
    kept = objects(5_000)
    collector.begin()
    assert gc.get_freeze_count() >= before + 5_000
    assert not gc.isenabled()
    assert kept
