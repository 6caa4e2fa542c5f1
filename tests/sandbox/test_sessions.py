"""Sessions: their ends, the causes, and that a cell runs in no other process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import struct
import time
from pathlib import Path

import anyio
import pytest

from agentloop.sandbox import CallResult, CallStatus, LostBy, Pool, Session, SessionLost
from agentloop.sandbox.link import Link, Pending, next_id
from agentloop.sandbox.process import ProcessBackend
from agentloop.sandbox.protocol import encode
from agentloop.sandbox.slots import GRACE_S
from agentloop.sandbox.worker.connection import WorkerFrame
from agentloop.sandbox.worker.kernel import descendants
from agentloop.sandbox.worker.server import INTERRUPT_GRACE_S, START_S
from agentloop.sandbox.worker.wire import DONE_FD, JOB_FD
from tests.commands import OUR_PATH, run_python
from tests.patience import patient
from tests.sandbox.chaos import children, kill
from tests.sandbox.conftest import BARE
from tests.sandbox.test_pool import FOREVER, wait_until

pytestmark = pytest.mark.timeout(60)  # real workers are started

RUN: WorkerFrame = {"op": "run", "stdin": "", "timeout_s": 15}


async def wait_until_lost(session: Session, cell: str = "1") -> None:
    """Wait until a session is lost. Between cells its process is stopped, so run cells."""
    with anyio.fail_after(patient(30)):
        while session.lost_by is None:
            with contextlib.suppress(SessionLost):
                await session.run(cell, timeout_s=1)


async def lost_by(session: Session) -> LostBy:
    with pytest.raises(SessionLost) as lost:
        await session.run("1")
    return lost.value.by


@pytest.mark.parametrize(
    ("cell", "status"),
    [
        ("import os; os._exit(0)", CallStatus.OK),
        ("import os; os._exit(3)", CallStatus.ERROR),
        ("import os; os.execv('/bin/true', ['true'])", CallStatus.OK),
        ("import ctypes; ctypes.string_at(0)", CallStatus.KILLED),
        ("print('x' * 10_000_000)", CallStatus.OUTPUT_LIMIT),
    ],
)
async def test_session_ended_by_its_cell_is_lost_by_its_program(
    pool: Pool, cell: str, status: CallStatus
) -> None:
    async with pool.session() as session:
        assert (await session.run(cell)).status is status
        assert session.lost_by is LostBy.PROGRAM
        assert await lost_by(session) is LostBy.PROGRAM


async def test_process_that_ends_between_two_cells_is_its_programs_doing(pool: Pool) -> None:
    async with pool.session() as session:
        await session.run("import os, threading; threading.Timer(0.1, os._exit, (0,)).start()")
        await wait_until_lost(session)
        assert await lost_by(session) is LostBy.PROGRAM


async def test_no_cell_runs_in_a_fresh_process(pool: Pool) -> None:
    """This holds even right after the end of the session's own process."""
    results: list[CallResult] = []
    for n in range(40):
        async with pool.session() as session:
            delay_s = 0.005 + n / 10_000
            await session.run(
                f"import os, threading; threading.Timer({delay_s}, os._exit, (1,)).start(); x = 7"
            )
            with anyio.fail_after(patient(20)), contextlib.suppress(SessionLost):
                while True:
                    results.append(await session.run("x"))
    assert {result.result for result in results} <= {"7", None}
    assert [result.error for result in results if result.error is not None] == []


async def test_cell_of_an_unknown_session_does_not_run() -> None:
    async with ProcessBackend(BARE).worker("x") as link:
        call: WorkerFrame = {**RUN, "id": next_id(), "code": "1", "session": next_id()}
        pending = link.submit(call)
        with anyio.fail_after(patient(15)):
            await pending.done.wait()
        assert pending.reply is None
        assert not link.lost.is_set()


async def test_after_a_cancelled_cell_only_its_session_is_lost(pool: Pool) -> None:
    async with pool.session() as another, pool.session() as session:
        await another.run("x = 41")
        await session.run("1")
        async with anyio.create_task_group() as group:
            group.start_soon(session.run, FOREVER, "", 600)
            await wait_until(lambda: pool.stats()["busy"] == 1)
            group.cancel_scope.cancel()
        assert await lost_by(session) is LostBy.CALLER
        await wait_until(lambda: pool.stats()["busy"] == 0)  # it was answered, too
        assert (await another.run("x + 1")).result == "42"
    assert pool.stats()["lost"] == 0


async def test_abandoning_an_unsent_first_cell_keeps_the_session() -> None:
    settings = BARE.model_copy(update={"workers": 1})
    async with Pool(settings) as pool, pool.session() as session:
        async with anyio.create_task_group() as group:
            group.start_soon(pool.run, FOREVER, "", 600)
            await wait_until(lambda: pool.stats()["busy"] == 1)
            with anyio.move_on_after(0):
                await session.run("1")
            group.cancel_scope.cancel()
        assert (await session.run("2")).result == "2"


async def test_session_lost_with_its_worker_is_nobody_s_doing() -> None:
    remaining = set(children(os.getpid()))
    async with Pool(BARE) as pool, pool.session() as session:
        await session.run("x = 1")
        for pid in set(children(os.getpid())) - remaining:
            kill(pid)
        await wait_until(lambda: session.lost)
        assert await lost_by(session) is LostBy.INFRASTRUCTURE


@pytest.mark.parametrize(("num_ended", "by"), [(1, LostBy.INFRASTRUCTURE), (2, LostBy.PROGRAM)])
async def test_session_that_ends_two_workers_is_lost_by_its_program(
    monkeypatch: pytest.MonkeyPatch, num_ended: int, by: LostBy
) -> None:
    submit = Link.submit
    ended: list[WorkerFrame] = []

    def end_worker(link: Link, message: WorkerFrame) -> Pending:
        pending = submit(link, message)
        if message["code"] == "the end" and len(ended) < num_ended:
            ended.append(message)
            link.lose("its cell has ended it")
        return pending

    monkeypatch.setattr(Link, "submit", end_worker)
    async with Pool(BARE) as pool, pool.session() as session:
        await session.run("x = 1")
        with pytest.raises(SessionLost) as lost:
            await session.run("the end")
        assert lost.value.by is session.lost_by is by
        assert len(ended) == num_ended
        assert (await pool.run("1")).ok


async def test_session_that_was_closed_is_lost_by_its_caller(pool: Pool) -> None:
    async with pool.session() as session:
        await session.run("1")
    assert await lost_by(session) is LostBy.CALLER


async def test_closed_sessions_are_forgotten(pool: Pool) -> None:
    link = pool._queue.workers[0].link
    for code in ("1", "import os; os._exit(0)"):
        async with pool.session() as session:
            await session.run(code)
    await wait_until(lambda: pool.stats()["sessions"] == 0)
    assert link.sessions == {}


def test_end_that_is_told_twice_keeps_its_first_cause() -> None:
    link = Link("x")
    session = link.open_session(5)
    link.feed(encode({"op": "session_lost", "session": 5, "by": "program"}))
    link.feed(encode({"op": "session_lost", "session": 5}))
    link.feed(encode({"op": "session_lost", "session": 6, "by": "caller"}))  # closed long ago
    assert session.lost_by is LostBy.PROGRAM
    assert list(link.sessions) == [5]


def test_interrupt_is_for_one_cell_alone() -> None:
    """An interrupt between two cells affects neither; a cell's own handler stays in place."""
    code = (
        "import mmap, os, signal\n"
        "from agentloop.sandbox.worker.child import run_lasting_cell\n"
        "area, handler, scope = mmap.mmap(-1, 1 << 18), signal.default_int_handler, {}\n"
        "def cell(code):\n"
        "    global handler\n"
        "    status, said, handler = run_lasting_cell(code, scope, '<cell 1>', area, handler)\n"
        "    print(status, said.get('error', {}).get('type'))\n"
        "late = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
        "cell('1'); late(); cell('2')\n"
        "cell('import os, signal; os.kill(os.getpid(), signal.SIGINT); [0 for _ in range(9**9)]')\n"
        "late(); cell('3')\n"
        "cell('signal.signal(signal.SIGINT, lambda *_: print(\"mine\"))'); late()\n"
        "cell('os.kill(os.getpid(), signal.SIGINT)'); late()\n"
    )
    done = run_python("-c", code, env=OUR_PATH)
    lines = ["0 None", "0 None", "1 KeyboardInterrupt", "0 None", "0 None", "mine", "0 None"]
    assert done.stdout.splitlines() == lines


async def test_late_interrupt_of_a_cell_does_not_harm_the_next(pool: Pool) -> None:
    """The interrupt of a cell may arrive at its very end, before the next one."""
    async with pool.session() as session:
        await session.run("import time")
        for n in range(30):
            run_s = 0.03 + (n - 15) / 20_000
            code = f"end = time.perf_counter() + {run_s}\nwhile time.perf_counter() < end: pass"
            late = await session.run(code, timeout_s=0.03)
            assert late.status in (CallStatus.OK, CallStatus.TIMEOUT)
            assert (await session.run("40 + 2")).result == "42"


# Writes over all that the process tells of itself, again and again.
FORGE = """
import ctypes, os, threading
def forge():
    for line in open("/proc/self/maps"):
        if "memfd:report" in line:
            while True:
                ctypes.memmove(int(line.partition("-")[0], 16), FORGED, len(FORGED))
threading.Thread(target=forge, daemon=True).start()
"""


@pytest.mark.parametrize("forged", [0, 1, -1, 1 << 62])
async def test_when_a_program_began_is_measured(pool: Pool, forged: int) -> None:
    code = f"FORGED = {struct.pack('<q', forged)!r}\n{FORGE}"
    before = time.monotonic_ns()
    plain = await pool.run(f"{code}\nimport time; time.sleep(0.05); os._exit(0)")
    assert plain.started_ns is not None
    assert before < plain.started_ns < time.monotonic_ns()
    async with pool.session() as session:
        first = await session.run(f"{code}\nimport time; time.sleep(0.05)")
        assert first.started_ns is not None
        assert before < first.started_ns < time.monotonic_ns()
        before = time.monotonic_ns()
        second = await session.run("time.sleep(0.05)")
        assert second.status is CallStatus.OK
        assert second.started_ns is None or before < second.started_ns < time.monotonic_ns()


async def test_session_that_floods_its_channel_is_not_listened_to(pool: Pool) -> None:
    """Excess messages end the session's own cells and do not delay others."""
    async with pool.session() as session:
        flood = (
            "import os, threading\n"
            "def flood():\n"
            f"    while True: os.eventfd_write({DONE_FD}, 1)\n"
            "for _ in range(3): threading.Thread(target=flood, daemon=True).start()"
        )
        await session.run(flood)
        server = pool._queue.workers[0].link.hello["pid"]
        before, began = cpu_used(server), time.monotonic()
        for _ in range(20):
            assert (await pool.run("1")).ok
        await session.run("1", timeout_s=5)
        assert cpu_used(server) - before < 0.5 * (time.monotonic() - began) + 0.2


def cpu_used(pid: int) -> float:
    """CPU seconds of a process of a worker of ours, by its pid there: a call can't see it."""
    for actual in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            numbers = re.search(r"NSpid:(.*)", Path(f"/proc/{actual}/status").read_text())
            if numbers is not None and int(numbers[1].split()[-1]) == pid:
                fields = Path(f"/proc/{actual}/stat").read_text().rpartition(")")[2].split()
                return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    raise ProcessLookupError(pid)


SENDS = f"""
import array, os, socket
channel = socket.socket(fileno=os.dup({JOB_FD}))
file = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]
for data, ancillary in ((b"", []), (b"x", []), (b"x", file)):
    try:
        channel.sendmsg([data], ancillary)
    except BrokenPipeError:
        print("refused")
"""


async def test_program_can_send_nothing_that_outlives_it(pool: Pool) -> None:
    """A file that lies in a queue of the server's would keep its memory after the program's end."""
    async with pool.session() as session:
        assert (await session.run(SENDS)).stdout == 3 * "refused\n"
        assert (await session.run("1 + 1")).result == "2"


ANSWERS_AND_READS_NOTHING = f"""
import os, threading, time
def answer():
    while True:
        time.sleep(0.01)
        os.eventfd_write({DONE_FD}, 1)
threading.Thread(target=answer, daemon=True).start()
time.sleep(600)
"""


async def check_unread_jobs(pool: Pool) -> None:
    num_lost = pool.stats()["lost"]
    long = "#" + 60_000 * "x"  # a few fill the channel
    async with pool.session() as another, pool.session() as session:
        await another.run("x = 41")
        await session.run(ANSWERS_AND_READS_NOTHING)
        await wait_until_lost(session, long)
        assert session.lost_by is LostBy.PROGRAM
        assert (await another.run("x + 1")).result == "42"
    assert (await pool.run("1")).attempt == 1
    assert pool.stats()["lost"] == num_lost


async def test_session_that_reads_no_jobs_is_lost_by_its_program(pool: Pool) -> None:
    await check_unread_jobs(pool)


TAKES_JOBS_AWAY = """
import os
for _ in range(8):
    if os.fork() == 0:
        while True:
            os.read(3, 1 << 16)
"""


async def test_session_that_reaps_its_jobs_is_lost_by_its_program(pool: Pool) -> None:
    """Its cells are answered later than any other call. That is no sign of a worker that hangs."""
    assert GRACE_S > 2 * (START_S + INTERRUPT_GRACE_S)
    num_lost = pool.stats()["lost"]
    async with pool.session() as session:
        await session.run(TAKES_JOBS_AWAY)
        await wait_until_lost(session)  # now and then it takes one itself
        assert session.lost_by is LostBy.PROGRAM
    assert pool.stats()["lost"] == num_lost


async def test_random_numbers_differ_between_sessions_whichever_cell_draws(pool: Pool) -> None:
    drawn = set()
    for _ in range(3):
        async with pool.session() as session:
            await session.run("x = 1")
            drawn.add((await session.run("import random; random.random()")).result)
    assert len(drawn) == 3


@pytest.mark.parametrize("number", [signal.SIGXCPU, signal.SIGKILL])
async def test_cell_that_kills_itself_is_killed(pool: Pool, number: signal.Signals) -> None:
    if "namespaces" not in pool.stats()["layers"]["process isolation"] or os.getuid() != 0:
        pytest.skip("as pid 1 of its own namespace it could not")
    async with pool.session() as session:
        ended = await session.run(f"import os; os.kill(os.getpid(), {int(number)})")
        assert (ended.status, ended.signal) == (CallStatus.KILLED, number)
        assert await lost_by(session) is LostBy.PROGRAM
