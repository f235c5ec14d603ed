"""How hosts meet, over loopback sockets and threads: no network, no workers."""

from __future__ import annotations

import dataclasses
import json
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import ConfigError, UserError
from launcher.extensions.hosts import channel, multihost
from launcher.extensions.hosts.multihost import differences, job_facts
from launcher.extensions.hosts.peers import FirstHost, OtherHost
from launcher.launch import local
from launcher.launch.network import Route
from launcher.plan.run_plan import RunPlan
from tests.conftest import Launch
from tests.extensions.hosts.meeting import LO, TWO, free_port, wait_until
from tests.helpers import make_plan, patience


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
        meet = multihost.lead if self._first else multihost.join_node_0
        try:
            known = self._known or job_facts(self._plan, None)
            self.result = meet(
                self._plan, partial(local.create, config_yaml="yaml"), self._route, known, self.said.append
            )
        except UserError as error:
            self.result = error

    def wait(self) -> Any:
        self.join(patience(30))
        assert not self.is_alive(), "the meeting never ended"
        return self.result


def meet(place: Path, *overrides: str, hosts: str = "ab") -> list[Member]:
    """Have hosts with disks of their own meet, the first of which is node 0."""
    port = free_port()
    return [Member(plan_in(place / name, *overrides), port, first=name == "a") for name in hosts]


def plan_in(place: Path, *overrides: str) -> RunPlan:
    return make_plan(*TWO, *overrides, run_dir=str(place / "run"))


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
    line.ended({"verdict": "done"})
    peers.ended({"verdict": "done", "steps": 3})
    wait_until(lambda: peers.listen(0.01) or peers.complete())
    assert peers.conclude() == {"verdict": "done", "steps": 3}
    wait_until(lambda: line.listen(0.01) or line.complete())
    assert line.conclude() == {"verdict": "done", "steps": 3}


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
    here = job_facts(plan, None)
    assert differences(here, job_facts(elsewhere, None), "a", "b") == ""
    assert "run.name: null on a, mine on b" in differences(here, job_facts(plan, "mine"), "a", "b")
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


def test_many_silent_connections_do_not_keep_a_host_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MOST_UNKNOWN", 4)
    monkeypatch.setattr(channel, "UNKNOWN_FOR_S", 0.05)
    monkeypatch.setattr(channel, "_INTRODUCTION_WITHIN_S", 3600)
    port = free_port()
    first = Member(plan_in(tmp_path / "a"), port, first=True)
    wait_until(lambda: first.said)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(12)]
    other = Member(plan_in(tmp_path / "b"), port, first=False)
    (_, peers), (_, line) = first.wait(), other.wait()
    settle(peers, line)
    for connection in silent:
        connection.close()


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
    known = json.dumps({"launch": "launcher 1", "facts": job_facts(first._plan, None)}).encode() + b"\n"
    with socket.create_connection(("127.0.0.1", port)) as guest:
        guest.sendall(known)
        wait_until(lambda: any("has joined: 2 of 3" in line for line in first.said))
    wait_until(lambda: "127.0.0.1 has disconnected." in first.said)
    others = [
        Member(plan_in(tmp_path / name, "cluster.nodes=3", "batch.global_size=96"), port, first=False) for name in "bc"
    ]
    first.wait()
    assert sorted(member.wait()[0].node for member in others) == [1, 2]


def test_a_directory_that_exists_on_one_host_stops_all(tmp_path: Path) -> None:
    (tmp_path / "b/run").mkdir(parents=True)
    texts = [str(member.wait()) for member in meet(tmp_path)]
    assert "on node 1 (127.0.0.1): run.name=run" in texts[0]
    assert "exists, and a run never writes" in texts[1]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_checkpoints_need_a_shared_disk(tmp_path: Path) -> None:
    for member in meet(tmp_path, "checkpoint.enabled=true"):
        assert "would be stored on different hosts" in str(member.wait())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_something_else_at_the_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        member = Member(plan_in(tmp_path), listener.getsockname()[1], first=False)
        connection, _ = listener.accept()
        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        connection.close()
        assert "is not a `launch` of this version" in str(member.wait())
        taken = Member(plan_in(tmp_path), listener.getsockname()[1], first=True)
        assert "cannot listen there: Address already in use" in str(taken.wait())


def test_nobody_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multihost, "MEET_WITHIN_S", 0)
    port = free_port()
    assert "no answer within" in str(Member(plan_in(tmp_path), port, first=False).wait())
    assert "1 of 2 hosts connected" in str(Member(plan_in(tmp_path), port, first=True).wait())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster=hosts", "cluster.rendezvous=a:1"], "cluster.nodes=1: cluster=hosts is a job over several machines"),
        (["cluster=hosts", "cluster.nodes=2"], "cluster.rendezvous: is required with cluster=hosts"),
        ([*TWO, "strategy=single"], "trains on one rank, and this job has 2"),
    ],
)
def test_impossible_values(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(*overrides)


def test_the_world_is_that_of_all_hosts() -> None:
    plan = make_plan(*TWO, "cluster.nodes=3", "cluster.workers_per_node=4", "batch.global_size=96")
    assert plan.batch.world_size == 12
    assert RunPlan.from_json(plan.to_json()) == plan


def test_a_plan_contacts_nobody(launch: Launch) -> None:
    overrides = ("cluster=hosts", "cluster.nodes=2", "cluster.rendezvous=nowhere.invalid:29400")
    done = launch("plan", *overrides)
    assert done.returncode == 0, done.stderr
    assert "2 hosts × 2 workers" in done.stdout
