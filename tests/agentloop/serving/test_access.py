"""Access checks of Host, Origin and token, as tables."""

from __future__ import annotations

import pydantic
import pytest
from aiohttp import web

from agentloop.inference.sglang.control import http_session
from agentloop.sandbox.guard import is_loopback, url_at
from agentloop.serving.access import ApiGuard, ServeSettings
from agentloop.serving.listen import bind, serving
from tests import support

LOCAL = ServeSettings()
NAMED = ServeSettings(allowed_hosts=["Agent.example"])
SECRET = ServeSettings(token=pydantic.SecretStr("s3cret"))
OPEN = ServeSettings(host="0.0.0.0", token=pydantic.SecretStr("s3cret"))
SIX = ServeSettings(host="::1")
BEARER = "Bearer s3cret"


def status(
    settings: ServeSettings,
    host: str | None,
    origin: str | None = None,
    authorization: str | None = None,
    path: str = "/v1/models",
) -> int:
    inputs = {"Host": host, "Origin": origin, "Authorization": authorization}
    headers = {name: value for name, value in inputs.items() if value is not None}
    refusal = ApiGuard(settings).refusal(path, headers)
    return 200 if refusal is None else refusal[0]


@pytest.mark.parametrize(
    ("settings", "host", "expected"),
    [
        (LOCAL, "127.0.0.1:8000", 200),
        (LOCAL, "localhost", 200),
        (LOCAL, "LOCALHOST:8000", 200),
        (LOCAL, "[::1]:8000", 200),
        (LOCAL, "evil.example", 403),
        (LOCAL, "localhost.evil.example", 403),
        (LOCAL, "127.0.0.1.evil.example", 403),
        (LOCAL, "192.168.0.7", 403),
        (LOCAL, "", 403),
        (LOCAL, None, 403),
        (LOCAL, "evil.example:127.0.0.1", 403),
        (LOCAL, "\udcff", 403),
        (NAMED, "agent.example:443", 200),
        (NAMED, "other.example", 403),
        (SIX, "[::1]", 200),
        (OPEN, "192.168.0.7:8000", 401),
        (OPEN, "node-4:8000", 401),
        (SECRET, "node-4", 401),
        (SECRET, None, 401),
    ],
)
def test_hosts(settings: ServeSettings, host: str | None, expected: int) -> None:
    assert status(settings, host) == expected


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://localhost:8000", 200),
        ("https://LOCALHOST:8000", 200),
        ("http://localhost:3000", 403),  # another program's page on this machine
        ("http://127.0.0.1:8000", 403),
        ("https://evil.example", 403),
        ("http://localhost.evil.example", 403),
        ("null", 403),
        ("", 403),
        ("file://localhost", 403),
        ("localhost", 403),
        ("http://", 403),
    ],
)
def test_origins(origin: str, expected: int) -> None:
    assert status(LOCAL, "localhost:8000", origin) == expected


@pytest.mark.parametrize(
    ("authorization", "expected"),
    [
        (BEARER, 200),
        ("bearer  s3cret ", 200),
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        ("Bearer s3cre", 401),
        ("Bearer s3crets", 401),
        ("Basic s3cret", 401),
        ("Bearer \udcff\udc00", 401),
        ("Bearer ü", 401),
    ],
)
@pytest.mark.parametrize("settings", [SECRET, OPEN])
def test_tokens(settings: ServeSettings, authorization: str | None, expected: int) -> None:
    assert status(settings, "127.0.0.1", None, authorization) == expected


def test_health_needs_no_token_and_still_no_foreign_origin() -> None:
    assert status(SECRET, "localhost", path="/healthz") == 200
    assert status(SECRET, "node-4:8000", path="/healthz") == 200
    assert status(LOCAL, "evil.example", path="/healthz") == 403
    assert status(SECRET, "localhost", "https://evil.example", path="/healthz") == 403


@pytest.mark.parametrize("settings", [SECRET, OPEN])
def test_token_allows_any_host_but_no_foreign_origin(settings: ServeSettings) -> None:
    assert status(settings, "node-4:8000", None, BEARER) == 200
    assert status(settings, "node-4:8000", "http://node-4:8000", BEARER) == 200
    assert status(settings, "node-4:8000", "https://evil.example", BEARER) == 403


def test_dns_rebinding_page_lacks_the_token() -> None:
    """The page's host resolves to this machine, so Host and Origin agree; the token is missing."""
    assert status(SECRET, "evil.example:8000", "http://evil.example:8000") == 401
    assert status(LOCAL, "evil.example:8000", "http://evil.example:8000") == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "agent.example", ""])
@pytest.mark.parametrize("token", [None, ""])
def test_another_address_than_loopback_needs_a_token(host: str, token: str | None) -> None:
    with pytest.raises(ValueError, match=r"set serve\.token"):
        ServeSettings(host=host, token=None if token is None else pydantic.SecretStr(token))


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("10.0.0.1", False), ("example.org", False), ("", False)],
)  # fmt: skip
def test_loopback_hosts(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "localhost"])
async def test_reported_address_can_be_opened(host: str) -> None:
    settings = ServeSettings(host=host, port=0, token=pydantic.SecretStr("x"))
    app = web.Application(middlewares=[ApiGuard(settings).middleware])
    with bind(settings) as bound:
        async with serving(app, bound) as url, http_session() as session:
            assert not url.startswith("http://0.0.0.0")
            async with session.get(f"{url}/nothing", headers={"Authorization": "Bearer x"}) as got:
                assert got.status == 404


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("::", "http://[::1]:8"),
        ("10.0.0.1", "http://10.0.0.1:8"),
        ("a.example", "http://a.example:8"),
    ],
)
def test_url_of_a_service(host: str, url: str) -> None:
    assert url_at(host, 8) == url


async def test_refusal_reaches_no_handler_and_has_openais_format() -> None:
    reached = []

    async def handler(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.Response()

    app = web.Application(middlewares=[ApiGuard(SECRET).middleware])
    app.router.add_get("/x", handler)
    async with support.serving(app) as url, http_session() as session:
        for headers, expected in [
            ({}, (401, "authentication_error")),
            ({"Authorization": BEARER, "Origin": "http://evil"}, (403, "permission_error")),
        ]:
            async with session.get(url + "/x", headers=headers) as response:
                error = (await response.json())["error"]
                assert (response.status, error["type"]) == expected
        assert reached == []
        async with session.get(url + "/x", headers={"Authorization": BEARER}) as response:
            assert response.status == 200
    assert reached == ["/x"]


@pytest.mark.parametrize(
    ("settings", "origin", "expected"),
    [
        (NAMED, "https://agent.example", True),
        (NAMED, "https://other.example", False),
        (NAMED, "null", False),
        (LOCAL, "https://agent.example", False),
        (NAMED.model_copy(update={"token": SECRET.token}), "https://agent.example", True),
    ],
)
def test_pages_of_listed_sites_may_ask_and_read(
    settings: ServeSettings, origin: str, expected: bool
) -> None:
    guard = ApiGuard(settings)
    headers = {
        "Host": "localhost",
        "Origin": origin,
        "Access-Control-Request-Method": "DELETE",
        "Access-Control-Request-Private-Network": "true",
    }
    assert guard.admits_preflight("OPTIONS", "/v1/models", headers) is expected
    assert not guard.admits_preflight("GET", "/v1/models", headers)
    allowed = guard.cors_headers(headers)
    assert bool(allowed) is expected
    if expected:
        assert allowed["Access-Control-Allow-Origin"] == origin
        assert allowed["Access-Control-Allow-Methods"] == "DELETE"
        assert allowed["Access-Control-Allow-Private-Network"] == "true"
    assert guard.cors_headers({"Host": "localhost"}) == {}
