"""The place of a request, from the field `umbel` of its body to the schedule that the engine gets."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from umbel.lang.protocol import Origin
from umbel.server.access import Access, Caller
from umbel.server.app import ENDPOINTS
from umbel.server.bodies import UmbelFields
from umbel.server.front import Front
from umbel.server.http import Endpoint
from umbel.srt.core.messages import Schedule
from umbel.srt.in_process import LocalBackend, LocalEngine

from ..srt.simulation import VirtualClock
from .client import served
from .odd_bodies import GOOD, LIMITS, prepared, url

# Each value is another one, so that two fields that are swapped are seen.
PLACE = {"program": "essays", "fork_group": "sides", "ahead": 3, "priority": 2, "timeout": 40.0}
(RUNS,) = (each for each in ENDPOINTS if each.path == "/v1/programs/{name}/runs")  # it knows its own branches
PLACED = [
    each for each in ENDPOINTS if each.body is not None and "umbel" in each.body.__struct_fields__ and each is not RUNS
]
OF_NO_STEP = {  # they ask the gateway, or nothing below the server
    "/abort",
    "/abort_request",
    "/detokenize",
    "/tokenize",
    "/v1/caches/{name}",
    "/v1/messages/count_tokens",
}


class Recording(LocalBackend):
    """The oracle, which notes where its requests stand."""

    def __init__(self) -> None:
        super().__init__(clock=VirtualClock(), context_length=640, pool_tokens=4_096)
        self.schedules: list[Schedule] = []

    def _to_engine(self, local: LocalEngine, message: Any) -> None:
        if hasattr(message, "schedule"):
            self.schedules.append(message.schedule)
        super()._to_engine(local, message)


def test_an_origin_has_each_field_in_its_place() -> None:
    front = Front(LocalBackend(), Access({"team": "sk-one"}))
    caller = Caller("team")
    salt = front.access.salt(caller, "mine")
    assert front.origin(caller, UmbelFields(**PLACE), "mine") == Origin("essays", "sides", salt, 2, 40.0, 3)
    assert front.origin(caller, None) == Origin(salt=front.access.salt(caller, None))


async def placed(endpoint: Endpoint, place: Mapping[str, Any]) -> Recording:
    """Sends the good bodies of an endpoint with a place → what its backend noted."""
    backend = Recording()
    async with served(backend, limits=LIMITS) as client:
        await prepared(client)
        backend.schedules.clear()
        for body in GOOD[endpoint.method, endpoint.path]:
            answer = await client.begin(endpoint.method, url(endpoint), {**body, "umbel": place}).ended()
            assert answer.status in (200, 201), answer.content
    return backend


@pytest.mark.parametrize("endpoint", PLACED, ids=lambda each: each.path)
def test_the_engine_gets_the_place_that_a_body_has(endpoint: Endpoint) -> None:
    found = asyncio.run(placed(endpoint, PLACE)).schedules
    # Nothing waits for a hint, so it has no deadline.
    expected = {**PLACE, "timeout": None} if endpoint.path == "/hints" else PLACE
    assert bool(found) == (endpoint.path not in OF_NO_STEP)
    for each in found:
        assert [each.program_id, each.fork_group, each.ahead, each.priority, each.timeout] == [*expected.values()]


def test_a_run_has_the_priority_and_the_deadline_that_its_body_has() -> None:
    backend = asyncio.run(placed(RUNS, {"priority": 2, "timeout": 20.0}))  # before the end of its budget
    (schedule,) = backend.schedules
    assert schedule.priority == 2
    assert schedule.timeout is not None
    assert 0 < schedule.timeout <= 20
