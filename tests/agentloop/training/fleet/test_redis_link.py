"""The client that survives outages of Redis, with commands that fail as told."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentloop.errors import ServerError, SettingsError
from agentloop.training.fleet import redis_link
from agentloop.training.fleet.redis_link import RedisLink
from agentloop.training.fleet.settings import FleetSettings
from tests.agentloop.training.fleet.fake_redis import FakeRedis

exceptions = pytest.importorskip(
    "redis.exceptions", reason="needs redis: pip install 'agentloop-rl[fleet]'"
)

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_link, "_BACKOFF_S", (0.0, 0.0))


def link_to(redis: FakeRedis, *, give_up_s: float = 60.0) -> RedisLink:
    return RedisLink(redis, "redis://here", "run", give_up_s)


def wrapped(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def test_the_keys_of_a_run_have_its_name() -> None:
    link = link_to(FakeRedis())
    assert link.trainer == "agentloop:run:trainer"
    assert link.name("runtime", "one", 2) == "agentloop:run:runtime:one:2"
    assert link.piece_names("r", 2) == ["agentloop:run:rows:r:0", "agentloop:run:rows:r:1"]


@pytest.mark.parametrize(
    "error",
    [
        exceptions.ConnectionError("refused"),
        exceptions.TimeoutError(),
        exceptions.BusyLoadingError("LOADING"),
        exceptions.OutOfMemoryError("OOM"),
        exceptions.ReadOnlyError("READONLY"),
        exceptions.ResponseError("MISCONF no disk"),
        exceptions.ResponseError("UNBLOCKED the stream no longer exists"),
        ConnectionResetError(),
    ],
    ids=repr,
)
async def test_a_command_is_repeated_while_redis_is_unavailable(error: Exception) -> None:
    redis = FakeRedis()
    redis.values["a"] = b"1"
    redis.errors.extend([error] * 3)
    assert await link_to(redis).do(lambda client: client.get("a")) == b"1"
    assert not redis.errors


async def test_an_outage_is_logged_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    redis = FakeRedis()
    redis.errors.extend([exceptions.ConnectionError("refused")] * 3)
    await link_to(redis).do(lambda client: client.get("a"))
    assert [record.message for record in caplog.records] == [
        "Redis at redis://here is unavailable: refused",
        "Redis at redis://here is available again",
    ]


async def test_an_outage_that_lasts_is_an_error_that_names_the_setting() -> None:
    async def fail(_: Any) -> None:
        await anyio.sleep(0.001)
        raise exceptions.ConnectionError("refused")

    with pytest.raises(ServerError, match=r"unavailable for 0 s \(fleet\.give_up_s\): refused"):
        await link_to(FakeRedis(), give_up_s=0).do(fail)


async def test_a_command_that_redis_refuses_is_not_repeated() -> None:
    redis = FakeRedis()
    redis.errors.extend([exceptions.ResponseError("WRONGTYPE")] * 2)
    with pytest.raises(ServerError, match="Redis at redis://here: WRONGTYPE"):
        await link_to(redis).do(lambda client: client.get("a"))
    assert len(redis.errors) == 1


@pytest.mark.parametrize(
    "error",
    [
        exceptions.AuthenticationError("WRONGPASS"),
        exceptions.NoPermissionError("NOPERM"),
        wrapped(exceptions.ConnectionError("closed"), exceptions.AuthenticationError("NOAUTH")),
    ],
    ids=repr,
)
async def test_a_rejected_login_names_the_setting(error: Exception) -> None:
    redis = FakeRedis()
    redis.errors.append(error)
    with pytest.raises(
        SettingsError, match=r"rejected the login: .*set the password .*fleet\.pass"
    ):
        await link_to(redis).do(lambda client: client.get("a"))


@pytest.mark.parametrize("other_was_first", [False, True])
async def test_a_lost_group_of_readers_is_created_again(other_was_first: bool) -> None:
    redis = FakeRedis()
    redis.errors.append(exceptions.ResponseError("NOGROUP No such key"))
    if other_was_first:
        redis.errors.append(exceptions.ResponseError("BUSYGROUP it exists"))
    link = link_to(redis)
    assert await link.do(lambda client: client.get("a")) is None
    assert (link.tickets in redis.streams) is not other_was_first


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(min_size=1, max_size=40), size=st.integers(1, 50))
async def test_what_is_put_in_pieces_comes_back(
    monkeypatch: pytest.MonkeyPatch, data: bytes, size: int
) -> None:
    monkeypatch.setattr(redis_link, "_PIECE_BYTES", size)
    redis = FakeRedis()
    link = link_to(redis)
    num = await link.put_pieces("rows", data)
    assert num == -(-len(data) // size) == len(redis.values)
    assert await link.get_pieces("rows", num) == data
    del redis.values[link.piece_names("rows", num)[-1]]
    with pytest.raises(ValueError, match=rf"agentloop:run:rows:rows:{num - 1} is missing"):
        await link.get_pieces("rows", num)


async def test_an_invalid_url_is_named() -> None:
    settings = FleetSettings(redis="redis://here:port/0", run="run")
    with pytest.raises(SettingsError, match=r"fleet\.redis: "):
        async with RedisLink.open(settings, "run"):
            pass


async def test_opening_it_needs_no_server() -> None:
    settings = FleetSettings(redis="redis://127.0.0.1:1", run="run", password="secret")
    async with RedisLink.open(settings, "run") as link:
        assert link.tickets == "agentloop:run:tickets"
