"""`umbel serve`: one process with an HTTP server and a runtime under it.

    umbel serve NAME --port 30000 --api-key team=SECRET --config serve.toml

The socket is bound first, so that a taken port is an error at once and `/health` answers while the model is loaded. The
server is ready when a real token came. Ctrl-C or SIGTERM drains it: it takes no new requests, lets streams end, and
ends; a second one ends it at once.
"""

import argparse
import asyncio
import contextlib
import errno
import inspect
import logging
import os
import secrets
import signal
import socket
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import httptools
import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..interpreter.backends.runtime import Runtime
from ..lang.errors import ParameterError, remedy
from ..lang.runtime_options import RuntimeOptions
from ..lang.transport.keys import Listen
from .access import Access
from .activity import keep
from .app import application
from .cost import Recorder
from .diagnosis.head import IgnoredLines
from .front import Front
from .http import Application
from .limits import IDLE_SECONDS, HttpLimits
from .program_store import open_program
from .workers import MOST_WORKERS, Ending, Workers, WorkerStart, address_of, on_loopback, share_of

log = logging.getLogger("umbel.server")
LOG_FORMAT, LOG_TIMES = "%(asctime)s %(message)s", "%H:%M:%S"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 30000
BACKLOG = 2_048  # connections that wait to be accepted; uvicorn's number, too
LAST_WORDS = 1.0  # seconds in which clients can read that their requests were ended
OWN_DEFAULTS = {"max_queue": 2_048}  # of the gateway: more than the server lets in
OPTIONS = {field.name: field for field in msgspec.structs.fields(RuntimeOptions) if field.name != "debug"}
LIMITS = {field.name: field for field in msgspec.structs.fields(HttpLimits)}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of `umbel serve`, from its command line and its file.

    Attributes:
        host, port: where it listens; port 0 takes a free one.
        served_name: names under which clients ask for the model.
        keys: the name of each API key → the key.
        admin_key: opens administrative routes; see `Access`.
        allow_host: further names in the Host header.
        tcp: "tcp://HOST:PORT" on which the runtime listens for programs on other machines; tcp_key, the path of its key
            file, and tcp_clients, that of the list of clients, belong to it.
        http_workers: processes that serve HTTP on the one socket, over one runtime.
        program: graph files that are offered from the start, as FILE:PARAMETER, or FILE for one that is no model.
        record: a file to which the tokens of every request are appended, for `umbel cost`.
        ignore_line: regular expressions of lines that are dropped from the head of conversations.
        runtime: options of `umbel.Runtime`.
        limits: of `HttpLimits`.
    """

    host: str = DEFAULT_HOST
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = DEFAULT_PORT
    served_name: list[str] = []
    keys: dict[str, str] = {}
    admin_key: str | None = None
    allow_host: list[str] = []
    tcp: str | None = None
    tcp_key: str | None = None
    tcp_clients: str | None = None
    http_workers: Annotated[int, msgspec.Meta(ge=1, le=MOST_WORKERS)] = 1
    program: list[str] = []
    record: str | None = None
    ignore_line: list[str] = []
    runtime: dict[str, Any] = {}  # Any: checked by the runtime
    limits: HttpLimits = HttpLimits()


S = TypeVar("S", bound=Settings)


def main(arguments: Sequence[str]) -> int:
    """Runs `umbel serve`. Returns the exit status."""
    settings = settings_of(arguments, os.environ)
    ignored = IgnoredLines(settings.ignore_line)
    logging.basicConfig(stream=sys.stderr, format=LOG_FORMAT, datefmt=LOG_TIMES)
    log.setLevel(logging.INFO)
    options = OWN_DEFAULTS | settings.runtime
    runtime = Runtime(**options, listen=_listen_of(settings))
    programs = [open_program(given, Front.now()) for given in settings.program]
    listening = bind(settings.host, settings.port)
    hosts = (*settings.allow_host, settings.host)
    access = Access(settings.keys, settings.admin_key, hosts, loopback=on_loopback(listening))
    if settings.http_workers > 1:
        return Workers(runtime, listening, _worker_start(settings, listening, runtime.options.model)).run()
    recorder = None if settings.record is None else Recorder(Path(settings.record))
    front = Front(
        runtime,
        access,
        settings.limits,
        tuple(settings.served_name),
        programs,
        recorder=recorder,
        ignored=ignored,
        alias=runtime.options.model,
    )
    server = Server(front, runtime, listening)
    return server.run()


def _listen_of(settings: Settings) -> Listen | None:
    """Returns where the runtime listens. Raises ParameterError for an address without a key and a list, or one of them
    alone."""
    match (settings.tcp, settings.tcp_key, settings.tcp_clients):
        case (None, None, None):
            return None
        case (str() as address, str() as key, str() as clients):
            return Listen(address, key, clients)
        case _:
            raise ParameterError(
                "--tcp, --tcp-key and --tcp-clients belong together; `umbel keys` makes the key and the list"
            )


def _worker_start(settings: Settings, listening: socket.socket, alias: str) -> WorkerStart:
    """Returns the start line of a worker, but for the address of the runtime, which is shared later."""
    return WorkerStart(
        parent=os.getpid(),
        runtime="",
        listening=listening.fileno(),
        workers=settings.http_workers,
        secret=secrets.token_bytes(32),
        keys=settings.keys,
        admin_key=settings.admin_key,
        hosts=(*settings.allow_host, settings.host),
        names=tuple(settings.served_name),
        alias=alias,
        programs=tuple(settings.program),
        record=settings.record,
        ignored=tuple(settings.ignore_line),
        limits=share_of(settings.limits, settings.http_workers),
    )


# ------------------------------------------------------------------------------------------- settings


def settings_of(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Reads the command line of `umbel serve`; see `read_settings`."""
    return read_settings(parser(), Settings, arguments, environment)


def read_settings(
    parser: argparse.ArgumentParser, kind: type[S], arguments: Sequence[str], environment: Mapping[str, str]
) -> S:
    """Reads the command line, the file that it names, and the keys of the environment; the command line wins.

    Args:
        kind: the settings of the command.

    Raises:
        ParameterError: an unknown name or a wrong value in the file.
    """
    given = vars(parser.parse_args(arguments))
    if (named := given.pop("named", None)) is not None and given.setdefault("model", named) != named:
        raise ParameterError(f"MODEL is {named!r}, and --model is {given['model']!r}; write one of them")
    fields = {field.name for field in msgspec.structs.fields(kind)}
    settings = _read_file(given.pop("config", None), fields)
    for name, value in given.items():
        if name in fields:
            settings[name] = value
        elif name in OPTIONS:
            settings.setdefault("runtime", {})[name] = value
        elif name in LIMITS:
            settings.setdefault("limits", {})[name] = value
        elif name == "api_key":
            settings["keys"] = settings.get("keys", {}) | _keys(value)
    if "keys" not in settings and (key := environment.get("UMBEL_API_KEY")):
        settings["keys"] = {"default": key}
    if "admin_key" not in settings and (key := environment.get("UMBEL_ADMIN_KEY")):
        settings["admin_key"] = key
    try:
        return msgspec.convert(settings, kind)
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `$.")
        place = f"{path.rstrip('`')}: " if path else ""
        raise ParameterError(f"{place}{said}; {parser.prog} --help lists what can be set") from None


def _keys(given: Sequence[str]) -> dict[str, str]:
    """Reads NAME=KEY, or a key alone, which is called "default"."""
    found: dict[str, str] = {}
    for each in given:
        name, _, key = each.partition("=")
        if not key.strip("="):  # the padding of base64
            name, key = "default", each
        if name in found:
            raise ParameterError(f"two API keys are called {name!r}; write --api-key NAME=KEY")
        found[name] = key
    return found


# Any: TOML
def _read_file(path: Path | None, known: Set[str]) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        found = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ParameterError(f"--config {path}: {error}") from None
    for name in found:
        if name not in known and (name in OPTIONS or name in LIMITS):
            raise ParameterError(f"--config {path}: write {name} below [{'runtime' if name in OPTIONS else 'limits'}]")
        if name not in known:
            raise ParameterError(f"--config {path}: {name!r} is not known; {remedy(name, known)}")
    limits = found.get("limits")
    for name in limits if isinstance(limits, dict) else ():
        if name not in LIMITS:
            raise ParameterError(f"--config {path}: [limits] has no {name!r}; {remedy(name, LIMITS)}")
    return found


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="umbel serve",
        usage="umbel serve [MODEL] [--port PORT] [options]",
        description="Serves a model, and programs, over HTTP: the APIs of OpenAI and Anthropic, and umbel's own.",
        epilog="Everything can stand in a TOML file: host, port, keys, the tables [runtime] and [limits].",
        argument_default=argparse.SUPPRESS,
    )
    made.add_argument("named", nargs="?", metavar="MODEL", help="the same as --model MODEL; default: Gemma 3 270M")
    add_shared_options(made)
    made.add_argument("--tcp", metavar="ADDRESS", help="let programs on other machines join at tcp://HOST:PORT")
    made.add_argument("--tcp-key", metavar="FILE", help="with --tcp: the key file of this server; see umbel keys")
    made.add_argument("--tcp-clients", metavar="FILE", help="with --tcp: the list of the clients that are admitted")
    made.add_argument(
        "--http-workers",
        type=int,
        metavar="N",
        help="processes that serve HTTP, on one socket and one runtime; default: 1",
    )
    made.add_argument("--record", metavar="FILE", help="append the tokens of every request, for umbel cost")
    add_option_groups(made)
    return made


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """Adds what all commands that serve take: where they listen, whom they serve, and what they offer."""
    parser.add_argument("--host", help=f"the address to listen on; default: {DEFAULT_HOST}, this machine only")
    parser.add_argument("--port", type=int, help=f"default: {DEFAULT_PORT}; 0 takes a free one")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with settings; the command line wins")
    parser.add_argument("--served-name", action="append", metavar="NAME", help="clients ask for the model by this name")
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="[NAME=]KEY",
        help="ask for a key on all routes but /health and /ui; may be repeated; also UMBEL_API_KEY",
    )
    parser.add_argument(
        "--admin-key",
        metavar="KEY",
        help="open administrative routes, which are there without it only where no key is set and --host is this "
        "machine; also UMBEL_ADMIN_KEY",
    )
    parser.add_argument("--allow-host", action="append", metavar="NAME", help="serve this name in the Host header, too")
    parser.add_argument(
        "--program",
        action="append",
        metavar="FILE[:PARAMETER]",
        help="offer the program of a graph file that umbel compile -o made; with a parameter as a model, too, whose "
        "messages go to it; may be repeated",
    )
    parser.add_argument(
        "--ignore-line",
        action="append",
        metavar="REGEX",
        help="drop lines that match as a whole from the first 4,096 characters of the system text and of the first "
        "message, such as one that changes with every request; may be repeated",
    )


def add_option_groups(parser: argparse.ArgumentParser, left_out: Set[str] = frozenset()) -> None:
    """Adds the limits and the options of the runtime, but for those that the command has itself."""
    for title, struct, fields in (("limits", HttpLimits, LIMITS), ("the runtime", RuntimeOptions, OPTIONS)):
        group = parser.add_argument_group(title)
        said = _attributes(struct)
        for name, field in fields.items():
            if name in left_out:
                continue
            default = OWN_DEFAULTS.get(name, "none" if field.default is msgspec.NODEFAULT else field.default)
            described = f"{said.get(name, '').rstrip('.')}; default: {default}".replace("%", "%%")
            group.add_argument(_flag(name), type=_reader(field.type), metavar="VALUE", help=described)


def _attributes(struct: type) -> dict[str, str]:
    """Reads the lines of a docstring that describe attributes → name: text."""
    lines = inspect.cleandoc(struct.__doc__ or "").partition("Attributes:\n")[2].splitlines()
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        if line[:4].isspace() and line[4:5].strip():  # a name begins there; what goes on is indented further
            name, _, text = line.strip().partition(": ")
            found[name] = text
        elif name:
            found[name] += " " + line.strip()
    return found


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _reader(kind: Any) -> Any:
    """Returns the function that reads an option of the runtime: numbers and switches by their type, pairs of names and
    paths, else text."""
    if get_origin(kind) is dict:
        return _pairs
    kinds = set(_plain_kinds(kind))
    if bool in kinds:
        return lambda text: {"true": True, "false": False}.get(text.lower(), text)
    number = int if int in kinds else float if float in kinds else str
    return partial(_number_or_text, number) if number is not str and str in kinds else number


def _number_or_text(number: Callable[[str], object], text: str) -> object:
    """Reads a number, or the text of an option that also takes words; a wrong one is refused with the options."""
    try:
        return number(text)
    except ValueError:
        return text


def _pairs(text: str) -> dict[str, str]:
    """Reads NAME=VALUE,NAME=VALUE."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    wrong = next((name for name, sign, _ in pairs if not sign), None)
    if wrong is not None:
        raise argparse.ArgumentTypeError(f"{wrong!r} has no value; write NAME=PATH, and a comma before the next one")
    return {name: value for name, _, value in pairs}


def _plain_kinds(kind: Any) -> Iterator[Any]:
    """Yields the plain types of an annotation such as `Annotated[int | None, Range(1, 9)]`."""
    inner = get_args(kind)[:1] if get_origin(kind) is Annotated else get_args(kind)
    if get_origin(kind) is Literal:
        yield from map(type, inner)
    elif inner:
        for each in inner:
            yield from _plain_kinds(each)
    else:
        yield kind


# ---------------------------------------------------------------------------------------------- serving


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that listens: who connects before the server runs waits, and is not refused.

    Raises:
        ParameterError: an address that is taken or not of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        other = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise ParameterError(f"cannot listen on {host}:{port}: {error.strerror}; choose another {other}") from None
    return listening


class EarlyRequest(Exception):
    """A request began on a connection before the answer to the one before it had ended."""


_WISHES = (b"upgrade", b"http2-settings")  # headers, and words of the header Connection


class HttpProtocol(HttpToolsProtocol):
    """One connection, with one request at a time.

    What a client sends before it has its whole answer is dropped, and the connection ends with that answer. uvicorn
    would queue such requests and stop reading, so that it did not see the client leave, and the first one ran on.

    No other protocol is spoken here, so a wish for one is left out of a request's head: Java's client sends
    `Upgrade: h2c` with each. httptools would take the body after it for the other protocol, and drop it.

    A connection on which no whole head comes within `IDLE_SECONDS` is closed.
    """

    _deaf = False
    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._closing is None and (self.cycle is None or self.cycle.response_complete):
            self._closing = self.loop.call_later(IDLE_SECONDS, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        self._await_head()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as wish:
            self._parse_without_wish(data[wish.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _parse_without_wish(self, rest: bytes) -> None:
        """Parses the head that has come once more, without its wish for another protocol, and what came after it."""
        head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(word for word in value.split(b",") if word.strip().lower() not in _WISHES)
            if name not in _WISHES:
                head.append(b"%b: %b" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(AttributeError):  # of httptools before 0.6.3; as uvicorn sets it for the first parser
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.data_received(b"\r\n".join([*head, b"", rest]))

    @property
    def _has_wish(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"  # which has nothing but that

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        if not self._has_wish:
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._has_wish:
            super().on_message_complete()

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
            self._deaf = True
            raise EarlyRequest  # ends the parsing of this data
        super().on_message_begin()

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are no HTTP, which are counted: no endpoint sees them."""
        if self._deaf:
            return
        app = self.config.app
        assert isinstance(app, Application), "it serves nothing else"
        app.front.malformed += 1
        super().send_400_response(msg)


class UvicornServer(uvicorn.Server):
    """uvicorn without its own handling of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_config(app: Application) -> uvicorn.Config:
    """Returns the settings with which uvicorn serves an application."""
    return uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        timeout_keep_alive=IDLE_SECONDS,
        lifespan="off",
        log_config=None,
        log_level="error",  # malformed requests are counted: a line for each would let any client fill the log
        access_log=False,
        server_header=False,
        date_header=False,
    )


TIERS = ("host_cache", "disk_cache", "shared_cache")  # options, and the facts of `info` that say what each is worth


class Server:
    """Serves until a signal ends it."""

    def __init__(self, front: Front, runtime: Runtime, listening: socket.socket) -> None:
        self._front = front
        self._runtime = runtime
        self._listening = listening
        self._uvicorn = UvicornServer(http_config(application(front)))
        self._ending = Ending(runtime)
        self._asked_to_end = 0
        self._was_cut = False
        self.failed: BaseException | None = None

    def run(self) -> int:
        """Blocks until the server has ended. Returns the exit status."""
        with asyncio.Runner(loop_factory=self._uvicorn.config.get_loop_factory()) as runner:
            runner.run(self._serve())
        if isinstance(self.failed, Exception):  # and was not cancelled, as it is at the end
            raise self.failed
        return 0

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, self.end)
        address = address_of(self._listening)
        log.info("listening on %s; loading the model ...", address)
        await self._front.programs.take_over()  # before the first request, which may ask for one of them
        starting = loop.create_task(self._start(address))
        starting.add_done_callback(lambda _: self._stop())  # it ends by an error only
        try:
            await self._uvicorn.serve(sockets=[self._listening])
        finally:
            starting.cancel()
            (self.failed,) = await asyncio.gather(starting, return_exceptions=True)
            await self._ending.run()

    async def _start(self, address: str) -> None:
        await self._front.start()
        names = ", ".join(model.name for model in self._front.models)
        log.info("ready: %s on %s (page: %s/ui)", names, address, address)
        for line in await self._tiers():
            log.info("%s", line)
        if self._runtime.listens_on:
            log.info("programs on other machines join at %s", self._runtime.listens_on)
        access = self._front.access
        if not access.keyed and not on_loopback(self._listening):
            absent = ", and --admin-key brings the administrative routes, which are absent"
            log.warning(
                "every machine that reaches this address may use it; --api-key asks for a key%s",
                "" if access.administered else absent,
            )
        await asyncio.gather(keep(self._runtime, self._front.activity), self._front.programs.follow())

    async def _tiers(self) -> list[str]:
        """Returns a line for each tier of the cache: from how many pages on loading is faster than computing."""
        options = self._runtime.options
        chosen = [name for name in TIERS if getattr(options, name) is not None]
        if not chosen:
            return []
        facts = (await self._runtime.control("info")).result
        return [str(facts[name]) for name in chosen if name in facts]

    def _stop(self) -> None:
        self._uvicorn.should_exit = True

    def end(self) -> None:
        """Drains the server; a second call ends it at once."""
        self._asked_to_end += 1
        self._front.draining = True
        self._stop()
        left = self._front.in_flight
        if self._asked_to_end > 1:
            self._ending.hurry()
            self._cut()
            return
        log.info("%s", stopping(left, self._front.limits.drain))
        asyncio.get_running_loop().call_later(self._front.limits.drain, self._cut)

    def _cut(self) -> None:
        """Ends the requests that are left. Each gets an error, if its client reads it in time."""
        if self._was_cut:
            return
        self._was_cut = True
        if left := self._front.in_flight:
            log.warning("ending %s before the answer", requests(left))
        for task in self._uvicorn.server_state.tasks:
            task.cancel()
        asyncio.get_running_loop().call_later(LAST_WORDS, self._hang_up)

    def _hang_up(self) -> None:
        for connection in self._uvicorn.server_state.connections:
            connection.transport.abort()


def requests(count: int) -> str:
    """Writes a number of requests."""
    return f"{count} request{'s' if count > 1 else ''}"


def stopping(left: int, drain: float) -> str:
    """Writes the line of a server that drains.

    Args:
        left: requests in flight.
    """
    if not left:
        return "stopping"
    verb = "has" if left == 1 else "have"
    return f"stopping: {requests(left)} in flight {verb} {drain:g} s to end; Ctrl-C again ends at once"
