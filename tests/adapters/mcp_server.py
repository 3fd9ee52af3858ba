"""A tool server of MCP: over standard input and output, or at a port."""

import sys

try:
    from mcp.server.fastmcp import FastMCP
except ImportError:  # version 2
    from mcp.server import MCPServer as FastMCP

server = FastMCP("sums")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        server.run()
    elif hasattr(server.settings, "port"):
        server.settings.port = int(sys.argv[1])
        server.run(transport="streamable-http")
    else:  # version 2
        server.run(transport="streamable-http", port=int(sys.argv[1]))
