"""How hosts meet, over loopback sockets and threads: no network, no workers."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from launcher.cluster import hosts, network
from launcher.cluster.agree import differences, facts
from launcher.cluster.channel import Channel, Door
from launcher.cluster.network import Interface, Route, find_route, socket_names
from launcher.cluster.peers import FirstHost, OtherHost
from launcher.errors import ConfigError, SiteError, UserError
from launcher.placement import endpoint
from launcher.plan import RunPlan
from tests.conftest import Launch
from tests.helpers import make_plan

TWO = ("cluster=hosts", "cluster.nodes=2", "cluster.rendezvous=10.0.0.1:29400", "checkpoint.enabled=false")
LO = Interface("lo", "127.0.0.1")


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a real `launch` the end of the process closes what a test leaves open."""
    opened: list[Channel | Door] = []
    for kind in (Channel, Door):

        def remember(self: Any, place: Any, make: Any = kind.__init__) -> None:
            make(self, place)
            opened.append(self)

        monkeypatch.setattr(kind, "__init__", remember)
    yield
    for one in opened:
        one.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Member(threading.Thread):
    """One `launch` on its way to the meeting; ``result``: what it came back with."""

    def __init__(self, plan: RunPlan, port: int, *, first: bool, known: dict[str, Any] | None = None) -> None:
        super().__init__(daemon=True)
        self._plan, self._first, self._known = plan, first, known
        self._route = Route(("127.0.0.1", port), first, LO)
        self.said: list[str] = []
        self.result: Any = None
        self.start()

    def run(self) -> None:
        meet = hosts.lead if self._first else hosts.join
        try:
            known = self._known or facts(self._plan, None)
            self.result = meet(self._plan, "yaml", self._route, known, self.said.append)
        except UserError as error:
            self.result = error

    def wait(self) -> Any:
        self.join(30)
        assert not self.is_alive(), "the meeting never ended"
        return self.result


def plan_in(place: Path, *overrides: str) -> RunPlan:
    return make_plan(*TWO, *overrides, run_dir=str(place / "run"))


def wait_until(condition: Any) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.rendezvous=a:1"], "cluster.rendezvous=a:1: has no effect with cluster=local"),
        (["cluster.interface=eth0"], "cluster.interface=eth0: has no effect with cluster=local"),
        (["cluster=hosts", "cluster.rendezvous=a:1"], "cluster.nodes=1: cluster=hosts is a job over several machines"),
        (["cluster=hosts", "cluster.nodes=2"], "cluster.rendezvous: cluster=hosts needs it"),
        ([*TWO, "strategy=single"], "one rank trains alone, and 2 were asked for"),
    ],
)
def test_impossible_values(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(*overrides)
    assert message in str(caught.value)


def test_the_world_is_that_of_all_hosts() -> None:
    plan = make_plan(*TWO, "cluster.nodes=3", "cluster.workers_per_node=4", "batch.global_size=96")
    assert plan.batch.world_size == 12
    assert RunPlan.from_json(plan.to_json()) == plan


def test_two_hosts_meet(tmp_path: Path) -> None:
    port = free_port()
    other = Member(plan_in(tmp_path / "b"), port, first=False)
    wait_until(lambda: other.said)
    assert other.said == [f"waiting for 127.0.0.1:{port}"], "said once"
    first = Member(plan_in(tmp_path / "a"), port, first=True)
    plan, peers = first.wait()
    there, line = other.wait()
    assert (plan.node, there.node) == (0, 1)
    assert (there.run.id, there.run.name, there.run.created) == (plan.run.id, plan.run.name, plan.run.created)
    assert plan.cluster.place.store == there.cluster.place.store
    assert not there.cluster.place.shared
    assert RunPlan.load(there.paths.plan_of(1)) == RunPlan.load(there.paths.plan) == there
    settle(peers, line)


def test_two_hosts_on_one_disk(tmp_path: Path) -> None:
    port = free_port()
    members = [Member(plan_in(tmp_path), port, first=first) for first in (True, False)]
    (plan, peers), (there, line) = (member.wait() for member in members)
    assert there.cluster.place.shared
    assert RunPlan.load(plan.paths.plan) == plan
    assert RunPlan.load(plan.paths.plan_of(1)) == there
    settle(peers, line)


def settle(peers: FirstHost, line: OtherHost) -> None:
    """Both end well."""
    line.ended(0, {"verdict": "done"})
    peers.ended(0, {"verdict": "done", "steps": 3})
    wait_until(lambda: peers.listen(0.01) or peers.complete())
    assert peers.conclude() == (0, {"verdict": "done", "steps": 3})
    wait_until(lambda: line.listen(0.01) or line.complete())
    assert line.conclude() == (0, {"verdict": "done", "steps": 3})


@pytest.mark.parametrize("first_to_come", [True, False])
def test_hosts_with_different_jobs_all_get_the_same_message(tmp_path: Path, first_to_come: bool) -> None:
    port = free_port()
    members = [
        Member(plan_in(tmp_path / str(first), "batch.global_size=16" if first else "train.seed=7"), port, first=first)
        for first in (first_to_come, not first_to_come)
    ]
    texts = {str(member.wait()) for member in members}
    assert len(texts) == 1
    (text,) = texts
    assert "batch.global_size: 16 on 127.0.0.1, 64 on 127.0.0.1" in text
    assert "train.seed: 0 on 127.0.0.1, 7 on 127.0.0.1" in text
    assert "wire_bytes" not in text, "what only follows from the rest is not listed"
    assert not list(tmp_path.rglob("*"))


def test_versions_and_names_count_but_directories_do_not() -> None:
    plan = make_plan(*TWO)
    elsewhere = dataclasses.replace(
        plan,
        run=dataclasses.replace(plan.run, id="other", dir="/somewhere"),
        cluster=dataclasses.replace(plan.cluster, cwd="/else", interface="ib0", rendezvous="node-a:29400"),
    )
    here = facts(plan, None)
    assert differences(here, facts(elsewhere, None), "a", "b") == ""
    assert "run.name: null on a, mine on b" in differences(here, facts(plan, "mine"), "a", "b")
    assert "version of torch" in differences(here, here | {"version of torch": "1.0"}, "a", "b")
    assert "task.width: nothing on a, 3 on b" in differences(here, here | {"task.width": 3}, "a", "b")
    assert "no description" in differences(here, ["x"], "a", "b")


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n", b"\0\xff\n", b"[1]\n", b'{"launch": "9"}\n', b"[" * 9999])
def test_strangers_do_not_break_the_meeting(tmp_path: Path, noise: bytes) -> None:
    port = free_port()
    first = Member(plan_in(tmp_path / "a"), port, first=True)
    wait_until(lambda: first.said)
    with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(noise)
        other = Member(plan_in(tmp_path / "b"), port, first=False)
        (_, peers), (_, line) = first.wait(), other.wait()
        settle(peers, line)


def test_a_third_host_is_told_that_all_places_are_taken(tmp_path: Path) -> None:
    port = free_port()
    members = [Member(plan_in(tmp_path / str(first)), port, first=first) for first in (True, False)]
    (_, peers), (_, line) = (member.wait() for member in members)
    late = Member(plan_in(tmp_path / "late"), port, first=False)
    wait_until(lambda: peers.listen(0.01) or not late.is_alive())
    assert "has all its 2 hosts" in str(late.wait())
    settle(peers, line)


def test_one_that_leaves_frees_its_place(tmp_path: Path) -> None:
    port = free_port()
    first = Member(plan_in(tmp_path / "a", "cluster.nodes=3", "batch.global_size=96"), port, first=True)
    wait_until(lambda: first.said)
    known = json.dumps({"launch": "launcher 1", "facts": facts(first._plan, None)}).encode() + b"\n"
    with socket.create_connection(("127.0.0.1", port)) as guest:
        guest.sendall(known)
        wait_until(lambda: any("is here: 2 of 3" in line for line in first.said))
    wait_until(lambda: "127.0.0.1 has left again." in first.said)
    others = [
        Member(plan_in(tmp_path / name, "cluster.nodes=3", "batch.global_size=96"), port, first=False) for name in "bc"
    ]
    first.wait()
    assert sorted(member.wait()[0].node for member in others) == [1, 2]


def test_a_directory_that_exists_on_one_host_stops_all(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "b/run").mkdir(parents=True)
    members = [Member(plan_in(tmp_path / name), port, first=name == "a") for name in "ab"]
    texts = [str(member.wait()) for member in members]
    assert "on node 1 (127.0.0.1): run.name=run" in texts[0]
    assert "exists, and a run never writes" in texts[1]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_something_else_at_the_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        member = Member(plan_in(tmp_path), listener.getsockname()[1], first=False)
        connection, _ = listener.accept()
        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        connection.close()
        assert "is no `launch` of this version" in str(member.wait())
        taken = Member(plan_in(tmp_path), listener.getsockname()[1], first=True)
        assert "cannot listen there: Address already in use" in str(taken.wait())


def test_nobody_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "MEET_WITHIN_S", 0)
    port = free_port()
    assert "nobody has answered there" in str(Member(plan_in(tmp_path), port, first=False).wait())
    assert "1 of 2 hosts came" in str(Member(plan_in(tmp_path), port, first=True).wait())


def star() -> tuple[FirstHost, list[OtherHost], list[Channel]]:
    """Node 0, and two others, after their meeting."""
    door = Door(("127.0.0.1", 0))
    ends = [Channel(socket.create_connection(("127.0.0.1", door.port))) for _ in range(2)]
    guests: list[Channel] = []
    for end in ends:
        end.send(launch="launcher 1")
    wait_until(lambda: guests.extend(channel for channel, _ in door.arrivals()) or len(guests) == 2)
    for end in ends:
        assert end.next(10) == {"launch": "launcher 1"}
    by_port = {end._socket.getsockname()[1]: end for end in ends}
    ends = [by_port[guest._socket.getpeername()[1]] for guest in guests]
    return FirstHost(door, guests, "a", "full"), [OtherHost(end) for end in ends], ends


def failed(rank: int, at: str | None = None) -> dict[str, Any]:
    return {"verdict": "failed", "failure": {"rank": rank, "error": "boom", "at": at}}


def test_the_first_failure_is_everyones_verdict() -> None:
    first, (one, two), _ = star()
    one.ended(1, failed(1, "2024-01-01T00:00:05+00:00"))
    first.ended(1, failed(0, "2024-01-01T00:00:07+00:00"))
    two.ended(1, failed(2, "2024-01-01T00:00:06+00:00"))
    wait_until(lambda: first.listen(0.01) or first.complete())
    status, summary = first.conclude()
    assert status == 1
    assert (summary["failure"]["rank"], summary["failure"]["node"]) == (1, 1)
    for other in (one, two):
        wait_until(lambda other=other: other.listen(0.01) or other.complete())
        assert other.trouble is not None
        assert other.conclude() == (1, summary)


def test_a_stop_reaches_every_host_and_is_no_failure() -> None:
    first, (one, two), _ = star()
    one.stop()
    wait_until(lambda: first.listen(0.01) or first.stopped_by)
    assert first.stopped_by == "node 1 (127.0.0.1)"
    wait_until(lambda: two.listen(0.01) or two.stopped_by)
    for peers in (one, first, two):
        peers.ended(130, {"verdict": "stopped"})
    wait_until(lambda: first.listen(0.01) or first.complete())
    assert first.conclude() == (130, {"verdict": "stopped"})
    wait_until(lambda: two.listen(0.01) or two.complete())
    assert two.conclude() == (130, {"verdict": "stopped"})


def test_a_host_that_is_gone_comes_before_those_who_lost_it() -> None:
    first, (_, two), ends = star()
    first.ended(1, failed(0))
    ends[0].close()
    wait_until(lambda: first.listen(0.01) or first.lost)
    wait_until(lambda: two.listen(0.01) or two.lost)
    two.ended(1, failed(2))
    wait_until(lambda: first.listen(0.01) or first.complete())
    status, summary = first.conclude()
    assert status == 1
    assert summary["failure"]["error"].startswith("node 1 (127.0.0.1) is gone")


def test_a_host_that_is_killed_later_is_not_the_first_to_fail() -> None:
    first, (_, two), ends = star()
    ago = [(datetime.now(UTC) - timedelta(seconds=seconds)).isoformat() for seconds in (20, 19)]
    first.ended(1, failed(0, ago[0]))
    ends[0].close()
    wait_until(lambda: first.listen(0.01) or first.lost)
    two.ended(1, failed(2, ago[1]))
    wait_until(lambda: first.listen(0.01) or first.complete())
    assert first.conclude()[1]["failure"]["node"] == 0


def test_without_node_0_a_host_ends_by_itself() -> None:
    first, (one, two), _ = star()
    for guest in first._guests.values():
        guest.close()
    first._door.close()
    wait_until(lambda: one.listen(0.01) or one.complete())
    assert one.lost
    assert one.conclude()[1]["failure"]["node"] == 0
    two.stop()
    wait_until(lambda: two.listen(0.01) or two.complete())
    assert two.conclude() == (130, {"verdict": "killed"})


def test_a_plan_contacts_nobody(launch: Launch) -> None:
    overrides = ("cluster=hosts", "cluster.nodes=2", "cluster.rendezvous=nowhere.invalid:29400")
    done = launch("plan", *overrides)
    assert done.returncode == 0, done.stderr
    assert "2 hosts × 2 workers" in done.stdout


def present(monkeypatch: pytest.MonkeyPatch, *found: Interface) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: [LO, *found])


def test_the_owner_of_the_address_is_the_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    eth0, ib0 = Interface("eth0", "192.0.2.1"), Interface("ib0", "198.51.100.1")
    present(monkeypatch, eth0, ib0)
    assert find_route("192.0.2.1:5", None) == Route(("192.0.2.1", 5), True, eth0)
    assert find_route("192.0.2.1:5", "ib0") == Route(("192.0.2.1", 5), True, ib0)
    monkeypatch.delenv(network.GLOO, raising=False)
    monkeypatch.setenv(network.NCCL, "=ib0")
    assert socket_names(Route(("192.0.2.1", 5), True, ib0), "ib0") == {network.GLOO: "ib0", network.NCCL: "=ib0"}
    with pytest.raises(SiteError, match="the environment says NCCL_SOCKET_IFNAME==ib0"):
        socket_names(Route(("192.0.2.1", 5), True, eth0), "eth0")


@pytest.mark.parametrize(
    ("rendezvous", "interface", "words"),
    [
        ("localhost:5", None, ["localhost is 127.0.0.1 here; no other host reaches that", "192.0.2.1 (eth0)"]),
        ("127.0.1.1:5", None, ["no other host reaches that"]),
        ("192.0.2.1:5", "lo", ["lo: has no IPv4 address that others reach"]),
        ("192.0.2.1:5", "eth9", ["eth9: is no interface of this host", "This host has: 192.0.2.1 (eth0)"]),
    ],
)
def test_routes_that_lead_nowhere(
    monkeypatch: pytest.MonkeyPatch, rendezvous: str, interface: str | None, words: list[str]
) -> None:
    present(monkeypatch, Interface("eth0", "192.0.2.1"))
    with pytest.raises(SiteError) as caught:
        find_route(rendezvous, interface)
    for word in words:
        assert word in str(caught.value)
