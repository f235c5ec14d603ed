"""Runs on a real Slurm: what is learned does not depend on what happens to the job, and nothing is left of it."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from launcher.record.measurements import read_run
from launcher.record.report_entry import identity_of, read_entry
from tests.helpers import launch_command, patience
from tests.infra.jobs_on_slurm import JOB, Project, assert_as_undisturbed
from tests.infra.runs import MY_SETUP, export_canary, files_with_canary, records
from tests.infra.slurm import Cluster, needs_slurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    needs_slurm,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # checkpoints are read in this process alone
]


@pytest.fixture(params=["by_cgroup", pytest.param("by_process_tree", marks=pytest.mark.nightly)])
def either(request: pytest.FixtureRequest) -> Cluster:
    return request.getfixturevalue(request.param)


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
    time.sleep(3 * random.random())  # perhaps before the workers are up
    urgent = by_cgroup.login(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    ).stdout.strip()
    by_cgroup.wait(lambda: mine.count("requeued") == 2, "the preemption", 60)
    assert [event["why"] for event in mine.events() if event["event"] == "requeued"] == ["SIGUSR2", "preempted"]
    by_cgroup.wait(lambda: urgent not in by_cgroup.jobs(), "the urgent job")
    mine.wait_for_start(3)
    mine.wait_for_step(30)
    by_cgroup.login("scontrol", "requeue", job)  # nobody is told
    mine.finish()
    assert [event["attempt"] for event in mine.events() if event["event"] == "started"] == [0, 1, 2, 3]
    stopped, resumed = (next(e for e in mine.events() if e["event"] == event) for event in ("stopped", "resumed"))
    assert resumed["from_step"] == stopped["step"] >= 3, "no step is lost"
    assert_as_undisturbed(mine.run, undisturbed)
    mine.nothing_is_left()


def test_cancelling_leaves_nothing_and_resuming_loses_nothing(
    either: Cluster, project: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Project(either, project)
    export_canary(project, monkeypatch)
    mine.submit("cluster.nodes=2", "cluster.workers_per_node=1", "wandb.mode=offline", MY_SETUP)
    mine.wait_for_step(12)
    mine.launch("cancel", "own")
    assert mine.state() == "cancelled"
    mine.nothing_is_left()
    assert (mine.run / "checkpoints" / f"step_{records(mine.run)[-1]['step']:06d}").is_dir()
    assert "there is nothing to cancel" in mine.launch("cancel", "own", status=2).stderr
    shown = mine.launch("resume", "own", "--wait").stdout
    assert "Run own: done" in shown
    assert_as_undisturbed(mine.run, undisturbed)
    assert all("canary\n" in log.read_text() for log in (mine.run / "logs").glob("rank*.log"))
    assert files_with_canary(project) == []
    assert "problem" not in {k for k, v in json.loads((mine.run / "wandb.json").read_text()).items() if v}
    mine.nothing_is_left()
    assert read_entry(mine.run, identity_of(mine.run)) == (["own", ""], read_run(mine.run))


def test_the_ledger_tells_the_truth_of_a_failure(either: Cluster, project: Path) -> None:
    mine = Project(either, project)
    done = mine.launch(
        "train", "cluster=slurm", "cluster.nodes=2", "cluster.workers_per_node=1", *JOB, "task.trouble=raise", "--wait",
        "callbacks=[{_target_: speech.hooked.Reporting}]", status=1,
    )  # fmt: skip
    assert "ValueError: the eleventh utterance is cursed" in done.stderr
    shown = mine.launch("status", "own").stdout
    assert "launch: rank 1 failed: ValueError" in shown
    assert "misbehave" in shown, "the failing rank's own traceback"
    (run,) = json.loads(mine.launch("runs", "--json").stdout)
    assert (run["state"], run["failure"]["rank"], run["failure"]["node"]) == ("failed", 1, 1)
    assert "cursed" in mine.launch("logs", "ow", "--rank", "1").stdout
    mine.nothing_is_left()
    assert "ValueError: the eleventh utterance is cursed" in (mine.run / "outcome.txt").read_text()
    again = mine.launch("retry", "own").stdout
    assert "Submitted own.retry1 as Slurm job" in again
    mine.launch("cancel", "own.retry1")
    assert "Run own: failed" in mine.launch("status", "own").stdout  # a whole name is no prefix


def test_copies_of_a_command_in_a_step_start_nothing(by_cgroup: Cluster, project: Path) -> None:
    command = launch_command("train", *JOB)
    done = by_cgroup.login("srun", "--nodes=2", "--ntasks=2", *command, cwd=project, check=False, timeout=patience(120))
    assert done.returncode == 2
    assert done.stderr.count("launch: error: srun has started 2 copies of this command") == 1
    assert "launch train task._target_=speech.tasks.Tagger" in done.stderr
    assert "On 2 hosts: add cluster.nodes=2 and cluster=slurm" in done.stderr
    assert not (project / "runs").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.partition=nope", "cluster.partition=nope: Slurm has no such partition.\n  There are: train"),
        ("cluster.nodes=9", "cluster.nodes=9: partition train allows a job at most 3 nodes"),
        ("cluster.sbatch.gres=gpu:1", "gres=gpu:1"),
        ("cluster.mem=900G", "cluster.mem=900G: Slurm refuses it: Memory specification can not be satisfied"),
        ("cluster.constraint=fast", "cluster.constraint=fast: Slurm refuses it:"),
        ("cluster.time=00:01:00", "too short for one checkpoint"),
        ("run.dir=/dev/shm/runs", "is in this machine's memory"),
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
