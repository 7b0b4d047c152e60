"""Pins at the gateway: who has asked for what, and who lets go of it."""

import pytest
from umbel.lang.prompt import Text
from umbel.lang.protocol import Hint, Origin, Release
from umbel.srt.core.config import GatewayLimits
from umbel.srt.core.messages import EnginePrefill, EngineRelease, Schedule

from ..gateway_harness import Harness


def releases(harness: Harness) -> list[int]:
    return [message.id for message in harness.to_engine if isinstance(message, EngineRelease)]


def prefills(harness: Harness) -> list[EnginePrefill]:
    return [message for message in harness.to_engine if isinstance(message, EnginePrefill)]


def pin(label: str, seconds: float = 60.0) -> Hint:
    return Hint(label, (Text("abc"),), Origin(salt="s"), seconds)


def test_a_pin_travels_with_its_seconds_and_a_release_by_its_label() -> None:
    harness = Harness()
    harness.send(pin("p", 30.0))
    (prefill,) = prefills(harness)
    assert (prefill.pin, prefill.schedule) == (30.0, Schedule(salt="s"))
    harness.send(Release("p"), client=b"another")
    assert releases(harness) == []
    harness.send(Release("p"))
    harness.send(Release("p"))
    assert releases(harness) == [prefill.id]


def test_the_pins_of_a_client_that_goes_away_are_released() -> None:
    harness = Harness()
    for label, client in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        harness.send(pin(label), client=client)
    harness.lose(b"one")
    assert releases(harness) == [prefill.id for prefill in prefills(harness)[:2]]


def test_a_label_pins_once() -> None:
    harness = Harness()
    harness.send(pin("p"))
    harness.send(pin("p"))
    first, second = prefills(harness)
    assert releases(harness) == [first.id]
    harness.send(Release("p"))
    assert releases(harness) == [first.id, second.id]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_a_pin_without_a_sensible_time_is_counted_and_not_sent(seconds: float) -> None:
    harness = Harness()
    harness.send(pin("p", seconds))
    assert (harness.to_engine, harness.gateway.counters["hints_unused"]) == ([], 1)


def test_clients_cannot_make_the_gateway_remember_without_bound() -> None:
    harness = Harness(limits=GatewayLimits(max_pins=2))
    for number in range(3):
        harness.send(pin(f"p{number}", 5.0))
    assert (len(prefills(harness)), harness.gateway.counters["hints_unused"]) == (2, 1)
    harness.clock.advance(6.0)
    harness.send(pin("p3", 5.0))
    assert len(prefills(harness)) == 3


def test_a_pin_that_could_not_be_sent_takes_no_room() -> None:
    failing = [True]

    def fail(point: str) -> None:
        if point == "gateway.send" and failing:
            failing.clear()
            raise OSError

    harness = Harness(limits=GatewayLimits(max_pins=1), faults=fail)
    harness.send(pin("lost"))
    harness.send(pin("p"))
    assert (len(prefills(harness)), harness.gateway.counters["hints_unused"]) == (1, 1)


def test_an_engine_that_died_has_no_pins_to_release() -> None:
    harness = Harness()
    harness.send(pin("p"))
    harness.gateway.engine_lost("killed")
    harness.send(Release("p"))
    assert releases(harness) == []
