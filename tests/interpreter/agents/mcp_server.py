"""A small MCP server: by its input and output, or on a port of loopback that is its argument."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

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


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", port=int(sys.argv[1]))
    else:
        server.run(transport="stdio")
