"""Pages in a store that many engines share: any server of the Redis protocol.

    umbel:FORMAT:SCHEME:NAME → header and payload, as on disk

What to keep, and for how long, is left to the server (maxmemory, its policy, a time to live). Each exchange is one
round trip with deadlines. A server that is gone, slow, full or none at all costs misses: after a few failures it is
left alone for a while, then asked once.
"""

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ...lang.errors import MissingExtraError, ParameterError
from ..core.instruments import Clock, SystemClock
from .names import FORMAT, NAME_BYTES
from .page_format import HEADER_BYTES, BadPage, PageFormat
from .tier import Breaker, Faults, LoadCounts, Payload, TierFacts

CONNECT_SECONDS = 1.0
SOCKET_SECONDS = 2.0  # without a byte
MOST_SECONDS = 10.0  # of one exchange; a longer one counts as a failure
_OPEN_AFTER = 3  # failures in a row
_PAUSE = 5.0  # seconds
_REMEMBERED = 100_000  # names of pages that are there
_BATCH_BYTES = 8 << 20  # written at once

_log = logging.getLogger("umbel.engine")
Result = TypeVar("Result")


class SharedStore:
    """Implements `Tier`. Used from one thread, after `open`.

    Args:
        url: `redis://`, `rediss://` or `unix://`, with a password if the server wants one; it is never logged.
        scheme: `PageScheme.digest` of the engine.

    Raises:
        MissingExtraError: redis or xxhash is not installed.
        ParameterError: the URL cannot be read.
    """

    name = "shared"

    def __init__(self, url: str, scheme: bytes, *, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._format = PageFormat(scheme)
        self._prefix = f"umbel:{FORMAT}:{scheme.hex()[:32]}:"
        self._client, self._errors = _client(url)
        self._where = _address(url)
        self._faults = Faults(self.name, self._clock)
        self._breaker = Breaker(self._clock, failures=_OPEN_AFTER, pause=_PAUSE)
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # pages that the store had when it was last asked
        self._loads = LoadCounts()
        self._stored = self._dropped = 0

    def open(self) -> None:
        """Asks whether the server is there, so that the log says at start when it is not."""
        if self._exchange(lambda: self._client.ping()) is not None:
            _log.info("shared cache: pages are shared at %s", self._where)

    def longest(self, names: Sequence[bytes]) -> int:
        if not names:
            return 0
        return self._first_run(self._exist(names))

    def load(self, names: Sequence[bytes]) -> list[Payload | None]:
        keys = [self._key(name) for name in names]
        values = self._answers(len(names), lambda: self._client.mget(keys)) if names else []
        if values is None:
            self._loads.misses += len(names)
            return [None] * len(names)
        return self._loads.take(map(self._checked, names, values), len(names))

    def store(self, names: Sequence[bytes], payloads: Sequence[Payload]) -> None:
        first = len(names) - len(payloads)
        assert first >= 0, "every payload has a name"
        asked = [name for name in names[max(0, first - 1) :] if name not in self._seen]
        there = dict(zip(asked, self._exist(asked), strict=True)) if asked else {}
        if first and not (names[first - 1] in self._seen or there[names[first - 1]]):
            self._dropped += len(payloads)
            return
        new = [(name, payload) for name, payload in zip(names[first:], payloads, strict=True) if name not in self._seen]
        while new:
            batch: list[tuple[bytes, Payload]] = []
            size = 0
            while new and (not batch or size + new[0][1].nbytes <= _BATCH_BYTES):
                batch.append(new.pop(0))
                size += batch[-1][1].nbytes
            if not self._write(batch):
                self._dropped += len(new)
                return

    def forget(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._seen.pop(name, None)
        if names:
            self._exchange(lambda: self._client.delete(*[self._key(name) for name in names]))

    def sample(self, size: int) -> float | None:
        key = f"{self._prefix}sample"
        value = bytes(size + HEADER_BYTES)
        if self._exchange(lambda: self._client.set(key, value, ex=60)) is None:
            return None
        before = self._clock.now()
        read = self._exchange(lambda: self._client.get(key))
        return self._clock.now() - before if read == value else None

    def facts(self) -> TierFacts:
        return TierFacts(
            self.name,
            hits=self._loads.hits,
            misses=self._loads.misses,
            stored=self._stored,
            dropped=self._dropped,
            faults=dict(self._faults.counts),
        )

    def close(self) -> None:
        try:
            self._client.close()
        except (self._errors.RedisError, OSError):
            _log.debug("shared cache: the connection was broken when it was closed")

    # ------------------------------------------------------------------ exchanges

    def _exist(self, names: Sequence[bytes]) -> list[bool]:
        """Returns which pages the store has, in one round trip; none of them where it does not answer."""

        def ask() -> Any:
            pipeline = self._client.pipeline(transaction=False)
            for name in names:
                pipeline.exists(self._key(name))
            return pipeline.execute()

        answers = self._answers(len(names), ask)
        if answers is None:
            return [False] * len(names)
        there = [answer == 1 for answer in answers]
        for name, one in zip(names, there, strict=True):
            if one:
                self._remember(name)
            else:
                self._seen.pop(name, None)
        return there

    def _write(self, batch: Sequence[tuple[bytes, Payload]]) -> bool:
        """Writes pages in one round trip → whether all are there."""

        def write() -> Any:
            pipeline = self._client.pipeline(transaction=False)
            for name, payload in batch:
                pipeline.set(self._key(name), b"".join((self._format.header(name, payload), payload.data)))
            return pipeline.execute(raise_on_error=False)

        answers = self._answers(len(batch), write)
        if answers is None:
            self._dropped += len(batch)
            return False
        well = True
        for (name, _), answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                self._refused(answer)
                self._dropped += 1
                well = False
            elif well:
                self._stored += 1
                self._remember(name)
        return well

    def _answers(self, count: int, call: Callable[[], Any]) -> list[Any] | None:
        """Runs one round trip that has `count` answers; None: it failed, or the server is left alone."""

        def checked() -> list[Any]:
            answers = call()
            if not isinstance(answers, list) or len(answers) != count:
                raise ValueError("not the answers to the question")
            return answers

        return self._exchange(checked)

    def _exchange(self, call: Callable[[], Result]) -> Result | None:
        """Runs one round trip; None: it failed, or the server is left alone."""
        if not self._breaker.allows():
            return None
        before = self._clock.now()
        try:
            answer = call()
        except self._errors.ResponseError as error:
            self._refused(error)
            self._breaker.failed()
            return None
        except self._errors.TimeoutError:
            self._fail("slow", f"{self._where} did not answer in {SOCKET_SECONDS:g} s")
            return None
        except self._errors.AuthenticationError:
            self._fail("login", f"{self._where} refuses the login; check user and password of shared_cache")
            return None
        except (self._errors.ConnectionError, OSError):
            self._fail("unreachable", f"{self._where} cannot be reached")
            return None
        except (self._errors.RedisError, ValueError, AssertionError, MemoryError) as error:
            self._fail("foreign", f"{self._where} does not speak the Redis protocol ({type(error).__name__})")
            return None
        if self._clock.now() - before > MOST_SECONDS:
            self._fail("slow", f"{self._where} took more than {MOST_SECONDS:g} s")
        else:
            self._breaker.succeeded()
        return answer

    def _fail(self, kind: str, what: str) -> None:
        self._faults.add(kind, what)
        self._breaker.failed()
        self._client.connection_pool.disconnect()  # what comes late belongs to no other question

    def _refused(self, error: Exception) -> None:
        """Counts an answer of the server that says no."""
        code = str(error).partition(" ")[0]
        if code == "OOM" or isinstance(error, self._errors.OutOfMemoryError):
            self._faults.add("full", f"{self._where} has no memory left; set its maxmemory-policy to allkeys-lru")
        elif isinstance(error, self._errors.AuthenticationError) or code in ("NOAUTH", "WRONGPASS", "NOPERM"):
            self._faults.add("login", f"{self._where} refuses the login; check user and password of shared_cache")
        elif isinstance(error, self._errors.ReadOnlyError):
            self._faults.add("read-only", f"{self._where} is a replica that cannot be written to")
        else:
            self._faults.add("refused", f"{self._where} refuses a command ({type(error).__name__})")

    # ------------------------------------------------------------------ pages

    def _key(self, name: bytes) -> str:
        assert len(name) == NAME_BYTES, "SHA-256"
        return self._prefix + name.hex()

    def _checked(self, name: bytes, value: object) -> Payload | None:
        """Returns the payload of a value that is the page of this name. Another one is removed."""
        if not isinstance(value, bytes):
            self._seen.pop(name, None)
            return None
        try:
            payload = self._format.payload(name, np.frombuffer(value, dtype=np.uint8))
        except BadPage as bad:
            self._faults.add(bad.kind, f"the value of {name.hex()[:16]}... at {self._where} is no page: {bad.kind}")
            if bad.kind != "newer":
                self.forget([name])
            return None
        return payload.copy()  # one that can be written to, as torch wants it

    def _remember(self, name: bytes) -> None:
        self._seen[name] = None
        self._seen.move_to_end(name)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)

    @staticmethod
    def _first_run(there: Sequence[bool]) -> int:
        return there.index(False) if False in there else len(there)


def _client(url: str) -> tuple[Any, Any]:
    """Makes the client, which connects when it is first used → it, and the module of its errors."""
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise MissingExtraError("redis", "store") from error
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ParameterError("shared_cache: write redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH")
    try:
        client = redis.Redis.from_url(
            url,
            socket_timeout=SOCKET_SECONDS,
            socket_connect_timeout=CONNECT_SECONDS,
            retry=Retry(NoBackoff(), 0),
            protocol=2,  # every server speaks it
        )
    except ValueError:
        raise ParameterError(
            f"shared_cache: the URL of {_address(url)} cannot be read; write redis://:PASSWORD@HOST:PORT/NUMBER"
        ) from None
    return client, redis.exceptions


def _address(url: str) -> str:
    """Returns what a log may say of a URL: neither user nor password nor parameters."""
    rest = url.partition("://")[2].rpartition("@")[2]  # a password may hold what ends the host elsewhere
    return rest.partition("?")[0] if url.startswith("unix:") else re.split("[/?#]", rest)[0] or "localhost"
