"""The limits of calls and workers; no two workers share a uid."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentloop.sandbox import (
    CallStatus,
    Overloaded,
    Pool,
    PoolSettings,
    SandboxUnavailable,
    SessionLost,
    cgroup,
)
from agentloop.sandbox.backend import REMAPPED_UIDS, UIDS, max_processes, random_uid, start_bytes
from agentloop.sandbox.cgroup import Cgroup, NoCgroup, new_cgroup
from agentloop.sandbox.container import host_config
from agentloop.sandbox.link import SPARE_BYTES, Link
from agentloop.sandbox.settings import OutputLimits
from agentloop.sandbox.worker import kernel
from agentloop.sandbox.worker.kernel import descendants, remove_below
from tests.commands import OUR_PATH, run_python
from tests.patience import patient
from tests.sandbox.conftest import BARE, SINGLE
from tests.sandbox.test_pool import runs, wait_until

pytestmark = pytest.mark.timeout(60)  # real workers are started

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
MIB = 1 << 20


def take(mib: int) -> str:
    return f"x = b'1' * ({mib} << 20)\nlen(x) >> 20"


# -- memory of a call -----------------------------------------------------------------------


async def test_call_may_name_its_memory(pool: Pool) -> None:
    assert (await pool.run(take(200))).result == "200"
    less = await pool.run(take(200), memory_mib=100)
    assert less.status is CallStatus.OOM
    assert less.error is not None
    assert less.error.type == "MemoryError"
    assert (await pool.run(take(50), memory_mib=100)).result == "50"


PRINTS = "import sys\nfor _ in range(400): sys.stdout.write('\\0' * 10000)"


@pytest.mark.parametrize(
    ("code", "stdin", "memory_mib"),
    [("print(1)", "x" * 8_000_000, 16), (f"{PRINTS}; sys.stderr.write('\\0' * 10000)", "", 64)],
)
async def test_input_and_output_may_exceed_a_calls_memory(
    code: str, stdin: str, memory_mib: int
) -> None:
    """The worker holds them: of a program that takes little memory it must not run out."""
    async with Pool(SINGLE) as pool:
        output = OutputLimits(64 << 20, 4 << 20)
        result = await pool.run(code, stdin, 30, memory_mib, output=output)
        assert (result.status, result.attempt) == (CallStatus.OK, 1), result.error
        assert pool.stats()["lost"] == 0


async def test_refused_limit_fails_unless_a_larger_is_in_force() -> None:
    link = Link("1")
    limits: list[int] = []
    is_refused = False

    async def set_memory(num_bytes: int) -> None:
        if is_refused:
            raise OSError("the engine is busy")
        limits.append(num_bytes - SPARE_BYTES)

    link.hello, link.set_memory = {"own_bytes": 0}, set_memory
    await link.limit_memory(512)
    await link.limit_memory(64)
    is_refused = True
    await link.limit_memory(32)
    with pytest.raises(SandboxUnavailable, match="busy"):
        await link.limit_memory(256)
    with pytest.raises(SandboxUnavailable, match="busy"):  # now it is unknown
        await link.limit_memory(32)
    is_refused = False
    await link.limit_memory(32)
    await link.limit_memory(32)
    assert limits == [512, 64, 32]


async def test_worker_whose_limit_was_refused_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, refusals = Link.limit_memory, [SandboxUnavailable("the engine is busy")]

    async def limit_memory(link: Link, num_bytes: int) -> None:
        if num_bytes >> 20 == 256 and refusals:
            raise refusals.pop()
        await limit(link, num_bytes)

    monkeypatch.setattr(Link, "limit_memory", limit_memory)
    async with Pool(SINGLE) as pool:
        first = await pool.run("1", memory_mib=64)
        second = await pool.run("1", memory_mib=256)
        assert (second.status, second.attempt) == (CallStatus.OK, 2)
        assert second.worker_id != first.worker_id
        assert pool.stats()["lost"] == 0


async def test_processes_of_a_call_have_its_memory_together(pool: Pool) -> None:
    forked = f"import os, time\nfor _ in range(3): os.fork()\n{take(40)}\ntime.sleep(60)"
    ended = await pool.run(forked, memory_mib=200, timeout_s=50)
    assert ended.status is CallStatus.OOM
    assert ended.attempt == 1
    fits = forked.replace("60)", "1)")
    assert (await pool.run(fits, memory_mib=500, timeout_s=50)).status is CallStatus.OK


async def test_memory_limit_of_a_cell_ends_with_it(pool: Pool) -> None:
    async with pool.session() as session:
        assert (await session.run(take(200), memory_mib=100)).status is CallStatus.OOM
        assert (await session.run(take(200))).result == "200"
        assert (await session.run(take(200), memory_mib=100)).status is CallStatus.OOM


@pytest.mark.parametrize("memory_mib", [0, -1, 513])
async def test_memory_is_at_most_the_pools(pool: Pool, memory_mib: int) -> None:
    with pytest.raises(ValueError, match="memory_mib must be between 1 and the pool's 512"):
        await pool.run("1", memory_mib=memory_mib)
    with pytest.raises(TypeError, match="memory_mib"):
        await pool.run("1", memory_mib="1")  # type: ignore[arg-type]


async def test_call_over_its_memory_takes_nobody_with_it(pool: Pool) -> None:
    num_lost = pool.stats()["lost"]
    kept: list[str | None] = []

    async def keep() -> None:
        code = f"{take(150)}\nimport time; time.sleep(2)\nlen(x) >> 20"
        kept.append((await pool.run(code)).result)

    bomb = "import os\nfor _ in range(4): os.fork()\nx = []\nwhile True: x.append(b'1' * 10**6)"
    async with pool.session() as session, anyio.create_task_group() as group:
        await session.run("x = 41")
        group.start_soon(keep)
        group.start_soon(keep)
        assert (await pool.run(bomb)).status is CallStatus.OOM
        assert (await session.run("x + 1")).result == "42"
    assert kept == ["150", "150"]
    assert pool.stats()["lost"] == num_lost


async def test_processes_that_a_cell_left_running_count_with_the_next(pool: Pool) -> None:
    bomb = (
        "import os, time\nfor _ in range(6):\n  if os.fork() == 0:\n"
        f"    {take(120).splitlines()[0]}\n    time.sleep(600)"
    )
    async with pool.session() as session:
        assert (await session.run(bomb)).ok
        late = await session.run("time.sleep(60)", timeout_s=50)
        assert late.status is CallStatus.OOM
        await wait_until(lambda: session.lost)
    assert (await pool.run("1")).ok


LOOKS_UP = """
import os
name = f"/usr/{os.getpid()}-" + "n" * 220
for number in range(100_000):
    os.path.exists(name + str(number))
"""


async def check_memory_after_names(settings: PoolSettings) -> None:
    small = settings.model_copy(update={"workers": 1, "memory_mib": 128, "preload": []})
    async with Pool(small) as pool:
        for _ in range(2):
            assert (await pool.run(LOOKS_UP)).ok
            result = await pool.run(take(100))
            assert (result.result, result.attempt) == ("100", 1), result


async def test_name_lookups_take_no_memory_from_the_next_call() -> None:
    """The kernel keeps them, and counts them as memory of the worker's."""
    await check_memory_after_names(BARE)


@pytest.fixture
def outer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cgroup]:
    """A cgroup around those of the workers of new pools, as a pod has one."""
    try:
        outer = new_cgroup()
    except NoCgroup as error:
        pytest.skip(f"no cgroup can be created here: {error}")
    lines = []
    for line in cgroup.MEMBERSHIP.read_text().splitlines():
        number, names, path = line.split(":", 2)
        paths = [p for c, p in outer.paths.items() if c in names.split(",") or not names]
        lines.append(f"{number}:{names}:{path.rstrip('/')}/{paths[0].name if paths else ''}")
    membership = tmp_path / "membership"
    membership.write_text("\n".join(lines))
    monkeypatch.setattr(cgroup, "MEMBERSHIP", membership)
    yield outer
    outer.remove()


async def test_call_is_not_blamed_for_a_machine_without_memory(outer: Cgroup) -> None:
    outer.limit_memory(300 * MIB)
    async with Pool(SINGLE) as pool:
        result = await pool.run(take(400))
        assert (result.status, result.attempt) == (CallStatus.SANDBOX_ERROR, 2), result
        assert result.error is not None
        assert "memory" in result.error.message
        assert (await pool.run(take(100))).ok


async def test_sessions_leave_calls_the_processes_that_they_may_have(outer: Cgroup) -> None:
    """A limit on processes that lies around the pool bounds how many sessions it opens."""
    outer.limit_processes(300)
    sleepers = "import os, time\nfor _ in range(30):\n  if os.fork() == 0: time.sleep(600)"
    threads = "import threading\nfor _ in range(30): threading.Thread(target=input).start()"
    async with Pool(BARE) as pool, contextlib.AsyncExitStack() as stack:
        with contextlib.suppress(Overloaded):
            for _ in range(20):
                session = await stack.enter_async_context(pool.session(max_wait_s=1))
                assert (await session.run(sleepers)).ok
        for _ in range(8):
            result = await pool.run(threads, stdin="\n" * 30)
            assert result.ok, result


BUSY = """
import mmap, os, struct, time
used = mmap.mmap(-1, 4096)
end = time.monotonic() + 2
for n in range(25):
    if os.fork() == 0:
        os.setsid()  # its own group for the scheduler, as interactive ones have
        while time.monotonic() < end:
            used[8 * n : 8 * n + 8] = struct.pack("d", time.process_time())
        os._exit(0)
time.sleep(2)
sum(struct.unpack("25d", used[:200]))
"""
FAIR = """
import time
end = time.monotonic() + 2
while time.monotonic() < end:
    pass
time.process_time()
"""


async def check_shares(pool: Pool) -> None:
    used: dict[str, float] = {}

    async def run(code: str) -> None:
        result = await pool.run(code)
        assert result.result is not None, result
        used[code] = float(result.result)

    async with anyio.create_task_group() as group:
        group.start_soon(run, BUSY)
        group.start_soon(run, FAIR)
    assert used[BUSY] < 4 * used[FAIR]  # 25 times as much, if each had the same


async def test_calls_share_the_processors_however_many_processes_they_have(pool: Pool) -> None:
    if pool.stats()["slots"] == 1:
        pytest.skip("one call at a time on this machine")
    await check_shares(pool)


# -- what runs between cells ----------------------------------------------------------------


def states(pids: list[int]) -> set[str]:
    actual = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            actual.add(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
    return actual


@pytest.fixture
async def alone() -> AsyncIterator[Pool]:
    async with Pool(BARE) as pool:
        yield pool


def counting_processes() -> list[int]:
    """Return the pids of our workers' counting processes (see COUNTING)."""
    actual = []
    for pid in descendants(os.getpid()):  # others on this machine may have seven threads, too
        with contextlib.suppress(OSError):
            if len(os.listdir(f"/proc/{pid}/task")) == 7:
                actual.append(pid)
    return actual


COUNTING = """
import threading, time
n = 0
def count():
    global n
    while True:
        n += 1
        time.sleep(0.001)
for _ in range(6):
    threading.Thread(target=count, daemon=True).start()
"""


async def test_session_stands_still_between_its_cells(alone: Pool) -> None:
    async with alone.session() as session:
        await session.run(COUNTING)
        await wait_until(lambda: states(counting_processes()) == {"T"})
        assert (await session.run("old = n\nwhile n == old: time.sleep(0.001)")).ok
        await wait_until(lambda: states(counting_processes()) == {"T"})


async def test_busy_processes_of_idle_sessions_are_stopped(alone: Pool) -> None:
    busy = "import os\nfor _ in range(3):\n  if os.fork() == 0:\n    while True: pass"
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(3):
            session = await stack.enter_async_context(alone.session())
            assert (await session.run(busy)).ok
        count = (
            "import os\nstats = [open(f'/proc/{p}/stat').read() for p in os.listdir('/proc')"
            " if p.isdigit()]\nsum(s.rpartition(')')[2].split()[0] == 'R' for s in stats)"
        )
        if alone.stats()["layers"]["process isolation"].startswith("no"):
            pytest.skip("a call sees the machine's processes here")
        with anyio.fail_after(patient(30)):
            while (await alone.run(count)).result != "1":  # itself
                pass


# Its timers are beyond the number that one signal to stop takes away.
AWAKE = """
import ctypes, signal, struct, threading
lib = ctypes.CDLL(None)
lib.timer_settime.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p]
event = struct.pack("<qii", 0, signal.SIGCONT, 0) + bytes(48)
signal.signal(signal.SIGCONT, lambda *_: None)
for n in range(50):
    timer = ctypes.c_void_p()
    lib.timer_create(1, event, ctypes.byref(timer))
    often = struct.pack("<qqqq", 0, 5_000_000 + n * 1_000_000, 0, 5_000_000 + n * 70_001)
    lib.timer_settime(timer, 0, often, None)
def spin():
    while True:
        pass
threading.Thread(target=spin, daemon=True).start()
"""


# None of its processes uses much, and none lives for long.
CHAIN = (
    AWAKE.rpartition("def spin")[0]
    + """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        while True:
            for n in range(50):
                timer = ctypes.c_void_p()
                lib.timer_create(1, event, ctypes.byref(timer))
                lib.timer_settime(timer, 0, often, None)
            end = time.process_time() + 0.03
            while time.process_time() < end:
                pass
            if os.fork():
                os._exit(0)
"""
)


@pytest.mark.timeout(150)  # on a busy machine it uses little, and is found out late
@pytest.mark.full
@pytest.mark.parametrize("code", [AWAKE, CHAIN], ids=["a thread", "a chain of processes"])
async def test_session_that_wakes_itself_is_ended(alone: Pool, code: str) -> None:
    async with alone.session() as session, alone.session() as another:
        await another.run("x = 1")
        assert (await session.run(code)).ok
        await wait_until(lambda: session.lost, within_s=120)
        with pytest.raises(SessionLost):
            await session.run("1")
        assert (await another.run("x")).result == "1"


# -- memory and processes of a worker -------------------------------------------------------


def test_container_is_limited_to_one_call() -> None:
    inputs = PoolSettings(processes_per_call=40, memory_mib=300, preload=[])
    config: Any = host_config(inputs, None, 1 << 30)
    assert config["PidsLimit"] == max_processes(inputs) >= 40 + 3
    assert config["Memory"] == config["MemorySwap"] == start_bytes(inputs) > 300 * MIB
    assert config["NanoCpus"] == 10**9


@pytest.mark.parametrize("uids", [UIDS, REMAPPED_UIDS])
def test_uids_of_calls_are_pairs_within_the_range(uids: range) -> None:
    drawn = [random_uid(uids) for _ in range(1000)]
    assert all(uid in uids and uid + 1 in uids for uid in drawn)
    assert all((uid - uids.start) % 2 == 0 for uid in drawn)


# -- killing and cleaning -------------------------------------------------------------------

# The workspace of a server that is not pid 1, and a call that stops and kills whatever it may.
STRIKES_BACK = """
import os, signal, time
from agentloop.sandbox.worker.spec import Spec
from agentloop.sandbox.worker.workspace import Workspace
spec = Spec({"home": "/nowhere", "uid": 1_900_000_000, "kill_by": "uid"})
workspace = Workspace(spec)
ready, begun = os.pipe()
pid = os.fork()
if pid == 0:
    os.setresgid(*[spec.uid] * 3)
    os.setresuid(*[spec.uid] * 3)
    for _ in range(3):
        os.fork()
    os.write(begun, b"x")
    while True:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            try:
                os.kill(-1, number)
                os.kill(os.getppid(), number)
            except OSError:
                pass
os.read(ready, 1)
for _ in range(2000):
    with workspace._as_call():
        pass
workspace.kill(pid)
assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
while workspace._is_inhabited():
    time.sleep(0.001)
print("alive", os.getresuid())
"""


# A server whose first forks exceed a limit on processes.
FORKS_LATE = """
import errno, os, sys
from pathlib import Path
from agentloop.sandbox.worker.spec import Spec
from agentloop.sandbox.worker.workspace import Workspace
home = Path(sys.argv[1])
(home / "left").touch()
workspace = Workspace(Spec({"home": str(home), "kill_by": "tree"}))
fork, refusals = os.fork, [OSError(errno.EAGAIN, "the limit"), OSError(errno.ENOMEM, "memory")]
def fork_after_refusals():
    if refusals:
        raise refusals.pop()
    return fork()
os.fork = fork_after_refusals
workspace.clean()
while not workspace.is_clean:
    workspace.reap()
print(len(refusals), len([*home.iterdir()]))
"""


def test_directory_is_emptied_once_the_limit_on_processes_allows_it(tmp_path: Path) -> None:
    done = run_python("-c", FORKS_LATE, tmp_path, env=OUR_PATH)
    assert done.stdout.split() == ["0", "0"]


@needs_root
def test_call_can_not_stop_who_kills_it() -> None:
    done = run_python("-c", STRIKES_BACK, env=OUR_PATH)
    assert done.stdout == "alive (0, 0, 0)\n"


def test_link_in_place_of_a_directory_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link is placed between the check of the directory and its opening."""
    outside = tmp_path / "outside"
    (outside / "kept").mkdir(parents=True)
    outside.chmod(0o500)
    base = tmp_path / "base"
    (base / "d" / "e").mkdir(parents=True)
    scan = kernel._scan

    def swap(fd: int) -> list[tuple[str, bool]]:
        actual = scan(fd)
        for name, is_dir in actual:
            if is_dir:
                os.rename(name, f"{name}-was", src_dir_fd=fd, dst_dir_fd=fd)
                os.symlink(outside, name, dir_fd=fd)
        return actual

    monkeypatch.setattr(kernel, "_scan", swap)
    with pytest.raises(OSError, match=r"directory|symbolic"):
        remove_below(str(base))
    assert outside.stat().st_mode & 0o777 == 0o500
    assert (outside / "kept").is_dir()
    outside.chmod(0o700)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_call_that_signals_all_it_may_reaches_itself_alone(
    pool: Pool, number: signal.Signals
) -> None:
    code = f"import os\nif os.fork() == 0: os.kill(-1, {int(number)})\nos.kill(-1, {int(number)})"
    num_lost = pool.stats()["lost"]
    async with pool.session() as session:
        await session.run("x = 1")
        await pool.run(code, timeout_s=1)
        assert (await session.run("x")).result == "1"
    assert pool.stats()["lost"] == num_lost
    assert runs(os.getpid())
