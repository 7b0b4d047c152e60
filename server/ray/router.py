"""The request router of a deployment: a shell of Ray's interface around `Placements`.

Ray makes one in each process that has a handle of the deployment, by the import path in its configuration, and tells it
of replicas that start, stop and die. Its own routers ask replicas for the length of their queues and wait for the
answers, again and again while there is none that takes the call; this one decides once, from what it knows. The loop
that would ask again is replaced. It is not public, which is why the version of Ray is pinned.
"""

from collections.abc import AsyncIterator, Sequence

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .placements import Call, NoReplicaError, Placements

ROUTER = "umbel.server.ray.router.PlacementRouter"


class PlacementRouter(RequestRouter):  # type: ignore[misc]  # Ray is not installed where types are checked
    """Places each call by the prefixes that replicas have, their load, and the group of the call."""

    def initialize_state(self, policy: str) -> None:
        """Takes the arguments of the deployment's configuration."""
        self._placements = Placements(policy)

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._placements.set_replicas({each.replica_id.unique_id: each.routing_stats for each in replicas})

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._placements.lost(replica_id.unique_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Returns the one replica for a call. Raises NoReplicaError."""
        assert pending_request is not None, "a call is placed, not a guess at one"
        call: Call = pending_request.args[0]
        chosen = self._placements.place(call)
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == chosen:
                return [[replica]]
        call.end()
        raise NoReplicaError(f"replica {chosen} has ended")

    async def _choose_replicas_with_backoff(
        self, pending_request: PendingRequest | None = None
    ) -> AsyncIterator[list[RunningReplica]]:
        for replicas in await self.choose_replicas(self._replicas_list, pending_request):
            yield replicas
