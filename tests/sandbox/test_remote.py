"""A pool over hosts: each host is a real service over local workers in this process."""

from __future__ import annotations

import collections
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import anyio.abc
import pydantic
import pytest
from pydantic import SecretStr

from agentloop.sandbox import (
    CallResult,
    CallStatus,
    LostBy,
    Pool,
    PoolSettings,
    SandboxUnavailable,
    Session,
    SessionLost,
)
from agentloop.sandbox.protocol import FrameReader, encode
from agentloop.sandbox.remote import HostLink
from agentloop.sandbox.serve import serving
from agentloop.sandbox.serve_settings import SandboxServeSettings
from tests.patience import patient
from tests.sandbox.conftest import BARE
from tests.sandbox.test_pool import FOREVER, endless_before, wait_until
from tests.sandbox.test_sessions import wait_until_lost

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]  # real workers are started

CALL = {"code": FOREVER, "stdin": "", "timeout_s": 600}


class Host:
    """A host's service; `stop` simulates its loss."""

    url = ""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._scope = anyio.CancelScope()
        self._stopped = anyio.Event()

    async def serve(
        self, settings: SandboxServeSettings, *, task_status: anyio.abc.TaskStatus[None]
    ) -> None:
        with self._scope:
            async with serving(self.pool, settings) as self.url:
                task_status.started()
                await anyio.sleep_forever()
        self._stopped.set()

    async def stop(self) -> None:
        self._scope.cancel()
        await self._stopped.wait()


@asynccontextmanager
async def host(port: int = 0, token: str | None = None, **more: Any) -> AsyncIterator[Host]:
    settings = SandboxServeSettings(port=port, token=SecretStr(token) if token else None)
    async with Pool(BARE.model_copy(update=more)) as pool, anyio.create_task_group() as group:
        made = Host(pool)
        await group.start(made.serve, settings)
        yield made
        await made.stop()


def over(*hosts: Host, **more: Any) -> Pool:
    return Pool(PoolSettings(hosts=[host.url for host in hosts], **more))


async def test_call_on_a_host() -> None:
    async with host() as far, over(far) as pool:
        result = await pool.run("print(input())\n6 * 7", stdin="größe \ud800")
        assert (result.status, result.stdout, result.result) == (CallStatus.OK, "größe ?\n", "42")
        assert (result.attempt, result.worker_id) == (
            1,
            far.pool._queue.workers[0].link.worker_id,
        )
        failed = await pool.run("1 / 0")
        assert failed.error is not None
        assert failed.error.type == "ZeroDivisionError"
        greedy = await pool.run("x = b'1' * 10**8", memory_mib=50)
        assert greedy.status is CallStatus.OOM
        stats = pool.stats()
        assert (stats["backend"], stats["workers"], stats["slots"]) == ("host", 1, 8)
        assert stats["layers"] == far.pool.stats()["layers"]


async def test_many_calls_over_two_hosts_each_its_own_answer() -> None:
    answers: dict[int, CallResult] = {}
    async with host() as single, host() as two, over(single, two) as pool:

        async def call(n: int) -> None:
            answers[n] = await pool.run(f"{n} * 2")

        async with anyio.create_task_group() as group:
            for n in range(200):
                group.start_soon(call, n)
        workers = {w.link.worker_id: far for far in (single, two) for w in far.pool._queue.workers}
    assert {n: answer.result for n, answer in answers.items()} == {
        n: str(2 * n) for n in range(200)
    }
    shares = collections.Counter(workers[answer.worker_id] for answer in answers.values())
    assert len(shares) == 2
    assert min(shares.values()) >= 2 * BARE.workers  # what each was given at once


async def test_calls_go_where_others_are_not() -> None:
    async with host() as busy, host() as idle, anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(busy.pool.run, FOREVER, "", 600)
        async with over(busy, idle) as pool:
            await wait_until(
                lambda: pool._queue.workers[0].num_available != pool._queue.workers[1].num_available
            )
            ids = {(await pool.run("1")).worker_id for _ in range(4)}
            assert ids == {idle.pool._queue.workers[0].link.worker_id}
        group.cancel_scope.cancel()


async def test_call_of_a_lost_host_runs_on_another() -> None:
    async with host() as single:
        code = f"{endless_before(time.time())}\n7"
        async with host() as two, over(single, two) as pool:
            results: list[CallResult] = []

            async def call() -> None:
                results.append(await pool.run(code))

            async with anyio.create_task_group() as group:
                for _ in range(4):
                    group.start_soon(call)
                await wait_until(lambda: (single.pool.stats()["busy"], len(results)) == (2, 2))
                await single.stop()
            assert [result.result for result in results] == ["7"] * 4
            assert [result.attempt for result in results] == [1, 1, 2, 2]
            assert single.pool.stats()["busy"] == 0
            assert pool.stats()["workers"] == 1


@pytest.mark.full
async def test_host_that_comes_back_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.sandbox.pool.BACKOFF_S", (0.1,))
    async with host() as first, over(first) as pool, anyio.create_task_group() as group:
        await first.stop()
        await wait_until(lambda: pool.stats()["workers"] == 0)
        group.start_soon(pool.run, "1")
        await wait_until(lambda: pool.stats()["waiting"] == 1)
        async with host(int(first.url.rpartition(":")[2])):
            await wait_until(lambda: pool.stats()["calls"] == {"ok": 1})


async def test_pool_opens_if_at_least_one_host_responds() -> None:
    async with host() as far:
        hosts = [far.url, "http://127.0.0.1:1"]
        async with Pool(PoolSettings(hosts=hosts)) as pool:
            assert (await pool.run("1")).ok
    with pytest.raises(SandboxUnavailable, match="cannot connect to the host"):
        async with Pool(PoolSettings(hosts=["http://127.0.0.1:1"])):
            pass


async def test_host_that_accepts_and_says_nothing_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        pool = Pool(PoolSettings(hosts=[url], start_timeout_s=0.2))
        with (
            anyio.fail_after(patient(10)),
            pytest.raises(SandboxUnavailable, match="no response in time"),
        ):
            await pool.__aenter__()


async def test_cancelling_the_caller_kills_the_call_over_there() -> None:
    async with host() as far, over(far) as pool:
        async with anyio.create_task_group() as group:
            group.start_soon(pool.run, FOREVER, "", 600)
            await wait_until(lambda: far.pool.stats()["busy"] == 1)
            group.cancel_scope.cancel()
        await wait_until(lambda: far.pool.stats()["busy"] == 0)
        await wait_until(lambda: pool.stats()["busy"] == 0)
        assert (await pool.run("1")).ok


async def test_pool_that_ends_takes_its_calls_and_sessions_with_it() -> None:
    async with host() as far:
        async with over(far) as pool, anyio.create_task_group() as group, pool.session() as s:
            await s.run("1")
            group.start_soon(pool.run, FOREVER, "", 600)
            await wait_until(lambda: far.pool.stats()["busy"] == 1)
            group.cancel_scope.cancel()
        await wait_until(lambda: far.pool.stats()["busy"] == 0)
        await wait_until(lambda: far.pool.stats()["sessions"] == 0)


async def test_session_on_a_host() -> None:
    async with host() as far, over(far) as pool:
        async with pool.session() as session, pool.session() as another:
            await session.run("x = 41")
            assert (await session.run("x + 1")).result == "42"
            assert (await another.run("x")).error is not None
            assert far.pool.stats()["sessions"] == 2
        await wait_until(lambda: far.pool.stats()["sessions"] == 0)


async def lost_by(session: Session) -> LostBy:
    with anyio.fail_after(patient(15)), pytest.raises(SessionLost) as lost:
        await session.run("1")
    return lost.value.by


async def test_session_that_ended_itself_on_a_host_is_reported() -> None:
    async with host() as far, over(far) as pool:
        async with pool.session() as session:
            assert (await session.run("import os; os._exit(1)")).exit_code == 1
            assert session.lost_by is LostBy.PROGRAM
            assert await lost_by(session) is LostBy.PROGRAM
        async with pool.session() as session:
            await session.run("import os, threading; threading.Timer(0.1, os._exit, (1,)).start()")
            await wait_until_lost(session)
            assert await lost_by(session) is LostBy.PROGRAM
        assert (await pool.run("1")).ok


async def test_session_lost_with_a_hosts_worker_blames_nobody() -> None:
    async with host() as far, over(far) as pool, pool.session() as session:
        await session.run("x = 1")
        far.pool._queue.workers[0].link.lose("it died")
        assert await lost_by(session) is LostBy.INFRASTRUCTURE
        assert session.lost_by is LostBy.INFRASTRUCTURE


async def test_cancelled_cell_on_a_host_loses_the_session() -> None:
    async with host() as far, over(far) as pool, pool.session() as session:
        await session.run("1")
        async with anyio.create_task_group() as group:
            group.start_soon(session.run, FOREVER, "", 600)
            await wait_until(lambda: far.pool.stats()["busy"] == 1)
            group.cancel_scope.cancel()
        assert await lost_by(session) is LostBy.CALLER
        await wait_until(lambda: pool.stats()["busy"] == far.pool.stats()["busy"] == 0)
        assert far.pool.stats()["lost"] == 0


async def test_closed_session_stops_waiting_for_a_free_host() -> None:
    async with host(max_sessions=1) as far, over(far) as pool, over(far) as another:
        async with pool.session() as first, anyio.create_task_group() as group:
            await first.run("1")
            async with another.session() as second:
                group.start_soon(second.run, "1")
                await wait_until(lambda: another.stats()["busy"] == 1)
            await wait_until(lambda: another.stats()["busy"] == 0)
        await wait_until(lambda: far.pool.stats()["sessions"] == 0)


async def test_token_is_needed() -> None:
    async with host(token="hush") as far:
        async with over(far, hosts_token=SecretStr("hush")) as pool:
            assert (await pool.run("1")).ok
        with pytest.raises(SandboxUnavailable, match="wrong token"):
            async with over(far):
                pass


class Names(aiohttp.abc.AbstractResolver):
    """A network in which all names resolve to this machine."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[aiohttp.abc.ResolveResult]:
        return [
            {
                "hostname": host,
                "host": "127.0.0.1",
                "port": port,
                "family": socket.AF_INET,
                "proto": 0,
                "flags": 0,
            }
        ]

    async def close(self) -> None:
        pass


async def test_host_with_a_token_is_reached_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of the name is that in agentloop/cli/recipes/paper.toml."""
    monkeypatch.setattr(aiohttp.connector, "DefaultResolver", lambda loop: Names())
    async with host(token="hush") as far:
        far.url = far.url.replace("127.0.0.1", "node-4")
        async with over(far, hosts_token=SecretStr("hush")) as pool:
            assert (await pool.run("1")).ok
    async with host() as far:
        far.url = far.url.replace("127.0.0.1", "node-4")
        with pytest.raises(SandboxUnavailable, match="403"):
            async with over(far):
                pass


async def test_overloaded_host_is_reported_and_queue_times_are_added() -> None:
    async with host(workers=1) as far, over(far) as pool:
        far.pool._calls.MAX_WAITING = 1
        results: list[CallResult] = []

        async def call() -> None:
            results.append(await pool.run("1"))

        async with anyio.create_task_group() as group, anyio.create_task_group() as first:
            first.start_soon(far.pool.run, FOREVER, "", 600)
            await wait_until(lambda: far.pool.stats()["busy"] == 1)
            began = time.monotonic()
            group.start_soon(call)
            await wait_until(lambda: far.pool.stats()["waiting"] == 1)
            refused = await pool.run("1")
            waiting = time.monotonic()
            await anyio.sleep(0.1)
            held_s = time.monotonic() - waiting
            first.cancel_scope.cancel()
        took_s = time.monotonic() - began
    assert refused.status is CallStatus.OVERLOADED
    (result,) = results
    assert result.ok
    assert held_s <= result.queue_s <= took_s


@pytest.mark.parametrize(
    ("garbage", "says"),
    [
        (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes"),
        (b"\0\0\0\2{]", "not JSON"),
        (encode({"no": 1}), "unknown frame: {'no': 1}"),
        (encode({"op": "run"}), "unknown frame"),
        (encode({"op": "run", **CALL, "id": [1]}), "unknown frame"),
        (encode({"op": "kill", "id": {}}), "unknown frame"),
        (encode({"op": "close", "session": []}), "unknown frame"),
        (encode({"op": "run", "id": 1, **CALL}) * 2, "id 1 belongs to a call that is still open"),
    ],
)
async def test_garbage_ends_its_own_connection_alone(garbage: bytes, says: str) -> None:
    async with host() as far, over(far) as pool, aiohttp.ClientSession() as http:
        async with http.ws_connect(far.url + "/v1/link") as socket:
            await socket.send_bytes(garbage)
            with anyio.fail_after(patient(15)):
                while (last := await socket.receive()).type is aiohttp.WSMsgType.BINARY:
                    pass
        assert (last.type, last.data) == (
            aiohttp.WSMsgType.CLOSE,
            aiohttp.WSCloseCode.PROTOCOL_ERROR,
        )
        assert says in (last.extra or "")
        assert (await pool.run("1")).ok
        await wait_until(lambda: far.pool.stats()["busy"] == 0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"code": {"a": 1}}, "code: Input should be a valid string"),
        ({"code": None}, "code: Input should be a valid string"),
        ({"stdin": 7}, "stdin: Input should be a valid string"),
        ({"timeout_s": "5"}, "timeout_s: Input should be a valid number"),
        ({"timeout_s": 0}, "timeout_s: Input should be greater than 0"),
        ({"timeout_s": 1e9}, "timeout_s: Input should be less than or equal to 3600"),
        ({"session": [1]}, "session: Input should be a valid integer"),
    ],
)
async def test_wrong_call_is_answered_and_reaches_no_worker(wrong: Any, says: str) -> None:
    async with host() as far, aiohttp.ClientSession() as http:
        async with http.ws_connect(far.url + "/v1/link") as socket:
            reader = FrameReader()

            async def done(frame: dict[str, Any]) -> dict[str, Any]:
                await socket.send_bytes(encode({"op": "run", **CALL, "code": "6 * 7", **frame}))
                with anyio.fail_after(patient(15)):
                    while True:
                        for answer in reader.feed(await socket.receive_bytes()):
                            if answer["op"] == "done":
                                return answer

            answer = await done({"id": 2, **wrong})
            assert answer == {"op": "done", "id": 2, "status": "sandbox_error", "why": says}
            assert (await done({"id": 3}))["result"] == "42"
        assert far.pool.stats()["calls"] == {"ok": 1}
        assert far.pool.stats()["lost"] == 0


def test_result_of_another_version_loses_the_link() -> None:
    link = HostLink("x")
    pending = link.submit({"id": 1, "op": "run", "code": "", "stdin": ""})
    link.feed(encode({"op": "done", "id": 1, "status": "ok", "run_s": 0.1}))
    assert pending.reply is None
    assert pending.done.is_set()
    assert "version" in link.why


@pytest.mark.parametrize("url", ["ftp://x", "box:8010", "http://", ""])
def test_host_is_a_url(url: str) -> None:
    with pytest.raises(pydantic.ValidationError, match="http://host:port"):
        PoolSettings(hosts=[url])


async def test_host_that_has_moved_is_used_at_its_new_url() -> None:
    async with host() as old, host() as new, over(old) as pool:
        assert (await pool.run("1")).result == "1"
        pool.move_host(old.url, new.url)
        await old.stop()
        result = await pool.run("2")
        assert result.result == "2"
        assert result.worker_id == new.pool._queue.workers[0].link.worker_id
