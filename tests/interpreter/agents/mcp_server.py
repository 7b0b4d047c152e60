"""A small MCP server: by its input and output, or on a port of loopback that is its argument."""

import os
import sys
import time

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("toy")


@server.tool()
def double(number: int) -> int:
    """Doubles a number."""
    return 2 * number


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("no such thing")


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def hang() -> str:
    """Takes long."""
    time.sleep(60)
    return "late"


@server.tool()
def whoami(ctx: Context) -> str:
    """Tells the headers that came, as they are and from their ends."""
    given = ctx.request_context.request.headers
    told = f"{given.get('authorization')} {given.get('x-team')}"
    return f"{told} {told[::-1]}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", port=int(sys.argv[1]))
    else:
        server.run(transport="stdio")
