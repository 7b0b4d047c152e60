"""A gateway on another machine: reached over TCP, encrypted by CURVE, with the server's public key pinned.

Of such a gateway the system says nothing. libzmq's heartbeats find a machine or a network that is gone, pings find a
gateway that hangs. A lost connection is not taken up again under the same link: the gateway would take it for another
client, and the answers to what was asked before would go nowhere. The link breaks, and the next request makes another.
"""

import asyncio
import os
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from ...lang.errors import BackendError, ParameterError, shown
from ...lang.transport.inlet import prepare
from ...lang.transport.keys import KeyPair, add_client, check_public_key, read_key, write_key
from ...lang.transport.link import MAX_FRAME
from ...lang.transport.process_life import ProcessSample, ProcessState, TimeSpent
from .runtime_gateway import NoGatewayError

TCP = "tcp://"
LONGEST_REMOTE_SILENCE = 30.0  # seconds; a gateway that works on another machine cannot be told from one that sleeps
HEARTBEAT, SILENCE = 2_000, 10_000  # milliseconds, of libzmq's own
REACH_SECONDS = 10.0  # for the first handshake of a link; a gateway that was lost is replaced in less
REACH_LOOK = 0.02  # seconds

_REFUSED, _NO_DETAIL = zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class RemoteGateway:
    """A gateway behind a TCP address, for one link. Nothing here starts or ends it."""

    def __init__(self, address: str, key: KeyPair) -> None:
        self.was_ready = False
        self._address, self._key = address, key
        self._owner = os.getpid()
        self._monitor: zmq.Socket[bytes] | None = None
        self._reason: str | None = None

    def attach(self, socket: "zmq.Socket[bytes]") -> None:
        assert self._key.server is not None, "checked when the runtime was made"
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._key.public.encode("ascii"))
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret.encode("ascii"))
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._key.server.encode("ascii"))
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE)
        socket.setsockopt(zmq.IPV6, int("[" in self._address))
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED | _NO_DETAIL
        )
        socket.connect(self._address)

    def events(self) -> list[int]:
        """Returns what has happened to the connection since the last call, as numbers of zmq."""
        found: list[int] = []
        while self._monitor is not None and self._monitor.poll(0):
            found.append(parse_monitor_message(self._monitor.recv_multipart())["event"])
        return found

    def exit_descriptor(self) -> None:
        return None

    def exit_reason(self) -> str | None:
        if os.getpid() != self._owner:
            return "it was joined by the process that this one was forked from"
        if self._reason is None and zmq.EVENT_DISCONNECTED in self.events():
            self._reason = f"the connection to {self._address} was lost"
        return self._reason

    def sample(self) -> ProcessSample:
        """Returns a process asleep: all of its silence counts, but for what this process itself waited for a core."""
        return ProcessSample(ProcessState.ASLEEP)

    def trouble(self, stay: TimeSpent) -> str | None:
        if self.was_ready and stay.idle > LONGEST_REMOTE_SILENCE:
            return f"{self._address} has not answered for {stay.idle:.0f} s"
        return None

    def start_in_words(self) -> str:
        return f"its processes are those of {self._address}"

    def end_hung(self, reason: str) -> None:
        self._reason = self._reason or f"{reason}; only its owner can end it and start another"

    def close(self) -> None:
        """Does nothing: it is not ours."""


async def reach(address: str, key: KeyPair, context: "zmq.Context[zmq.Socket[bytes]]") -> RemoteGateway:
    """Finds out by a handshake whether the gateway can be reached and admits this key. Waits some seconds for it.

    Raises:
        BackendError: it does not admit this key, or has another one than the pinned one.
        NoGatewayError: it cannot be reached.
    """
    clock = asyncio.get_running_loop().time
    until = clock() + REACH_SECONDS
    probe = RemoteGateway(address, key)
    with prepare(context.socket(zmq.DEALER), MAX_FRAME) as socket:
        probe.attach(socket)
        while True:
            events = probe.events()
            if zmq.EVENT_HANDSHAKE_SUCCEEDED in events:
                socket.disable_monitor()
                return RemoteGateway(address, key)
            if _REFUSED in events:
                raise BackendError(
                    f"{address} does not admit the public key {key.public}; its owner adds it to the list of clients"
                )
            if _NO_DETAIL in events:
                raise BackendError(
                    f"{address} ended the handshake: it has another key than {key.server}, or is no runtime; "
                    "write the server's public key into the key file"
                )
            if clock() >= until:
                raise NoGatewayError(f"{address} cannot be reached; is its owner running, and listening there?")
            await asyncio.sleep(REACH_LOOK)


def client_key(path: object) -> KeyPair:
    """Reads the key file of a client. Raises ParameterError for none, or one that names no server."""
    if path is None:
        raise ParameterError("a tcp address needs key=, the path of this client's key file; `umbel keys` makes one")
    if not isinstance(path, str | os.PathLike):
        raise ParameterError(f"key={shown(path)} is no path; write the path of a key file")
    pair = read_key(Path(path))
    if pair.server is None:
        raise ParameterError(
            f'the key file {shown(str(path))} names no server; add a line: server = "<the server\'s public key>"'
        )
    return pair


def make_key(path: str, *, server: str | None = None, clients: str | None = None, name: str | None = None) -> KeyPair:
    """Makes a pair of keys and writes it into a new file, 0600.

    Args:
        server: for a client: the public key of its server, or the path of the server's key file.
        clients: a list of clients to which the public key is added; made if there is none.
        name: in that list; None takes the name of the file without its suffix.

    Raises:
        ParameterError: a file that exists, cannot be written, or is none.
    """
    pinned = None
    if server is not None:
        pinned = read_key(server).public if os.path.exists(server) else check_public_key("server", server)
    public, secret = zmq.curve_keypair()
    while public.startswith(b"-"):  # a command line would take it for an option
        public, secret = zmq.curve_keypair()
    pair = KeyPair(public.decode("ascii"), secret.decode("ascii"), pinned)
    write_key(path, pair)
    if clients is not None:
        add_client(clients, Path(path).stem if name is None else name, pair.public)
    return pair
