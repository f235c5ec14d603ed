"""The way from the first node of a Slurm job to the others, for a run and for the doctor."""

from __future__ import annotations

import pytest

from launcher.errors import SiteError
from launcher.launch import network
from launcher.launch.network import Interface, Route
from launcher.launch.slurm import client, node


@pytest.fixture
def node_is_localhost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "LOCALHOST")
    monkeypatch.setattr(client, "node_address", str.lower)


@pytest.mark.usefixtures("node_is_localhost")
def test_a_name_that_is_the_loopback_here_means_the_route_to_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Route(("10.0.0.9", 1), False, Interface("eth0", "10.0.0.1"))
    find = network.find_route
    monkeypatch.setattr(client, "controller_address", lambda: "10.0.0.9")
    monkeypatch.setattr(node, "find_route", lambda to, wanted: way if to == "10.0.0.9:1" else find(to, wanted))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    assert node.route_to_others(None) is way


@pytest.mark.usefixtures("node_is_localhost")
def test_no_way_is_said_without_a_key_that_slurm_jobs_do_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "controller_address", lambda: None)
    with pytest.raises(SiteError, match=r"through localhost: .*no other host reaches that") as caught:
        node.route_to_others(None)
    assert "rendezvous" not in str(caught.value)
    with pytest.raises(SiteError, match="through fe80::1: IPv6") as caught:
        node.route_to("fe80::1", None)
    assert "rendezvous" not in str(caught.value)
