"""The allow-list of a computer, and what its proxy reads."""

from __future__ import annotations

from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.sandbox import ComputerLimits
from agentloop.sandbox.computer.egress import (
    AllowList,
    Refused,
    is_public,
    parse_request,
    read_address,
)
from agentloop.sandbox.computer.machine import ComputerSpec
from agentloop.sandbox.computer.proxy import PathProxy

ALLOWED = AllowList.parse(
    "allow: PyPI.org, *.example.org:443,10.1.2.3:8080, 10.2.0.0/16,[2001:db8::1]:443"
)


def is_listed(allowed: AllowList, host: str, port: int) -> bool:
    """Return whether a tunnel to a host may be."""
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    tunnel, get = f"CONNECT {target} HTTP/1.1", f"GET http://{target}/ HTTP/1.1"
    head = get if port == 80 else tunnel  # which 80 has not
    try:
        request = parse_request(head.encode())
    except Refused:
        return False
    return allowed.has(request.host, request.port)


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("pypi.org", 80),
        ("pypi.org", 443),
        ("a.example.org", 443),
        ("b.a.example.org", 443),
        ("10.1.2.3", 8080),
        ("::ffff:10.1.2.3", 8080),
        ("10.2.255.1", 80),
        ("2001:db8:0::1", 443),
    ],
)
def test_listed_host(host: str, port: int) -> None:
    assert is_listed(ALLOWED, host, port)


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("pypi.org", 22),
        ("a.pypi.org", 443),
        ("example.org", 443),
        ("xexample.org", 443),
        ("a.example.org", 80),
        ("10.1.2.3", 80),
        ("167838211", 8080),
        ("10.66051", 8080),
        ("0xa010203", 8080),
        ("10.3.0.1", 80),
        ("2001:db8::2", 443),
        ("", 80),
        ("*.example.org", 443),
        ("a..example.org", 443),
        ("a" * 64 + ".example.org", 443),
    ],
)
def test_host_that_is_not_listed(host: str, port: int) -> None:
    assert not is_listed(ALLOWED, host, port)


def test_all_names_and_no_address() -> None:
    allowed = AllowList.parse("allow:*")
    assert is_listed(allowed, "any.name", 443)
    for host, port in (("any.name", 22), ("1.1.1.1", 443), ("127.0.0.1", 80)):
        assert not is_listed(allowed, host, port)


@pytest.mark.parametrize(
    "text",
    [
        "", "a,", "a b", "a:0", "a:99999", "*a", "a.*.b", "*.*.b", "1.2.3", "10.0.0.1/8", "::1",
        "http://a", "[a.b]", "bücher.example", "a:b", "127.1",
    ],
)  # fmt: skip
def test_unclear_entry_names_the_setting(text: str) -> None:
    with pytest.raises(ValueError, match="network: "):
        ComputerSpec("image", f"allow:{text}", ComputerLimits())


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "0.0.0.0", "10.1.1.1", "172.16.1.1", "192.168.1.1", "169.254.169.254",
        "100.64.0.1", "198.18.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1",
        "fd00::1", "fec0::1", "ff0e::1", "64:ff9b::1.1.1.1", "2001::1", "2002:7f00:1::",
        "::127.0.0.1", "::ffff:127.0.0.1", "2001:db8::1", "fd00:ec2::254",
    ],
)  # fmt: skip
def test_addresses_that_no_name_leads_to(address: str) -> None:
    assert not is_public(ip_address(address))


def test_addresses_that_names_lead_to() -> None:
    assert is_public(ip_address("93.184.216.34"))
    assert is_public(ip_address("2606:4700::6810:1"))


@given(st.binary(max_size=80), st.sampled_from([b"", b"GET http://a/ HTTP/1.1\r\n", b"CONNECT "]))
def test_any_head_is_read_or_refused(data: bytes, start: bytes) -> None:
    try:
        request = parse_request(start + data)
    except Refused:
        return
    assert request.head is None or request.head.endswith(b"Connection: close\r\n\r\n")


def test_request_for_the_server() -> None:
    request = parse_request(
        b"POST http://A.b:81?q HTTP/1.0\r\nHost: c\r\nConnection: keep-alive, X\r\nUpgrade: h2c\r\n"
        b"Proxy-Authorization: x\r\nX: 1\r\nContent-Length: 3"
    )
    assert (request.host, request.port, request.body_bytes) == ("a.b", 81, 3)
    assert request.head == (
        b"POST /?q HTTP/1.0\r\nHost: A.b:81\r\nX: 1\r\nContent-Length: 3\r\n"
        b"Connection: close\r\n\r\n"
    )


# -- one server -------------------------------------------------------------------------------

OURS = PathProxy("http://127.0.0.1:4000/v1/sessions/ours")


def test_requests_below_the_path_are_passed_on() -> None:
    head = b"POST /v1/sessions/ours/v1/chat?a=b HTTP/1.1\r\nHost: evil\r\nContent-Length: 3"
    request = OURS._parse(head)
    assert (str(request.host), request.port, request.body_bytes) == ("127.0.0.1", 4000, 3)
    assert request.head is not None
    first, host, *_ = request.head.split(b"\r\n")
    assert first == b"POST /v1/sessions/ours/v1/chat?a=b HTTP/1.1"
    assert host == b"Host: 127.0.0.1:4000"


@pytest.mark.parametrize(
    "line",
    [
        "GET /v1/sessions/other/v1/chat HTTP/1.1",
        "GET /v1/sessions/ours HTTP/1.1",
        "GET /v1/sessions/ours2/ HTTP/1.1",
        "GET  /v1/sessions/ours/ HTTP/1.1",
        "GET http://127.0.0.1:4000/v1/sessions/ours/ HTTP/1.1",
        "GET /v1/sessions/ours/ /v1/sessions/other/ HTTP/1.1",
        "CONNECT /v1/sessions/ours/ HTTP/1.1",
        "CONNECT 127.0.0.1:4000 HTTP/1.1",
        "/v1/sessions/ours/ HTTP/1.1",
        "",
    ],
)
def test_other_requests_are_refused(line: str) -> None:
    with pytest.raises(Refused):
        OURS._parse(line.encode())


@pytest.mark.parametrize(
    ("listed", "address", "is_allowed"),
    [
        ("0.0.0.0/0", "1.1.1.1", True),
        ("0.0.0.0/0", "10.0.0.1", True),
        ("0.0.0.0/0", "127.0.0.1", False),
        ("0.0.0.0/0", "169.254.169.254", False),
        ("0.0.0.0/0", "0.0.0.0", False),
        ("[::/0]", "2606:4700::1", True),
        ("[::/0]", "::1", False),
        ("[::/0]", "fe80::1", False),
        ("127.0.0.0/8", "127.0.0.1", True),
        ("169.254.169.254", "169.254.169.254", True),
        ("[::ffff:10.0.0.1]", "10.0.0.1", True),
    ],
)
def test_wide_networks_have_no_address_of_loopback_or_the_link(
    listed: str, address: str, is_allowed: bool
) -> None:
    assert AllowList.parse(f"allow:{listed}").has(read_address(address), 443) is is_allowed
