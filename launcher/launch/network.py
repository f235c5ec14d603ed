"""Network interfaces and addresses of this host, and its route to other hosts."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import psutil

from launcher.errors import ConfigError, SiteError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
# connections to a store that wait to be accepted
BACKLOG = 1024


@dataclass(frozen=True)
class Interface:
    name: str
    address: str

    @property
    def loopback(self) -> bool:
        return self.address.startswith("127.")


@dataclass(frozen=True)
class Route:
    """Route to the other hosts.

    Args:
        rendezvous: address and port where the hosts meet.
        here: True if this host has that address.
        interface: interface of this host towards the others.
    """

    rendezvous: tuple[str, int]
    here: bool
    interface: Interface

    @property
    def shown(self) -> str:
        return f"{self.rendezvous[0]}:{self.rendezvous[1]}"


def endpoint(rendezvous: str) -> tuple[str, int]:
    """Return the host and port of ``"HOST:PORT"``.

    Raises:
        ConfigError: ``rendezvous`` does not have this form.
    """
    host, colon, port = rendezvous.rpartition(":")
    if ":" in host:
        raise ConfigError(
            "cluster.rendezvous", rendezvous, "IPv6 addresses are not supported.",
            "Use the first host's name, or its IPv4 address: HOST:PORT.",
        )  # fmt: skip
    if not colon or not host or not (port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(
            "cluster.rendezvous", rendezvous, "must be HOST:PORT, the port between 1 and 65535.",
            "Such as cluster.rendezvous=10.0.0.1:29400.",
        )  # fmt: skip
    return host, int(port)


def interfaces() -> list[Interface]:
    """Return every interface of this host with an IPv4 address, one entry per address."""
    # an alias such as eth0:1 is an address of eth0
    return [
        Interface(name.partition(":")[0], entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    ]


def find_route(rendezvous: str, wanted: str | None) -> Route:
    """Return the route of this host to ``rendezvous``. Nothing is sent, except to resolve a name.

    Args:
        rendezvous: HOST:PORT where the hosts meet.
        wanted: interface named by the user, or None.

    Raises:
        SiteError: The name has no address, or one that no other host reaches; no interface leads there; or ``wanted``
            does not exist.
    """
    host, port = endpoint(rendezvous)
    present = interfaces()
    addresses = _resolve(rendezvous, host, present)
    own = next((i for address in addresses for i in present if i.address == address), None)
    if own is not None:
        return Route((own.address, port), True, _wanted(wanted, present) or own)
    source = _source_address(rendezvous, addresses[0], port, present)
    towards = next((i for i in present if i.address == source), None)
    chosen = _wanted(wanted, present) or towards
    if chosen is None:
        raise SiteError(
            f"cluster.rendezvous={rendezvous}: packets to it leave from {source}, which is not the address of an "
            "interface of this host.\n  Set cluster.interface to the one that leads to the other hosts."
        )
    return Route((addresses[0], port), False, chosen)


def interface_env(route: Route, wanted: str | None) -> dict[str, str]:
    """Return the environment variables that select the interface for gloo and NCCL, as defaults.

    Raises:
        SiteError: cluster.interface contradicts the environment.
    """
    for name in (GLOO, NCCL):
        value = os.environ.get(name)
        if wanted is not None and value is not None and value.lstrip("=") != wanted:
            raise SiteError(
                f"cluster.interface={wanted}: the environment says {name}={value}.\n  Unset {name}, or leave out "
                "cluster.interface."
            )
    # NCCL treats a bare name as a prefix: eth0 would match eth0.100 too
    return {GLOO: route.interface.name, NCCL: f"={route.interface.name}"}


def _resolve(rendezvous: str, host: str, present: list[Interface]) -> list[str]:
    try:
        entries = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise SiteError(
            f"cluster.rendezvous={rendezvous}: {host} has no IPv4 address "
            f"({getattr(error, 'strerror', None) or error}).\n  Use the first host's address, or a name that every "
            "host can look up."
        ) from None
    addresses = [str(entry[4][0]) for entry in entries]
    reachable = [address for address in addresses if not address.startswith(("127.", "0."))]
    if not reachable:
        is_ = "" if addresses[0] == host else f"{host} is {addresses[0]} here; "
        raise SiteError(
            f"cluster.rendezvous={rendezvous}: {is_}no other host reaches that.\n"
            f"  Use an address of the first host. This host has: {_shown(present)}."
        )
    return reachable


def _source_address(rendezvous: str, address: str, port: int, present: list[Interface]) -> str:
    """Return this host's address on the route to ``address``; a datagram socket finds it without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            asker.connect((address, port))
        except OSError as error:
            raise SiteError(
                f"cluster.rendezvous={rendezvous}: this host has no route to {address}: {error.strerror}.\n"
                f"  Use an address of the first host that every host reaches. This host has: {_shown(present)}."
            ) from None
        return str(asker.getsockname()[0])


def _wanted(name: str | None, present: list[Interface]) -> Interface | None:
    if name is None:
        return None
    interface = next((i for i in present if i.name == name and not i.loopback), None)
    if interface is None:
        exists = name in {existing for _, existing in socket.if_nameindex()}
        problem = "has no IPv4 address that others reach" if exists else "is not an interface of this host"
        raise SiteError(f"cluster.interface={name}: {problem}.\n  This host has: {_shown(present)}.")
    return interface


def free_port(address: str) -> int:
    """Return a port of this host's ``address`` on which nothing listens."""
    with socket.create_server((address, 0)) as probe:
        return probe.getsockname()[1]


def _shown(present: list[Interface]) -> str:
    return ", ".join(f"{i.address} ({i.name})" for i in present if not i.loopback) or "no address but loopback"
