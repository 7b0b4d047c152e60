"""Pictures from the web, for programs that say which hosts they trust: a URL → the bytes it names.

    url ─► checked ─► host among `hosts`? ─► addresses ─► all public? ─► connect to the one that was checked ─► bytes
              ▲                                                                                              │
              └───────────────────────── a redirect is a URL like any other ◄───────────────────────────────┘

A URL is read once, by one parser, and what is asked for is built from what was read: parsers that disagree on a
backslash have let URLs through that named another host. The name is resolved once, so a second answer of its server
cannot point elsewhere. No proxy, cookie or password is ever used.
"""

import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from ..lang import checks
from ..lang.errors import ConnectionLostError, DeadlineError, ParameterError, shown
from .media import MAX_MEDIA_BYTES

MAX_REDIRECTS = 3
MAX_URL = 2048  # characters
MAX_HOSTS = 1000
_HOSTS = "write a list of host names, such as ['upload.example.org']"
CONNECT_SECONDS, READ_SECONDS, ALL_SECONDS = 5.0, 10.0, 30.0
_PLAIN = re.compile(r"[!#-;=?-\[\]_a-z~]+")  # what may stand in a URL; not a backslash, quote or blank
_NETLOC = re.compile(r"([A-Za-z0-9.-]+)(?::([0-9]{1,5}))?")  # no user, no brackets, nothing quoted
_LABEL = r"(?:[a-z0-9-]{0,61}[a-z0-9])?"  # after its first character; no name server knows longer ones
_HOST = re.compile(rf"(?:[a-z0-9]{_LABEL}\.)+[a-z]{_LABEL}(?::(?P<port>[0-9]{{1,5}}))?")  # and no number
_PORTS = {"http": 80, "https": 443}
_LAST_PORT = 65535
_REDIRECTS = (301, 302, 303, 307, 308)
_GLOBAL = ipaddress.ip_network("2000::/3")  # all IPv6 that is routed (RFC 4291); not IPv4 in NAT64, nor site-local


class Target(NamedTuple):
    """A URL that was checked."""

    scheme: str
    host: str
    port: int
    path: str  # and query

    @property
    def name(self) -> str:
        """The host as an entry of `hosts`: with its port where that is not the default one."""
        return self.host if self.port == _PORTS[self.scheme] else f"{self.host}:{self.port}"


def _resolve(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _connect(address: str, port: int) -> socket.socket:
    return socket.create_connection((address, port), CONNECT_SECONDS)


@dataclass(frozen=True, slots=True)
class Web:
    """Network and clock, replaceable in tests. `resolve`: host and port → addresses; `connect`: address and port → a
    socket."""

    resolve: Callable[[str, int], list[str]] = _resolve
    connect: Callable[[str, int], socket.socket] = _connect
    tls: Callable[[], ssl.SSLContext] = ssl.create_default_context
    seconds: float = ALL_SECONDS  # for all answers together, however slowly they come
    now: Callable[[], float] = time.monotonic


def fetch_image(url: str, *, hosts: Collection[str], web: Web | None = None) -> bytes:
    """Downloads a picture from the web, for `image(...)`. Blocks.

    Args:
        url: http or https. A redirect (at most three) has to lead to one of `hosts` too, and never to http from https.
        hosts: the only ones that may be asked, by their full names; "example.org:8080" allows that port. Addresses
            that are not public are refused whatever their name.
        web: network and clock, for tests; None: those of this machine.

    Raises:
        ParameterError: the URL or an entry of `hosts` is not allowed, there is no picture at it, or it is over
            the limit of `image`.
        ConnectionLostError: the host cannot be found or reached, or it broke off.
        DeadlineError: the answer took longer than 30 s.

    Examples:
        >>> @ul.function
        ... def describe(s, url):
        ...     picture = ul.fetch_image(url, hosts=["upload.example.org"])
        ...     s += ul.user(ul.image(picture) + "What is this?")
        ...     s += ul.assistant(ul.gen("answer", max_tokens=32))
        >>> describe.run("http://10.0.0.1/secrets.png").text()  # what a stranger's text might name
        Traceback (most recent call last):
        umbel.ParameterError: ... 10.0.0.1 is not among hosts=['upload.example.org']; ...
    """
    allowed = _checked_hosts(hosts)
    url = checks.plain(url) if isinstance(url, str) else url
    web = web or Web()
    ends = web.now() + web.seconds
    for _ in range(MAX_REDIRECTS + 1):
        target = _checked(url, allowed)
        with _answer(target, web, ends) as response:
            if response.status not in _REDIRECTS:
                return _body(response, shown(url))
            further = urljoin(url, response.getheader("location") or "")
        if target.scheme == "https" and not further.startswith("https:"):
            raise ParameterError(f"{shown(url)} leads from https to {further[:200]!r}, which is not followed")
        url = further
    raise ParameterError(
        f"{shown(url)} is redirected more than {MAX_REDIRECTS} times; give the URL of the picture itself"
    )


# ------------------------------------------------------------------------------------------ what is allowed


def _checked_hosts(hosts: Collection[str]) -> frozenset[str]:
    if isinstance(hosts, str):
        raise ParameterError(f"fetch_image(hosts={shown(hosts)}): {_HOSTS}")
    given = checks.members("fetch_image(): hosts", hosts, MAX_HOSTS, _HOSTS)
    if not given:
        raise ParameterError(f"fetch_image(hosts={shown(hosts)}): {_HOSTS}")
    for host in given:
        found = _HOST.fullmatch(host) if isinstance(host, str) else None
        if found is None or not 0 < int(found["port"] or 1) <= _LAST_PORT:
            raise ParameterError(
                f"fetch_image(hosts): {shown(host)} is no host that may be allowed; write a full name in small "
                "letters, such as 'upload.example.org'"
            )
    return frozenset(map(checks.plain, given))


def _checked(url: str, allowed: frozenset[str]) -> Target:
    """Parses a URL. Raises ParameterError unless it is plain and its host is allowed. Sends nothing."""
    if not isinstance(url, str) or len(url) > MAX_URL or not _PLAIN.fullmatch(url):
        raise ParameterError(
            f"fetch_image({shown(url)}): write a URL of at most {MAX_URL} characters, with anything but letters, "
            "digits and -._~:/?#[]@!$&'()*+,;=% percent-encoded"
        )
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ParameterError(f"fetch_image({shown(url)}): this is no URL; write 'https://host/path'") from None
    found = _NETLOC.fullmatch(parts.netloc)
    if parts.scheme not in _PORTS or found is None:
        raise ParameterError(
            f"fetch_image({shown(url)}): write 'http://' or 'https://', a host name and a path; users and addresses "
            "in numbers are not taken"
        )
    port = int(found.group(2) or _PORTS[parts.scheme])
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    target = Target(parts.scheme, found.group(1).lower(), port, path)
    if target.name not in allowed:
        raise ParameterError(
            f"fetch_image({shown(url)}): {target.name} is not among hosts={shown(sorted(allowed))}; add it if "
            "you trust it"
        )
    return target


def _public_address(target: Target, web: Web) -> str:
    """Resolves the address to connect to. One private address refuses the host: name servers rotate answers."""
    try:
        addresses = web.resolve(target.host, target.port)
    except OSError as error:
        raise ConnectionLostError(f"{target.host} cannot be found: {error.strerror or 'no such name'}") from error
    if not addresses:
        raise ConnectionLostError(f"{target.host} cannot be found: it has no address")
    for address in addresses:
        if not _is_public(address):
            raise ParameterError(
                f"{target.host} leads to {address}, which is not a public address; pictures of private networks are "
                "read by path"
            )
    return addresses[0]


def _is_public(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address) and (parsed not in _GLOBAL or parsed.sixtofour or parsed.teredo):
        return False  # the last two carry another address, which may be any
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved


# ------------------------------------------------------------------------------------------ the answer


@contextmanager
def _answer(target: Target, web: Web, ends: float) -> Iterator[http.client.HTTPResponse]:
    """Sends one request and yields the response. Cuts the connection when the time is over."""
    address = _public_address(target, web)
    late = threading.Event()
    line: socket.socket | None = None

    def cut() -> None:
        late.set()
        with suppress(OSError):  # it has just ended by itself
            if line is not None:
                socket.socket.shutdown(line, socket.SHUT_RDWR)  # TLS would forget its session under who reads

    left = ends - web.now()
    timer = threading.Timer(left, cut)
    timer.daemon = True
    try:
        if left <= 0:
            raise TimeoutError
        line = web.connect(address, target.port)
        line.settimeout(READ_SECONDS)
        timer.start()
        if target.scheme == "https":
            line = web.tls().wrap_socket(line, server_hostname=target.host, do_handshake_on_connect=False)
            line.do_handshake()
        yield _asked(target, line)
        if late.is_set():  # an answer without a length ends where it is cut
            raise TimeoutError
    except (OSError, http.client.HTTPException) as error:
        if late.is_set() or isinstance(error, TimeoutError):
            raise DeadlineError(
                f"{target.host} took too long to send a picture; download it and pass its path"
            ) from error
        raise ConnectionLostError(f"{target.host} broke off or cannot be reached ({type(error).__name__})") from error
    finally:
        timer.cancel()
        if line is not None:
            line.close()


def _asked(target: Target, line: socket.socket) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(target.host, target.port)
    connection.sock = line
    headers = {"Host": target.name, "Accept": "image/*", "Accept-Encoding": "identity", "Connection": "close"}
    connection.request("GET", target.path, headers=headers)
    return connection.getresponse()


def _body(response: http.client.HTTPResponse, place: str) -> bytes:
    if response.status != 200:
        raise ParameterError(f"there is no picture at {place}: the host answers {response.status}")
    if response.getheader("content-encoding", "identity") != "identity":
        raise ParameterError(f"{place} comes compressed although it was not to; download it and pass its path")
    data = response.read(MAX_MEDIA_BYTES + 1) if (response.length or 0) <= MAX_MEDIA_BYTES else None
    if data is None or len(data) > MAX_MEDIA_BYTES:
        raise ParameterError(f"{place} is larger than {MAX_MEDIA_BYTES} bytes; download it and make it smaller")
    if response.length:  # of what was promised
        raise http.client.IncompleteRead(data, response.length)
    return data
