"""Clients of a provider's SDK, one for each event loop, and the places of calls that run at once.

A client's connections belong to the loop on which they were opened. The interpreter has one loop; tests and blocking
helpers bring others.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C")

MOST_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Station(Generic[C]):
    """What one event loop has: a client, and a semaphore that calls hold until their answer ends."""

    client: C
    places: asyncio.Semaphore


class Clients(Generic[C]):
    """Stations by event loop.

    Args:
        open: makes a client for the running loop.
        close: ends one.
        concurrency: calls at once on one loop.
    """

    def __init__(self, open: Callable[[], C], close: Callable[[C], Awaitable[None]], concurrency: int) -> None:
        self._open, self._close, self._concurrency = open, close, concurrency
        self._lock = threading.Lock()  # loops of several threads may ask at once
        self._stations: dict[asyncio.AbstractEventLoop, Station[C]] = {}

    def here(self) -> Station[C]:
        """The running loop's station, opened when there is none."""
        loop = asyncio.get_running_loop()
        station = self._stations.get(loop)
        if station is None:
            with self._lock:
                for gone in [other for other in self._stations if other.is_closed()]:
                    del self._stations[gone]  # its sockets went with its loop
                station = self._stations[loop] = Station(self._open(), asyncio.Semaphore(self._concurrency))
        return station

    async def close(self) -> None:
        """End all clients; those of other loops on theirs. A later use opens new ones."""
        with self._lock:
            stations, self._stations = self._stations, {}
        here = asyncio.get_running_loop()
        for loop, station in stations.items():
            if loop is here:
                await self._close(station.client)
            elif not loop.is_closed():
                loop.call_soon_threadsafe(_begin, self._close, station.client)


_closing: set["asyncio.Future[None]"] = set()  # asyncio keeps only weak references to tasks


def _begin(close: Callable[[C], Awaitable[None]], client: C) -> None:
    task = asyncio.ensure_future(close(client))
    _closing.add(task)
    task.add_done_callback(_closing.discard)
