"""The calls of a pool, each from its message to its result.

    run() ──> check limits ──> a worker (slots.py) ──> its reply ──> result
                                  ▲                       │ the worker is lost, or failed
                                  └────── once more ──────┘

A call whose worker is lost or fails is run once more, on another worker. If that one is lost as
well, the call has ended two workers, in which nothing else ran, and gets the status `killed`: a
program must not be able to make its own failure look like a failure of infrastructure. But if
unrelated workers were lost at the same moment, the call is not to blame and gets the status
`sandbox_error`.

A session's cell runs once, on the session's own worker. If that is lost, the session's cells are
run once more on another worker, only to learn whether they end that one as well.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Sequence

import anyio
from anyio.abc import TaskGroup

from agentloop.sandbox.backend import directory_mib
from agentloop.sandbox.errors import ProtocolError, SandboxUnavailable
from agentloop.sandbox.link import SPARE_BYTES, Pending, next_id
from agentloop.sandbox.protocol import WorkerReply
from agentloop.sandbox.results import CallError, CallResult, CallStatus, Where
from agentloop.sandbox.settings import MAX_CODE_BYTES, OutputLimits, PoolSettings
from agentloop.sandbox.slots import Need, PoolWorker, SlotQueue
from agentloop.sandbox.worker.connection import WorkerFrame

NOT_OPEN = "the pool is not open: use it within `async with Pool() as pool`"
MAX_TIMEOUT_S = 3600.0
# Bytes that a worker's server holds for each byte of input, and of output on each stream.
INPUT_COPIES, OUTPUT_COPIES = 8, 12
SAME_MOMENT_S = 1.0  # workers lost within this time may have a common cause


class Calls:
    """Runs calls on the workers of `queue` while it is open."""

    MAX_WAITING = 100_000  # for a slot, which bounds memory; further calls are refused

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self.queue = SlotQueue(settings.workers, settings.max_sessions)
        self.counts: dict[str, int] = dict.fromkeys(CallStatus, 0)
        # When workers were lost.
        self._losses: deque[tuple[float, PoolWorker]] = deque(maxlen=64)
        self._group: TaskGroup | None = None

    @property
    def is_open(self) -> bool:
        return self._group is not None

    def open(self, group: TaskGroup) -> None:
        """Accept calls; `group` runs what outlives a cancelled caller."""
        self._group = group

    def close(self) -> None:
        """Accept no more calls, and end those that wait for a slot."""
        self._group = None
        self.queue.wake_all()

    def note_loss(self, worker: PoolWorker) -> None:
        """Remember when a worker was lost, to find losses with a common cause."""
        if not (worker.alive or worker.is_host):
            self._losses.append((time.monotonic(), worker))

    def message(
        self,
        code: str,
        stdin: str,
        timeout_s: float | None,
        memory_mib: int | None,
        output: OutputLimits | None = None,
        native: bool = False,
    ) -> WorkerFrame:
        """Return a call's message to a worker. Raises what `Pool.run` raises.

        Args:
            native: whether the code becomes another program, of which the address space is not
                limited, only memory.
        """
        for name, text in (("code", code), ("stdin", stdin)):
            if not isinstance(text, str):
                raise TypeError(f"{name} must be a str, not {type(text).__name__}")
        timeout_s = float(self.settings.timeout_s if timeout_s is None else timeout_s)
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g} seconds")
        if memory_mib is not None:
            if not isinstance(memory_mib, int):
                raise TypeError(f"memory_mib must be an int, not {type(memory_mib).__name__}")
            limit = self.settings.memory_mib
            if not 0 < memory_mib <= limit:
                raise ValueError(f"memory_mib must be between 1 and the pool's {limit}")
        if not self.is_open:
            raise RuntimeError(NOT_OPEN)
        message: WorkerFrame = {"op": "run", "code": code, "stdin": stdin, "timeout_s": timeout_s}
        if memory_mib is not None:
            message["memory_mib"] = memory_mib
        if output is not None:
            message["max_output_bytes"] = output.max_bytes
            message["keep_output_bytes"] = output.keep_bytes
        if native:
            message["native"] = True
        return message

    async def run(self, message: WorkerFrame) -> CallResult:
        """Run a program on any worker, again if the first fails."""
        result = self._refuse(message, None) or await self._run(message)
        self.counts[result.status] += 1
        return result

    async def run_cell(self, message: WorkerFrame, worker: PoolWorker) -> CallResult | None:
        """Run a session's cell on its worker; return None if its process is lost."""
        result = self._refuse(message, worker) or await self._run_cell(message, worker)
        if result is not None:
            self.counts[result.status] += 1
        return result

    async def ends_workers(self, cells: Sequence[WorkerFrame], used: Sequence[PoolWorker]) -> bool:
        """Run the cells of a lost session in another one; return whether its worker is lost, too.

        Args:
            cells: its messages, which get the id of the new session.
            used: the worker that was lost, and that of the new session.
        """
        for message in cells:
            if await self._run_cell(message, used[-1]) is None:
                return not used[-1].alive and await self._is_to_blame(used)
        return False

    def _refuse(self, message: WorkerFrame, only: PoolWorker | None) -> CallResult | None:
        """Return the result of a call that is refused without a run, or None."""
        size = input_bytes(message)
        if size > MAX_CODE_BYTES:
            reason = f"code and stdin have {size:,} bytes; the maximum is {MAX_CODE_BYTES:,}"
            error, stderr = CallError("InputTooLarge", reason), f"InputTooLarge: {reason}\n"
            return CallResult(
                next_id(),
                CallStatus.ERROR,
                exit_code=1,
                stderr=stderr,
                error=error,
                stderr_bytes=len(stderr),
            )
        full = self.queue.num_waiting >= self.MAX_WAITING
        if full and only is None and self.queue.worker_for_call() is None:
            reason = f"{self.MAX_WAITING:,} calls are waiting already"
            return CallResult.failed(next_id(), CallStatus.OVERLOADED, reason)
        return None

    async def _run(self, message: WorkerFrame) -> CallResult:
        queue_s = 0.0
        reason = ""
        used: list[PoolWorker] = []
        for attempt in (1, 2):
            entered = time.monotonic()
            left_s = self.settings.max_wait_s - queue_s
            worker = await self._slot(Need.CALL, None, left_s, again=attempt > 1)
            queue_s += time.monotonic() - entered
            if worker is None:
                return self._without_slot(queue_s, attempt, reason)
            used.append(worker)
            reply = await self._answer(worker, message)
            where = _where(worker, queue_s, attempt)
            if reply is not None and not (attempt == 1 and _failed_to_start(reply)):
                return CallResult.from_frame(reply, id=message["id"], **where)
            reason = f"worker {worker.link.worker_id} was lost: {worker.link.why}"
            if reply is not None:
                reason = f"worker {worker.link.worker_id} failed: {reply.get('why')}"
        if await self._is_to_blame(used):
            error = CallError("WorkerLost", f"{reason}; nothing else ran there")
            killed = CallStatus.KILLED
            return CallResult(message["id"], killed, signal=signal.SIGKILL, error=error, **where)
        return CallResult.failed(message["id"], CallStatus.SANDBOX_ERROR, reason, **where)

    async def _run_cell(self, message: WorkerFrame, worker: PoolWorker) -> CallResult | None:
        entered = time.monotonic()
        slot = await self._slot(Need.CELL, worker, self.settings.max_wait_s)
        queue_s = time.monotonic() - entered
        if slot is None:
            return self._without_slot(queue_s, 1) if worker.alive else None
        reply = await self._answer(worker, message)
        if reply is None:
            return None
        return CallResult.from_frame(reply, id=message["id"], **_where(worker, queue_s, 1))

    def _without_slot(self, queue_s: float, attempt: int, reason: str = "") -> CallResult:
        """Return the result of a call that has waited for a slot in vain."""
        if not self.is_open:
            return CallResult.failed(next_id(), CallStatus.CANCELLED, "the pool was closed")
        no_slot = f"no slot within {self.settings.max_wait_s:g} s"
        reason = f"{no_slot}; {reason}" if reason else no_slot
        return CallResult.failed(
            next_id(), CallStatus.OVERLOADED, reason, queue_s=queue_s, attempt=attempt
        )

    async def _is_to_blame(self, used: Sequence[PoolWorker]) -> bool:
        """Return whether a call has caused the loss of the last worker it `used`, alone.

        It has not if other workers were lost at the same moment, since then an engine or a machine
        has failed.
        """
        if used[-1].is_host or not self.is_open:
            return False
        since = time.monotonic() - SAME_MOMENT_S
        await anyio.sleep(SAME_MOMENT_S)
        lost_workers = [worker for lost_s, worker in self._losses if lost_s > since]
        return self.is_open and all(worker in used for worker in lost_workers)

    async def _slot(
        self, need: Need, only: PoolWorker | None, left_s: float, *, again: bool = False
    ) -> PoolWorker | None:
        """Wait for a slot; return None if there was none in time or there will be none."""
        if not self.is_open:
            return None
        waiter = self.queue.enter(need, only, again=again)
        if not waiter.granted.is_set():
            try:
                with anyio.move_on_after(left_s):
                    await waiter.granted.wait()
            except BaseException:
                self.queue.leave(waiter)
                raise
            if waiter.worker is None:
                self.queue.leave(waiter)
        return waiter.worker

    async def _answer(self, worker: PoolWorker, message: WorkerFrame) -> WorkerReply | None:
        """Send the call and wait for its reply; return None if the worker is lost.

        The message gets a new `id`. The slot is freed when the worker has replied, even if the
        caller was cancelled.
        """
        message["id"] = next_id()
        try:
            await worker.link.limit_memory(memory_of(message, self.settings))
            pending: Pending = worker.link.submit(message)
        except ProtocolError as error:
            self.queue.free(worker)
            return {"status": "sandbox_error", "why": str(error), "attempt": 1}
        except SandboxUnavailable as error:
            worker.retire()  # its limit is unknown, and may be that of a call that asked for less
            self.queue.free(worker)
            return {"status": "sandbox_error", "why": str(error)}
        except BaseException:
            self.queue.free(worker)
            raise
        try:
            with anyio.move_on_after(message["timeout_s"] + worker.grace_s):
                await pending.done.wait()
        except BaseException:
            if not pending.done.is_set():
                worker.link.tell({"op": "kill", "id": message["id"]})
                self.counts[CallStatus.CANCELLED] += 1
                if self._group is not None:
                    self._group.start_soon(self._wait_killed, worker, pending)
            raise
        if not pending.done.is_set():
            worker.link.lose("it stopped responding")
        return pending.reply

    async def _wait_killed(self, worker: PoolWorker, pending: Pending) -> None:
        """Wait for a cancelled call to free its slot, or else have its worker replaced."""
        with anyio.move_on_after(worker.grace_s):
            await pending.done.wait()
        if not pending.done.is_set():
            worker.link.lose("it stopped responding")


def input_bytes(message: WorkerFrame) -> int:
    """Return the size of a call's code and standard input together, in UTF-8."""
    texts = (message["code"], message["stdin"])
    return sum(len(t) if t.isascii() else len(t.encode("utf-8", "surrogatepass")) for t in texts)


def memory_of(message: WorkerFrame, settings: PoolSettings) -> int:
    """Return the bytes of memory that a worker may hold for a call, in all of its processes.

    What the call itself may hold is no less than its directory, whose files stay when all of its
    processes have been killed: the worker's server must be able to go on. Beside that, the server
    holds copies of large input and output. That is rounded, so that limits change seldom.
    """
    memory_mib = message.get("memory_mib", settings.memory_mib)
    call_bytes = max(memory_mib, directory_mib(settings)) << 20
    kept_bytes = message.get("keep_output_bytes", 0)
    held_bytes = INPUT_COPIES * input_bytes(message) + OUTPUT_COPIES * kept_bytes
    return call_bytes + (held_bytes + SPARE_BYTES * 3 // 4) // SPARE_BYTES * SPARE_BYTES


def _where(worker: PoolWorker, queue_s: float, attempt: int) -> Where:
    return {"queue_s": queue_s, "worker_id": worker.link.worker_id, "attempt": attempt}


def _failed_to_start(reply: WorkerReply) -> bool:
    """Return whether the worker failed before the program started, such as in a fork.

    A host has repeated the call itself, and reports its `attempt`.
    """
    return reply["status"] == CallStatus.SANDBOX_ERROR and "attempt" not in reply
