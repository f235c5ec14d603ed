"""A loop of the user's own that saves and resumes: killed, stopped, preempted by Slurm, and the same as undisturbed."""

from __future__ import annotations

import csv
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.conftest import Launch
from tests.helpers import ROOT, launch, patience
from tests.infra import warm
from tests.infra.checkpoints import assert_same_tensors
from tests.infra.jobs_on_slurm import Project
from tests.infra.runs import records, summary
from tests.infra.slurm import Cluster, needs_slurm
from tests.system.test_wandb import read_back

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # checkpoints are read in this process alone
]
SCRIPT = Path(__file__).parent / "own_loop.py"


def assert_alike(run: Path, undisturbed: Path, steps: int) -> None:
    """Every step once, and bit by bit the same losses, evaluations, parameters and optimizer state."""
    mine, wanted = records(run), records(undisturbed)
    assert [record["step"] for record in mine] == list(range(1, steps + 1))
    names = {name for record in wanted for name in record if name.startswith(("train/", "eval/", "task/"))}
    for one, other in zip(mine, wanted, strict=True):
        assert {name: one.get(name) for name in names} == {name: other.get(name) for name in names}
    last = f"checkpoints/step_{steps:06d}"
    assert_same_tensors(run / last, undisturbed / last)
    assert summary(run)["verdict"] == "done"
    assert summary(run)["eval/loss"] == summary(undisturbed)["eval/loss"]


@pytest.mark.parametrize(
    "options",
    [
        ("strategy=fsdp", "checkpoint.async_save=false", "wandb.mode=disabled"),
        pytest.param(("strategy=ddp",), marks=pytest.mark.nightly),
    ],
)
def test_a_loop_that_is_killed_and_stopped_resumes_bit_by_bit(
    launch: Launch, tmp_path: Path, options: tuple[str, ...]
) -> None:
    whole = launch("run", "run.name=whole", "--", str(SCRIPT), *options)
    assert whole.returncode == 0, whole.stderr
    assert "rank 0 resumes at 0 with None" in whole.stdout
    run = tmp_path / "runs" / "mine"
    killed = launch("run", "run.name=mine", "cluster.max_restarts=1", "--", str(SCRIPT), *options, "kill=7", "stop=13")
    assert killed.returncode == 75, "it was restarted after the kill, and then stopped"
    if "checkpoint.async_save=false" in options:  # otherwise the first one may be under way when the rank is killed
        assert "rank 0 resumes at 5 with {'total':" in killed.stdout
    assert summary(run)["verdict"] == "stopped"
    assert json.loads(launch("status", "mine", "--json").stdout)["state"] == "stopped"
    resumed = launch("resume", "mine")
    assert resumed.returncode == 0, resumed.stderr
    at = records(tmp_path / "runs" / "whole")
    assert "rank 0 resumes at 14 with {'total':" in resumed.stdout, "it has stopped after the window that follows"
    assert "eval/one/loss" in at[3]
    assert "eval/other/loss" in at[19]
    assert_alike(run, tmp_path / "runs" / "whole", 20)

    assert "wire a step" in resumed.stdout
    rows = {row["run"]: row for row in csv.DictReader(launch("report", "mine", "whole", "--csv").stdout.splitlines())}
    assert {name: (row["task"], row["step"]) for name, row in rows.items()} == {
        "mine": ("own_loop.py", "20"), "whole": ("own_loop.py", "20"),
    }  # fmt: skip
    if "wandb.mode=disabled" in options:
        assert not [*run.glob("wandb*")]
    else:
        config, history, last, _ = read_back(run)
        assert (config["batch"]["global_size"], last["verdict"]) == (20, "done")
        assert [step["step"] for step in history] == list(range(1, 21)), "each step once, over three starts"


def test_a_plain_process_trains_and_resumes_without_torchrun(tmp_path: Path) -> None:
    for steps in (1, 2):
        command = [sys.executable, "-m", "jobs.own_loop", "run.name=alone", "run.calibrate_s=0", f"train.steps={steps}"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = warm.run(command, patience(60), cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        assert ("Resuming from" in done.stdout) == (steps == 2)
    run = tmp_path / "runs" / "alone"
    assert [record["step"] for record in records(run)] == [1, 2]
    assert json.loads((run / "loop_plan.json").read_text())["cluster"]["workers_per_node"] == 1


def test_a_script_without_the_engine_has_no_record(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print('plain')\n")
    assert launch("run", "run.name=plain", "--", "plain.py").returncode == 0
    assert not [*(tmp_path / "runs" / "plain").glob("wandb*")]
    assert "its script has no record: it does not call engine.resume()" in launch("report", "plain").stdout


@pytest.mark.nightly
@pytest.mark.root
@needs_slurm
def test_the_job_that_comes_along_is_preempted_by_slurm(by_cgroup: Cluster, project: Path, tmp_path: Path) -> None:
    script = shutil.copy(ROOT / "jobs" / "own_loop.py", project)
    words = ["run.name=own", "--", Path(script).name, "train.steps=60", "train.eval_every=25"]
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(script, alone)
    done = launch("run", *words, cwd=alone)
    assert done.returncode == 0, done.stderr

    mine = Project(by_cgroup, project)
    said = mine.launch("run", "cluster=slurm", "cluster.nodes=2", "cluster.workers_per_node=1", *words).stdout
    job = said.partition("as Slurm job ")[2].partition(":")[0]
    mine.wait_for_step(3)
    by_cgroup.login("scancel", "--signal=USR2", job)
    by_cgroup.wait(lambda: mine.count("requeued") == 1, "the requeue")
    mine.wait_for_start(2)
    mine.finish()
    assert_alike(mine.run, alone / "runs" / "own", 60)
    mine.nothing_is_left()
