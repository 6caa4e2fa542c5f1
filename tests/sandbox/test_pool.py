"""The pool over local workers: results, waiting, cancelling, sessions, losses."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentloop import sandbox
from agentloop.sandbox import (
    CallResult,
    CallStatus,
    LostBy,
    Pool,
    PoolSettings,
    SandboxUnavailable,
    SessionLost,
    backend,
)
from agentloop.sandbox.link import MAX_SILENT_BEATS, Link
from agentloop.sandbox.process import ProcessBackend
from agentloop.sandbox.protocol import FrameReader, encode
from agentloop.sandbox.slots import Need, PoolWorker, SlotQueue, SlotWaiter
from agentloop.sandbox.worker.kernel import remove_below
from agentloop.sandbox.worker.wire import INLINE_JOB
from tests.patience import patient
from tests.sandbox.chaos import children, descendants, kill
from tests.sandbox.conftest import BARE, SINGLE

pytestmark = pytest.mark.timeout(60)  # real workers are started

FOREVER = "import time\nprint('begun', flush=True)\nwhile True: time.sleep(1)"


def endless_before(moment: float) -> str:
    """Return a program that never ends in workers that existed at `moment` (time.time()) and
    ends at once in later ones, judged by the age of its directory."""
    return f"import os, time\nwhile os.stat('.').st_mtime < {moment!r}: time.sleep(0.01)"


def started_since(earlier: set[int]) -> set[int]:
    """Return the processes of workers started since `others`, the children of this process
    then. Those of an existing pool come and go meanwhile."""
    outers = set(children(os.getpid())) - earlier
    return outers.union(*map(descendants, outers))


def runs(pid: int) -> bool:
    """Return whether a process runs. A zombie does not, whoever has to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def wait_until(happened: object, within_s: float = 30) -> None:
    assert callable(happened)
    with anyio.fail_after(patient(within_s)):
        while not happened():  # noqa: ASYNC110 - what happens in the kernel sets no event
            await anyio.sleep(0.01)


async def test_output_value_and_times(pool: Pool) -> None:
    before = time.monotonic_ns()
    result = await pool.run("import sys\nprint('out')\nprint('err', file=sys.stderr)\n6 * 7")
    assert (result.status, result.exit_code, result.signal) == (CallStatus.OK, 0, None)
    assert (result.stdout, result.stderr, result.result) == ("out\n", "err\n", "42")
    assert (result.stdout_bytes, result.stderr_bytes, result.truncated) == (4, 4, False)
    assert result.started_ns is not None
    assert before < result.started_ns < time.monotonic_ns()
    assert result.max_rss > 1 << 20
    assert result.run_s > 0
    assert result.attempt == 1


async def test_stdin(pool: Pool) -> None:
    text = "größe\n" * 50_000
    result = await pool.run("import sys; print(len(sys.stdin.read()))", stdin=text)
    assert result.stdout.strip() == str(len(text))
    ended = (await pool.run("input()")).error
    assert ended is not None
    assert (ended.type, ended.message, ended.line) == ("EOFError", "EOF when reading a line", 1)


@pytest.mark.parametrize("size", [1, 1000, INLINE_JOB - 200, INLINE_JOB, INLINE_JOB + 1])
async def test_stdin_of_any_size_is_a_file_of_its_own(pool: Pool, size: int) -> None:
    code = "import os, sys\ntext = sys.stdin.read()\nsys.stdin.seek(0)\n"
    code += "assert sys.stdin.read() == text\n(len(text), set(text), os.listdir())"
    result = await pool.run(code, stdin="x" * size)
    assert result.result == repr((size, {"x"}, [])), result


async def test_cell_has_its_stdin_where_its_directory_is_full() -> None:
    fill = "import os\nf = open('big', 'wb', 0)\n"
    fill += (
        "try:\n  while True: f.write(bytes(1 << 16))\nexcept OSError as error: full = error.errno"
    )
    async with Pool(BARE.model_copy(update={"scratch_mib": 1})) as pool, pool.session() as session:
        assert (await session.run("input()", stdin="first")).result == "'first'"
        assert (await session.run(fill)).ok
        result = await session.run("input(), full", stdin="second")
        assert result.result == repr(("second", errno.ENOSPC)), result


async def test_traceback_shows_the_program_alone(pool: Pool) -> None:
    result = await pool.run("def f(x):\n    return 1 / x\n\nprint('a')\nf(0)\n")
    assert result.status is CallStatus.ERROR
    assert result.error is not None
    assert (result.error.type, result.error.line) == ("ZeroDivisionError", 2)
    assert "worker" not in result.stderr
    assert "return 1 / x" in result.stderr
    assert result.stdout == "a\n"


async def test_traceback_marks_the_place_in_the_last_line(pool: Pool) -> None:
    result = await pool.run("x = 0\n1 / x")
    assert "    1 / x\n    ~~^~~\n" in result.stderr


async def test_syntax_error_names_its_line(pool: Pool) -> None:
    result = await pool.run("x = 1\nx = = 2")
    assert result.error is not None
    assert (result.error.type, result.error.line) == ("SyntaxError", 2)


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [
        ("raise SystemExit", CallStatus.OK, 0),
        ("raise SystemExit(3)", CallStatus.ERROR, 3),
        ("raise SystemExit('why')", CallStatus.ERROR, 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", CallStatus.KILLED, None),
    ],
)
async def test_exit(pool: Pool, code: str, status: CallStatus, exit_code: int | None) -> None:
    result = await pool.run(code)
    if code.endswith("SIGKILL)") and result.status is CallStatus.OK:
        pytest.skip("pid 1 of its own namespace can't kill itself")
    assert (result.status, result.exit_code) == (status, exit_code)


async def test_threads_and_exit_handlers_finish(pool: Pool) -> None:
    result = await pool.run(
        "import atexit, threading, time\natexit.register(print, 'exit')\n"
        "go = threading.Event()\n"
        "late = lambda: (go.wait(), time.sleep(0.05), print('thread'))\n"
        "threading.Thread(target=late).start()\nprint('main'); go.set()"
    )
    assert result.stdout == "main\nthread\nexit\n"


async def test_calls_do_not_share_state(pool: Pool) -> None:
    await pool.run("import builtins; builtins.left = 1; open('left', 'w').close()")
    result = await pool.run("import os; print('left' in globals(), os.listdir('.'))\nleft")
    assert result.stdout == "False []\n"
    assert result.error is not None
    assert result.error.type == "NameError"


async def test_long_output_keeps_head_and_tail(pool: Pool) -> None:
    result = await pool.run("for i in range(50_000): print(i)")
    assert result.truncated
    assert result.stdout.startswith("0\n1\n")
    assert result.stdout.endswith("49998\n49999\n")
    assert len(result.stdout) < 70_000
    assert result.stdout_bytes == sum(len(f"{i}\n") for i in range(50_000))


@pytest.mark.parametrize("shift", range(4))
@pytest.mark.parametrize("character", "\u00e9\u20ac\U0001f600")
async def test_long_output_is_not_cut_inside_a_character(
    pool: Pool, character: str, shift: int
) -> None:
    result = await pool.run(f"print({'x' * shift!r} + {character!r} * 60_000)")
    assert result.truncated
    assert "\ufffd" not in result.stdout
    head, note, tail = result.stdout.split("\n", 2)
    num_left_out = int(note.split()[1])
    assert len(head.encode()) + num_left_out + len(tail.encode()) == result.stdout_bytes


async def test_output_cut_by_a_kill_ends_with_a_whole_character(pool: Pool) -> None:
    half = "import os, time\nos.write(1, 'x\u00e9'.encode()[:2])\n"
    assert (await pool.run(f"{half}time.sleep(60)", timeout_s=1)).stdout == "x"
    assert (await pool.run(f"{half}time.sleep(0)")).stdout == "x\ufffd"  # the program's own end


async def test_output_in_packets_is_read_whole(pool: Pool) -> None:
    code = (
        "import fcntl, os\n"
        "fcntl.fcntl(1, fcntl.F_SETFL, fcntl.fcntl(1, fcntl.F_GETFL) | os.O_DIRECT)\n"
        "for number in range(12): os.write(1, b'%d\\n' % number)"
    )
    assert (await pool.run(code)).stdout == "".join(f"{number}\n" for number in range(12))


@pytest.mark.parametrize("separator", ["\f", "\v", "\x1c", "\x85", "\u2028", "\r", "\r\n"])
async def test_traceback_shows_the_line_that_failed(pool: Pool, separator: str) -> None:
    code = f'text = """a{separator}b"""\n# {separator}\nvalue = 0\n1 / value\nlast = 1'
    result = await pool.run(code.replace("\n", "\r\n") if separator == "\r" else code)
    assert result.error is not None
    assert "    1 / value\n" in result.error.traceback


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("rows", "3"),
        ("rows;", None),
        ("rows ; # the rows;\n\n", None),
        ("(\n  rows  # ;\n) ;", None),
        ("';'", "';'"),
        ("rows  # ;", "3"),
        ("x = 1; rows", "3"),
        ("'\u00e9;'; rows;", None),
    ],
)
async def test_semicolon_hides_the_last_value(pool: Pool, cell: str, shown: str | None) -> None:
    async with pool.session() as session:
        await session.run("rows = 3")
        result = await session.run(cell)
        assert (result.status, result.result) == (CallStatus.OK, shown)


async def test_large_code(pool: Pool) -> None:
    result = await pool.run(f"x = {'a' * 500_000!r}\nlen(x)")
    assert result.result == "500000"


@pytest.mark.parametrize(
    ("code", "stdin", "size"),
    [
        ("#" * 9_000_000, "", "9,000,000"),
        ("1", "\u00e9" * 4_500_000, "9,000,001"),
        ("#" + "\U0001f600" * 6_000_000 + "\ud800", "", "24,000,004"),
    ],
)
async def test_too_large_is_refused_as_the_programs_fault(
    pool: Pool, code: str, stdin: str, size: str
) -> None:
    result = await pool.run(code, stdin)
    assert (result.status, result.exit_code) == (CallStatus.ERROR, 1)
    assert result.error is not None
    assert result.error.message == f"code and stdin have {size} bytes; the maximum is 8,388,608"
    assert result.error.message in result.stderr
    assert pool.stats()["busy"] == 0


async def test_many_at_once_each_its_own_answer(pool: Pool) -> None:
    answers: dict[int, str | None] = {}

    async def double(n: int) -> None:
        answers[n] = (await pool.run(f"{n} * 2")).result

    async with anyio.create_task_group() as group:
        for n in range(200):
            group.start_soon(double, n)
    assert answers == {n: str(2 * n) for n in range(200)}
    assert pool.stats()["busy"] == 0


async def test_cancelling_the_caller_kills_the_call(pool: Pool) -> None:
    with anyio.move_on_after(0.3):
        await pool.run(FOREVER, timeout_s=600)
    await wait_until(lambda: pool.stats()["busy"] == 0)
    assert (await pool.run("1")).ok


async def test_waiting_is_bounded_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.sandbox.calls.Calls.MAX_WAITING", 2)
    async with Pool(BARE.model_copy(update={"workers": 1})) as pool:
        order: list[str] = []

        async def call(name: str) -> None:
            order.append(f"{name} {(await pool.run('1')).status}")

        async with anyio.create_task_group() as group:
            async with anyio.create_task_group() as first:
                first.start_soon(pool.run, FOREVER, "", 600)
                await wait_until(lambda: pool.stats()["busy"] == 1)
                group.start_soon(call, "second")
                group.start_soon(call, "third")
                await wait_until(lambda: pool.stats()["waiting"] == 2)
                await call("fourth")
                first.cancel_scope.cancel()
        assert order == ["fourth overloaded", "second ok", "third ok"]


async def test_call_of_a_lost_worker_runs_again() -> None:
    remaining = set(children(os.getpid()))
    async with Pool(SINGLE) as pool:
        results = []
        code = f"{endless_before(time.time())}\nprint(1)"

        async def call() -> None:
            results.append(await pool.run(code))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await wait_until(lambda: pool.stats()["busy"] == 1)
            for pid in started_since(remaining):
                kill(pid)
        (result,) = results
        assert (result.stdout, result.attempt) == ("1\n", 2)
        assert pool.stats()["workers"] == 1
        assert pool.stats()["lost"] == 1


async def test_worker_is_recycled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.sandbox.slots.RECYCLE_AFTER", 3)
    async with Pool(SINGLE) as pool:
        workers = [(await pool.run("1")).worker_id for _ in range(7)]
        assert pool.stats()["lost"] == 0
    assert len(set(workers)) == 3
    assert all(workers)


async def test_without_waiting_room_free_slots_still_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.sandbox.calls.Calls.MAX_WAITING", 0)
    async with Pool(BARE.model_copy(update={"workers": 1})) as pool:
        assert (await pool.run("1")).ok
        async with anyio.create_task_group() as group:
            group.start_soon(pool.run, FOREVER, "", 600)
            await wait_until(lambda: pool.stats()["busy"] == 1)
            assert (await pool.run("1")).status is CallStatus.OVERLOADED
            group.cancel_scope.cancel()
        await wait_until(lambda: pool.stats()["busy"] == 0)
        async with pool.session() as session:
            assert (await session.run("2")).ok


async def test_worker_is_recycled_beside_a_session_that_lives_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The session outlives its worker's share of calls, as one that lasts an hour would."""
    monkeypatch.setattr("agentloop.sandbox.slots.RECYCLE_AFTER", 3)
    async with Pool(SINGLE) as pool:
        async with pool.session() as session:
            first = (await session.run("x = 41")).worker_id
            workers = {(await pool.run("1")).worker_id for _ in range(20)}
            assert len(workers - {first}) >= 5
            assert (await session.run("x + 1")).result == "42"
            await wait_until(lambda: pool.stats()["workers"] == 2)
            assert (pool.stats()["slots"], pool.stats()["sessions"]) == (1, 1)
        assert (await pool.run("1")).ok


async def test_workers_are_added_for_sessions_and_closed_when_unneeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentloop.sandbox.pool.SURPLUS_S", 0.04)
    async with Pool(SINGLE) as pool:
        async with pool.session() as first, pool.session() as second:
            for n, session in enumerate((first, second)):
                assert (await session.run(f"x = {n}")).ok
            await wait_until(lambda: pool.stats()["workers"] == 3)
            assert (await pool.run("1")).ok
            assert [(await s.run("x")).result for s in (first, second)] == ["0", "1"]
        await wait_until(lambda: pool.stats()["workers"] == 1)
        assert (await pool.run("1")).ok
        assert pool.stats()["lost"] == 0


class Breaking:
    """A backend whose first workers fail in an unexpected way."""

    name = "breaking"
    layers: Mapping[str, str] = {}
    max_running = max_sessions = 1

    def __init__(self, failures: list[Exception]) -> None:
        self._failures = failures
        self._backend = ProcessBackend(SINGLE)

    @contextlib.asynccontextmanager
    async def worker(self, worker_id: str) -> AsyncIterator[Link]:
        if self._failures:
            raise self._failures.pop()
        async with self._backend.worker(worker_id) as link:
            yield link


async def test_unexpected_failures_to_start_a_worker_keep_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[Exception] = [
        ExceptionGroup("group", [SandboxUnavailable("wrapped")]), AssertionError("theirs"),
    ]  # fmt: skip
    broken = Breaking(failures)

    async def choose(pool: Pool, stack: object) -> list[Any]:
        return [ProcessBackend(SINGLE), broken]

    monkeypatch.setattr(Pool, "_choose_backends", choose)
    async with Pool(SINGLE) as pool:
        await wait_until(lambda: pool.stats()["workers"] == 2)
    assert failures == []
    assert len(caplog.records) == 1  # the second within the same half minute goes untold
    assert "theirs" in caplog.text


class Vanishing:
    """A backend whose workers never reply and are lost with their first call; if `together`,
    all at once."""

    name = "vanishing"
    layers: Mapping[str, str] = {}
    max_running = max_sessions = 1

    def __init__(self, together: bool = False) -> None:
        self._together = together
        self._links: list[Link] = []

    @contextlib.asynccontextmanager
    async def worker(self, worker_id: str) -> AsyncIterator[Link]:
        link = Link(worker_id)
        link.write = lambda data: self._see(link, data)
        self._links.append(link)
        yield link

    def _see(self, link: Link, data: bytes) -> None:
        (message,) = FrameReader().feed(data)
        if message["op"] == "run":
            for lost in self._links if self._together else [link]:
                lost.lose("it vanished")


async def vanish(
    monkeypatch: pytest.MonkeyPatch, backend: Vanishing, num_workers: int
) -> CallResult:
    monkeypatch.setattr("agentloop.sandbox.pool.BACKOFF_S", (0.01,))

    async def choose(pool: Pool, stack: object) -> list[Any]:
        return [backend] * num_workers

    monkeypatch.setattr(Pool, "_choose_backends", choose)
    async with Pool(BARE) as pool:
        return await pool.run("1")


async def test_call_that_loses_two_workers_the_second_alone_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a program could make its own failure look like one of infrastructure."""
    result = await vanish(monkeypatch, Vanishing(), 2)
    assert (result.status, result.signal, result.attempt) == (CallStatus.KILLED, 9, 2)
    assert not result.status.is_unscorable
    assert result.error is not None
    assert "it vanished" in result.error.message


async def test_call_is_not_blamed_if_other_workers_are_lost_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = await vanish(monkeypatch, Vanishing(together=True), 2)
    assert (result.status, result.attempt) == (CallStatus.SANDBOX_ERROR, 2)
    assert result.status.is_unscorable
    assert result.error is not None
    assert "it vanished" in result.error.message


class Grants:
    """A `SlotQueue` of local workers, with the grants of each waiter."""

    def __init__(self, num_workers: int, max_running: int, max_sessions: int = 9) -> None:
        self.queue = SlotQueue(max_running, max_sessions)
        self.workers = [PoolWorker(Link(str(n)), BARE) for n in range(num_workers)]
        self.queue.workers += self.workers

    def ask(self, need: Need = Need.CALL, only: PoolWorker | None = None) -> SlotWaiter:
        return self.queue.enter(need, only)

    def given(self, *waiters: SlotWaiter) -> list[int | None]:
        """Return the number of a waiter's worker; None: it still waits."""
        return [None if w.worker is None else self.workers.index(w.worker) for w in waiters]


def test_worker_runs_one_call_at_a_time() -> None:
    near = Grants(2, max_running=2)
    calls = [near.ask() for _ in range(4)]
    assert near.given(*calls) == [0, 1, None, None]
    near.queue.free(near.workers[1])
    assert near.given(*calls) == [0, 1, 1, None]


def test_cells_of_a_session_wait_for_their_turn() -> None:
    near = Grants(3, max_running=2)
    session = near.ask(Need.SESSION)
    assert near.given(session) == [0]
    first = near.workers[0]
    calls = [near.ask() for _ in range(3)]
    assert near.given(*calls) == [1, 2, None]
    cell = near.ask(Need.CELL, first)
    assert near.given(cell) == [None]  # two run already
    near.queue.free(near.workers[2])
    assert near.given(calls[2], cell) == [2, None]  # it has waited for longer
    near.queue.free(near.workers[2])
    assert near.given(cell) == [0]
    near.queue.free(first)
    near.queue.free_session(first)
    assert near.given(near.ask()) == [0]


def test_later_calls_do_not_overtake_a_waiting_session() -> None:
    near = Grants(1, max_running=1)
    first, session, second = near.ask(), near.ask(Need.SESSION), near.ask()
    assert near.given(first, session, second) == [0, None, None]
    near.queue.free(near.workers[0])
    assert near.given(session, second) == [0, None]


def test_calls_pass_a_session_for_which_there_is_no_room() -> None:
    near = Grants(3, max_running=2, max_sessions=1)
    sessions = [near.ask(Need.SESSION), near.ask(Need.SESSION)]
    assert near.given(*sessions, near.ask()) == [0, None, 1]
    near.queue.free_session(near.workers[0])
    assert near.given(sessions[1]) == [0]


def test_waiter_that_gives_up_leaves_its_worker_to_others() -> None:
    near = Grants(1, max_running=1)
    first, session, second = near.ask(), near.ask(Need.SESSION), near.ask()
    near.queue.leave(session)
    near.queue.leave(first)
    assert near.given(second) == [0]
    assert (near.queue.num_waiting, near.queue.num_waiting_sessions) == (0, 0)


def test_call_that_runs_again_goes_first() -> None:
    near = Grants(1, max_running=1)
    first, second = near.ask(), near.ask()
    again = near.queue.enter(again=True)
    near.queue.free(near.workers[0])
    assert near.given(first, second, again) == [0, None, 0]


async def test_idle_worker_that_hangs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.sandbox.link.BEAT_S", 0.3)
    remaining = set(children(os.getpid()))
    async with Pool(SINGLE) as pool:
        frozen = started_since(remaining)
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        await wait_until(lambda: pool.stats()["lost"] == 1)
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        assert (await pool.run("1")).ok


async def test_worker_lives_until_it_was_silent_for_some_beats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentloop.sandbox.link.BEAT_S", 0.01)
    link, requests = Link("x"), []

    def answer(data: bytes) -> None:
        requests.extend(FrameReader().feed(data))
        if len(requests) <= 20:
            link.feed(encode({"op": "pong"}))

    link.write = answer
    with anyio.fail_after(patient(15)):
        await link.watch()
    assert len(requests) == 20 + MAX_SILENT_BEATS
    assert "it was silent for" in link.why


def break_children(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Let the forked processes of workers do this instead of entering their directory."""
    change_workers(monkeypatch, "child", "    os.chdir(spec.home)\n", f"    {fault}\n")


def change_workers(monkeypatch: pytest.MonkeyPatch, module: str, old: str, new: str) -> None:
    """Let workers run a module with other text in the place of `old`."""
    sources = dict(backend._read_worker())
    name = f"agentloop.sandbox.worker.{module}"
    assert old in sources[name]
    sources[name] = sources[name].replace(old, new)
    monkeypatch.setattr(backend, "_read_worker", lambda: sources)


async def test_call_that_kills_zygote_is_judged_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends a zygote if nothing else is left in the cgroup to end."""
    verdict = "    def oom_verdict(self) -> str | None:\n"
    change_workers(monkeypatch, "counters", verdict, f"{verdict}        return 'oom'\n")
    number = "            number = self.numbers.pop(pid, None)\n"
    change_workers(monkeypatch, "zygote", number, "            os._exit(1)\n")
    async with Pool(SINGLE) as pool:
        result = await pool.run("print(1)")
        assert (result.status, result.attempt, result.stdout) == (CallStatus.OOM, 1, "1\n")
        async with pool.session() as session:
            assert (await session.run("import os; os._exit(0)")).status is CallStatus.OOM
            assert session.lost_by is LostBy.PROGRAM
        assert pool.stats()["lost"] == 0


async def test_time_of_program_counts_from_when_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    break_children(monkeypatch, "time.sleep(0.7)")
    async with Pool(BARE.model_copy(update={"workers": 8})) as pool:
        async with anyio.create_task_group() as group:
            for _ in range(20):  # more than wait there, begun already
                group.start_soon(is_ok, pool, "1", 0.5)
        assert (await pool.run(FOREVER, timeout_s=0.5)).status is CallStatus.TIMEOUT


async def is_ok(pool: Pool, code: str, timeout_s: float) -> None:
    result = await pool.run(code, timeout_s=timeout_s)
    assert result.status is CallStatus.OK, result


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ('os.chdir("/nowhere")', "No such file or directory: '/nowhere'"),
        ("os._exit(7)", "its process did not get as far as the program"),
        ("time.sleep(60)", "the program had not begun 2.5 s after its call"),
    ],
)
@pytest.mark.full
async def test_fault_before_the_program_begins_is_ours(
    monkeypatch: pytest.MonkeyPatch, fault: str, says: str
) -> None:
    break_children(monkeypatch, fault)
    async with Pool(BARE) as pool:
        result = await pool.run("1", timeout_s=0.5)
        assert (result.status, result.attempt) == (CallStatus.SANDBOX_ERROR, 2)
        assert result.error is not None
        assert says in result.error.message
        async with pool.session() as session:
            assert (await session.run("1", timeout_s=0.5)).status is CallStatus.SANDBOX_ERROR
            assert session.lost_by is LostBy.INFRASTRUCTURE
        assert pool.stats()["lost"] == 0


async def test_worker_that_ignores_a_kill_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.sandbox.slots.GRACE_S", 0.3)
    remaining = set(children(os.getpid()))
    async with Pool(SINGLE) as pool:
        async with anyio.create_task_group() as group:
            group.start_soon(pool.run, FOREVER, "", 600)
            await wait_until(lambda: pool.stats()["busy"] == 1)
            frozen = started_since(remaining)
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)
            group.cancel_scope.cancel()
        await wait_until(lambda: pool.stats()["lost"] == 1)
        for pid in frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        assert (await pool.run("1")).ok
    await wait_until(lambda: not any(map(runs, frozen)))


async def test_closed_pool_leaves_no_processes_or_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chmod(tmp_path, 0o755)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    remaining = set(children(os.getpid()))
    async with Pool(BARE) as pool:
        async with pool.session() as session:
            await session.run("x = 1")
        await pool.run("import os, time\nif os.fork() == 0: os.setsid(); time.sleep(600)")
        family = started_since(remaining)
    assert set(children(os.getpid())) <= remaining
    await wait_until(lambda: not any(map(runs, family)))
    assert os.listdir(tmp_path) == []


async def test_session_keeps_its_variables(pool: Pool) -> None:
    async with pool.session() as session:
        assert (await session.run("x = 41\nprint('set')")).stdout == "set\n"
        assert (await session.run("x + 1")).result == "42"
        assert (await session.run("1 / 0")).status is CallStatus.ERROR
        assert (await session.run("import sys; sys.exit(2)")).exit_code == 2
        assert (await session.run("input() + str(x)", stdin="in")).result == "'in41'"
        async with pool.session() as another:
            assert (await another.run("x")).error is not None
    assert pool.stats()["sessions"] == 0


async def test_session_survives_a_timeout_that_it_heeds(pool: Pool) -> None:
    async with pool.session() as session:
        await session.run("x = 1")
        late = await session.run("import time; time.sleep(60)", timeout_s=0.2)
        assert late.status is CallStatus.TIMEOUT
        assert (await session.run("x")).result == "1"


async def test_killed_session_is_an_explicit_error(pool: Pool) -> None:
    async with pool.session() as session:
        await session.run("import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN)")
        late = await session.run("time.sleep(600)", timeout_s=0.2)
        assert late.status is CallStatus.TIMEOUT
        await wait_until(lambda: session.lost)
        with pytest.raises(SessionLost, match="variables are gone"):
            await session.run("1")
    assert (await pool.run("1")).ok


async def test_no_engine_is_said_plainly() -> None:
    settings = PoolSettings(backend="docker", engines=["unix:///nowhere/docker.sock"])
    with pytest.raises(SandboxUnavailable, match="no Docker Engine responds at unix:///nowhere"):
        async with Pool(settings):
            pass


async def test_body_s_exception_comes_out_unchanged() -> None:
    with pytest.raises(LookupError, match="mine"):
        async with Pool(BARE):
            raise LookupError("mine")


def test_directories_that_a_call_has_closed_are_removed(tmp_path: Path) -> None:
    """This includes users restricted by file modes, and never touches anything through a link."""
    base = tmp_path / "base"
    (base / "a/b/c").mkdir(parents=True)
    (base / "a/b/f").write_text("x")
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o750)
    (base / "a/link").symlink_to(outside)
    for name in ("a/b", "a", "."):
        (base / name).chmod(0)
    user: dict[str, Any] = {}
    if os.getuid() == 0:
        for path in (base, tmp_path):
            os.chown(path, 65534, 65534)
        for path in tmp_path.parents:
            if not path.stat().st_mode & stat.S_IXOTH:
                path.chmod(0o755)
        for path in base.rglob("*"):
            os.chown(path, 65534, 65534, follow_symlinks=False)
        user = {"user": 65534, "group": 65534}
    readable = tmp_path / "readable"
    for name in ("owner.py", "worker/kernel.py"):
        (readable / "agentloop/sandbox" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(sandbox.__file__).parent / name, readable / "agentloop/sandbox" / name)
    code = (
        f"import sys; sys.path.insert(0, {str(readable)!r})\nfrom pathlib import Path\n"
        f"from agentloop.sandbox.owner import remove_tree\nremove_tree(Path({str(base)!r}))"
    )
    subprocess.run([shutil.which("python3", path="/usr/bin") or sys.executable, "-I", "-c", code],
                   check=True, cwd="/", **user)  # fmt: skip
    assert not base.exists()
    assert outside.stat().st_mode & 0o777 == 0o750


@pytest.mark.timeout(120)
async def test_killed_supervisor_leaves_nothing(tmp_path: Path) -> None:
    """After kill -9 the workers notice the closed connection; directories are removed at the
    next start."""
    os.chmod(tmp_path, 0o755)
    program = (
        "import anyio, os\nfrom agentloop import sandbox\n"
        "async def main():\n"
        "    settings = sandbox.PoolSettings(backend='process', workers=1, preload=[])\n"
        "    async with sandbox.Pool(settings) as pool, anyio.create_task_group() as group:\n"
        f"        group.start_soon(pool.run, {FOREVER!r}, '', 600)\n"
        "        while not pool.stats()['busy']: await anyio.sleep(0.01)\n"
        "        print('up', flush=True)\n"
        "        await anyio.sleep(600)\n"
        "anyio.run(main)\n"
    )
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]),
        "TMPDIR": str(tmp_path),
    }
    async with await anyio.open_process(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=None, env=env
    ) as process:
        assert process.stdout is not None
        with anyio.fail_after(patient(60)):
            assert (await process.stdout.receive()).startswith(b"up")
        # outer, server, zygote, call
        await wait_until(lambda: len(descendants(process.pid)) >= 4)
        family = descendants(process.pid)
        process.send_signal(signal.SIGKILL)
    await wait_until(lambda: not any(map(runs, family)))
    assert os.listdir(tmp_path) != []
    again = (
        "import anyio, sandbox\n"
        "async def main():\n"
        "    settings = sandbox.PoolSettings(backend='process', workers=1, preload=[])\n"
        "    async with sandbox.Pool(settings): pass\n"
        "anyio.run(main)\n"
    )
    await anyio.run_process([sys.executable, "-c", again], env=env)
    assert os.listdir(tmp_path) == []


PROGRAMS = {
    "an output put back": (
        "import sys, io\nsys.stdout = io.StringIO(); print('x')\n"
        "sys.stdout = sys.__stdout__; print('answer')",
        "answer\n",
    ),
    "an output wrapped": (
        "import sys, io\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding='utf-8')\n"
        "print('answer')",
        "answer\n",
    ),
    "a second file on it": ("o = open(1, 'w'); o.write('answer')", "answer"),
    "a finalizer": ("class A:\n    def __del__(self): print('bye')\na = A()", "bye\n"),
    "a generator's end": ("def f():\n    try: yield 1\n    finally: print('end')\ng = f(); next(g)",
        "end\n"),
    "signals while it is written": (
        "import signal\nsignal.signal(signal.SIGALRM, lambda *a: None)\n"
        "signal.setitimer(signal.ITIMER_REAL, .0002, .0002)\nprint('x' * 900_000)",
        None,
    ),
    "its own source": ("import inspect\nf = lambda: 5\nprint(inspect.getsource(f), end='')",
        "f = lambda: 5\n"),
    "a class's source": ("import inspect\nclass A:\n    x = 1\nprint(inspect.getsource(A), end='')",
        "class A:\n    x = 1\n"),
    "a traceback of its own": (
        "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n"
        "    print(traceback.format_exc().splitlines()[2].strip())",
        "1 / 0\n",
    ),
    "a long sum": (f"print({'+'.join('1' * 1200)})", "1200\n"),
    "twelve threads": (
        "import time\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(24) as e:\n"
        "    print(sum(e.map(lambda n: time.sleep(.02) or n, range(24))))",
        "276\n",
    ),
    "a fork that comes back": (
        "import os, time\npid = os.fork()\nif pid == 0: raise ValueError\n"
        "os.waitpid(pid, 0); print('parent')",
        "parent\n",
    ),
    "a mark at the beginning": ("\ufeffprint(1)", "1\n"),
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
async def test_program_does_what_it_does_elsewhere(pool: Pool, program: str) -> None:
    code, expected = PROGRAMS[program]
    result = await pool.run(code)
    assert result.status is CallStatus.OK, result
    assert result.error is None
    if expected is None:
        assert result.stdout_bytes == 900_001
    else:
        assert result.stdout == expected


@pytest.mark.parametrize(
    ("code", "stdin"),
    [
        ("import random; print(random.random())", ""),
        ("exec(input())", "import random; print(random.random())"),
        ("print(__import__('ran' + 'dom').random())", ""),
        ("from statistics import NormalDist; print(NormalDist().samples(1))", ""),
        ("import email.utils; print(email.utils.make_msgid(domain='x')[-28:])", ""),
        ("import uuid; print(uuid.uuid1().clock_seq, uuid.uuid1().clock_seq)", ""),
    ],
)
async def test_random_numbers_differ_from_call_to_call(pool: Pool, code: str, stdin: str) -> None:
    results = [await pool.run(code, stdin) for _ in range(3)]
    assert all(result.ok for result in results), results
    assert len({result.stdout for result in results}) == 3


async def test_session_keeps_its_seed(pool: Pool) -> None:
    async with pool.session() as session:
        await session.run("import random; random.seed(42)")
        assert (await session.run("random.random()")).result == "0.6394267984578837"


@pytest.mark.parametrize(
    "arguments", [{"code": b"1"}, {"code": ["1"]}, {"code": "1", "stdin": b""},
              {"code": "1", "timeout_s": 0}, {"code": "1", "timeout_s": 1e20},
              *({"code": "1", "timeout_s": s} for s in (-1.0, float("nan"), float("inf")))]
)  # fmt: skip
async def test_invalid_calls_are_refused_and_take_no_slot(
    pool: Pool, arguments: dict[str, Any]
) -> None:
    named = "timeout_s" if "timeout_s" in arguments else None
    with pytest.raises((TypeError, ValueError), match=named):
        await pool.run(**arguments)
    assert pool.stats()["busy"] == 0


async def test_pool_that_is_not_open_says_so() -> None:
    pool = Pool(BARE)
    with pytest.raises(RuntimeError, match="not open"):
        await pool.run("1")
    results: list[CallResult] = []

    async def ask() -> None:
        results.append(await pool.run("import time; time.sleep(60)", timeout_s=60))

    with anyio.fail_after(patient(30)):
        async with anyio.create_task_group() as group, pool:
            for _ in range(BARE.workers + 1):
                group.start_soon(ask)
            while pool.stats()["waiting"] == 0:  # noqa: ASYNC110 - the pool sets no event
                await anyio.sleep(0.01)
    assert [result.status for result in results] == [CallStatus.CANCELLED] * len(results)
    assert len(results) == BARE.workers + 1
    with pytest.raises(RuntimeError, match="not open"):
        async with pool.session():
            pass


async def test_closed_session_stays_closed(pool: Pool) -> None:
    async with pool.session() as session:
        await session.run("x = 1")
    with pytest.raises(SessionLost, match="closed"):
        await session.run("1 + 1")


def test_directory_however_deep_is_emptied(tmp_path: Path) -> None:
    """The directory is deeper than recursion or a path permits, and closed on the way."""
    at = os.open(tmp_path, os.O_RDONLY)
    for n in range(1500):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        if n % 100 == 0:
            os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=below))
        os.close(at)
        at = below
    os.close(at)
    remove_below(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
