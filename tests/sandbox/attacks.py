"""What hostile or clumsy programs do, and what must come of it: one table for both forms.

Each row is checked against the answer, and then a harmless call must still work. `walls` names
what a row relies on beyond a process of its own: "uid" (one per call) or "cgroup".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from sandbox import CallResult, CallStatus

OK, ERROR, TIMEOUT = CallStatus.OK, CallStatus.ERROR, CallStatus.TIMEOUT
OOM, KILLED, FLOOD = CallStatus.OOM, CallStatus.KILLED, CallStatus.OUTPUT_LIMIT


@dataclasses.dataclass(frozen=True)
class Attack:
    name: str
    code: str
    statuses: tuple[CallStatus, ...]
    check: Callable[[CallResult], bool] = lambda result: True
    timeout_s: float = 1.0
    within_s: float = 2.5  # measured by the worker, after the wait
    wall: str = ""


def prints(text: str) -> Callable[[CallResult], bool]:
    return lambda result: result.stdout.strip() == text


def says(text: str) -> Callable[[CallResult], bool]:
    return lambda result: text in result.stderr


SYSCALLS = """
import ctypes
lib = ctypes.CDLL(None, use_errno=True)
numbers = dict(unshare_user=272, keyctl=250, ptrace=101, io_uring_setup=425, bpf=321,
               userfaultfd=323, perf_event_open=298, process_vm_readv=310, add_key=248)
for name, number in numbers.items():
    first = 0x10000000 if name == "unshare_user" else 0
    if lib.syscall(number, first, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() not in (1, 38):
        print(name, ctypes.get_errno())
"""

SOCKETS = """
import socket
for family in (40, 38, 16, 17):  # AF_VSOCK, AF_ALG, AF_NETLINK, AF_PACKET
    try:
        socket.socket(family, socket.SOCK_DGRAM if family != 38 else socket.SOCK_SEQPACKET)
        print(family)
    except OSError:
        pass
for where in ("127.0.0.1", "169.254.169.254", "172.17.0.1", "192.0.2.1"):
    with socket.socket() as s:
        s.settimeout(0.5)
        try:
            s.connect((where, 80))
            print(where)
        except OSError as error:
            if where != "127.0.0.1" and error.errno != 101:
                print(where, error)
"""

PEEK = """
import os
for path in ("environ", "mem", "fd/0", "fd/5", "maps", "cwd/x", "root/etc/hostname"):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if pid != os.readlink("/proc/self"):
            try:
                with open(f"/proc/{pid}/{path}", "rb") as f:
                    f.read(1)
                print(pid, path)
            except OSError:
                pass
"""

KILLS = """
import os, signal
for pid in [*range(1, 40), -1, 0][:-1]:
    if pid != os.getpid():
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
print("alive")
"""

IGNORES = """
import signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
print("deaf", flush=True)
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
"""

DAEMONS = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    os.wait()
print("parent")
"""

LINKS = """
import os
os.symlink("/", "root"); os.symlink("/etc", "etc"); os.symlink("..", "up")
os.makedirs("a/b/c"); open("a/b/c/f", "w").close()
os.chmod("a/b", 0); os.chmod("a", 0); os.chmod(".", 0)
print("left")
"""

EIGHT_BOMBS = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        hoard = []
        while True:
            try:
                hoard.append(b"1" * 10_000_000)
            except MemoryError:
                pass
time.sleep(60)
"""

ATTACKS = [
    Attack(
        "fork bomb",
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        (TIMEOUT, KILLED),
        within_s=4,
    ),
    Attack(
        "thread bomb",
        "import threading as t, time\nwhile True: t.Thread(target=time.sleep, args=(60,)).start()",
        (TIMEOUT,),
        says("can't start new thread"),
    ),
    Attack("one large object", "x = bytearray(10**10)", (OOM,)),
    Attack("memory bomb", "x = []\nwhile True: x.append(b'1' * 10**7)", (OOM, TIMEOUT)),
    Attack("eight memory bombs", EIGHT_BOMBS, (TIMEOUT, OOM, KILLED), within_s=4, wall="cgroup"),
    Attack(
        "large file",
        "f = open('f', 'wb')\nwhile True: f.write(b'0' * 10**6)",
        (ERROR,),
        says("File too large"),
    ),
    Attack(
        "full disk",
        "for i in range(100):\n  with open(str(i), 'wb') as f: f.write(b'0' * 10**7)",
        (ERROR,),
        says("No space left"),
    ),
    Attack(
        "no inodes",
        "for i in range(100_000): open(str(i), 'w').close()",
        (ERROR,),
        says("No space left"),
        timeout_s=4,
    ),
    Attack("write to the root", "open('/x', 'w')", (ERROR,), says("Read-only")),
    Attack("other processes", PEEK, (OK,), prints("")),
    Attack("kill everybody", KILLS, (OK,), prints("alive"), wall="uid"),
    Attack("kill the group", "import os; os.kill(0, 9)", (KILLED, OK)),
    Attack("become root", "import os; os.setuid(0)", (ERROR,), wall="uid"),
    Attack("system calls", SYSCALLS, (OK,), prints("")),
    Attack("sockets", SOCKETS, (OK,), prints("")),
    Attack("environment", "import os; print(*os.environ)", (OK,), prints("PATH")),
    Attack(
        "descriptors",
        "import os; print([fd for fd in range(3, 300) if os.path.exists(f'/proc/self/fd/{fd}')])",
        (OK,),
        prints("[]"),
    ),
    Attack("flood", "while True: print('x' * 10_000)", (FLOOD,), within_s=0.5),
    Attack(
        "a gigabyte",
        "import os\nfor _ in range(1000): os.write(1, b'x' * 10**6)",
        (FLOOD,),
        within_s=0.5,
    ),
    Attack(
        "closed stdout", "import os; print('hi'); os.close(1); print('no')", (ERROR,), prints("hi")
    ),
    Attack(
        "os._exit",
        "import os; print('hi', end=''); os._exit(7)",
        (ERROR,),
        lambda r: r.exit_code == 7 and r.stdout == "hi",
    ),
    Attack("exec", "import os; os.execv('/bin/echo', ['echo', 'hi'])", (OK,), prints("hi")),
    Attack("deaf to signals", IGNORES, (TIMEOUT,), prints("deaf")),
    Attack(
        "partial output",
        "print('so far', end='')\nwhile True: pass",
        (TIMEOUT,),
        prints("so far"),
        timeout_s=0.3,
    ),
    Attack("null pointer", "import ctypes; ctypes.string_at(0)", (KILLED,)),
    Attack("recursion", "def f(): f()\nf()", (ERROR,), says("RecursionError")),
    Attack("200,000 terms", "+".join("1" * 200_000), (ERROR, KILLED, OOM, OK), timeout_s=4),
    Attack("parentheses", "(" * 5000 + ")" * 5000, (ERROR, KILLED)),
    Attack("daemons", DAEMONS, (OK,), prints("parent"), within_s=1),
    Attack(
        "zombies",
        "import os\nfor _ in range(20):\n  if os.fork() == 0: os._exit(0)\nprint(1)",
        (OK,),
        prints("1"),
    ),
    Attack(
        "bytes that are no text",
        "import os; os.write(1, bytes(range(256))); print('\\ud800')\n'\\ud800'",
        (OK,),
        lambda r: r.stdout_bytes >= 258 and r.stdout.startswith("\x00\x01"),
    ),
    Attack("links and closed directories", LINKS, (OK,), prints("left")),
    Attack("forged report", 'import sys; print(\'{"op": "done"}\'); sys.exit(3)', (ERROR,)),
    Attack(
        "hostile exception",
        "class E(Exception):\n  def __str__(self): raise SystemExit(0)\nraise E",
        (ERROR,),
    ),
]
