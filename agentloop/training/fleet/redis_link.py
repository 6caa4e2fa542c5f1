"""A Redis client that survives outages, and the keys of a run.

    agentloop:RUN:trainer       the trainer's `TrainerState`, expiring unless it is refreshed
    agentloop:RUN:tickets       stream: groups to roll out, each by one runtime
    agentloop:RUN:groups        stream: results, for the trainer
    agentloop:RUN:rows:NAME:N   pieces of a result's rollouts, if no folder is shared
    agentloop:RUN:runtimes      set of the runtimes' names
    agentloop:RUN:runtime:NAME  a runtime's `WorkerStatus`, expiring likewise

Redis only transports; the trainer's journal is authoritative. All data in Redis may be lost at any
time, so states are published repeatedly and lost tickets are added again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import anyio

from agentloop.distribution import install_hint
from agentloop.errors import ServerError, SettingsError
from agentloop.training.fleet.settings import FleetSettings

__all__ = ["READERS", "Redis", "RedisLink"]

log = logging.getLogger(__name__)

T = TypeVar("T")

Redis: TypeAlias = Any
"""`redis.asyncio.Redis`: an optional dependency whose types change between versions."""

READERS = "runtimes"
"""Name of the consumer group that reads the tickets."""

_ANSWER_S = 20.0  # deadline of a command; blocking reads block for one second
_BACKOFF_S = (0.05, 2.0)
_PIECE_BYTES = 4 << 20
_KEEP_PIECES_MS = 3_600_000  # expiry of the pieces of an incomplete result
# Redis responds, but cannot execute the command now.
_LATER = ("OOM", "MISCONF", "READONLY", "LOADING", "TRYAGAIN", "CLUSTERDOWN")


class RedisLink:
    """A connection to Redis. Use `RedisLink.open(...)`."""

    def __init__(self, redis: Redis, where: str, run: str, give_up_s: float) -> None:
        self._redis = redis
        self._where = where
        self._prefix = f"agentloop:{run}"
        self._give_up_s = give_up_s
        self.tickets, self.groups, self.trainer, self.runtimes = map(
            self.name, ("tickets", "groups", "trainer", "runtimes")
        )

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: FleetSettings, run: str) -> AsyncIterator[RedisLink]:
        """Create a client; it connects with its first command.

        Raises:
            SettingsError: the redis package is not installed, or the URL is invalid.
        """
        try:
            import redis.asyncio
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ImportError as error:
            raise SettingsError(
                f"fleet.redis: the redis package is not installed: {install_hint('fleet')}"
            ) from error
        options: dict[str, Any] = {}
        if settings.password is not None:
            options["password"] = settings.password.get_secret_value()
        if urlsplit(settings.redis).scheme != "unix":
            options["socket_keepalive"] = True
        try:
            client = redis.asyncio.Redis.from_url(
                settings.redis,
                protocol=2,
                socket_connect_timeout=_ANSWER_S,
                socket_timeout=_ANSWER_S,
                retry=Retry(NoBackoff(), 0),  # `do` retries by itself
                **options,
            )
        except ValueError as error:
            raise SettingsError(f"fleet.redis: {error}") from error
        try:
            yield cls(client, settings.redis, run, settings.give_up_s)
        finally:
            with anyio.move_on_after(_ANSWER_S, shield=True):
                await client.aclose()

    def name(self, *parts: object) -> str:
        """Return the name of one of this run's keys."""
        return ":".join([self._prefix, *map(str, parts)])

    async def do(self, work: Callable[[Redis], Awaitable[T]]) -> T:
        """Run `work`, retrying with backoff while Redis is unavailable.

        `work` must be idempotent, since it may be executed more than once.

        Raises:
            ServerError: Redis was unavailable for too long, or refused the command.
            SettingsError: Redis rejected the login.
        """
        from redis import exceptions

        gone_since: float | None = None
        pause_s, longest_s = _BACKOFF_S
        while True:
            try:
                with anyio.fail_after(_ANSWER_S):
                    done = await work(self._redis)
            except (exceptions.RedisError, OSError) as error:
                if _is_shut_out(error):
                    raise SettingsError(
                        f"fleet.redis: {self._where} rejected the login: {error}; set the password "
                        "in the URL, in fleet.password or in AGENTLOOP_FLEET__PASSWORD"
                    ) from error
                if isinstance(error, exceptions.ResponseError):
                    if "UNBLOCKED" in str(error):  # a new trainer deleted the stream
                        continue
                    if "NOGROUP" in str(error):  # or Redis has lost it
                        await self.do(self._make_group)
                        continue
                if not _is_passing(error):
                    raise ServerError(f"Redis at {self._where}: {error}") from error
                now = time.monotonic()
                if gone_since is None:
                    gone_since = now
                    log.warning("Redis at %s is unavailable: %s", self._where, _format_error(error))
                if now - gone_since > self._give_up_s:
                    raise ServerError(
                        f"Redis at {self._where} was unavailable for {self._give_up_s:g} s "
                        f"(fleet.give_up_s): {_format_error(error)}"
                    ) from error
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
            else:
                if gone_since is not None:
                    log.warning("Redis at %s is available again", self._where)
                return done

    async def _make_group(self, redis: Redis) -> None:
        from redis.exceptions import ResponseError

        try:
            await redis.xgroup_create(self.tickets, READERS, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):  # another process created it first
                raise

    async def put_pieces(self, rows: str, data: bytes) -> int:
        """Store a result's rollouts for an hour; return the number of pieces."""
        pieces = [data[i : i + _PIECE_BYTES] for i in range(0, len(data), _PIECE_BYTES)]
        for name, piece in zip(self.piece_names(rows, len(pieces)), pieces, strict=True):
            await self.do(partial(_put, name, piece))
        return len(pieces)

    async def get_pieces(self, rows: str, num: int) -> bytes:
        """Read a result's rollouts. Raises ValueError if a piece is missing."""
        pieces: list[bytes] = []
        for name in self.piece_names(rows, num):
            found = await self.do(partial(_get, name))
            if found is None:
                raise ValueError(f"{name} is missing")
            pieces.append(found)
        return b"".join(pieces)

    def piece_names(self, rows: str, num: int) -> list[str]:
        return [self.name("rows", rows, number) for number in range(num)]


async def _get(name: str, redis: Redis) -> bytes | None:
    found: bytes | None = await redis.get(name)
    return found


async def _put(name: str, piece: bytes, redis: Redis) -> None:
    await redis.set(name, piece, px=_KEEP_PIECES_MS)


def _is_shut_out(error: Exception) -> bool:
    """Return whether the login failed, which the client may wrap in another error."""
    from redis import exceptions

    shut_out = (exceptions.AuthenticationError, exceptions.NoPermissionError)
    return isinstance(error, shut_out) or isinstance(error.__cause__, shut_out)


def _is_passing(error: Exception) -> bool:
    """Return whether the error is transient, so that the command should be retried."""
    from redis import exceptions

    if isinstance(error, exceptions.ResponseError):
        return any(word in str(error) for word in _LATER) or isinstance(
            error,
            exceptions.OutOfMemoryError
            | exceptions.ReadOnlyError
            | exceptions.ClusterDownError
            | exceptions.TryAgainError,
        )
    return isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError)


def _format_error(error: BaseException) -> str:
    return str(error) or f"no response within {_ANSWER_S:g} s"
