"""Makes the Serve application: a deployment of replicas, and an ingress whose calls our router places.

    umbel (application)
    ├── Ingress   num_replicas 1: one place knows where all calls went
    └── Replica   num_replicas N, or MIN to MAX by the calls that run or wait there

Placement groups, starts, health checks, rolling updates and draining are Ray's; this file says by which settings.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from ray import serve
from ray.serve import Application, handle
from ray.serve.config import AutoscalingContext

from .ingress import Ingress
from .replica import Replica, ReplicaStart
from .router import ROUTER

POLICY = "umbel.server.ray.application:replicas_wanted"
STATS_SECONDS = 2.0  # between two reports of a replica to the routers
HEALTH_SECONDS, HEALTH_TIMEOUT = 5.0, 30.0
END_SECONDS = 10.0  # that a replica has after its calls, to end its processes
MOST_STARTS = 3  # of a replica that fails to start
QUIET = {"log_level": "WARNING", "enable_access_log": False}  # of Ray's parts; ours log as umbel serve does
MARGIN = 1_024  # calls above the limits of all replicas, so that these refuse, in their own words


class Scaling(msgspec.Struct, frozen=True):
    """Bounds the number of replicas.

    Attributes:
        least, most: equal for a fixed number.
        calls: that run or wait at a replica, on the average, when there are as many replicas as there shall be.
        up_delay, down_delay: seconds for which more or fewer were wanted before there are.
    """

    least: int
    most: int
    calls: float = 32.0
    up_delay: float = 10.0
    down_delay: float = 300.0


class Resources(msgspec.Struct, frozen=True):
    """Says what Ray reserves for a replica, on one node."""

    cpus: float
    gpus: float


def replicas_wanted(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Returns how many replicas the calls that run or wait need. Ray calls it, and applies bounds and delays."""
    counted: Mapping[Any, float] = (context.aggregated_metrics or {}).get("calls", {})
    return max(1.0, sum(counted.values()) / context.config.target_ongoing_requests), {}


@serve.ingress()
class IngressDeployment:
    """Holds the handle of the replicas for an `Ingress`."""

    def __init__(self, replicas: handle.DeploymentHandle) -> None:
        self._replicas = replicas

    # A place reserved by Ray would cost two messages to the replica for each call, which takes as much time as the call
    # itself; a replica that ends waits for the answers on its own socket instead.
    def __serve_build_asgi_app__(self) -> Ingress:
        return Ingress(partial(self._replicas.choose_replica, _reserve=False), self._everywhere)

    async def _everywhere(self) -> Sequence[Mapping[str, str]]:
        found: Sequence[Mapping[str, str]] = await self._replicas.broadcast("record_replica_metadata").results_async()
        return found


def build(
    start: ReplicaStart, scaling: Scaling, resources: Resources, placement: str, host: str | None = None
) -> Application:
    """Returns the application, for `serve.run`.

    Args:
        placement: the policy of the router.
        host: where the sockets of replicas are; None takes the addresses of their nodes.
    """
    fixed = scaling.least == scaling.most
    replicas = serve.deployment(Replica, name="Replica").options(
        **{"num_replicas": scaling.least} if fixed else {"autoscaling_config": _autoscaling(scaling)},
        ray_actor_options={"num_cpus": resources.cpus, "num_gpus": resources.gpus},
        placement_group_bundles=[{"CPU": resources.cpus, "GPU": resources.gpus}],
        placement_group_strategy="STRICT_PACK",
        max_constructor_retry_count=MOST_STARTS,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=start.limits.drain + END_SECONDS,
        logging_config=QUIET,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT,
        request_router_config={
            "request_router_class": ROUTER,
            "request_router_kwargs": {"policy": placement},
            "request_routing_stats_period_s": STATS_SECONDS,
        },
    )
    ingress = serve.deployment(IngressDeployment, name="Ingress").options(
        num_replicas=1,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=start.limits.most_in_flight * scaling.most + MARGIN,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=start.limits.drain + END_SECONDS,
        logging_config=QUIET,
    )
    return ingress.bind(replicas.bind(msgspec.json.encode(start), host))


def _autoscaling(scaling: Scaling) -> dict[str, Any]:
    return {
        "min_replicas": scaling.least,
        "max_replicas": scaling.most,
        "target_ongoing_requests": scaling.calls,
        "upscale_delay_s": scaling.up_delay,
        "downscale_delay_s": scaling.down_delay,
        "metrics_interval_s": 1.0,
        "look_back_period_s": 2.0,
        "policy": {"policy_function": POLICY},
    }
