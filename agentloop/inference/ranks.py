"""The data-parallel ranks of servers, and the load that they report: values that the client of a
server produces and the ledger of KV caches consumes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class DataParallelRank(NamedTuple):
    """A data-parallel rank of a server, which has a KV cache of its own."""

    server: str
    number: int = 0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The load that a rank reports (SGLang: an element of `loads` of GET /v1/loads).

    Attributes:
        num_used: Tokens of the KV cache held by running requests.
        num_retracted: Requests retracted from the batch so far, a counter.
    """

    num_used: int
    num_running: int
    num_waiting: int
    num_retracted: int = 0
