"""Serves the live page: one HTML file that needs no build step and no network, and the data that it draws.

    GET /ui          the page; it holds no data, so it needs no key
    GET /ui/state    health and gauges, and the readings of the last minutes, at once
    GET /ui/tree     the radix tree, after the step that runs

The routes of data show all keys together, so they are the administrator's. They are two, since a long step delays the
tree and nothing else. The page asks once a second while it is visible; the server keeps nothing for it.
"""

import asyncio
import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from ...lang import __version__
from ...lang.errors import CapabilityError
from ...lang.status import (
    MOST_NODES,
    MOST_SHOWN,
    EngineState,
    Observable,
    ReplicaStatus,
    TreeSurvey,
)
from ..activity import Reading, read_status
from ..bodies import wrong
from ..errors import HttpError
from ..http import Asked, Endpoint, Reply

PAGE = Path(__file__).with_name("page.html").read_bytes()
HTML = "text/html"
_OPEN = b'data-keyed="false" data-figures="open"'
assert PAGE.count(_OPEN) == 1, "the page has one place for the keys that it needs"


def _policy(page: bytes) -> str:
    """Returns the Content-Security-Policy of a page: its own script and style, asking its own server, and nothing else.

    The browser compares hashes, so text that comes into the page by a defect is never run.
    """

    def digests(element: bytes) -> str:
        inner = re.findall(rb"<%b>(.*?)</%b>" % (element, element), page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(each).digest()).decode()}'" for each in inner)

    return (
        f"default-src 'none'; script-src {digests(b'script')}; style-src {digests(b'style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )


_HEADERS = {
    "content-security-policy": _policy(PAGE),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


class LiveReplica(msgspec.Struct, frozen=True):
    """One of several engines at one moment.

    Attributes:
        pool_used: part of its KV pool that is not free, 0 to 1.
    """

    state: EngineState
    running: int
    waiting: int
    pool_used: float

    @classmethod
    def of(cls, replica: ReplicaStatus) -> "LiveReplica":
        pool = replica.pool
        used = (pool.total - pool.free) / max(1, pool.total)
        return cls(replica.engine, replica.running, replica.waiting, round(used, 4))


class LiveState(msgspec.Struct, frozen=True):
    """The server at one moment, for the live page.

    Attributes:
        state: of the runtime: "ready", "starting", "restarting", ...; "draining" while the server ends.
        cause: why it is not ready; "" otherwise.
        models: the names of the model and of the programs that are offered as one; [] before the model is loaded.
        programs: the names of the programs.
        in_flight, most_in_flight: requests over HTTP that run or wait, and the most of them.
        refused: requests over HTTP for which there was no room.
        now: seconds on the clock of the readings.
        readings: oldest first; a second apart, over the last minutes.
        replicas: of several engines each; [] for one.
    """

    version: str
    state: str
    cause: str
    models: list[str]
    programs: list[str]
    in_flight: int
    most_in_flight: int
    refused: int
    now: float
    readings: list[Reading]
    replicas: list[LiveReplica]


async def page(asked: Asked[None]) -> Reply:
    """Returns the page, with the keys that its data needs written into it, so that it asks for nothing in vain."""
    access = asked.front.access
    if not access.administered:
        figures = b"none"
    else:
        figures = b"admin" if access.keyed or not access.caller({}).admin else b"open"
    needed = b'data-keyed="%b" data-figures="%b"' % (b"true" if access.keyed else b"false", figures)
    return Reply(PAGE.replace(_OPEN, needed), headers=_HEADERS, media=f"{HTML}; charset=utf-8")


async def state(asked: Asked[None]) -> Reply:
    """Returns the state of the server. `?after=SECONDS` leaves out older readings, by the clock of `now`."""
    front, query = asked.front, asked.query
    after = _seconds(query, "after")
    health = front.health()
    readings = [each for each in front.activity.readings if each.at > after]
    status = await read_status(front.backend)
    now = asyncio.get_running_loop().time()
    if status is not None and status.engine is EngineState.READY:
        latest = Reading.of(status, now)
        if latest.at > max([after, *(each.at for each in readings[-1:])]):
            readings.append(latest)
    found = LiveState(
        version=__version__,
        state="draining" if front.draining else health.state.value,
        cause=health.cause,
        models=[model.name for model in front.models] if front.started else [],
        programs=[program.name for program in front.programs],
        in_flight=front.counts.total("in_flight"),
        most_in_flight=front.limits.most_in_flight * front.workers,
        refused=front.counts.total("refused"),
        now=now,
        readings=readings,
        replicas=[] if status is None else [LiveReplica.of(replica) for replica in status.replicas],
    )
    return Reply(found, headers={"cache-control": "no-store"})


async def tree(asked: Asked[None]) -> Reply:
    """Returns the radix tree: `?most=NODES`, and `?text=CHARACTERS` of each node, which are prompts of all callers."""
    backend, query = asked.front.backend, asked.query
    most, text = _count(query, "most", 1_000, 1, MOST_NODES), _count(query, "text", 0, 0, MOST_SHOWN)
    if not isinstance(backend, Observable):
        raise CapabilityError(f"{backend.capabilities.name} shows no radix tree")
    health = backend.health()
    if not health.healthy:
        headers = {"retry-after": str(asked.front.limits.retry_after)}
        raise HttpError(503, f"the runtime is {health.state.value}; try again", "not_ready", headers=headers)
    return Reply(await backend.survey(most=most, text=text), headers={"cache-control": "no-store"})


def _seconds(query: Mapping[str, str], name: str) -> float:
    """Reads seconds of the query; 0 where there are none."""
    given = query.get(name, "0")
    if not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,20})?", given):
        raise wrong(name, "must be seconds, as in 12.5")
    return float(given)


def _count(query: Mapping[str, str], name: str, usual: int, least: int, most: int) -> int:
    """Reads a whole number of the query, within its range."""
    given = query.get(name, str(usual))
    if not re.fullmatch(r"[0-9]{1,9}", given) or not least <= int(given) <= most:
        raise wrong(name, f"must be a whole number from {least} to {most:,}")
    return int(given)


ENDPOINTS = (
    Endpoint("GET", "/ui", page, "The live page", media=(HTML,), public=True),
    Endpoint(
        "GET",
        "/ui/state",
        state,
        "Gauges and counters of the last minutes",
        answer=LiveState,
        errors=(400,),
        admin=True,
        query={"after": Annotated[float, msgspec.Meta(ge=0)]},
    ),
    Endpoint(
        "GET",
        "/ui/tree",
        tree,
        "The radix tree",
        answer=TreeSurvey,
        errors=(400, 503),
        admin=True,
        query={
            "most": Annotated[int, msgspec.Meta(ge=1, le=MOST_NODES)],
            "text": Annotated[int, msgspec.Meta(ge=0, le=MOST_SHOWN)],
        },
    ),
)
