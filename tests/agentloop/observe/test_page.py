"""The page over HTTP: routes, access checks and readers that stop reading."""

from __future__ import annotations

import io
import json
import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import anyio
import pydantic
import pytest
from aiohttp import web
from anyio.abc import ByteStream
from yarl import URL

from agentloop.errors import NotThere, RequestError, ServerError
from agentloop.observe import page as page_module
from agentloop.observe.frames import BoardFrame
from agentloop.observe.page import Page
from agentloop.observe.perfetto import trace_of
from agentloop.serving.access import ApiGuard, ServeSettings
from agentloop.serving.listen import bind, serving
from tests.patience import patient
from tests.support import eventually

WEB = Path(page_module.__file__).with_name("web")
TOKEN = "open sesame"


@dataclass
class Played:
    """A fake source of data."""

    given: list[str | None] = field(default_factory=list)
    num_readers: int = 0
    num_frames: int = 2
    size: int = 1
    cut_short: bool = False

    async def frames(self, last_id: str | None = None) -> AsyncGenerator[tuple[str, bytes]]:
        self.given.append(last_id)
        self.num_readers += 1
        try:
            for number in range(self.num_frames):
                yield f"x-{number}", b'{"rev": %d, "pad": "%s"}' % (number, b"." * self.size)
            yield "", b'{"rev": 9}'
            if not self.cut_short:
                await anyio.sleep_forever()
        finally:
            self.num_readers -= 1

    async def frame(self) -> BoardFrame:
        return {"rev": 1, "full": True}

    async def rollout(self, key: str) -> dict[str, Any]:
        if key == "gone":
            raise NotThere(f"rollout {key!r}: unknown, or no longer kept")
        return {"id": key, "arguments": {"n": 2**70}}

    async def rollout_events(self, key: str) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
        self.num_readers += 1
        try:
            yield "trajectory", await self.rollout(key)
            yield "delta", {"turn": 0, "token": 0, "turns": []}
            if not self.cut_short:
                yield "end", await self.rollout(key)
            else:
                await anyio.sleep_forever()
        finally:
            self.num_readers -= 1

    async def group(self, name: str) -> dict[str, Any]:
        return {"id": (await self.rollout(name))["id"]}

    async def runs(self) -> list[dict[str, Any]]:
        return [{"name": "one"}]

    async def curves(self, run: str) -> dict[str, Any]:
        if run != "one & two":
            raise NotThere(f"run {run!r}")
        return {"rows": [{"step": 1}]}


class Controls:
    """Fake actions."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str | None]] = []

    @property
    def actions(self) -> Sequence[str]:
        return ("pause", "cancel")

    async def perform(self, action: str, rollout: str | None) -> str:
        if action == "cancel" and rollout is None:
            raise RequestError("rollout: name the rollout to cancel")
        self.done.append((action, rollout))
        return "it is done"


@dataclass
class At:
    url: str
    shown: Played
    controls: Controls
    http: aiohttp.ClientSession
    questions: list[str]

    async def get(self, path: str, **options: Any) -> tuple[int, aiohttp.ClientResponse, bytes]:
        # As it stands: no client's idea of what is meant.
        url = URL(self.url + path, encoded=True)
        async with self.http.get(url, **options) as response:
            return response.status, response, await response.read()

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = self.url + path
        async with self.http.post(url, data=io.BytesIO(data), headers=headers) as response:
            return response.status, json.loads(await response.read())


@asynccontextmanager
async def page(
    shown: Played | None = None,
    *,
    asks: bool = True,
    controls: bool = True,
    io_timeout_s: float = 5.0,
    control_token: str = TOKEN,
    **serve: Any,
) -> AsyncIterator[At]:
    settings = ServeSettings.model_validate({"port": 0, **serve})
    questions: list[str] = []

    async def ask(question: str) -> str:
        if question == "nobody":
            raise ServerError("no server is up yet")
        questions.append(question)
        return "r/1"

    shown, control = shown or Played(), Controls()
    made = Page(
        shown,
        ask=ask if asks else None,
        control=control if controls else None,
        control_token=pydantic.SecretStr(control_token),
        io_timeout_s=io_timeout_s,
    )
    app = web.Application(middlewares=[ApiGuard(settings).middleware])
    made.add_to(app)
    with bind(settings) as bound:
        async with serving(app, bound) as url, aiohttp.ClientSession() as http:
            yield At(url, shown, control, http, questions)


def events(text: str) -> list[tuple[str, str, Any]]:
    """Parse server-sent events into id, event and data."""
    parsed = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "data" in fields:
            data = json.loads(fields["data"])
            parsed.append((fields.get("id", ""), fields["event"], data))
    return parsed


async def answer_of(stream: ByteStream) -> bytes:
    """Read a response up to the end of its body, a JSON object."""
    answer = b""
    with anyio.fail_after(patient(15)):
        while not answer.endswith(b"}"):
            answer += await stream.receive()
    return answer


# --- the page itself ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html"), ("/page/app.js", "text/javascript"), ("/page/style.css", "text/css"),
        ("/page/vendor/uPlot.iife.min.js", "text/javascript"), ("/page/index.html", "text/html"),
    ],
)  # fmt: skip
async def test_page_is_served_with_its_security_headers(path: str, kind: str) -> None:
    async with page() as at:
        status, response, body = await at.get(path)
    assert (status, response.content_type, response.charset) == (200, kind, "utf-8")
    assert len(body) > 100
    policy = response.headers["Content-Security-Policy"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert "unsafe" not in policy
    assert rules["frame-ancestors"] == "'none'"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Referrer-Policy"] == "no-referrer"


def test_page_needs_nothing_that_its_policy_forbids() -> None:
    html = (WEB / "index.html").read_text("utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)[^>]*>", html)  # none inline
    assert not re.search(r"\son[a-z]+=|\sstyle=|<style", html)
    for link in re.findall(r'(?:src|href)="([^"#][^"]*)"', html):
        assert link.startswith("data:image/") or (WEB / link.removeprefix("page/")).is_file()


async def test_each_allowed_file_of_the_page_is_served() -> None:
    async with page() as at:
        for path in WEB.rglob("*"):
            status, *_ = await at.get(f"/page/{path.relative_to(WEB)}")
            is_ours = path.suffix in (".html", ".css", ".js", ".svg")
            assert status == (200 if is_ours else 404), path


@pytest.mark.parametrize(
    "name",
    [
        "../page.py", "..%2fpage.py", "%2e%2e/page.py", "%2e%2e%2fpage.py", "../../../etc/passwd",
        "..%2f..%2f..%2f..%2f..%2f..%2f..%2fetc%2fpasswd", "%2fetc%2fpasswd", "/etc/passwd",
        "%2e%2e%2f%2e%2e%2f__init__.py", "..%5cpage.py", "%252e%252e%252fpage.py", "", ".", "%2e",
        "vendor", "vendor/", "vendor/LICENSE", "app.js%00", "%00.js", "app.js%00.css",
        "a" * 300 + ".js", "a/" * 2000 + ".js", "nope.js", "%ff.js", "..%2fweb%2fapp.js%2f..",
        "app.js/x.js", "vendor%2f..%2f..%2fboard.py",
    ],
)  # fmt: skip
async def test_no_other_file_is_served(name: str) -> None:
    async with page() as at:
        status, _, body = await at.get(f"/page/{name}")
        assert status in (400, 403, 404), body[:200]
        assert b"import" not in body
        assert b"root:" not in body


async def test_symlink_to_outside_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret.js").write_text("secret")
    web_folder = tmp_path / "web"
    web_folder.mkdir()
    (web_folder / "out.js").symlink_to(tmp_path / "secret.js")
    (web_folder / "here.js").write_text("here")
    monkeypatch.setattr(page_module, "_WEB", web_folder)
    async with page() as at:
        assert (await at.get("/page/out.js"))[0] == 404
        assert (await at.get("/page/here.js"))[2] == b"here"


# --- what it reads --------------------------------------------------------------------------------


async def test_data_is_returned_as_json() -> None:
    async with page() as at:
        for path, body in (
            ("/api/frame", {"rev": 1, "full": True}),
            ("/api/rollouts/r", {"id": "r", "arguments": {"n": 2**70}}),
            ("/api/groups/g", {"id": "g"}),
            ("/api/runs", {"runs": [{"name": "one"}]}),
            ("/api/trace", trace_of({"rev": 1, "full": True})),
            ("/api/curves?run=one%20%26%20two", {"run": "one & two", "rows": [{"step": 1}]}),
        ):
            status, response, data = await at.get(path)
            assert (status, response.content_type) == (200, "application/json"), path
            assert json.loads(data) == body


@pytest.mark.parametrize(
    "path", ["/api/rollouts/gone", "/api/rollouts/gone/stream", "/api/groups/gone", "/api/curves"]
)
async def test_unknown_items_have_a_status(path: str) -> None:
    async with page() as at:
        status, response, data = await at.get(path)
        assert (status, response.content_type) == (404, "application/json")
        assert isinstance(json.loads(data)["error"], str)
        assert at.shown.num_readers == 0


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "3-a/b:c?d#e.0", "50% off", "a b+c", "é🙂", "%2F", "..", "\n"]
)
async def test_ids_are_passed_unchanged(name: str) -> None:
    async with page() as at:
        path = f"/api/rollouts/{quote(name, safe='')}"
        if name == "..":  # a client would take it for a step up
            path = "/api/rollouts/%2e%2e"
        status, _, data = await at.get(path)
        assert status == 200 or name == ".."
        assert status != 200 or json.loads(data)["id"] == name


async def test_frames_are_server_sent_events() -> None:
    async with page(Played(cut_short=True)) as at:
        status, response, body = await at.get("/api/stream", headers={"Last-Event-ID": "x-7"})
    assert (status, response.content_type) == (200, "text/event-stream")
    assert [(name, event, data["rev"]) for name, event, data in events(body.decode())] == [
        ("x-0", "frame", 0), ("x-1", "frame", 1), ("", "frame", 9),
    ]  # fmt: skip
    assert at.shown.given == ["x-7"]
    assert at.shown.num_readers == 0


async def test_silent_stream_sends_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.serving.http._PING_S", 0.01)
    async with page() as at, at.http.get(at.url + "/api/stream") as response:
        with anyio.fail_after(patient(15)):
            await response.content.readuntil(b": nothing new\n\n")


async def test_rollout_is_streamed_to_its_end() -> None:
    async with page() as at:
        _, response, body = await at.get("/api/rollouts/r/stream")
    assert response.content_type == "text/event-stream"
    assert [event for _, event, _ in events(body.decode())] == ["trajectory", "delta", "end"]
    assert at.shown.num_readers == 0


@pytest.mark.parametrize("path", ["/api/stream", "/api/rollouts/r/stream"])
async def test_reader_that_leaves_is_no_longer_counted(path: str) -> None:
    async with page(Played(cut_short=path != "/api/stream")) as at:
        async with at.http.get(at.url + path) as response:
            with anyio.fail_after(patient(15)):
                await response.content.readuntil(b"\n\n")
            assert at.shown.num_readers == 1
            response.close()
        await eventually(lambda: at.shown.num_readers == 0)


async def test_deaf_reader_is_disconnected(caplog: pytest.LogCaptureFixture) -> None:
    shown = Played(num_frames=10_000, size=100_000)
    async with page(shown, io_timeout_s=0.2) as at:
        host, port = at.url.removeprefix("http://").split(":")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((host, int(port)))
            deaf.sendall(f"GET /api/stream HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
            await eventually(lambda: bool(shown.given))
            await eventually(lambda: shown.num_readers == 0)
        assert (await at.get("/api/frame"))[0] == 200  # others are served
    assert not caplog.records


@pytest.mark.parametrize("path", ["/api/stream", "/api/rollouts/r/stream"])
async def test_service_that_ends_does_not_wait_for_its_readers(path: str) -> None:
    shown, settings = Played(cut_short=path != "/api/stream"), ServeSettings(port=0)
    app = web.Application()
    Page(shown).add_to(app)
    with bind(settings) as bound:
        async with serving(app, bound) as url, aiohttp.ClientSession() as http:
            async with http.get(url + path) as response:
                await response.content.readuntil(b"\n\n")
                assert shown.num_readers == 1
                await app.shutdown()  # what comes first, and before others are waited for
                await eventually(lambda: shown.num_readers == 0)


async def test_end_of_the_service_ends_its_readers() -> None:
    shown = Played()
    with anyio.fail_after(patient(15)):
        async with page(shown) as at, anyio.create_task_group() as tasks:
            tasks.start_soon(at.get, "/api/stream")
            await eventually(lambda: shown.num_readers == 1)
            tasks.cancel_scope.cancel()
    assert shown.num_readers == 0


# --- what it does ---------------------------------------------------------------------------------


async def test_question_starts_a_rollout() -> None:
    async with page() as at:
        assert await at.post("/api/ask", {"question": "why?"}) == (200, {"rollout": "r/1"})
        assert at.questions == ["why?"]
        status, body = await at.post("/api/ask", {"question": "nobody"})
        assert (status, body["error"]) == (503, "no server is up yet")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"\xff\xfe", b"[]", b"null", b'"why?"', {}, {"question": None}, {"question": 5},
        {"question": ""}, {"question": " \n"}, {"question": ["why?"]},
        {"question": "x" * 100_001}, b"[" * 100_000,
    ],
    ids=lambda body: str(body)[:30],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/api/ask", "/api/control"])
async def test_invalid_bodies_are_refused_with_a_message(path: str, body: Any) -> None:
    async with page() as at:
        status, answer = await at.post(path, body, **{"X-Control-Token": TOKEN})
        assert status == 400
        assert isinstance(answer["error"], str)
    assert (at.questions, at.controls.done) == ([], [])


@pytest.mark.parametrize("path", ["/api/ask", "/api/control"])
async def test_body_that_is_too_large_is_refused_with_a_message(path: str) -> None:
    async with page() as at:
        status, answer = await at.post(path, b" " * (3 << 20), **{"X-Control-Token": TOKEN})
        assert status == 413
        assert isinstance(answer["error"], str)


async def test_body_that_does_not_arrive_times_out() -> None:
    async with page(io_timeout_s=0.05) as at:
        host, port = at.url.removeprefix("http://").split(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            head = f"POST /api/ask HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 9"
            await stream.send(f"{head}\r\n\r\n{{".encode())
            answer = await answer_of(stream)
        assert b" 408 " in answer
        assert b'{"error":' in answer


async def test_asking_without_support_is_an_error() -> None:
    async with page(asks=False, controls=False) as at:
        assert (await at.post("/api/ask", {"question": "why?"}))[0] == 400
        token = {"X-Control-Token": TOKEN}
        status, body = await at.post("/api/control", {"do": "pause"}, **token)
        assert (status, body["error"]) == (400, "do: not available here")


async def test_control_token_allows_actions() -> None:
    async with page() as at:
        token = {"X-Control-Token": TOKEN}
        body: dict[str, Any] = {"do": "cancel", "rollout": "r/1"}
        assert await at.post("/api/control", body, **token) == (200, {"done": "it is done"})
        for body in (
            {"do": "cancel"}, {"do": "drain"}, {"do": "can"}, {"do": ["pause"]}, {"do": None},
            {"do": "cancel", "rollout": 5}, {"do": "cancel", "rollout": ["r"]},
        ):  # fmt: skip
            status, answer = await at.post("/api/control", body, **token)
            assert status == 400
            assert answer["error"].startswith(("do:", "rollout:"))
    assert at.controls.done == [("cancel", "r/1")]


@pytest.mark.parametrize("token", [None, "", "open", f"{TOKEN} ", f"{TOKEN}x", "ö", "\udcff\udcfe"])
async def test_actions_require_the_control_token(token: str | None) -> None:
    async with page() as at:
        host, port = at.url.removeprefix("http://").split(":")
        body = b'{"do": "pause"}'
        head = f"POST /api/control HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        if token is not None:
            if token.endswith(" "):
                token = f"{token}x"
            head += f"X-Control-Token: {token}\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(head.encode("utf-8", "surrogateescape") + body)
            answer = await answer_of(stream)
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert b"control token" in answer
    assert at.controls.done == []


async def test_token_may_contain_any_characters() -> None:
    async with page(control_token="Schlüssel") as at:
        host, port = at.url.removeprefix("http://").split(":")
        body = b'{"do": "pause"}'
        head = (
            f"POST /api/control HTTP/1.1\r\nHost: {host}:{port}\r\nX-Control-Token: Schlüssel\r\n"
        )
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert (await answer_of(stream)).startswith(b"HTTP/1.1 200 ")


def test_default_control_token_is_random() -> None:
    made = {Page(Played()).control_token for _ in range(10)}
    assert len(made) == 10
    assert all(len(token) >= 12 for token in made)
    assert Page(Played(), control_token=pydantic.SecretStr("")).control_token


API = ["/api/frame", "/api/trace", "/api/stream", "/api/rollouts/r", "/api/runs", "/api/groups/g"]


async def test_token_protects_the_data_but_not_the_page() -> None:
    async with page(Played(cut_short=True), token="s3cret") as at:
        for path in ("/", "/page/app.js", "/page/style.css"):
            assert (await at.get(path))[0] == 200
        for path in (*API, "//api/frame", "/page/../api/frame", "/page/%2e%2e/api/frame"):
            status, *_ = await at.get(path)
            assert status in (401, 404), path
        for path in ("/api/ask", "/api/control"):
            assert (await at.post(path, {"question": "why?"}))[0] == 401
        bearer = {"Authorization": "Bearer s3cret"}
        for path in API:
            assert (await at.get(path, headers=bearer))[0] == 200
        assert (await at.post("/api/ask", {"question": "why?"}, **bearer))[0] == 200
        # The one token is not the other.
        assert (await at.post("/api/control", {"do": "pause"}, **bearer))[0] == 403


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Host": "evil.example"}])
async def test_pages_of_other_sites_are_refused(headers: dict[str, str]) -> None:
    async with page() as at:
        for path in ("/", *API):
            assert (await at.get(path, headers=headers))[0] == 403
        assert (await at.post("/api/ask", {"question": "why?"}, **headers))[0] == 403
    assert at.questions == []


async def test_other_methods_are_refused() -> None:
    async with page() as at:
        for method, path in (
            ("POST", "/api/frame"),
            ("GET", "/api/ask"),
            ("DELETE", "/"),
            ("GET", "/api/control"),
        ):
            async with at.http.request(method, at.url + path) as response:
                assert response.status == 405
