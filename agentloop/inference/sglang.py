"""One SGLang server, over its own protocol (0.5.23): stream, abort, information, load.

Source of the protocol: SGLang's `/generate`, `/abort_request`, `/v1/models`, `/server_info` and
`/v1/loads`. Token ids go in and come out; the server's text is not used.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import anyio
import orjson
import pydantic

from agentloop.errors import ServerError, ServerRefused, ServerUnavailable
from agentloop.trajectory import TurnEnd, VersionSpan

__all__ = ["Chunk", "FrameDecoder", "SGLangServer", "Sampling", "ServerInfo", "http_session"]

_MAX_FRAME_BYTES = 64 << 20
_CONTROL_TIMEOUT = aiohttp.ClientTimeout(total=10)


class Sampling(pydantic.BaseModel):
    """How tokens are drawn. The defaults are those of training: the policy as it is."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    temperature: float = pydantic.Field(1.0, ge=0, le=100, description="0 is greedy.")
    top_p: float = pydantic.Field(1.0, gt=0, le=1, description="Nucleus of this mass.")
    top_k: int = pydantic.Field(-1, ge=-1, description="The k likeliest; -1 for all.")
    min_p: float = pydantic.Field(0.0, ge=0, le=1, description="Relative to the likeliest.")
    seed: int | None = pydantic.Field(None, ge=0, description="Where the server supports it.")

    def to_sglang(self, *, max_new_tokens: int, stop_ids: Sequence[int]) -> dict[str, Any]:
        params: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "stop_token_ids": list(stop_ids),
            "skip_special_tokens": False,
        }
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        return params


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens, of one frame or of several that arrived together; the last has `end` set."""

    ids: list[int]
    logprobs: list[float]
    version: str
    end: TurnEnd | None = None
    versions: tuple[VersionSpan, ...] = ()  # of the whole response; on the last frame
    cached_tokens: int = 0
    error: str | None = None  # with TurnEnd.ABORT: what the server said


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server is. `context_length` counts prompt and response."""

    model_path: str
    context_length: int
    max_total_num_tokens: int
    version: str
    weight_version: str


class FrameDecoder:
    """Bytes of a server-sent event stream in, payloads of `data:` out, however they are cut.

    Linear in the bytes; an event that never ends is refused at 64 MiB.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Raises ServerUnavailable where an event outgrows its bound."""
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        if self._rest:
            data = self._rest + data
        *events, self._rest = data.split(b"\n\n")
        if len(self._rest) > _MAX_FRAME_BYTES:
            raise ServerUnavailable(f"an event of more than {_MAX_FRAME_BYTES} bytes")
        payloads = []
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:
                payloads.append(event[6:])
            elif payload := _data_lines(event):
                payloads.append(payload)
        return payloads


def _data_lines(event: bytes) -> bytes:
    lines = (line[5:].removeprefix(b" ") for line in event.split(b"\n") if line[:5] == b"data:")
    return b"\n".join(lines)


@asynccontextmanager
async def http_session() -> AsyncIterator[aiohttp.ClientSession]:
    """A session without aiohttp's limit of 100 connections: streams are held for minutes."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, json_serialize=_dumps) as session:
        yield session


@dataclass(slots=True, eq=False)
class _Stream:
    """A response under way, and when it was last heard."""

    response: aiohttp.ClientResponse
    heard_s: float
    closed: bool = False


class SGLangServer:
    """A client of one server. Knows nothing of the others."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        connect_timeout_s: float = 5.0,
        stall_timeout_s: float = 120.0,
    ) -> None:
        """`stall_timeout_s` bounds the silence before and between frames, not the whole stream."""
        self.url = url.rstrip("/")
        self._session = session
        self._stall_timeout_s = stall_timeout_s
        # No timeout of aiohttp's for the reads: it costs a timer a frame. See close_stalled().
        self._stream_timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._streams: set[_Stream] = set()

    async def generate(
        self, ids: Sequence[int], params: dict[str, Any], *, rid: str
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the continuation of `ids`. Leaving the generator early frees the request.

        Raises:
            ServerRefused: the server answered with an error.
            ServerUnavailable: it could not be reached, or the stream broke before its last frame.
        """
        body = {
            "input_ids": ids,
            "sampling_params": params,
            "stream": True,
            "return_logprob": True,
            "rid": rid,
        }
        decoder = FrameDecoder()
        seen = 0
        stream: _Stream | None = None
        try:
            with anyio.fail_after(self._stall_timeout_s):
                response = await self._session.post(
                    self.url + "/generate", json=body, timeout=self._stream_timeout
                )
            async with response:
                if response.status != 200:
                    raise await _refusal(self.url, response)
                stream = _Stream(response, time.monotonic())
                self._streams.add(stream)
                while data := await response.content.readany():
                    stream.heard_s = time.monotonic()
                    for chunk in _together(self.url, decoder.feed(data), seen):
                        seen += len(chunk.ids)
                        yield chunk
                        if chunk.end is not None:
                            return
            raise ServerUnavailable(f"{self.url}: the stream ended after {seen} tokens, unfinished")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            silent = f"silent for {self._stall_timeout_s:g} s, after {seen} tokens"
            why = silent if stream is not None and stream.closed else _say(error)
            raise ServerUnavailable(f"{self.url}: {why}") from error
        finally:
            if stream is not None:
                self._streams.discard(stream)

    def close_stalled(self) -> None:
        """Break the streams that have been silent for too long; to be called now and then."""
        limit = time.monotonic() - self._stall_timeout_s
        for stream in self._streams:
            if stream.heard_s < limit:
                stream.closed = True
                stream.response.close()

    async def abort(self, rid: str) -> None:
        """Tell the server to drop a request; best effort, bounded to ten seconds."""
        await self._control("POST", "/abort_request", {"rid": rid})

    async def is_ready(self) -> bool:
        """Whether it would take a request. Does not generate, as /health would."""
        try:
            await self._control("GET", "/model_info")
        except ServerError:
            return False
        return True

    async def info(self) -> ServerInfo:
        """Raises ServerUnavailable, or ServerRefused where this is no SGLang server."""
        info = await self._control("GET", "/server_info")
        models = await self._control("GET", "/v1/models")
        try:
            return ServerInfo(
                model_path=info["model_path"],
                context_length=models["data"][0]["max_model_len"],
                max_total_num_tokens=info["max_total_num_tokens"],
                version=info["version"],
                weight_version=info.get("weight_version") or "default",
            )
        except (KeyError, IndexError, TypeError) as error:
            raise ServerRefused(f"{self.url} is not an SGLang server", status=200) from error

    async def _control(self, method: str, path: str, body: Any = None) -> Any:
        try:
            async with self._session.request(
                method, self.url + path, json=body, timeout=_CONTROL_TIMEOUT
            ) as response:
                if response.status != 200:
                    raise await _refusal(self.url + path, response)
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerUnavailable(f"{self.url}: {_say(error)}") from error
        try:
            return orjson.loads(content) if content else None
        except orjson.JSONDecodeError as error:
            raise ServerRefused(f"{self.url}{path} did not answer in JSON", status=200) from error


def _together(url: str, payloads: Sequence[bytes], seen: int) -> Iterator[Chunk]:
    """Frames that arrived together, as one chunk per policy version.

    What comes after costs the same for one token as for many. `seen` tokens came before.
    """
    ids: list[int] = []
    logprobs: list[float] = []
    version = ""
    for payload in payloads:
        if payload == b"[DONE]":
            break
        frame = _frame(url, payload)
        meta = frame["meta_info"]
        if ids and meta["weight_version"] != version:
            yield Chunk(ids, logprobs, version)
            ids, logprobs = [], []
        version = meta["weight_version"]
        # Increments with `--incremental-streaming-output`, the whole response so far without:
        # counting from the end reads both.
        if num_new := meta["completion_tokens"] - seen:
            seen += num_new
            new_ids = frame["output_ids"][-num_new:]
            new_logprobs = meta["output_token_logprobs"][-num_new:]
            if not len(new_ids) == len(new_logprobs) == num_new:
                raise ServerUnavailable(f"{url}: {num_new} new tokens, {len(new_ids)} in the frame")
            ids += new_ids
            logprobs += [entry[0] for entry in new_logprobs]
        if meta["finish_reason"] is not None:
            yield _last_chunk(ids, logprobs, meta)
            return
    if ids:
        yield Chunk(ids, logprobs, version)


def _frame(url: str, payload: bytes) -> Any:
    try:
        frame = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise ServerUnavailable(f"{url}: a frame is not JSON") from error
    if "error" in frame:
        said = frame["error"]
        message = said.get("message", said) if isinstance(said, dict) else said
        raise ServerRefused(f"{url}: {message}", status=500)
    return frame


def _last_chunk(ids: list[int], logprobs: list[float], meta: Any) -> Chunk:
    finish = meta["finish_reason"]
    kind = finish["type"]
    return Chunk(
        ids,
        logprobs,
        meta["weight_version"],
        end=TurnEnd(kind) if kind in ("stop", "length") else TurnEnd.ABORT,
        versions=tuple(
            VersionSpan(span["version"], span["start"], span["end"])
            for span in meta.get("weight_versions") or ()
        ),
        cached_tokens=meta.get("cached_tokens") or 0,
        error=finish.get("message"),
    )


async def _refusal(where: str, response: aiohttp.ClientResponse) -> ServerRefused:
    text = await response.text()
    try:
        value = orjson.loads(text)
        message = value["error"]["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = text[:500] or response.reason
    return ServerRefused(f"{where}: {response.status}: {message}", status=response.status)


def _say(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _dumps(value: Any) -> str:
    return orjson.dumps(value).decode()
