"""Plain data as JSON, whatever a model wrote into it."""

from __future__ import annotations

import json
from typing import Any

import orjson

__all__ = ["dumps"]


def dumps(value: Any) -> bytes:
    """Also of integers beyond 64 bits, of half a surrogate pair and of deep nesting, which a model
    may well write, and orjson refuses."""
    try:
        return orjson.dumps(value, default=str)
    except TypeError:
        return json.dumps(value, default=str).encode()
