"""A server of MCP on stdin and stdout, as its library's documentation has one."""

from __future__ import annotations

from mcp.server import MCPServer

server = MCPServer("numbers")


@server.tool()
def double(number: int) -> int:
    """Twice a number."""
    return 2 * number


@server.tool()
def fails() -> str:
    """It never works."""
    raise ValueError("broken")


if __name__ == "__main__":
    server.run()
