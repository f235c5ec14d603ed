"""A node's way to the other nodes of its job: the same for a run and for the doctor."""

from __future__ import annotations

import os

from launcher.cluster.network import Route, find_route
from launcher.cluster.slurm import client
from launcher.errors import SiteError, UserError


def way_to_others(interface: str | None) -> Route:
    """Of the first node: by the address at which Slurm reaches it; where that is a name that this node takes for its
    loopback, the way to Slurm's controller. Where Slurm cannot be asked, by the address that srun has told its tasks:
    it runs on the first node.

    Raises:
        SiteError: neither leads anywhere; no such interface.
    """
    try:
        return way_to(client.node_address(os.environ["SLURMD_NODENAME"]), interface)
    except SiteError:
        address = _of_controller() or os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
        if address is None:
            raise
        return way_to(address, interface)


def _of_controller() -> str | None:
    try:
        return client.controller_address()
    except SiteError:
        return None


def way_to(address: str, interface: str | None) -> Route:
    """Raises SiteError as ``find_route`` does, without the key that jobs of Slurm's do not have."""
    try:
        return find_route(f"{address}:1", interface)
    except UserError as error:
        before, own_key, problem = str(error).partition("\n")[0].rpartition(f"cluster.rendezvous={address}:1: ")
        if before or not own_key:
            raise
        raise SiteError(
            f"the way to the other nodes, through {address}: {problem}\n"
            "  NodeAddr in slurm.conf must be an address that the other nodes reach; of several networks "
            "cluster.interface names one."
        ) from None
