"""Retries failed attempts, with randomised waits within a deadline.

An attempt says by `Transient` that it failed before anything of an answer had come. Waits are drawn from the whole
interval up to a bound that doubles ("full jitter"), so that clients that failed together do not retry together; a
server's Retry-After is honoured, within a bound.
"""

import email.utils
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ....lang import checks
from ....lang.errors import DeadlineError, UmbelError
from .environment import Environment

T = TypeVar("T")

FIRST_WAIT = 0.5  # seconds at most before the second try; doubled for each further one
LONGEST_WAIT = 8.0  # seconds at most between tries, unless the server asks for more
LONGEST_RETRY_AFTER = 60.0  # seconds that a server may make us wait
MOST_RETRIES = 20


class Transient(Exception):
    """An attempt failed before the first byte of its answer, and may succeed later.

    Args:
        error: what to raise when it is not tried again.
        reason: for counters: "429", "503", "connect", "timeout", ...
        retry_after: seconds to wait, as the server says; None when it does not.
    """

    def __init__(self, error: UmbelError, reason: str, retry_after: float | None = None) -> None:
        super().__init__(str(error))
        self.error, self.reason, self.retry_after = error, reason, retry_after


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
            deadline: on the environment' clock; no wait goes past it.
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


def retry_after(headers: Mapping[str, str], now: Callable[[], float] = time.time) -> float | None:
    """Returns the seconds a response asks to wait: `retry-after-ms`, or Retry-After as a number or an HTTP date.

    A date is compared with the response's own Date, so that clocks that differ do no harm; without one with ours.
    """
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    given = headers.get("retry-after")
    seconds = _number(given)
    if seconds is not None or given is None:
        return seconds
    moment = _date(given)
    if moment is None:
        return None
    sent = _date(headers.get("date"))
    return max(0.0, moment - (now() if sent is None else sent))


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0.0 <= value < float("inf") else None


def _date(text: str | None) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(text or "").timestamp()
    except (ValueError, OverflowError):
        return None
