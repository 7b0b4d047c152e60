"""The way of every call to a provider: a place among those that run at once, tries, a deadline, and errors of ours."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from ....lang import checks
from ....lang.errors import DeadlineError, UmbelError
from .clients import MOST_AT_ONCE, Clients
from .failures import Provider
from .retries import Retries, Transient
from .surroundings import Patience, Surroundings

C = TypeVar("C")
T = TypeVar("T")

# Libraries whose exceptions are about the connection or the answer. Any other exception is a mistake of ours.
_TALKERS = (
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


class Line(Generic[C]):
    """Calls to one provider.

    Args:
        provider: for messages.
        open, close: a client of its SDK for the running loop. The SDK's own retries are off.
        concurrency: calls at once on one loop.
        retries, patience, surroundings: how often, how long, and by whose clock.

    Raises:
        ParameterError: a concurrency that is no number from 1 to 4096.
    """

    def __init__(
        self,
        provider: Provider,
        open: Callable[[], C],
        close: Callable[[C], Awaitable[None]],
        *,
        concurrency: int,
        retries: Retries,
        patience: Patience,
        surroundings: Surroundings,
    ) -> None:
        concurrency = checks.integer("max_concurrency", concurrency, 1, MOST_AT_ONCE)
        self.provider = provider
        self.counts: Counter[str] = Counter()  # retries, by reason
        self._clients = Clients(open, close, concurrency)
        self._retries, self._patience, self._surroundings = retries, patience, surroundings

    def deadline(self, seconds: float | None) -> float:
        """When a call that begins now must have ended, on the clock of the surroundings.

        Args:
            seconds: that its request has left; None for no limit but the provider's.
        """
        whole = self._patience.whole
        return self._surroundings.clock() + (whole if seconds is None else min(whole, seconds))

    @asynccontextmanager
    async def place(self, deadline: float) -> AsyncIterator[C]:
        """The loop's client, and a place among the calls at once for as long as the block runs."""
        station = self._clients.here()
        await self._within(station.places.acquire(), deadline)
        try:
            yield station.client
        finally:
            station.places.release()

    async def tried(self, attempt: Callable[[], Coroutine[Any, Any, T]], deadline: float) -> T:
        """The result of an attempt that succeeded, of those that the retries allow.

        Raises:
            UmbelError: as in `failures`, and DeadlineError.
        """
        return await self._retries.run(
            lambda: self._within(self._said_our_way(attempt()), deadline), self._surroundings, deadline, self.counts
        )

    async def once(self, work: Coroutine[Any, Any, T], deadline: float) -> T:
        """The result of something inside an answer that has begun: nothing is tried again.

        Raises:
            UmbelError: as in `failures`, and DeadlineError.
        """
        try:
            return await self._within(self._said_our_way(work), deadline)
        except Transient as transient:
            problem = transient.error
        raise problem

    async def close(self) -> None:
        await self._clients.close()

    # -------------------------------------------------------------------------------- how

    async def _within(self, work: Coroutine[Any, Any, T], deadline: float) -> T:
        left = deadline - self._surroundings.clock()
        if left > 0:
            try:
                async with asyncio.timeout(left) as scope:
                    return await work
            except TimeoutError:
                if not scope.expired():  # an error of ours, of which some are TimeoutErrors too
                    raise
        work.close()
        raise DeadlineError(f"{self.provider.name}: the call to {self.provider.host} did not end in its time")

    async def _said_our_way(self, work: Coroutine[Any, Any, T]) -> T:
        """Exceptions of the libraries become ours. Raised outside of the handler: theirs hold requests with keys."""
        try:
            return await work
        except (UmbelError, Transient):
            raise
        except Exception as error:
            if (
                not isinstance(error, ValueError | OSError | RecursionError)
                and type(error).__module__.split(".")[0] not in _TALKERS
            ):
                raise
            problem = self.provider.failure(error, answered=_answered(error))
        raise problem


def _answered(error: Exception) -> bool:
    from .transport import answered  # late: something was sent, so it is imported

    return answered(getattr(error, "request", None))
