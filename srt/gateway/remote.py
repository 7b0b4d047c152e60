"""The gateway's TCP port: encrypted by CURVE, for the clients of a list, each with a part of the cache of its own.

    tcp connection ── CURVE handshake ──▶ libzmq ── ZAP: is this public key admitted? ──▶ Admission (the list)
                                            │
                                            └─ frames, with the key's owner ──▶ CurveRouter ──▶ Clients

A client without a listed key never gets a frame through: libzmq ends its connection during the handshake. The frames
of the others carry their public key, which no client chooses; what a request says of salt, program and priority is
bound to it. ZAP is https://rfc.zeromq.org/spec/27.
"""

import hashlib
import hmac
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from ...lang.errors import ParameterError
from ...lang.protocol import Abort, Control, Detokenize, Origin, ReadStatus, Release
from ...lang.transport.inlet import Inlet, prepare
from ...lang.transport.keys import Listen, read_clients, read_key
from ...lang.transport.link import MAX_FRAME, Bye, Hello, Ping, ToGateway

ZAP = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"umbel"
ZAP_FRAME = 1 << 16  # bytes
KEY_BYTES = 32
HANDSHAKE = 5_000  # milliseconds; then a connection that has proved nothing is closed
HEARTBEAT, SILENCE = 5_000, 15_000  # milliseconds; of libzmq's own, which finds machines that are gone

log = logging.getLogger("umbel.gateway")


class Admission:
    """Answers libzmq's question whether a public key may connect. Made on a running loop, before the port is opened.

    Args:
        clients: path of the list. It is read again when it has changed; one that cannot be read admits no key.
        on_error: called with an exception of reading; no client is admitted after it.

    Raises:
        ParameterError: the list cannot be read.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        clients: str,
        counters: Counter[str],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._path = clients
        self._names = read_clients(clients)
        self._changed = _change_of(clients)
        self._counters = counters
        self._socket = prepare(context.socket(zmq.ROUTER), ZAP_FRAME)
        self._socket.bind(ZAP)
        self._inlet = Inlet(self._socket, self._answer, on_error)

    def name_of(self, key: bytes) -> str | None:
        """Returns the name in the list of a public key; None when it is not there."""
        changed = _change_of(self._path)
        if changed != self._changed:
            self._changed = changed
            try:
                self._names = read_clients(self._path)
            except ParameterError as error:
                log.error("no remote client is admitted: %s", error)
                self._names = {}
        return self._names.get(z85.encode(key).decode("ascii"))

    def close(self) -> None:
        self._inlet.close()
        self._socket.close(linger=0)

    def _answer(self, questions: list[list[bytes]]) -> None:
        for identity, empty, version, request, *rest in questions:  # libzmq writes them, not the peer
            domain, address, _, mechanism, *credentials = rest
            key = credentials[0] if mechanism == b"CURVE" and len(credentials) == 1 else b""
            name = self.name_of(key) if domain == ZAP_DOMAIN and len(key) == KEY_BYTES else None
            if name is None:
                reply = [b"400", b"not in the list", b"", b""]
                self._counters["remote_refused"] += 1
            else:
                reply = [b"200", b"", key.hex().encode("ascii"), b""]
                self._counters["remote_admitted"] += 1
                log.info("the client %s has connected from %s", name, address.decode("ascii", "replace"))
            self._socket.send_multipart([identity, empty, version, request, *reply])


class CurveRouter:
    """The ROUTER of the port, with each client's public key as the beginning of its identity.

    libzmq makes up the rest of an identity; a client that chose that of another would still have its own key in front.
    """

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket

    @property
    def closed(self) -> bool:
        return self._socket.closed

    def getsockopt(self, option: int) -> Any:  # Any: as the library has it
        return self._socket.getsockopt(option)

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        frames = self._socket.recv_multipart(flags, copy=False)
        identity, *content = (frame.bytes for frame in frames)
        return [bytes.fromhex(str(frames[-1].get("User-Id"))) + identity, *content]

    def send_multipart(self, msg_parts: Sequence[bytes], flags: int = 0) -> object:
        identity, *content = msg_parts
        return self._socket.send_multipart([identity[KEY_BYTES:], *content], flags=flags)


class Ownership:
    """Binds what remote requests say of themselves to the public key of their client.

    Salt, program and fork group become keyed hashes of the pair (public key, what the client wrote), so no client
    names another's, and a client without a salt has a part of the cache of its own. Priority counts up to 0.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)  # of this gateway; its cache does not outlive it

    def __call__(self, identity: bytes, messages: list[ToGateway]) -> list[ToGateway]:
        key = identity[:KEY_BYTES]
        return [self._owned(key, message) for message in messages]

    def _owned(self, key: bytes, message: ToGateway) -> ToGateway:
        origin = getattr(message, "origin", None)
        if not isinstance(origin, Origin):
            return message
        owned = msgspec.structs.replace(
            origin,
            salt=self._hash(key, b"salt", origin.salt),
            program_id=self._hash(key, b"program", origin.program_id) if origin.program_id else "",
            fork_group=self._hash(key, b"fork", origin.fork_group) if origin.fork_group else "",
            priority=min(origin.priority, 0),
        )
        return msgspec.structs.replace(message, origin=owned)

    def _hash(self, key: bytes, kind: bytes, text: str) -> str:
        """The key has one length and the kind no zero byte, so two triples never spell the same."""
        return hmac.new(self._secret, key + kind + b"\0" + text.encode("utf-8"), hashlib.sha256).hexdigest()


def of_the_owner(message: ToGateway) -> str | None:
    """Returns the name of a message that concerns the requests of all clients, which a remote one may not send."""
    match message:
        case Control(verb=verb):
            return None if verb == "info" else repr(verb[:40])
        case Hello() | Ping() | Bye() | Abort() | Release() | Detokenize() | ReadStatus():
            return None  # of the sender's own, or numbers
        case _:
            return None if hasattr(message, "origin") else type(message).__name__


def open_port(context: "zmq.Context[zmq.Socket[bytes]]", listen: Listen) -> tuple["zmq.Socket[bytes]", str]:
    """Opens the port → its ROUTER, and the address with the port that it got. An `Admission` must be there already.

    Raises:
        ParameterError: the key cannot be read, or the address cannot be bound.
    """
    pair = read_key(listen.key)
    socket = prepare(context.socket(zmq.ROUTER), MAX_FRAME)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode("ascii"))
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE)
    socket.setsockopt(zmq.IPV6, int("[" in listen.address))
    try:
        socket.bind(listen.address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise ParameterError(f"listen: {listen.address!r} cannot be bound: {error}; write another address") from None
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes), "an address is no number"
    return socket, bound.rstrip(b"\0").decode("ascii")


def _change_of(path: str) -> tuple[int, int, int] | None:
    """Returns what changes with a file's content; None when it is not there."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino
