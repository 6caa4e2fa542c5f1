"""One server for all processes of a test session, such as the workers of pytest-xdist.

    users ──hold a shared lock on FOLDER/users──────────> get the URL of the server
    keeper ─starts the server, waits for the same lock──> alone at last, ends the server

The first user starts the keeper. It is a process of its own, so that no user's end takes the server
from the others. The kernel releases the lock of a user that ends, even by SIGKILL.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import anyio

from agentloop.inference.processes.supervise import ServerProcess, ServerSettings, sglang_servers
from agentloop.models import SMALL

ROOT = Path(__file__).parents[1]
SGLANG = (sys.executable, "-m", __name__)


@contextmanager
def shared_server(folder: Path, keeper: Sequence[str] = SGLANG) -> Iterator[str]:
    """Yield the URL of the server that all users of `folder` share.

    Args:
        keeper: Command that calls `keep` with the folder, its last argument. By default, it keeps
            an SGLang server with the small model.
    """
    folder.mkdir(exist_ok=True)
    url = folder / "url"
    with (folder / "users").open("w") as users:
        with (folder / "starting").open("w") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            fcntl.flock(users, fcntl.LOCK_SH)  # an earlier server has ended by then
            if not url.exists():
                url.write_text(_start(folder, keeper))
        yield url.read_text()


def _start(folder: Path, keeper: Sequence[str]) -> str:
    log = folder / "keeper.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*keeper, str(folder)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            env={**os.environ, "TMPDIR": str(folder)},  # that of the first user ends with it
            text=True,
            start_new_session=True,  # Ctrl-C is for the users
        )
    process.returncode = 0  # not waited for: it outlives us while others use the server
    assert process.stdout is not None
    with process.stdout:
        line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the shared server did not start:\n{log.read_text()[-5000:]}")
    return line.strip()


async def keep(folder: Path, servers: AbstractAsyncContextManager[list[ServerProcess]]) -> None:
    """Run a server until nobody uses `folder` any more."""
    with (folder / "users").open("w") as users:
        async with servers as (server,):
            print(server.url, flush=True)
            await anyio.to_thread.run_sync(fcntl.flock, users, fcntl.LOCK_EX)
            # Who comes now waits for the lock, and then starts another server.
            (folder / "url").unlink(missing_ok=True)


def main() -> None:
    folder = Path(sys.argv[1])
    servers = sglang_servers(
        SMALL,
        ServerSettings(max_total_tokens=32_768),
        log_dir=folder,
        on_progress=lambda line: print(line, file=sys.stderr),
    )
    anyio.run(keep, folder, servers)


if __name__ == "__main__":
    main()
