"""Computers made and ended while containers, the engine and we ourselves are killed at random.

    unshare --pid --fork --mount-proc --kill-child \
        python -m tests.integration.killed_computers --num 10000

In rounds: a process of ours opens computers and ends them. Each writes a token of its own where
others would find it, if files were shared, and reads it back. SIGKILL comes at random moments to a
container, by the kernel or the engine, or to the engine, which is a private one; and ends the round
for our process. Then the next start cleans up, and nothing of a computer may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random

import aiodocker
import aiohttp
import anyio
import anyio.abc

from agentloop.sandbox import ComputerLost, Overloaded, Pool, PoolSettings
from agentloop.sandbox.engine import connect
from agentloop.sandbox.errors import SandboxUnavailable
from tests.integration.private_engine import ROOT, PrivateEngine, private_engine
from tests.patience import patient

AT_ONCE = 6
ROUND_S, BLOW_EVERY_S, DOWN_S = 40.0, 1.0, 1.0  # on average
QUIET_S = 6.0
VICTIMS = {"container": 20, "container, by the engine": 20, "engine": 1}
ENDS = ("ours", "ours", "ours and the engine")
# An engine forgets a container that it was starting as it, or runc, was killed. An empty cgroup and
# a shim stay, maybe with runc, which waits for the start; no request reaches them. So do folders,
# where the engine itself was killed.
OF_ENGINE = re.compile(r"^/sys/fs/cgroup/|^shim |/moby/|^process \d+ runc:")
LEAVE_TOKEN = "cat /token /dev/shm/* /tmp/token 2>&-; echo {0} | tee /token /dev/shm/{0} /tmp/token"


def settings_for(url: str) -> PoolSettings:
    return PoolSettings(
        backend="docker", engines=[url], workers=1, preload=[], memory_mib=256, max_sessions=AT_ONCE
    )


async def open_computers(url: str) -> None:
    """Open computers and end them until killed; write a line for each."""

    async def one_by_one() -> None:
        while True:
            token, name = secrets.token_hex(16), ""
            try:
                async with pool.computer() as box:
                    name = box.container_name
                    print(f"made {name}", flush=True)
                    left = await box.run(LEAVE_TOKEN.format(token))
                    seen = await box.run("cat /token /dev/shm/* /tmp/token")
                    is_own = left.stdout.split() == [token] and seen.stdout.split() == 3 * [token]
                    if left.ok and seen.ok:  # a process of it may have been killed alone
                        print(f"{'own' if is_own else 'shared'} {name}", flush=True)
            except (ComputerLost, Overloaded, SandboxUnavailable) as error:
                print(f"{type(error).__name__} {name}", flush=True)
                await anyio.sleep(0.2)

    while True:
        with contextlib.suppress(SandboxUnavailable):  # killed as it started
            async with Pool(settings_for(url)) as pool, anyio.create_task_group() as group:
                for _ in range(AT_ONCE):
                    group.start_soon(one_by_one)


async def left(engine: PrivateEngine, *ours: Path) -> set[str]:
    """Return all that exists of an engine's containers, and in folders of our own."""
    async with connect(engine.url) as docker:
        names = {c["Names"][0] for c in await docker.containers.list(all=True)}
    return names | found(engine, ours)


def found(engine: PrivateEngine, ours: Iterable[Path]) -> set[str]:
    """Return cgroups, folders, mounts (also of network namespaces), sockets and processes."""
    data = engine.folder / "data"
    folders = [
        *((data / name).glob("*") for name in ("containers", "overlay2")),
        (data / "image/overlay2/layerdb/mounts").glob("*"),
        (engine.folder / "exec/containerd").glob("io.containerd.runtime.*/moby/*"),
        *(folder.rglob("*") for folder in ours),
        ROOT.glob(f"*/{engine.cgroup}/*/" if (ROOT / "pids").is_dir() else f"{engine.cgroup}/*/"),
    ]
    seen = {str(path) for paths in folders for path in paths}
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    seen |= {f"mount {path}" for path in mounts if path.startswith(f"{engine.folder}/")}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if b"containerd-shim" in command and bytes(engine.folder) in command:
                seen.add(f"shim {process.name}")
    for pid in engine.pids():
        with contextlib.suppress(OSError):
            seen.add(f"process {pid} {Path(f'/proc/{pid}/comm').read_text().strip()}")
    return seen


def kill_inside(engine: PrivateEngine, pid: int) -> bool:
    """Kill a process of the engine's containers, and never one that has got its number since."""
    process = os.pidfd_open(pid)
    try:
        is_inside = pid in engine.pids()
        if is_inside:
            signal.pidfd_send_signal(process, signal.SIGKILL)
        return is_inside
    finally:
        os.close(process)


async def strike(engine: PrivateEngine, victim: str, dice: Random) -> bool:
    """Kill a victim; return whether there was one."""
    if victim == "engine":
        await engine.kill()
        await anyio.sleep(dice.expovariate(1 / DOWN_S))
        await engine.start()
        return True
    with contextlib.suppress(
        OSError, SandboxUnavailable, aiodocker.DockerError, aiohttp.ClientError
    ):
        if victim == "container":
            pids = engine.servers()
            return bool(pids) and kill_inside(engine, dice.choice(pids))
        async with connect(engine.url) as docker:
            if running := await docker.containers.list():
                await dice.choice(running).kill()
                return True
    return False


async def play(engine: PrivateEngine, scratch: Path, dice: Random, killed: Counter[str]) -> Path:
    """Run one round; return what our process has written."""
    log = engine.folder / "lines"
    command = [sys.executable, "-m", __spec__.name, "--work", engine.url]
    with log.open("wb") as out:
        env = {**os.environ, "TMPDIR": str(scratch)}
        ours = subprocess.Popen(command, stdout=out, env=env)  # noqa: ASYNC220 - not waited for
    with anyio.move_on_after(dice.expovariate(1 / ROUND_S)):
        while ours.poll() is None:
            await anyio.sleep(dice.expovariate(1 / BLOW_EVERY_S))
            (victim,) = dice.choices([*VICTIMS], [*VICTIMS.values()])
            with anyio.CancelScope(shield=True):
                killed[victim] += await strike(engine, victim, dice)
    if ours.poll() is not None:
        raise RuntimeError(f"our process ended by itself: {ours.returncode}")
    ours.kill()
    if dice.choice(ENDS) != "ours":
        killed["engine"] += await strike(engine, "engine", dice)
    ours.wait()
    killed["ours"] += 1
    return log


async def until_nothing_is_new(engine: PrivateEngine, before: set[str], *ours: Path) -> set[str]:
    """Wait until nothing has been added, for a while; return what has."""
    new = set[str]()
    with anyio.move_on_after(patient(QUIET_S)):
        while new := await left(engine, *ours) - before:  # noqa: ASYNC110 - nobody tells
            await anyio.sleep(0.2)
    return new


async def main(num: int, seed: int, minutes: float) -> int:
    dice, killed, lines = Random(seed), Counter[str](), Counter[str]()
    names, deadline = set[str](), time.monotonic() + 60 * minutes
    faults = Counter({"shared": 0, "left to the next start": 0, "leaked": 0})
    async with private_engine() as engine:
        scratch = engine.folder / "tmp"
        scratch.mkdir()
        tempfile.tempdir = str(scratch)
        async with Pool(settings_for(engine.url)) as pool, pool.computer() as box:
            assert (await box.run("true")).ok
        before = await left(engine, scratch)
        while lines["made"] < num and time.monotonic() < deadline:
            num_engine = killed["engine"]
            log = await play(engine, scratch, dice, killed)
            for kind, name in (line.split(" ") for line in log.read_text().splitlines()):
                lines[kind] += 1
                faults["shared"] += kind == "shared" or (kind == "made" and name in names)
                names |= {name} if name else set()
            remaining = await until_nothing_is_new(engine, before)
            async with Pool(settings_for(engine.url)):
                pass
            leaked = await until_nothing_is_new(engine, before, scratch)
            before |= leaked  # each counts once
            faults["left to the next start"] += sum(what.startswith("/agent") for what in remaining)
            is_engine = re.compile("/data/" if killed["engine"] > num_engine else "$^")
            ours = {w for w in leaked if not OF_ENGINE.search(w) and not is_engine.search(w)}
            faults["leaked"] += len(ours)
            faults["forgotten by the engine"] += sum(what.startswith("shim") for what in leaked)
            print(f"{dict(lines)}, killed {dict(killed)}, {dict(faults)}", flush=True)
            for what in sorted(leaked) or sorted(remaining):
                print(f"    {'after' if leaked else 'before'} the next start: {what}", flush=True)
    return 1 if faults["leaked"] or faults["shared"] else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=60, help="of time, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        anyio.run(open_computers, options.work)
    sys.exit(anyio.run(main, options.num, options.seed, options.minutes))
