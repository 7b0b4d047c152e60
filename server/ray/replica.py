"""One replica: the server's application on a socket of its node, with a runtime under it, in an actor of Ray.

    ingress ── HTTP ─▶ uvicorn ─▶ Application ─▶ Runtime ─▶ gateway and engine, children of the actor

Ray starts, places, watches and ends the actor. Answers do not pass through Ray, which spends about a millisecond on
each item of a stream: the ingress reads them from the socket, where all that a step of the engine has for a stream is
one write. The address and a token, without which the socket answers nothing, travel as the replica's metadata.
"""

import asyncio
import hmac
import logging
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from ...interpreter.backends.runtime import Runtime
from ...lang.status import RuntimeState, RuntimeStatus
from ..access import Access
from ..activity import keep, read_status
from ..app import ENDPOINTS
from ..command import LAST_WORDS, LOG_FORMAT, LOG_TIMES, UvicornServer, bind, http_config
from ..diagnosis.head import IgnoredLines
from ..errors import HttpError
from ..front import Front
from ..http import Application, send_error
from ..limits import HttpLimits
from ..program_store import open_program
from ..workers import address_of

log = logging.getLogger("umbel.server")
TOKEN_HEADER = "x-umbel-replica"
MOST_BROKEN = 6  # health checks in a row that find no gateway, which the replica itself starts again


class ReplicaStart(msgspec.Struct, frozen=True):
    """Carries what a replica is started with.

    Attributes:
        options: of its runtime.
        secret: of the salts and signatures, the same in all replicas.
        loopback: only programs on the machine of the ingress reach the deployment.
        programs: the option as it was given → the bytes of the file.
        replicas: the most there may be.
    """

    options: dict[str, Any]  # Any: checked by the runtime
    secret: bytes
    keys: dict[str, str]
    admin_key: str | None
    hosts: tuple[str, ...]
    loopback: bool
    names: tuple[str, ...]
    programs: dict[str, bytes]
    ignored: tuple[str, ...]
    limits: HttpLimits
    replicas: int


class Replica:
    """Serves until Ray ends it.

    Args:
        start: a `ReplicaStart` as JSON.
        host: the address of the socket; None takes that of the node.
    """

    async def __init__(self, start: bytes, host: str | None = None) -> None:  # type: ignore[misc]  # Ray awaits it
        logging.basicConfig(stream=sys.__stderr__, format=LOG_FORMAT, datefmt=LOG_TIMES)
        log.setLevel(logging.INFO)
        self._start = msgspec.json.decode(start, type=ReplicaStart)
        self._runtime = Runtime(**self._start.options)
        self._front = self._open_front()
        self._token = secrets.token_urlsafe(32)
        self._rate = PrefillRate()
        self._broken = 0
        self._listening = bind(host or node_address(), 0)
        self._uvicorn = UvicornServer(http_config(_Guarded(self._front, self._token)))
        self._tasks: list[asyncio.Task[None]] = []
        try:
            await self._front.start()
        except BaseException:
            await self._runtime.close()
            raise
        self._tasks.append(asyncio.create_task(self._uvicorn.serve(sockets=[self._listening])))
        self._tasks.append(asyncio.create_task(keep(self._runtime, self._front.activity)))
        log.info("ready: %s on %s", self._front.models[0].name, address_of(self._listening))

    def _open_front(self) -> Front:
        start = self._start
        access = Access(start.keys, start.admin_key, start.hosts, start.secret, start.loopback)
        with tempfile.TemporaryDirectory() as folder:
            programs = []
            for given, data in start.programs.items():
                name, colon, parameter = given.partition(":")
                Path(folder, name).write_bytes(data)
                programs.append(open_program(f"{Path(folder, name)}{colon}{parameter}", Front.now()))
        ignored = IgnoredLines(start.ignored)
        return Front(
            self._runtime,
            access,
            start.limits,
            start.names,
            programs,
            start.replicas,
            ignored=ignored,
            alias=self._runtime.options.model,
        )

    # ------------------------------------------------------------------ questions of Ray

    def record_replica_metadata(self) -> dict[str, str]:
        """Tells the ingress where this replica is."""
        return {"name": replica_name(), "url": address_of(self._listening), "token": self._token}

    async def record_routing_stats(self) -> dict[str, float]:
        """Tells the routers how loaded this replica is, what it has cached, and how fast it computes prompts."""
        status = await read_status(self._runtime)
        if status is None:
            return {}
        self._rate.read(status)
        pool = status.pool
        return {
            "running": status.running,
            "waiting": status.waiting,
            "cached": pool.cached,
            "pool": pool.total,
            "prompt_tokens": status.counters.get("prompt_tokens", 0.0),
            "prefill_rate": self._rate.tokens_per_second,
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tells the autoscaler how many calls run or wait here."""
        return {"calls": float(self._front.in_flight)}

    async def check_health(self) -> None:
        """Raises RuntimeError where Ray shall replace this replica: its runtime cannot be started again."""
        health = self._front.health()
        self._broken = self._broken + 1 if health.state is RuntimeState.BROKEN else 0
        if health.state is RuntimeState.FAILED or self._broken > MOST_BROKEN:
            raise RuntimeError(f"the runtime is {health.state.value}: {health.cause}")

    async def __del__(self) -> None:
        """Ends the server, which Ray has taken from the routers: what runs has the seconds of `drain`, what comes late
        is refused and goes elsewhere."""
        if not getattr(self, "_tasks", None):
            return  # the constructor has failed
        serving, keeping = self._tasks
        self._front.draining = True
        self._uvicorn.should_exit = True
        await asyncio.wait({serving}, timeout=self._start.limits.drain)
        for each in self._uvicorn.server_state.tasks:
            each.cancel()
        await asyncio.wait({serving}, timeout=LAST_WORDS)
        for task in (serving, keeping):
            task.cancel()
        await asyncio.gather(serving, keeping, return_exceptions=True)
        await self._runtime.close()


class _Guarded(Application):
    """The application, for the ingress alone."""

    def __init__(self, front: Front, token: str) -> None:
        super().__init__(front, ENDPOINTS)
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(TOKEN_HEADER.encode(), b"")
        if scope["type"] == "http" and not hmac.compare_digest(given, self._token):
            refused = HttpError(403, "ask the address of the deployment", "forbidden")
            await send_error(send, refused, "openai", "")
            return
        await super().__call__(scope, receive, send)


class PrefillRate:
    """Estimates how many tokens of prompts a replica computes in a second, from steps that computed mostly prompts."""

    NEWEST = 0.3  # weight of the newest reading

    def __init__(self) -> None:
        self.tokens_per_second = 0.0  # not known yet
        self._before: dict[str, float] = {}

    def read(self, status: RuntimeStatus) -> None:
        """Takes a reading of the counters."""
        before, self._before = self._before, dict(status.counters)

        def new(name: str) -> float:
            return self._before.get(name, 0.0) - before.get(name, 0.0)

        computed, rows, seconds = new("computed_prompt_tokens"), new("forward_rows"), new("step_seconds")
        if not before or seconds <= 0 or computed < max(64.0, rows / 2):
            return
        rate = computed / seconds
        known = self.tokens_per_second
        self.tokens_per_second = rate if not known else known + self.NEWEST * (rate - known)


def replica_name() -> str:
    """Returns the name that Ray has given to this replica."""
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def node_address() -> str:
    """Returns the address under which other nodes of the cluster reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())
