"""Whether loading beats computing: by what is measured, without wavering, and found again when it changes."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from umbel.srt.core.instruments import VirtualClock
from umbel.srt.tiers import rates
from umbel.srt.tiers.rates import Ewma, LoadRate, Rates
from umbel.srt.tiers.tier import TierFacts

PAGE = 1_000_000  # bytes


@dataclass
class Bench:
    latency: float = 0.0
    per_page: float = 0.0
    waiting: int = 0
    clock: VirtualClock = field(default_factory=VirtualClock)

    def __post_init__(self) -> None:
        self.rates = Rates(64, {"disk": self.facts}, self.clock)

    def facts(self) -> TierFacts:
        return TierFacts(
            "disk",
            latency=self.latency,
            seconds_per_byte=self.per_page / PAGE,
            waiting_bytes=self.waiting,
        )

    def worth(self, pages: int) -> bool:
        return self.rates.worth("disk", 64 * pages, pages * PAGE)


def bench(latency: float, per_page: float, computing: float) -> Bench:
    made = Bench(latency, per_page)
    made.rates.computed(640, 10 * computing)
    return made


def test_until_computing_is_measured_runs_are_loaded() -> None:
    made = Bench(latency=9.0, per_page=9.0)
    assert made.worth(1)
    assert made.rates.crossing("disk", PAGE) == "loads from disk: not measured yet"


def test_short_steps_say_nothing_about_prompts() -> None:
    made = Bench()
    made.rates.computed(3, 5.0)
    assert made.rates.seconds_per_token is None
    made.rates.computed(64, 0.64)
    assert made.rates.seconds_per_token == pytest.approx(0.01)


def test_what_waits_for_the_tier_counts() -> None:
    made = bench(0.0, 0.005, 0.010)
    assert made.worth(2)
    made.waiting = 20 * PAGE
    assert not made.worth(2)
    assert made.worth(50), "a long run is worth the wait"


@pytest.mark.parametrize(
    ("latency", "per_page", "computing", "says"),
    [
        (0.0, 0.001, 0.010, "loads from disk pay from 1 page on: a page takes 1 ms, computing it 10 ms"),
        (
            0.010,
            0.001,
            0.010,
            "loads from disk pay from 2 pages on: a page takes 1 ms (10 ms before the first), computing it 10 ms",
        ),
        (0.0, 0.009, 0.010, "loads from disk do not pay: a page takes 9 ms, computing it 10 ms"),
    ],
)
def test_the_crossing_is_said(latency: float, per_page: float, computing: float, says: str) -> None:
    assert bench(latency, per_page, computing).rates.lines(["disk"], PAGE) == [says]


@given(st.floats(0, 1), st.floats(1e-6, 0.1), st.floats(1e-6, 0.1))
def test_loads_begin_to_pay_at_the_crossing(latency: float, per_page: float, computing: float) -> None:
    def fresh() -> Bench:
        made = bench(latency, per_page, computing)
        made.latency = 1e9
        assert not made.worth(1)
        made.latency = latency
        return made

    says = fresh().rates.crossing("disk", PAGE)
    if "do not pay" in says:
        assert not fresh().worth(1) or rates.GAIN * computing == pytest.approx(per_page)
    else:
        pages = int(says.split("from ")[2].split()[0])
        assert fresh().worth(pages + 1)
        assert pages <= 2 or not fresh().worth(pages - 2)


def test_figures_that_waver_decide_nothing_twice() -> None:
    made = bench(0.0, 0.007, 0.010)
    assert made.worth(1)
    made.per_page = 0.009
    assert made.worth(1), "it has paid: it is loaded as long as it is not slower"
    made.per_page = 0.011
    assert not made.worth(1)
    made.per_page = 0.009
    assert not made.worth(1), "it has not: it is loaded when it is clearly faster"
    made.per_page = 0.007
    assert made.worth(1)


def test_a_tier_that_became_fast_is_found_again() -> None:
    made = bench(0.0, 0.5, 0.010)
    assert not made.worth(1)
    assert not made.rates.probes("disk")
    asked = []
    for second in range(200):
        made.clock.advance(1.0)
        assert made.rates.asks("disk", 64, PAGE) == (made.clock.now() >= made.rates._standings["disk"].probe_at)
        if made.rates.probes("disk"):
            asked.append(second)
    assert asked == [4, 14, 34, 74, 134, 194], "ever more rarely, and at least once a minute"
    made.per_page = 0.001  # as the page has told
    assert made.worth(1)
    made.per_page = 0.5
    assert not made.worth(1)
    made.clock.advance(5.0)
    assert made.rates.probes("disk"), "soon again after it has paid"


def test_a_tier_that_pays_is_not_probed() -> None:
    made = bench(0.0, 0.001, 0.010)
    assert made.worth(1)
    made.clock.advance(100.0)
    assert not made.rates.probes("disk")


def test_the_latest_samples_weigh_most() -> None:
    average = Ewma()
    for _ in range(20):
        average.add(1.0)
    for _ in range(8):
        average.add(0.0)
    assert 0.0 < (average.value or 0.0) < 0.11


def test_waits_without_a_page_count_as_latency() -> None:
    rate = LoadRate()
    assert (rate.known, rate.latency, rate.per_byte) == (False, 0.0, 0.0)
    rate.looked(0.1)
    rate.loaded(1_000, 0.5)
    assert (rate.known, rate.latency, rate.per_byte) == (True, 0.1, 0.0005)
    rate.loaded(0, 2.1)
    assert rate.latency == pytest.approx(0.6)
