"""Numbers as text for people: bytes and amounts."""

from __future__ import annotations


def size(num_bytes: float) -> str:
    """Return a number of bytes with a binary unit, such as `1.5 GiB`."""
    for unit, width in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= width:
            value = num_bytes / width
            return f"{value:.1f} {unit}" if value < 100 else f"{value:,.0f} {unit}"
    return f"{num_bytes:.0f} B"


def amount(count: int) -> str:
    """Return a large count in millions or billions, with four digits."""
    for unit, width in (("billion", 10**9), ("million", 10**6)):
        if count >= width:
            return f"{count / width:.4g} {unit}"
    return number(count)


def number(count: int) -> str:
    """Return a count with commas between the thousands."""
    return f"{count:,}"
