"""The gateway's ROUTER: many client sockets behind one address, each a peer with numbered frames.

What is said to a peer is collected and goes out as one frame per `flush`. Nobody is waited for: there is
no high-water mark, and a peer that is gone is an error of the send, not a silent loss.
"""

import errno
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from ...lang.inlet import Inlet, prepare
from ...lang.link import MAX_FRAME, FrameError, FromGateway, Inbound, Outbound, Pong, ToGateway
from ..core.clock import Clock
from ..core.wire import from_gateway_codec, to_gateway_codec, too_large_for_client


@dataclass(slots=True, eq=False)
class Peer:
    """One client socket."""

    identity: bytes  # made by the router, so no peer can take another's
    inbound: Inbound[ToGateway]
    outbound: Outbound[FromGateway]
    heard: float  # on the gateway's clock; or probed
    outbox: list[FromGateway] = field(default_factory=list)
    waits_for_welcome: bool = False


@dataclass(frozen=True, slots=True)
class Heard:
    """One frame of one peer: its messages, or why it could not be read."""

    peer: Peer
    messages: list[ToGateway]
    error: FrameError | None = None


class Clients:
    """All clients. Made on a running loop.

    Args:
        path: of the socket's file, in a private folder.
        most: peers; more are not let in.
        clock: when they were heard.
        hear: is given what has come, frame by frame.
        failed: is given an exception of reading or of `hear`; nobody is heard after it.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        path: Path,
        most: int,
        *,
        clock: Clock,
        hear: Callable[[list[Heard]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._socket = prepare(context.socket(zmq.ROUTER), MAX_FRAME)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(f"ipc://{path}")
        self._most = most
        self._clock = clock
        self._hear = hear
        self._peers: dict[bytes, Peer] = {}
        self._talking: dict[bytes, Peer] = {}  # those with something in their outbox
        self._incoming, self._outgoing = to_gateway_codec(), from_gateway_codec()
        self.counters: Counter[str] = Counter()
        self._inlet = Inlet(self._socket, self._receive, failed)

    def _receive(self, messages: list[list[bytes]]) -> None:
        now = self._clock.now()
        heard: list[Heard] = []
        for identity, *frames in messages:
            peer = self._peer(identity, now)
            if peer is None:
                continue
            try:
                heard.append(Heard(peer, peer.inbound.read(frames)))
            except FrameError as error:
                heard.append(Heard(peer, [], error))
        self._hear(heard)

    def look(self) -> None:
        """For safety: whatever has come is read, had its arrival been missed."""
        self._inlet.look()

    def say(self, identity: bytes, message: FromGateway) -> None:
        """To a peer that may have gone meanwhile."""
        peer = self._peers.get(identity)
        if peer is not None:
            peer.outbox.append(message)
            self._talking[identity] = peer

    def flush(self) -> list[Peer]:
        """Send everything that was said since the last time. Returns the peers that are gone, forgotten now."""
        if not self._talking:
            return []
        talking, self._talking = self._talking, {}
        gone = []
        for peer in talking.values():
            messages, peer.outbox = peer.outbox, []
            try:
                for frames in peer.outbound.write_all(messages):
                    self._socket.send_multipart((peer.identity, *frames), flags=zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                self.forget(peer)
                gone.append(peer)
        self._inlet.look()
        return gone

    def forget(self, peer: Peer) -> None:
        self._peers.pop(peer.identity, None)

    def probe(self, silence: float) -> None:
        """Sends a message to clients that have been silent for so many seconds; `flush` then finds those that are gone.
        A program that is stopped or busy is not gone."""
        now = self._clock.now()
        for peer in self._peers.values():
            if now - peer.heard > silence:
                peer.heard = now
                self.say(peer.identity, Pong())

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
            peer = self._peers[identity] = Peer(identity, inbound, Outbound(self._outgoing, too_large_for_client), now)
        peer.heard = now
        return peer
