"""Hostile or faulty programs and their expected outcomes: one table for both backends.

Each row is checked against the answer, and then by a harmless call (`AFTER`), which must find
nothing of it. `wall` names what a row relies on beyond a process of its own: "uid" (one per call,
or namespaces), "spaces" (namespaces), "filter" (system calls), "hidden" (what others run) or
"counted" (the memory of all processes of a call together).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import anyio
import orjson

from agentloop.sandbox import CallResult, CallStatus, Pool

OK, ERROR, TIMEOUT = CallStatus.OK, CallStatus.ERROR, CallStatus.TIMEOUT
OOM, KILLED, FLOOD = CallStatus.OOM, CallStatus.KILLED, CallStatus.OUTPUT_LIMIT


@dataclasses.dataclass(frozen=True)
class Attack:
    name: str
    code: str
    statuses: tuple[CallStatus, ...]
    check: Callable[[CallResult], bool] = lambda result: True
    timeout_s: float = 30.0  # those that shall be late say when
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
    # 28: where a user namespace may have none below it.
    if lib.syscall(number, first, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() not in (1, 28, 38):
        print(name, ctypes.get_errno())
"""

SOCKETS = """
import itertools, socket
refused = (1, 93, 94, 97)  # EPERM, or as a kernel does that has none of the kind
for family in range(46):
    # IPPROTO_TCP, UDP, UDP-Lite, SCTP and MPTCP; SMC and Unix sockets have a 1.
    for kind, protocol in itertools.product((1, 2, 3, 4, 5, 6), (0, 1, 6, 17, 136, 132, 262)):
        if (family, kind, protocol) == (1, 1, 0):  # a pair of these is what asyncio needs
            continue
        for make in (socket.socket, socket.socketpair):
            if (family, kind, protocol, make) == (1, 5, 0, socket.socketpair):
                continue
            try:
                make(family, kind, protocol)
                print(family, kind, protocol, make.__name__)
            except OSError as error:
                if error.errno not in refused:
                    print(family, kind, protocol, make.__name__, error)
"""

NETWORK = """
import socket
for where in ("127.0.0.1", "169.254.169.254", "172.17.0.1", "192.0.2.1"):
    try:
        with socket.socket() as s:
            s.settimeout(0.5)
            s.connect((where, 80))
            print(where)
    except OSError as error:
        if error.errno not in (97, 101, 111):
            print(where, error)
"""

PEEK = """
import os
NAMES = False
fds = [f"fd/{n}" for n in range(40)]
for pid in filter(str.isdigit, os.listdir("/proc")):
    if pid == os.readlink("/proc/self"):
        continue
    names = ("comm", "cmdline", "status", "stat", "statm", "limits", "sched", "oom_score_adj",
             "autogroup", "wchan", "cgroup", "mountinfo", "net/unix", "setgroups")
    secrets = ("environ", "mem", "maps", "auxv", "stack", "syscall", "cwd", "root", "exe", *fds)
    for path in secrets + (names if NAMES else ()):
        try:
            fd = os.open(f"/proc/{pid}/{path}", os.O_RDONLY)
            if os.read(fd, 1):  # a zombie's can be opened, and are empty
                print(pid, path)
        except OSError:
            pass
        try:
            os.open(f"/proc/{pid}/{path}", os.O_WRONLY)
            print(pid, path, "to write")
        except OSError:
            pass
"""

KILLS = """
import os, signal
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
for pid in {*pids, *range(1, 40)} - {os.getpid()}:
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL, 0):
        try:
            os.kill(pid, number)
            print(pid, number)
        except OSError:
            pass
        try:
            signal.pidfd_send_signal(os.pidfd_open(pid), number)
            print(pid, number, "by descriptor")
        except OSError:
            pass
try:
    os.kill(-1, signal.SIGKILL)
except ProcessLookupError:
    pass
print("alive")
"""

# Number, then arguments for which it would do something. Each must be refused (EPERM or ENOSYS).
MORE_SYSCALLS = """
import ctypes
lib = ctypes.CDLL(None, use_errno=True)
lib.syscall.argtypes = [ctypes.c_long] * 7
words = [ctypes.create_string_buffer(word) for word in (b"tmpfs", b".")]
kind, place = map(ctypes.addressof, words)
calls = dict(
    mount=(165,), umount2=(166,), pivot_root=(155,), chroot=(161,), setns=(308,),
    unshare_files=(272, 0x400), unshare_net=(272, 0x40000000), unshare_pid=(272, 0x20000000),
    clone_user=(56, 0x10000011), clone_net=(56, 0x40000011), clone3=(435,),
    init_module=(175,), finit_module=(313,), kexec_load=(246,), reboot=(169,), swapon=(167,),
    sethostname=(170,), settimeofday=(164,), clock_settime=(227,), adjtimex=(159,), acct=(163,),
    open_by_handle_at=(304,), name_to_handle_at=(303,), fanotify_init=(300,), syslog=(103,),
    process_vm_writev=(311,), pidfd_getfd=(438,), process_madvise=(440,), kcmp=(312,),
    move_pages=(279,), migrate_pages=(256,), ioperm=(173,), iopl=(172,), modify_ldt=(154,),
    shmget=(29, 0, 4096, 0o1666), semget=(64, 0, 1, 0o1666), msgget=(68, 0, 0o1666),
    mq_open=(240,), request_key=(249,), io_uring_enter=(426,), io_uring_register=(427,),
    bind=(49,), listen=(50,), accept=(43,), accept4=(288,), quotactl=(179,), nfsservctl=(180,),
    unshare_mounts=(272, 0x20000), mount_flags=(165, kind, place, kind, 14),
    mount_read_only=(165, kind, place, kind, 15),
    inotify_init=(253,), inotify_init1=(294,), inotify_add_watch=(254,), fanotify_mark=(301,),
    open_tree=(428,), move_mount=(429,), fsopen=(430,), fsmount=(432,), mount_setattr=(442,),
    memfd_secret=(447,), personality=(135, 0x40000),
    sched_setscheduler=(144,), vhangup=(153,),
)
for name, (number, *given) in calls.items():
    done = lib.syscall(number, *given, *[0] * (6 - len(given)))
    if done >= 0 or ctypes.get_errno() not in (1, 38):
        print(name, done, ctypes.get_errno())
"""

# getpid by the gate of 32-bit programs: a filter for one architecture alone would not see it.
I386 = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20; int 0x80; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print("called", ctypes.CFUNCTYPE(ctypes.c_int)(address)(), flush=True)
"""

# Datagram sockets get names without bind(): by sending, or (SO_PASSCRED) by connecting.
HOME = """
import os, pathlib, subprocess, tempfile
pathlib.Path("/tmp/notes").write_text("42")
(pathlib.Path.home() / ".state").write_text("1")
subprocess.run("echo ~ $HOME", shell=True)
print(os.getcwd(), tempfile.gettempdir(), sorted(os.listdir()))
"""

MEETING = """
import socket
with socket.socket(socket.AF_UNIX) as s:
    try:
        s.bind("\\0meet")
        print("bound")
    except PermissionError:
        pass
a, b = socket.socketpair()
a.send(b"x")
assert b.recv(1) == b"x"
"""

# A request that only its last bits make another one would pass a filter that looks at all of them.
REQUESTS = """
import ctypes, os
lib = ctypes.CDLL(None, use_errno=True)
lib.syscall.argtypes = [ctypes.c_long] * 4
FCNTL, IOCTL = 72, 16
calls = {"F_SETOWN": (FCNTL, 8), "F_SETSIG": (FCNTL, 10), "F_SETOWN_EX": (FCNTL, 15),
         "F_SETLEASE": (FCNTL, 1024), "F_NOTIFY": (FCNTL, 1026), "F_SET_RW_HINT": (FCNTL, 1036),
         "TIOCSTI": (IOCTL, 0x5412), "TIOCSPTLCK": (IOCTL, 0x40045431),
         "TIOCLINUX": (IOCTL, 0x541C),
         "TIOCGPTN": (IOCTL, 0x80045430), "TIOCGPTPEER": (IOCTL, 0x5441),
         "FIOASYNC": (IOCTL, 0x5452),
         "FS_IOC_SETFLAGS": (IOCTL, 0x40086602), "TUNSETIFF": (IOCTL, 0x400454CA)}
open("f", "w").close()
fd = os.open("f", os.O_RDONLY)
os.unlink("f")
for name, (number, request) in calls.items():
    for more in (0, 1 << 32, -1 << 32):
        if lib.syscall(number, fd, request + more, 0) != -1 or ctypes.get_errno() != 1:
            print(name, more, ctypes.get_errno())
"""

TERMINALS = """
import os
for name in ("/dev/ptmx", "/dev/pts/ptmx", "/dev/tty", "/dev/console", "/dev/tty0", "/dev/ttyS0"):
    try:
        print(name, os.open(name, os.O_RDWR | os.O_NOCTTY))
    except OSError:
        pass
if os.path.isdir("/dev/pts"):
    print(*os.listdir("/dev/pts"))
"""

# Every file of the kernel's, opened to write. Its own directory in /proc is another row; what is a
# device is /dev/null, by which an engine hides a file.
SETTINGS = """
import os, stat
for top in ("/proc", "/sys"):
    for folder, folders, files in os.walk(top):
        if folder == "/proc":
            folders[:] = [f for f in folders if not f.isdigit() and not f.endswith("self")]
        for name in files:
            path = f"{folder}/{name}"
            for mode in (os.O_WRONLY, os.O_RDWR):
                try:
                    with open(os.open(path, mode | os.O_NONBLOCK), "rb", 0) as f:
                        if not stat.S_ISCHR(os.fstat(f.fileno()).st_mode):
                            print(path)
                except OSError:
                    pass
"""

SCORE = """
import ctypes
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # dumpable: its files in /proc are its own again
for score in (-1000, 0, 499):
    try:
        with open("/proc/self/oom_score_adj", "w") as f:
            f.write(str(score))
        print(score)
    except OSError:
        pass
try:
    with open("/proc/1/autogroup", "w") as f:
        f.write("19")
    print("the server's priority")
except OSError:
    pass
"""

# Locks are granted and lock nothing: what all can read and lock, all would talk by.
LOCKS = """
import fcntl, os
open("own", "w").close()
for path in ("own", "/dev/zero", os.__file__):
    for lock in (fcntl.lockf, fcntl.flock):
        lock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fork() == 0:
            lock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
            os._exit(0)
        assert os.wait()[1] == 0, (path, lock)
print("granted")
"""

DATABASE = """
import os, sqlite3
for mode in ("delete", "wal"):
    name = f"{mode}.db"
    one, two = sqlite3.connect(name), sqlite3.connect(name)
    print(one.execute(f"pragma journal_mode={mode}").fetchone()[0])
    one.execute("create table t (n)")
    with one:
        one.executemany("insert into t values (?)", [(n,) for n in range(1000)])
    print(two.execute("select sum(n) from t").fetchone()[0])
    pid = os.fork()
    if pid == 0:
        with sqlite3.connect(name) as three:
            three.execute("insert into t values (500)")
        three.close()
        os._exit(0)
    os.waitpid(pid, 0)
    print(two.execute("select sum(n) from t").fetchone()[0])
    one.close()
    two.close()
"""

ASYNC = """
import asyncio, multiprocessing, sys
async def main():
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "print(input())", stdin=-1, stdout=-1)
    return (await process.communicate(b"hello\\n"))[0].decode().strip()
def work(pipe):
    pipe.send(41)
print(asyncio.run(main()))
here, there = multiprocessing.Pipe()
process = multiprocessing.get_context("fork").Process(target=work, args=(there,))
process.start()
print(here.recv() + 1)
process.join()
"""

X32 = """
import ctypes
lib = ctypes.CDLL(None, use_errno=True)
if lib.syscall(0x40000000 | 39) >= 0:
    print("answered")
"""

LIMITS = """
import os, resource
for name in ("NPROC", "AS", "FSIZE", "NOFILE", "CORE", "MEMLOCK", "MSGQUEUE", "SIGPENDING"):
    which = getattr(resource, f"RLIMIT_{name}", {"MSGQUEUE": 12, "SIGPENDING": 11}.get(name))
    soft, hard = resource.getrlimit(which)
    if hard == resource.RLIM_INFINITY or soft > hard:
        print(name, soft, hard)
    for more in (hard + 1, resource.RLIM_INFINITY):
        try:
            resource.setrlimit(which, (hard, more))
            print(name, "raised")
        except (OSError, ValueError):
            pass
try:
    os.nice(-5)
    print("priority")
except OSError:
    pass
"""

KERNEL_FILES = """
import os
names = ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches",
         "/sys/kernel/profiling",
         "/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory.max",
         "/sys/fs/cgroup/cgroup.procs", "/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda",
         "/dev/fuse", "/dev/kvm", "/proc/kcore", "/proc/kmsg", "/var/run/docker.sock")
for name in names:
    for mode in (os.O_WRONLY, os.O_RDWR):
        try:
            os.close(os.open(name, mode))
            print(name)
        except OSError:
            pass
"""

PRIVILEGES = """
import ctypes, os, struct
lib = ctypes.CDLL(None)
caps = ctypes.create_string_buffer(24)
lib.capget(struct.pack("<Ii", 0x20080522, 0), caps)
ambient = sum(lib.prctl(47, 1, number, 0, 0) == 1 for number in range(64))
print(lib.prctl(39, 0, 0, 0, 0), lib.prctl(21, 0, 0, 0, 0), *struct.unpack("<6I", caps), ambient)
for become in (os.setuid, os.setgid, os.seteuid, os.setegid):
    try:
        become(0)
        if os.getuid() == 0:
            print("root")
    except OSError:
        pass
"""

# What a call tells of itself lies in memory that it shares with the worker: it may write anything.
FORGED = """
import ctypes, json, os, struct, sys
try:
    for line in open("/proc/self/maps"):
        if "memfd:" in line:
            path = f"/proc/self/map_files/{line.split()[0]}"
            os.truncate(path, 0)  # to shrink it under the worker's hands
            print("shrunk")
except OSError:
    pass
said = json.dumps({"result": 5, "error": {"type": [], "line": 1e999}, "exit_code": "x",
                   "status": "ok", "op": "done", "id": 1}).encode()
data = struct.pack("<qi", -1, len(said)) + said
frame = sys._getframe()
while frame:
    if "area" in frame.f_locals:
        frame.f_locals["area"][:len(data)] = data
        print("forged", flush=True)
    frame = frame.f_back
os._exit(3)
"""

GARBAGE = """
import os, sys
frame = sys._getframe()
while frame:
    if "area" in frame.f_locals:
        area = frame.f_locals["area"]
        area[:] = bytes([0xFF]) * len(area)
        print("garbage", flush=True)
    frame = frame.f_back
os._exit(0)
"""

STUBBORN_WRITER = """
import os
if os.fork() == 0:
    os.setsid()
    while True:
        os.write(1, b"x" * 1000)
print("parent", flush=True)
os._exit(0)
"""

MEMORY_FILES = """
import os
file = os.memfd_create("held")
while True: os.write(file, b"x" * (1 << 20))
"""

# Each process by itself has far less than a call may hold.
SMALL_BOMBS = """
import os, time
for _ in range(28):
    if os.fork() == 0:
        hoard = []
        for _ in range(40):
            hoard.append(b"1" * 1_000_000)
            time.sleep(0.01)
        break
time.sleep(60)
"""

# In its place among those which the kernel would kill, and unreadable to who measures.
SECRET_BOMBS = """
import contextlib, ctypes, os, time
for _ in range(9):
    if os.fork() == 0:
        lib = ctypes.CDLL(None)
        lib.prctl(4, 1, 0, 0, 0)
        with contextlib.suppress(OSError):
            open("/proc/self/oom_score_adj", "w").write("0")
        lib.prctl(4, 0, 0, 0, 0)
        hoard = b"1" * 100_000_000
        break
time.sleep(60)
"""

# Pages that are in no process's page table any more.
SHARED_MEMORY = """
import mmap, os, time
for _ in range(3):
    os.fork()
area = mmap.mmap(-1, 120 << 20)
for n in range(120):
    area[n << 20 : (n + 1) << 20] = b"x" * (1 << 20)
area.madvise(mmap.MADV_DONTNEED)
time.sleep(60)
"""

# Neither is too much by itself.
FILES_AND_MEMORY = """
import os, time
with open("f", "wb") as f:
    f.write(bytes(31 << 20))
os.fork()
hoard = b"1" * 280_000_000
time.sleep(60)
"""

# A process whose first thread has ended shows no memory as its own.
HEADLESS = """
import ctypes, os, threading, time
for _ in range(3):
    os.fork()
def hold():
    hoard = b"1" * 120_000_000
    time.sleep(60)
threading.Thread(target=hold).start()
ctypes.CDLL(None).pthread_exit(None)
"""

# Sockets hold it, not processes: as many of them, with buffers as large, as there can be.
SOCKET_BUFFERS = """
import contextlib, os, socket, time
for _ in range(28):
    if os.fork() == 0:
        break
kept = []
with contextlib.suppress(OSError):
    while True:
        kept += socket.socketpair()
        for end in kept[-2:]:
            end.setblocking(False)
            with contextlib.suppress(PermissionError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
            with contextlib.suppress(BlockingIOError):
                while True:
                    end.send(bytes(100_000))
time.sleep(60)
"""

# Larger buffers (by force, too), and programs that run in the kernel, of two kinds in two places.
SOCKET_OPTIONS = """
import ctypes, socket, struct
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
program = struct.pack("HxxxxxxQ", 1, ctypes.addressof(code))
options = {7: 1 << 30, 8: 1 << 30, 32: 1 << 30, 33: 1 << 30,
           26: program, 50: program, 51: program, 52: program}
end, other = socket.socketpair()
for option, value in options.items():
    try:
        end.setsockopt(socket.SOL_SOCKET, option, value)
        print(option)
    except OSError as error:
        if error.errno != 1:
            print(option, error)
"""

# Many mappings make it slow to count what their processes hold.
MANY_MAPPINGS = """
import ctypes, os, time
lib = ctypes.CDLL(None)
lib.mmap.restype = ctypes.c_void_p
lib.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
lib.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
at = lib.mmap(None, 25_000 * 8192, 0, 0x22, -1, 0)
for n in range(25_000):
    lib.mprotect(at + n * 8192, 4096, 1)
for _ in range(13):
    if os.fork() == 0:
        break
hoard = b"1" * (100 << 20)
time.sleep(60)
"""

# Of the whole machine, or of the worker: by them, two calls that run at once could talk.
COUNTERS = """
for path in ("meminfo", "stat", "vmstat", "loadavg", "diskstats", "interrupts", "softirqs",
             "schedstat", "zoneinfo", "buddyinfo", "pressure/cpu", "pressure/memory",
             "sys/fs/file-nr", "sys/fs/inode-nr", "sys/fs/dentry-state", "net/sockstat"):
    try:
        print(path, open(f"/proc/{path}").read(20))
    except OSError:
        pass
for path in ("memory.current", "pids.current", "cpu.stat", "memory/memory.usage_in_bytes",
             "pids/pids.current", "cpuacct/cpuacct.usage"):
    try:
        print(path, open(f"/sys/fs/cgroup/{path}").read(20))
    except OSError:
        pass
"""

# What these hold together is within the bound: pages count once, however many processes have them.
SHARED_BY_FORK = """
import os, time
hoard = [b"1" * 1_000_000 for _ in range(250)]
for _ in range(5):
    if os.fork() == 0:
        time.sleep(1)
        os._exit(sum(map(len, hoard)) % 7)
print([os.wait()[1] for _ in range(5)])
"""

# Each end gives the shares of those that were read before to those that are read after.
SHARED_UNTIL_THE_END = """
import os, time
hoard = [b"1" * 1_000_000 for _ in range(250)]
for n in range(12):
    if os.fork() == 0:
        time.sleep(0.3 + n * 0.05)
        os._exit(0)
print(sum(os.wait()[1] for _ in range(12)))
"""

PROGRAMS_BESIDE_MEMORY = """
import subprocess
hoard = [b"1" * 1_000_000 for _ in range(350)]
for _ in range(30):
    subprocess.run(["/bin/true"], check=True)
print("done")
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
os.chmod("a/b", 0); os.chmod("a", 0)
try:
    os.chmod(".", 0)
except PermissionError:  # where its directory is a file system of its own, it is root's
    pass
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

# The next call: it sees an empty directory and no process of the last one's. Hidden ones can
# be told from such as are not there, too.
AFTER = """
import os
def is_there(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
print(6 * 7, os.listdir("."), sum(map(is_there, range(1, min(os.getpid() + 100, 20_000)))))
"""


async def check_after(pool: Pool, num_processes: int | None) -> None:
    """Check the worker after an attack. `num_processes`: the number before; None if calls see
    the machine's."""
    for _ in range(150):
        result = await pool.run(AFTER)
        assert result.ok, result
        number, files, observed = result.stdout.split()
        assert (number, files) == ("42", "[]")
        # Children forked ahead come and go, and what was killed takes a moment to be gone.
        if num_processes is None or int(observed) < num_processes + 8:
            return
        await anyio.sleep(0.1)
    raise AssertionError(f"{observed} processes are left of {num_processes}")


def num_seen(result: CallResult) -> int:
    return int(result.stdout.split()[2])


SUMS = "delete\n499500\n500000\nwal\n499500\n500000"

ATTACKS = [
    Attack(
        "fork bomb",
        "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
        (TIMEOUT, KILLED),
        timeout_s=1,
    ),
    Attack(
        "thread bomb",
        "import threading as t, time\nwhile True: t.Thread(target=time.sleep, args=(60,)).start()",
        (TIMEOUT,),
        says("can't start new thread"),
        timeout_s=3,
    ),
    Attack("one large object", "x = bytearray(10**10)", (OOM,)),
    Attack(
        "memory bomb", "x = []\nwhile True: x.append(b'1' * 10**7)", (OOM, TIMEOUT), timeout_s=1
    ),
    Attack("eight memory bombs", EIGHT_BOMBS, (OOM,)),
    Attack("many small memory bombs", SMALL_BOMBS, (OOM,)),
    Attack("memory bombs that hide", SECRET_BOMBS, (OOM,)),
    Attack("memory that is shared and not mapped", SHARED_MEMORY, (OOM,)),
    Attack("files and memory", FILES_AND_MEMORY, (OOM,), wall="spaces"),
    Attack("processes without their first thread", HEADLESS, (OOM,)),
    Attack("memory in sockets", SOCKET_BUFFERS, (OOM,), wall="counted"),
    Attack("memory behind many mappings", MANY_MAPPINGS, (OOM,), wall="counted"),
    Attack(
        "huge pages",
        "import mmap\n"
        "mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)",
        (ERROR,),
        says("PermissionError"),
        wall="filter",
    ),
    Attack(
        "memory shared by fork", SHARED_BY_FORK, (OK,), prints(str([(250_000_000 % 7) << 8] * 5))
    ),
    Attack("memory shared until the end", SHARED_UNTIL_THE_END, (OK,), prints("0")),
    Attack("programs started beside much memory", PROGRAMS_BESIDE_MEMORY, (OK,), prints("done")),
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
    ),
    Attack("write to the root", "open('/x', 'w')", (ERROR,), says("Read-only")),
    Attack("other processes", PEEK, (OK,), prints("")),
    Attack(
        "what other processes are",
        PEEK.replace("NAMES = False", "NAMES = True"),
        (OK,),
        prints(""),
        wall="hidden",
    ),
    Attack("kill everybody", KILLS, (OK,), prints("alive"), wall="uid"),
    Attack("kill the group", "import os; os.kill(0, 9)", (KILLED, OK)),
    Attack("stop itself", "import os; os.kill(0, 19)", (TIMEOUT, OK), timeout_s=1),
    Attack("become root", "import os; os.setuid(0)", (ERROR,), wall="uid"),
    Attack("privileges", PRIVILEGES, (OK,), prints("1 2" + 7 * " 0"), wall="filter"),
    Attack("limits", LIMITS, (OK,), prints("")),
    Attack(
        "the worker's priority",
        "import os\nfor way in ('os.setpriority(os.PRIO_PROCESS, 1, 5)',\n"
        '            \'open("/proc/1/oom_score_adj", "w")\'):\n'
        "  try: exec(way); print(way * (os.getpid() != 1))  # else it is pid 1 itself\n"
        "  except OSError: pass",
        (OK,),
        prints(""),
        wall="uid",
    ),
    Attack("files of the kernel", KERNEL_FILES, (OK,), prints(""), wall="spaces"),
    Attack("settings of the kernel", SETTINGS, (OK,), prints(""), wall="spaces"),
    Attack("the killer's choice", SCORE, (OK,), prints(""), wall="spaces"),
    Attack("terminals", TERMINALS, (OK,), prints(""), wall="spaces"),
    Attack("requests to files", REQUESTS, (OK,), prints(""), wall="filter"),
    Attack("file locks", LOCKS, (OK,), prints("granted"), wall="filter"),
    Attack("a database", DATABASE, (OK,), prints(SUMS)),
    Attack("pairs of sockets", ASYNC, (OK,), prints("hello\n42")),
    Attack("options of sockets", SOCKET_OPTIONS, (OK,), prints(""), wall="filter"),
    Attack("counters", COUNTERS, (OK,), prints(""), wall="hidden"),
    Attack("system calls", SYSCALLS, (OK,), prints(""), wall="filter"),
    Attack("more system calls", MORE_SYSCALLS, (OK,), prints(""), wall="filter"),
    Attack("32-bit system calls", I386, (KILLED,), prints(""), wall="filter"),
    Attack("x32 system calls", X32, (OK, KILLED), prints(""), wall="filter"),
    Attack("sockets", SOCKETS, (OK,), prints(""), wall="filter"),
    Attack("the network", NETWORK, (OK,), prints(""), wall="spaces"),
    Attack("sockets to meet at", MEETING, (OK,), prints(""), wall="filter"),
    Attack("environment", "import os; print(*os.environ)", (OK,), prints("PATH HOME")),
    Attack(
        "a home", HOME, (OK,), prints("/tmp /tmp\n/tmp /tmp ['.state', 'notes']"), wall="spaces"
    ),
    Attack(
        "descriptors",
        "import os; print([fd for fd in range(3, 300) if os.path.exists(f'/proc/self/fd/{fd}')])",
        (OK,),
        prints("[]"),
    ),
    Attack("flood", "while True: print('x' * 10_000)", (FLOOD,)),
    Attack("a gigabyte", "import os\nfor _ in range(1000): os.write(1, b'x' * 10**6)", (FLOOD,)),
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
    Attack("deaf to signals", IGNORES, (TIMEOUT,), prints("deaf"), timeout_s=2),
    Attack(
        "partial output",
        "print('so far', end='')\nwhile True: pass",
        (TIMEOUT,),
        prints("so far"),
        timeout_s=2,
    ),
    Attack("null pointer", "import ctypes; ctypes.string_at(0)", (KILLED,)),
    Attack("recursion", "def f(): f()\nf()", (ERROR,), says("RecursionError")),
    Attack("200,000 terms", "+".join("1" * 200_000), (ERROR, KILLED, OOM, OK)),
    Attack("parentheses", "(" * 5000 + ")" * 5000, (ERROR, KILLED)),
    # Returns once its own process has: nobody waits for the twenty that hold the pipes.
    Attack("daemons", DAEMONS, (OK,), prints("parent")),
    Attack(
        "a daemon that writes on",
        STUBBORN_WRITER,
        (OK, FLOOD),
        lambda r: "parent" in r.stdout or r.truncated,
    ),
    Attack("memory in files", MEMORY_FILES, (OOM, ERROR, KILLED)),
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
        lambda r: (
            r.stdout_bytes >= 258
            and r.stdout.startswith("\x00\x01")
            and bool(orjson.dumps(dataclasses.asdict(r)))
        ),
    ),
    Attack("links and closed directories", LINKS, (OK,), prints("left")),
    Attack("closed descriptors", "import os; os.closerange(0, 300)", (OK, ERROR)),
    Attack(
        "forged memory",
        FORGED,
        (ERROR,),
        lambda r: (r.stdout, r.exit_code, r.result) == ("forged\n", 3, None),
    ),
    Attack("garbage in memory", GARBAGE, (OK,), prints("garbage")),
    Attack("forged report", 'import sys; print(\'{"op": "done"}\'); sys.exit(3)', (ERROR,)),
    Attack(
        "hostile exception",
        "class E(Exception):\n  def __str__(self): raise SystemExit(0)\nraise E",
        (ERROR,),
    ),
]


KEEPER = """
import ctypes, os
secret = ctypes.create_string_buffer(b"s3cret")
open("secret", "w").write("s3cret"); os.chmod("secret", 0o777)
"""

SEEKER = """
import ctypes, os, signal
lib = ctypes.CDLL(None, use_errno=True)
own = {os.getpid(), int(os.readlink("/proc/self"))}
for pid in {int(name) for name in os.listdir("/proc") if name.isdigit()} - own:
    for number in (0, signal.SIGCONT, signal.SIGKILL):
        try:
            os.kill(pid, number)
            print("signal", pid)
        except OSError:
            pass
    for trace in (16, 0x4206):  # PTRACE_ATTACH, PTRACE_SEIZE
        if lib.ptrace(trace, pid, 0, 0) >= 0:
            print("trace", pid)
    for path in ("mem", "environ", "maps", "fd/1", "cwd/secret", "root/etc/passwd"):
        try:
            if os.read(os.open(f"/proc/{pid}/{path}", os.O_RDONLY), 1):
                print(pid, path)
        except OSError:
            pass
home = os.getcwd()
parts = home.split("/")
last = max((n for n, part in enumerate(parts) if part.isdigit()), default=None)
for name in map(str, range(200)):
    if last is None:  # its directory has the same name as all others'
        path = f"{home}/{name}"
    else:
        path = "/".join(parts[:last] + [name] + parts[last + 1:])
    if path != home:
        for attempt in (lambda: os.listdir(path), lambda: open(f"{path}/secret").read(),
                        lambda: open(f"{path}/planted", "w"), lambda: os.chdir(path),
                        lambda: os.stat(path), lambda: os.statvfs(path),
                        lambda: os.chmod(path, 0)):
            try:
                print(path, attempt())
            except OSError:
                pass
"""


async def check_neighbours(pool: Pool, files_apart: bool = True) -> None:
    """A session holds a secret in memory and on disk; calls beside it look for both. Files are
    apart where each call has a uid or a view of its own."""
    actual: list[str] = []

    async def seek() -> None:
        result = await pool.run(SEEKER)
        assert result.ok, result
        lines = result.stdout.splitlines()
        actual.extend(line for line in lines if files_apart or not line.startswith("/"))

    async with pool.session() as keeper:
        assert (await keeper.run(KEEPER)).ok
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(seek)
        assert (await keeper.run("secret.value")).result == "b's3cret'"
    assert actual == []


@dataclasses.dataclass(frozen=True)
class Channel:
    """A way by which a call might tell another one, which runs at the same time, the word "s3cret".
    Each part is a cell of a session: the receiver's first, the sender's, the receiver's second."""

    name: str
    send: str
    receive: str
    prepare: str = ""
    wall: str = "filter"


# A bit of the word for each byte of a file that is locked, or not.
LOCK_BITS = """
import fcntl, os, struct
bits = "".join(f"{byte:08b}" for byte in b"s3cret")
places = (("/dev/null", os.O_RDWR), (os.__file__, os.O_RDONLY))
files = [os.open(path, mode) for path, mode in places]
def ask(fd, command, at):
    flock = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 1_000_000 + at, 1, 0)
    return struct.unpack("hhqqi4x", fcntl.fcntl(fd, command, flock))[0]
"""

CHANNELS = [
    Channel(
        "locks",
        LOCK_BITS + "for fd, kind in zip(files, (fcntl.LOCK_EX, fcntl.LOCK_SH)):\n"
        "    for at, bit in enumerate(bits):\n"
        "        if bit == '1': fcntl.lockf(fd, kind | fcntl.LOCK_NB, 1, 1_000_000 + at, 0)",
        LOCK_BITS + "for fd in files:\n  for command in (fcntl.F_GETLK, 36):\n"
        "    locked = [ask(fd, command, at) != fcntl.F_UNLCK for at in range(len(bits))]\n"
        "    got = ''.join('01'[bit] for bit in locked)\n"
        "    print(bytes(int(got[at:at + 8], 2) for at in range(0, len(got), 8)))",
    ),
    Channel(
        "names and arguments of processes",
        "import ctypes, subprocess, sys\n"
        "ctypes.CDLL(None).prctl(15, b's3cret', 0, 0, 0)\n"
        "child = subprocess.Popen(['/bin/sh', '-c', 'sleep 600 # s3cret'])",
        "import glob\nfor path in glob.glob('/proc/[0-9]*/c[om]*'):\n"
        "  try: print(open(path).read())\n"
        "  except OSError: pass",
        wall="hidden",
    ),
    Channel(
        "a terminal",
        "import fcntl, os, struct\nfd = os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)\n"
        "fcntl.ioctl(fd, 0x40045431, struct.pack('i', 0))\n"
        "n = struct.unpack('i', fcntl.ioctl(fd, 0x80045430, b'0000'))[0]\n"
        "os.chmod(f'/dev/pts/{n}', 0o666)\nos.write(fd, b's3cret\\n')",
        "import glob, os\nfor path in glob.glob('/dev/pts/[0-9]*'):\n"
        "  try: print(os.read(os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK), 100))\n"
        "  except OSError: pass",
        wall="spaces",
    ),
    Channel(
        "files that are watched",
        "import os\nopen(os.path.dirname(os.__file__) + '/colorsys.py').close()",
        "import os\nif fd >= 0:\n  print('s3cret' * (b'colorsys' in os.read(fd, 1 << 16)))",
        "import ctypes, os\nlib = ctypes.CDLL(None)\nfd = lib.inotify_init1(os.O_NONBLOCK)\n"
        "lib.inotify_add_watch(fd, os.path.dirname(os.__file__).encode(), 0x21)",
    ),
]


async def check_channel(pool: Pool, channel: Channel) -> None:
    async with pool.session() as receiver, pool.session() as sender:
        await receiver.run(channel.prepare or "1")
        await sender.run(channel.send)
        result = await receiver.run(channel.receive)
        assert result.ok or result.error, result
        assert "s3cret" not in result.stdout, result.stdout


async def check_that_the_next_finds_nothing(pool: Pool) -> None:
    """Check that a call's files are gone, in a pool that reuses its few directories."""
    remaining = [
        "import os\nfor n in range(50): open(f'.f{n}', 'w').write('x')",
        "import os\nos.symlink('/', 'r'); os.symlink('/etc/passwd', 'p'); os.symlink('.', 'd')",
        "import contextlib, os\nos.makedirs('a/b/c/d'); open('a/b/f', 'w'); "
        "os.link('a/b/f', 'hard')\nos.chmod('a/b', 0); os.chmod('a', 0)\n"
        "with contextlib.suppress(PermissionError): os.chmod('.', 0)",
        "import os\nfor _ in range(60): os.mkdir('d'); os.chdir('d')",
        "import os, time\nif os.fork() == 0:\n  os.setsid()\n"
        "  while True:\n    open(str(time.time()), 'w').close()\ntime.sleep(0.1)",
        "open('x' * 255, 'w').close(); open('\\n\\t', 'w').close()",
        "import os\nfor n in range(1500):\n  os.mkdir('d'); os.chdir('d')\n"
        "  if n % 100 == 0: open('f', 'w').close()",
        # Killed in the middle of it, they end their system call before they die.
        *[
            "import os, time\nfor _ in range(8):\n  if os.fork() == 0:\n"
            "    while True: open('m', 'w').close(); os.unlink('m')\ntime.sleep(0.02)"
        ]
        * 5,
    ]
    for code in remaining:
        result = await pool.run(code)
        assert result.ok, result
        for _ in range(6):  # more than the worker has directories
            await check_after(pool, None)


FILL_DISK = """
for n in range(100):
    try:
        with open(str(n), "wb") as f:
            f.write(b"0" * 10**7)
    except OSError as error:
        print(error.strerror)
        break
"""


async def check_that_disks_are_apart(pool: Pool) -> None:
    """Check that a call can write when a session beside it has filled its disk."""
    async with pool.session() as session:
        assert (await session.run(FILL_DISK)).stdout == "No space left on device\n"
        for _ in range(pool.settings.workers):
            result = await pool.run("print(open('f', 'w').write('x' * 10_000))")
            assert result.stdout == "10000\n", result
