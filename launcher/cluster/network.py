"""This host's place in the network: its addresses, and the interface through which the other hosts are reached."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from dataclasses import dataclass

from launcher.errors import SiteError
from launcher.placement import endpoint

_SIOCGIFCONF = 0x8912
_RECORD = 40  # struct ifreq on 64-bit Linux: 16 bytes of name, then a sockaddr
_ROOM = 1024 * _RECORD
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class Interface:
    name: str
    address: str

    @property
    def loopback(self) -> bool:
        return self.address.startswith("127.")


@dataclass(frozen=True)
class Route:
    """The way to the other hosts. ``rendezvous``: the address where they meet; ``here``: whether this host has it;
    ``interface``: this host's, towards the others."""

    rendezvous: tuple[str, int]
    here: bool
    interface: Interface

    @property
    def shown(self) -> str:
        return f"{self.rendezvous[0]}:{self.rendezvous[1]}"


def interfaces() -> list[Interface]:
    """Every interface of this host with an IPv4 address; one with several addresses, several times."""
    room = array.array("B", bytes(_ROOM))
    start, _ = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        answer = fcntl.ioctl(asker.fileno(), _SIOCGIFCONF, struct.pack("iP", _ROOM, start))
    size = struct.unpack("iP", answer)[0]
    records = [room[at : at + _RECORD].tobytes() for at in range(0, size, _RECORD)]
    # an alias such as eth0:1 is an address of eth0
    return [Interface(r[:16].split(b"\0")[0].decode().split(":")[0], socket.inet_ntoa(r[20:24])) for r in records]


def find_route(rendezvous: str, wanted: str | None) -> Route:
    """How this host reaches ``rendezvous``, HOST:PORT. Nothing is sent, but for the look-up of a name.

    Args:
        rendezvous: where the hosts meet.
        wanted: the interface to use, where the user names one.

    Raises:
        SiteError: the name has no address, or one that no other host reaches; no interface leads there; no such
            interface.
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
        raise SiteError(f"cluster.rendezvous={rendezvous}: no interface of this host has {source}, its address there.")
    return Route((addresses[0], port), False, chosen)


def socket_names(route: Route, wanted: str | None) -> dict[str, str]:
    """What tells gloo and NCCL which interface to use, where the user's environment does not.

    Raises:
        SiteError: cluster.interface says one thing, and the environment another.
    """
    for name in (GLOO, NCCL):
        said = os.environ.get(name)
        if wanted is not None and said is not None and said.lstrip("=") != wanted:
            raise SiteError(
                f"cluster.interface={wanted}: the environment says {name}={said}.\n  Unset {name}, or leave out "
                "cluster.interface."
            )
    # NCCL takes a bare name for a prefix: eth0 would be eth0.100 too
    return {GLOO: route.interface.name, NCCL: f"={route.interface.name}"}


def _resolve(rendezvous: str, host: str, present: list[Interface]) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise SiteError(
            f"cluster.rendezvous={rendezvous}: no IPv4 address is known for {host} "
            f"({getattr(error, 'strerror', None) or error}).\n  Use the first host's address, or a name that every "
            "host can look up."
        ) from None
    addresses = [str(entry[4][0]) for entry in found]
    reachable = [address for address in addresses if not address.startswith(("127.", "0."))]
    if not reachable:
        is_ = "" if addresses[0] == host else f"{host} is {addresses[0]} here; "
        raise SiteError(
            f"cluster.rendezvous={rendezvous}: {is_}no other host reaches that.\n"
            f"  Use an address of the first host. This host has: {_shown(present)}."
        )
    return reachable


def _source_address(rendezvous: str, address: str, port: int, present: list[Interface]) -> str:
    """This host's address on the way to another; a datagram socket finds the route without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            asker.connect((address, port))
        except OSError as error:
            raise SiteError(
                f"cluster.rendezvous={rendezvous}: this host has no way to {address}: {error.strerror}.\n"
                f"  Use an address of the first host that every host reaches. This host has: {_shown(present)}."
            ) from None
        return str(asker.getsockname()[0])


def _wanted(name: str | None, present: list[Interface]) -> Interface | None:
    if name is None:
        return None
    found = next((i for i in present if i.name == name and not i.loopback), None)
    if found is None:
        exists = name in {known for _, known in socket.if_nameindex()}
        problem = "has no IPv4 address that others reach" if exists else "is no interface of this host"
        raise SiteError(f"cluster.interface={name}: {problem}.\n  This host has: {_shown(present)}.")
    return found


def free_port(address: str) -> int:
    """One that nothing listens on at this host's ``address``."""
    with socket.create_server((address, 0)) as probe:
        return probe.getsockname()[1]


def _shown(present: list[Interface]) -> str:
    return ", ".join(f"{i.address} ({i.name})" for i in present if not i.loopback) or "no address but loopback"


def require_reach(address: str, port: int, whose: str, seconds: float = 5.0) -> None:
    """Raises SiteError where this host cannot open a connection to ``address``. One that is refused is good enough: the
    host is there. ``whose``: the host that gave this address for its own, in words."""
    problem = (
        "it is an address of this host too"
        if any(i.address == address and not i.loopback for i in interfaces())
        else ""
    )
    if not problem:
        try:
            socket.create_connection((address, port), timeout=seconds).close()
        except ConnectionRefusedError:
            pass
        except OSError as error:
            problem = error.strerror or str(error)
    if problem:
        raise SiteError(
            f"cluster.interface: {socket.gethostname()} does not reach {address}, where {whose} is to be reached: "
            f"{problem}.\n  Set cluster.interface there to the one that leads to the other hosts."
        )
