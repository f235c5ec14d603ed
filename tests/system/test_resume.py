"""`launch resume` and `launch retry` on this machine, and the exit status of a run that is told to stop."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.helpers import patience
from tests.infra.checkpoints import assert_same_tensors
from tests.infra.runs import OWN, processes_of, records, start, summary, wait_for, wait_for_steps
from tests.system.test_wandb import read_back

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def commit(project: Path) -> str:
    """The user's code as it is now."""
    git = ["git", "-C", str(project), "-c", "user.name=a", "-c", "user.email=a@b"]
    (project / ".gitignore").write_text("runs/\n__pycache__/\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "--allow-empty", "-m", "as it is"]):
        subprocess.run([*git, *command], check=True)
    return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()


@pytest.mark.parametrize("number", [signal.SIGUSR2, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_a_scheduler_around_it_finds_a_run_that_goes_on(project: Path, launch: Launch, number: int) -> None:
    job = start(project, "task.trouble=slow", "train.steps=100000", "train.eval_every=1")
    run = project / "runs" / "own"
    wait_for_steps(run, 3)
    assert "is running" in launch("resume", "own").stderr
    job.send_signal(number)
    out, _ = job.communicate(timeout=patience(60))
    assert job.returncode == 75, out
    assert summary(run)["verdict"] == "stopped"
    (shown,) = json.loads(launch("runs", "--json").stdout)
    assert (shown["state"], shown["step"]) == ("stopped", records(run)[-1]["step"])
    steps = shown["step"] + 3
    done = launch("resume", "own", f"train.steps={steps}")
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in records(run)] == list(range(1, steps + 1))
    assert summary(run)["verdict"] == "done"
    assert processes_of(run) == []
    refused = launch("resume", "own")
    assert refused.returncode == 2
    assert "own: is done. `launch retry own` starts it again" in refused.stderr
    again = launch("retry", "own")
    assert again.returncode == 0, again.stderr
    assert_same_tensors(*(place / "checkpoints" / f"step_{steps:06d}" for place in (run, run.with_name("own.retry1"))))
    one, other = ([(r["step"], r["eval/loss"]) for r in records(p)] for p in (run, run.with_name("own.retry1")))
    assert one == other, "an evaluation that a stop left out is made up for"
    assert "Run own.retry1: done" in launch("status", "own.retry1").stdout


def test_a_scheduler_that_is_quicker_than_the_workers_finds_one_too(project: Path, launch: Launch) -> None:
    (project / "hold").touch()  # keeps the workers before their first step
    job = start(project, "train.steps=2", "task.trouble=held at the start", "cluster.grace_s=2")
    run = project / "runs" / "own"
    wait_for(lambda: (run / "logs" / "node0.log").exists(), "the agent")
    job.send_signal(signal.SIGTERM)
    out, _ = job.communicate(timeout=patience(60))
    assert job.returncode == 75, out
    assert not (run / "metrics.jsonl").exists()
    (project / "hold").unlink()
    done = launch("resume", "own")
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in records(run)] == [1, 2]


def test_a_run_that_is_done_goes_on_in_another_world(project: Path, launch: Launch) -> None:
    job = ("run.calibrate_s=0", "checkpoint.every=4", "wandb.mode=offline")
    was = commit(project)
    assert launch("train", *OWN, *job, "train.steps=6").returncode == 0
    run = project / "runs" / "own"
    assert summary(run)["commit"] == was
    before = (run / "plan.json").read_text()
    refused = launch("resume", "own", "cluster.workers_per_node=1")
    assert refused.returncode == 2
    assert "own: is done: 6 steps" in refused.stderr
    now = commit(project)
    done = launch("resume", "own", "train.steps=10", "cluster.workers_per_node=1")
    assert summary(run)["commits"] == [{"step": 6, "from": was, "to": now}]
    assert done.returncode == 0, done.stderr
    assert "own continues with cluster.workers_per_node null -> 1, train.steps 6 -> 10." in done.stdout
    assert [record["step"] for record in records(run)] == list(range(1, 11))
    assert [record["batch/world_size"] for record in records(run)] == [2] * 6 + [1] * 4
    assert {record["batch/global_size"] for record in records(run)} == {24}
    assert (summary(run)["verdict"], summary(run)["resumed"]) == ("done", 1)
    assert [(each["step"], each["to"]["world_size"]) for each in summary(run)["worlds"]] == [(6, 1)]
    assert (run / "plan.0.json").read_text() == before
    said = (run / "logs" / "rank0.attempt1.log").read_text()
    assert "6 steps done, at 1 rank instead of 2" in said
    assert f"The code has changed: it is {now}; the checkpoint was saved by {was}." in said
    _, history, _, _ = read_back(run)
    assert [row["step"] for row in history] == [*range(1, 11)], "the mirror goes on where it was, as the same run"


def test_cancel_ends_a_run_of_this_machine(project: Path, launch: Launch) -> None:
    job = start(project, "task.trouble=slow", "train.steps=1000")
    run = project / "runs" / "own"
    wait_for_steps(run, 2)
    done = launch("cancel", "own")
    assert done.returncode == 0, done.stderr
    assert job.wait(patience(10)) == 75
    assert json.loads(launch("status", "own", "--json").stdout)["state"] == "cancelled"
    assert processes_of(run) == []
    assert job.stdout is not None
    job.stdout.close()
