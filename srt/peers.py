"""Peers: the processes that talk to the gateway, each with its numbered frames and what it has not been sent yet."""

from collections import Counter
from dataclasses import dataclass, field

from ..lang.link import Codec, FromGateway, Inbound, Outbound, ToGateway


@dataclass(slots=True, eq=False)
class Peer:
    """One client socket."""

    identity: bytes  # made by the router, so no peer can take another's
    inbound: Inbound[ToGateway]
    outbound: Outbound[FromGateway]
    heard: float  # on the gateway's clock
    outbox: list[FromGateway] = field(default_factory=list)
    waits_for_welcome: bool = False


class Peers:
    """All clients by identity.

    Args:
        most: more are not let in; the sockets lie in a private folder, so they are one user's own.
    """

    def __init__(
        self, incoming: Codec[ToGateway], outgoing: Codec[FromGateway], counters: Counter[str], most: int
    ) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._counters = counters
        self._most = most
        self._peers: dict[bytes, Peer] = {}

    def hear(self, identity: bytes, now: float) -> Peer | None:
        """The peer that is heard now; None when there is no room for one more."""
        peer = self._peers.get(identity)
        if peer is None:
            if len(self._peers) >= self._most:
                self._counters["peers_refused"] += 1
                return None
            inbound = Inbound(self._incoming, self._counters)
            peer = self._peers[identity] = Peer(identity, inbound, Outbound(self._outgoing), now)
        peer.heard = now
        return peer

    def get(self, identity: bytes) -> Peer | None:
        return self._peers.get(identity)

    def forget(self, identity: bytes) -> None:
        self._peers.pop(identity, None)

    def silent_since(self, then: float) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.heard < then]

    def waiting(self) -> list[Peer]:
        """Those that asked whether the runtime is ready and have not been told."""
        return [peer for peer in self._peers.values() if peer.waits_for_welcome]

    def with_mail(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.outbox]
