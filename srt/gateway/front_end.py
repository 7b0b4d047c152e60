"""Front ends: requests enter the gateway through them, and answers leave it through them.

    clients.Clients            ZeroMQ sockets of programs on this machine ─┐
    programs.Programs          programs that run next to the gateway      ─┼─ receive(client, message) ─▶ Gateway
    in_process.LocalBackend    the caller's own process                   ─┘ ◀─ client.deliver(message) ─

A front end gives each of its clients an identity, passes their requests on with a `Client`, and reports a client that
is gone (`client_lost`). Everything else, such as frames, connections and protocols, is its own. Another front end, such
as an HTTP server, needs these three things and no change here.
"""

from dataclasses import dataclass
from typing import Protocol

from ...lang.programs import FromPrograms
from ...lang.protocol import FromBackend

Answer = FromBackend | FromPrograms


class FrontEnd(Protocol):
    """Delivers answers to the clients that ask through it."""

    def deliver(self, identity: bytes, message: Answer) -> None:
        """Sends a message to a client, now or soon; drops it when the client is gone. Must not raise."""


@dataclass(frozen=True, slots=True)
class Client:
    """Identifies the sender of a request: one client of one front end."""

    front_end: FrontEnd
    identity: bytes  # unique within its front end

    def deliver(self, message: Answer) -> None:
        self.front_end.deliver(self.identity, message)
