"""The gateway's ROUTER: many client sockets behind one address, each a peer with numbered frames.

What is said to a peer is collected and goes out as one frame per `flush`. Nobody is waited for: there is
no high-water mark, and a peer that is gone is an error of the send, not a silent loss.
"""

import errno
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from ..lang.link import FrameError, FromGateway, Inbound, Outbound, ToGateway
from .engine_child import POLL, READ_AT_ONCE
from .wire import from_gateway_codec, to_gateway_codec


@dataclass(slots=True, eq=False)
class Peer:
    """One client socket."""

    identity: bytes  # made by the router, so no peer can take another's
    inbound: Inbound[ToGateway]
    outbound: Outbound[FromGateway]
    heard: float  # on the gateway's clock
    outbox: list[FromGateway] = field(default_factory=list)
    waits_for_welcome: bool = False


@dataclass(frozen=True, slots=True)
class Heard:
    """One frame of one peer: its messages, or why it could not be read."""

    peer: Peer
    messages: list[ToGateway]
    error: FrameError | None = None


class Clients:
    """All clients.

    Args:
        path: of the socket's file, in a private folder.
        most: peers; more are not let in.
    """

    def __init__(self, context: zmq.asyncio.Context, path: Path, most: int) -> None:
        self._socket = context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(f"ipc://{path}")
        self._most = most
        self._peers: dict[bytes, Peer] = {}
        self._incoming, self._outgoing = to_gateway_codec(), from_gateway_codec()
        self.counters: Counter[str] = Counter()

    async def receive(self, now: float) -> list[Heard]:
        """What has come; empty when nobody has said anything for a moment."""
        heard: list[Heard] = []
        if not await self._socket.poll(POLL):
            return heard
        for _ in range(READ_AT_ONCE):
            try:
                identity, *frames = await self._socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                break
            peer = self._peer(identity, now)
            if peer is None:
                continue
            try:
                heard.append(Heard(peer, peer.inbound.read(frames)))
            except FrameError as error:
                heard.append(Heard(peer, [], error))
        return heard

    def say(self, identity: bytes, message: FromGateway) -> None:
        """To a peer that may have gone meanwhile."""
        peer = self._peers.get(identity)
        if peer is not None:
            peer.outbox.append(message)

    def flush(self) -> list[Peer]:
        """Send everything that was said since the last time. Returns the peers that are gone, forgotten now."""
        gone = []
        for peer in [peer for peer in self._peers.values() if peer.outbox]:
            messages, peer.outbox = peer.outbox, []
            frames = [peer.identity, *peer.outbound.write(messages)]
            sending: Any = self._socket.send_multipart(frames, flags=zmq.NOBLOCK)  # Any: a future
            error = sending.exception() if sending.done() else None
            if isinstance(error, zmq.ZMQError) and error.errno == errno.EHOSTUNREACH:
                self.forget(peer)
                gone.append(peer)
            elif error is not None:
                raise error
        return gone

    def forget(self, peer: Peer) -> None:
        self._peers.pop(peer.identity, None)

    def silent_since(self, then: float) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.heard < then]

    def waiting(self) -> list[Peer]:
        """Those that asked whether the runtime is ready and have not been told."""
        return [peer for peer in self._peers.values() if peer.waits_for_welcome]

    def _peer(self, identity: bytes, now: float) -> Peer | None:
        """Who is heard now; None when there is no room for one more."""
        peer = self._peers.get(identity)
        if peer is None:
            if len(self._peers) >= self._most:
                self.counters["peers_refused"] += 1
                return None
            inbound = Inbound(self._incoming, self.counters)
            peer = self._peers[identity] = Peer(identity, inbound, Outbound(self._outgoing), now)
        peer.heard = now
        return peer
