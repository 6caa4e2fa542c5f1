"""The proxy of the environment for a URL."""

from __future__ import annotations

import pytest

from agentloop.errors import SettingsError
from agentloop.inference.openai_client import EndpointSettings, OpenAIClient
from agentloop.inference.proxies import proxy_for

PROXY = "http://proxy:3128"
FAR = "http://model.example.org:8000/v1"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("variables", "url", "proxy"),
    [
        ({}, FAR, None),
        ({"HTTP_PROXY": PROXY}, FAR, PROXY),
        ({"http_proxy": "proxy:3128"}, FAR, PROXY),
        ({"HTTP_PROXY": PROXY}, "https://example.org", None),
        ({"https_proxy": PROXY}, "https://example.org", PROXY),
        ({"ALL_PROXY": PROXY}, "https://example.org", PROXY),
        ({"ALL_PROXY": "http://other:1", "HTTP_PROXY": PROXY}, FAR, PROXY),
        ({"http_proxy": PROXY, "HTTP_PROXY": "http://other:1"}, FAR, PROXY),
    ],
)
def test_proxy_of_scheme(
    variables: dict[str, str], url: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_for(url) == proxy


@pytest.mark.parametrize(
    "host", ["localhost", "127.9.9.9", "0.0.0.0", "[::1]", "my.localhost", "[::ffff:127.0.0.1]"]
)
def test_no_proxy_towards_loopback(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://elsewhere:1")
    monkeypatch.setenv("NO_PROXY", "[::1")
    assert proxy_for(f"http://{host}:8000/v1") is None


@pytest.mark.parametrize(
    ("entries", "host", "is_direct"),
    [
        ("*", "a.org", True),
        ("a.org", "a.org", True),
        ("A.org", "a.ORG", True),
        (".a.org", "b.a.org", True),
        ("*.a.org", "b.a.org", True),
        ("a.org", "b.a.org", True),
        ("a.org", "ba.org", False),
        ("b.org, a.org", "a.org", True),
        ("a.org:8000", "a.org", True),
        ("a.org:1", "a.org", False),
        ("[fd00::1]", "[fd00::1]", True),
        ("[fd00::1]:8000", "[fd00::1]", True),
        ("fd00::1", "[fd00:0:0::1]", True),
        ("fd00::1", "[fd00::2]", False),
        ("fd00::/8", "[fd12::1]", True),
        ("[fd00::]/8", "[fd12::1]", True),
        ("fe80::/10", "[fd12::1]", False),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("10.0.0.0/8", "a.org", False),
        ("10.0.0.0/8", "[fd12::1]", False),
        ("[::1]", "a.org", False),
    ],
)
def test_entries_of_no_proxy(
    entries: str, host: str, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", entries)
    assert proxy_for(f"http://{host}:8000/v1") == (None if is_direct else PROXY)


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"ALL_PROXY": "socks4://proxy:1"}, "ALL_PROXY: socks4 proxies are not supported"),
        ({"http_proxy": "http://proxy:x"}, "http_proxy: it does not have the form"),
        ({"http_proxy": "http://"}, "http_proxy: it does not have the form"),
        ({"http_proxy": "http://[::1"}, "http_proxy: it does not have the form"),
        ({"http_proxy": PROXY, "NO_PROXY": "10.0.0.0/99"}, "NO_PROXY: '10.0.0.0/99'"),
        ({"http_proxy": PROXY, "NO_PROXY": "a.org:x"}, "NO_PROXY: 'a.org:x'"),
    ],
)
def test_what_cannot_work_is_named(
    variables: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=f"^{problem}"):
        proxy_for(FAR)


@pytest.mark.parametrize("scheme", ["socks5", "socks5h"])
def test_socks_proxy_needs_a_package(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.inference.proxies.find_spec", lambda name: None)
    monkeypatch.setenv("ALL_PROXY", f"{scheme}://user:secret@proxy:1")
    with pytest.raises(SettingsError, match=r"ALL_PROXY: .* pip install socksio") as raised:
        proxy_for(FAR)
    assert "secret" not in str(raised.value)


async def test_client_of_an_endpoint_asks_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "localhost,[::1],fe80::/10")
    monkeypatch.setenv("ALL_PROXY", "socks4://proxy:1")
    await OpenAIClient(EndpointSettings(url="http://127.0.0.1:8000/v1")).aclose()
    with pytest.raises(SettingsError, match="ALL_PROXY"):
        OpenAIClient(EndpointSettings(url=FAR))
