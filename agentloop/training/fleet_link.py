"""What both ends of a fleet share: a connection that outlives Redis, and what goes over it.

    agentloop:RUN:trainer       what the trainer says, while it lives: a `Word`
    agentloop:RUN:tickets       stream: groups to roll out, for one of the runtimes each
    agentloop:RUN:groups        stream: what came of them, for the trainer
    agentloop:RUN:rows:NAME:N   a result's rollouts, in pieces, where no folder is shared
    agentloop:RUN:runtimes      set of names; agentloop:RUN:runtime:NAME: what each says

Redis is a way, never the truth: that is the trainer's journal. So all of it may be lost at any
moment; what is said once is said again and again, and what is asked for is asked for again.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self, TypeAlias, TypeVar
from urllib.parse import unquote, urlsplit

import anyio
import pydantic

from agentloop.agent.rollout import Budget
from agentloop.distribution import install_hint
from agentloop.errors import ServerError, SettingsError
from agentloop.groups.tasks import Task
from agentloop.inference.sglang import Pause
from agentloop.plain_json import ValidText, dumps, loads

__all__ = [
    "READERS",
    "Announced",
    "FleetSettings",
    "Link",
    "Redis",
    "Result",
    "Said",
    "Ticket",
    "Word",
    "packed",
    "unpacked",
]

log = logging.getLogger(__name__)

T = TypeVar("T")

Redis: TypeAlias = Any
"""`redis.asyncio.Redis`, which is an extra, and whose types change from version to version."""

READERS = "runtimes"
"""The consumer group of the tickets."""

_ANSWER_S = 20.0  # for Redis to answer a command; reads that wait do so for a second
_BACKOFF_S = (0.05, 2.0)
_PIECE_BYTES = 4 << 20
_KEEP_PIECES_MS = 3_600_000  # of a result that never became whole
# Redis answers, but cannot do it now.
_LATER = ("OOM", "MISCONF", "READONLY", "LOADING", "TRYAGAIN", "CLUSTERDOWN")


class FleetSettings(pydantic.BaseModel):
    """Several machines roll out for one learner; they meet at a Redis."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    redis: str = pydantic.Field(
        "",
        description="Such as redis://127.0.0.1:6379/0, or rediss:// for TLS: then the trainer "
        "rolls out nothing itself; `agentloop rollouts` does, anywhere. None: no fleet.",
    )
    password: pydantic.SecretStr | None = pydantic.Field(
        None, description="Of Redis, where it is not in the URL."
    )
    run: str = pydantic.Field(
        "",
        pattern=r"^[\w.-]*$",
        description="The name that trainer and runtimes meet under; none: that of the run.",
    )
    lease_s: float = pydantic.Field(
        30.0,
        gt=0,
        description="A runtime that is not heard of for so long is dead: others take its groups. "
        "The trainer says it.",
    )
    max_tries: int = pydantic.Field(
        5,
        ge=1,
        description="Attempts per group before the run fails: its runtimes or servers died, or "
        "its rollouts could not be read.",
    )
    give_up_s: float = pydantic.Field(
        600.0,
        gt=0,
        description="For how long Redis, the trainer, or all runtimes may be gone at a time.",
    )
    max_result_mib: int = pydantic.Field(
        512, ge=1, description="Of a group's rollouts, compressed, on their way through Redis."
    )

    @pydantic.model_validator(mode="before")
    @classmethod
    def _keep_the_secret(cls, values: Any) -> Any:
        """Settings are written into the run's folder; secrets are not."""
        url = urlsplit(str(values.get("redis") or "") if isinstance(values, Mapping) else "")
        if url.password is None:
            return values
        user = f"{url.username}@" if url.username else ""
        secret, where = url.netloc.rsplit("@", 1)
        there = url.geturl().replace(f"{secret}@{where}", user + where, 1)
        return {**values, "redis": there, "password": unquote(url.password)}

    @pydantic.field_validator("redis")
    @classmethod
    def _is_a_url(cls, redis: str) -> str:
        url = urlsplit(redis)
        if redis and url.scheme not in ("redis", "rediss", "unix"):
            raise ValueError(f"{redis!r} is not of the form redis://HOST:PORT/0")
        if url.scheme == "unix" or "@" in url.netloc:
            return redis
        # A password that ends the address early would be taken for a part of it, and be kept.
        rest = url.path + url.fragment or url.query
        if "@" in rest:
            raise ValueError("/, ? and # in a URL's password are written as %2F, %3F and %23")
        return redis


class _Said(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)

    def to_json(self) -> bytes:
        return dumps(self.model_dump())

    @classmethod
    def of_json(cls, data: bytes) -> Self:
        """Read what `to_json` wrote."""
        return cls.model_validate(loads(data))


class Announced(_Said):
    """The weights that runtimes are to have.

    Attributes:
        number: of the hand-over, in the trainer's life: a version may come twice.
        pause: what becomes of turns that are being generated (`weights.pause`).
        checksum: as the servers compute it; empty until it is known which one is right.
    """

    number: int
    version: str
    folder: str
    timeout_s: float
    pause: Pause = "retract"
    checksum: str = ""


class Word(_Said):
    """What the trainer says, again and again.

    Attributes:
        life: of this trainer's process: what another life has asked for, nobody waits for.
        recipe: settings that runtimes must have in common with it.
        folder: a folder that runtimes may see, too: then there is a file in it named as the life.
        over: the run has come to its end.
    """

    life: str
    recipe: Mapping[str, Any]
    lease_s: float
    max_tries: int
    max_result_mib: int
    folder: str
    weights: Announced | None = None
    over: bool = False


class Said(_Said):
    """What a runtime says of itself: the hand-over that it has done, of which life, and why not."""

    life: str = ""
    number: int = -1
    checksum: str = ""
    num_servers: int = 0
    error: ValidText = ""


class Ticket(_Said):
    """A group to be rolled out; the arguments of `RollsOut.group`."""

    life: str
    name: str
    task: Task
    size: int
    budget: Budget
    oldest: int

    @property
    def key(self) -> str:
        return f"{self.life}-{self.name}"


class Result(_Said):
    """What came of a ticket: `error` and its `message`, or rollouts.

    Attributes:
        rows: the name of its rollouts, which no other result has, for two runtimes may have done
            one ticket: of a file in the trainer's folder, or of pieces in Redis.
        num_pieces: of them; 0: it is a file.
    """

    key: str
    runtime: str
    error: str = ""
    message: ValidText = ""
    teaches: bool = False
    figures: Mapping[str, Any] = {}
    rows: str = ""
    num_pieces: int = 0


def packed(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Rows as bytes. Takes its time: for a thread."""
    return zlib.compress(dumps(list(rows)), 1)


def unpacked(data: bytes) -> list[dict[str, Any]]:
    """Raises ValueError: it is not what `packed` gave."""
    try:
        rows = loads(zlib.decompress(data))
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not isinstance(rows, list):
        raise ValueError("a list of rows is expected")
    return rows


class Link:
    """A connection to Redis. Use `Link.open(...)`."""

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
    async def open(cls, settings: FleetSettings, run: str) -> AsyncIterator[Link]:
        """Connects when it is first asked for something.

        Raises:
            SettingsError: the client is not installed, or the URL is none.
        """
        try:
            import redis.asyncio
            from redis.asyncio.retry import Retry
            from redis.backoff import NoBackoff
        except ImportError as error:
            raise SettingsError(
                f"fleet.redis: the client is not installed: {install_hint('fleet')}"
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
                retry=Retry(NoBackoff(), 0),  # `do` knows better
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
        """Of a key of this run."""
        return ":".join([self._prefix, *map(str, parts)])

    async def do(self, work: Callable[[Redis], Awaitable[T]]) -> T:
        """`work`, again and again while Redis is gone, with backoff: so it may be done twice.

        Raises:
            ServerError: Redis was gone for too long, or refused it.
            SettingsError: it does not let us in.
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
                        f"fleet.redis: {self._where} does not let us in: {error}; the password may "
                        "be in the URL, in fleet.password or in AGENTLOOP_FLEET__PASSWORD"
                    ) from error
                if isinstance(error, exceptions.ResponseError):
                    if "UNBLOCKED" in str(error):  # a trainer began anew
                        continue
                    if "NOGROUP" in str(error):  # or it has lost it
                        await self.do(self._make_group)
                        continue
                if not _is_passing(error):
                    raise ServerError(f"Redis at {self._where}: {error}") from error
                now = time.monotonic()
                if gone_since is None:
                    gone_since = now
                    log.warning("Redis at %s does not answer: %s", self._where, _said(error))
                if now - gone_since > self._give_up_s:
                    raise ServerError(
                        f"Redis at {self._where} was gone for {self._give_up_s:g} s "
                        f"(fleet.give_up_s): {_said(error)}"
                    ) from error
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
            else:
                if gone_since is not None:
                    log.warning("Redis at %s answers again", self._where)
                return done

    async def _make_group(self, redis: Redis) -> None:
        from redis.exceptions import ResponseError

        try:
            await redis.xgroup_create(self.tickets, READERS, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):  # somebody was faster
                raise

    async def put_pieces(self, rows: str, data: bytes) -> int:
        """Rows of a result; returns the number of pieces. They go by themselves in an hour."""
        pieces = [data[i : i + _PIECE_BYTES] for i in range(0, len(data), _PIECE_BYTES)]
        for name, piece in zip(self.piece_names(rows, len(pieces)), pieces, strict=True):
            await self.do(partial(_put, name, piece))
        return len(pieces)

    async def get_pieces(self, rows: str, num: int) -> bytes:
        """Raises ValueError: one of them is gone."""
        pieces: list[bytes] = []
        for name in self.piece_names(rows, num):
            found = await self.do(partial(_get, name))
            if found is None:
                raise ValueError(f"{name} is gone")
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
    """Whether it was the password; the client hides it in another error."""
    from redis import exceptions

    shut_out = (exceptions.AuthenticationError, exceptions.NoPermissionError)
    return isinstance(error, shut_out) or isinstance(error.__cause__, shut_out)


def _is_passing(error: Exception) -> bool:
    """Whether to try it again."""
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


def _said(error: BaseException) -> str:
    return str(error) or f"not within {_ANSWER_S:g} s"
