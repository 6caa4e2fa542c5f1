"""The speed of computers: ready from a warm pool, forked, restored, many at once.

    python -m bench.computers --num 100

Beside them, `docker run` of the same image, and SWE-ReX, if it is installed here and in an image.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from importlib import import_module

import anyio

from agentloop.sandbox import Computer, Pool, PoolSettings
from agentloop.sandbox.image.build import image_tag

NUM_WARM = 8


async def seconds(work: Callable[[], Awaitable[object]]) -> float:
    begun = anyio.current_time()
    await work()
    return anyio.current_time() - begun


def show(what: str, times: list[float]) -> None:
    p50, p99 = statistics.median(times), sorted(times)[int(len(times) * 0.99)]
    print(f"{what:32} p50 {p50 * 1e3:7.1f} ms  p99 {p99 * 1e3:7.1f} ms  n {len(times)}", flush=True)


async def open_swe_rex(image: str, stack: AsyncExitStack) -> None:
    """Open a shell of SWE-ReX in a container, and run a command in it."""
    box = import_module("swerex.deployment.docker").DockerDeployment(image=image, pull="never")
    words = import_module("swerex.runtime.abstract")
    stack.push_async_callback(box.stop)
    await box.start()
    await box.runtime.create_session(words.CreateBashSessionRequest())
    said = await box.runtime.run_in_session(words.BashAction(command="echo ready"))
    assert said.output.strip() == "ready"


async def measure(num: int, num_bytes: int, swe_rex: str) -> None:
    settings = PoolSettings(backend="docker", workers=1, preload=[], max_sessions=2 * num)
    async with Pool(settings, on_progress=print) as pool:

        async def open_ready(stack: AsyncExitStack) -> Computer:
            box = await stack.enter_async_context(pool.computer())
            assert (await box.run("echo ready")).stdout == "ready\n"
            return box

        async def rounds(work: Callable[[AsyncExitStack], Awaitable[object]]) -> list[float]:
            times = []
            for _ in range(num):
                await pool.warm_computers(NUM_WARM)
                async with AsyncExitStack() as stack:
                    times.append(await seconds(partial(work, stack)))
            return times

        show("warm, a command has run", await rounds(open_ready))
        async with pool.computer() as box:
            show("a command", [await seconds(lambda: box.run("true")) for _ in range(num)])
            await box.run(f"head -c {num_bytes} /dev/urandom > /data; rm /etc/issue")
            forks = await rounds(lambda stack: stack.enter_async_context(box.fork()))
            show(f"fork with {num_bytes >> 10} KiB of changes", forks)
            snapshot = await box.snapshot()
            show("restore of the same", await rounds(lambda _: box.restore(snapshot)))
        await pool.warm_computers(num)
        async with AsyncExitStack() as stack:

            async def open_all() -> None:
                async with anyio.create_task_group() as group:
                    for _ in range(num):
                        group.start_soon(open_ready, stack)

            print(f"{num} at once: {await seconds(open_all):.2f} s", flush=True)
    command = ["docker", "run", "--rm", "--network=none", "--entrypoint=echo", image_tag(), "ready"]
    show("docker run", [await seconds(lambda: anyio.run_process(command)) for _ in range(10)])
    times = []
    for _ in range(10 if swe_rex else 0):
        async with AsyncExitStack() as stack:
            times.append(await seconds(partial(open_swe_rex, swe_rex, stack)))
    if times:
        show("SWE-ReX, a command has run", times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=100)
    parser.add_argument("--bytes", type=int, default=100_000, help="size of what a fork copies")
    parser.add_argument("--swe-rex", default="", help="image that has swerex-remote")
    arguments = parser.parse_args()
    anyio.run(measure, arguments.num, arguments.bytes, arguments.swe_rex)
