"""Runs calls to one provider: limits concurrency, retries, keeps a deadline, and converts errors.

A client's connections belong to the loop on which they were opened. The interpreter has one loop; tests and blocking
helpers bring others. So a session opens one client of the provider's SDK for each event loop.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ....lang import checks
from ....lang.errors import DeadlineError, UmbelError
from .environment import Environment, Timeouts
from .errors import Provider
from .retries import Retries, Transient

C = TypeVar("C")
C_co = TypeVar("C_co", covariant=True)  # a session gives clients, and takes none
T = TypeVar("T")

MOST_AT_ONCE = 4096

# Libraries whose exceptions are about the connection or the answer. Any other exception is a mistake of ours.
_LIBRARIES = (
    "openai",
    "anthropic",
    "litellm",
    "google",
    "aiohttp",
    "httpx2",
    "httpcore2",
    "httpx",
    "httpcore",
    "anyio",
    "ssl",
    "h11",
    "h2",
)


class Session(Generic[C_co]):
    """Runs calls to one provider.

    Args:
        provider: for messages.
        open, close: a client of its SDK for the running loop. The SDK's own retries are off.
        concurrency: calls at once on one loop.
        retries, timeouts, environment: how often, how long, and by whose clock.

    Raises:
        ParameterError: a concurrency that is no number from 1 to 4096.
    """

    def __init__(
        self,
        provider: Provider,
        open: Callable[[], C_co],
        close: Callable[[C_co], Awaitable[None]],
        *,
        concurrency: int,
        retries: Retries,
        timeouts: Timeouts,
        environment: Environment,
    ) -> None:
        concurrency = checks.integer("max_concurrency", concurrency, 1, MOST_AT_ONCE)
        self.provider = provider
        self.counts: Counter[str] = Counter()  # retries, by reason
        self._clients = Clients(open, close, concurrency)
        self._retries, self._timeouts, self._environment = retries, timeouts, environment

    def deadline(self, seconds: float | None) -> float:
        """Returns the deadline of a call that begins now, on the clock of the environment.

        Args:
            seconds: that its request has left; None for no limit but the session's own.
        """
        whole = self._timeouts.whole
        return self._environment.clock() + (whole if seconds is None else min(whole, seconds))

    @asynccontextmanager
    async def slot(self, deadline: float) -> AsyncIterator[C_co]:
        """Yields the loop's client, and holds one of the concurrency slots while the block runs."""
        mine = self._clients.of_this_loop()
        await self._within(mine.slots.acquire(), deadline)
        try:
            yield mine.client
        finally:
            mine.slots.release()

    async def retried(self, attempt: Callable[[], Coroutine[Any, Any, T]], deadline: float) -> T:
        """Awaits attempts until one succeeds, as often as the retries allow.

        Raises:
            UmbelError: as in `errors`, and DeadlineError.
        """
        return await self._retries.run(
            lambda: self._within(self._translated(attempt()), deadline), self._environment, deadline, self.counts
        )

    async def once(self, work: Coroutine[Any, Any, T], deadline: float) -> T:
        """Awaits a part of an answer that has begun, without retries.

        Raises:
            UmbelError: as in `errors`, and DeadlineError.
        """
        try:
            return await self._within(self._translated(work), deadline)
        except Transient as transient:
            problem = transient.error
        raise problem

    async def close(self) -> None:
        await self._clients.close()

    # -------------------------------------------------------------------------------- how

    async def _within(self, work: Coroutine[Any, Any, T], deadline: float) -> T:
        left = deadline - self._environment.clock()
        if left > 0:
            try:
                async with asyncio.timeout(left) as scope:
                    return await work
            except TimeoutError:
                if not scope.expired():  # an error of ours, of which some are TimeoutErrors too
                    raise
        work.close()
        raise DeadlineError(f"{self.provider.name}: the call to {self.provider.host} did not end in its time")

    async def _translated(self, work: Coroutine[Any, Any, T]) -> T:
        """Turns exceptions of the libraries into ours. Raised outside of the handler: theirs hold keys."""
        try:
            return await work
        except (UmbelError, Transient):
            raise
        except Exception as error:
            if (
                not isinstance(error, ValueError | OSError | RecursionError)
                and type(error).__module__.split(".")[0] not in _LIBRARIES
            ):
                raise
            problem = self.provider.failure(error, answered=_answered(error))
        raise problem


def _answered(error: Exception) -> bool:
    from .transport import answered  # late: something was sent, so it is imported

    return answered(getattr(error, "request", None))


@dataclass(frozen=True, slots=True)
class LoopClient(Generic[C]):
    """One event loop's client, and the semaphore that its calls hold until their answers end."""

    client: C
    slots: asyncio.Semaphore


class Clients(Generic[C]):
    """Clients by event loop.

    Args:
        open: makes a client for the running loop.
        close: ends one.
        concurrency: calls at once on one loop.
    """

    def __init__(self, open: Callable[[], C], close: Callable[[C], Awaitable[None]], concurrency: int) -> None:
        self._open, self._close, self._concurrency = open, close, concurrency
        self._lock = threading.Lock()  # loops of several threads may ask at once
        self._by_loop: dict[asyncio.AbstractEventLoop, LoopClient[C]] = {}

    def of_this_loop(self) -> LoopClient[C]:
        """Returns the running loop's client, opened on its first use."""
        loop = asyncio.get_running_loop()
        client = self._by_loop.get(loop)
        if client is None:
            with self._lock:
                for gone in [other for other in self._by_loop if other.is_closed()]:
                    del self._by_loop[gone]  # its sockets went with its loop
                client = self._by_loop[loop] = LoopClient(self._open(), asyncio.Semaphore(self._concurrency))
        return client

    async def close(self) -> None:
        """Closes all clients, those of other loops on theirs. A later use opens new ones."""
        with self._lock:
            clients, self._by_loop = self._by_loop, {}
        here = asyncio.get_running_loop()
        for loop, client in clients.items():
            if loop is here:
                await self._close(client.client)
            elif not loop.is_closed():
                loop.call_soon_threadsafe(_start_closing, self._close, client.client)


_closing: set["asyncio.Future[None]"] = set()  # asyncio keeps only weak references to tasks


def _start_closing(close: Callable[[C], Awaitable[None]], client: C) -> None:
    task = asyncio.ensure_future(close(client))
    _closing.add(task)
    task.add_done_callback(_closing.discard)
