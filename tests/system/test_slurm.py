"""Runs on a real Slurm: what is learned does not depend on what happens to the job, and nothing is left of it."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import launch, launch_command
from tests.system.runs import OWN, records, summary
from tests.system.slurm import Cluster, cluster, needs_slurm
from tests.system.test_restart import tensors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    needs_slurm,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # checkpoints are read in this process alone
]

STEPS = 100
# ten steps a second, so that there is time to disturb it
JOB = (
    *OWN, "batch.global_size=12", "batch.micro_size=3", f"train.steps={STEPS}", "checkpoint.every=10",
    "run.calibrate=2", "precision=bf16",
)  # fmt: skip


@pytest.fixture(scope="module")
def by_cgroup() -> Iterator[Cluster]:
    with cluster(3, proctrack="cgroup", accounting="shim") as there:
        yield there


@pytest.fixture(scope="module")
def by_process_tree() -> Iterator[Cluster]:
    with cluster(3, proctrack="linuxproc") as there:
        yield there


@pytest.fixture(params=["by_cgroup", "by_process_tree"])
def either(request: pytest.FixtureRequest) -> Cluster:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same job on this machine, with nothing in its way."""
    place = tmp_path_factory.mktemp("undisturbed")
    subprocess.run(["cp", "-r", str(Path(__file__).parent.parent / "user_project" / "speech"), str(place)], check=True)
    done = launch("train", *JOB, cwd=place)
    assert done.returncode == 0, done.stderr
    return place / "runs" / "own"


@dataclass
class Project:
    """A user's directory on the login host of a cluster."""

    there: Cluster
    place: Path

    def launch(self, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = self.there.login(*launch_command(*arguments), cwd=self.place, check=False, timeout=120)
        assert done.returncode == status, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def submit(self, *arguments: str) -> str:
        """Submit the job; its id."""
        said = self.launch("train", "cluster=slurm", *JOB, "task.trouble=slow", *arguments).stdout
        return said.partition("as Slurm job ")[2].partition(":")[0]

    @property
    def run(self) -> Path:
        return self.place / "runs" / "own"

    def state(self) -> str:
        return json.loads(self.launch("status", "own", "--json").stdout)["state"]

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "events.jsonl").read_text().splitlines()]

    def wait_for_step(self, step: int) -> None:
        def reached() -> bool:
            assert not self.count("failed"), self.launch("status", "own").stdout
            return (self.run / "metrics.jsonl").exists() and any(r["step"] >= step for r in records(self.run))

        self.there.wait(reached, f"step {step}", 90)

    def wait_for_start(self, number: int) -> None:
        self.there.wait(lambda: self.count("started") >= number, f"start {number}", 90)

    def count(self, event: str) -> int:
        return sum(known["event"] == event for known in self.events())

    def finish(self) -> None:
        self.there.wait(lambda: self.count("done") or self.count("failed"), "the end", 120)
        assert self.state() == "done", self.launch("status", "own").stdout

    def nothing_is_left(self) -> None:
        self.there.wait(lambda: self.there.jobs() == [], "the queue to empty")
        for node in self.there.nodes:
            self.there.wait(lambda node=node: self.there.pids(node) == [], f"the processes on {node} to end", 100)
        assert [path.name for path in (self.run / "checkpoints").glob(".*")] == []


def assert_as_undisturbed(run: Path, undisturbed: Path) -> None:
    """Every step once, and bit by bit the same parameters and optimizer."""
    mine, wanted = records(run), records(undisturbed)
    assert [record["step"] for record in mine] == list(range(1, STEPS + 1))
    assert [record["train/loss"] for record in mine] == [record["train/loss"] for record in wanted]
    last = f"step_{STEPS:06d}"
    mine, wanted = tensors(run / "checkpoints" / last), tensors(undisturbed / "checkpoints" / last)
    assert mine.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(mine[name], value), name
    assert summary(run)["eval/loss"] == summary(undisturbed)["eval/loss"]


def test_a_job_that_is_told_to_stop_preempted_and_requeued_is_the_undisturbed_run(
    by_cgroup: Cluster, project: Path, undisturbed: Path
) -> None:
    mine = Project(by_cgroup, project)
    job = mine.submit("cluster.nodes=2", "cluster.workers_per_node=1")
    # what waits is frozen: neither this nor a deleted module changes it
    (project / "speech" / "tasks.py").write_text("raise SystemError('edited after submission')\n")
    mine.wait_for_step(3)
    time.sleep(random.random())
    by_cgroup.login("scancel", "--signal=USR2", job)
    by_cgroup.wait(lambda: mine.count("requeued") == 1, "the first requeue")
    assert mine.state() in ("requeued", "running")
    mine.wait_for_start(2)
    stopped, begun = ([e for e in mine.events() if e["event"] == event][-1] for event in ("stopped", "started"))
    assert begun["from_step"] == stopped["step"] >= 3, "not a step is lost"
    time.sleep(3 * random.random())  # perhaps before the workers are up
    urgent = by_cgroup.login(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    ).stdout.strip()
    by_cgroup.wait(lambda: mine.count("requeued") == 2, "the preemption", 60)
    assert [event["why"] for event in mine.events() if event["event"] == "requeued"] == ["told to", "preempted"]
    by_cgroup.wait(lambda: urgent not in by_cgroup.jobs(), "the urgent job")
    mine.wait_for_start(3)
    mine.wait_for_step(30)
    by_cgroup.login("scontrol", "requeue", job)  # nobody is told
    mine.finish()
    assert mine.count("started") == 4
    assert_as_undisturbed(mine.run, undisturbed)
    mine.nothing_is_left()


def test_a_node_that_loses_power_is_replaced(by_process_tree: Cluster, project: Path, undisturbed: Path) -> None:
    there, mine = by_process_tree, Project(by_process_tree, project)
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


def test_a_link_that_heals_does_not_end_what_goes_on_elsewhere(
    by_cgroup: Cluster, project: Path, undisturbed: Path
) -> None:
    """Of the first node, where Slurm's own srun of the lost start still is: its end was once that of the new start."""
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
    by_process_tree: Cluster, project: Path, undisturbed: Path
) -> None:
    """The whole job is on a node whose slurmd dies: it trains on, while Slurm begins it again elsewhere."""
    there, mine = by_process_tree, Project(by_process_tree, project)
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


def test_cancelling_leaves_nothing_and_resuming_loses_nothing(
    either: Cluster, project: Path, undisturbed: Path
) -> None:
    mine = Project(either, project)
    mine.submit("cluster.nodes=2", "cluster.workers_per_node=1", "wandb.mode=offline")
    mine.wait_for_step(12)
    mine.launch("cancel", "own")
    assert mine.state() == "cancelled"
    mine.nothing_is_left()
    assert (mine.run / "checkpoints" / f"step_{records(mine.run)[-1]['step']:06d}").is_dir()
    assert "there is nothing to cancel" in mine.launch("cancel", "own", status=2).stderr
    shown = mine.launch("resume", "own", "--wait").stdout
    assert "Run own: done" in shown
    assert_as_undisturbed(mine.run, undisturbed)
    assert "problem" not in {k for k, v in json.loads((mine.run / "wandb.json").read_text()).items() if v}
    mine.nothing_is_left()


def test_the_ledger_tells_the_truth_of_a_failure(either: Cluster, project: Path) -> None:
    mine = Project(either, project)
    done = mine.launch(
        "train", "cluster=slurm", "cluster.nodes=2", "cluster.workers_per_node=1", *JOB, "task.trouble=raise", "--wait",
        status=1,
    )  # fmt: skip
    assert "ValueError: the eleventh utterance is cursed" in done.stderr
    shown = mine.launch("status", "own").stdout
    assert "rank 1: ValueError" in shown
    assert "misbehave" in shown, "the failing rank's own traceback"
    (run,) = json.loads(mine.launch("runs", "--json").stdout)
    assert (run["state"], run["failure"]["rank"], run["failure"]["node"]) == ("failed", 1, 1)
    assert "cursed" in mine.launch("logs", "ow", "--rank", "1").stdout
    mine.nothing_is_left()
    again = mine.launch("retry", "own").stdout
    assert "Submitted own.retry1 as Slurm job" in again
    mine.launch("cancel", "own.retry1")
    assert "Run own: failed" in mine.launch("status", "own").stdout  # a whole name is no prefix


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.partition=nope", "cluster.partition=nope: Slurm has no such partition.\n  There are: train"),
        ("cluster.nodes=9", "cluster.nodes=9: partition train gives a job 3 at most"),
        ("cluster.sbatch.gres=gpu:1", "gres=gpu:1"),
        ("cluster.mem=900G", "cluster.mem=900G: Slurm refuses it: Memory specification can not be satisfied"),
        ("cluster.constraint=fast", "cluster.constraint=fast: Slurm refuses it:"),
        ("cluster.time=00:01:00", "too short for one checkpoint"),
        ("run.dir=/dev/shm/runs", "lies in this machine's memory"),
    ],
)
def test_what_slurm_refuses_is_one_message_and_leaves_nothing(
    by_cgroup: Cluster, project: Path, override: str, words: str
) -> None:
    mine = Project(by_cgroup, project)
    refused = mine.launch("train", "cluster=slurm", *JOB, override, status=2)
    assert words in refused.stderr
    assert refused.stderr.count("error:") == 1
    assert "Traceback" not in refused.stderr
    assert not mine.run.exists()
    assert by_cgroup.jobs() == []
