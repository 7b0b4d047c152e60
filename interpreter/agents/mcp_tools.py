"""Tools of MCP servers: programs that are started here and spoken to by their input and output, or servers by URL.

    with ul.mcp("uvx", "mcp-server-time") as tools:      one connection, from here to the end of the block
        state = ask.run(..., tools=tools)

The connection is a task on the streams' loop, which holds the official client from its opening to its close; calls of
tools go to that loop, from sync and async programs alike.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import json
from collections.abc import AsyncIterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ...lang import checks
from ...lang.agents.tool_functions import ToolFunction
from ...lang.errors import BackendError, ConnectionLostError, MissingExtraError, ParameterError, shown
from ...lang.tool_calls import MOST_TOOLS, Tool
from .. import loop
from ..backends.hosted.transport import checked_headers, secrets_of

if TYPE_CHECKING:
    import httpx2
    from mcp import Client

_MOST_PAGES = 100  # of the list of tools
_STREAM_SECONDS = 300.0  # of silence on a stream that the server holds open


class McpTools:
    """A connection to an MCP server, made by `ul.mcp`. Its `with` block gives the server's tools.

    Args:
        command: a program, or a URL of streamable HTTP.
        arguments: of the program.
        env: variables that the program gets next to PATH, HOME and the like.
        timeout: seconds for the start, and for each call.
        headers: of every request to a URL.
        auth: of requests to a URL, by the official client's HTTP library.

    Examples:
        >>> server = ul.mcp("https://mcp.example.com/mcp?key=s3cret", headers={"X-Key": "s3cret"})
        >>> server  # has connected to nothing yet, and shows no key
        mcp('https://mcp.example.com/mcp')
        >>> isinstance(server, ul.McpTools)
        True
    """

    def __init__(
        self,
        command: str,
        arguments: tuple[str, ...],
        env: Mapping[str, str] | None,
        timeout: float,
        *,
        headers: Mapping[str, str],
        auth: "httpx2.Auth | None",
    ) -> None:
        self._command, self._arguments, self._env, self._timeout = command, arguments, env, timeout
        self._headers, self._auth = dict(headers), auth
        words = {name: value.rpartition(" ")[2] for name, value in headers.items()}  # "Bearer x": x alone, too
        self._secrets = sorted({*secrets_of("", headers), *secrets_of("", words)}, key=len, reverse=True)
        self._closing: asyncio.Event | None = None
        self._client: Client | None = None
        self._held: Any = None  # the future of the task that holds the client

    def __repr__(self) -> str:
        return f"mcp({_shown_address(self._command)!r})"

    def __enter__(self) -> list[ToolFunction[..., Any]]:
        return loop.streams.run(self._open())

    def __exit__(self, *raised: object) -> None:
        loop.streams.run(self._close())

    async def __aenter__(self) -> list[ToolFunction[..., Any]]:
        return await asyncio.wrap_future(loop.streams.spawn(self._open()))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.wrap_future(loop.streams.spawn(self._close()))

    # -------------------------------------------------------------------------------- the connection

    async def _open(self) -> list[ToolFunction[..., Any]]:
        """Connects → the tools. Raises ConnectionLostError where the server does not start or answer in time."""
        if self._held is not None:
            raise ParameterError(f"{self!r} is open; open another one with a ul.mcp(...) of its own")
        opened: asyncio.Future[list[ToolFunction[..., Any]]] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._held = asyncio.create_task(self._hold(opened, self._closing))
        try:
            async with asyncio.timeout(self._timeout):
                return await opened
        except BaseException as error:
            await self._close()
            if isinstance(error, asyncio.CancelledError | ParameterError):
                raise
            reason = self._reason(error)
        raise ConnectionLostError(f"{self!r} does not answer as an MCP server: {reason}")  # no cause: it may hold keys

    async def _hold(self, opened: "asyncio.Future[list[ToolFunction[..., Any]]]", closing: asyncio.Event) -> None:
        """Holds the client open: it has to be closed by the task that opened it."""
        try:
            async with self._new_client() as client:
                self._client = client
                tools = await self._listed(client)
                opened.set_result(tools)
                await closing.wait()
        except BaseException as error:
            if not opened.done():
                opened.set_exception(error)
        finally:
            self._client = None

    async def _close(self) -> None:
        held, self._held = self._held, None
        if held is None or self._closing is None:
            return
        self._closing.set()
        _, left = await asyncio.wait((held,), timeout=self._timeout)
        for task in left:
            task.cancel()
            await asyncio.wait((task,))

    @contextlib.asynccontextmanager
    async def _new_client(self) -> AsyncIterator["Client"]:
        from mcp import Client, StdioServerParameters

        if not _is_address(self._command):
            env = None if self._env is None else dict(self._env)
            program = StdioServerParameters(command=self._command, args=list(self._arguments), env=env)
            async with Client(program, read_timeout_seconds=self._timeout) as client:
                yield client
            return
        from mcp.client.streamable_http import streamable_http_client

        http = _http_library()
        timeout = http.Timeout(self._timeout, read=max(self._timeout, _STREAM_SECONDS))
        # Redirects are the official client's: it follows none to another host, so that headers stay with this one.
        async with http.AsyncClient(headers=self._headers, auth=self._auth, timeout=timeout) as connection:
            transport = streamable_http_client(self._command, http_client=connection)
            async with Client(transport, read_timeout_seconds=self._timeout) as client:
                yield client

    async def _listed(self, client: "Client") -> list[ToolFunction[..., Any]]:
        tools: list[ToolFunction[..., Any]] = []
        cursor = None
        for _ in range(_MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += [self._tool(each) for each in page.tools]
            cursor = page.next_cursor
            if cursor is None or len(tools) > MOST_TOOLS:
                break
        if len(tools) > MOST_TOOLS:
            raise ParameterError(f"{self!r} has more than {MOST_TOOLS} tools, which a model cannot choose from")
        return tools

    def _tool(self, given: Any) -> ToolFunction[..., Any]:  # Any: the package's type
        definition = Tool(given.name, given.description or "", given.input_schema)

        async def called(**arguments: Any) -> str:
            future = loop.streams.spawn(self._call(given.name, arguments))
            return await asyncio.wrap_future(future)

        return ToolFunction(called, definition)

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """Calls a tool of the server → its text. Raises BackendError for its errors, ConnectionLostError without it."""
        client = self._client
        if client is None:
            raise ConnectionLostError(f"{self!r} is closed, so that its tool {name} cannot be called")
        try:
            result = await client.call_tool(name, arguments)
        except Exception as error:
            problem = self._reason(error)
        else:
            text = self._scrub("\n".join(_text(block) for block in result.content))
            if result.is_error:
                raise BackendError(text or f"the tool {name} failed")
            return text
        raise ConnectionLostError(f"{self!r} did not answer the call of {name}: {problem}")

    def _reason(self, error: BaseException) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        told = f"{type(error).__name__}: {error}".replace(self._command, _shown_address(self._command))
        return "no answer in time" if isinstance(error, TimeoutError) else self._scrub(told)

    def _scrub(self, text: str) -> str:
        """Removes values of headers, which a server may repeat."""
        for secret in self._secrets:
            text = text.replace(secret, "[header]")
        return text


def mcp(
    command: str,
    /,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 60.0,
    headers: Mapping[str, str] | None = None,
    auth: "httpx2.Auth | None" = None,
) -> McpTools:
    """Gives programs the tools of an MCP server: `with ul.mcp("uvx", "mcp-server-time") as tools:` (or `async with`).

    The block starts the program, or connects to the URL, and gives a list of tools for `s.call_tools`. Its end closes
    the connection, and ends the program.

    Args:
        command: a program that speaks MCP by its input and output, or the URL of a server of streamable HTTP.
        arguments: of the program.
        env: variables of its environment, next to PATH, HOME and the like; None: no others.
        timeout: seconds for the start, and for each call of a tool.
        headers: of every request to a URL, such as {"Authorization": "Bearer ..."}. Their values are in no error, no
            repr and no result of a tool, so that journals have none of them.
        auth: of requests to a URL: an `Auth` of httpx2, such as `mcp.client.auth.OAuthClientProvider`; None: no auth.

    Raises:
        MissingExtraError: the `mcp` package is not installed.
        ParameterError: a value of another type, arguments of a URL, or headers or auth of a program.
        ConnectionLostError: on entry, where the server does not start, or does not answer in time.

    Examples:
        >>> @ul.function
        ... def ask(s, question, tools):
        ...     s += ul.user(question)
        ...     s.call_tools(tools, "answer")
        >>> with ul.mcp("uvx", "mcp-server-time") as tools:  # doctest: +SKIP
        ...     ask.run("What time is it in Oslo?", tools=tools)["answer"]
        'It is 14:05 in Oslo.'
    """
    command = checks.text("mcp(): command", command, 4096, "a program or a URL, such as 'http://127.0.0.1:8000/mcp'")
    for each in arguments:
        checks.text("mcp(): an argument", each, 65536)
    name = f"mcp({shown(_shown_address(command))})"
    if _is_address(command) and (arguments or env is not None):
        raise ParameterError(f"{name}: a URL takes neither arguments nor env; leave them out")
    given = checked_headers(headers, "mcp(): headers")
    if not _is_address(command) and (given or auth is not None):
        raise ParameterError(
            f"{name}: a program takes neither headers nor auth; give it keys by env={{'API_KEY': ...}}"
        )
    seconds = checks.seconds("mcp(): timeout", timeout)
    if importlib.util.find_spec("mcp") is None:
        raise MissingExtraError("mcp", "mcp")
    if auth is not None and not isinstance(auth, _http_library().Auth):
        raise ParameterError(
            f"{name}: auth is {type(auth).__name__}; write an Auth of httpx2, such as "
            "mcp.client.auth.OAuthClientProvider, or headers={'Authorization': 'Bearer ...'}"
        )
    return McpTools(command, arguments, env, seconds, headers=given, auth=auth)


def _http_library() -> Any:  # Any: the module under the official client
    return importlib.import_module("httpx2")


def _is_address(command: str) -> bool:
    return command.startswith(("http://", "https://"))


def _shown_address(command: str) -> str:
    """Returns a URL without what may be a key in it: user, password, query; a program as it is."""
    if not _is_address(command):
        return command
    try:
        parts = urlsplit(command)
    except ValueError:  # the client says what is wrong with it
        return command.partition("://")[0] + "://"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _text(block: Any) -> str:  # Any: the package's types of content
    if block.type == "text":
        return str(block.text)
    return json.dumps({"type": block.type, "omitted": "umbel gives models the text of results alone"})
