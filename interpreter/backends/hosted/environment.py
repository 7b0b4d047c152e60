"""External inputs of hosted backends, as arguments: clock, randomness, network, environment variables, timeouts."""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....lang import checks
from ....lang.errors import ParameterError

if TYPE_CHECKING:
    import httpx2


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
