"""Runs on a real Slurm whose nodes and links are lost: they go on elsewhere, and what comes back overwrites nothing."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.infra.jobs_on_slurm import Project, assert_as_undisturbed
from tests.infra.runs import summary
from tests.infra.slurm import Cluster, needs_slurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    needs_slurm,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # checkpoints are read in this process alone
]


@pytest.mark.nightly  # test_elastic.py takes a node's power, too; below, a node takes another one's place
def test_a_node_that_loses_power_is_replaced(by_cgroup: Cluster, project: Path, undisturbed: Path) -> None:
    there, mine = by_cgroup, Project(by_cgroup, project)
    mine.submit("cluster.nodes=2", "cluster.workers_per_node=1")
    mine.wait_for_step(15)
    lost = mine.events()[-1]["nodes"][random.randrange(2)]
    there.fail(lost, "power")
    mine.wait_for_start(2)
    assert lost not in mine.events()[-1]["nodes"]
    assert mine.state() in ("running", "requeued")
    mine.finish()
    assert_as_undisturbed(mine.run, undisturbed)
    there.heal(lost)
    there.wait(lambda: there.idle() == there.nodes, "the node to come back", 60)
    mine.nothing_is_left()


@pytest.mark.nightly
def test_a_link_that_heals_does_not_end_what_goes_on_elsewhere(
    by_cgroup: Cluster, project: Path, undisturbed: Path
) -> None:
    """The first node fails, where Slurm's own srun of the lost start still runs: its end once ended the new start."""
    mine = Project(by_cgroup, project)
    mine.submit("cluster.nodes=2", "cluster.workers_per_node=1")
    mine.wait_for_step(15)
    lost = mine.events()[-1]["nodes"][0]
    by_cgroup.fail(lost, "link")
    mine.wait_for_start(2)
    by_cgroup.heal(lost)
    mine.finish()
    assert_as_undisturbed(mine.run, undisturbed)
    by_cgroup.wait(lambda: by_cgroup.idle() == by_cgroup.nodes, "the node to come back", 60)
    mine.nothing_is_left()


def test_a_node_that_slurm_has_given_up_overwrites_nothing(
    by_cgroup: Cluster, project: Path, undisturbed: Path
) -> None:
    """The whole job is on a node whose slurmd dies: it trains on, while Slurm begins it again elsewhere."""
    there, mine = by_cgroup, Project(by_cgroup, project)
    mine.submit("cluster.workers_per_node=2")
    mine.wait_for_step(5)
    (node,) = mine.events()[-1]["nodes"]
    there.fail(node, "slurmd")
    # asleep until the run is under way elsewhere, so that both write at once; but for srun, which learns that the node
    # is gone while the old step is the only one: asleep too, it would cancel it when the new one has its number
    asleep = [pid for pid in there.pids(node) if Path(f"/proc/{pid}/comm").read_text().strip() != "srun"]
    for pid in asleep:
        subprocess.run(["kill", "-STOP", str(pid)], check=False)
    mine.wait_for_start(2)
    mine.wait_for_step(20)
    for pid in asleep:
        subprocess.run(["kill", "-CONT", str(pid)], check=False)
    mine.finish()
    assert_as_undisturbed(mine.run, undisturbed)
    assert summary(mine.run)["verdict"] == "done"
    there.heal(node)
    there.wait(lambda: there.idle() == there.nodes, "the node to come back", 60)
    mine.nothing_is_left()


def kill(there: Cluster, node: str, words: str) -> None:
    """Kill the processes of the node's jobs whose command line has these words; srun's has those of its tasks, too."""
    pids: list[int] = []
    for pid in there.pids(node):
        argv = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if words in " ".join(argv) and Path(argv[0]).name != "srun":
            pids.append(pid)
    assert pids
    for pid in pids:
        with suppress(ProcessLookupError):  # it may end with one that was killed before it
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_task_is_named(by_cgroup: Cluster, project: Path, number: int) -> None:
    """The first node runs srun, too, whose lines in the job's output are the only record."""
    mine = Project(by_cgroup, project)
    # no save can be in progress, whose partial files only another attempt deletes
    mine.submit("cluster.nodes=2", "cluster.workers_per_node=1", "checkpoint.every=1000")
    mine.wait_for_step(5)
    node = mine.events()[-1]["nodes"][number]
    kill(by_cgroup, node, "launcher.launch.slurm.node")
    by_cgroup.wait(lambda: by_cgroup.jobs() == [], "the job's end", 60)
    assert f"Slurm's task {number} on {node}, which ran the launcher's agent, was killed: SIGKILL" in (
        mine.launch("status", "own").stdout
    )
    assert summary(mine.run)["failure"]["node"] == number
    mine.nothing_is_left()


def test_a_killed_slurmstepd_costs_no_step(by_cgroup: Cluster, project: Path, undisturbed: Path) -> None:
    mine = Project(by_cgroup, project)
    job = mine.submit("cluster.nodes=2", "cluster.workers_per_node=1")
    mine.wait_for_step(5)
    node = mine.events()[-1]["nodes"][random.randrange(2)]
    kill(by_cgroup, node, f"slurmstepd: [{job}.0]")
    mine.wait_for_start(2)
    (requeued,) = (event for event in mine.events() if event["event"] == "requeued")
    assert f"slurmstepd, the Slurm process on {node}" in requeued["why"]
    mine.finish()
    assert_as_undisturbed(mine.run, undisturbed)
    mine.nothing_is_left()
