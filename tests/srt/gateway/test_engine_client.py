"""The gateway's end of an engine: what it does when nobody is at the other one."""

import asyncio
from pathlib import Path

import pytest
import zmq
from umbel.srt.core.messages import EngineAbort
from umbel.srt.gateway.engine_client import EngineClient

pytestmark = pytest.mark.processes


def test_what_is_said_to_an_engine_that_has_just_died_is_lost_with_it(tmp_path: Path) -> None:
    """Its socket is gone before its exit is seen. The exit ends what it was asked, and nothing else ends before."""

    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        child = EngineClient(
            context,
            tmp_path,
            1,
            on_events=lambda engine, messages: None,
            on_heartbeats=lambda engine, messages: None,
            on_error=lambda error: None,
        )
        for number in range(3):
            child.send(EngineAbort(number))
            child.flush()
        child.close()
        context.term()

    asyncio.run(run())
