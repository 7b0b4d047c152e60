"""Starts sessions: all at once, at random times, or a number of clients that each start the next when one has ended."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import assert_never

import numpy as np

from ...lang.errors import ParameterError
from .calls import Host, Session
from .events import Events


@dataclass(frozen=True, slots=True)
class AtOnce:
    """All sessions begin at 0."""


@dataclass(frozen=True, slots=True)
class Poisson:
    """Sessions begin at random times, so many a second on average."""

    rate: float
    seed: int = 1


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many clients; each begins a session when its last one has ended."""

    clients: int


LEAST_RATE, MOST_RATE = 1e-6, 1e9  # sessions a second
MOST_CLIENTS = 1_000_000

Arrivals = AtOnce | Poisson | ClosedLoop


def parse_arrivals(text: str, seed: int = 1) -> Arrivals:
    """Reads "all", "poisson:RATE" or "clients:NUMBER". Raises ParameterError."""
    kind, _, number = text.partition(":")
    try:
        if kind == "poisson" and LEAST_RATE <= (rate := float(number)) <= MOST_RATE:
            return Poisson(rate, seed)
        if kind == "clients" and 1 <= (clients := int(number)) <= MOST_CLIENTS:
            return ClosedLoop(clients)
    except ValueError:
        pass
    if text == "all":
        return AtOnce()
    raise ParameterError(
        f"--arrivals {text!r}; write all, poisson:60 (sessions a second, {LEAST_RATE:g} to {MOST_RATE:g}) or clients:8 "
        f"(up to {MOST_CLIENTS:,})"
    )


def start_sessions(arrivals: Arrivals, sessions: Iterable[Session], events: Events, host: Host) -> None:
    """Plans the beginning of all sessions; `events.run` then runs them. Sessions are made when they begin."""
    left = iter(sessions)

    match arrivals:
        case AtOnce():
            for session in left:
                events.at(0.0, partial(session.begin, host, _nothing))
        case Poisson(rate, seed):
            _arrive(left, np.random.default_rng(seed), 1 / rate, events, host)
        case ClosedLoop(clients):
            for _ in range(clients):
                events.at(0.0, lambda: _next_of_client(left, events, host))
        case _:
            assert_never(arrivals)


def _nothing() -> None:
    """A session that has ended starts no other."""


def _arrive(left: Iterator[Session], draw: np.random.Generator, gap: float, events: Events, host: Host) -> None:
    """Begins the next session after a random time, and plans the one after it."""

    def arrive() -> None:
        session = next(left, None)
        if session is not None:
            session.begin(host, _nothing)
            events.at(events.now + draw.exponential(gap), arrive)

    events.at(draw.exponential(gap), arrive)


def _next_of_client(left: Iterator[Session], events: Events, host: Host) -> None:
    session = next(left, None)
    if session is not None:
        # As an event of its own: a session that asks nothing ends at once, and thousands of these would be nested.
        session.begin(host, lambda: events.at(events.now, lambda: _next_of_client(left, events, host)))
