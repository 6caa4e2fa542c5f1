"""A `sandbox.serve` host as one more worker of the pool.

A host uses the frames of a worker (protocol.py) over a WebSocket at `/v1/link`, so the pool treats
it like a worker: waiting, cancelling, sessions, and a second run elsewhere after a loss. Additional
frames and fields:

From the host     ready {slots, sessions, grace_s, layers}     load {others, computers}
                  done {..., queue_s, worker_id, attempt}

`others` is the number of calls that the host runs for other clients; the pool prefers hosts with
few. `computers` are all that are there (computer/remote.py). A vanished host is detected by its
missing heartbeat within 15 s.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import anyio

from agentloop.sandbox.errors import ProtocolError, SandboxUnavailable
from agentloop.sandbox.link import Link, Pending, wait_ready
from agentloop.sandbox.protocol import MAX_FRAME_BYTES, WorkerReply
from agentloop.sandbox.results import MEASURED
from agentloop.sandbox.settings import PoolSettings
from agentloop.sandbox.worker.connection import WorkerFrame

PATH = "/v1/link"
HEARTBEAT_S = 10.0
MAX_MESSAGE_BYTES = 256 * 1024  # longer frames are split
MAX_MSG_SIZE = MAX_MESSAGE_BYTES + 1  # aiohttp refuses messages of this size or more
WRITE_TIMEOUT_S = 30.0


class Outbox:
    """A queue of outgoing frames, which are sent in batches. Its length is in bytes."""

    def __init__(self) -> None:
        self._unsent = bytearray()
        self._filled = anyio.Event()

    def __len__(self) -> int:
        return len(self._unsent)

    def put(self, frame: bytes) -> None:
        self._unsent += frame
        self._filled.set()

    async def send_all(
        self, socket: aiohttp.ClientWebSocketResponse | aiohttp.web.WebSocketResponse
    ) -> None:
        """Send frames until cancelled; close the socket if the peer does not read for too long."""
        try:
            while True:
                await self._filled.wait()  # no deadline: as long as the link lives
                self._filled = anyio.Event()
                while data := bytes(self._unsent[:MAX_MESSAGE_BYTES]):
                    with anyio.fail_after(WRITE_TIMEOUT_S):
                        await socket.send_bytes(data)
                    del self._unsent[: len(data)]
        except (OSError, TimeoutError, aiohttp.ClientError, RuntimeError):
            with anyio.move_on_after(1, shield=True):
                await socket.close()


class HostLink(Link):
    """A link whose other end is a whole pool."""

    num_others = num_computers = 0

    async def watch(self) -> None:
        """Wait until the host is lost; the WebSocket's heartbeat detects a silent one."""
        await self.lost.wait()  # no deadline: as long as the host lives

    def submit(self, message: WorkerFrame) -> Pending:
        # Replace lone surrogates, as a worker does, because the host's JSON parser rejects them.
        texts = (message["code"], message["stdin"])
        code, stdin = (text.encode("utf-8", "replace").decode() for text in texts)
        return super().submit({**message, "code": code, "stdin": stdin})

    def _on_message(self, message: WorkerReply) -> None:
        match message:
            case {"op": "load", "others": int(number)}:
                self.num_others = number
                self.num_computers = message.get("computers", 0)
            case {"op": "done", "run_s": _} if not message.keys() >= MEASURED:
                raise ProtocolError("the host's results lack fields: does it run another version?")
            case _:
                super()._on_message(message)


class HostBackend:
    """A backend whose workers are connections to one host.

    Attributes:
        url: the host's URL, which may change; the next connection goes to the new one.
        link: the latest connection of its worker.
    """

    name = "host"
    max_running = max_sessions = 0  # on this machine

    def __init__(self, url: str, settings: PoolSettings) -> None:
        self.url = url.rstrip("/")
        self._start_timeout_s = settings.start_timeout_s
        token = settings.hosts_token
        self._headers = {"Authorization": f"Bearer {token.get_secret_value()}"} if token else {}
        self.layers: Mapping[str, str] = {}
        self.link: HostLink | None = None

    @asynccontextmanager
    async def worker(self, worker_id: str) -> AsyncIterator[Link]:
        async with self.connect(PATH) as socket, self._open_link(socket, worker_id) as link:
            yield link

    @asynccontextmanager
    async def connect(
        self, path: str, heartbeat_s: float | None = HEARTBEAT_S
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Open a WebSocket. Raises SandboxUnavailable, also if it fails in the block."""
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(sock_connect=10)) as http,
                AsyncExitStack() as stack,
            ):
                # The kernel of a host that hangs still accepts connections.
                with anyio.fail_after(self._start_timeout_s):
                    connecting = http.ws_connect(
                        self.url + path,
                        headers=self._headers,
                        heartbeat=heartbeat_s,
                        max_msg_size=MAX_FRAME_BYTES,
                        compress=0,
                        timeout=aiohttp.ClientWSTimeout(ws_close=2.0),
                    )
                    socket = await stack.enter_async_context(connecting)
                yield socket
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = str(error) or "no response in time"
            if isinstance(error, aiohttp.WSServerHandshakeError) and error.status == 401:
                reason = "wrong token; see hosts_token"
            raise SandboxUnavailable(f"cannot connect to the host {self.url}: {reason}") from error

    @asynccontextmanager
    async def _open_link(
        self, socket: aiohttp.ClientWebSocketResponse, worker_id: str
    ) -> AsyncIterator[Link]:
        link, outbox = HostLink(worker_id), Outbox()
        link.write = outbox.put
        refused: SandboxUnavailable | None = None

        async def read() -> None:
            # no deadline: until the host leaves, which the heartbeat detects
            async for message in socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    link.feed(message.data)
            link.lose(f"the connection to {self.url} ended")

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            group.start_soon(outbox.send_all, socket)
            try:
                await wait_ready(link, self._start_timeout_s)
                self.layers = link.hello.get("layers", {})
                self.link = link
                yield link
            except SandboxUnavailable as error:  # the task group would wrap it
                refused = error
            finally:
                link.lose("the pool closed it")
                group.cancel_scope.cancel()
        if refused is not None:
            raise refused
