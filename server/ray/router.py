"""The request router of a deployment: a shell of Ray's interface around `Placements`.

Ray makes one in each process that calls the deployment, by the import path in its configuration, and tells it of
replicas that start, stop and die. Its own routers ask replicas for the length of their queues and wait for the answers;
this one decides from what it knows, so a call waits for nothing but the reservation of its place. `choose_replicas`,
Ray's hook for candidates, is preceded by that question, so the method before it is overridden; it is not public, which
is why the version of Ray is pinned.
"""

from collections.abc import Sequence

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
        self._placements.died(replica_id.unique_id)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """Returns the replica for a call. A call that comes back was refused by the replica that it was sent to."""
        call: Call = pending_request.args[0]
        if is_retry and call.replica:
            call.exclude(call.replica)
        chosen = self._placements.place(call)
        found = {each.replica_id.unique_id: each for each in self._replicas.values()}.get(chosen)
        if found is None:
            call.end()
            raise NoReplicaError(f"replica {chosen} has ended")
        return found

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Answers Ray's question for candidates, which it does not ask as long as the method above is overridden."""
        if pending_request is None:
            return [candidate_replicas]
        return [[await self._choose_replica_for_request(pending_request)]]
