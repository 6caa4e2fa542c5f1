"""Pieces of hostile and faulty programs, for the random programs of attribution.py.

Each does one thing to itself, to its limits, to its results or to whoever it can reach. A paragraph
is a piece, its first line its name.
"""

from __future__ import annotations

PRELUDE = """\
import ctypes, fcntl, json, mmap, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.argtypes = [ctypes.c_long] * 7
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.timer_settime.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p]
def call(number, *arguments):
    return libc.syscall(number, *arguments, *[0] * (6 - len(arguments)))
def attempt(action):
    try:
        action()
    except OSError:
        pass
def find_report():
    frame = sys._getframe()
    while frame and not isinstance(frame.f_locals.get("area"), mmap.mmap):
        frame = frame.f_back
    return frame.f_locals["area"]
def forge_report(text, started=0):
    area, data = find_report(), text.encode()
    struct.pack_into("<qi", area, 0, started, len(data))
    area[12 : 12 + len(data)] = data
def own_channel():
    channel = socket.socket(fileno=os.dup(3))
    channel.setblocking(False)
    return channel
def in_thread(function, *arguments):
    threading.Thread(target=function, args=arguments, daemon=True).start()
def fork_many(number):
    for _ in range(number):
        if os.fork() == 0:
            return True
    return False
def set_many_timers(signal_number):
    event = struct.pack("<qii", 0, signal_number, 0) + bytes(48)
    for n in range(50):
        timer = ctypes.c_void_p()
        libc.timer_create(1, event, ctypes.byref(timer))
        often = struct.pack("<qqqq", 0, 5_000_000, 0, 5_000_000 + n * 70_001)
        libc.timer_settime(timer, 0, often, None)
"""

_PIECES = r"""
# ends at once with 0
os._exit(0)

# ends at once with 3
os._exit(3)

# kills itself
os.kill(os.getpid(), signal.SIGKILL)

# stops itself
os.kill(os.getpid(), signal.SIGSTOP)

# stops itself and a child
os.fork()
os.kill(os.getpid(), signal.SIGSTOP)

# says that its processor time is up
os.kill(os.getpid(), signal.SIGXCPU)

# ends by SIGIO
os.kill(os.getpid(), signal.SIGIO)

# kills all it may
os.kill(-1, signal.SIGKILL)

# stops all it may
os.kill(-1, signal.SIGSTOP)

# kills its group
os.killpg(0, signal.SIGKILL)

# kills every number
for pid in range(1, 400):
    attempt(lambda: os.kill(pid, signal.SIGKILL))

# a child kills all it may, again and again
if os.fork() == 0:
    while True:
        attempt(lambda: os.kill(-1, signal.SIGKILL))
time.sleep(1)

# a child stops all it may, again and again
if os.fork() == 0:
    while True:
        attempt(lambda: os.kill(-1, signal.SIGSTOP))
time.sleep(1)

# a child stops and continues it
parent = os.getpid()
if os.fork() == 0:
    while True:
        os.kill(parent, signal.SIGSTOP)
        time.sleep(0.001)
        os.kill(parent, signal.SIGCONT)
time.sleep(1)

# signals its parents by descriptor
for pid in {1, 2, os.getppid()} - {0, os.getpid()}:
    for number in range(65):
        attempt(lambda: signal.pidfd_send_signal(os.pidfd_open(pid), number))

# ignores every signal
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass

# wakes itself by many timers
signal.signal(signal.SIGCONT, lambda *_: None)
set_many_timers(signal.SIGCONT)
while True:
    pass

# queues signals until they are refused
signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 65))
info = ctypes.create_string_buffer(struct.pack("iii", 40, 0, -1) + bytes(116))
for _ in range(100_000):
    if call(129, os.getpid(), 40, ctypes.addressof(info)) < 0:
        break

# forks without end
while True:
    attempt(lambda: os.fork())

# forks in a chain
while True:
    if os.fork():
        os._exit(0)

# forks in a chain, each in a session of its own
end = time.monotonic() + 3
while time.monotonic() < end:
    if os.fork():
        os._exit(0)
    os.setsid()

# forks daemons that run another program
while True:
    try:
        if os.fork() == 0:
            os.setsid()
            os.execv("/bin/sleep", ["sleep", "60"])
    except OSError:
        pass

# orphans that end as fast as they begin
end = time.monotonic() + 1.5
while time.monotonic() < end:
    try:
        if os.fork() == 0:
            os.setsid()
            try:
                os.fork()
            finally:
                os._exit(0)
    except OSError:
        time.sleep(0.001)
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        pass

# siblings instead of children
if call(56, 0x8000 | signal.SIGCHLD) == 0:
    time.sleep(60)
    os._exit(0)

# a flood of siblings that end
end = time.monotonic() + 1.5
while time.monotonic() < end:
    pid = call(56, 0x8000 | signal.SIGCHLD)
    if pid == 0:
        os._exit(0)
    if pid < 0:
        time.sleep(0.001)

# siblings whose end kills or stops their parent
for number in (signal.SIGKILL, signal.SIGSTOP):
    if call(56, 0x8000 | number) == 0:
        os._exit(0)
time.sleep(0.3)

# a child that borrows its memory and stays
libc.vfork()
time.sleep(60)

# a daemon that keeps its output open
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(60)
    os._exit(0)

# children that crash
for _ in range(30):
    if os.fork() == 0:
        ctypes.string_at(0)
time.sleep(0.5)

# busy processes in sessions of their own
if fork_many(25):
    os.setsid()
    while True:
        pass
time.sleep(1)

# busy threads
for _ in range(25):
    in_thread(exec, "while True: pass")
time.sleep(1)

# more threads than it may have
for _ in range(200):
    in_thread(time.sleep, 60)

# uses up memory
held = []
while True:
    held.append(bytearray(8 << 20))

# uses up memory in many processes
fork_many(28)
held = []
while True:
    held.append(bytearray(1 << 20))

# a child uses up memory, then it kills itself
if os.fork() == 0:
    held = []
    while True:
        held.append(bytearray(10 << 20))
os.wait()
os.kill(os.getpid(), signal.SIGKILL)

# many processes that each hold little and offer themselves to be killed
open("/proc/self/oom_score_adj", "w").write("1000")
fork_many(28)
held = bytearray(40 << 20)
time.sleep(60)

# holds half of its memory
held = b"1" * (250 << 20)
time.sleep(2)

# memory in shared mappings
held = [mmap.mmap(-1, 64 << 20) for _ in range(64)]
for area in held:
    for at in range(0, 64 << 20, 4096):
        area[at] = 1

# the same shared memory in many processes
held = [mmap.mmap(-1, 60 << 20) for _ in range(6)]
for area in held:
    for at in range(0, 60 << 20, 4096):
        area[at] = 1
for _ in range(4):
    os.fork()
time.sleep(1)

# memory in files without a name
for _ in range(64):
    fd = os.memfd_create("x")
    for _ in range(32):
        os.write(fd, bytes(1 << 20))

# memory in the buffers of sockets
fork_many(28)
held = []
try:
    while True:
        for end in socket.socketpair():
            held.append(end)
            end.setblocking(False)
            try:
                while True:
                    end.send(bytes(1 << 16))
            except BlockingIOError:
                pass
except OSError:
    time.sleep(60)

# raises the buffers of sockets
for option in (7, 8, 32, 33):
    for end in socket.socketpair():
        attempt(lambda: end.setsockopt(socket.SOL_SOCKET, option, 1 << 30))

# memory in pipes
held = []
for _ in range(100):
    for fd in os.pipe():
        held.append(fd)
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, 1 << 20)

# names looked up in vain
end = time.monotonic() + 1
n = 0
while time.monotonic() < end:
    n += 1
    os.path.exists(f"/usr/{n}-{os.getpid()}-" + "n" * 220)

# many mappings in many processes
fork_many(9)
at = libc.mmap(None, 20_000 * 8192, 0, 0x22, -1, 0)
for n in range(20_000):
    libc.mprotect(at + n * 8192, 4096, 1)
time.sleep(1)

# page tables without pages
held = [libc.mmap(None, 1 << 30, 1, 0x4022, -1, 0) for _ in range(64)]
for at in held:
    for n in range(0, 1 << 30, 2 << 20):
        if at is not None and at < 1 << 47:
            ctypes.string_at(at + n, 1)

# pages of the machine's own huge ones
area = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)
area[0] = 1

# fills its directory
with open("large", "wb") as file:
    while True:
        file.write(bytes(1 << 20))

# a great many files
for number in range(10_000):
    open(f"file-{number}", "w").close()

# a great many hard links
open("f", "w").close()
for number in range(10_000):
    os.link("f", f"link-{number}")

# long symbolic links
for number in range(5000):
    os.symlink("x" * 4095, f"{number:0255}")

# directories as deep as they go, the last one closed
try:
    while True:
        os.mkdir("d")
        os.chdir("d")
except OSError:
    os.chmod(".", 0)

# closes its directory
os.chmod(".", 0)

# leaves links out of its directory, and closed directories in it
os.symlink("/", "root")
os.mkdir("closed", 0)

# a directory of another group, with every mode
os.mkdir("d")
os.chmod("d", 0o7777)

# writes and removes while it is killed
if fork_many(20):
    while True:
        open("m", "w").close()
        os.unlink("m")
time.sleep(0.1)
os._exit(0)

# makes and renames directories while it is killed
if fork_many(20):
    for n in range(10**9):
        try:
            os.mkdir(f"a{n}")
            os.rename(f"a{n}", f"b{n}")
        except OSError:
            pass
time.sleep(0.1)
os._exit(1)

# throws files of the library out of the cache
for folder, _, names in os.walk(os.path.dirname(os.__file__)):
    for name in names[:20]:
        fd = os.open(f"{folder}/{name}", os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

# prints without end
while True:
    print("flood" * 1000)

# many processes write single bytes
fork_many(7)
for _ in range(50_000):
    os.write(1, b"x")

# writes bytes that are no text
for _ in range(3000):
    os.write(1, b"\xf0\x9f")
    os.write(2, b"\x98\x80\x00\x1b[2J")

# makes its output a pipe of packets
fcntl.fcntl(1, fcntl.F_SETFL, os.O_DIRECT)
for _ in range(10):
    os.write(1, b"0123456789")

# closes all descriptors
os.closerange(0, 256)

# closes all descriptors and goes on
os.closerange(0, 256)
while True:
    pass

# writes junk to every descriptor
for fd in range(256):
    attempt(lambda: os.write(fd, b"\x00\x00\x00\x10junk"))

# writes an answer to every descriptor
answer = b'{"op": "done", "id": 1, "status": "ok"}'
for fd in range(256):
    attempt(lambda: os.write(fd, struct.pack(">I", len(answer)) + answer))

# reads from every descriptor
for fd in os.listdir("/proc/self/fd"):
    try:
        os.set_blocking(int(fd), False)
        os.read(int(fd), 1 << 16)
    except OSError:
        pass

# its output is a full pipe of its own
_, full = os.pipe()
os.dup2(full, 1)
os.dup2(full, 2)
os.write(1, bytes(1 << 20))

# no output left
os.close(1)
os.close(2)
sys.stdout = None

# output in another encoding
sys.stdout.reconfigure(encoding="utf-16")
print("x")

# descriptors in flight
import array
a, b = socket.socketpair()
while True:
    a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 100))])

# descriptors in flight from many processes
import array
fork_many(28)
a, b = socket.socketpair()
a.setblocking(False)
fds = array.array("i", [os.dup(0) for _ in range(100)])
try:
    while True:
        a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
except OSError:
    time.sleep(60)

# sockets in flight inside of sockets in flight
import array
for _ in range(100):
    a, b = socket.socketpair()
    fds = array.array("i", [a.fileno(), b.fileno()])
    a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    a.close()
    b.close()

# forges who it is
a, b = socket.socketpair()
attempt(lambda: a.sendmsg([b"x"], [(socket.SOL_SOCKET, 2, struct.pack("3i", 1, 0, 0))]))

# watches without end
import select
fork_many(20)
targets = [os.eventfd(0) for _ in range(50)]
held = []
try:
    while True:
        held.append(select.epoll())
        for fd in targets:
            held[-1].register(fd, 0)
except OSError:
    time.sleep(60)

# connects to sockets of the host
for name in ("/var/run/docker.sock", "/run/dbus/system_bus_socket", "\0agentloop", "/dev/log"):
    attempt(lambda: socket.socket(socket.AF_UNIX).connect(name))

# lowers every limit to nothing
for which in range(16):
    try:
        resource.setrlimit(which, (0, 0))
    except (ValueError, OSError):
        pass

# a second of processor time, and deaf to its end
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
while True:
    pass

# lowest priority, one processor
os.nice(19)
try:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
except OSError:
    pass

# kills itself with its parent
libc.prctl(1, signal.SIGKILL, 0, 0, 0)

# odd states of a process
for option in (31, 35, 36, 43, 53, 59, 62, 65, 67, 0x59616D61):
    for value in (0, 1, 2):
        libc.prctl(option, value, 0, 0, 0)

# filters its own system calls
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFC0000))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 1, ctypes.addressof(code)))
call(317, 1, 0, ctypes.addressof(program))

# filters in the kernel by a socket
code = ctypes.create_string_buffer(struct.pack("HBBI", 0x94, 0, 0, 1) * 4095 + bytes(8))
program = struct.pack("HxxxxxxQ", 4096, ctypes.addressof(code))
held = []
try:
    while True:
        held.append(socket.socketpair())
        held[-1][0].setsockopt(socket.SOL_SOCKET, 26, program)
except OSError:
    pass

# waits that nobody ends
word = ctypes.create_string_buffer(4)
for _ in range(10):
    in_thread(call, 202, ctypes.addressof(word))
time.sleep(0.2)
os._exit(0)

# writes to its parent's files
for name in ("comm", "autogroup", "oom_score_adj", "coredump_filter", "mem"):
    attempt(lambda: open(f"/proc/{os.getppid()}/{name}", "w").write("0"))

# opens what belongs to its parents
for pid in {1, 2, os.getppid()}:
    for name in ("environ", "mem", "maps", "fd/0", "ns/pid", "root"):
        attempt(lambda: open(f"/proc/{pid}/{name}", "rb").read(100))

# runs another program
os.execv("/bin/sleep", ["sleep", "60"])

# runs a shell that fails
os.execv("/bin/sh", ["sh", "-c", "exit 7"])

# runs a shell that is deaf to signals
os.execv("/bin/sh", ["sh", "-c", "trap '' 1 2 3 13 14 15 20 21 22; while :; do :; done"])

# runs a program in a thread's place
threading.Timer(0.1, os.execv, ("/bin/sleep", ["sleep", "60"])).start()
time.sleep(1)

# runs programs without end
os.execv("/bin/sh", ["sh", "-c", "while :; do sh -c :; done"])

# runs a program that echoes, and leaves a daemon
if os.fork() == 0:
    os.setsid()
    while True:
        time.sleep(1)
os.execv("/bin/true", ["true"])

# a program answers in its place
code = "import os\nwhile True:\n    os.write(3, b'done')\n    os.read(3, 65536)"
os.execv(sys.executable, ["python", "-S", "-c", code])

# crashes
ctypes.string_at(0)

# recurses without end
sys.setrecursionlimit(10**9)
def f():
    f()
f()

# deep recursion in the compiler
eval("-" * 100_000 + "1")

# interrupts itself
raise KeyboardInterrupt

# exits with 5
raise SystemExit(5)

# exits with an object that can't be shown
class Unshown:
    def __str__(self):
        raise OSError
raise SystemExit(Unshown())

# exits with a huge number
raise SystemExit(-(2**70))

# divides by zero
1 / 0

# says that it is out of memory
raise MemoryError

# an exception with a name of megabytes
raise type("E" * 10**7, (Exception,), {})("m" * 10**7)

# exceptions in a circle
a, b = ValueError(), KeyError()
a.__context__, b.__context__ = b, a
raise a

# thousands of exceptions, each the cause of the next
error = None
for _ in range(3000):
    outer = ValueError("x")
    outer.__cause__ = error
    error = outer
raise error

# a great group of exceptions
raise ExceptionGroup("g", [ValueError(n) for n in range(50_000)])

# text that can't be encoded
print("\udcff\x00")

# spins
while True:
    pass

# sleeps
time.sleep(60)

# spins and catches whatever is raised
while True:
    try:
        while True:
            pass
    except BaseException:
        pass

# ends in a thread
threading.Timer(0.01, os._exit, (0,)).start()

# fails while a thread ends it with 0
threading.Timer(0.05, os._exit, (0,)).start()
time.sleep(0.05)
raise ValueError

# never ends in an exit handler
import atexit
atexit.register(time.sleep, 100)

# never ends in a finalizer
class Endless:
    def __del__(self):
        while True:
            pass
Endless()

# finalizers that fork and fail
class Forking:
    def __del__(self):
        os.fork()
        raise OSError
held = [Forking() for _ in range(3)]

# a generator that does not close
def endless():
    while True:
        try:
            yield
        except GeneratorExit:
            pass
generator = endless()
next(generator)

# an output that never flushes
class Slow:
    def write(self, text):
        os.write(1, text.encode())
    def flush(self):
        time.sleep(100)
sys.stdout = Slow()

# never gives the interpreter to another thread
sys.setswitchinterval(1e6)
import re
in_thread(re.match, "(a+)+$", "a" * 60 + "b")
time.sleep(0.1)

# a result that can't be shown
class Exiting:
    def __repr__(self):
        raise SystemExit(0)
Exiting()

# a result that forks
class Dividing:
    def __repr__(self):
        os.fork()
        return "x"
Dividing()

# a result of hundreds of megabytes
class Long:
    def __repr__(self):
        return "x" * 300_000_000
Long()

# ends and forks that do nothing
os._exit = os.fork = lambda *_: 0

# no builtins
import builtins
for name in list(vars(builtins)):
    if name != "exec":
        delattr(builtins, name)

# builtins that do nothing
import builtins
builtins.exec = builtins.eval = builtins.compile = lambda *_, **__: None

# modules without content
for name in ("json", "linecache", "traceback", "signal", "resource", "ast", "struct"):
    sys.modules[name].__dict__.clear()

# traces its runner
sys.settrace(lambda *_: 1 / 0)
sys.setprofile(lambda *_: 1 / 0)

# a profile function that ends the process
sys.setprofile(lambda frame, event, _: os._exit(0) if event == "return" else None)

# an audit hook that refuses everything
def refuse(*_):
    raise RuntimeError
sys.addaudithook(refuse)

# a report longer than its place
struct.pack_into("<i", find_report(), 8, 2**31 - 1)
os._exit(3)

# a report of a negative length
struct.pack_into("<i", find_report(), 8, -(2**31))
os._exit(3)

# a report that says it ended well
forge_report('{"exit_code": 0, "error": null, "result": "1", "status": "ok"}')
os._exit(3)

# a report of memory used up, and a kill
forge_report('{"error": {"type": "MemoryError"}}')
os.kill(os.getpid(), signal.SIGKILL)

# a report with a number of many digits
forge_report('{"error": {"line": ' + "9" * 200_000 + "}}")
os._exit(1)

# a deep report
forge_report('{"error": {"type": ' + "[" * 995 + "]" * 995 + "}}")
os._exit(1)

# a report of the wrong types
forge_report('{"error": {"type": [1], "message": 7, "line": true}, "result": [1], "exit_code": -5}')
os._exit(1)

# a report that changes while it is read
area = find_report()
if os.fork() == 0:
    os.setsid()
    while True:
        forge_report('{"error": {"type": "' + "x" * 100_000 + '"}}')
        struct.pack_into("<i", area, 8, 3)
time.sleep(0.05)
os._exit(1)

# no report
area = find_report()
at = ctypes.addressof(ctypes.c_char.from_buffer(area))
libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(len(area)))

# a report cut short
for fd in range(3, 10):
    attempt(lambda: os.ftruncate(fd, 0))

# a later cell's report, forged by a thread
def forge():
    while True:
        forge_report('{"exit_code": 0, "result": "forged"}', started=2**62)
in_thread(forge)

# the start of later cells kept at 0
area = find_report()
def hide():
    while True:
        struct.pack_into("<q", area, 0, 0)
in_thread(hide)

# a child keeps the start of later cells at 0
area = find_report()
if os.fork() == 0:
    while True:
        struct.pack_into("<q", area, 0, 0)

# closes its channel
os.close(3)

# hears nothing more
own_channel().shutdown(socket.SHUT_RD)

# says nothing more
own_channel().shutdown(socket.SHUT_WR)

# another pair in place of its channel
a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.dup2(a.fileno(), 3)

# a thread takes its jobs
def steal():
    while True:
        os.read(3, 65536)
in_thread(steal)

# children take its jobs
if fork_many(20):
    while True:
        os.read(3, 65536)

# a child takes its jobs and answers
if os.fork() == 0:
    while True:
        os.read(3, 65536)
        os.write(3, b"done")

# answers for all later cells and reads no job
def answer():
    while True:
        time.sleep(0.02)
        os.write(3, b"done")
in_thread(answer)
time.sleep(60)

# empty answers
own_channel().send(b"")

# answers of great length
channel = own_channel()
while True:
    channel.send(bytes(200_000))

# answers with descriptors
import array
channel = own_channel()
while True:
    channel.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1]))])

# says again and again that it has begun
for _ in range(20):
    os.write(3, struct.pack("<q", -5))

# interrupts the main thread without end
import _thread
def interrupt():
    while True:
        _thread.interrupt_main()
in_thread(interrupt)

# an alarm that raises between cells
def leave(*_):
    raise SystemExit(0)
signal.signal(signal.SIGALRM, leave)
signal.setitimer(signal.ITIMER_REAL, 0.2)

# an alarm that kills between cells
signal.alarm(1)

# deaf to interrupts
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
while True:
    pass

# ends well when it is interrupted
try:
    while True:
        pass
except KeyboardInterrupt:
    print("caught")

# locks itself
lock = threading.Lock()
lock.acquire()
lock.acquire()

# an event loop left in a thread
import asyncio
loop = asyncio.new_event_loop()
in_thread(loop.run_forever)

# stops itself between cells
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGSTOP)).start()

# kills itself between cells
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()

# ends with 0 between cells
threading.Timer(0.1, os._exit, (0,)).start()

# uses up memory between cells
def fill():
    time.sleep(0.1)
    held = []
    while True:
        held.append(bytes(16 << 20))
in_thread(fill)
if fork_many(20):
    fill()

# floods its output between cells
def flood():
    time.sleep(0.1)
    while True:
        os.write(1, bytes(65536))
in_thread(flood)

# output that comes late
threading.Timer(0.1, os.write, (1, b"late")).start()

# a thread reads its input
in_thread(sys.stdin.read)

# a busy chain of processes that never rests
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGCONT, lambda *_: None)
    while True:
        set_many_timers(signal.SIGCONT)
        end = time.process_time() + 0.03
        while time.process_time() < end:
            pass
        if os.fork():
            os._exit(0)

# a million names
globals().update({f"n{i}": i for i in range(10**6)})

# data that eats memory
import pickle
pickle.loads(b"\x80\x04" + b"](" * 200_000 + b".")

# leaves a directory that is gone
os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")

# lets others trace it
libc.ptrace(0, 0, 0, 0)
"""

HOSTILE = {
    name.removeprefix("# "): PRELUDE + code
    for name, _, code in (piece.partition("\n") for piece in _PIECES.strip().split("\n\n"))
}
