"""The MCP server of examples/warehouse.py."""

import random


def locate(number: int) -> str:
    """Say in which box, or on which shelf, a parcel or a box is."""
    place = place_of(number)
    return f"shelf {place}" if place < 100 else f"box {place}"


def place_of(number: int) -> int:
    """Return the number of a shelf, which is below 100, or of a larger box."""
    rng = random.Random(number)
    if number > 900 or rng.random() < 0.5:
        return rng.randint(10, 99)
    return rng.randint(number + 1, 999)


if __name__ == "__main__":
    from mcp.server import MCPServer

    server = MCPServer("warehouse", log_level="CRITICAL")
    server.tool()(locate)
    server.run()
