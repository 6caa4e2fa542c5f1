"""Computers in real containers: shells, files, limits, copies, and that nothing is left."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiodocker
import anyio
import pytest
from anyio import open_process

from agentloop.sandbox import (
    CallStatus,
    Computer,
    ComputerLimits,
    ComputerLost,
    Overloaded,
    Pool,
    PoolSettings,
    ProgramUnsupported,
)
from agentloop.sandbox.container import LABEL
from agentloop.sandbox.engine import connect
from agentloop.sandbox.errors import SandboxUnavailable
from tests.patience import patient

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.timeout(180)]

SETTINGS = PoolSettings(backend="docker", workers=1, preload=[], max_sessions=4, max_wait_s=1)
LONG_S = patient(20)


@pytest.fixture(scope="module")
async def engine(docker_engine: None, anyio_backend: str) -> AsyncIterator[aiodocker.Docker]:
    async with connect() as docker:
        yield docker


@pytest.fixture(scope="module")
async def pool(engine: aiodocker.Docker) -> AsyncIterator[Pool]:
    async with Pool(SETTINGS, on_progress=print) as pool:
        yield pool


@pytest.fixture
async def box(pool: Pool) -> AsyncIterator[Computer]:
    async with pool.computer() as box:
        yield box


async def num_containers(engine: aiodocker.Docker, owner: int) -> int:
    actual = await engine.containers.list(all=True, filters={"label": [LABEL]})
    return sum(c["Names"][0].startswith(f"/agentloop-computer-{owner}-") for c in actual)


async def until(happened: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(patient(60)):
        while not await happened():  # noqa: ASYNC110 -- nobody tells
            await anyio.sleep(0.05)


async def output(box: Computer, command: str) -> str:
    result = await box.run(command, timeout_s=LONG_S)
    assert result.ok, result
    return result.stdout


# -- shells -----------------------------------------------------------------------------------


async def test_shell_keeps_directory_variables_functions_and_status(box: Computer) -> None:
    await box.run("cd /usr; X=5; export Y=6; greet() { echo hello $1; }; false")
    assert await output(box, "echo $? $PWD $X; greet you; sh -c 'echo $Y'") == (
        "1 /usr 5\nhello you\n6\n"
    )


@pytest.mark.parametrize(
    ("command", "status", "exit_status"),
    [
        ("true", CallStatus.OK, 0),
        ("sh -c 'exit 7'", CallStatus.ERROR, 7),
        ("if", CallStatus.ERROR, 2),
        ("no-such-program", CallStatus.ERROR, 127),
        ("sh -c 'kill -9 $$'", CallStatus.KILLED, 137),
    ],
)
async def test_how_a_command_ended(
    box: Computer, command: str, status: CallStatus, exit_status: int
) -> None:
    result = await box.run(command, timeout_s=LONG_S)
    assert (result.status, result.exit_status, result.shell_ended) == (status, exit_status, False)


async def test_streams_are_apart_and_quotes_survive(box: Computer) -> None:
    result = await box.run("""printf '%s' "it's" '$X'; cat >&2 <<'END'\na "b" \\n\nEND""")
    assert (result.stdout, result.stderr) == ("it's$X", 'a "b" \\n\n')


async def test_output_comes_while_the_command_runs(box: Computer) -> None:
    observed = bytearray()
    async with anyio.create_task_group() as group:

        def take(stream: int, data: bytes) -> None:
            observed.extend(data)
            if b"ready" in observed:
                group.cancel_scope.cancel()

        await box.run("echo ready; sleep 1000", timeout_s=1000, on_output=take)
    assert bytes(observed) == b"ready\n"


async def test_exit_ends_the_shell_and_the_next_is_new(box: Computer) -> None:
    result = await box.run("X=1; cd /tmp; exit 3")
    assert (result.exit_status, result.shell_ended) == (3, True)
    assert await output(box, "echo $X$PWD") == "/\n"


@pytest.mark.parametrize(
    "command",
    [
        "sleep 1000",
        "while :; do :; done",
        "while :; do sleep 1; done",
        "trap '' INT; sleep 1000",
        "(trap '' INT; while :; do sleep 1; done)",
        "cat /dev/zero | sort",
    ],
)
async def test_timeout_ends_the_command_and_not_the_shell(box: Computer, command: str) -> None:
    await box.run("X=7; sleep 1000 & BACKGROUND=$!")
    result = await box.run(f"echo begun; {command}", timeout_s=1)
    assert (result.status, result.exit_status, result.stdout) == (
        CallStatus.TIMEOUT,
        None,
        "begun\n",
    )
    assert not result.shell_ended
    assert await output(box, "echo $X; kill -0 $BACKGROUND && echo alive") == "7\nalive\n"


async def test_cancelling_a_command_ends_its_processes(box: Computer) -> None:
    started = anyio.Event()
    async with anyio.create_task_group() as group:

        async def run() -> None:
            await box.run("echo; sleep 4321", timeout_s=1000, on_output=lambda *_: started.set())

        group.start_soon(run)
        with anyio.fail_after(LONG_S):
            await started.wait()
        group.cancel_scope.cancel()

    async def is_gone() -> bool:
        return "4321" not in await output(box, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")

    await until(is_gone)


async def test_background_output_belongs_to_the_next_command(box: Computer) -> None:
    await box.run("mkfifo /tmp/go; (cat /tmp/go; echo late) & ")
    assert await output(box, "echo > /tmp/go; wait; echo next") == "\nlate\nnext\n"


async def test_output_is_bounded(box: Computer) -> None:
    result = await box.run("yes", timeout_s=LONG_S, max_output_bytes=1 << 20)
    assert result.status is CallStatus.OUTPUT_LIMIT
    assert result.truncated
    assert len(result.stdout) < 70_000
    assert await output(box, "head -c 100000 /dev/zero | tr '\\0' x | wc -c") == "100000\n"


async def test_user_directory_and_environment(pool: Pool) -> None:
    async with pool.computer(user="nobody", workdir="/tmp", env={"A": "b c"}) as box:
        await box.write("mine", b"1")
        assert await output(box, "id -un; pwd; echo $A; stat -c %U mine") == (
            "nobody\n/tmp\nb c\nnobody\n"
        )
        shell = box.shell(user="root", env={"A": "d"})
        assert (await shell.run("id -u; echo $A")).stdout == "0\nd\n"


@pytest.mark.parametrize(
    ("command", "status", "exit_status"),
    [
        (["true"], CallStatus.OK, 0),
        (["sh", "-c", "exit 7"], CallStatus.ERROR, 7),
        (["sh", "-c", "kill -9 $$"], CallStatus.KILLED, 137),
        (["no-such-program"], CallStatus.ERROR, 127),
        (["/etc/passwd"], CallStatus.ERROR, 126),
        (["sleep", "1000"], CallStatus.TIMEOUT, None),
        (["sh", "-c", "trap '' TERM INT; sleep 1000 & wait"], CallStatus.TIMEOUT, None),
        (["yes"], CallStatus.OUTPUT_LIMIT, None),
        (["sh", "-c", "yes >&2"], CallStatus.OUTPUT_LIMIT, None),
    ],
)
async def test_how_a_program_ended(
    box: Computer, command: list[str], status: CallStatus, exit_status: int | None
) -> None:
    time_s = 1 if status is CallStatus.TIMEOUT else LONG_S
    result = await box.execute(command, timeout_s=time_s, max_output_bytes=1 << 20)
    assert (result.status, result.exit_status) == (status, exit_status)
    shown = await box.execute(["sh", "-c", "cat /proc/[0-9]*/comm"])
    assert set(shown.stdout.split()) <= {"loader", "python3", "sh", "cat"}


async def test_input_and_arguments_arrive_unchanged(box: Computer) -> None:
    data = os.urandom(3_000_000)
    await box.execute(["sh", "-c", "cat > copy; cat copy >&2"], stdin=data, workdir="/tmp")
    assert await box.read("/tmp/copy") == data
    hostile = ["$HOME", "'", "a b", "", "\n"]
    result = await box.execute(["printf", "[%s]", *hostile], env={"HOME": "/x"})
    assert result.stdout == "".join(f"[{text}]" for text in hostile)
    assert (await box.execute(["true"], stdin=data)).ok  # though nobody reads it
    with pytest.raises(ValueError, match="NUL"):
        await box.execute(["echo", "\0"])


async def test_program_that_is_cancelled_leaves_no_process(box: Computer) -> None:
    with anyio.move_on_after(0.5):
        await box.execute(["sh", "-c", "sleep 4321 & sleep 4321"], timeout_s=1000)

    async def is_gone() -> bool:
        return "4321" not in await output(box, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")

    await until(is_gone)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"user": "nobody2"}, "no user 'nobody2'"), ({"workdir": "/none"}, "directory: '/none'")],
)
async def test_shell_that_cannot_start_says_why(
    box: Computer, options: dict[str, Any], reason: str
) -> None:
    result = await box.shell(**options).run("true")
    assert (result.status, result.shell_ended) == (CallStatus.ERROR, True)
    assert reason in result.stderr
    if "user" in options:
        result = await box.execute(["id"], **options)
        assert result.stderr == f"agentloop: the image has {reason}\n"


async def test_arguments_that_are_none_are_refused(box: Computer) -> None:
    for env in ({"A=B": "1"}, {"": "1"}, {"A": "\0"}, {"A": 1}):
        with pytest.raises(ValueError, match="env: "):
            await box.execute(["true"], env=env)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="command: 'ls -l' is no list"):
        await box.execute("ls -l")
    with pytest.raises(ValueError, match="port: 65536"):
        async with box.port(1 << 16):
            pass
    assert "b'" not in (await box.execute(["nonsuch"])).stderr


# -- walls ------------------------------------------------------------------------------------


async def test_memory_limit_ends_the_process_and_not_the_computer(pool: Pool) -> None:
    async with pool.computer(limits=ComputerLimits(memory_mib=64)) as box:
        result = await box.run("python3 -c 'bytearray(200 << 20)'", timeout_s=LONG_S)
        assert result.status is CallStatus.OOM
        assert await output(box, "echo fine") == "fine\n"


async def test_fork_bomb_ends_with_the_processes(pool: Pool) -> None:
    async with pool.computer(limits=ComputerLimits(processes=32)) as box:
        await box.run(":(){ :|:& };:", timeout_s=2)
        await box.kill_processes()
        assert await output(box, "echo fine") == "fine\n"


async def test_memory_of_many_small_processes_is_not_infrastructure(pool: Pool) -> None:
    command = (
        "mkfifo /tmp/go; sleep 1000 > /tmp/go & echo 500 > /proc/self/oom_score_adj;"
        "for i in $(seq 60); do python3 -c 'x = bytearray(4 << 20); input()' < /tmp/go & done; wait"
    )
    async with pool.computer(limits=ComputerLimits(memory_mib=64)) as box:
        result = await box.run(command, timeout_s=patient(5))
        assert result.status in (CallStatus.KILLED, CallStatus.OOM, CallStatus.TIMEOUT)
        assert not (await box.run("exit 1")).status.is_unscorable


async def test_computer_survives_what_is_written_to_its_shells_control(box: Computer) -> None:
    await box.run("trap 'head -c 100000 /dev/zero | tr \\\\0 9 >&9; echo >&9' DEBUG")
    await box.run("true", timeout_s=1)
    assert (await box.shell().run("echo fine")).stdout == "fine\n"


async def test_disk_limit_ends_the_computer(pool: Pool) -> None:
    async with pool.computer(limits=ComputerLimits(disk_mib=64)) as box:
        command = "head -c 300M /dev/zero > /big; sleep 1000"
        for result in (await box.run(command, timeout_s=patient(60)), await box.run("true")):
            assert result.status is CallStatus.KILLED
            assert "disk_mib" in result.stderr
        with pytest.raises(OSError, match="disk_mib"):
            await box.read("/etc/passwd")


async def test_no_network_but_loopback(box: Computer) -> None:
    assert (await box.run("exec 3<>/dev/tcp/192.0.2.1/80", timeout_s=LONG_S)).exit_status == 1
    listen = "import socket; s = socket.create_server(('127.0.0.1', 80))"
    connect = "socket.create_connection(('127.0.0.1', 80))"
    await output(box, f'python3 -c "{listen}; {connect}"')


@pytest.mark.parametrize(
    "command",
    [
        "kill -9 1; kill -STOP 1; false",
        "cat /proc/1/environ",
        "head -c 1 /proc/1/mem",
        "echo x > /proc/1/fd/3",
        "python3 -c 'import ctypes; e = ctypes.CDLL(None).ptrace(16, 1, 0, 0); exit(e != 0)'",
        "python3 -c 'import socket; socket.socket(40, 1)'",
        "unshare -m true",
        "mount -t tmpfs none /mnt",
        "mknod /tmp/disk b 8 0",
        "echo x > /run/agentloop/toolbox/x",
        "echo 1 > /proc/sys/kernel/sysrq",
    ],
)
async def test_root_reaches_neither_first_process_nor_kernel(box: Computer, command: str) -> None:
    assert not (await box.run(command, timeout_s=LONG_S)).ok
    assert await output(box, "echo fine") == "fine\n"


async def test_no_process_has_gained_a_capability(box: Computer) -> None:
    status = await output(box, "grep -E 'CapBnd|NoNewPrivs' /proc/self/status")
    assert int(status.split()[1], 16) & (1 << 8 | 1 << 16 | 1 << 19 | 1 << 21) == 0
    assert status.split()[3] == "1"


# -- files ------------------------------------------------------------------------------------


async def test_files_in_and_out(box: Computer, tmp_path: Path) -> None:
    data = os.urandom(1_000_000)
    await box.write("/new/folder/file", data, mode=0o640)
    assert await box.read("/new/folder/file") == data
    assert await output(box, "stat -c %a /new/folder/file") == "640\n"
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "file").write_bytes(b"1")
    (source / "link").symlink_to("sub/file")
    await box.put(source, "/copy")
    await box.get("/copy", tmp_path / "back")
    assert (tmp_path / "back" / "link").read_bytes() == b"1"
    with pytest.raises(IsADirectoryError, match="/copy"):
        await box.read("/copy")
    await box.remove("/copy")
    with pytest.raises(FileNotFoundError):
        await box.read("/copy/link")


async def test_folders_and_bytes_to_begin_with(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    async with pool.computer(files={"/app": tmp_path, "/etc/b": b"2"}) as box:
        assert await output(box, "cat /app/a /etc/b") == "12"


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/none", FileNotFoundError),
        ("/etc", OSError),
        ("/dev/zero", OSError),
        ("/tmp/fifo", OSError),
        ("/tmp/loop", OSError),
        ("/proc/1/mem", PermissionError),
    ],
)
async def test_what_is_no_file_is_refused(box: Computer, path: str, error: type[OSError]) -> None:
    await box.run("mkfifo /tmp/fifo; ln -s loop /tmp/loop")
    with pytest.raises(error):
        await box.read(path)
    with pytest.raises(OSError, match="longer than 3 bytes"):
        await box.read("/etc/passwd", max_bytes=3)


async def test_writes_never_reach_the_first_process(box: Computer) -> None:
    for path in ("/proc/1/mem", "/proc/self/mem", "/proc/1/oom_score_adj"):
        with pytest.raises(OSError):  # noqa: PT011 -- which one is the kernel's choice
            await box.write(path, b"1000000")
    assert await output(box, "echo fine") == "fine\n"


@pytest.mark.parametrize("link", ["/etc", "../../..", "/proc/self/root"])
async def test_links_out_of_a_folder_are_refused(box: Computer, tmp_path: Path, link: str) -> None:
    await box.run(f"mkdir /out; ln -s {link} /out/link")
    with pytest.raises(tarfile.FilterError):
        await box.get("/out", tmp_path / "back")
    assert not (tmp_path / "back" / "link").exists()


async def test_tars_stay_in_the_computer(box: Computer) -> None:
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as writer:
        writer.addfile(tarfile.TarInfo("../../../escaped"))
    tar.seek(0)
    await box.put(tar, "/deep/er")
    assert "escaped" not in os.listdir("/")
    assert await output(box, "ls -d /escaped") == "/escaped\n"


async def test_copies_are_bounded(box: Computer, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(1 << 20))
    with pytest.raises(ValueError, match="larger than"):
        await box.put(tmp_path, "/x", max_bytes=1000)
    await box.run("head -c 1000000 /dev/zero > /big")
    with pytest.raises(ValueError, match="larger than"):
        await box.get("/big", tmp_path / "back", max_bytes=1000)
    assert await output(box, "echo fine") == "fine\n"


# -- copies -----------------------------------------------------------------------------------

CHANGES = """
echo new > /etc/new; rm /etc/issue; rm -r /etc/skel; mkdir /etc/skel; echo x > /etc/skel/x
ln -s skel /etc/link; ln /etc/new /etc/hard; chmod 600 /etc/new; chown 12:34 /etc/skel/x
rm -r /usr/share/bug; ln -s /tmp /usr/share/bug; mkdir -p /a/b; touch "/a/b/a 'name'"
"""
SHOW = """
cat /etc/new /etc/hard /etc/skel/*; ls -A /etc/skel /a/b; readlink /etc/link /usr/share/bug
stat -c '%a %u %g %h' /etc/new /etc/skel/x; ls /etc/issue 2>&1
"""


async def test_fork_has_the_files_and_goes_its_own_way(box: Computer) -> None:
    await box.run(CHANGES)
    shown = await box.run(SHOW)
    assert "x\n" in shown.stdout
    async with box.fork() as sibling:
        assert (await sibling.run(SHOW)).stdout == shown.stdout
        await sibling.run("rm -r /a; echo changed > /etc/new; touch /etc/issue")
        assert (await box.run(SHOW)).stdout == shown.stdout
        await box.run("touch /late")
        assert not (await sibling.run("test -e /late")).ok


async def test_fork_leaves_running_processes_as_they_are(box: Computer) -> None:
    await box.run("mkfifo /tmp/go; cat /tmp/go > /tmp/went & ")
    async with box.fork() as sibling:
        assert "cat" not in await output(sibling, "cat /proc/[2-9]/comm; true")
    assert await output(box, "echo 1 > /tmp/go; wait; cat /tmp/went") == "1\n"


async def test_snapshot_is_restored_here_and_elsewhere(pool: Pool, box: Computer) -> None:
    await box.run("echo 1 > /file")
    snapshot = await box.snapshot()
    await box.run("echo 2 > /file; touch /more; sleep 1000 &")
    async with pool.computer(snapshot=snapshot) as second:
        assert await output(second, "cat /file") == "1\n"
    await box.restore(snapshot)
    assert await output(box, "cat /file; ls /more 2>&1 | wc -l") == "1\n1\n"
    snapshot.remove()
    assert not snapshot.path.exists()


async def test_killed_processes_leave_files(box: Computer) -> None:
    await box.run("X=1; touch /file; (trap '' TERM INT; setsid sleep 1000) & ")
    await box.kill_processes()
    assert await output(box, "echo $X; ls /file; cat /proc/[0-9]*/comm | grep -c sleep; :") == (
        "\n/file\n0\n"
    )


# -- life -------------------------------------------------------------------------------------


async def test_more_computers_than_allowed_wait_then_fail(pool: Pool) -> None:
    async with pool.computer(), pool.computer(), pool.computer(), pool.computer():
        with pytest.raises(Overloaded, match="max_sessions"):
            async with pool.computer():
                pass
    async with pool.computer() as box:
        assert await output(box, "echo fine") == "fine\n"


async def test_unknown_image_is_named(pool: Pool) -> None:
    with pytest.raises(ProgramUnsupported, match="no-such-image"):
        async with pool.computer("no-such-image"):
            pass


async def test_container_that_ends_early_is_not_waited_for(
    engine: aiodocker.Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill may hit it before it has connected."""
    monkeypatch.setattr(
        "agentloop.sandbox.computer.toolbox.command", lambda path: ["/bin/sh", "-c", "exit 3"]
    )
    settings = SETTINGS.model_copy(update={"start_timeout_s": 1000.0})
    async with Pool(settings) as pool:
        with pytest.raises(SandboxUnavailable, match="ended with status 3"):
            async with pool.computer():
                pass


async def test_lost_container_is_infrastructure(engine: aiodocker.Docker, box: Computer) -> None:
    name = box._machine.name

    async def kill() -> None:
        await engine.containers.container(name).kill()

    async with anyio.create_task_group() as group:
        group.start_soon(kill)
        with pytest.raises(ComputerLost):
            await box.run("sleep 1000", timeout_s=1000)
    with pytest.raises(ComputerLost):
        await box.read("/etc/passwd")


async def test_nothing_is_left_after_close_or_cancel(engine: aiodocker.Docker) -> None:
    async with Pool(SETTINGS) as pool:
        with anyio.move_on_after(LONG_S) as scope:
            async with pool.computer() as box, box.fork() as sibling:
                folder = box._place.folder
                await sibling.run(
                    "echo; sleep 1000", timeout_s=1000, on_output=lambda *_: scope.cancel()
                )
        assert scope.cancelled_caught
    assert await num_containers(engine, os.getpid()) <= SETTINGS.max_sessions  # the module's pool
    assert not folder.exists()


OWNER = """
import anyio
from agentloop.sandbox import Pool, PoolSettings
async def main():
    settings = PoolSettings(backend="docker", workers=1, preload=[])
    async with Pool(settings) as pool, pool.computer() as box, box.fork() as sibling:
        await box.snapshot()
        print("ready", flush=True)
        await sibling.run("trap '' INT TERM; sleep 1000", timeout_s=1000)
anyio.run(main)
"""


async def test_nothing_is_left_after_the_owner_is_killed(engine: aiodocker.Docker) -> None:
    async with await open_process(
        [sys.executable, "-c", OWNER], stderr=subprocess.DEVNULL
    ) as owner:
        assert owner.stdout is not None
        with anyio.fail_after(patient(120)):
            assert b"ready" in await owner.stdout.receive()
        assert await num_containers(engine, owner.pid) >= 2
        owner.send_signal(signal.SIGKILL)

    async def is_gone() -> bool:
        return await num_containers(engine, owner.pid) == 0

    await until(is_gone)
    async with Pool(SETTINGS):  # reaps its directories
        names = os.listdir(tempfile.gettempdir())
        assert not [name for name in names if name.startswith(f"agentloop-sandbox-{owner.pid}-")]
