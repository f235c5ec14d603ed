"""Where hosts meet, and this host's way there: what is found, and what is refused."""

from __future__ import annotations

import socket
from unittest.mock import Mock

import pytest

from launcher.errors import ConfigError, SiteError
from launcher.launch import network
from launcher.launch.network import Interface, Route, endpoint, find_route, interface_env


@pytest.mark.parametrize(("text", "expected"), [("a.b:1", ("a.b", 1)), ("10.0.0.1:65535", ("10.0.0.1", 65535))])
def test_endpoints(text: str, expected: tuple[str, int]) -> None:
    assert endpoint(text) == expected


@pytest.mark.parametrize("text", ["host", "host:", ":29400", "host:0", "host:65536", "host:http", "host:-1", ""])
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        endpoint(text)


def test_ipv6_is_refused() -> None:
    with pytest.raises(ConfigError, match="IPv6 addresses are not supported"):
        endpoint("[fe80::1]:29400")


LO = Interface("lo", "127.0.0.1")


def present(monkeypatch: pytest.MonkeyPatch, *found: Interface) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: [LO, *found])


def test_the_owner_of_the_address_is_the_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    eth0, ib0 = Interface("eth0", "192.0.2.1"), Interface("ib0", "198.51.100.1")
    present(monkeypatch, eth0, ib0)
    assert find_route("192.0.2.1:5", None) == Route(("192.0.2.1", 5), True, eth0)
    assert find_route("192.0.2.1:5", "ib0") == Route(("192.0.2.1", 5), True, ib0)
    monkeypatch.delenv(network.GLOO, raising=False)
    monkeypatch.setenv(network.NCCL, "=ib0")
    assert interface_env(Route(("192.0.2.1", 5), True, ib0), "ib0") == {network.GLOO: "ib0", network.NCCL: "=ib0"}
    with pytest.raises(SiteError, match="the environment says NCCL_SOCKET_IFNAME==ib0"):
        interface_env(Route(("192.0.2.1", 5), True, eth0), "eth0")


@pytest.mark.parametrize(
    ("rendezvous", "interface", "words"),
    [
        ("localhost:5", None, ["localhost is 127.0.0.1 here; no other host reaches that", "192.0.2.1 (eth0)"]),
        ("127.0.1.1:5", None, ["no other host reaches that"]),
        ("nowhere:5", None, ["nowhere has no IPv4 address (Name or service not known)"]),
        ("192.0.2.1:5", "lo", ["lo: has no IPv4 address that others reach"]),
        ("192.0.2.1:5", "eth9", ["eth9: is not an interface of this host", "This host has: 192.0.2.1 (eth0)"]),
    ],
)
def test_routes_that_lead_nowhere(
    monkeypatch: pytest.MonkeyPatch, rendezvous: str, interface: str | None, words: list[str]
) -> None:
    present(monkeypatch, Interface("eth0", "192.0.2.1"))
    if rendezvous == "nowhere:5":  # whatever answers for unknown names here
        unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=unknown))
    with pytest.raises(SiteError) as caught:
        find_route(rendezvous, interface)
    for word in words:
        assert word in str(caught.value)
