"""What weights cost as differences (weights.local_folder), and whole, over a network of some speed.

    python -m bench.weight_differences --gbits 1,10 --nodes 1,8      (as root; Linux)

    bfloat16 ──a step of Adam's size──> bfloat16 ──> difference ──two network namespaces──> patched

All nodes read at once, through one link of this rate. Differences are made and applied on a core.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from agentloop.models.differences import apply_difference, write_difference
from bench.command import numbers, parser_for, words

STD = 0.02  # of weights
SPREAD = 0.3  # of Adam's steps, in learning rates
NUM_ROUNDS = 3
ADDRESS, PORT = "10.9.9.1", 9000
SERVE = f"""
import http.server as h
server = h.ThreadingHTTPServer(("{ADDRESS}", {PORT}), h.SimpleHTTPRequestHandler)
print(flush=True)
server.serve_forever()
"""
READ = """
import concurrent.futures as f, sys, urllib.request as u
def read(url):
    with u.urlopen(url, timeout=600) as reply:
        while reply.read(1 << 20): pass
num = int(sys.argv[2])
with f.ThreadPoolExecutor(num) as pool: list(pool.map(read, [sys.argv[1]] * num))
"""


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def step(num_values: int, lr: float, folder: Path) -> float:
    """Write weights before and after a step as `old` and `whole`; return the share that changed."""
    weights = torch.randn(num_values) * STD
    old = weights.bfloat16().view(torch.int16)
    weights -= lr * (torch.randn(num_values) * SPREAD).clamp(-1, 1)
    new = weights.bfloat16().view(torch.int16)
    for name, values in (("old", old), ("whole", new)):
        (folder / name).write_bytes(memoryview(values.numpy()).cast("B"))
    return float((old != new).float().mean())


@contextmanager
def namespaces(gbit: str) -> Iterator[tuple[str, str]]:
    """Two network namespaces and a link of this rate between them."""
    names = ("weights-a", "weights-b")
    commands = [
        *(f"ip netns add {name}" for name in names),
        f"ip link add wa netns {names[0]} type veth peer name wb netns {names[1]}",
        f"ip -n {names[0]} addr add {ADDRESS}/24 dev wa",
        f"ip -n {names[1]} addr add 10.9.9.2/24 dev wb",
        *(f"ip -n {name} link set w{name[-1]} up" for name in names),
        f"tc -n {names[0]} qdisc add dev wa root tbf rate {gbit}gbit burst 4mb latency 50ms",
    ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def transfers(gbit: str, nodes: Sequence[int], folder: Path) -> None:
    """Print how long the nodes take to read the weights."""

    def within(name: str, *command: str) -> list[str]:
        return ["ip", "netns", "exec", name, sys.executable, "-c", *command]

    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with (
        namespaces(gbit) as (here, there),
        subprocess.Popen(within(here, SERVE), cwd=folder, stdout=pipe, stderr=nothing) as server,
    ):
        try:
            assert server.stdout is not None
            server.stdout.readline()
            for num in nodes:
                times = []
                for file in ("whole", "difference"):
                    command = within(there, READ, f"http://{ADDRESS}:{PORT}/{file}", str(num))
                    read = partial(subprocess.run, command, check=True)
                    taken_s = statistics.median(seconds(read) for _ in range(NUM_ROUNDS))
                    times.append(f"{file} {taken_s:.1f} s")
                print(f"  {gbit} Gbit/s, {num} nodes: {', '.join(times)}", flush=True)
        finally:
            server.terminate()


def main() -> None:
    parser = parser_for("weight_differences", __doc__)
    parser.add_argument("--millions", type=int, default=600, help="of weights")
    parser.add_argument("--lr", type=words, default="1e-6,1e-5", help="learning rates")
    parser.add_argument("--gbits", type=words, default="1,10", help="rates of the link")
    parser.add_argument("--nodes", type=numbers, default="1,8")
    options = parser.parse_args()
    for lr in options.lr:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as temporary:
            folder = Path(temporary)
            changed = step(options.millions * 10**6, float(lr), folder)
            old, whole, difference = (folder / name for name in ("old", "whole", "difference"))
            made_s = seconds(partial(write_difference, old, whole, difference))
            applied_s = seconds(partial(apply_difference, old, difference, folder / "copy"))
            assert (folder / "copy").read_bytes() == whole.read_bytes()
            sizes = [path.stat().st_size / 1e6 for path in (difference, whole)]
            print(
                f"lr {lr}: {changed:.2%} of weights changed, {sizes[0]:.1f} of {sizes[1]:.0f} MB; "
                f"made in {made_s:.1f} s, applied and hashed in {applied_s:.1f} s"
            )
            for gbit in options.gbits:
                transfers(gbit, options.nodes, folder)


if __name__ == "__main__":
    main()
