"""`umbel deploy`: a model on Ray Serve, with as many replicas as are asked for.

    umbel deploy MODEL --replicas 1:8 --gpus-per-replica 1

Joins the cluster of `--address` or RAY_ADDRESS, or one that runs on this machine, and leaves the application there;
without one it starts Ray on this machine and ends it with Ctrl-C. Deploying again changes a running application:
replicas are replaced one after the other.
"""

import argparse
import asyncio
import logging
import os
import re
import secrets
import signal
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ...interpreter.backends.runtime import Runtime
from ...lang.errors import BackendError, MissingExtraError, ParameterError
from ...srt.placement.policies import POLICIES
from ..access import Access
from ..command import (
    LOG_FORMAT,
    LOG_TIMES,
    OWN_DEFAULTS,
    Settings,
    add_option_groups,
    add_shared_options,
    bind,
    read_settings,
)
from ..diagnosis.head import IgnoredLines
from ..front import Front
from ..program_store import open_program
from ..workers import on_loopback
from .replica import ReplicaStart

log = logging.getLogger("umbel.server")
LOCAL = "local"  # the address that starts Ray here, whatever runs
MOST_REPLICAS = 64
_OF_ONE_SERVER = {"tcp": None, "tcp_key": None, "tcp_clients": None, "http_workers": 1, "record": None}


class DeploySettings(Settings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of `umbel deploy`: those of `umbel serve` for each replica, but for its sockets and files.

    Attributes:
        replicas: how many, as N or MIN:MAX.
        gpus_per_replica, cpus_per_replica: that Ray reserves for each, on one node.
        placement: the policy that places calls.
        calls_per_replica: that run or wait at a replica on the average, for which MIN:MAX makes replicas.
        up_delay, down_delay: seconds for which more or fewer replicas were wanted before there are.
        address: of a Ray cluster; "local" starts one here.
        app: the name of the application on it.
    """

    replicas: str = "1"
    gpus_per_replica: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    cpus_per_replica: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    placement: str = "added-delay"
    calls_per_replica: Annotated[float, msgspec.Meta(gt=0)] = 32.0
    up_delay: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    down_delay: Annotated[float, msgspec.Meta(ge=0)] = 300.0
    address: str | None = None
    app: str = "umbel"

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most replicas. Raises ParameterError."""
        least, colon, most = self.replicas.partition(":")
        try:
            found = int(least), int(most if colon else least)
        except ValueError:
            found = 0, 0
        if not 1 <= found[0] <= found[1] <= MOST_REPLICAS:
            raise ParameterError(f"--replicas {self.replicas}: write N or MIN:MAX, of 1 to {MOST_REPLICAS}")
        return found


def main(arguments: Sequence[str]) -> int:
    """Runs `umbel deploy`. Returns the exit status."""
    settings = deploy_settings(arguments, os.environ)
    start = start_of(settings)
    _use_token(os.environ)
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # else a replica's lines are missing where another's are alike
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")  # tracebacks of its parts stay in Ray's own log files
    try:
        import ray.serve  # a folder that is called ray would be taken for Ray
    except ModuleNotFoundError:
        raise MissingExtraError("ray", "ray") from None
    logging.basicConfig(stream=sys.stderr, format=LOG_FORMAT, datefmt=LOG_TIMES)
    log.setLevel(logging.INFO)
    local = _join(settings)
    try:
        _check_room(settings, local)
        _deploy(settings, start, local)
        if local:
            asyncio.run(_until_signal())
            log.info("stopping: requests in flight have %g s to end", settings.limits.drain)
            _shut_down()
    finally:
        ray.shutdown()
    return 0


# ------------------------------------------------------------------------------------------- settings


def deploy_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> DeploySettings:
    """Reads the command line; see `read_settings`. Raises ParameterError."""
    settings = read_settings(parser(), DeploySettings, arguments, environment)
    for name, default in _OF_ONE_SERVER.items():
        if getattr(settings, name) != default:
            raise ParameterError(f"{name} is for `umbel serve`: replicas have no address or file of their own")
    if settings.placement not in POLICIES:
        raise ParameterError(f"--placement {settings.placement}: write one of {', '.join(POLICIES)}")
    ranks, gpus = settings.runtime.get("tensor_parallel", 1), settings.gpus_per_replica
    if isinstance(ranks, int) and 0 < gpus < ranks:
        raise ParameterError(f"tensor_parallel={ranks} takes a GPU for each rank: write --gpus-per-replica {ranks}")
    return settings


def start_of(settings: DeploySettings) -> ReplicaStart:
    """Checks the settings here, before Ray starts anything → what each replica is started with.

    Raises:
        ParameterError: as of `umbel serve`.
    """
    options = OWN_DEFAULTS | settings.runtime
    Runtime(**options)  # checks them, and starts nothing
    listening = bind(settings.host, 0)
    loopback = on_loopback(listening)
    listening.close()
    hosts = (*settings.allow_host, settings.host)
    Access(settings.keys, settings.admin_key, hosts, loopback=loopback)
    IgnoredLines(settings.ignore_line)
    programs: dict[str, bytes] = {}
    for given in settings.program:
        open_program(given, Front.now())
        path, colon, parameter = given.rpartition(":") if ":" in given else (given, "", "")
        programs[Path(path).name + colon + parameter] = Path(path).read_bytes()
    return ReplicaStart(
        options=options,
        secret=secrets.token_bytes(32),
        keys=settings.keys,
        admin_key=settings.admin_key,
        hosts=hosts,
        loopback=loopback,
        names=tuple(settings.served_name),
        programs=programs,
        ignored=tuple(settings.ignore_line),
        limits=settings.limits,
        replicas=settings.bounds[1],
    )


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="umbel deploy",
        usage="umbel deploy [MODEL] [--replicas N] [--gpus-per-replica N] [options]",
        description="Serves a model by several replicas on Ray Serve. A call goes where its prefix is cached.",
        epilog="Everything can stand in a TOML file, as of umbel serve. `serve status` and `serve shutdown` are Ray's.",
        argument_default=argparse.SUPPRESS,
    )
    made.add_argument("model", nargs="?", metavar="MODEL", help="as of umbel serve --model; default: Gemma 3 270M")
    made.add_argument("--replicas", metavar="N", help="N, or MIN:MAX to scale by the calls in flight; default: 1")
    made.add_argument("--gpus-per-replica", type=float, metavar="N", help="reserved by Ray, on one node; default: 0")
    made.add_argument("--cpus-per-replica", type=float, metavar="N", help="reserved by Ray, on one node; default: 1")
    made.add_argument("--placement", metavar="POLICY", help=f"{', '.join(POLICIES)}; default: added-delay")
    made.add_argument(
        "--calls-per-replica",
        type=float,
        metavar="N",
        help="calls that run or wait at a replica, on the average, for which MIN:MAX makes replicas; default: 32",
    )
    made.add_argument("--up-delay", type=float, metavar="SECONDS", help="before replicas are added; default: 10")
    made.add_argument("--down-delay", type=float, metavar="SECONDS", help="before replicas end; default: 300")
    made.add_argument(
        "--address",
        help="of a Ray cluster, also RAY_ADDRESS; default: one that runs on this machine, or else a new one; "
        f"{LOCAL!r} always starts a new one",
    )
    made.add_argument("--app", metavar="NAME", help="of the application on the cluster; default: umbel")
    add_shared_options(made)
    add_option_groups(made, left_out={"model", *DeploySettings.__struct_fields__})
    return made


# ------------------------------------------------------------------------------------------- Ray


def _use_token(environment: MutableMapping[str, str]) -> None:
    """Has Ray use the token of the cluster, where there is one: `ray start` does so, and `ray.init` would not."""
    given = "RAY_AUTH_TOKEN" in environment or "RAY_AUTH_TOKEN_PATH" in environment
    if "RAY_AUTH_MODE" not in environment and (given or (Path.home() / ".ray" / "auth_token").is_file()):
        environment["RAY_AUTH_MODE"] = "token"


def _join(settings: DeploySettings) -> bool:
    """Connects to Ray → whether it was started here."""
    import ray

    quiet: dict[str, Any] = {"log_to_driver": True, "logging_level": logging.WARNING}
    address = settings.address or os.environ.get("RAY_ADDRESS")
    try:
        if address != LOCAL:
            ray.init(address=address or "auto", **quiet)
            log.info("joined the Ray cluster at %s", ray.get_runtime_context().gcs_address)
            return False
    except ConnectionError as error:
        if address:
            raise ParameterError(f"--address {address}: no Ray cluster answers there: {error}") from None
    log.info("starting Ray on this machine ...")
    ray.init(address=LOCAL, include_dashboard=False, **quiet)
    log.info("Ray is at %s; umbel deploy --address changes the application", ray.get_runtime_context().gcs_address)
    return True


def _check_room(settings: DeploySettings, local: bool) -> None:
    """Says where the fewest replicas find no room. Raises ParameterError where no node can come."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    missing = missing_room(settings, nodes)
    if missing and local:
        raise ParameterError(missing)
    if missing:
        log.warning("%s; waiting for other nodes, Ctrl-C ends the wait and `serve shutdown` the application", missing)


def missing_room(settings: DeploySettings, nodes: Sequence[Mapping[str, float]]) -> str:
    """Returns what the fewest replicas lack on the nodes of a cluster, in words; "" where there is room.

    Args:
        nodes: what each node has, by Ray's names.
    """
    needs = {"CPU": settings.cpus_per_replica, "GPU": settings.gpus_per_replica}
    room = sum(
        min((int(node.get(name, 0.0) / need + 1e-6) for name, need in needs.items() if need), default=MOST_REPLICAS)
        for node in nodes
    )
    least, _ = settings.bounds
    if room >= least:
        return ""
    given = f"--gpus-per-replica {needs['GPU']:g}"
    if needs["GPU"] and not any(node.get("GPU") for node in nodes):
        return f"{given}: Ray finds no GPU here; leave it out to compute on the CPU"
    given = f"--cpus-per-replica {needs['CPU']:g}" + (f" and {given}" if needs["GPU"] else "")
    have = "; ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
    return f"--replicas {settings.replicas}: with {given} there is room for {room} (nodes: {have}); write less of these"


def _deploy(settings: DeploySettings, start: ReplicaStart, local: bool) -> None:
    from ray import serve
    from ray.serve.context import _get_global_client  # which has the address that a cluster's first deployment chose

    from .application import QUIET, Resources, Scaling, build

    logging.getLogger("ray.serve").setLevel(logging.WARNING)

    least, most = settings.bounds
    with bind(settings.host, settings.port if local else 0) as listening:  # an error at once, if it is taken
        port = listening.getsockname()[1] if settings.port == 0 else settings.port
    options = {"host": settings.host, "port": port}
    serve.start(proxy_location="EveryNode", http_options=options, logging_config=QUIET)
    http = _get_global_client().http_config
    if (http.host, http.port) != (settings.host, port):
        log.warning("the cluster answers at %s:%d, as its first deployment said", http.host, http.port)
    count = str(least) if least == most else f"{least} to {most}"
    plural = "" if most == 1 else "s"
    log.info("deploying %s with %s replica%s; each loads the model ...", settings.app, count, plural)
    application = build(
        start,
        Scaling(least, most, settings.calls_per_replica, settings.up_delay, settings.down_delay),
        Resources(settings.cpus_per_replica, settings.gpus_per_replica),
        settings.placement,
        settings.host if local and start.loopback else None,
    )
    try:
        serve.run(application, name=settings.app, route_prefix="/")
    except RuntimeError as error:
        raise BackendError(f"Ray could not start {settings.app}: {_cause(settings.app) or error}") from None
    log.info("ready: %s on http://%s:%d", settings.app, http.host, http.port)


def _cause(app: str) -> str:
    """Returns what the replicas of an application failed with."""
    from ray import serve

    found = serve.status().applications.get(app)
    return next(filter(None, (last_error(each.message) for each in found.deployments.values())), "") if found else ""


def last_error(message: str) -> str:
    """Returns the error at the end of Ray's message about a deployment that did not start; "" where it has none."""
    found = re.findall(r"^(?:\w+\.)*(\w+(?:Error|Exception): .+)", message, re.MULTILINE)
    return found[-1] if found else ""


def _shut_down() -> None:
    from ray import serve

    serve.shutdown()


async def _until_signal() -> None:
    ended = asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, ended.set)
    await ended.wait()
