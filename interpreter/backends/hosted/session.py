"""Runs calls to one provider: limits concurrency, retries, keeps a deadline, and converts errors.

A client's connections belong to the loop on which they were opened. The interpreter has one loop; tests and blocking
helpers bring others. So a session opens one client of the provider's SDK for each event loop.

An attempt says by `Transient` that it failed before anything of an answer had come; then it is tried again. Waits are
drawn from the whole interval up to a bound that doubles ("full jitter"), so that clients that failed together do not
retry together; a server's Retry-After is honoured, within a bound.

Clock, randomness, network and environment variables come in by `Environment`.
"""

import asyncio
import contextlib
import hashlib
import os
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ....lang import checks
from ....lang.errors import DeadlineError, ParameterError, UmbelError
from ....lang.protocol import Origin
from .errors import Provider, Transient
from .transport import answered

if TYPE_CHECKING:
    import httpx2


class Client(Protocol):
    """A client of a provider's SDK, with the connections of one event loop."""

    async def close(self) -> object:
        """End its connections."""


C = TypeVar("C", bound=Client)
C_co = TypeVar("C_co", bound=Client, covariant=True)  # a session gives clients, and takes none
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Environment:
    """Clock, randomness, network and environment variables; tests give their own.

    Attributes:
        clock: seconds that never go back.
        sleep: waits a number of seconds.
        chance: returns a random number in [0, 1).
        wire: carries requests instead of the network (environment variables for proxies do not apply then).
        variables: where keys and addresses are looked for; None: those of this process, as they are now.

    Raises:
        ParameterError: the variables are no mapping.
    """

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    chance: Callable[[], float] = random.random
    wire: "httpx2.AsyncBaseTransport | None" = None
    variables: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        checks.instance("variables", self.variables, Mapping | None)

    def variable(self, name: str) -> str:
        """Returns the value of an environment variable; "" where it is not set."""
        return (os.environ if self.variables is None else self.variables).get(name, "")


# Fields of Timeouts, and what they are called where users give them.
_NAMES = {
    "whole": "timeout",
    "first_byte": "first_byte_timeout",
    "connect": "connect_timeout",
    "idle": "idle_timeout",
}


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Bounds on how long a call takes, in seconds.

    Attributes:
        whole: of the call: its tries, the waits between them, and the answer.
        first_byte: until an answer begins; None for as long as `whole`. Without streaming an answer begins when it is
            complete.
        connect: until a connection stands.
        idle: of silence inside an answer; never more than `first_byte`.

    Raises:
        ParameterError: one of them is no number above 0 and up to 10**9, or `first_byte` is more than `whole`.
    """

    whole: float = 600.0
    first_byte: float | None = None
    connect: float = 10.0
    idle: float = 120.0

    @classmethod
    def of(cls, options: Mapping[str, float | None]) -> "Timeouts":
        """Reads the timeouts among a backend's options."""
        return cls(**{field: options[name] for field, name in _NAMES.items() if name in options})  # type: ignore[arg-type]  # checked below

    def __post_init__(self) -> None:
        for field, name in _NAMES.items():
            if (value := getattr(self, field)) is not None or field != "first_byte":
                object.__setattr__(self, field, checks.seconds(name, value))
        if self.silent > self.whole:
            raise ParameterError(
                f"first_byte_timeout={self.silent} is more than timeout={self.whole}, which ends the call before; "
                "raise timeout, or leave first_byte_timeout out"
            )

    @property
    def silent(self) -> float:
        """Limit until the first byte, in seconds."""
        return self.whole if self.first_byte is None else self.first_byte


FIRST_WAIT = 0.5  # seconds at most before the second try; doubled for each further one
LONGEST_WAIT = 8.0  # seconds at most between tries, unless the server asks for more
LONGEST_RETRY_AFTER = 60.0  # seconds that a server may make us wait
MOST_RETRIES = 20


@dataclass(frozen=True, slots=True)
class Retries:
    """Bounds on retries, and the waits before them.

    Args:
        most: tries after the first one.

    Raises:
        ParameterError: a number that is none of 0 to 20.
    """

    most: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "most", checks.integer("max_retries", self.most, 0, MOST_RETRIES))

    def wait(self, failed: int, retry_after: float | None, chance: float) -> float:
        """Returns the seconds until the next try, after `failed` of them. `chance`: a random number in [0, 1)."""
        bound: float = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** (failed - 1))
        if retry_after is None:
            return chance * bound
        return min(LONGEST_RETRY_AFTER, retry_after) + chance * FIRST_WAIT

    async def run(
        self,
        attempt: Callable[[], Awaitable[T]],
        environment: Environment,
        deadline: float | None,
        counts: "Counter[str]",
    ) -> T:
        """Runs attempts and returns the result of the first that succeeds.

        Args:
            attempt: raises Transient for what may be tried again; whatever else it raises is final.
            deadline: on the environment's clock; no wait goes past it.
            counts: gets one for every retry, under its reason.

        Raises:
            UmbelError: that of the last attempt, with the number of tries.
            DeadlineError: the next try would come too late.
        """
        failed = 0
        while True:
            try:
                return await attempt()
            except Transient as transient:
                failure = transient
            failed += 1
            if failed > self.most:
                raise _after(failure.error, failed)
            wait = self.wait(failed, failure.retry_after, environment.chance())
            if deadline is not None and environment.clock() + wait >= deadline:
                raise DeadlineError(f"no time is left for another try in {wait:.1f} s; the last one ended: {failure}")
            counts[failure.reason] += 1
            await environment.sleep(wait)


def _after(error: UmbelError, tries: int) -> UmbelError:
    """Makes a new error with the number of tries: it holds no reference to the attempt."""
    return error if tries == 1 else type(error)(f"{error} (tried {tries} times)")


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


def routing_key(origin: Origin) -> str:
    """Returns a key that the calls of one fork group have in common, and no others: of 32 hexadecimal digits."""
    named = f"{len(origin.program_id)} {origin.program_id} {origin.fork_group}"
    return hashlib.sha256(named.encode(errors="surrogatepass")).hexdigest()[:32]


class Session(Generic[C_co]):
    """Runs calls to one provider.

    Args:
        provider: for messages.
        open: makes a client of its SDK for the running loop. The SDK's own retries are off.
        concurrency: calls at once on one loop.
        retries, timeouts, environment: how often, how long, and by whose clock.

    Attributes:
        routing_key_header: carries the routing key of a call, for a gateway between; None: nothing does.

    Raises:
        ParameterError: a concurrency that is no number from 1 to 4096.
    """

    def __init__(
        self,
        provider: Provider,
        open: Callable[[], C_co],
        *,
        concurrency: int,
        retries: Retries,
        timeouts: Timeouts,
        environment: Environment,
    ) -> None:
        concurrency = checks.integer("max_concurrency", concurrency, 1, MOST_AT_ONCE)
        self.provider = provider
        self.counts: Counter[str] = Counter()  # retries, by reason
        self._clients = Clients(open, concurrency)
        self._retries, self._timeouts, self._environment = retries, timeouts, environment
        self.routing_key_header: str | None = None

    def deadline(self, seconds: float | None) -> float:
        """Returns the deadline of a call that begins now, on the clock of the environment.

        Args:
            seconds: that its request has left; None for no limit but the session's own.
        """
        whole = self._timeouts.whole
        return self._environment.clock() + (whole if seconds is None else min(whole, seconds))

    @asynccontextmanager
    async def slot(self, deadline: float, origin: Origin | None = None) -> AsyncIterator[C_co]:
        """Yields the loop's client, and holds one of the concurrency slots while the block runs.

        Args:
            origin: of the call, whose routing key its requests carry where that is asked for.
        """
        mine = self._clients.of_this_loop()
        await self._within(mine.slots.acquire(), deadline)
        try:
            client: Any = mine.client  # Any: of an SDK
            if self.routing_key_header is not None and origin is not None and origin.fork_group:
                client = client.with_options(default_headers={self.routing_key_header: routing_key(origin)})
            yield client
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
            problem = self.provider.failure(error, answered=answered(getattr(error, "request", None)))
        raise problem


@dataclass(frozen=True, slots=True)
class LoopClient(Generic[C]):
    """One event loop's client, and the semaphore that its calls hold until their answers end."""

    client: C
    slots: asyncio.Semaphore


class Clients(Generic[C]):
    """Clients by event loop. They are closed on their loops by `close`, and when their owner is dropped without it.

    Left to the garbage collector, sockets would be closed first; a client that then ends its connections (Google's
    does when it is collected) takes the readers of whatever has their descriptors by then: other calls never end.

    Args:
        open: makes a client for the running loop.
        concurrency: calls at once on one loop.
    """

    def __init__(self, open: Callable[[], C], concurrency: int) -> None:
        self._open, self._concurrency = open, concurrency
        self._lock = threading.Lock()  # loops of several threads may ask at once
        self._by_loop: dict[asyncio.AbstractEventLoop, LoopClient[C]] = {}
        weakref.finalize(self, _close_soon, self._by_loop).atexit = False  # loops end with the process

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
            here = self._by_loop.pop(asyncio.get_running_loop(), None)
            _close_soon(self._by_loop)
        if here is not None:
            await here.client.close()


_closing: set["asyncio.Future[object]"] = set()  # asyncio keeps only weak references to tasks


def _close_soon(by_loop: dict[asyncio.AbstractEventLoop, LoopClient[C]]) -> None:
    """Takes all clients out of `by_loop`, and closes each of them on its loop, if that still runs."""
    while by_loop:
        loop, client = by_loop.popitem()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the sockets went with it
            loop.call_soon_threadsafe(_start_closing, client.client)


def _start_closing(client: Client) -> None:
    task = asyncio.ensure_future(client.close())
    _closing.add(task)
    task.add_done_callback(_closing.discard)
