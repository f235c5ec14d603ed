"""One job over several hosts: its numbers, its bytes, its way through the network, and how it ends."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.helpers import launch_command
from tests.infra.hosts import Hosts, hosts
from tests.infra.jobs_on_hosts import SMALL, finish, start
from tests.infra.netns import needs_root
from tests.infra.runs import processes_of, records, summary, wait_for, wait_for_steps, worker_of

pytestmark = [pytest.mark.slow, pytest.mark.root, needs_root]


def test_one_job_over_two_hosts_is_the_job_on_one(pair: Hosts, tmp_path: Path, launch: Launch) -> None:
    job = ("train.steps=4", "cluster.workers_per_node=2")
    first, other = finish(start(pair, tmp_path, *job), 0, 0)
    assert "2 hosts × 2 workers" in first
    assert "step 4/4" in first
    assert other.splitlines()[-1] == "Run job: done"
    assert "step" not in other, "the live view is on the first host"
    one, two = tmp_path / "host0/runs/job", tmp_path / "host1/runs/job"
    assert {path.name for path in (one / "logs").iterdir()} == {"node0.log", "rank0.log", "rank1.log"}
    assert {path.name for path in (two / "logs").iterdir()} == {"node1.log", "rank2.log", "rank3.log"}
    assert summary(one) == summary(two)
    assert not (two / "metrics.jsonl").exists()
    here, there = (json.loads((run / "plan.json").read_text()) for run in (one, two))
    assert here["run"]["id"] == there["run"]["id"]
    for plan in (here, there):
        assert plan["env"]["default"]["GLOO_SOCKET_IFNAME"] == "eth0", "eth1 leads nowhere"
        assert plan["env"]["default"]["NCCL_SOCKET_IFNAME"] == "=eth0"

    done = launch("train", *SMALL, "train.steps=4", "cluster.workers_per_node=4")
    assert done.returncode == 0, done.stderr
    for ours, local in zip(records(one), records(tmp_path / "runs/job"), strict=True):
        assert ours["train/loss"] == pytest.approx(local["train/loss"], rel=1e-5)
        assert ours["comm/wire_bytes"] == local["comm/wire_bytes"]


def test_hosts_that_share_a_disk_keep_to_their_own_files(pair: Hosts, tmp_path: Path) -> None:
    job = ("train.steps=3", "checkpoint.enabled=true")
    finish(start(pair, tmp_path, *job, shared=True), 0, 0)
    run = tmp_path / "all/runs/job"
    assert {path.name for path in (run / "logs").iterdir()} == {"node0.log", "node1.log", "rank0.log", "rank1.log"}
    assert summary(run)["verdict"] == "done"
    assert [record["step"] for record in records(run)] == [1, 2, 3]
    assert (run / "checkpoints/step_000003/.metadata").exists()
    out = finish(start(pair, tmp_path, *job, shared=True), 2, 2)
    assert "exists, and a run never writes into another one's directory" in out[0]
    assert "`launch resume job` continues that run" in out[0]
    assert "exists" in out[1]
    assert summary(run)["verdict"] == "done", "nothing of the first run was touched"


def test_an_interface_that_the_other_host_does_not_reach(pair: Hosts, tmp_path: Path) -> None:
    """It exists, and has an address: only the other host can tell."""
    for wrong in (0, 1):
        each = tuple(("cluster.interface=eth1",) if host == wrong else () for host in range(2))
        for text in finish(start(pair, tmp_path, "train.steps=2", each=each), 2, 2):
            assert text.count("launch: error: ") == 1
            assert f"does not reach 10.99.0.1, the address of node {wrong}" in text
        assert not list(tmp_path.glob("*/runs/*")), "nothing is left behind"


def test_a_way_that_leads_nowhere(pair: Hosts, tmp_path: Path) -> None:
    job = (*SMALL, "cluster=hosts", "cluster.nodes=2", "cluster.rendezvous=192.0.2.77:29400")
    (text,) = finish([pair.start(0, launch_command("train", *job), tmp_path)], 2)
    assert text.count("launch: error: ") == 1
    assert "no route to 192.0.2.77: Network is unreachable" in text
    assert "10.213.7.11 (eth0)" in text
    assert not list(tmp_path.iterdir())


def test_a_killed_worker_ends_the_job_everywhere(pair: Hosts, tmp_path: Path) -> None:
    processes = start(pair, tmp_path, "train.steps=100000", "cluster.grace_s=5")
    one, two = tmp_path / "host0/runs/job", tmp_path / "host1/runs/job"
    wait_for_steps(one, 2)
    worker_of(one, 1).kill()
    first, other = finish(processes, 1, 1)
    assert f"launch: the job failed on node 1 ({pair.address(1)}): rank 1: killed by SIGKILL" in first
    assert "launch: rank 1 failed: killed by SIGKILL" in other
    assert summary(one)["failure"]["rank"] == summary(two)["failure"]["rank"] == 1
    wait_for(lambda: not processes_of(tmp_path), "every process of the run to end", 60)


def test_ctrl_c_on_one_host_stops_all_after_the_window(pair: Hosts, tmp_path: Path) -> None:
    processes = start(pair, tmp_path, "train.steps=100000")
    one, two = tmp_path / "host0/runs/job", tmp_path / "host1/runs/job"
    wait_for_steps(one, 2)
    processes[1].send_signal(signal.SIGINT)
    first, other = finish(processes, 130, 130)
    assert f"Stopped on node 1 ({pair.address(1)})" in first
    assert "Stopping at the end of this window" in other
    assert summary(one) == summary(two)
    assert summary(one)["verdict"] == "stopped"
    assert summary(one)["steps"] == len(records(one))


def test_a_dead_link_ends_the_job_on_both_sides(pair: Hosts, tmp_path: Path) -> None:
    """Nobody closes a connection: the workers would wait for half an hour."""
    processes = start(pair, tmp_path, "train.steps=100000", "cluster.grace_s=1")
    runs = tmp_path / "host0/runs/job", tmp_path / "host1/runs/job"
    wait_for_steps(runs[0], 2)
    pair.link_down(1)
    outputs = finish(processes, 1, 1)
    pair.link_up(1)
    for host in (0, 1):
        peer = 1 - host
        assert f"launch: the job failed: node {peer} ({pair.address(peer)}) is gone: no answer for" in outputs[host]
        assert summary(runs[host])["failure"]["node"] == peer
    wait_for(lambda: not processes_of(tmp_path), "every process of the run to end", 60)


RANGE = (
    "cluster.nodes=2:3", "checkpoint.enabled=true", "checkpoint.every=2", "train.steps=40", "batch.global_size=22",
    "task.width=128", "cluster.grace_s=2",
)  # fmt: skip


def test_a_job_goes_on_with_the_hosts_that_are_left(tmp_path: Path, launch: Launch) -> None:
    """Node 1 of three is powered off: node 2 becomes node 1, and what is learned is what it would have been."""
    run = tmp_path / "all/runs/job"
    with hosts(3) as three:
        processes = start(three, tmp_path, *RANGE, shared=True)
        wait_for_steps(run, 4, 180)
        assert json.loads((run / "incarnation.json").read_text())["ranks"] == 3
        lost_address = json.loads((run / "plan.node1.json").read_text())["cluster"]["place"]["address"]
        lost = [three.address(host) for host in range(3)].index(lost_address)  # numbers go by who comes first
        for pid in three.pids(lost):
            os.kill(pid, signal.SIGKILL)
        outputs = finish(processes, *(-signal.SIGKILL if host == lost else 0 for host in range(3)))
        wait_for(lambda: not [pid for host in range(3) for pid in three.pids(host)], "every process to end")
    event, resumed = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    step = resumed["from_step"]
    assert [event[key] for key in ("event", "host", "ranks", "attempt")] == ["lost", f"node 1 ({lost_address})", 2, 1]
    line = f"Node 1 ({lost_address}) is gone: continuing with 2 hosts, 2 ranks, from the newest checkpoint."
    assert f"{line} This is node 0 now." in outputs[0]
    assert f"{line} This is node 1 now." in outputs[3 - lost]
    assert outputs[3 - lost].splitlines()[-1] == "Run job: done"
    done = launch("train", *SMALL, *RANGE, "cluster.nodes=1", "cluster.workers_per_node=1")
    assert done.returncode == 0, done.stderr
    assert [record["batch/world_size"] for record in records(run)] == [3] * step + [2] * (40 - step)
    for ours, theirs in zip(records(run), records(tmp_path / "runs/job"), strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-4)
    assert summary(run)["verdict"] == "done"
    assert (json.loads((run / "incarnation.json").read_text())["incarnation"], step % 2) == ("0.1", 0)


SCRIPT = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
print("rank", rank, "attempt", attempt, os.environ["MASTER_ADDR"], flush=True)
dist.barrier()
if (rank, attempt) == (3, "0"):
    os._exit(3)
if (rank, attempt) == (2, "1"):
    raise ValueError("rank 2 is the one")
dist.barrier()
"""


def test_a_script_is_started_again_on_all_hosts_and_the_one_who_raised_is_named(pair: Hosts, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    where = f"cluster.rendezvous={pair.address(0)}:29400"
    job = ("cluster=hosts", "cluster.nodes=2", "cluster.workers_per_node=2", where, "cluster.max_restarts=1")
    command = launch_command("run", *job, "run.name=job", "--", "script.py")
    first, other = finish([pair.start(host, command, tmp_path) for host in (0, 1)], 1, 1)
    run = tmp_path / "runs/job"
    address = pair.address(0)
    (event,) = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert (event["event"], event["attempt"], "another node" in event["why"]) == ("restarted", 1, True)
    for rank in range(4):
        for attempt, name in enumerate((f"rank{rank}.log", f"rank{rank}.attempt1.log")):
            assert f"rank {rank} attempt {attempt} {address}" in (run / "logs" / name).read_text()
    assert "launch: rank 2 failed: ValueError: rank 2 is the one" in other
    assert "Traceback" in other
    assert f"launch: the job failed on node 1 ({pair.address(1)}): rank 2: ValueError: rank 2 is the one" in first
    assert "Traceback" not in first
    assert summary(run)["failure"]["rank"] == 2
